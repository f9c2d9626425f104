"""Linear recurrences with a gate for every step, and the gated scan, whose gates are sigmoids."""

from __future__ import annotations

import math

import torch

from .. import _autograd
from .._check import Checker, accumulate_type, dtype_name, empty_gradient, tuple_text

CHUNK = 64  # steps between kept states; recurrence_chunk in csrc/params/linear_recurrence.h
MAX_AXES = 9  # of x; recurrence_axes there, and time
GATES = {"linear_recurrence": "gates", "gated_scan": "logits"}  # what the operators call their second argument


def linear_recurrence(
    x: torch.Tensor,
    gates: torch.Tensor,
    initial_state: torch.Tensor | None = None,
    *,
    dim: int = 1,
    reverse: bool = False,
    return_states: bool = True,
    seq_idx: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    r"""Run a first-order linear recurrence over time: the core of minimal gated RNNs and of the RG-LRU.

    .. math::
        h_t = \mathrm{gates}_t \, h_{t-1} + x_t

    Args:
        x: (batch, ...) with two to nine axes, time along `dim`; float64, float32, bfloat16 or float16, any strides.
        gates: x's shape and dtype. Any values; |gates| <= 1 keeps the state bounded.
        initial_state: x's shape without time (num_sequences in place of batch with `cu_seqlens`), any of these dtypes;
            absent means 0.
        dim: the time axis of x, not 0. The other axes are independent of each other.
        reverse: time runs backwards: h_t = gates_t h_{t+1} + x_t, initial_state enters at the last time and last_state
            is the state at the first.
        return_states: whether the states of all times are wanted; without, only last_state is written.
        seq_idx: (batch, seqlen), int32 or int64: the state restarts from 0 where the value changes; initial_state
            enters the first segment of a row (the last one with `reverse`).
        cu_seqlens: (num_sequences + 1,), int32 or int64, for batch 1: sequence s is the half-open range [cu_seqlens[s],
            cu_seqlens[s + 1]). Times from cu_seqlens[-1] on are padding: never read, and 0 in states and gradients.

    Returns:
        states: h of all times, x's shape and dtype, contiguous; shape (0,) without `return_states`.
        last_state: initial_state's shape, float32 (float64 for float64 input), contiguous: the state after the last
            step of the row, or of every sequence.

    Raises:
        RuntimeError: a shape, dtype, device, dim or cu_seqlens does not fit; the text names the argument.

    Source: Martin and Cundy, "Parallelizing Linear Recurrent Neural Nets Over Sequence Length", 2018.

    Gradients: for x, gates and initial_state, from states and last_state. Every 64th state is kept, the others are
    computed again. Once differentiable, in reverse mode.
    Autocast: x and gates are cast to the autocast dtype; states are not.
    Determinism: bit-identical from run to run and for any number of threads.

    Example:
        >>> import torch, mamba_ops
        >>> x = torch.tensor([[1.0, 2.0, 3.0]])
        >>> states, last_state = mamba_ops.linear_recurrence(x, torch.full_like(x, 0.5))
        >>> print(states, last_state)
        tensor([[1.0000, 2.5000, 4.2500]]) tensor([4.2500])
    """
    return torch.ops.mamba.linear_recurrence(x, gates, initial_state, seq_idx, cu_seqlens, dim, reverse, return_states)


def gated_scan(
    x: torch.Tensor,
    logits: torch.Tensor,
    initial_state: torch.Tensor | None = None,
    *,
    dim: int = 1,
    reverse: bool = False,
    return_states: bool = True,
    seq_idx: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    r"""Run a recurrence whose gates are sigmoids, without the gates ever being stored.

    .. math::
        h_t = \sigma(\mathrm{logits}_t) \, h_{t-1} + x_t

    Args:
        x: (batch, ...) with two to nine axes, time along `dim`; float64, float32, bfloat16 or float16, any strides.
        logits: x's shape and dtype: the gates before the sigmoid.
        initial_state: as in `linear_recurrence`, like the other arguments.
        dim: the time axis of x, not 0.
        reverse: time runs backwards.
        return_states: whether the states of all times are wanted.
        seq_idx: (batch, seqlen): the state restarts from 0 where the value changes.
        cu_seqlens: (num_sequences + 1,), for batch 1: sequences behind one another, then padding.

    Returns:
        states: h of all times, x's shape and dtype, contiguous; shape (0,) without `return_states`.
        last_state: initial_state's shape, float32 (float64 for float64 input), contiguous.

    Raises:
        RuntimeError: a shape, dtype, device, dim or cu_seqlens does not fit; the text names the argument.

    Source: Martin and Cundy, "Parallelizing Linear Recurrent Neural Nets Over Sequence Length", 2018.

    Gradients: for x, logits and initial_state, from states and last_state. Every 64th state is kept, the others are
    computed again. Once differentiable, in reverse mode.
    Autocast: x and logits are cast to the autocast dtype; states are not.
    Determinism: bit-identical from run to run and for any number of threads.

    Example:
        >>> import torch, mamba_ops
        >>> x = torch.tensor([[1.0, 2.0, 3.0]])
        >>> states, last_state = mamba_ops.gated_scan(x, torch.zeros_like(x))
        >>> print(states, last_state)
        tensor([[1.0000, 2.5000, 4.2500]]) tensor([4.2500])
    """
    return torch.ops.mamba.gated_scan(x, logits, initial_state, seq_idx, cu_seqlens, dim, reverse, return_states)


def _time_axis(check, x, dim):
    axes = x.dim()
    if axes < 2:
        check.fail(f"x must have shape (batch, ...) with at least two axes, got {tuple_text(x.shape)}")
    if axes > MAX_AXES:
        check.fail(f"x must have at most {MAX_AXES} axes, got {tuple_text(x.shape)}")
    axis = dim + axes if dim < 0 else dim
    if axis < 1 or axis >= axes:
        check.fail(f"dim must name an axis of x other than the first, the batch, got {dim}")
    return axis


def _check_like_x(check, name, tensor, x):
    if tensor is not None and tensor.shape != x.shape:
        check.fail(f"{name} must have x's shape {tuple_text(x.shape)}, got {tuple_text(tensor.shape)}")
    check.same_dtype(name, tensor)


def _check_state(check, name, tensor, shape, packed):
    if tensor is not None and tensor.shape != shape:
        where = ", num_sequences in place of batch" if packed else ""
        check.fail(
            f"{name} must have x's shape without time{where}: {tuple_text(shape)}, got {tuple_text(tensor.shape)}"
        )
    check.floating(name, tensor)


def _check(check, gates_name, x, gates, initial_state, seq_idx, cu_seqlens, axis):
    """The checks of csrc/ops/linear_recurrence.cpp; returns the shape of the states."""
    _check_like_x(check, gates_name, gates, x)
    sequences = check.packing(seq_idx, cu_seqlens, x.shape[0], x.shape[axis])
    state = (sequences, *x.shape[1:axis], *x.shape[axis + 1 :])
    _check_state(check, "initial_state", initial_state, state, cu_seqlens is not None)
    return state


def _chunk_states_size(x, axis):
    """Flat, because a size that is 1 for short sequences would make compiled programs specialise on it."""
    return (x.shape[axis] + CHUNK - 1) // CHUNK * math.prod((*x.shape[:axis], *x.shape[axis + 1 :]))


def _fake_fwd(op):
    def fake(x, gates, initial_state, seq_idx, cu_seqlens, dim, reverse, return_states, save_states):
        check = Checker(op, "x", x)
        axis = _time_axis(check, x, dim)
        state = _check(check, GATES[op], x, gates, initial_state, seq_idx, cu_seqlens, axis)
        acc = accumulate_type(x.dtype)
        states = x.new_empty(x.shape if return_states else (0,))
        chunk_states = x.new_empty((_chunk_states_size(x, axis) if save_states else 0,), dtype=acc)
        return states, x.new_empty(state, dtype=acc), chunk_states

    return fake


def _fake_bwd(op):
    def fake(dstates, dlast_state, x, gates, initial_state, seq_idx, cu_seqlens, dim, reverse, chunk_states):
        check = Checker(f"{op}_bwd", "x", x)
        axis = _time_axis(check, x, dim)
        state = _check(check, GATES[op], x, gates, initial_state, seq_idx, cu_seqlens, axis)
        _check_like_x(check, "dstates", dstates, x)
        _check_state(check, "dlast_state", dlast_state, state, cu_seqlens is not None)
        size, acc = _chunk_states_size(x, axis), accumulate_type(x.dtype)
        if chunk_states.dtype != acc or chunk_states.shape != (size,):
            check.fail(
                f"chunk_states must be the contiguous {dtype_name(acc)} tensor of {size} numbers that the forward "
                f"returned, got {dtype_name(chunk_states.dtype)} of shape {tuple_text(chunk_states.shape)}"
            )
        check.device("chunk_states", chunk_states)
        return tuple(empty_gradient(x, argument) for argument in (x, gates, initial_state))

    return fake


def self_test(reference, dtype, generator) -> None:
    """What `python -m mamba_ops` runs: both operators against their definitions."""
    from ..testing import check_values

    for gated, function in ((False, linear_recurrence), (True, gated_scan)):
        inputs = reference.example_inputs(dtype=dtype, generator=generator, gated=gated)
        check_values(function, inputs, getattr(reference, function.__name__))


def register(namespace: str) -> None:
    """Fakes, autograd and autocast of the operators in `namespace`."""
    library = _autograd.library(namespace)
    for name in GATES:
        torch.library.register_fake(f"{namespace}::{name}_fwd", _fake_fwd(name), lib=library)
        torch.library.register_fake(f"{namespace}::{name}_bwd", _fake_bwd(name), lib=library)
        _define(namespace, name)
        _autograd.define_autocast(namespace, name, (0, 1))


def _define(namespace, name):
    ops = getattr(torch.ops, namespace)
    raw_forward, raw_backward = getattr(ops, f"{name}_fwd"), getattr(ops, f"{name}_bwd")

    def backward(dstates, dlast_state, x, gates, initial_state, seq_idx, cu_seqlens, dim, reverse, return_states, kept):
        if not return_states:
            dstates = None
        return raw_backward(dstates, dlast_state, x, gates, initial_state, seq_idx, cu_seqlens, dim, reverse, kept)

    _autograd.define(
        namespace,
        name,
        num_outputs=2,
        forward=lambda *arguments: raw_forward(*arguments),
        backward=backward,
        gradients_of=(0, 1, 2),
    )
