"""Small calls of every operator, for the tests of the kernels themselves."""

from importlib import import_module

import torch

from mamba_ops import testing
from mamba_ops.ops.mamba_step import pack_layer, pack_layers


def definition(name):
    """The module of an operator's plain definition."""
    return import_module(f"mamba_ops.reference.{'linear_recurrence' if name == 'gated_scan' else name}")


def example(name, **options):
    return definition(name).example_inputs(**options)


# Operators with a backward, in shapes that reach each kernel: warps, blocks, tails, splits, pieces, borders, layouts.
CASES = {
    "rms_norm": ("rms_norm", dict(shape=(37,), dim=40, group_size=20)),
    "rms_norm_block": ("rms_norm", dict(shape=(35,), dim=600)),
    "rms_norm_strided": ("rms_norm", dict(shape=(6,), dim=300)),
    "rms_norm_long": ("rms_norm", dict(shape=(3,), dim=8300, z=False)),
    "causal_conv1d": ("causal_conv1d", dict(dim=5, seqlen=27)),
    "causal_conv1d_channel_last": ("causal_conv1d", dict(dim=37, seqlen=75)),
    "causal_conv1d_packed": ("causal_conv1d", dict(dim=3, seqlen=21, packing="seq_idx")),
    "selective_scan": ("selective_scan", dict(batch=2, dim=38, seqlen=19)),
    "selective_scan_splits": ("selective_scan", dict(batch=1, dim=4, seqlen=301)),
    "selective_scan_pieces": ("selective_scan", dict(batch=1, dim=2, seqlen=11, dstate=131)),
    "selective_scan_constant": (
        "selective_scan",
        dict(dim=5, seqlen=20, dstate=7, B="constant", C="constant"),
    ),
    "selective_scan_packed": ("selective_scan", dict(batch=1, dim=6, seqlen=150, packing="cu_seqlens")),
    "selective_state_update": ("selective_state_update", dict()),
    "conv1d_step": ("conv1d_step", dict()),
    "linear_recurrence": ("linear_recurrence", dict(channels=(35,), seqlen=75)),
    "linear_recurrence_along_time": ("linear_recurrence", dict(channels=(11,), seqlen=300, dim=2, reverse=True)),
    "linear_recurrence_packed": ("linear_recurrence", dict(batch=1, channels=(3,), seqlen=150, packing="cu_seqlens")),
    "gated_scan": ("gated_scan", dict(channels=(4,), seqlen=70, packing="seq_idx", gated=True)),
}


def inputs_of(case, dtype=torch.float32):
    name, options = CASES[case]
    inputs = example(name, dtype=dtype, generator=torch.Generator().manual_seed(7), **options)
    if case.endswith(("strided", "channel_last")):
        inputs["x"] = testing.transposed(inputs["x"])
    return inputs


def operator(namespace, name):
    """The operator as a function of keyword arguments; the order is the schema's."""
    overload = getattr(getattr(torch.ops, namespace), name).default

    def function(**inputs):
        if "activation" in inputs:
            inputs["activation"] = {None: "none", "swish": "silu"}.get(inputs["activation"], inputs["activation"])
        return overload(**inputs)

    return function


def reference(name):
    return getattr(definition(name), name)


def results(namespace, case, dtype=torch.float32):
    """Outputs and gradients."""
    if case in FUSED:
        return fused_results(namespace, case)
    if case == BACKTEST:
        return backtest_results(namespace)
    outputs, _, gradients = testing.run_with_gradients(operator(namespace, CASES[case][0]), inputs_of(case, dtype))
    return [*outputs, *gradients.values()]


def check(namespace, case, dtype=torch.float32):
    """Fails unless outputs and gradients agree with the reference."""
    if case in FUSED:
        return check_fused(namespace, case, dtype)
    if case == BACKTEST:
        return check_backtest(namespace, dtype)
    name = CASES[case][0]
    testing.check_values(operator(namespace, name), inputs_of(case, dtype), reference(name))


# ---- the fused step, which has no gradients ----

FUSED = {  # 16 rows and fewer are multiplied by its own kernels, more by cuBLAS
    "mamba_step": dict(batch=5, n_layer=2, d_model=7, d_inner=19, d_state=3, d_conv=2, dt_rank=5),
    "mamba_step_long": dict(batch=2, n_layer=1, d_model=150, d_inner=70, d_state=35, d_conv=4, dt_rank=3),
    "mamba_step_wide": dict(batch=17, n_layer=2, d_model=9, d_inner=10, d_state=3, d_conv=3, dt_rank=2),
}


def fused_inputs(case, dtype=torch.float32):
    return example("mamba_step", dtype=dtype, generator=torch.Generator().manual_seed(7), **FUSED[case])


def fused_layers(ops, inputs, block=True):
    layers = inputs["layers"]
    packed = pack_layers([pack_layer(**layer) for layer in layers])
    sizes = layers[0]["conv_weight"].shape[1], layers[0]["dt_proj"].shape[1]
    states = inputs["conv_states"], inputs["ssm_states"]
    return ops.mamba_step_(inputs["hidden"], *states, *packed, *sizes, 1e-5, block)


def fused_step(namespace, inputs, block=True):
    """Hidden state and logits of one step; the states in `inputs` are written."""
    ops = getattr(torch.ops, namespace)
    hidden, weight = fused_layers(ops, inputs, block), inputs["layers"][0]["in_proj"]
    return hidden, ops.mamba_step_logits(hidden, torch.ones(hidden.shape[1]), weight, 1e-5)


def fused_results(namespace, case):
    inputs = fused_inputs(case)
    outputs = fused_step(namespace, inputs)
    return [*outputs, inputs["conv_states"], inputs["ssm_states"]]


def check_fused(namespace, case, dtype=torch.float32):
    for block in (True, False):
        inputs = fused_inputs(case, dtype)
        exact = {name: value.double() for name, value in inputs.items() if name != "layers"}
        exact["layers"] = [{name: value.double() for name, value in layer.items()} for layer in inputs["layers"]]
        hidden, logits = fused_step(namespace, inputs, block)
        # cuBLAS multiplies bf16 weights with two bf16 numbers (mamba_step.cu): inputs of products are rounded to 2^-18,
        # and sums cancel. Rounding the definition's inputs likewise leaves float32's differences.
        rtol = 1e-4 if dtype == torch.bfloat16 and len(hidden) > 16 else None
        step = import_module("mamba_ops.reference.mamba_step")
        want = step.mamba_step_(**exact, block=block)
        testing.assert_close(hidden, want, rtol=rtol, what="hidden")
        ones, weight = torch.ones(hidden.shape[1]).double(), exact["layers"][0]["in_proj"]
        testing.assert_close(logits, step.mamba_step_logits(want, ones, weight), rtol=rtol, what="logits")
        testing.assert_close(inputs["conv_states"], exact["conv_states"], dtype, what="conv_states")
        testing.assert_close(inputs["ssm_states"], exact["ssm_states"], rtol=rtol, what="ssm_states")


# ---- the back-test, which has none either ----

BACKTEST = "threshold_backtest"


def backtest_inputs(dtype=torch.float32):
    return example(BACKTEST, dtype=dtype, generator=torch.Generator().manual_seed(7), count=4500)


def backtest_results(namespace, dtype=torch.float32):
    inputs = backtest_inputs(dtype)
    inputs["thresholds"] = torch.tensor(inputs["thresholds"], dtype=torch.float64)
    return operator(namespace, BACKTEST)(**inputs, return_pnl=True)


def check_backtest(namespace, dtype):
    *statistics, pnl, _ = backtest_results(namespace, dtype)
    for found, expected in zip((*statistics, pnl), reference(BACKTEST)(**backtest_inputs(dtype))):
        testing.assert_close(found, expected, rtol=None if found is pnl else 1e-10)


ALL = [*CASES, *FUSED, BACKTEST]
