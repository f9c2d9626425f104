#!/usr/bin/env bash
# Compiles every CUDA kernel for the architectures given (default: 80 90 100) and fails if a kernel spills registers. Needs nvcc, no GPU.
# `FILES="csrc/cuda/rms_norm.cu"` checks some files only.
set -euo pipefail
cd "$(dirname "$0")/.."
nvcc=${NVCC:-$(command -v nvcc || echo "${CUDA_HOME:-/usr/local/cuda}/bin/nvcc")}
if [ ! -x "$nvcc" ]; then
  echo "check_cuda: nvcc was not found, so the CUDA kernels were not compiled"
  exit 0
fi
architectures=("$@")
[ ${#architectures[@]} -gt 0 ] || architectures=(80 90 100)
options=(-std=c++20 -O3 -Icsrc --expt-relaxed-constexpr -Xptxas -v --diag-suppress 20012,20013,20014,20015)
for architecture in "${architectures[@]}"; do
  options+=("-gencode=arch=compute_$architecture,code=sm_$architecture")
done
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
failed=0
for source in ${FILES:-csrc/cuda/*.cu}; do
  if ! "$nvcc" "${options[@]}" -c "$source" -o "$folder/object.o" 2>"$folder/log"; then
    cat "$folder/log"
    exit 1
  fi
  kernels=$(grep -c "Compiling entry function" "$folder/log" || true)
  registers=$(grep -o "Used [0-9]* registers" "$folder/log" | grep -o "[0-9]*" | sort -n | tail -1)
  spills=$(grep "bytes spill stores" "$folder/log" | grep -vc " 0 bytes spill stores, 0 bytes spill loads" || true)
  echo "check_cuda: $source: $kernels kernels, at most ${registers:-0} registers, $spills with spills"
  if [ "$spills" -gt 0 ]; then
    grep -B2 "bytes spill stores" "$folder/log" | grep -A2 "Compiling\|Function" | grep -v " 0 bytes spill stores, 0 bytes spill loads" | head -20
    failed=1
  fi
done
exit $failed
