"""rms_norm: forward and forward + backward, plain, with residual, gated, beside Tensor.copy_ of as many bytes.

Bytes are counted as an ideal operator moves them. Forward: x is read, the output written; with a residual also: it is
read, the sum written; with a gate: z is read. With backward also: the inputs (x, residual, z) and the output's gradient
are read, their gradients written (x and the residual have one in common). Weights and the saved norms are left out
(they are small); a second reading of anything would count against the operator. Tensor.copy_ reads and writes the same
number of bytes altogether.
"""

import torch

import mamba_ops
from mamba_ops import reference

from . import peers, shapes
from .harness import error_of

# name of the other input: tensors of x's size that the forward pass moves, and the forward and backward pass
VARIANTS = {None: (2, 5), "residual": (4, 8), "z": (3, 8)}


def with_backward(function, inputs, weight, dout):
    leaves = [t.detach().requires_grad_() for t in (*inputs, weight)]
    out = function(*leaves)
    return out.detach(), *torch.autograd.grad(out, leaves, dout)


def one_shape(bench, rows_count, dim, dtype, threads):
    x, dout, other = (torch.randn(rows_count, dim).to(dtype) for _ in range(3))
    weight = 1 + 0.1 * torch.randn(dim)
    for option, counts in VARIANTS.items():
        inputs = (x, other) if option else (x,)

        def ours(*arguments, option=option):
            *given, weight = arguments
            return mamba_ops.rms_norm(given[0], weight, **({option: given[1]} if option else {}))[0]

        functions = {"mamba_ops": ours}
        if not option and dtype == torch.float32:
            functions.update(peers.norms())
        exact = [t.double().requires_grad_() for t in inputs]
        options = {option: exact[1]} if option else {}
        want = reference.rms_norm(exact[0], weight.double(), **options)[0]
        expected = [want.detach(), *torch.autograd.grad(want, exact, dout.double())]

        def check(name, result, expected=expected):
            return error_of(result if isinstance(result, tuple) else (result,), expected)

        for job, tensors, wrap in zip(("forward", "forward+backward"), counts, (False, True)):
            candidates = {}
            for name, function in functions.items():
                if wrap:
                    candidates[name] = lambda function=function, inputs=inputs: with_backward(
                        function, inputs, weight, dout
                    )
                else:
                    candidates[name] = lambda function=function, inputs=inputs: function(*inputs, weight)
            variant = {None: "plain", "residual": "residual", "z": "gated"}[option]
            label = f"{job}, {variant} · rows {rows_count}, dim {dim}, {str(dtype)[6:]}"
            with torch.set_grad_enabled(wrap):
                nbytes = tensors * x.numel() * x.element_size()
                bench.beside_copy("rms_norm", label, candidates, check, nbytes, threads=threads)


def run(bench, limits):
    for rows_count, dim in shapes.NORM[bench.mode]:
        for dtype in shapes.DTYPES[bench.mode]:
            for threads in bench.threads:
                one_shape(bench, rows_count, dim, dtype, threads)
