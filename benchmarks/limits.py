"""What the machine can do at most, measured in the same run: copy bandwidth, exponentials, state steps of a scan."""

import ctypes
import os
import shutil
import subprocess
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

ROOT = Path(__file__).parent.parent
FLAGS = {
    "baseline": [],
    "avx2": ["-DMAMBA_CPU_AVX2=1", "-mavx2", "-mfma", "-mf16c"],
    "avx512": ["-DMAMBA_CPU_AVX512=1", "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mfma", "-mf16c"],
}


def load_loops():
    """The compiled loops of limits.cpp, or None where there is no compiler."""
    compiler = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++")
    if not compiler:
        print("no C++ compiler: the arithmetic limits are not measured")
        return None
    level = torch.ops.mamba.cpu_capability()
    folder = Path(tempfile.mkdtemp(prefix="mamba_ops_limits_"))
    try:
        command = [
            *compiler.split(),
            "-std=c++20",
            "-O3",
            "-fno-math-errno",
            "-fno-trapping-math",
            "-ffp-contract=fast",
        ]
        command += ["-shared", "-fPIC", "-w", *FLAGS[level], f"-DMAMBA_CPU_LEVEL={level}", f"-I{ROOT / 'csrc'}"]
        subprocess.run(
            [*command, str(Path(__file__).with_name("limits.cpp")), "-o", str(folder / "limits.so")], check=True
        )
        library = ctypes.CDLL(str(folder / "limits.so"))
    finally:
        shutil.rmtree(folder)
    for name in ("scan_steps", "exponentials"):
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
    """scan_steps, exponentials (items a second; None without a compiler) by number of threads."""

    def __init__(self, threads):
        library = load_loops()
        self.scan_steps = {n: rate(library.scan_steps, n) if library else None for n in threads}
        self.exponentials = {n: rate(library.exponentials, n) if library else None for n in threads}

    def scan_seconds(self, threads, batch, dim, dstate, seqlen):
        """Arithmetic of the whole scan: state steps, and the exponentials of softplus and silu."""
        if self.scan_steps[threads] is None:
            return None
        tokens = batch * dim * seqlen
        return tokens * dstate / self.scan_steps[threads] + 2 * tokens / self.exponentials[threads]
