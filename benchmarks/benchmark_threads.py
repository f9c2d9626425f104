"""Thread scaling of scan, convolution and norm with backward: one thread against all, which give the same bits."""

import torch

import mamba_ops

from . import benchmark_causal_conv1d, benchmark_rms_norm, benchmark_selective_scan, shapes


def jobs():
    """{label: function of no arguments that returns tensors}"""
    scan = benchmark_selective_scan.data(*shapes.THREADS["selective_scan"])
    conv = benchmark_causal_conv1d.data(*shapes.THREADS["causal_conv1d"], torch.float32, "channel-last")
    x, dout = (torch.randn(*shapes.THREADS["rms_norm"]) for _ in range(2))
    scan_dout = torch.randn_like(scan[0])

    def norm(x, weight):
        return mamba_ops.rms_norm(x, weight)[0]

    return {
        "selective_scan": lambda: benchmark_selective_scan.with_backward(
            benchmark_selective_scan.ours, scan, scan_dout
        ),
        "causal_conv1d": lambda: benchmark_causal_conv1d.with_backward(benchmark_causal_conv1d.ours, *conv),
        "rms_norm": lambda: benchmark_rms_norm.with_backward(norm, (x,), torch.ones(x.shape[-1]), dout),
    }


def same_bits(want):
    """The other benchmarks compare with float64; here every number has to be that of one thread."""
    return lambda name, result: float(not all(torch.equal(a, b) for a, b in zip(result, want)))


def run(bench, limits):
    for name, function in jobs().items():
        torch.set_num_threads(1)
        check = same_bits(function())
        job = f"{name}, forward+backward · {', '.join(map(str, shapes.THREADS[name]))}, float32"
        single = None
        for threads in bench.threads:
            rows = bench.compare("threads", job, {"mamba_ops": function}, check, threads=threads)
            for row in rows.values():
                single = single or row
                row.notes["same bits as one thread"] = "yes"
                row.notes[f"times {single.threads} thread{'s' if single.threads > 1 else ''}"] = round(
                    single.min_ms / row.min_ms, 2
                )
            bench.show(rows)
