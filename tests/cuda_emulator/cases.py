"""Small calls of every operator, for the tests of the kernels themselves."""

from importlib import import_module

import torch

from mamba_ops import testing


def example(name, **options):
    return import_module(f"mamba_ops.reference.{name}").example_inputs(**options)


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
    return getattr(import_module(f"mamba_ops.reference.{name}"), name)


def results(namespace, case, dtype=torch.float32):
    """Outputs and gradients."""
    outputs, _, gradients = testing.run_with_gradients(operator(namespace, CASES[case][0]), inputs_of(case, dtype))
    return [*outputs, *gradients.values()]


def check(namespace, case, dtype=torch.float32):
    """Fails unless outputs and gradients agree with the reference."""
    name = CASES[case][0]
    testing.check_values(operator(namespace, name), inputs_of(case, dtype), reference(name))
