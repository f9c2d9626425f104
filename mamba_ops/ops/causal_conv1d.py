"""Causal depthwise convolution over time."""

from __future__ import annotations

import torch

from .. import _autograd
from .._check import Checker, empty_gradient, empty_sequence, tuple_text

ACTIVATIONS = {None: "none", "silu": "silu", "swish": "silu"}


def causal_conv1d(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    activation: str | None = None,
    initial_state: torch.Tensor | None = None,
    seq_idx: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    r"""Convolve every channel with its own short filter over the present and the past samples.

    .. math::
        p_t &= \mathrm{bias} + \sum_{k=0}^{\mathrm{width}-1} \mathrm{weight}_k \, x_{t-\mathrm{width}+1+k} \\
        \mathrm{out}_t &= p_t \text{, or } p_t \, \sigma(p_t) \text{ with activation "silu"}

    The sum stays inside the sequence of t. Samples before the first are those of `initial_state`, or zero.

    Args:
        x: (batch, dim, seqlen), any strides; float64, float32, bfloat16 or float16. A transposed (batch, seqlen, dim)
            tensor is read as it is.
        weight: (dim, width), any width >= 1, any of these dtypes; weight[:, -1] multiplies the present sample.
        bias: (dim,), any of these dtypes.
        activation: None, "silu" or "swish" (the same).
        initial_state: (batch, dim, width - 1), or (num_sequences, dim, width - 1) with `cu_seqlens`; any of these
            dtypes. The samples before the first; the last column is the most recent.
        seq_idx: (batch, seqlen), int32 or int64. A new sequence starts wherever the value changes along a row;
            `initial_state` belongs to a row's first sequence. Negative values mark padding, where out is 0.
        cu_seqlens: (num_sequences + 1,), int32 or int64; batch must be 1. Sequence s is the range
            cu_seqlens[s] .. cu_seqlens[s + 1]. What follows the last sequence is never read; out is 0 there.

    Returns:
        out: (batch, dim, seqlen) in x's dtype; in (batch, seqlen, dim) memory when x.stride(1) == 1, else contiguous.
        last_state: the last width - 1 samples of each row (of each sequence with `cu_seqlens`), the `initial_state` of
            the call that continues it; in x's dtype, contiguous.

    Raises:
        ValueError: an unknown `activation`.
        RuntimeError: a shape, dtype or device does not fit, or `cu_seqlens` decreases or ends beyond seqlen; the text
            names the argument.

    Source: Gu and Dao, "Mamba: Linear-Time Sequence Modeling with Selective State Spaces", 2023.

    Gradients: for x, weight, bias and initial_state, from out and last_state. Once differentiable, in reverse mode.
    Autocast: x is cast to the autocast dtype; weight, bias and states keep theirs.
    Determinism: bit-identical from run to run and for any number of threads.

    Example:
        >>> import torch, mamba_ops
        >>> x = torch.tensor([[[1.0, 2.0, 3.0]]])
        >>> out, last_state = mamba_ops.causal_conv1d(x, torch.tensor([[10.0, 1.0]]))
        >>> print(out, last_state)
        tensor([[[ 1., 12., 23.]]]) tensor([[[3.]]])
    """
    name = activation_name("causal_conv1d", activation)
    return torch.ops.mamba.causal_conv1d(x, weight, bias, initial_state, seq_idx, cu_seqlens, name)


def activation_name(op: str, activation: str | None) -> str:
    """The operators' name of an activation."""
    if activation not in ACTIVATIONS:
        raise ValueError(f"{op}: activation must be None, 'silu' or 'swish', got {activation!r}")
    return ACTIVATIONS[activation]


def _check(check, x, weight, bias, initial_state, seq_idx, cu_seqlens, activation):
    """The checks of csrc/ops/causal_conv1d.cpp; returns the shape of the states."""
    check.dims("x", x, 3, "(batch, dim, seqlen)")
    check.dims("weight", weight, 2, "(dim, width)")
    if activation not in ("none", "silu"):
        check.fail(f"activation must be none or silu, got {activation}")
    batch, dim, seqlen = x.shape
    width = weight.shape[1]
    check.shape("weight", weight, dim=dim, width=width)
    if width < 1:
        check.fail(f"weight must have shape (dim, width) with width >= 1, got {tuple_text(weight.shape)}")
    check.shape("bias", bias, dim=dim)
    check.floating("weight", weight)
    check.floating("bias", bias)
    check.floating("initial_state", initial_state)
    sequences = check.packing(seq_idx, cu_seqlens, batch, seqlen)
    leading = "batch" if cu_seqlens is None else "num_sequences"
    state = {leading: sequences, "dim": dim, "width - 1": width - 1}
    check.shape("initial_state", initial_state, **state)
    return state


def _fake_fwd(x, weight, bias, initial_state, seq_idx, cu_seqlens, activation):
    check = Checker("causal_conv1d", "x", x)
    state = _check(check, x, weight, bias, initial_state, seq_idx, cu_seqlens, activation)
    return empty_sequence(x), x.new_empty(tuple(state.values()))


def _fake_bwd(dout, dlast_state, x, weight, bias, initial_state, seq_idx, cu_seqlens, activation):
    check = Checker("causal_conv1d_bwd", "x", x)
    state = _check(check, x, weight, bias, initial_state, seq_idx, cu_seqlens, activation)
    batch, dim, seqlen = x.shape
    check.shape("dout", dout, batch=batch, dim=dim, seqlen=seqlen)
    check.shape("dlast_state", dlast_state, **state)
    check.same_dtype("dout", dout)
    check.same_dtype("dlast_state", dlast_state)
    gradients = [empty_gradient(x, argument) for argument in (weight, bias, initial_state)]
    return empty_sequence(x), *gradients


def register(namespace: str) -> None:
    """Fakes, autograd and autocast of the operators in `namespace`."""
    ops = getattr(torch.ops, namespace)
    library = _autograd.library(namespace)
    for name, fake in (("causal_conv1d_fwd", _fake_fwd), ("causal_conv1d_bwd", _fake_bwd)):
        torch.library.register_fake(f"{namespace}::{name}", fake, lib=library)

    def forward(x, weight, bias, initial_state, seq_idx, cu_seqlens, activation, save):
        return ops.causal_conv1d_fwd(x, weight, bias, initial_state, seq_idx, cu_seqlens, activation)

    def backward(dout, dlast_state, x, weight, bias, initial_state, seq_idx, cu_seqlens, activation):
        return ops.causal_conv1d_bwd(dout, dlast_state, x, weight, bias, initial_state, seq_idx, cu_seqlens, activation)

    _autograd.define(
        namespace,
        "causal_conv1d",
        num_outputs=2,
        forward=forward,
        backward=backward,
        gradients_of=(0, 1, 2, 3),
    )
    _autograd.define_autocast(namespace, "causal_conv1d", (0,))
