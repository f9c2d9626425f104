"""One token through a stack of Mamba layers, in plain PyTorch."""

import torch
import torch.nn.functional as F

from ._examples import normal_numbers


def mamba_step_(hidden, conv_states, ssm_states, layers, *, eps=1e-5, block=True):
    """hidden = hidden + mixer(norm(hidden)) for every layer; the states are advanced in place.

    hidden (batch, d_model); conv_states (n_layer, batch, d_inner, state_len), state_len >= d_conv - 1; ssm_states
    (n_layer, batch, d_inner, d_state). `layers` holds a dict for each layer, with the arguments of ops.pack_layer.
    With block False a layer is the mixer alone.
    """
    for layer, conv_state, ssm_state in zip(layers, conv_states, ssm_states):
        x = hidden
        if block:
            x = hidden / torch.sqrt(hidden.square().mean(-1, keepdim=True) + eps) * layer.get("norm_weight", 1)
        x, z = F.linear(x, layer["in_proj"], layer.get("in_bias")).chunk(2, dim=-1)
        samples = torch.cat([conv_state.to(x), x[..., None]], dim=-1)
        window = samples[..., samples.shape[-1] - layer["conv_weight"].shape[1] :]
        conv_state.copy_(samples[..., 1:])
        x = F.silu((window * layer["conv_weight"]).sum(-1) + layer.get("conv_bias", 0))
        d_state = layer["A"].shape[1]
        dt, B, C = F.linear(x, layer["x_proj"]).split([layer["dt_proj"].shape[1], d_state, d_state], dim=-1)
        step = F.softplus(F.linear(dt, layer["dt_proj"]) + layer["dt_bias"])
        state = torch.exp(step[..., None] * layer["A"]) * ssm_state.to(x) + (step * x)[..., None] * B[:, None]
        ssm_state.copy_(state)
        y = ((state * C[:, None]).sum(-1) + layer["D"] * x) * F.silu(z)
        mixed = F.linear(y, layer["out_proj"], layer.get("out_bias"))
        hidden = hidden + mixed if block else mixed
    return hidden


def mamba_step_logits(hidden, norm_weight, weight, *, eps=1e-5):
    """weight . (hidden / sqrt(mean(hidden^2) + eps) norm_weight)."""
    return F.linear(hidden / torch.sqrt(hidden.square().mean(-1, keepdim=True) + eps) * norm_weight, weight)


def example_layer(
    d_model=8, d_inner=16, d_state=4, d_conv=4, dt_rank=2, *, biases=True, dtype=torch.float32, generator=None
):
    """Small random arguments of ops.pack_layer."""
    normal = normal_numbers(dtype, None, generator)
    layer = {
        "in_proj": normal(2 * d_inner, d_model, scale=d_model**-0.5),
        "x_proj": normal(dt_rank + 2 * d_state, d_inner, scale=d_inner**-0.5),
        "dt_proj": normal(d_inner, dt_rank, scale=dt_rank**-0.5),
        "out_proj": normal(d_model, d_inner, scale=d_inner**-0.5),
        "conv_weight": normal(d_inner, d_conv, scale=0.5),
        "A": -0.2 - normal(d_inner, d_state, dtype=torch.float32).abs(),
        "D": normal(d_inner, dtype=torch.float32),
        "dt_bias": normal(d_inner, dtype=torch.float32) - 2,  # small steps, as in models
        "norm_weight": 1 + normal(d_model, scale=0.2),
    }
    if biases:
        layer.update(conv_bias=normal(d_inner), in_bias=normal(2 * d_inner), out_bias=normal(d_model))
    return layer


def example_inputs(*, n_layer=3, batch=2, dtype=torch.float32, generator=None, **sizes):
    """Arguments of mamba_step_ above: hidden, states and layers."""
    layers = [example_layer(dtype=dtype, generator=generator, **sizes) for _ in range(n_layer)]
    d_inner, d_state = layers[0]["A"].shape
    d_conv = layers[0]["conv_weight"].shape[1]
    normal = normal_numbers(dtype, None, generator)
    return {
        "hidden": normal(batch, layers[0]["in_proj"].shape[1]),
        "conv_states": normal(n_layer, batch, d_inner, d_conv),
        "ssm_states": normal(n_layer, batch, d_inner, d_state).float(),
        "layers": layers,
    }
