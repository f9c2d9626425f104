"""linear_recurrence, forward and with backward, in both memory layouts, beside PyTorch's ways and Tensor.copy_."""

from functools import partial

import torch

import mamba_ops

from . import peers, shapes
from .harness import error_of

CHECKED_CHANNELS = 8


def with_backward(function, x, gates, dstates, dim):
    leaves = [t.detach().requires_grad_() for t in (x, gates)]
    states = function(*leaves, dim=dim)
    return states.detach(), *torch.autograd.grad(states, leaves, dstates)


def expected(function, x, gates, dstates, dim):
    """States and gradients of the first row's first channels, in float64."""
    few = [few_channels(t, dim).double() for t in (x, gates, dstates)]
    return with_backward(function, *few, dim)


def few_channels(tensor, dim):
    return tensor[:1].narrow(3 - dim, 0, min(CHECKED_CHANNELS, tensor.shape[3 - dim]))


def one_shape(bench, op, ours, exact, others, shape, dtype, dim, threads):
    """Rows of one shape; `others` are peers as function(x, gates, dim)."""
    batch, seqlen, channels = shape
    sizes = (batch, seqlen, channels) if dim == 1 else (batch, channels, seqlen)
    x, dstates = torch.randn(sizes).to(dtype), torch.randn(sizes).to(dtype)
    gates = torch.tanh(torch.randn(sizes)).to(dtype)
    torch._dynamo.reset()  # every shape and number of threads is compiled anew; few are allowed for one function
    wanted = expected(exact, x, gates, dstates, dim)
    layout = "channels contiguous" if dim == 1 else "time contiguous"
    label = f"batch {batch}, seqlen {seqlen}, channels {channels}, {str(dtype)[6:]}, {layout}"

    def check(name, result):
        if name == "Tensor.copy_":
            return None
        return error_of([few_channels(t, dim) for t in result], wanted)

    # Tensors read and written: forward x, gates, states; with backward also x, gates, dstates, dx, dgates.
    for job, tensors in (("forward", 3), ("forward+backward", 8)):
        source = torch.randn(tensors * x.numel() // 2).to(dtype)  # the same bytes
        target = torch.empty_like(source)
        candidates = {"Tensor.copy_": partial(target.copy_, source)}
        for name, function in {"mamba_ops": ours, **others}.items():
            if job == "forward":
                candidates[name] = lambda function=function: (function(x, gates, dim=dim),)
            else:
                candidates[name] = partial(with_backward, function, x, gates, dstates, dim)
        with torch.set_grad_enabled(job != "forward"):
            rows = bench.compare(op, f"{job} · {label}", candidates, check, threads=threads, slow=others)
        copy, fastest = rows["Tensor.copy_"].min_ms, rows["mamba_ops"].min_ms
        for name, row in rows.items():
            row.notes["GB/s"] = round(tensors * x.numel() * x.element_size() / row.min_ms / 1e6, 1)
            row.notes["% of copy bandwidth"] = round(100 * copy / row.min_ms)
            if name in others:
                row.notes["mamba_ops is faster by"] = round(row.min_ms / fastest, 2)
        bench.show(rows)


def ours(x, gates, dim):
    return mamba_ops.linear_recurrence(x, gates, dim=dim)[0]


def run(bench, limits):
    for shape in shapes.RECURRENCE[bench.mode]:
        for dtype, dim in ((torch.float32, 1), (torch.float32, 2), (torch.bfloat16, 1)):
            for threads in bench.threads:
                small = shape[0] * shape[1] * shape[2] <= shapes.RECURRENCE_WITH_PEERS
                others = peers.recurrences() if dtype == torch.float32 and small else {}
                one_shape(bench, "linear_recurrence", ours, peers.recurrence_loop, others, shape, dtype, dim, threads)
