"""gated_scan, forward and with backward, in both memory layouts, beside PyTorch's ways and Tensor.copy_."""

import torch

import mamba_ops

from . import peers, shapes
from .benchmark_linear_recurrence import one_shape


def ours(x, logits, dim):
    return mamba_ops.gated_scan(x, logits, dim=dim)[0]


def gated(function):
    return lambda x, logits, dim: function(x, torch.sigmoid(logits), dim=dim)


def run(bench, limits):
    loop = gated(peers.recurrence_loop)
    for shape in shapes.GATED_SCAN[bench.mode]:
        for dtype, dim in ((torch.float32, 1), (torch.float32, 2), (torch.bfloat16, 1)):
            for threads in bench.threads:
                small = shape[0] * shape[1] * shape[2] <= shapes.RECURRENCE_WITH_PEERS
                others = {}
                if dtype == torch.float32 and small:
                    others = {name: gated(function) for name, function in peers.recurrences().items()}
                one_shape(bench, "gated_scan", ours, loop, others, shape, dtype, dim, threads)
