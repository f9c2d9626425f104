"""The fused single-token step of a stack of Mamba layers, for decoding."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .. import _autograd
from .._check import Checker, refuse_gradients, tuple_text
from .._memory import prefer_huge_pages

LANE_PADDING = 16  # lane_padding in csrc/params/mamba_step.h


def pack_layer(
    in_proj: torch.Tensor,
    x_proj: torch.Tensor,
    dt_proj: torch.Tensor,
    out_proj: torch.Tensor,
    conv_weight: torch.Tensor,
    A: torch.Tensor,
    D: torch.Tensor,
    dt_bias: torch.Tensor,
    *,
    conv_bias: torch.Tensor | None = None,
    in_bias: torch.Tensor | None = None,
    out_bias: torch.Tensor | None = None,
    norm_weight: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    r"""The parameters of one Mamba layer as `mamba_step_` reads them: one row of `weights` and one of `parameters`.

    .. math::
        \mathrm{weights} = [\mathrm{in\_proj}, \mathrm{x\_proj}, \mathrm{dt\_proj}, \mathrm{out\_proj}]

    Args:
        in_proj: (2 d_inner, d_model), rows [x; z]; its dtype is that of the packed weights.
        x_proj: (dt_rank + 2 d_state, d_inner), rows [dt; B; C].
        dt_proj: (d_inner, dt_rank).
        out_proj: (d_model, d_inner).
        conv_weight: (d_inner, d_conv).
        A: (d_inner, d_state), the decay rates (negative).
        D: (d_inner,).
        dt_bias: (d_inner,).
        conv_bias: (d_inner,); absent means 0.
        in_bias: (2 d_inner,); absent means 0.
        out_bias: (d_model,); absent means 0.
        norm_weight: (d_model,); absent means 1.

    Returns:
        weights: (size,), in_proj's dtype.
        parameters: (size,), float32; rows of channels padded with zeros to a multiple of 16.

    Raises:
        RuntimeError: the sizes do not fit together.

    Source: the layout is this package's own, see csrc/params/mamba_step.h.

    Gradients: none.
    Autocast: leaves every argument as it is.
    Determinism: copies.

    Example:
        >>> import torch, mamba_ops
        >>> p, o = torch.zeros, torch.ones
        >>> rows = mamba_ops.pack_layer(p(4, 3), p(3, 2), p(2, 1), p(3, 2), o(2, 4), -o(2, 1), o(2), p(2))
        >>> [tuple(row.shape) for row in rows]
        [(26,), (192,)]
    """
    d_inner, d_model = out_proj.shape[1], out_proj.shape[0]

    def rows(tensor: torch.Tensor | None, count: int, value: float = 0.0) -> torch.Tensor:
        if tensor is None:
            tensor = torch.full((count,), value, device=in_proj.device)
        tensor = tensor.detach().float().reshape(-1, count)
        return torch.nn.functional.pad(tensor, (0, -count % LANE_PADDING)).flatten()

    weights = torch.cat([t.detach().to(in_proj.dtype).flatten() for t in (in_proj, x_proj, dt_proj, out_proj)])
    log2_e = 1.4426950408889634
    parameters = torch.cat(
        [
            rows(norm_weight, d_model, 1.0),
            rows(torch.zeros(2 * d_inner, device=in_proj.device) if in_bias is None else in_bias, d_inner),
            rows(conv_weight.detach().t().contiguous(), d_inner),
            rows(conv_bias, d_inner),
            rows(dt_bias, d_inner),
            rows((A.detach().double() * log2_e).t().contiguous(), d_inner),
            rows(D, d_inner),
            rows(out_bias, d_model),
        ]
    )
    return weights, parameters


def pack_layers(layers: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Stack what `pack_layer` returned for each layer: weights (n_layer, size) and parameters (n_layer, size)."""
    weights, parameters = zip(*layers)
    packed = weights[0].new_empty((len(weights), *weights[0].shape))
    prefer_huge_pages(packed)
    return torch.stack(weights, out=packed), torch.stack(parameters)


def mamba_step_(
    hidden: torch.Tensor,
    conv_state: torch.Tensor,
    ssm_state: torch.Tensor,
    weights: torch.Tensor,
    parameters: torch.Tensor,
    *,
    d_conv: int,
    dt_rank: int,
    eps: float = 1e-5,
    block: bool = True,
) -> torch.Tensor:
    r"""Send one token through a stack of Mamba layers, advancing their states in place.

    .. math::
        \mathrm{hidden} \leftarrow \mathrm{hidden} + \mathrm{mixer}(\mathrm{rms\_norm}(\mathrm{hidden}))
        \quad \text{for every layer}

    Products accumulate in float32. With bfloat16 weights, CPUs that have instructions for it (AVX512-BF16) round what
    the weights are multiplied with to bfloat16, as nn.Linear does; others keep float32.

    Args:
        hidden: (batch, d_model), any floating dtype: the residual stream in front of the first layer.
        conv_state: (n_layer, batch, d_inner, state_len), state_len >= d_conv - 1, any floating dtype; written in place.
        ssm_state: (n_layer, batch, d_inner, d_state), any floating dtype; written in place. Both states are fastest
            with stride 1 over d_inner.
        weights: (n_layer, size), float32, bfloat16 or float16, contiguous, from `pack_layer`.
        parameters: (n_layer, size), float32, contiguous, from `pack_layer`.
        d_conv: taps of the convolution.
        dt_rank: width of the step-size bottleneck.
        eps: of the norms.
        block: whether a layer is the whole block hidden + mixer(norm(hidden)), or the mixer alone.

    Returns:
        hidden: (batch, d_model), float32: the residual stream behind the last layer.

    Raises:
        RuntimeError: a shape, dtype or device does not fit, or an argument requires grad while grad mode is on.

    Source: Gu and Dao, "Mamba: Linear-Time Sequence Modeling with Selective State Spaces", 2023, section 3.

    Gradients: none; for training through time use `conv1d_step` and `selective_state_update`.
    Autocast: leaves every argument as it is.
    Determinism: bit-identical from run to run and for any number of threads.

    Example:
        >>> import torch, mamba_ops
        >>> p, o = torch.zeros, torch.ones
        >>> layer = mamba_ops.pack_layer(p(4, 3), p(3, 2), p(2, 1), p(3, 2), o(2, 4), -o(2, 1), o(2), p(2))
        >>> weights, parameters = (row[None] for row in layer)
        >>> mamba_ops.mamba_step_(o(1, 3), p(1, 1, 2, 4), p(1, 1, 2, 1), weights, parameters, d_conv=4, dt_rank=1)
        tensor([[1., 1., 1.]])
    """
    if torch.is_grad_enabled():
        tensors = dict(
            hidden=hidden, conv_state=conv_state, ssm_state=ssm_state, weights=weights, parameters=parameters
        )
        refuse_gradients("mamba_step_", **tensors)
    return torch.ops.mamba.mamba_step_(hidden, conv_state, ssm_state, weights, parameters, d_conv, dt_rank, eps, block)


def mamba_step_logits(
    hidden: torch.Tensor, norm_weight: torch.Tensor, weight: torch.Tensor, *, eps: float = 1e-5
) -> torch.Tensor:
    r"""The final norm and the head of a language model for one token a row; each weight is read once, at memory speed.

    .. math::
        \mathrm{logits} = \mathrm{weight} \cdot \mathrm{rms\_norm}(\mathrm{hidden}, \mathrm{norm\_weight})

    With bfloat16 weights products are rounded as in `mamba_step_`.

    Args:
        hidden: (batch, d_model), any floating dtype.
        norm_weight: (d_model,), any floating dtype.
        weight: (vocab, d_model), float32, bfloat16 or float16, contiguous.
        eps: of the norm.

    Returns:
        logits: (batch, vocab), float32.

    Raises:
        RuntimeError: a shape, dtype or device does not fit, or an argument requires grad while grad mode is on.

    Source: as `mamba_step_`.

    Gradients: none.
    Autocast: leaves every argument as it is.
    Determinism: bit-identical from run to run and for any number of threads.

    Example:
        >>> import torch, mamba_ops
        >>> mamba_ops.mamba_step_logits(torch.tensor([[3.0, 3.0]]), torch.ones(2), torch.eye(2), eps=1e-12)
        tensor([[1., 1.]])
    """
    if torch.is_grad_enabled():
        refuse_gradients("mamba_step_logits", hidden=hidden, norm_weight=norm_weight, weight=weight)
    return torch.ops.mamba.mamba_step_logits(hidden, norm_weight, weight, eps)


def self_test(reference, dtype: torch.dtype, generator: torch.Generator) -> None:
    """For `python -m mamba_ops`: a stack of layers against the reference; weights of float64 run as float32."""
    from ..testing import assert_close, tolerance

    dtype = torch.float32 if dtype == torch.float64 else dtype
    inputs = reference.example_inputs(dtype=dtype, generator=generator)
    wide = {name: value.double() for name, value in inputs.items() if name != "layers"}
    layers = [{name: value.double() for name, value in layer.items()} for layer in inputs["layers"]]
    weights, parameters = pack_layers([pack_layer(**layer) for layer in inputs["layers"]])
    states = inputs["conv_states"], inputs["ssm_states"]
    out = mamba_step_(inputs["hidden"], *states, weights, parameters, d_conv=4, dt_rank=2)
    rtol = len(layers) * tolerance(dtype)
    assert_close(out, reference.mamba_step_(**wide, layers=layers), rtol=rtol, what="hidden")
    assert_close(states[0], wide["conv_states"], rtol=rtol, what="conv_state")
    assert_close(states[1], wide["ssm_states"], rtol=rtol, what="ssm_state")


def _padded(count):
    return (count + LANE_PADDING - 1) // LANE_PADDING * LANE_PADDING


def _check_weights(check, name, weights):
    check.floating(name, weights)
    if weights.dtype == torch.float64:
        check.fail(f"{name} must be float32, bfloat16 or float16, got float64")


def _fake_step(hidden, conv_state, ssm_state, weights, parameters, d_conv, dt_rank, eps, block):
    check = Checker("mamba_step_", "hidden", hidden)
    check.dims("hidden", hidden, 2, "(batch, d_model)")
    check.dims("conv_state", conv_state, 4, "(n_layer, batch, d_inner, state_len)")
    check.dims("ssm_state", ssm_state, 4, "(n_layer, batch, d_inner, d_state)")
    batch, d_model = hidden.shape
    n_layer, _, d_inner, state_len = conv_state.shape
    d_state = ssm_state.shape[3]
    if d_conv < 1:
        check.fail(f"d_conv must be at least 1, got {d_conv}")
    if dt_rank < 1:
        check.fail(f"dt_rank must be at least 1, got {dt_rank}")
    if state_len < d_conv - 1:
        shape = tuple_text(conv_state.shape)
        check.fail(f"conv_state must hold at least d_conv - 1 = {d_conv - 1} samples, got shape {shape}")
    leading = dict(n_layer=n_layer, batch=batch, d_inner=d_inner)
    check.shape("conv_state", conv_state, **leading, state_len=state_len)
    check.shape("ssm_state", ssm_state, **leading, d_state=d_state)
    size = 3 * d_inner * d_model + (2 * dt_rank + 2 * d_state) * d_inner
    check.shape("weights", weights, **{"n_layer": n_layer, "weights of a layer": size})
    size = 2 * _padded(d_model) + (5 + d_conv + d_state) * _padded(d_inner)
    check.shape("parameters", parameters, **{"n_layer": n_layer, "parameters of a layer": size})
    check.floating("conv_state", conv_state)
    check.floating("ssm_state", ssm_state)
    _check_weights(check, "weights", weights)
    check.device("parameters", parameters)
    return hidden.new_empty((batch, d_model), dtype=torch.float32)


def _fake_logits(hidden, norm_weight, weight, eps):
    check = Checker("mamba_step_logits", "hidden", hidden)
    check.dims("hidden", hidden, 2, "(batch, d_model)")
    check.dims("weight", weight, 2, "(vocab, d_model)")
    check.shape("norm_weight", norm_weight, d_model=hidden.shape[1])
    check.shape("weight", weight, vocab=weight.shape[0], d_model=hidden.shape[1])
    check.floating("norm_weight", norm_weight)
    _check_weights(check, "weight", weight)
    return hidden.new_empty((hidden.shape[0], weight.shape[0]), dtype=torch.float32)


def register(namespace: str) -> None:
    """Fakes of the operators in `namespace`; they have no gradients and no autocast rule."""
    library = _autograd.library(namespace)
    for name, fake in (("mamba_step_", _fake_step), ("mamba_step_logits", _fake_logits)):
        torch.library.register_fake(f"{namespace}::{name}", fake, lib=library)
