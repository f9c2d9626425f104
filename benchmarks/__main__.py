"""python -m benchmarks [--quick | --full] [--threads 1,2] [--repeats N] [--save] [--plots] [op ...]"""

import argparse
import importlib
import os
import sys
from pathlib import Path

import torch

from . import harness, plots
from .limits import Limits

OPS = sorted(path.stem.removeprefix("benchmark_") for path in Path(__file__).parent.glob("benchmark_*.py"))


def main():
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description="Measure the operators beside their peers."
    )
    parser.add_argument("op", nargs="*", help=f"which operators (default: all): {', '.join(OPS)}")
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--quick", action="store_true", help="the main shapes, few repeats (default)")
    mode.add_argument("--full", action="store_true", help="every shape, more repeats")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    parser.add_argument(
        "--threads", default=f"1,{cores}" if cores > 1 else "1", help="default: one and all: %(default)s"
    )
    parser.add_argument("--repeats", type=int, help="turns for every candidate (quick: 5, full: 15)")
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/<op>.json and .md")
    parser.add_argument("--plots", action="store_true", help="only draw benchmarks/results/*.png from what was saved")
    arguments = parser.parse_args()
    if arguments.plots:
        return plots.draw()
    unknown = set(arguments.op) - set(OPS)
    if unknown:
        parser.error(f"unknown operator {', '.join(sorted(unknown))}; known: {', '.join(OPS)}")

    threads = [int(number) for number in arguments.threads.split(",")]
    name = "full" if arguments.full else "quick"
    bench = harness.Bench(name, threads, arguments.repeats or (15 if arguments.full else 5))
    for key, value in bench.header().items():
        print(f"{key}: {value}")
    for op in arguments.op or OPS:
        print(f"\n== {op}", flush=True)
        importlib.import_module(f"{__package__}.benchmark_{op}").run(bench, Limits(threads))
        if arguments.save:
            bench.save(op, " ".join(["python -m benchmarks", *sys.argv[1:]]))
    if arguments.save:
        plots.draw()


if __name__ == "__main__":
    torch.manual_seed(0)
    harness.keep_freed_memory()
    main()
