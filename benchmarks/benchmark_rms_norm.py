"""rms_norm: forward and forward + backward, plain, with residual, gated, beside Tensor.copy_ of the same bytes."""

import torch

import mamba_ops
from mamba_ops import reference

from . import peers, shapes
from .harness import error_of


def with_backward(function, x, weight, dout):
    leaves = [x.detach().requires_grad_(), weight.detach().requires_grad_()]
    out = function(*leaves)
    return out.detach(), *torch.autograd.grad(out, leaves, dout)


def one_shape(bench, rows_count, dim, dtype, threads):
    x, dout, other = (torch.randn(rows_count, dim).to(dtype) for _ in range(3))
    weight = 1 + 0.1 * torch.randn(dim)
    target = torch.empty_like(x)
    plain = {"mamba_ops": lambda x, weight: mamba_ops.rms_norm(x, weight)[0]}
    if dtype == torch.float32:
        plain.update(peers.norms())
    variants = {
        "plain": (plain, {}, 0),
        "residual": (
            {"mamba_ops": lambda x, weight: mamba_ops.rms_norm(x, weight, residual=other)[0]},
            {"residual": other},
            2,
        ),
        "gated": ({"mamba_ops": lambda x, weight: mamba_ops.rms_norm(x, weight, z=other)[0]}, {"z": other}, 1),
    }
    for variant, (functions, options, more) in variants.items():
        leaf = x.double().requires_grad_()
        exact = {name: value.double() for name, value in options.items()}
        want = reference.rms_norm(leaf, weight.double(), **exact)[0]
        expected = [want.detach(), torch.autograd.grad(want, leaf, dout.double())[0]]

        def check(name, result, expected=expected):
            if name == "Tensor.copy_":
                return None
            return error_of(result if isinstance(result, tuple) else (result,), expected)

        for job, tensors, wrap in (("forward", 2 + more, False), ("forward+backward", 5 + 2 * more, True)):
            candidates = {"Tensor.copy_": lambda: target.copy_(x)}
            for name, function in functions.items():
                if wrap:
                    candidates[name] = lambda function=function: with_backward(function, x, weight, dout)
                else:
                    candidates[name] = lambda function=function: function(x, weight)
            label = f"{job}, {variant} · rows {rows_count}, dim {dim}, {str(dtype)[6:]}"
            with torch.set_grad_enabled(wrap):
                rows = bench.compare("rms_norm", label, candidates, check, threads=threads)
            for name, row in rows.items():
                count = 2 if name == "Tensor.copy_" else tensors
                row.notes["GB/s"] = round(count * x.numel() * x.element_size() / row.min_ms / 1e6, 1)
                row.notes["% of copy bandwidth"] = round(100 * count / 2 * rows["Tensor.copy_"].min_ms / row.min_ms)
                if name not in ("Tensor.copy_", "mamba_ops"):
                    row.notes["mamba_ops is faster by"] = round(row.min_ms / rows["mamba_ops"].min_ms, 2)
            bench.show(rows)


def run(bench, limits):
    for rows_count, dim in shapes.NORM[bench.mode]:
        for dtype in (torch.float32, torch.bfloat16):
            for threads in bench.threads:
                one_shape(bench, rows_count, dim, dtype, threads)
