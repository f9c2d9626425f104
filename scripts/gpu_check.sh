#!/usr/bin/env bash
# Builds, tests and measures on a machine with a GPU, nvcc and a torch with CUDA; needs no network and about seven minutes on 16 cores.
# Log files go to build/gpu_check, results to benchmarks/results/gpu.json and gpu.md. A part that fails does not stop the others.
# --dry-run: builds (where there is nvcc), lists what would run, and rehearses the measurements on the CPU.
set -uo pipefail
cd "$(dirname "$0")/.."
case "${1:-}" in
  "") dry= ;;
  --dry-run) dry=1 ;;
  *) echo "usage: scripts/gpu_check.sh [--dry-run]" >&2 && exit 2 ;;
esac
export PYTHONPATH=$PWD:$PWD/tests MAMBA_OPS_TEST_EMULATED=0 CUBLAS_WORKSPACE_CONFIG=:4096:8
logs=build/gpu_check
mkdir -p "$logs"
failed=()

# $1: name, $2: seconds at most, then the command; its output goes to a log, of which the end is shown.
part() {
  local name=$1 limit=$2 start=$SECONDS
  shift 2
  printf '\n== %s: %s\n' "$name" "$*"
  if timeout "$limit" "$@" >"$logs/$name.log" 2>&1; then
    tail -n 3 "$logs/$name.log"
  else
    tail -n 25 "$logs/$name.log"
    failed+=("$name")
  fi
  echo "$name: $((SECONDS - start)) s"
}
only_with_gpu() {
  if [ -n "$dry" ]; then printf '\n== %s: with a GPU, at most %s s: %s\n' "$1" "$2" "${*:3}"; else part "$@"; fi
}

if command -v nvcc >/dev/null || [ -x "${CUDA_HOME:-/usr/local/cuda}/bin/nvcc" ]; then
  part build 300 env MAMBA_OPS_CUDA=1 python3 setup.py -q build_ext --inplace
elif [ -n "$dry" ]; then
  echo "nvcc was not found, so the CUDA library is not built"
else
  echo "nvcc was not found" >&2 && exit 1
fi
[ ${#failed[@]} -eq 0 ] || exit 1

workers=()
python3 -c 'import xdist' 2>/dev/null && workers=(-n 8)
only_with_gpu tests 240 python3 -m pytest -q "${workers[@]}" tests/ops -k cuda -p no:cacheprovider
only_with_gpu report 60 python3 -m mamba_ops
part measurements 200 python3 -m benchmarks.gpu_check ${dry:+--dry-run}
if [ -n "$dry" ] || command -v compute-sanitizer >/dev/null; then
  for tool in memcheck racecheck; do
    only_with_gpu "$tool" 60 compute-sanitizer --tool "$tool" --error-exitcode 9 python3 -c '
import torch
from cuda_emulator import cases
with torch.device("cuda"):
    for case in cases.CASES:
        cases.check("mamba", case)
        print(case)'
  done
else
  echo "compute-sanitizer was not found"
fi
printf '\n'
[ ${#failed[@]} -eq 0 ] && echo "gpu_check: everything passed in $SECONDS s" && exit 0
echo "gpu_check: failed: ${failed[*]} ($SECONDS s; logs in $logs)"
exit 1
