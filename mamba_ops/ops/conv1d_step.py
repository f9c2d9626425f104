"""One step of the causal convolution, with its cache: functional and differentiable, or in place for decoding."""

from __future__ import annotations

import torch

from .. import _autograd
from .._check import Checker, empty_gradient, refuse_gradients, tuple_text
from .causal_conv1d import activation_name


def conv1d_step(
    x: torch.Tensor,
    conv_state: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    activation: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    r"""Convolve the next sample (or samples) with the past ones in the cache; returns the new cache, changes nothing.

    .. math::
        s &= [\mathrm{conv\_state}, x]; \quad \mathrm{new\_state} = \text{its last state\_len columns} \\
        p &= \mathrm{bias} + \textstyle\sum_{k=1}^{\mathrm{width}} \mathrm{weight}[-k] \, s[-k] \\
        \mathrm{out} &= p \text{, or } p \, \sigma(p) \text{ with activation "silu"}

    Args:
        x: (batch, dim), or (batch, dim, seqlen) for several samples at once; float64, float32, bfloat16 or float16.
        conv_state: (batch, dim, state_len), state_len >= width - 1, oldest sample first, any of these dtypes. With
            state_len = width - 1 it is `causal_conv1d`'s state; with state_len = width, a register that includes the
            present sample.
        weight: (dim, width), any of these dtypes; weight[:, -1] multiplies the present sample.
        bias: (dim,), any of these dtypes.
        activation: None, "silu" or "swish" (the same).

    Returns:
        out: x's shape and dtype, contiguous.
        new_state: conv_state's shape and dtype, contiguous.

    Raises:
        ValueError: an unknown `activation`.
        RuntimeError: a shape, dtype or device does not fit; the text names the argument.

    Source: Gu and Dao, "Mamba: Linear-Time Sequence Modeling with Selective State Spaces", 2023.

    Gradients: for x, conv_state, weight and bias, from out and new_state: back-propagation through time works by
    chaining steps. Once differentiable, in reverse mode.
    Autocast: x is cast to the autocast dtype; weight, bias and states keep theirs.
    Determinism: bit-identical from run to run and for any number of threads.

    Example:
        >>> import torch, mamba_ops
        >>> state, weight = torch.zeros(1, 1, 1), torch.tensor([[10.0, 1.0]])
        >>> for sample in (1.0, 2.0, 3.0):
        ...     out, state = mamba_ops.conv1d_step(torch.tensor([[sample]]), state, weight)
        ...     print(out)
        tensor([[1.]])
        tensor([[12.]])
        tensor([[23.]])
    """
    name = activation_name("conv1d_step", activation)
    return torch.ops.mamba.conv1d_step(x, conv_state, weight, bias, name)


def conv1d_step_(
    x: torch.Tensor,
    conv_state: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    activation: str | None = None,
    cache_seqlens: torch.Tensor | None = None,
    conv_state_indices: torch.Tensor | None = None,
) -> torch.Tensor:
    r"""`conv1d_step` that writes the new cache into `conv_state`; for decoding.

    .. math::
        \mathrm{conv\_state} \leftarrow \text{the last state\_len columns of } [\mathrm{conv\_state}, x]

    Args:
        x, weight, bias, activation: as in `conv1d_step`.
        conv_state: (batch, dim, state_len), or (entries, dim, state_len) with `conv_state_indices`; written in place.
        cache_seqlens: (batch,), int32 or int64: the cache is circular, the next sample of row b goes to column
            cache_seqlens[b] % state_len, and the sample j steps back stands j columns before.
        conv_state_indices: (batch,), int32 or int64: row b uses entry conv_state_indices[b]. A negative one is padding:
            out is 0 and no entry is touched. Two rows with one index: undefined.

    Returns:
        out: x's shape and dtype, contiguous.

    Raises:
        ValueError: an unknown `activation`.
        RuntimeError: a shape, dtype, device or index does not fit, or an argument requires grad while grad mode is on.

    Source: as `conv1d_step`.

    Gradients: none; use `conv1d_step`.
    Autocast: x is cast to the autocast dtype; weight, bias and states keep theirs.
    Determinism: bit-identical from run to run and for any number of threads.

    Example:
        >>> import torch, mamba_ops
        >>> state = torch.zeros(1, 1, 1)
        >>> out = mamba_ops.conv1d_step_(torch.tensor([[2.0]]), state, torch.tensor([[10.0, 1.0]]))
        >>> print(out, state)
        tensor([[2.]]) tensor([[[2.]]])
    """
    name = activation_name("conv1d_step_", activation)
    if torch.is_grad_enabled():
        refuse_gradients("conv1d_step_", x=x, conv_state=conv_state, weight=weight, bias=bias)
    return torch.ops.mamba.conv1d_step_.default(x, conv_state, weight, bias, name, cache_seqlens, conv_state_indices)


def _check(check, x, conv_state, weight, bias, activation, any_entries=False):
    """The checks of csrc/ops/conv1d_step.cpp."""
    if x.dim() not in (2, 3):
        check.fail(f"x must have shape (batch, dim) or (batch, dim, seqlen), got {tuple_text(x.shape)}")
    check.dims("weight", weight, 2, "(dim, width)")
    check.dims("conv_state", conv_state, 3, "(batch, dim, state_len)")
    if activation not in ("none", "silu"):
        check.fail(f"activation must be none or silu, got {activation}")
    batch, dim = x.shape[:2]
    width, state_len = weight.shape[1], conv_state.shape[2]
    check.shape("weight", weight, dim=dim, width=width)
    if width < 1:
        check.fail(f"weight must have shape (dim, width) with width >= 1, got {tuple_text(weight.shape)}")
    check.shape("bias", bias, dim=dim)
    if any_entries:
        check.shape("conv_state", conv_state, entries=conv_state.shape[0], dim=dim, state_len=state_len)
    else:
        check.shape("conv_state", conv_state, batch=batch, dim=dim, state_len=state_len)
    if state_len < width - 1:
        shape = tuple_text(conv_state.shape)
        check.fail(f"conv_state must hold at least width - 1 = {width - 1} samples, got shape {shape}")
    check.floating("weight", weight)
    check.floating("bias", bias)
    check.floating("conv_state", conv_state)


def _fake_fwd(x, conv_state, weight, bias, activation):
    _check(Checker("conv1d_step", "x", x), x, conv_state, weight, bias, activation)
    return x.new_empty(x.shape), conv_state.new_empty(conv_state.shape)


def _fake_(x, conv_state, weight, bias=None, activation="none", cache_seqlens=None, conv_state_indices=None):
    check = Checker("conv1d_step_", "x", x)
    _check(check, x, conv_state, weight, bias, activation, any_entries=conv_state_indices is not None)
    for name, index in (("cache_seqlens", cache_seqlens), ("conv_state_indices", conv_state_indices)):
        check.shape(name, index, batch=x.shape[0])
        check.index(name, index)
    return x.new_empty(x.shape)


def _fake_bwd(dout, dnew_state, x, conv_state, weight, bias, activation):
    check = Checker("conv1d_step_bwd", "x", x)
    _check(check, x, conv_state, weight, bias, activation)
    if dout is not None and dout.shape != x.shape:
        check.fail(f"dout must have x's shape {tuple_text(x.shape)}, got {tuple_text(dout.shape)}")
    check.same_dtype("dout", dout)
    check.shape("dnew_state", dnew_state, batch=x.shape[0], dim=x.shape[1], state_len=conv_state.shape[2])
    check.floating("dnew_state", dnew_state)
    return x.new_empty(x.shape), *(empty_gradient(x, argument) for argument in (conv_state, weight, bias))


def _fake_seed_bwd(d_y, state, weight, d_x, d_weight, d_bias=None):
    check = Checker("conv1d_step_bwd_", "d_y", d_y)
    if d_y.dim() not in (1, 2):
        check.fail(f"d_y must have shape (dim,) or (batch, dim), got {tuple_text(d_y.shape)}")
    if d_x.shape != d_y.shape:
        check.fail(f"d_x must have d_y's shape {tuple_text(d_y.shape)}, got {tuple_text(d_x.shape)}")
    dim, batched = d_y.shape[-1], d_y.dim() == 2
    width = weight.shape[1] if weight.dim() == 2 else weight.numel() // max(dim, 1)
    if width < 1 or weight.numel() != dim * width:
        shape = tuple_text(weight.shape)
        check.fail(f"weight must have shape (dim, width) or (dim * width,) with dim = {dim}, got {shape}")
    for name, tensor in (("weight", weight), ("d_weight", d_weight), ("state", state)):
        if batched and tensor is state:
            check.dims("state", state, 3, "(batch, dim, width)")
            check.shape("state", state, batch=d_y.shape[0], dim=dim, width=width)
        elif tensor.dim() == 2:
            check.shape(name, tensor, dim=dim, width=width)
        else:
            check.shape(name, tensor, **{"dim * width": dim * width})
    check.same_dtype("d_x", d_x)
    for name, tensor in (("state", state), ("weight", weight), ("d_weight", d_weight), ("d_bias", d_bias)):
        check.floating(name, tensor)
    check.shape("d_bias", d_bias, dim=dim)


def register(namespace: str) -> None:
    """Fakes, autograd and autocast of the operators in `namespace`."""
    ops = getattr(torch.ops, namespace)
    library = _autograd.library(namespace)
    fakes = {
        "conv1d_step_fwd": _fake_fwd,
        "conv1d_step_": _fake_,
        "conv1d_step_bwd": _fake_bwd,
        "conv1d_step_bwd_": _fake_seed_bwd,
    }
    for name, fake in fakes.items():
        torch.library.register_fake(f"{namespace}::{name}", fake, lib=library)
    _autograd.define(
        namespace,
        "conv1d_step",
        num_outputs=2,
        forward=lambda *arguments: ops.conv1d_step_fwd(*arguments[:-1]),
        backward=lambda *arguments: ops.conv1d_step_bwd(*arguments),
        gradients_of=range(4),
    )
    _autograd.define_autocast(namespace, "conv1d_step", positions=(0,))
    _autograd.define_autocast(namespace, "conv1d_step_", positions=(0,))
