"""Loading the library, refusals in words, the build record, the report and self-test, what the package depends on."""

import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from mamba_ops import _library, info, ops

LIBRARY = _library.FOLDER / "_C.so"
SENTENCE = r"^mamba_ops: .*: run `pip install .*` in the source checkout of mamba_ops\.$"


@pytest.fixture
def folder(tmp_path):
    """A copy of the library and its record, to be spoilt."""
    for name in ("_C.so", "_build.json"):
        shutil.copy(_library.FOLDER / name, tmp_path)
    return tmp_path


def refusal(folder):
    with pytest.raises(ImportError) as caught:
        _library.load(folder)
    text = str(caught.value)
    assert re.match(SENTENCE, text, re.DOTALL), text
    assert "\n" not in text
    assert not re.search(r"\b_Z\w+", text), "no mangled symbol reaches the user"
    return text


def change_record(folder, **values):
    path = folder / "_build.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def test_missing_library(folder):
    (folder / "_C.so").unlink()
    assert "does not exist (expected the one built for version" in refusal(folder)


def test_truncated_library(folder):
    data = LIBRARY.read_bytes()
    for count in (5000, 0):
        (folder / "_C.so").write_bytes(data[:count])
        assert f"is not complete ({count} bytes instead of {len(data)}) and cannot be loaded" in refusal(folder)
    (folder / "_C.so").write_bytes(b"?" * len(data))
    assert "is not a shared library of this platform" in refusal(folder)


@pytest.mark.skipif(not shutil.which("cc"), reason="no C compiler")
def test_library_that_needs_what_torch_lacks(folder):
    """B01."""
    source = folder / "foreign.c"
    source.write_text("int _ZN2at6absentEv(int); int use(int x) { return _ZN2at6absentEv(x); }")
    subprocess.run(["cc", "-shared", "-fPIC", str(source), "-o", str(folder / "_C.so")], check=True)
    change_record(folder, library_bytes=0)
    text = refusal(folder)
    assert "needs functions that this torch does not have" in text
    assert torch.__version__ in text


def test_library_of_another_version_or_platform_or_torch(folder):
    """B01, B05: what it was built for, and what was found."""
    change_record(folder, version="99.0")
    assert "belongs to version 99.0 where" in refusal(folder)
    change_record(folder, version=_library.__version__, platform="Plan9 vax")
    text = refusal(folder)
    assert "built for Plan9 vax" in text and "was built for another platform" in text
    change_record(folder, torch_minimum="99.1")
    assert "needs torch 99.1 or newer" in refusal(folder)
    (folder / "_build.json").unlink()
    assert "with no build record beside it" in refusal(folder)


@pytest.mark.parametrize(
    "level, text",
    [("sse9", "must be baseline, avx2 or avx512, got sse9"), ("AVX2", "must be baseline, avx2 or avx512")],
)
def test_unknown_cpu_level(level, text):
    environment = {**os.environ, "MAMBA_OPS_CPU_CAPABILITY": level}
    result = subprocess.run([sys.executable, "-c", "import mamba_ops"], env=environment, capture_output=True, text=True)
    assert result.returncode != 0
    assert f"ImportError: mamba_ops: MAMBA_OPS_CPU_CAPABILITY {text}" in result.stderr


@pytest.mark.skipif(not shutil.which("nm"), reason="no nm")
def test_library_has_no_python_symbol():
    symbols = subprocess.run(["nm", "-D", str(LIBRARY)], capture_output=True, text=True, check=True).stdout
    names = [line.split()[-1] for line in symbols.splitlines()]
    assert "aoti_torch_empty_strided" in names, "the list is the right one"
    assert not [name for name in names if name.startswith(("Py", "_Py"))]


def test_only_torch_is_required():
    """B04: no Triton, no einops, no transformers."""
    required = [text for text in importlib.metadata.requires("mamba_ops") if "extra ==" not in text]
    assert [re.split(r"[<>=!~ ]", text)[0] for text in required] == ["torch"]
    script = (
        "import sys; sys.modules.update(dict.fromkeys(('triton', 'einops', 'transformers', 'safetensors', 'tqdm'))); "
        "import torch, mamba_ops, mamba_ops.layers, mamba_ops.models; "
        "print(mamba_ops.layers.Mamba(8)(torch.ones(1, 2, 8)).shape[2])"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert result.stdout.strip() == "8", result.stderr


def test_report(capsys):
    """`python -m mamba_ops`: versions, build, CPU level, operators with their backends, pass or fail for each."""
    assert info.main() == 0
    text = capsys.readouterr().out
    for word in ("mamba_ops", torch.__version__, "compiler", "flags", "built from", "CPU level", "GPUs"):
        assert word in text
    for name in _library.operator_names():
        assert re.search(rf"^{name} +(yes|no)", text, re.MULTILINE), name
    for module in ops.MODULES:
        assert re.search(rf"^{module.__name__.rpartition('.')[2]} +pass$", text, re.MULTILINE), module


def test_self_test_sees_a_wrong_operator(monkeypatch):
    """B23: the self-test names the operator that fails."""
    module = sys.modules["mamba_ops.ops.rms_norm"]
    right = module.rms_norm
    monkeypatch.setattr(module, "rms_norm", lambda *a, **k: tuple(1.01 * out for out in right(*a, **k)))
    errors = dict(info.self_test())
    assert "relative error" in errors.pop("rms_norm")
    assert not any(errors.values())


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_cuda_calls_are_refused_in_words():
    """A build without CUDA kernels says so and names `python -m mamba_ops`."""
    kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    names = [name for name in _library.operator_names() if kernel(f"mamba::{name}", "CPU")]
    assert names
    for name in names:
        assert kernel(f"mamba::{name}", "CUDA"), name
    with pytest.raises(
        NotImplementedError, match=r"rms_norm_fwd has no CUDA kernel in this build.*python -m mamba_ops"
    ):
        _library._cuda_refusal("rms_norm_fwd")()


def cross_compiler():
    """aarch64-linux-gnu-g++, or the newest aarch64-linux-gnu-g++-<version> on the path; None where there is none."""
    name = "aarch64-linux-gnu-g++"
    paths = [path for folder in os.get_exec_path() for path in Path(folder).glob(f"{name}-*")]
    versions = {int(path.name[len(name) + 1 :]) for path in paths if path.name[len(name) + 1 :].isdigit()}
    newest_first = [f"{name}-{version}" for version in sorted(versions, reverse=True)]
    return next(filter(shutil.which, [name, *newest_first]), None)


@pytest.mark.skipif(not cross_compiler(), reason="no cross compiler for aarch64")
@pytest.mark.parametrize("path", sorted((_library.FOLDER.parent / "csrc" / "cpu").glob("*.cpp")), ids=lambda p: p.stem)
def test_kernels_compile_for_aarch64(path):
    command = [cross_compiler(), "-std=c++20", "-fsyntax-only", f"-I{path.parent.parent}", str(path)]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
