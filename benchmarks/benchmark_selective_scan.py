"""selective_scan, the whole operator (bias, softplus, D, gate): beside its peers and the limit; memory; short rows."""

import math
import subprocess
import sys
import time

import torch

import mamba_ops
from mamba_ops import reference

from . import peers, shapes
from .harness import error_of

CHECKED_CHANNELS = 16
NAMES = ("u", "delta", "A", "B", "C", "D", "z", "delta_bias")
# A backward pass recomputes the states and takes about 1.6 times the arithmetic of the forward pass.
BACKWARD_FACTOR = 2.6
# The tight loop with the exponential of the kernels; and with a polynomial, which stays when the kernels get faster.
LIMITS = {"% of arithmetic limit": False, "% with exp by polynomial": True}
# Peers whose backward pass is quadratic in the length, and the length up to which it finishes in seconds.
QUADRATIC = {"plain PyTorch time loop": 512, "transformers": 512, "torch.compile, 8-step chunks": 2048}
PEER_STATE_STEPS = 2**28  # most peers hold several numbers for each
STEPS_BY_TURN = 2**30  # longer rows get fewer turns


def data(batch, dim, dstate, seqlen, dtype=torch.float32):
    def rows(count):
        return torch.randn(batch, seqlen, count).to(dtype).transpose(1, 2)

    A = -torch.arange(1, dstate + 1).float().repeat(dim, 1)
    u, delta, B, C, z = rows(dim), rows(dim), rows(dstate), rows(dstate), rows(dim)
    return u, delta, A, B, C, torch.ones(dim), z, torch.full((dim,), -4.0)


def ours(*arguments):
    return mamba_ops.selective_scan(*arguments, delta_softplus=True)[0]


def with_backward(function, arguments, dout):
    leaves = [t.detach().requires_grad_() for t in arguments]
    out = function(*leaves)
    return out.detach(), *torch.autograd.grad(out, leaves, dout)


def expected(arguments, dout):
    """Output and gradients of u and delta for the first channels, which do not depend on the others, in float64."""
    few = slice(CHECKED_CHANNELS)
    u, delta, z = (t[:, few].double() for t in (arguments[0], arguments[1], arguments[6]))
    A, D, delta_bias = (t[few].double() for t in (arguments[2], arguments[5], arguments[7]))
    u, delta, B, C = u.requires_grad_(), delta.requires_grad_(), arguments[3].double(), arguments[4].double()
    out, _ = reference.selective_scan(u, delta, A, B, C, D, z, delta_bias, delta_softplus=True)
    return out.detach(), *torch.autograd.grad(out, (u, delta), dout[:, few].double())


def check(want):
    def verify(name, result):
        got = result if isinstance(result, tuple) else (result,)
        return error_of([t[:, :CHECKED_CHANNELS] for t in got[: len(want)]], want)

    return verify


def too_much(peer, backward, shape):
    """Why a peer is left out, or None."""
    if backward and shape[-1] > QUADRATIC.get(peer, shape[-1]):
        return "a backward pass that is quadratic in the length"
    return "gigabytes of intermediate results" if math.prod(shape) > PEER_STATE_STEPS else None


def one_shape(bench, limits, shape, arguments, dout, want, threads, others, main):
    """Rows for one layout and number of threads; `main` has the time of a state step of the first shape."""
    batch, dim, dstate, seqlen = shape
    steps = math.prod(shape)
    u = arguments[0]
    layout = "channel-last" if u.stride(1) == 1 else "channel-first"
    label = f"batch {batch}, dim {dim}, dstate {dstate}, seqlen {seqlen}, {str(u.dtype)[6:]}, {layout}"
    for job, backward in (("forward", False), ("forward+backward", True)):
        functions, left_out = {"mamba_ops": ours}, {}
        for name, function in others.items():
            if reason := too_much(name, backward, shape):
                left_out.setdefault(reason, []).append(name)
            else:
                functions[name] = function
        for reason, names in left_out.items():
            bench.remark(f"{job} · {label}: left out for {reason}: {', '.join(names)}")
        candidates = {}
        for name, function in functions.items():
            if backward:
                candidates[name] = lambda function=function: with_backward(function, arguments, dout)
            else:
                candidates[name] = lambda function=function: function(*arguments)
        with torch.set_grad_enabled(backward):
            slow = [name for name in candidates if name != "mamba_ops" and (backward or seqlen > 512)]
            turns = min(bench.repeats, max(3, STEPS_BY_TURN // max(steps, 1)))
            rows = bench.compare(
                "selective_scan",
                f"{job} · {label}",
                candidates,
                check(want),
                threads=threads,
                slow=slow,
                repeats=turns,
            )
        factor = 1e3 * (BACKWARD_FACTOR if backward else 1)
        for row in rows.values():
            row.notes["1e9 state steps/s"] = round(steps / row.min_ms / 1e6, 2)
            for name, polynomial in LIMITS.items():
                seconds = limits.scan_seconds(threads, batch, dim, dstate, seqlen, polynomial)
                if seconds is not None:
                    row.notes[name] = round(100 * factor * seconds / row.min_ms, 1)
            if row.candidate == "mamba_ops":
                step = main.setdefault((job, threads), row.min_ms / steps)
                row.notes["state step, times the first shape's"] = round(row.min_ms / steps / step, 2)
            else:
                row.notes["mamba_ops is faster by"] = round(row.min_ms / rows["mamba_ops"].min_ms, 1)
            if backward and seqlen == 512 and QUADRATIC.get(row.candidate) == 512:
                row.notes["at seqlen 2048, extrapolated (quadratic), s"] = round(16 * row.min_ms / 1e3, 1)
        bench.show(rows)


def memory():
    """What the operator keeps for its backward pass, and what it needs for a moment, in units of the size of u."""
    batch, dim, dstate, seqlen = shapes.SCAN_MEMORY
    arguments = [t.requires_grad_() for t in data(batch, dim, dstate, seqlen)]
    size = arguments[0].numel() * arguments[0].element_size()
    kept = {}

    def pack(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = ours(*arguments)
    inputs = {t.untyped_storage().data_ptr() for t in arguments} | {out.untyped_storage().data_ptr()}
    extra = sum(nbytes for pointer, nbytes in kept.items() if pointer not in inputs)
    print(f"kept for backward beyond inputs and outputs, seqlen {seqlen}: {extra / size:.2f} times the size of u")
    del out
    for job, function, results in (("forward", lambda: ours(*arguments), 1), ("backward", None, 3)):
        if function is None:
            out = ours(*arguments)
            dout = torch.ones_like(out)

            def function(out=out, dout=dout):
                return torch.autograd.grad(out, arguments, dout)

        peak = peak_bytes(function)
        if peak is None:
            print("temporary memory is not measured: it needs /proc/self/clear_refs")
            return
        # u-sized results (out; du, ddelta, dz) and, in the forward, what is kept are not temporary.
        temporary = peak - results * size - (extra if job == "forward" else 0)
        print(f"temporary memory, {job}, seqlen {seqlen}: {max(temporary, 0) / size:.2f} times the size of u")


def peak_bytes(function):
    """Growth of the process's peak memory during the call; Linux only."""

    def status(key):
        with open("/proc/self/status") as file:
            return next(int(line.split()[1]) * 1024 for line in file if line.startswith(key))

    try:
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")  # the peak starts again from what is resident now
        before = status("VmRSS")
        result = function()
        peak = status("VmHWM")
        del result
        return peak - before
    except (OSError, StopIteration):
        return None


def small_lengths(bench, threads, dim=64, dstate=16):
    """B106: equal work in short and in long rows; and the first call of a process is as fast as the others."""
    candidates, wants = {}, {}
    for batch, seqlen in shapes.SMALL_LENGTHS:
        arguments = data(batch, dim, dstate, seqlen)
        dout = torch.randn(batch, seqlen, dim).transpose(1, 2)
        name = f"mamba_ops, batch {batch}, seqlen {seqlen}"
        wants[name] = expected(arguments, dout) if seqlen <= 1024 else None
        candidates[name] = lambda arguments=arguments, dout=dout: with_backward(ours, arguments, dout)

    def verify(name, result):
        return None if wants[name] is None else check(wants[name])(name, result)

    rows = bench.compare(
        "selective_scan", f"equal work, dim {dim}, dstate {dstate}", candidates, verify, threads=threads
    )
    longest = list(rows.values())[-1].min_ms
    for row in rows.values():
        row.notes["times the longest"] = round(row.min_ms / longest, 2)
    bench.show(rows)


def first_call():
    arguments = data(1, 1536, 16, 128)
    times = []
    for _ in range(6):
        start = time.perf_counter()
        ours(*arguments)
        times.append(1e3 * (time.perf_counter() - start))
    print(f"first call of the process {times[0]:.1f} ms, later {min(times[1:]):.1f} ms (batch 1, dim 1536, seqlen 128)")


def in_fresh_process(bench, function):
    """Remarks that need a process in which nothing has run and no memory is kept."""
    script = f"from {__name__} import {function.__name__}; {function.__name__}()"
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    for line in result.stdout.splitlines():
        bench.remark(line)


def run(bench, limits):
    in_fresh_process(bench, first_call)
    in_fresh_process(bench, memory)
    missing = []
    others = peers.scans(missing)
    for text in missing:
        bench.remark(text)
    main = {}
    for shape in shapes.SCAN[bench.mode]:
        long = math.prod(shape) >= shapes.SCAN_LONG
        plotted = shape[:2] == (1, 1536)
        for dtype in shapes.DTYPES[bench.mode][: 1 if long else None]:
            torch.compiler.reset()  # a peer is compiled for every shape; beyond a few torch would stop that in silence
            arguments = data(*shape, dtype)
            dout = torch.randn(shape[0], shape[3], shape[1]).to(dtype).transpose(1, 2)
            want = expected(arguments, dout)
            wide = dtype == torch.float32
            for threads in bench.threads if wide else bench.threads[:1]:
                compared = others if plotted and wide and threads == bench.threads[0] else {}
                one_shape(bench, limits, shape, arguments, dout, want, threads, compared, main)
            if wide and not long:
                arguments, dout = [t.contiguous() for t in arguments], dout.contiguous()
                for threads in bench.threads:
                    one_shape(bench, limits, shape, arguments, dout, want, threads, {}, main)
    small_lengths(bench, bench.threads[-1])
