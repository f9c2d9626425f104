"""One step of the selective scan, in plain PyTorch."""

import torch
import torch.nn.functional as F

from ._examples import normal_numbers


def selective_state_update(state, x, dt, A, B, C, D=None, z=None, dt_bias=None, *, dt_softplus=False):
    """new_state = exp(step A) state + step x B;  out = (C . new_state + D x) silu(z), with step = dt + dt_bias.

    Returns (out, new_state). With heads: state (batch, heads, headdim, dstate); x, dt, z (batch, heads, headdim);
    A (heads, headdim, dstate); B, C (batch, groups, dstate), where head h reads group h // (heads / groups);
    D, dt_bias (heads, headdim). Without heads these axes are absent. The step passes softplus if dt_softplus.
    """
    acc = torch.float64 if x.dtype == torch.float64 else torch.float32
    x_, step, A, B, C = (tensor.to(acc) for tensor in (x, dt, A, B, C))
    if x.dim() == 3:
        B, C = (tensor.repeat_interleave(x.shape[1] // tensor.shape[1], dim=1) for tensor in (B, C))
    if dt_bias is not None:
        step = step + dt_bias.to(acc)
    if dt_softplus:
        step = F.softplus(step)
    B, C = B.unsqueeze(-2), C.unsqueeze(-2)
    s = torch.exp(step[..., None] * A) * state.to(acc) + (step * x_)[..., None] * B
    y = (s * C).sum(-1)
    if D is not None:
        y = y + D.to(acc) * x_
    if z is not None:
        y = y * F.silu(z.to(acc))
    return y.to(x.dtype), s.to(state.dtype)


def selective_state_update_(
    state, x, dt, A, B, C, D=None, z=None, dt_bias=None, *, dt_softplus=False, state_batch_indices=None
):
    """The same in place; row b uses state[state_batch_indices[b]] (none if negative: out is 0)."""
    indices = torch.arange(x.shape[0]) if state_batch_indices is None else state_batch_indices
    out = torch.zeros_like(x)
    for b, entry in enumerate(indices.tolist()):
        if entry >= 0:
            row = [None if tensor is None else tensor[b : b + 1] for tensor in (x, dt, B, C, z)]
            out[b : b + 1], state[entry : entry + 1] = selective_state_update(
                state[entry : entry + 1], row[0], row[1], A, row[2], row[3], D, row[4], dt_bias, dt_softplus=dt_softplus
            )
    return out


def example_inputs(
    *,
    dtype=torch.float32,
    device=None,
    generator=None,
    batch=3,
    nheads=4,
    headdim=5,
    dstate=6,
    ngroups=2,
    D=True,
    z=True,
    dt_bias=True,
    dt_softplus=True,
):
    """Small random arguments for selective_state_update; nheads None for the form without heads, where dim = headdim.

    Parameters and state have the accumulation dtype.
    """
    acc = torch.float64 if dtype == torch.float64 else torch.float32
    normal = normal_numbers(dtype, device, generator)

    channels = (headdim,) if nheads is None else (nheads, headdim)
    groups = () if nheads is None else (ngroups,)
    dt = normal(batch, *channels)
    inputs = {
        "state": normal(batch, *channels, dstate, dtype=acc),
        "x": normal(batch, *channels),
        "dt": dt if dt_softplus else 0.1 + 0.2 * dt.abs(),
        "A": -0.2 - normal(*channels, dstate, dtype=acc).abs(),
        "B": normal(batch, *groups, dstate),
        "C": normal(batch, *groups, dstate),
        "dt_softplus": dt_softplus,
    }
    if D:
        inputs["D"] = normal(*channels, dtype=acc)
    if z:
        inputs["z"] = normal(batch, *channels)
    if dt_bias:
        inputs["dt_bias"] = 0.1 * normal(*channels, dtype=acc)
    return inputs
