"""A training step of one Mamba layer (forward and backward, gradients of the input and of every parameter), float32.

The matrix products of such a step (four projections, each with the gradients of its input and weight) are measured
alone in the same run: the rest of the layer's time is the share that is not a matrix product. Peers: transformers'
MambaMixer with the same weights, on its plain path and with mambapy's scan, where they are installed.
"""

import torch
import torch.nn.functional as F

from mamba_ops.layers import Mamba

from . import peers, shapes
from .harness import error_of

QUADRATIC = "transformers"  # its plain path's backward pass, in the length


def training_step(layer, hidden, dout):
    leaf = hidden.detach().requires_grad_()
    out = layer(leaf)
    parameters = list(layer.parameters())
    gradients = torch.autograd.grad(out, [leaf, *parameters], dout)
    return out.detach(), gradients[0]


def products(layer, batch, seqlen):
    """The layer's matrix products, forward and backward, on inputs of the layer's shapes."""
    weights = [getattr(layer, name).weight for name in ("in_proj", "x_proj", "dt_proj", "out_proj")]
    inputs = [torch.randn(batch, seqlen, weight.shape[1]).requires_grad_() for weight in weights]
    douts = [torch.randn(batch, seqlen, weight.shape[0]) for weight in weights]

    def run():
        for x, weight, dout in zip(inputs, weights, douts):
            torch.autograd.grad(F.linear(x, weight), (x, weight), dout)

    return run


def one_shape(bench, d_model, batch, seqlen, threads):
    torch.manual_seed(0)
    layer = Mamba(d_model)
    hidden, dout = (torch.randn(batch, seqlen, d_model) for _ in range(2))
    exact = Mamba(d_model, dtype=torch.float64)
    exact.load_state_dict(layer.state_dict())
    expected = training_step(exact.double(), hidden.double(), dout.double())
    del exact
    candidates = {
        "matrix products alone": products(layer, batch, seqlen),
        "mamba_ops": lambda: training_step(layer, hidden, dout),
    }
    missing = []
    for name, mixer in peers.mixers(layer, missing).items():
        if name == QUADRATIC and seqlen > 512:
            missing.append(f"{name} at seqlen {seqlen}: left out, its backward pass is quadratic in the length")
            continue
        candidates[name] = lambda mixer=mixer: training_step(mixer, hidden, dout)
    for text in missing:
        bench.remark(text)

    def check(name, result):
        return None if result is None else error_of(result, expected)

    job = f"training step · d_model {d_model}, batch {batch}, seqlen {seqlen}, float32"
    rows = bench.compare("mamba", job, candidates, check, threads=threads, slow=[QUADRATIC])
    for name, row in rows.items():
        if name != "matrix products alone":
            share = 1 - rows["matrix products alone"].min_ms / row.min_ms
            row.notes["% not matrix products"] = round(100 * share)
        if name not in ("matrix products alone", "mamba_ops"):
            row.notes["mamba_ops is faster by"] = round(row.min_ms / rows["mamba_ops"].min_ms, 1)
    bench.show(rows)


def run(bench, limits):
    for d_model, batch, seqlen in shapes.LAYER[bench.mode]:
        for threads in bench.threads:
            one_shape(bench, d_model, batch, seqlen, threads)
