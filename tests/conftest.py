"""Fixtures shared by all tests: backends, thread settings, compiler cache, the marker `slow`."""

import hashlib
import os
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import checks
import cuda_emulator
import pytest
import torch

from mamba_ops import _library

# Programs that torch.compile finds in its cache were made for the output sizes of the operators as they were then.
ROOT = Path(__file__).parent.parent
OPERATORS = hashlib.sha256(b"".join(path.read_bytes() for path in sorted(ROOT.glob("mamba_ops/ops/*.py"))))
os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(ROOT / "build" / "inductor" / OPERATORS.hexdigest()[:16]))


@dataclass(frozen=True)
class Backend:
    """Where an operator runs: `backend.op("rms_norm")` is the operator, `backend.device` where its tensors live."""

    name: str
    device: str
    namespace: str
    missing: frozenset = frozenset()  # operators that have no kernel
    many: int = 70_000  # rows or channels, beyond what some launches may hold
    long: int = 2049  # a long sequence

    def op(self, name):
        if name in self.missing:
            pytest.skip(f"{name} has no CUDA kernel")
        return getattr(getattr(torch.ops, self.namespace), name)

    def has(self, name):
        return name not in self.missing and hasattr(getattr(torch.ops, self.namespace), name)

    def __str__(self):
        return self.name


def without_kernel(namespace):
    """The operators that have neither a kernel of their own nor one of their forward half."""
    names = _library.operator_names(namespace)

    def has_kernel(name):
        return name in names and torch._C._dispatch_has_kernel_for_dispatch_key(f"{namespace}::{name}", "CPU")

    return frozenset(name for name in names if not has_kernel(name) and not has_kernel(f"{name}_fwd"))


@cache
def available_backends():
    """cpu; emulated: the CUDA sources compiled for the CPU (tests/cuda_emulator); cuda where there is a GPU."""
    backends = [Backend("cpu", "cpu", "mamba")]
    if cuda_emulator.load("fast"):
        # One grid of 70,000 blocks is emulated in test_mamba_step; everywhere else fewer are as good, and much faster.
        backends.append(Backend("emulated", "cpu", "mamba_emulated", without_kernel("mamba_emulated"), 2_000, 300))
    if torch.cuda.is_available():
        backends.append(Backend("cuda", "cuda", "mamba"))
    return backends


def pytest_collection_modifyitems(config, items):
    if "slow" in config.option.markexpr:
        return
    for item in items:
        if "slow" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="slow: run with -m slow"))


def pytest_generate_tests(metafunc):
    if "backend" in metafunc.fixturenames:
        metafunc.parametrize("backend", available_backends(), ids=str)


@pytest.fixture(autouse=True)
def settings_of_the_backend(request, monkeypatch):
    """Tests of a backend on another device make their tensors there; the emulator is slow."""
    backend = getattr(request.node, "callspec", None) and request.node.callspec.params.get("backend")
    if backend and backend.name == "emulated":
        monkeypatch.setattr(checks, "REPEATS", 3)
        monkeypatch.setattr(checks, "COMPILER", "aot_eager")
        monkeypatch.setattr(checks, "OPCHECK", checks.OPCHECK[:3])
    if not backend or backend.device == "cpu":
        yield
    else:
        with torch.device(backend.device):
            yield


@pytest.fixture(autouse=True)
def restore_torch_settings():
    """Every test starts from the same seed and leaves threads and the deterministic flag as they were."""
    threads = torch.get_num_threads()
    deterministic = torch.are_deterministic_algorithms_enabled()
    torch.manual_seed(0)
    yield
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(deterministic)
