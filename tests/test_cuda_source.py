"""What the CUDA sources promise without a GPU: every launch on the tensor's device and in its current stream (B105)."""

import re
import shutil
import subprocess
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


@pytest.mark.skipif(not LIBRARY.exists() or not shutil.which("readelf"), reason="needs a build with CUDA, and readelf")
def test_the_cuda_library_needs_torch_and_the_c_library_only():
    """It loads beside any CUDA runtime and cuBLAS, and with every Python."""
    needed = set(re.findall(r"\(NEEDED\).*\[(.*)\]", readelf("-d")))
    assert "libtorch_cuda.so" in needed
    assert not {name for name in needed if name.startswith(("libcu", "libnv", "libpython"))}
    undefined = re.findall(r" UND (\S+)", readelf("--dyn-syms"))
    assert any(name.startswith("aoti_torch_") for name in undefined)
    assert not [name for name in undefined if name.startswith(("cuda", "cublas", "_ZN2at", "_ZN3c10", "Py"))]
