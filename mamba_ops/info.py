"""What `python -m mamba_ops` prints: versions, build, CPU level, GPUs, a table operator x backend, and a self-test."""

from __future__ import annotations

import platform
from collections.abc import Iterator
from importlib import import_module

import torch

from . import _library
from ._version import __version__


def versions() -> Iterator[tuple[str, str]]:
    """Rows of the environment report."""
    build = _library.build_information()
    yield "mamba_ops", __version__
    yield "torch", torch.__version__
    yield "python", f"{platform.python_version()} on {platform.platform()}"
    yield "library", str(_library.FOLDER / "_C.so")
    yield "built from", f"{build.get('git_revision')}, headers of torch {build.get('torch_headers')}"
    yield "loads in", f"torch >= {build.get('torch_minimum')}, {build.get('platform')}"
    yield "compiler", str(build.get("compiler"))
    yield "flags", " ".join(build.get("flags", []))
    levels = ", ".join(build.get("cpu_levels", []))
    yield "CPU level", f"{torch.ops.mamba.cpu_capability()} (built: {levels}; MAMBA_OPS_CPU_CAPABILITY chooses)"
    yield "threads", str(torch.get_num_threads())
    if torch.cuda.is_available():
        names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
        yield "GPUs", ", ".join(names)
    else:
        yield "GPUs", "none that torch can use"


def backends() -> Iterator[tuple[str, dict[str, bool]]]:
    """Every operator with the backends it has a kernel for."""
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    cuda_loaded = torch.version.cuda is not None and (_library.FOLDER / "_C_cuda.so").exists()
    for name in _library.operator_names():
        full = f"{_library.NAMESPACE}::{name}"
        composite = has(full, "CompositeImplicitAutograd") or has(full, "CompositeExplicitAutograd")
        yield (
            name,
            {
                "CPU": composite or has(full, "CPU"),
                "CUDA": cuda_loaded and (composite or has(full, "CUDA")),
                "fake": composite or has(full, "Meta"),
                "gradients": has(full, "CompositeImplicitAutograd"),
            },
        )


def self_test() -> Iterator[tuple[str, str | None]]:
    """Compare every operator with its reference on small inputs, gradients too; yields (operator, error or None)."""
    from .ops import MODULES
    from .testing import check_values

    for module in MODULES:
        name = module.__name__.rpartition(".")[2]
        reference = import_module(f"{__package__}.reference.{name}")
        error = None
        for dtype in (torch.float64, torch.float32, torch.bfloat16):
            generator = torch.Generator().manual_seed(0)
            try:
                if hasattr(module, "self_test"):
                    module.self_test(reference, dtype, generator)
                else:
                    inputs = reference.example_inputs(dtype=dtype, generator=generator)
                    check_values(getattr(module, name), inputs, getattr(reference, name))
            except (AssertionError, RuntimeError) as problem:
                error = f"{str(dtype).removeprefix('torch.')}: {problem}"
                break
        yield name, error


def main() -> int:
    """Print the report and run the self-test; 0 when every operator passed."""
    for key, value in versions():
        print(f"{key:11} {value}")
    print(f"\n{'operator':26} CPU   CUDA  fake  gradients")
    for name, found in backends():
        marks = "  ".join(f"{'yes' if there else 'no':4}" for there in found.values())
        print(f"{name:26} {marks}")
    print("\nself-test: each operator against its plain PyTorch reference, outputs and gradients")
    failures = 0
    for name, error in self_test():
        failures += error is not None
        print(f"{name:26} {'pass' if error is None else f'FAIL {error}'}")
    return 1 if failures else 0
