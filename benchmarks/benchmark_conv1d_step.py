"""conv1d_step_: cost of one call on tiny tensors against torch.add (report B109), and time by batch."""

import torch

from mamba_ops.reference import conv1d_step as reference

from .harness import call_overhead, error_of


def run(bench, limits):
    call = torch.ops.mamba.conv1d_step_.default
    for batch, dim in ((1, 64), (1, 1536), (16, 1536), (64, 1536)):
        inputs = reference.example_inputs(batch=batch, dim=dim, state_len=4)
        x, state, weight, bias = (inputs[name] for name in ("x", "conv_state", "weight", "bias"))
        state = state.transpose(1, 2).contiguous().transpose(1, 2)  # channel-last, as decoding keeps it
        expected = reference.conv1d_step(*(t.double() for t in (x, state, weight, bias)), activation="silu")[0]

        def verify(name, result, expected=expected):
            return None if name == "torch.add" else error_of([result], [expected])

        given = (x, state.clone(), weight, bias, "silu")
        candidates = {"torch.add": lambda x=x: torch.add(x, x), "mamba_ops": lambda given=given: call(*given)}
        call_overhead(bench, "conv1d_step", f"step · batch {batch}, dim {dim}, width 4", candidates, verify)
