"""Timing that a shared machine cannot spoil too much: candidates take turns, the minimum counts, the median beside it.

A candidate is verified against float64 before it is timed; its error is part of the row. Freed memory is kept by the
process (mallopt), so that no candidate is charged for the pages of its fresh outputs.
"""

import ctypes
import datetime
import gc
import json
import platform
import statistics
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch

from mamba_ops import __version__, testing
from mamba_ops._library import build_information

RESULTS = Path(__file__).parent / "results"
M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_MAX = -1, -2, -4


def keep_freed_memory():
    """glibc: allocate from the heap only and never give it back, so that fresh tensors are not page faults."""
    try:
        libc = ctypes.CDLL("libc.so.6")
        libc.mallopt(M_MMAP_MAX, 0)
        libc.mallopt(M_TRIM_THRESHOLD, 2**31 - 1)
        libc.mallopt(M_TOP_PAD, 2**28)
    except (OSError, AttributeError):
        print("mallopt is not available: times include the page faults of fresh outputs")


@dataclass
class Row:
    op: str
    job: str
    candidate: str
    threads: int
    min_ms: float = 0.0
    median_ms: float = 0.0
    cpu_ms: float = 0.0
    error: float | None = None  # relative to max |expected|, against float64
    notes: dict = field(default_factory=dict)  # gb_s, percent_of_copy, percent_of_limit, times_faster, ...


def processor():
    try:
        text = Path("/proc/cpuinfo").read_text()
        return next(line.split(":", 1)[1].strip() for line in text.splitlines() if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or "unknown"


class Bench:
    def __init__(self, mode, threads, repeats):
        self.mode, self.threads, self.repeats = mode, threads, repeats
        self.rows = []
        self.remarks = []

    def remark(self, text):
        print(text, flush=True)
        self.remarks.append(text)

    def compare(self, op, job, candidates, verify, *, threads, repeats=None, slow=()):
        """Rows for {name: function}. verify(name, result) returns the error, or None where there is nothing to compare.

        A candidate that fails or is wrong gets no row, but a remark. Those named in `slow` run once.
        """
        torch.set_num_threads(threads)
        ready, errors = {}, {}
        for name, function in candidates.items():
            try:
                error = verify(name, function())
            except Exception as problem:  # a peer may fail in any way; the others still count
                self.remark(
                    f"{op}, {job}: {name} left out: {type(problem).__name__}: {str(problem).splitlines()[0][:160]}"
                )
                continue
            if error is not None and not error <= 5e-2:
                self.remark(f"{op}, {job}: {name} left out: its result is wrong (relative error {error:.2g})")
                continue
            ready[name], errors[name] = function, error
        times = {name: [] for name in ready}
        gc.disable()
        for turn in range(repeats or self.repeats):
            for name, function in ready.items():
                if turn and name in slow:
                    continue
                start, cpu = time.perf_counter(), time.process_time()
                result = function()
                times[name].append((time.perf_counter() - start, time.process_time() - cpu))
                del result
        gc.enable()
        rows = []
        for name, measured in times.items():
            wall = [1e3 * seconds for seconds, _ in measured]
            row = Row(op, job, name, threads, min(wall), statistics.median(wall), 1e3 * min(c for _, c in measured))
            row.error = errors[name]
            rows.append(row)
        self.rows += rows
        return {row.candidate: row for row in rows}

    def beside_copy(self, op, job, candidates, verify, nbytes, *, threads):
        """compare() with Tensor.copy_ beside, which reads and writes `nbytes` altogether, and shares of its speed."""
        source = torch.ones(nbytes // 8)
        target = torch.zeros_like(source)
        candidates = {"Tensor.copy_": lambda: target.copy_(source), **candidates}
        rows = self.compare(
            op,
            job,
            candidates,
            lambda name, result: None if name == "Tensor.copy_" else verify(name, result),
            threads=threads,
        )
        for name, row in rows.items():
            row.notes["MB"] = round(nbytes / 1e6, 1)
            row.notes["GB/s"] = round(nbytes / row.min_ms / 1e6, 1)
            row.notes["% of copy bandwidth"] = round(100 * rows["Tensor.copy_"].min_ms / row.min_ms)
            if name not in ("Tensor.copy_", "mamba_ops") and "mamba_ops" in rows:
                row.notes["mamba_ops is faster by"] = round(row.min_ms / rows["mamba_ops"].min_ms, 2)
        self.show(rows)

    def show(self, rows):
        for row in rows.values():
            error = "" if row.error is None else f"error {row.error:.1e}"
            notes = ", ".join(f"{key} {value}" for key, value in row.notes.items())
            name = f"{row.job} · {row.candidate} · {row.threads} thread{'s' if row.threads > 1 else ''}"
            print(f"{name:<84} {row.min_ms:>10.3f} ms (median {row.median_ms:.3f}) {error} {notes}", flush=True)

    def header(self):
        build = build_information()
        return {
            "date": datetime.date.today().isoformat(),
            "cpu": processor(),
            "cpu_level": torch.ops.mamba.cpu_capability(),
            "torch": torch.__version__,
            "mamba_ops": __version__,
            "revision": build.get("git_revision"),
            "compiler": build.get("compiler"),
            "mode": self.mode,
        }

    def save(self, op, command):
        rows = [row for row in self.rows if row.op == op]
        RESULTS.mkdir(exist_ok=True)
        record = {**self.header(), "command": command, "remarks": self.remarks, "rows": [asdict(row) for row in rows]}
        (RESULTS / f"{op}.json").write_text(json.dumps(record, indent=1) + "\n")
        (RESULTS / f"{op}.md").write_text(self.markdown(op, rows, command))
        self.remarks = []

    def markdown(self, op, rows, command):
        head = self.header()
        lines = [
            f"# {op}",
            "",
            f"`{command}`, {head['date']}, {head['cpu']} ({head['cpu_level']}), torch {head['torch']}",
            "",
        ]
        lines += [f"- {text}" for text in self.remarks]
        keys = list(dict.fromkeys(key for row in rows for key in row.notes))
        columns = [
            "job",
            "candidate",
            "threads",
            "min ms",
            "median ms",
            "CPU ms",
            "error",
            *(key.replace("_", " ") for key in keys),
        ]
        lines += ["", "| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
        for row in rows:
            cells = [
                row.job,
                row.candidate,
                row.threads,
                f"{row.min_ms:.3f}",
                f"{row.median_ms:.3f}",
                f"{row.cpu_ms:.3f}",
            ]
            cells += ["" if row.error is None else f"{row.error:.1e}", *(row.notes.get(key, "") for key in keys)]
            lines.append("| " + " | ".join(map(str, cells)) + " |")
        return "\n".join(lines) + "\n"


def call_overhead(bench, op, job, candidates, verify, *, threads=1, calls=300, repeats=40):
    """Rows for functions that take microseconds: `calls` of each in a turn, and how many times torch.add each costs."""
    torch.set_num_threads(threads)
    with torch.no_grad():
        errors = {name: verify(name, function()) for name, function in candidates.items()}
        times = {name: [] for name in candidates}
        gc.disable()
        for _ in range(repeats):
            for name, function in candidates.items():
                start = time.perf_counter()
                for _ in range(calls):
                    function()
                times[name].append(1e3 * (time.perf_counter() - start) / calls)
        gc.enable()
    rows = {}
    for name, measured in times.items():
        row = Row(op, job, name, threads, min(measured), statistics.median(measured), error=errors[name])
        row.notes["us"] = round(1e3 * row.min_ms, 2)
        row.notes["x torch.add"] = round(row.min_ms / min(times["torch.add"]), 2)
        rows[name] = row
    bench.rows += rows.values()
    bench.show(rows)
    return rows


def error_of(results, expected):
    """The largest relative error of several tensors."""
    return max(testing.relative_error(result, want) for result, want in zip(results, expected))
