"""What the CUDA sources promise without a GPU: every launch on the tensor's device and in its current stream (B105)."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from mamba_ops import _library

CSRC = Path(__file__).parent.parent / "csrc"
KERNELS = sorted((CSRC / "cuda").glob("*.cu*"))
OPERATORS = sorted(path.stem for path in (CSRC / "params").glob("*.h") if path.stem != "kernel")
NOT_ALLOWED = ("<<<", "Synchronize", "cudaSetDevice", "cudaMalloc", "cudaMemcpy", "cudaMemset", "cudaStreamPerThread")


@pytest.mark.parametrize("path", KERNELS, ids=lambda path: path.name)
def test_launches_take_the_context_and_nothing_waits(path):
    """The context holds the stream; allocation, copies and waiting would break a graph capture."""
    text = path.read_text()
    for call in re.findall(r"(?<![\w:>])launch\(([^,]*),", text):
        assert call.strip() in ("context", "const Context& context"), f"launch({call}, ...) has no context"
    assert not [word for word in NOT_ALLOWED if word in re.sub(r"//.*", "", text)]


def test_the_context_is_of_the_tensors_device_and_current_stream():
    text = (CSRC / "ops" / "cuda_call.h").read_text()
    guard, stream, call = (
        text.index(part)
        for part in (
            "DeviceGuard guard(device)",
            "aoti_torch_get_current_cuda_stream(device, &stream)",
            "kernel(context(stream))",
        )
    )
    assert guard < stream < call


@pytest.mark.parametrize("name", OPERATORS)
def test_the_host_layer_reaches_kernels_through_the_guard_only(name):
    text = (CSRC / "ops" / f"{name}.cpp").read_text()
    assert "MAMBA_RUN(" in text
    assert "cuda::" not in text


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_tensors_on_a_device_that_is_not_the_current_one():
    x = torch.randn(1000, 64)
    with torch.cuda.stream(torch.cuda.Stream("cuda:1")):
        there = x.to("cuda:1", non_blocking=True)
        with torch.cuda.device(0):
            found = torch.ops.mamba.rms_norm(there)[0]
        assert found.device == there.device
        torch.testing.assert_close(found.cpu(), torch.ops.mamba.rms_norm(x)[0])


LIBRARY = _library.FOLDER / "_C_cuda.so"


def readelf(option):
    return subprocess.run(["readelf", "-W", option, str(LIBRARY)], capture_output=True, text=True, check=True).stdout


needs_library = pytest.mark.skipif(
    not LIBRARY.exists() or not shutil.which("readelf") or not shutil.which("cc"),
    reason="needs a build with CUDA, readelf and a C compiler",
)


@needs_library
def test_the_cuda_library_needs_torch_and_the_c_library_only():
    """It loads beside any CUDA runtime and cuBLAS, and with every Python."""
    needed = set(re.findall(r"\(NEEDED\).*\[(.*)\]", readelf("-d")))
    assert "libtorch_cuda.so" in needed
    assert not {name for name in needed if name.startswith(("libcu", "libnv", "libpython"))}
    undefined = re.findall(r" UND (\S+)", readelf("--dyn-syms"))
    assert any(name.startswith("aoti_torch_") for name in undefined)
    assert not [name for name in undefined if name.startswith(("cuda", "cublas", "_ZN2at", "_ZN3c10", "Py"))]


SCRIPT = """
import ctypes, os, torch
torch.ops.load_library({cpu!r})
ctypes.CDLL({cuda!r}, mode=os.RTLD_LAZY)
has = torch._C._dispatch_has_kernel_for_dispatch_key
names = [s.name for s in torch._C._jit_get_all_schemas() if s.name.startswith("mamba::") and has(s.name, "CPU")]
assert len(names) > 10 and all(has(name, "CUDA") for name in names), names
"""


@needs_library
@pytest.mark.skipif(torch.version.cuda is not None, reason="a torch with CUDA has loaded it already")
def test_the_cuda_library_registers_every_operator(tmp_path):
    """With an empty library in place of libtorch_cuda.so, whose functions are looked up when they are called."""
    stub = ["cc", "-shared", "-x", "c", "/dev/null", "-Wl,-soname,libtorch_cuda.so"]
    subprocess.run([*stub, "-o", str(tmp_path / "libtorch_cuda.so")], check=True)
    script = SCRIPT.format(cpu=str(LIBRARY.with_name("_C.so")), cuda=str(LIBRARY))
    environment = {**os.environ, "LD_LIBRARY_PATH": str(tmp_path)}
    result = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
