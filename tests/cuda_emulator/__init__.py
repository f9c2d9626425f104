"""The CUDA kernels' own source, executed on the CPU: torch.ops.mamba_emulated and torch.ops.mamba_checked.

csrc/schema.cpp and csrc/ops are compiled once more over the emulator, so that the whole path from an operator's call to
its kernel runs, strides and slices included. `mamba_emulated` is the fast build; in `mamba_checked` every memory access
of a kernel is checked. Objects lie in build/emulator and are rebuilt when the content of a file they include changes.
"""

import fcntl
import hashlib
import importlib.util
import json
import os
import platform
import shlex
import shutil
import subprocess
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

import pytest
import torch

FOLDER = Path(__file__).parent
ROOT = FOLDER.parent.parent
CSRC = ROOT / "csrc"
SWITCH = "MAMBA_OPS_TEST_EMULATED"
MODES = {"fast": "mamba_emulated", "checked": "mamba_checked"}
FLAGS = ["-std=c++20", "-O2", "-fPIC", "-fvisibility=hidden", "-ftls-model=initial-exec", "-ffp-contract=off"]
FLAGS += ["-Wall", "-Wextra", "-Wno-unknown-pragmas", "-Wno-unused-parameter", "-Wno-psabi"]
# Every memory access of a kernel calls a hook of cuda_emulator.cpp; the sanitizers' runtimes are not linked.
CHECKS = ["-fsanitize=thread,alignment,bounds,shift,signed-integer-overflow", "-g"]
CHECKS += ["--param", "tsan-instrument-func-entry-exit=0"]


class Unit:
    """One source file compiled with one command; current while the content of everything it includes is the same."""

    def __init__(self, source, flags, folder):
        self.source = source
        self.object = folder / f"{source.parent.name}_{source.name}.o"
        self.record = self.object.with_suffix(".json")
        self.listing = self.object.with_suffix(".d")
        self.command = [*flags, "-MMD", "-MF", str(self.listing), "-c", str(source), "-o", str(self.object)]

    def state(self, names):
        return {name: hashlib.sha256(Path(name).read_bytes()).hexdigest() for name in names}

    def is_current(self):
        try:
            record = json.loads(self.record.read_text())
            same = record["command"] == self.command and record["torch"] == torch.__version__
            return same and self.object.exists() and record["files"] == self.state(record["files"])
        except (OSError, ValueError, KeyError):
            return False

    def compile(self):
        """Returns whether there was anything to do."""
        if self.is_current():
            return False
        self.record.unlink(missing_ok=True)
        run(self.command)
        names = self.listing.read_text().replace("\\\n", " ").split(":", 1)[1].split()
        record = {"command": self.command, "torch": torch.__version__, "files": self.state(names)}
        self.record.write_text(json.dumps(record))
        return True


def run(command):
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode != 0:
        raise RuntimeError(f"{shlex.join(command)}\n{result.stdout}{result.stderr}")


def compiler():
    """GCC, or None where the emulator cannot be built or MAMBA_OPS_TEST_EMULATED=0 switches it off."""
    if platform.machine() != "x86_64" or platform.system() != "Linux" or os.environ.get(SWITCH) == "0":
        return None
    names = [name for name in (os.environ.get("CXX", ""), "g++") if Path(name).name.startswith("g++")]
    return next(filter(shutil.which, names), None)


needs_emulator = pytest.mark.skipif(
    compiler() is None, reason=f"the emulator needs GCC on Linux x86-64, and no {SWITCH}=0"
)


def kernels(csrc=CSRC):
    return sorted((csrc / "cuda").glob("*.cu"))


def units(mode, csrc, folder):
    gcc = compiler()
    include = Path(torch.__file__).parent / "include"
    flags = [gcc, *FLAGS, f"-I{csrc}", f"-I{FOLDER}"]
    hosted = [*flags, "-DMAMBA_CUDA=1", "-DMAMBA_EMULATED=1", f"-DMAMBA_NAMESPACE={MODES[mode]}", f"-isystem{include}"]
    hosted += ["-DTORCH_TARGET_VERSION=0x020a000000000000", "-DTORCH_STABLE_ONLY"]
    python = [f"-isystem{sysconfig.get_paths()['include']}", f"-DMAMBA_EMULATOR_MODULE={MODES[mode]}"]
    device = [*flags, *(CHECKS if mode == "checked" else []), "-x", "c++", "-include", "cuda_emulator.h"]
    stems = {"api", *(path.stem for path in kernels(csrc))}
    sources = [path for path in sorted((csrc / "ops").glob("*.cpp")) if path.stem in stems]
    result = [Unit(path, device, folder) for path in [*kernels(csrc), FOLDER / "bugs.cu", FOLDER / "cublas.cu"]]
    result += [Unit(path, hosted, folder) for path in [csrc / "schema.cpp", *sources]]
    result += [Unit(FOLDER / "bindings.cpp", [*hosted, *python], folder)]
    return result + [Unit(FOLDER / name, flags, folder) for name in ("cuda_emulator.cpp", "memory_checker.cpp")]


def build(mode):
    """Compile what has changed; returns the library."""
    folder = ROOT / "build" / "emulator" / mode
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        todo = units(mode, CSRC, folder)
        with ThreadPoolExecutor(int(os.environ.get("MAX_JOBS", os.cpu_count() or 1))) as pool:
            changed = any(list(pool.map(Unit.compile, todo)))
        library = folder / f"{MODES[mode]}.so"
        if changed or not library.exists():
            partial = library.with_suffix(".partial")
            link([unit.object for unit in todo], partial)
            partial.replace(library)
    return library


def link(objects, library):
    """Python's own symbols come from the running interpreter."""
    torch_libraries = Path(torch.__file__).parent / "lib"
    options = ["-shared", "-Wl,-Bsymbolic", f"-L{torch_libraries}", "-ltorch_cpu", "-o", str(library)]
    run([compiler(), *map(str, objects), *options])


def build_mutant(mode, source, changed, text, folder):
    """The library with csrc/cuda/`changed`, which `source` is or includes, replaced by `text`."""
    build(mode)
    mutant = folder / "cuda" / changed
    mutant.parent.mkdir(parents=True)
    mutant.write_text(text)
    objects = []
    for unit in units(mode, CSRC, ROOT / "build" / "emulator" / mode):
        if unit.source != CSRC / "cuda" / source:
            objects.append(unit.object)
            continue
        command = [option for option in unit.command[: unit.command.index("-MMD")] if option != "-O2"]
        command[1:1] = [f"-I{folder}", "-O1"]
        objects.append(folder / "mutant.o")
        run([*command, "-c", str(mutant if changed == source else unit.source), "-o", str(objects[-1])])
    library = folder / f"{MODES[mode]}.so"
    link(objects, library)
    return library


@cache
def load(mode, library=None):
    """The controls of the build `mode`, with its operators registered; None without GCC on x86-64."""
    if compiler() is None:
        return None
    import mamba_ops.ops

    name = MODES[mode]
    spec = importlib.util.spec_from_file_location(name, library or build(mode))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    mamba_ops.ops.register(name)
    return module
