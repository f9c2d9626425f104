"""Small C++ files that use the kernels' headers, compiled at one CPU level and loaded through ctypes."""

import ctypes
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from mamba_ops._library import build_information

CSRC = Path(__file__).parent.parent / "csrc"


def load(source, level):
    """The library compiled from `source` with the build's own flags, or None where there is no compiler."""
    compiler = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++")
    if not compiler:
        return None
    build = build_information()
    flags = [*build["flags"], *build["level_flags"][level], f"-DMAMBA_CPU_LEVEL={level}", f"-I{CSRC}", "-w"]
    folder = Path(tempfile.mkdtemp(prefix="mamba_ops_native_"))
    try:
        library = folder / "library.so"
        command = [*compiler.split(), *flags, "-fvisibility=default", "-shared", str(source), "-o", str(library)]
        subprocess.run(command, check=True)
        return ctypes.CDLL(str(library))
    finally:
        shutil.rmtree(folder)
