"""Linear recurrences with a gate for every step, in plain PyTorch: a loop over time."""

import itertools

import torch

from ._examples import borders, normal_numbers


def linear_recurrence(
    x,
    gates,
    initial_state=None,
    *,
    dim=1,
    reverse=False,
    return_states=True,
    seq_idx=None,
    cu_seqlens=None,
):
    """h[t] = gates[t] h[t-1] + x[t].

    Returns (states, last_state): the states h of all times in x's shape and dtype, or an empty tensor if not
    return_states; last_state without the time axis, in the accumulation dtype.
    x, gates (batch, ...), time along `dim`; initial_state as x without the time axis, or (sequences, ...).
    reverse: time runs backwards, h[t] = gates[t] h[t+1] + x[t].
    seq_idx (batch, seqlen): the state restarts from zero wherever the value changes; initial_state enters the first
    sequence of the row (the last one, reversed). cu_seqlens (sequences + 1): batch is 1, sequence s is the range
    cu_seqlens[s] .. cu_seqlens[s + 1] with its own initial and last state; what follows the last sequence is padding,
    where the states are 0.
    """
    if seq_idx is not None and cu_seqlens is not None:
        raise ValueError("linear_recurrence: seq_idx and cu_seqlens exclude each other")
    acc = torch.float64 if x.dtype == torch.float64 else torch.float32
    shape, seqlen = list(x.shape), x.shape[dim]
    wide_x, wide_gates = (tensor.movedim(dim, 1).to(acc) for tensor in (x, gates))
    sequences = x.shape[0] if cu_seqlens is None else len(cu_seqlens) - 1
    if initial_state is None:
        initial_state = wide_x.new_zeros(sequences, *wide_x.shape[2:])
    initial_state = initial_state.to(acc)
    if cu_seqlens is None:
        states, last_state = _scan(wide_x, wide_gates, initial_state, reverse, seq_idx)
    else:
        ends = cu_seqlens.tolist()
        pieces, lasts = [wide_x[:, :0]], [initial_state[:0]]
        for s, (start, end) in enumerate(itertools.pairwise(ends)):
            state = initial_state[s : s + 1]
            piece, last = _scan(wide_x[:, start:end], wide_gates[:, start:end], state, reverse, None)
            pieces.append(piece)
            lasts.append(last)
        pieces.append(wide_x.new_zeros(1, seqlen - ends[-1], *wide_x.shape[2:]))
        states, last_state = torch.cat(pieces, 1), torch.cat(lasts)
    states = states.movedim(1, dim).reshape(shape).to(x.dtype)
    return (states if return_states else states.new_empty(0)), last_state


def _scan(x, gates, state, reverse, seq_idx):
    seqlen = x.shape[1]
    times = range(seqlen - 1, -1, -1) if reverse else range(seqlen)
    states = [None] * seqlen
    before = None
    for t in times:
        if seq_idx is not None and before is not None:
            starts = (seq_idx[:, t] != seq_idx[:, before]).view(-1, *[1] * (state.dim() - 1))
            state = torch.where(starts, 0, state)
        state = gates[:, t] * state + x[:, t]
        states[t] = state
        before = t
    return (torch.stack(states, 1) if states else x), state.clone()


def gated_scan(x, logits, initial_state=None, **options):
    """linear_recurrence with the gates sigmoid(logits), computed in the accumulation dtype."""
    acc = torch.float64 if x.dtype == torch.float64 else torch.float32
    states, last_state = linear_recurrence(x.to(acc), torch.sigmoid(logits.to(acc)), initial_state, **options)
    return states.to(x.dtype), last_state


def example_inputs(
    *,
    dtype=torch.float32,
    device=None,
    generator=None,
    batch=2,
    channels=(5,),
    seqlen=11,
    dim=1,
    reverse=False,
    initial_state=True,
    packing=None,
    gated=False,
):
    """Small random arguments for linear_recurrence, or with gated for gated_scan.

    packing is None, "seq_idx" or "cu_seqlens" (with an empty sequence and a padded tail). The initial state has the
    accumulation dtype.
    """
    normal = normal_numbers(dtype, device, generator)
    acc = torch.float64 if dtype == torch.float64 else torch.float32

    packed, batch, sequences = borders(packing, batch, seqlen, device)
    inputs = {"dim": dim, "reverse": reverse, **packed}
    shape = [batch, *channels]
    shape.insert(dim if dim >= 0 else len(shape) + 1 + dim, seqlen)
    inputs["x"] = normal(*shape)
    gates = normal(*shape)
    if gated:
        inputs["logits"] = gates
    else:
        inputs["gates"] = torch.tanh(gates.to(acc)).to(dtype)
    if initial_state:
        inputs["initial_state"] = normal(sequences, *channels, dtype=acc)
    return inputs
