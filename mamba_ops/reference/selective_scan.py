"""Selective scan (the recurrence of Mamba-1), in plain PyTorch: a loop over time."""

import itertools

import torch
import torch.nn.functional as F

from ._examples import borders, normal_numbers


def selective_scan(
    u,
    delta,
    A,
    B,
    C,
    D=None,
    z=None,
    delta_bias=None,
    *,
    delta_softplus=False,
    initial_state=None,
    seq_idx=None,
    cu_seqlens=None,
):
    """h[t] = exp(delta[t] A) h[t-1] + delta[t] B[t] u[t],  y[t] = C[t] . h[t] + D u[t],  out = y silu(z).

    Returns (out, last_state). u, delta, z (batch, dim, seqlen); A (dim, dstate); B and C each (dim, dstate),
    (batch, dstate, seqlen) or (batch, groups, dstate, seqlen), where channel d reads group d // (dim / groups);
    D, delta_bias (dim); initial_state (batch or sequences, dim, dstate).
    The step size is delta + delta_bias, passed through softplus if delta_softplus.
    seq_idx (batch, seqlen): the state restarts from zero wherever the value changes; initial_state enters the first
    sequence of the row. cu_seqlens (sequences + 1): batch is 1, sequence s is the range cu_seqlens[s] ..
    cu_seqlens[s + 1] with its own initial and last state; what follows the last sequence is padding, where out is 0.
    """
    if seq_idx is not None and cu_seqlens is not None:
        raise ValueError("selective_scan: seq_idx and cu_seqlens exclude each other")
    batch, dim, seqlen = u.shape
    dstate = A.shape[1]
    acc = torch.float64 if u.dtype == torch.float64 else torch.float32
    rows = {
        "u": u,
        "delta": delta,
        "z": z,
        "B": _per_channel(B, batch, dim, seqlen),
        "C": _per_channel(C, batch, dim, seqlen),
    }
    A = A.to(acc)
    D = A.new_zeros(dim) if D is None else D.to(acc)
    delta_bias = A.new_zeros(dim) if delta_bias is None else delta_bias.to(acc)

    if cu_seqlens is None:
        if initial_state is None:
            initial_state = A.new_zeros(batch, dim, dstate)
        out, last_state = _scan(rows, A, D, delta_bias, delta_softplus, initial_state.to(acc), seq_idx)
    else:
        ends = cu_seqlens.tolist()
        if initial_state is None:
            initial_state = A.new_zeros(len(ends) - 1, dim, dstate)
        initial_state = initial_state.to(acc)
        outs, states = [A.new_zeros(1, dim, 0)], [initial_state[:0]]
        for s, (start, end) in enumerate(itertools.pairwise(ends)):
            piece = {name: t if t is None else t[..., start:end] for name, t in rows.items()}
            out, state = _scan(piece, A, D, delta_bias, delta_softplus, initial_state[s : s + 1], None)
            outs.append(out)
            states.append(state)
        out = F.pad(torch.cat(outs, dim=2), (0, seqlen - ends[-1]))
        last_state = torch.cat(states)
    return out.to(u.dtype), last_state


def _per_channel(matrix, batch, dim, seqlen):
    """B or C in any of its three forms as (batch, dim, dstate, seqlen)."""
    if matrix.dim() == 2:
        return matrix[None, :, :, None].expand(batch, -1, -1, seqlen)
    if matrix.dim() == 3:
        return matrix[:, None].expand(-1, dim, -1, -1)
    return matrix.repeat_interleave(dim // matrix.shape[1], dim=1)


def _scan(rows, A, D, delta_bias, delta_softplus, state, seq_idx):
    u, delta, z, B, C = (
        rows[name] if rows[name] is None else rows[name].to(A.dtype) for name in ("u", "delta", "z", "B", "C")
    )
    step = delta + delta_bias[:, None]
    if delta_softplus:
        step = F.softplus(step)  # log1p(exp(x)) up to and at 20, x above
    outputs = [u.new_zeros(*u.shape[:2], 0)]
    for t, (step_t, u_t, B_t, C_t) in enumerate(zip(*(x.unbind(-1) for x in (step, u, B, C)))):
        if seq_idx is not None and t > 0:
            starts = (seq_idx[:, t] != seq_idx[:, t - 1])[:, None, None]
            state = torch.where(starts, 0, state)
        step_t = step_t[..., None]
        state = torch.exp(step_t * A) * state + step_t * B_t * u_t[..., None]
        outputs.append((C_t * state).sum(-1, keepdim=True))
    y = torch.cat(outputs, dim=2) + D[:, None] * u
    return (y if z is None else y * F.silu(z)), state.clone()


def example_inputs(
    *,
    dtype=torch.float32,
    device=None,
    generator=None,
    batch=2,
    dim=4,
    seqlen=11,
    dstate=3,
    ngroups=2,
    B="grouped",
    C="grouped",
    D=True,
    z=True,
    delta_bias=True,
    delta_softplus=True,
    initial_state=True,
    packing=None,
):
    """Small random arguments for selective_scan.

    B and C are "constant", "shared" or "grouped"; packing is None, "seq_idx" or "cu_seqlens" (with an empty sequence
    and a padded tail).
    Parameters and states have the accumulation dtype.
    """
    acc = torch.float64 if dtype == torch.float64 else torch.float32
    normal = normal_numbers(dtype, device, generator)
    packed, batch, sequences = borders(packing, batch, seqlen, device)
    inputs = {"delta_softplus": delta_softplus, **packed}
    shapes = {"constant": (dim, dstate), "shared": (batch, dstate, seqlen), "grouped": (batch, ngroups, dstate, seqlen)}

    inputs["u"] = normal(batch, dim, seqlen)
    delta = normal(batch, dim, seqlen, dtype=acc)
    inputs["delta"] = (delta if delta_softplus else 0.1 + 0.2 * delta.abs()).to(dtype)
    inputs["A"] = -0.2 - normal(dim, dstate, dtype=acc).abs()
    inputs["B"] = normal(*shapes[B], dtype=acc if B == "constant" else dtype)
    inputs["C"] = normal(*shapes[C], dtype=acc if C == "constant" else dtype)
    if D:
        inputs["D"] = normal(dim, dtype=acc)
    if z:
        inputs["z"] = normal(batch, dim, seqlen)
    if delta_bias:
        inputs["delta_bias"] = 0.1 * normal(dim, dtype=acc)
    if initial_state:
        inputs["initial_state"] = normal(sequences, dim, dstate, dtype=acc)
    return inputs
