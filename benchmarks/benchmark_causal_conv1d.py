"""causal_conv1d with silu, forward and with backward, in both memory layouts, beside Tensor.copy_ of as many bytes.

Bytes are counted as an ideal operator moves them. Forward: x is read, the output written. With backward also: x and the
output's gradient are read, x's gradient is written. Filters and states are left out (they are small); a second reading
of anything would count against the operator. Tensor.copy_ reads and writes the same number of bytes altogether.
"""

import torch

import mamba_ops

from . import peers, shapes
from .harness import error_of

CHECKED_CHANNELS = 16


def data(batch, dim, seqlen, width, dtype, layout):
    x = torch.randn(batch, dim, seqlen).to(dtype)
    dout = torch.randn(batch, dim, seqlen).to(dtype)
    if layout == "channel-last":
        x, dout = (t.transpose(1, 2).contiguous().transpose(1, 2) for t in (x, dout))
    return x, torch.randn(dim, width), torch.randn(dim), dout


def expected(x, weight, bias, dout):
    """Output and gradient of x for the first channels, in float64."""
    x, weight, bias, dout = (
        t[:, :CHECKED_CHANNELS] if t.dim() == 3 else t[:CHECKED_CHANNELS] for t in (x, weight, bias, dout)
    )
    x = x.double().requires_grad_()
    out = peers.conv1d(x, weight.double(), bias.double())
    return out.detach(), torch.autograd.grad(out, x, dout.double())[0]


def ours(x, weight, bias):
    return mamba_ops.causal_conv1d(x, weight, bias, activation="silu")[0]


def with_backward(function, x, weight, bias, dout):
    leaves = [t.detach().requires_grad_() for t in (x, weight, bias)]
    out = function(*leaves)
    return out.detach(), *torch.autograd.grad(out, leaves, dout)


def one_shape(bench, shape, dtype, layout, threads):
    batch, dim, seqlen, width = shape
    x, weight, bias, dout = data(*shape, dtype, layout)
    out, dx = expected(x, weight, bias, dout)
    others = peers.convolutions() if dtype == torch.float32 else {}
    label = f"batch {batch}, dim {dim}, seqlen {seqlen}, width {width}, {str(dtype)[6:]}, {layout}"

    def check(name, result):
        got = result if isinstance(result, tuple) else (result,)
        return error_of([t[:, :CHECKED_CHANNELS] for t in got[:2]], [out, dx])

    for job, tensors, wrap in (("forward", 2, False), ("forward+backward", 5, True)):
        candidates = {}
        for name, function in {"mamba_ops": ours, **others}.items():
            if wrap:
                candidates[name] = lambda function=function: with_backward(function, x, weight, bias, dout)
            else:
                candidates[name] = lambda function=function: function(x, weight, bias)
        with torch.set_grad_enabled(wrap):
            nbytes = tensors * x.numel() * x.element_size()
            bench.beside_copy("causal_conv1d", f"{job} · {label}", candidates, check, nbytes, threads=threads)


def small_lengths(bench, threads, dim=256):
    """B106: equal work in short and in long rows."""
    for layout in ("channel-first", "channel-last"):
        candidates, checks = {}, {}
        for batch, seqlen in shapes.SMALL_LENGTHS:
            x, weight, bias, dout = data(batch, dim, seqlen, 4, torch.float32, layout)
            name = f"mamba_ops, batch {batch}, seqlen {seqlen}"
            checks[name] = expected(x, weight, bias, dout)
            candidates[name] = lambda x=x, weight=weight, bias=bias, dout=dout: with_backward(
                ours, x, weight, bias, dout
            )

        def check(name, result, checks=checks):
            return error_of([t[:, :CHECKED_CHANNELS] for t in result[:2]], checks[name])

        rows = bench.compare("causal_conv1d", f"equal work, dim {dim}, {layout}", candidates, check, threads=threads)
        longest = list(rows.values())[-1].min_ms
        for row in rows.values():
            row.notes["times the longest"] = round(row.min_ms / longest, 2)
        bench.show(rows)


def run(bench, limits):
    for shape in shapes.CONV[bench.mode]:
        for layout in ("channel-first", "channel-last"):
            for dtype in shapes.DTYPES[bench.mode]:
                for threads in bench.threads:
                    one_shape(bench, shape, dtype, layout, threads)
    small_lengths(bench, bench.threads[-1])
