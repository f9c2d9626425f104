"""Causal depthwise convolution over time, in plain PyTorch."""

import itertools

import torch
import torch.nn.functional as F

from ._examples import borders, normal_numbers


def causal_conv1d(x, weight, bias=None, *, activation=None, initial_state=None, seq_idx=None, cu_seqlens=None):
    """out[t] = act(bias + sum_k weight[k] x[t - width + 1 + k]), the sum staying inside t's sequence.

    Returns (out, last_state); last_state holds the last width - 1 samples, in x's dtype.
    x (batch, dim, seqlen), weight (dim, width), bias (dim), initial_state (batch or sequences, dim, width - 1). Samples
    before the first one come from initial_state (its last column is the most recent) or are zero.
    seq_idx (batch, seqlen): a new sequence starts wherever the value changes; negative values are padding, where out is
    0. cu_seqlens (sequences + 1): batch is 1 and sequence s is the range cu_seqlens[s] .. cu_seqlens[s + 1]; what
    follows the last sequence is padding.
    """
    if activation not in (None, "none", "silu", "swish"):
        raise ValueError(f"causal_conv1d: activation must be None, 'silu' or 'swish', got {activation!r}")
    if seq_idx is not None and cu_seqlens is not None:
        raise ValueError("causal_conv1d: seq_idx and cu_seqlens exclude each other")
    batch, dim, seqlen = x.shape
    width = weight.shape[1]
    acc = torch.float64 if x.dtype == torch.float64 else torch.float32
    weight = weight.to(acc)
    bias = weight.new_zeros(dim) if bias is None else bias.to(acc)
    silu = activation in ("silu", "swish")

    if cu_seqlens is None:
        if initial_state is None:
            initial_state = x.new_zeros(batch, dim, width - 1)
        out, last_state = _convolve(x.to(acc), weight, bias, silu, initial_state.to(acc), seq_idx)
    else:
        ends = cu_seqlens.tolist()
        if initial_state is None:
            initial_state = x.new_zeros(len(ends) - 1, dim, width - 1)
        initial_state = initial_state.to(acc)
        outs, states = [x.new_zeros(1, dim, 0, dtype=acc)], [initial_state[:0]]
        for s, (start, end) in enumerate(itertools.pairwise(ends)):
            out, state = _convolve(x[:, :, start:end].to(acc), weight, bias, silu, initial_state[s : s + 1], None)
            outs.append(out)
            states.append(state)
        out = F.pad(torch.cat(outs, dim=2), (0, seqlen - ends[-1]))
        last_state = torch.cat(states)
    return out.to(x.dtype), last_state.to(x.dtype)


def _convolve(x, weight, bias, silu, initial_state, seq_idx):
    batch, dim, seqlen = x.shape
    width = weight.shape[1]
    past = width - 1
    extended = torch.cat([initial_state, x], dim=2)  # position i of the row stands in column i + width - 1
    segment = torch.zeros(batch, seqlen, dtype=torch.int64, device=x.device)
    real = torch.ones(batch, 1, seqlen, dtype=torch.bool, device=x.device)
    if seq_idx is not None:
        segment[:, 1:] = (seq_idx[:, 1:] != seq_idx[:, :-1]).cumsum(1)
        real = (seq_idx >= 0).unsqueeze(1)
    segment = torch.cat([segment.new_zeros(batch, past), segment], dim=1)  # the past belongs to the row's first segment

    p = bias[:, None].expand(batch, dim, seqlen)
    for k in range(width):
        same = (segment[:, k : k + seqlen] == segment[:, past:]).unsqueeze(1)
        window = torch.where(same & real, extended[:, :, k : k + seqlen], 0)  # a selection: 0 * NaN would be NaN
        p = p + weight[:, k, None] * window
    out = torch.where(real, F.silu(p) if silu else p, 0)

    last_state = extended[:, :, seqlen:]
    if seqlen > 0:
        last_state = torch.where((segment[:, seqlen:] == segment[:, -1:]).unsqueeze(1), last_state, 0)
    return out, last_state


def example_inputs(
    *,
    dtype=torch.float32,
    device=None,
    generator=None,
    batch=2,
    dim=5,
    seqlen=11,
    width=4,
    bias=True,
    activation="silu",
    initial_state=True,
    packing=None,
    weight_dtype=None,
):
    """Small random arguments for causal_conv1d.

    packing is None, "seq_idx" (with padding) or "cu_seqlens" (with an empty sequence and a padded tail).
    """
    normal = normal_numbers(dtype, device, generator)
    weight_dtype = weight_dtype or dtype
    packed, batch, sequences = borders(packing, batch, seqlen, device)
    inputs = {"activation": activation, **packed}
    if packing == "seq_idx":
        inputs["seq_idx"][:, seqlen - seqlen // 5 :] = -1
    inputs["x"] = normal(batch, dim, seqlen)
    inputs["weight"] = normal(dim, width, dtype=weight_dtype)
    if bias:
        inputs["bias"] = normal(dim, dtype=weight_dtype)
    if initial_state:
        inputs["initial_state"] = normal(sequences, dim, width - 1)
    return inputs
