"""Loads the compiled operator library, or says in one sentence what was found, what was expected and what to run."""

from __future__ import annotations

import json
import os
import platform
from pathlib import Path
from typing import Any

import torch

from ._version import __version__

NAMESPACE = "mamba"
FOLDER = Path(__file__).parent
REBUILD = "run `pip install --no-build-isolation --force-reinstall --no-deps .` in the source checkout of mamba_ops"


def build_information(folder: Path = FOLDER) -> dict[str, Any]:
    """What setup.py recorded beside the library; empty when there is no readable record."""
    try:
        return json.loads((folder / "_build.json").read_text())
    except (OSError, ValueError):
        return {}


def explain(folder: Path, reason: str, name: str = "_C.so") -> ImportError:
    """The one-sentence error for a library that cannot be used."""
    build = build_information(folder)
    built = (
        f"built for {build.get('platform')} and torch >= {build.get('torch_minimum')} "
        f"(headers of torch {build.get('torch_headers')})"
        if build
        else "with no build record beside it"
    )
    here = f"{platform.system()} {platform.machine()} with torch {torch.__version__}"
    return ImportError(f"mamba_ops: {folder / name}, {built}, {reason} on {here}: {REBUILD}.")


def load(folder: Path = FOLDER) -> None:
    """Load `_C.so` from `folder` and check that it is the one this Python code belongs to."""
    library = folder / "_C.so"
    if not library.exists():
        raise ImportError(
            f"mamba_ops: the operator library {library} does not exist "
            f"(expected the one built for version {__version__}): {REBUILD}."
        )
    build = build_information(folder)
    if build.get("version") != __version__:
        raise explain(folder, f"belongs to version {build.get('version', 'unknown')} where {__version__} was expected")
    minimum = tuple(int(part) for part in build["torch_minimum"].split("."))
    found = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    if found < minimum:
        raise explain(folder, f"needs torch {build['torch_minimum']} or newer and cannot be loaded")
    if build.get("platform") != f"{platform.system()} {platform.machine()}":
        raise explain(folder, "was built for another platform and cannot be loaded")
    found_bytes, built_bytes = library.stat().st_size, build.get("library_bytes", 0)
    if found_bytes < built_bytes:  # loading a truncated library can end the process
        raise explain(folder, f"is not complete ({found_bytes} bytes instead of {built_bytes}) and cannot be loaded")
    try:
        torch.ops.load_library(str(library))
    except OSError as error:
        raise explain(folder, loading_problem(library, str(error.__cause__ or error))) from None
    capability = os.environ.get("MAMBA_OPS_CPU_CAPABILITY")
    try:
        torch.ops.mamba.cpu_capability()
    except RuntimeError as error:
        raise ImportError(f"mamba_ops: {error} (found in the environment: {capability!r})") from None
    load_cuda(folder)


def load_cuda(folder: Path = FOLDER) -> None:
    """Load the CUDA kernels where torch has CUDA and they were built; else answer CUDA calls in words."""
    library = folder / "_C_cuda.so"
    if torch.version.cuda is None or not library.exists():
        refuse_cuda()
        return
    try:
        torch.ops.load_library(str(library))
    except OSError as error:
        raise explain(folder, loading_problem(library, str(error.__cause__ or error)), library.name) from None


def loading_problem(library: Path, text: str) -> str:
    """The loader's complaint in plain words; symbols stay out of it."""
    if "undefined symbol" in text:
        return "needs functions that this torch does not have"
    if "cannot open shared object file" in text and library.name not in text.split(":")[0]:
        return f"needs {text.split(':')[0]}, which was not found, so it cannot be loaded"
    if "invalid ELF header" in text or "file too short" in text or "wrong ELF class" in text:
        return "is not a shared library of this platform and cannot be loaded"
    return "cannot be loaded"


def operator_names(namespace: str = NAMESPACE) -> list[str]:
    """The names of all operators of the library, without namespace."""
    prefix = f"{namespace}::"
    names = {schema.name for schema in torch._C._jit_get_all_schemas() if schema.name.startswith(prefix)}
    return sorted(name.removeprefix(prefix) for name in names)


_fragments: list[torch.library.Library] = []


def refuse_cuda() -> None:
    """This build has no CUDA kernels: answer CUDA calls in words."""
    library = torch.library.Library(NAMESPACE, "IMPL")
    _fragments.append(library)
    for name in operator_names():
        if torch._C._dispatch_has_kernel_for_dispatch_key(f"{NAMESPACE}::{name}", "CPU"):
            library.impl(name, _cuda_refusal(name), "CUDA")


def _cuda_refusal(name: str):
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise NotImplementedError(
            f"mamba_ops: {name} has no CUDA kernel in this build, which is for CPU only; "
            "`python -m mamba_ops` shows what this build has"
        )

    return refuse
