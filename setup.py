"""Builds mamba_ops/_C.so and _C_cuda.so. The only file that knows compilers, architectures and instruction-set flags.

csrc/schema.cpp and csrc/ops are compiled once, every file of csrc/cpu once per CPU level (see csrc/cpu/level.h); where
nvcc is found, csrc/ops once more and csrc/cuda for _C_cuda.so, whose link needs neither a GPU nor a torch with CUDA.
Objects are rebuilt when a file they include, or their command line, has changed.
"""

from __future__ import annotations

import json
import os
import platform
import shlex
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

try:
    from setuptools.command.bdist_wheel import bdist_wheel
except ImportError:
    raise SystemExit("mamba_ops: building needs setuptools >= 77; run `pip install -U setuptools`") from None

ROOT = Path(__file__).parent.resolve()
CSRC = ROOT / "csrc"
RECORD = "_build.json"  # beside the library: what it was built from and for
TORCH_TARGET = (2, 10)  # oldest torch the library loads in

COMMON_FLAGS = [
    "-std=c++20",
    "-O3",
    "-fPIC",
    "-fvisibility=hidden",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-ffp-contract=fast",
    "-Wall",
    "-Wextra",
    "-Wno-unused-parameter",
    "-Wno-psabi",
]
CUDA_FLAGS = ["-std=c++20", "-O3", "--expt-relaxed-constexpr", "--diag-suppress", "20012,20013,20014,20015"]
CUDA_FLAGS += ["-Xcompiler", "-fPIC,-fvisibility=hidden"]
CUDA_ARCHITECTURES = "8.0;9.0+PTX"  # where no GPU is at hand; newer ones translate the PTX when the library is loaded
WITHOUT_CUDA = "set MAMBA_OPS_CUDA=0 to build without CUDA kernels"
LEVEL_FLAGS = {
    "baseline": [],
    "avx2": ["-DMAMBA_CPU_AVX2=1", "-mavx2", "-mfma", "-mf16c"],
    "avx512": [
        "-DMAMBA_CPU_AVX512=1",
        *("-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mfma", "-mf16c", "-mprefer-vector-width=512"),
    ],
}


def run(command: list[str], what: str) -> str:
    """Run a command; on failure stop the build with what was attempted and the tool's own output."""
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode != 0:
        raise SystemExit(f"mamba_ops: {what} failed\n{shlex.join(command)}\n{result.stdout}{result.stderr}")
    return result.stdout


def find_compiler() -> str:
    """The C++ compiler: $CXX, else the first of c++, g++, clang++ on the path."""
    for name in [os.environ.get("CXX"), "c++", "g++", "clang++"]:
        if name and shutil.which(name.split()[0]):
            return name
    raise SystemExit("mamba_ops: no C++ compiler found (c++, g++ or clang++); install one, for example the package g++")


def find_nvcc() -> str | None:
    """nvcc, or None where the CUDA library is not to be built.

    MAMBA_OPS_CUDA: auto (default: where nvcc is found in CUDA_HOME or on the path), 0, or 1 (also in /usr/local/cuda).
    """
    wish = os.environ.get("MAMBA_OPS_CUDA", "auto")
    if wish not in ("auto", "0", "1"):
        raise SystemExit(f"mamba_ops: MAMBA_OPS_CUDA must be auto, 0 or 1, got {wish}")
    if wish == "0":
        return None
    folders = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH")]
    names = [*(f"{folder}/bin/nvcc" for folder in folders if folder), "nvcc"]
    names += ["/usr/local/cuda/bin/nvcc"] if wish == "1" else []
    found = next(filter(None, map(shutil.which, names)), None)
    if wish == "1" and not found:
        raise SystemExit(
            "mamba_ops: MAMBA_OPS_CUDA=1, but no nvcc was found in CUDA_HOME, on the path or in /usr/local/cuda"
        )
    return found


def cuda_architectures() -> str:
    """TORCH_CUDA_ARCH_LIST, such as "8.0;9.0+PTX" or "8.0 9.0+PTX"; by default that of the GPUs here, if any."""
    import torch

    asked = os.environ.get("TORCH_CUDA_ARCH_LIST")
    if asked or not torch.cuda.is_available():
        return asked or CUDA_ARCHITECTURES
    here = {torch.cuda.get_device_capability(index) for index in range(torch.cuda.device_count())}
    return ";".join(f"{major}.{minor}" for major, minor in sorted(here))


def architecture_options(architectures: str) -> list[str]:
    """The same for nvcc."""
    options = []
    for item in architectures.replace(";", " ").split():
        number = item.removesuffix("+PTX").replace(".", "")
        if not number.rstrip("af").isdigit():
            raise SystemExit(f"mamba_ops: TORCH_CUDA_ARCH_LIST must hold numbers such as 9.0 or 9.0+PTX, got {item}")
        options.append(f"-gencode=arch=compute_{number},code=sm_{number}")
        if item.endswith("+PTX"):
            options.append(f"-gencode=arch=compute_{number},code=compute_{number}")
    return options


def torch_folder() -> Path:
    try:
        import torch
    except ImportError:
        raise SystemExit(
            "mamba_ops: building needs PyTorch >= 2.10; install torch first, or leave out --no-build-isolation"
        ) from None
    version = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    if version < TORCH_TARGET:
        raise SystemExit(f"mamba_ops: building needs PyTorch >= 2.10, found {torch.__version__}")
    return Path(torch.__file__).parent


def levels() -> list[str]:
    return list(LEVEL_FLAGS) if platform.machine() in ("x86_64", "AMD64") else ["baseline"]


class Unit:
    """One source file compiled with one set of flags."""

    def __init__(self, source: Path, label: str, flags: list[str], folder: Path):
        self.source = source
        self.object = folder / f"{source.relative_to(CSRC).as_posix().replace('/', '_')}.{label}.o"
        self.dependencies = self.object.with_suffix(".d")
        self.record = self.object.with_suffix(".command")
        self.label = label
        self.command = [*flags, "-MMD", "-MF", str(self.dependencies), "-c", str(source), "-o", str(self.object)]

    def is_current(self) -> bool:
        if not (self.object.exists() and self.dependencies.exists() and self.record.exists()):
            return False
        if self.record.read_text() != shlex.join(self.command):
            return False
        built = self.object.stat().st_mtime
        named = self.dependencies.read_text().replace("\\\n", " ").split(":", 1)[1].split()
        return all(Path(name).exists() and Path(name).stat().st_mtime <= built for name in named)

    def compile(self) -> None:
        if self.is_current():
            return
        self.record.unlink(missing_ok=True)
        print(f"compiling {self.source.relative_to(ROOT)} [{self.label}]", flush=True)
        hint = f" ({WITHOUT_CUDA})" if self.label == "cuda" else ""
        run(self.command, f"compiling {self.source.relative_to(ROOT)}{hint}")
        self.check_symbols()
        self.record.write_text(shlex.join(self.command))

    def check_symbols(self) -> None:
        """Weak symbols may be merged across levels by the linker: then a CPU could meet instructions that it lacks."""
        if self.label not in LEVEL_FLAGS or self.label == "baseline" or not shutil.which("nm"):
            return
        lines = run(["nm", "--defined-only", str(self.object)], "listing symbols").splitlines()
        weak = [fields[2] for fields in map(str.split, lines) if len(fields) == 3 and fields[1] in "WVu"]
        foreign = [name for name in weak if self.label not in name and not name.startswith("DW.ref.")]
        if foreign:
            raise SystemExit(
                f"mamba_ops: {self.source.name} [{self.label}] leaves weak symbols outside its level: {foreign}"
            )


def compile_all(units: list[Unit]) -> None:
    units.sort(key=lambda unit: -unit.source.stat().st_size)  # long ones first
    with ThreadPoolExecutor(int(os.environ.get("MAX_JOBS", os.cpu_count() or 1))) as pool:
        list(pool.map(Unit.compile, units))


class BuildLibraries(build_ext):
    def get_ext_filename(self, fullname: str) -> str:
        return (
            os.path.join(*fullname.split(".")) + ".so"
        )  # no Python version in the name: the library has no Python symbol

    def build_extension(self, ext: Extension) -> None:
        torch_path = torch_folder()
        compiler = shlex.split(find_compiler())
        # In the checkout where that can be written, so that a second build compiles what has changed only.
        folder = ROOT / "build" / "objects" if os.access(ROOT, os.W_OK) else Path(self.build_temp).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        target = f"0x{TORCH_TARGET[0]:02x}{TORCH_TARGET[1]:02x}000000000000"
        flags = [*compiler, *COMMON_FLAGS, f"-I{CSRC}", f"-ffile-prefix-map={ROOT}=mamba_ops"]
        torch_flags = [f"-isystem{torch_path / 'include'}", f"-DTORCH_TARGET_VERSION={target}", "-DTORCH_STABLE_ONLY"]

        host = [CSRC / "schema.cpp", *sorted((CSRC / "ops").glob("*.cpp"))]
        units = [Unit(source, "host", flags + torch_flags, folder) for source in host]
        for source in sorted((CSRC / "cpu").glob("*.cpp")):
            for name in levels():
                units.append(Unit(source, name, flags + LEVEL_FLAGS[name] + [f"-DMAMBA_CPU_LEVEL={name}"], folder))
        compile_all(units)
        library = Path(self.get_ext_fullpath(ext.name)).resolve()
        library.parent.mkdir(parents=True, exist_ok=True)
        partial = library.with_suffix(".so.partial")
        shared = (
            ["-dynamiclib", "-undefined", "dynamic_lookup"]
            if platform.system() == "Darwin"
            else ["-shared", "-s", "-Wl,--no-undefined"]
        )
        objects = [str(unit.object) for unit in units]
        run(
            [*compiler, *shared, *objects, f"-L{torch_path / 'lib'}", "-ltorch_cpu", "-o", str(partial)],
            "linking _C.so",
        )
        partial.replace(library)
        nvcc = find_nvcc()
        cuda_library = library.with_name("_C_cuda.so")
        cuda_library.unlink(missing_ok=True)
        record = self.describe(compiler, torch_path)
        if nvcc:
            architectures = cuda_architectures()
            self.build_cuda(nvcc, architectures, flags + torch_flags, torch_path, folder, cuda_library)
            version = run([nvcc, "--version"], "asking nvcc's version").splitlines()
            record["cuda"] = next((line.strip() for line in version if "release" in line), "unknown")
            record["cuda_architectures"] = architectures
        record["library_bytes"] = library.stat().st_size
        library.with_name(RECORD).write_text(json.dumps(record, indent=1) + "\n")
        built = f"the CPU and CUDA libraries (with {nvcc})" if nvcc else "the CPU library, without CUDA kernels"
        print(f"mamba_ops: built {built}", flush=True)

    def build_cuda(
        self, nvcc: str, architectures: str, flags: list[str], torch_path: Path, folder: Path, library: Path
    ) -> None:
        """_C_cuda.so: the host layer for CUDA tensors, and the kernels."""
        host = [path for path in sorted((CSRC / "ops").glob("*.cpp")) if not path.name.startswith("cpu_")]
        units = [Unit(path, "cuda", [*flags, "-DMAMBA_CUDA=1", "-DUSE_CUDA"], folder) for path in host]
        device_flags = [nvcc, *CUDA_FLAGS, *architecture_options(architectures), f"-I{CSRC}"]
        units += [Unit(path, "cuda", device_flags, folder) for path in sorted((CSRC / "cuda").glob("*.cu"))]
        compile_all(units)
        # torch loads its libraries privately, so libtorch_cuda.so must be named as needed. An empty library of that
        # name stands in for it while linking, so that a torch without CUDA will do.
        stubs = folder / "stubs"
        stubs.mkdir(exist_ok=True)
        options = ["-shared", "-x", "c", "/dev/null", "-Wl,-soname,libtorch_cuda.so"]
        stub = [*shlex.split(find_compiler()), *options, "-o", str(stubs / "libtorch_cuda.so")]
        run(stub, "linking a stand-in for libtorch_cuda.so")
        # nvcc adds the static CUDA runtime, so the library asks for no CUDA library of a certain version.
        partial = library.with_suffix(".so.partial")
        folders = [f"-L{stubs}", f"-L{torch_path / 'lib'}"]
        libraries = ["--no-as-needed", "-ltorch_cpu", "-ltorch_cuda", "--as-needed", "-ldl", "-s"]
        command = [nvcc, "-shared", *(str(unit.object) for unit in units), *folders]
        command += [option for name in libraries for option in ("-Xlinker", name)]
        run([*command, "-o", str(partial)], f"linking _C_cuda.so ({WITHOUT_CUDA})")
        partial.replace(library)

    def copy_extensions_to_source(self) -> None:
        """Editable installs: the record and the CUDA library go where the library goes."""
        super().copy_extensions_to_source()
        for ext in self.extensions:
            built = Path(self.build_lib) / self.get_ext_filename(ext.name)
            shutil.copy(built.with_name(RECORD), ROOT / "mamba_ops" / RECORD)
            target = ROOT / "mamba_ops" / "_C_cuda.so"
            if built.with_name(target.name).exists():
                shutil.copy(built.with_name(target.name), target)
            else:
                target.unlink(missing_ok=True)

    def describe(self, compiler: list[str], torch_path: Path) -> dict[str, object]:
        """What `python -m mamba_ops` prints and what a failed import compares with."""
        import torch

        try:
            command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=12"]
            revision = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
        except (OSError, subprocess.CalledProcessError):
            revision = "unknown (not built from a git checkout)"
        return {
            "version": self.distribution.get_version(),
            "git_revision": revision,
            "compiler": run([*compiler, "--version"], "asking the compiler's version").splitlines()[0],
            "flags": COMMON_FLAGS,
            "cpu_levels": levels(),
            "level_flags": {name: LEVEL_FLAGS[name] for name in levels()},
            "platform": f"{platform.system()} {platform.machine()}",
            "torch_headers": torch.__version__,
            "torch_minimum": ".".join(map(str, TORCH_TARGET)),
        }


class AnyPythonWheel(bdist_wheel):
    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


setup(
    ext_modules=[Extension("mamba_ops._C", sources=[])],
    cmdclass={"build_ext": BuildLibraries, "bdist_wheel": AnyPythonWheel},
)
