"""One step of the causal convolution with its cache, in plain PyTorch."""

import torch
import torch.nn.functional as F

from ._examples import normal_numbers


def conv1d_step(x, conv_state, weight, bias=None, *, activation=None):
    """out[t] = bias + sum_k weight[k] s[t + k + state_len - width + 1] over s = [conv_state, x], then maybe SiLU.

    Returns (out, new_state): new_state is the last state_len columns of s. x (batch, dim) or (batch, dim, seqlen);
    conv_state (batch, dim, state_len), state_len >= width - 1; weight (dim, width); bias (dim).
    """
    acc = torch.float64 if x.dtype == torch.float64 else torch.float32
    width, state_len = weight.shape[1], conv_state.shape[2]
    present = x[..., None] if x.dim() == 2 else x
    samples = torch.cat([conv_state.to(acc), present.to(acc)], dim=2)
    first = state_len - width + 1
    seqlen = present.shape[2]
    out = sum(samples[..., first + k : first + k + seqlen] * weight[:, k, None].to(acc) for k in range(width))
    if bias is not None:
        out = out + bias.to(acc)[:, None]
    if activation is not None:
        out = F.silu(out)
    new_state = samples[..., samples.shape[2] - state_len :].to(conv_state.dtype)
    return out.reshape(x.shape).to(x.dtype), new_state


def conv1d_step_(x, conv_state, weight, bias=None, *, activation=None, cache_seqlens=None, conv_state_indices=None):
    """The same in place. Row b uses cache entry conv_state_indices[b] (none if negative: out is 0).

    With cache_seqlens the cache is circular: the sample j steps back is in column (cache_seqlens[b] - j) % state_len.
    """
    out = torch.zeros_like(x)
    state_len = conv_state.shape[2]
    for b in range(x.shape[0]):
        entry = b if conv_state_indices is None else int(conv_state_indices[b])
        if entry < 0:
            continue
        at = 0 if cache_seqlens is None or state_len == 0 else int(cache_seqlens[b]) % state_len
        tokens = 1 if x.dim() == 2 else x.shape[2]
        linear = conv_state[entry : entry + 1].roll(-at, 2)
        out[b], linear = conv1d_step(x[b : b + 1], linear, weight, bias, activation=activation)
        conv_state[entry] = linear[0].roll(0 if cache_seqlens is None else at + tokens, 1)
    return out


def example_inputs(
    *,
    dtype=torch.float32,
    device=None,
    generator=None,
    batch=3,
    dim=5,
    width=4,
    state_len=None,
    seqlen=None,
    bias=True,
    activation="silu",
):
    """Small random arguments for conv1d_step; state_len defaults to width - 1, seqlen None is one token."""
    normal = normal_numbers(dtype, device, generator)

    inputs = {
        "x": normal(batch, dim) if seqlen is None else normal(batch, dim, seqlen),
        "conv_state": normal(batch, dim, width - 1 if state_len is None else state_len),
        "weight": normal(dim, width),
        "activation": activation,
    }
    if bias:
        inputs["bias"] = normal(dim)
    return inputs
