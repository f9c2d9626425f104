"""Selective scan: the recurrence of Mamba-1."""

from __future__ import annotations

from functools import partial

import torch

from .. import _autograd, _library
from .._check import Checker, accumulate_type, dtype_name, empty_gradient, empty_sequence, tuple_text

CHUNK = {"cpu": 32, "cuda": 8}  # times between stored states; selective_scan_chunk_* in csrc/params/selective_scan.h


def selective_scan(
    u: torch.Tensor,
    delta: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor | None = None,
    z: torch.Tensor | None = None,
    delta_bias: torch.Tensor | None = None,
    *,
    delta_softplus: bool = False,
    initial_state: torch.Tensor | None = None,
    seq_idx: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    r"""Run a diagonal state-space recurrence with input-dependent step sizes over every channel.

    .. math::
        \Delta_t &= \mathrm{softplus}(\mathrm{delta}_t + \mathrm{delta\_bias}) \\
        h_t[n] &= e^{\Delta_t A[n]} h_{t-1}[n] + \Delta_t B_t[n] u_t \\
        y_t &= \textstyle\sum_n C_t[n] h_t[n] + D u_t \\
        \mathrm{out}_t &= y_t \cdot \mathrm{silu}(z_t)

    Args:
        u: (batch, dim, seqlen); float64, float32, bfloat16 or float16. Any strides; memory in the order
            (batch, dim, seqlen) or (batch, seqlen, dim) is fast.
        delta: u's shape and dtype: step size, in units of time, before bias and softplus.
        A: (dim, dstate), any of these dtypes: decay rate, per unit of time. Keep it float32 in half precision.
        B: input projection: constant (dim, dstate); shared (batch, dstate, seqlen) or grouped (batch, ngroups, dstate,
            seqlen) in u's dtype, where channel d uses group d // (dim / ngroups).
        C: output projection, in one of the same forms, not necessarily B's.
        D: (dim,), skip connection; absent means 0.
        z: gate, u's shape and dtype.
        delta_bias: (dim,), added to delta.
        delta_softplus: apply softplus (the identity above 20) to delta + delta_bias.
        initial_state: (batch, dim, dstate), or (num_sequences, dim, dstate) with `cu_seqlens`; absent means 0.
        seq_idx: (batch, seqlen), int32 or int64: a new segment, with state 0, starts where the value changes;
            initial_state enters the first segment of a row.
        cu_seqlens: (num_sequences + 1,), int32 or int64, for batch 1: sequence s is the half-open range [cu_seqlens[s],
            cu_seqlens[s + 1]). Positions from cu_seqlens[-1] on are padding: never read, and 0 in out and gradients.

    Returns:
        out: u's shape and dtype; in (batch, seqlen, dim) memory when u.stride(1) == 1, else contiguous.
        last_state: initial_state's shape; float32 (float64 for float64 input): the state after the last position of the
            row, or of every sequence.

    Raises:
        RuntimeError: a shape, dtype, device or cu_seqlens does not fit; the text names the argument.

    Source: Gu and Dao, "Mamba: Linear-Time Sequence Modeling with Selective State Spaces", 2023.

    Gradients: for every floating argument, last_state's included. The state is kept every 8 positions and recomputed in
    between. Once differentiable, in reverse mode.
    Autocast: float32 u, delta, B, C and z are cast to the autocast dtype; A, D, delta_bias and states are not.
    Determinism: bit-identical from run to run and for any number of threads.

    Example:
        >>> import torch, mamba_ops
        >>> u = torch.ones(1, 1, 4)
        >>> A, B = torch.zeros(1, 1), torch.ones(1, 1)
        >>> out, last_state = mamba_ops.selective_scan(u, 0.5 * u, A, B, B)
        >>> print(out)
        tensor([[[0.5000, 1.0000, 1.5000, 2.0000]]])
    """
    return torch.ops.mamba.selective_scan(
        u, delta, A, B, C, D, z, delta_bias, initial_state, seq_idx, cu_seqlens, delta_softplus
    )


def _check_projection(check, name, tensor, batch, dim, dstate, seqlen):
    if tensor.dim() == 2:
        check.shape(name, tensor, dim=dim, dstate=dstate)
        check.floating(name, tensor)
        return
    if tensor.dim() == 3:
        check.shape(name, tensor, batch=batch, dstate=dstate, seqlen=seqlen)
    elif tensor.dim() == 4:
        ngroups = tensor.shape[1]
        check.shape(name, tensor, batch=batch, ngroups=ngroups, dstate=dstate, seqlen=seqlen)
        if ngroups < 1 or dim % ngroups != 0:
            check.fail(f"{name} must have an ngroups that divides dim = {dim}, got {ngroups}")
    else:
        forms = "(dim, dstate), (batch, dstate, seqlen) or (batch, ngroups, dstate, seqlen)"
        check.fail(f"{name} must have shape {forms}, got {tuple_text(tensor.shape)}")
    check.same_dtype(name, tensor)


def _check(check, u, delta, A, B, C, D, z, delta_bias, initial_state, seq_idx, cu_seqlens):
    """The checks of csrc/ops/selective_scan.cpp; returns the shape of the states and their leading axis' name."""
    check.dims("u", u, 3, "(batch, dim, seqlen)")
    batch, dim, seqlen = u.shape
    check.dims("A", A, 2, "(dim, dstate)")
    dstate = A.shape[1]
    check.shape("delta", delta, batch=batch, dim=dim, seqlen=seqlen)
    check.same_dtype("delta", delta)
    check.shape("A", A, dim=dim, dstate=dstate)
    check.floating("A", A)
    _check_projection(check, "B", B, batch, dim, dstate, seqlen)
    _check_projection(check, "C", C, batch, dim, dstate, seqlen)
    check.shape("D", D, dim=dim)
    check.floating("D", D)
    check.shape("z", z, batch=batch, dim=dim, seqlen=seqlen)
    check.same_dtype("z", z)
    check.shape("delta_bias", delta_bias, dim=dim)
    check.floating("delta_bias", delta_bias)
    leading = check.packing(seq_idx, cu_seqlens, batch, seqlen)
    state = {"batch" if cu_seqlens is None else "num_sequences": leading, "dim": dim, "dstate": dstate}
    check.shape("initial_state", initial_state, **state)
    check.floating("initial_state", initial_state)
    return state


def _chunk_states_size(namespace, u, A):
    """Flat, because a size that is 1 for short sequences would make compiled programs specialise on it."""
    chunk = CHUNK["cuda" if namespace != _library.NAMESPACE or u.is_cuda else "cpu"]
    return u.shape[0] * ((u.shape[2] + chunk - 1) // chunk) * A.shape[1] * u.shape[1]


def _fake_fwd(
    namespace, u, delta, A, B, C, D, z, delta_bias, initial_state, seq_idx, cu_seqlens, delta_softplus, save_states
):
    check = Checker("selective_scan", "u", u)
    state = _check(check, u, delta, A, B, C, D, z, delta_bias, initial_state, seq_idx, cu_seqlens)
    acc = accumulate_type(u.dtype)
    last_state = u.new_empty(tuple(state.values()), dtype=acc)
    chunk_states = u.new_empty((_chunk_states_size(namespace, u, A) if save_states else 0,), dtype=acc)
    return empty_sequence(u), last_state, chunk_states


def _fake_bwd(
    namespace,
    dout,
    dlast_state,
    u,
    delta,
    A,
    B,
    C,
    D,
    z,
    delta_bias,
    initial_state,
    seq_idx,
    cu_seqlens,
    delta_softplus,
    chunk_states,
):
    check = Checker("selective_scan_bwd", "u", u)
    state = _check(check, u, delta, A, B, C, D, z, delta_bias, initial_state, seq_idx, cu_seqlens)
    batch, dim, seqlen = u.shape
    check.shape("dout", dout, batch=batch, dim=dim, seqlen=seqlen)
    check.same_dtype("dout", dout)
    check.shape("dlast_state", dlast_state, **state)
    check.floating("dlast_state", dlast_state)
    size, acc = _chunk_states_size(namespace, u, A), accumulate_type(u.dtype)
    if chunk_states.dtype != acc or chunk_states.shape != (size,):
        check.fail(
            f"chunk_states must be the contiguous {dtype_name(acc)} tensor of {size} numbers that selective_scan_fwd "
            f"returned, got {dtype_name(chunk_states.dtype)} of shape {tuple_text(chunk_states.shape)}"
        )
    check.device("chunk_states", chunk_states)
    dz = u.new_empty((0,)) if z is None else empty_sequence(u)
    dA, dB, dC, dD, ddelta_bias, dinitial_state = (
        empty_gradient(u, argument) for argument in (A, B, C, D, delta_bias, initial_state)
    )
    return empty_sequence(u), empty_sequence(u), dA, dB, dC, dD, dz, ddelta_bias, dinitial_state


def register(namespace: str) -> None:
    """Fakes, autograd and autocast of the operators in `namespace`."""
    ops = getattr(torch.ops, namespace)
    library = _autograd.library(namespace)
    torch.library.register_fake(f"{namespace}::selective_scan_fwd", partial(_fake_fwd, namespace), lib=library)
    torch.library.register_fake(f"{namespace}::selective_scan_bwd", partial(_fake_bwd, namespace), lib=library)
    _autograd.define(
        namespace,
        "selective_scan",
        num_outputs=2,
        forward=lambda *arguments: ops.selective_scan_fwd(*arguments),
        backward=lambda *arguments: ops.selective_scan_bwd(*arguments),
        gradients_of=range(9),
    )
    _autograd.define_autocast(namespace, "selective_scan", positions=(0, 1, 3, 4, 6))
