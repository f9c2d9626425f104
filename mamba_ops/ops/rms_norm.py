"""Root-mean-square norm with optional gate, residual and groups."""

from __future__ import annotations

import torch

from .. import _autograd
from .._check import Checker, accumulate_type, empty_gradient, tuple_text


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    z: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    *,
    eps: float = 1e-5,
    group_size: int | None = None,
    norm_before_gate: bool = True,
    residual_in_fp32: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    r"""Scale each row, or each group of its columns, by its root mean square.

    .. math::
        s &= x + \mathrm{residual} \\
        v &= s \cdot \mathrm{silu}(z) \text{ if the gate comes first, else } s \\
        \mathrm{rms} &= \sqrt{\mathrm{mean}_{\mathrm{group}}(v^2) + \mathrm{eps}} \\
        y &= v / \mathrm{rms} \cdot \mathrm{weight} + \mathrm{bias} \\
        \mathrm{out} &= y \cdot \mathrm{silu}(z) \text{ if norm\_before\_gate, else } y

    Args:
        x: (..., dim); float64, float32, bfloat16 or float16.
        weight: (dim,), any of these dtypes; absent means 1.
        bias: (dim,), any of these dtypes.
        z: gate, x's shape and dtype.
        residual: x's shape, any of these dtypes; added to x before the norm.
        eps: added to the mean of squares, inside the root; positive.
        group_size: columns a group; divides dim. Default: one group of dim columns.
        norm_before_gate: whether the gate multiplies the normalised row, or the row before the norm.
        residual_in_fp32: return x + residual in float32 (float64 for float64 input), not in residual's dtype.

    Returns:
        out: x's shape and dtype, contiguous.
        residual_out: x + residual, x's shape; shape (0,) without residual.
        rms: the divisor, float32 (float64 for float64 input); x's leading shape, with a last axis dim / group_size when
            `group_size` is given.

    Raises:
        RuntimeError: a shape, dtype, device, `eps` or `group_size` does not fit; the text names the argument.

    Source: Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019.

    Gradients: for x, weight, bias, z and residual; rms carries none. Once differentiable, in reverse mode.
    Autocast: leaves every argument as it is.
    Determinism: bit-identical from run to run and for any number of threads.

    Example:
        >>> import torch, mamba_ops
        >>> x = torch.tensor([[3.0, 4.0]])
        >>> out, _, rms = mamba_ops.rms_norm(x, eps=1e-12)
        >>> print(rms, out)
        tensor([3.5355]) tensor([[0.8485, 1.1314]])
    """
    return torch.ops.mamba.rms_norm(x, weight, bias, z, residual, eps, group_size, norm_before_gate, residual_in_fp32)


def _check(check, x, weight, bias, z, residual, group_size):
    if x.dim() < 1:
        check.fail(f"x must have shape (..., dim), got {tuple_text(x.shape)}")
    dim = x.shape[-1]
    check.shape("weight", weight, dim=dim)
    check.shape("bias", bias, dim=dim)
    _check_like_x(check, "z", z, x)
    _check_like_x(check, "residual", residual, x)
    check.floating("weight", weight)
    check.floating("bias", bias)
    check.same_dtype("z", z)
    check.floating("residual", residual)
    if group_size is not None and (group_size < 1 or dim % group_size != 0):
        check.fail(f"group_size must be positive and divide dim = {dim}, got {group_size}")


def _check_like_x(check, name, tensor, x):
    if tensor is not None and tensor.shape != x.shape:
        check.fail(f"{name} must have x's shape {tuple_text(x.shape)}, got {tuple_text(tensor.shape)}")


def _rms_shape(x, group_size):
    return x.shape[:-1] if group_size is None else (*x.shape[:-1], x.shape[-1] // group_size)


def _fake_fwd(x, weight, bias, z, residual, eps, group_size, norm_before_gate, residual_in_fp32):
    check = Checker("rms_norm", "x", x)
    _check(check, x, weight, bias, z, residual, group_size)
    if not eps > 0:
        check.fail(f"eps must be positive, got {eps}")
    acc = accumulate_type(x.dtype)
    if residual is None:
        residual_out = x.new_empty((0,), dtype=acc)
    else:
        residual_out = x.new_empty(x.shape, dtype=acc if residual_in_fp32 else residual.dtype)
    return x.new_empty(x.shape), residual_out, x.new_empty(_rms_shape(x, group_size), dtype=acc)


def _fake_bwd(dout, dresidual_out, x, weight, bias, z, residual, rms, group_size, norm_before_gate):
    check = Checker("rms_norm_bwd", "x", x)
    _check(check, x, weight, bias, z, residual, group_size)
    _check_like_x(check, "dout", dout, x)
    check.same_dtype("dout", dout)
    if residual is not None:
        _check_like_x(check, "dresidual_out", dresidual_out, x)
        check.floating("dresidual_out", dresidual_out)
    check.floating("rms", rms)
    if rms.shape != tuple(_rms_shape(x, group_size)):
        shape = tuple_text(x.shape)
        check.fail(
            f"rms must be the one that rms_norm returned for x of shape {shape}, got shape {tuple_text(rms.shape)}"
        )
    separate = residual is not None and residual.dtype != x.dtype
    gradients = [empty_gradient(x, argument) for argument in (weight, bias, z, residual if separate else None)]
    return x.new_empty(x.shape), *gradients


def _fake_bwd_(dy, x, weight, rms, dx, dweight):
    check = Checker("rms_norm_bwd_", "x", x)
    if x.dim() < 1:
        check.fail(f"x must have shape (..., dim), got {tuple_text(x.shape)}")
    _check_like_x(check, "dy", dy, x)
    _check_like_x(check, "dx", dx, x)
    check.shape("weight", weight, dim=x.shape[-1])
    check.shape("dweight", dweight, dim=x.shape[-1])
    if rms.shape != x.shape[:-1]:
        shape = tuple_text(x.shape)
        check.fail(f"rms must have x's leading shape (x has shape {shape}), got {tuple_text(rms.shape)}")
    check.same_dtype("dy", dy)
    check.same_dtype("dx", dx)
    check.floating("weight", weight)
    check.floating("dweight", dweight)
    check.floating("rms", rms)


def register(namespace: str) -> None:
    """Fakes, autograd and autocast of the operators in `namespace`."""
    ops = getattr(torch.ops, namespace)
    library = _autograd.library(namespace)
    for name, fake in (("rms_norm_fwd", _fake_fwd), ("rms_norm_bwd", _fake_bwd), ("rms_norm_bwd_", _fake_bwd_)):
        torch.library.register_fake(f"{namespace}::{name}", fake, lib=library)

    def forward(x, weight, bias, z, residual, eps, group_size, norm_before_gate, residual_in_fp32, save):
        return ops.rms_norm_fwd(x, weight, bias, z, residual, eps, group_size, norm_before_gate, residual_in_fp32)

    def backward(
        dout, dresidual_out, x, weight, bias, z, residual, eps, group_size, norm_before_gate, residual_in_fp32, rms
    ):
        return ops.rms_norm_bwd(dout, dresidual_out, x, weight, bias, z, residual, rms, group_size, norm_before_gate)

    _autograd.define(
        namespace,
        "rms_norm",
        num_outputs=3,
        forward=forward,
        backward=backward,
        gradients_of=(0, 1, 2, 3, 4),
        non_differentiable=(2,),
        same_gradient=((4, 0),),
    )
