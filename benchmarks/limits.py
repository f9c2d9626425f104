"""What the machine can do at most, measured in the same run: copy bandwidth, exponentials, state steps of a scan."""

import ctypes
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from . import native

LOOPS = ("scan_steps", "exponentials", "polynomial_scan_steps", "polynomial_exponentials")


def load_loops():
    """The compiled loops of limits.cpp, or None where there is no compiler."""
    library = native.load(Path(__file__).with_name("limits.cpp"), torch.ops.mamba.cpu_capability())
    if library is None:
        print("no C++ compiler: the arithmetic limits are not measured")
        return None
    for name in LOOPS:
        getattr(library, name).restype = ctypes.c_longlong
        getattr(library, name).argtypes = [ctypes.c_longlong]
    return library


def rate(function, threads, seconds=0.05):
    """Items a second of function(repeats) -> items, on `threads` threads at once; the best of five."""
    repeats = 1
    while True:
        start = time.perf_counter()
        function(repeats)
        if time.perf_counter() - start > seconds / 4:
            break
        repeats *= 4
    best = 0.0
    with ThreadPoolExecutor(threads) as pool:
        for _ in range(5):
            start = time.perf_counter()
            items = sum(pool.map(function, [repeats] * threads))
            best = max(best, items / (time.perf_counter() - start))
    return best


class Limits:
    """Items a second of the LOOPS by number of threads; None without a compiler."""

    def __init__(self, threads):
        library = load_loops()
        self.rates = {
            (name, n): rate(getattr(library, name), n) if library else None for name in LOOPS for n in threads
        }

    def scan_seconds(self, threads, batch, dim, dstate, seqlen, polynomial=False):
        """Arithmetic of the whole scan: state steps, and the exponentials of softplus and silu."""
        prefix = "polynomial_" if polynomial else ""
        steps, exponentials = (self.rates[prefix + name, threads] for name in ("scan_steps", "exponentials"))
        if steps is None:
            return None
        tokens = batch * dim * seqlen
        return tokens * dstate / steps + 2 * tokens / exponentials
