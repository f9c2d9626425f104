"""What runs on a machine with a GPU, rehearsed without one."""

import subprocess
import sys
from pathlib import Path

from mamba_ops.ops import MODULES

ROOT = Path(__file__).parent.parent
MEASURED_WITHIN = {"linear_recurrence": "gated_scan"}  # the same kernels


def test_dry_run():
    command = [sys.executable, "-m", "benchmarks.gpu_check", "--dry-run"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "failed: nothing" in result.stdout
    for name in (module.__name__.rpartition(".")[2] for module in MODULES):
        assert f"'op': '{MEASURED_WITHIN.get(name, name)}'" in result.stdout, f"{name} is not measured"
