"""Thread scaling of scan, convolution and norm with backward: one thread against all, which give the same bits.

Memory bounds the norm: Tensor.copy_ of as many bytes stands beside it, since neither can scale better than memory does.
The gated norm of shorter rows is bound by its arithmetic.
"""

import torch

import mamba_ops

from . import benchmark_causal_conv1d, benchmark_rms_norm, benchmark_selective_scan, shapes


def norm_job(rows, dim, gated):
    inputs = [torch.randn(rows, dim) for _ in range(2 if gated else 1)]
    dout, weight = torch.randn(rows, dim), torch.ones(dim)

    def norm(x, *more):
        *z, weight = more
        return mamba_ops.rms_norm(x, weight, z=z[0] if gated else None)[0]

    return lambda: benchmark_rms_norm.with_backward(norm, inputs, weight, dout)


def copy_job(rows, dim):
    """As many bytes as the norm moves: 3 tensors read, 2 written."""
    source = torch.randn(5 * rows * dim // 2)
    target = torch.zeros_like(source)
    return lambda: (target.copy_(source),)


def jobs():
    """{label: function of no arguments that returns tensors}"""
    scan = benchmark_selective_scan.data(*shapes.THREADS["selective_scan"])
    conv = benchmark_causal_conv1d.data(*shapes.THREADS["causal_conv1d"], torch.float32, "channel-last")
    scan_dout = torch.randn_like(scan[0])
    return {
        "selective_scan": lambda: benchmark_selective_scan.with_backward(
            benchmark_selective_scan.ours, scan, scan_dout
        ),
        "causal_conv1d": lambda: benchmark_causal_conv1d.with_backward(benchmark_causal_conv1d.ours, *conv),
        "rms_norm": norm_job(*shapes.THREADS["rms_norm"], gated=False),
        "Tensor.copy_ of rms_norm's bytes": copy_job(*shapes.THREADS["rms_norm"]),
        "rms_norm, gated": norm_job(*shapes.THREADS["rms_norm, gated"], gated=True),
    }


def same_bits(want):
    """The other benchmarks compare with float64; here every number has to be that of one thread."""
    return lambda name, result: float(not all(torch.equal(a, b) for a, b in zip(result, want)))


def run(bench, limits):
    for name, function in jobs().items():
        torch.set_num_threads(1)
        check = same_bits(function())
        copies = name.startswith("Tensor.copy_")
        shape = shapes.THREADS["rms_norm" if copies else name]
        job = f"{name}{'' if copies else ', forward+backward'} · {', '.join(map(str, shape))}, float32"
        single = None
        for threads in bench.threads:
            candidates = {"Tensor.copy_" if copies else "mamba_ops": function}
            rows = bench.compare("threads", job, candidates, check, threads=threads)
            for row in rows.values():
                single = single or row
                row.notes["same bits as one thread"] = "yes"
                row.notes[f"times {single.threads} thread{'s' if single.threads > 1 else ''}"] = round(
                    single.min_ms / row.min_ms, 2
                )
            bench.show(rows)
