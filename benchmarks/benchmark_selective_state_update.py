"""selective_state_update_: cost of one call on tiny tensors against torch.add (report B109), and time by batch."""

import torch

from mamba_ops.reference import selective_state_update as reference

from .harness import call_overhead, error_of

ORDER = ("state", "x", "dt", "A", "B", "C", "D", "z", "dt_bias")


def run(bench, limits):
    call = torch.ops.mamba.selective_state_update_.default
    for batch, dim in ((1, 64), (1, 1536), (16, 1536), (64, 1536)):
        inputs = reference.example_inputs(batch=batch, nheads=None, headdim=dim, dstate=16)
        state = inputs["state"].transpose(1, 2).contiguous().transpose(1, 2)  # channel-last, as decoding keeps it
        given = [state, *(inputs[name] for name in ORDER[1:])]
        expected = reference.selective_state_update(*(t.double() for t in given), dt_softplus=True)[0]

        def verify(name, result, expected=expected):
            return None if name == "torch.add" else error_of([result], [expected])

        arguments = (state.clone(), *given[1:], True)
        candidates = {"torch.add": lambda x=given[1]: torch.add(x, x), "mamba_ops": lambda a=arguments: call(*a)}
        job = f"step · batch {batch}, dim {dim}, dstate 16"
        call_overhead(bench, "selective_state_update", job, candidates, verify)
