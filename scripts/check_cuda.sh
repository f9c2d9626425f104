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
options="-std=c++20 -O3 -Icsrc --expt-relaxed-constexpr -Xptxas -v --diag-suppress 20012,20013,20014,20015"
for architecture in "${architectures[@]}"; do
  options+=" -gencode=arch=compute_$architecture,code=sm_$architecture"
done
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

check() {
  local source=$1 start=$SECONDS log
  log="$folder/$(basename "$source")"
  # shellcheck disable=SC2086
  if ! "$nvcc" $options -c "$source" -o "$log.o" 2>"$log"; then
    cat "$log"
    return 1
  fi
  local kernels registers
  kernels=$(grep -c "Compiling entry function" "$log" || true)
  registers=$(grep -o "Used [0-9]* registers" "$log" | grep -o "[0-9]*" | sort -n | tail -1)
  # A kernel's name, spills and registers stand in three messages, one after the other.
  awk '/Compiling entry function/ { split($0, part, "\047"); name = part[2]; architecture = part[4] }
       /bytes spill stores/ { spill = $0 }
       /Used [0-9]+ registers/ { if (spill !~ / 0 bytes spill stores, 0 bytes spill loads/) print name, architecture ":" spill " " $0 }' \
    "$log" | c++filt >"$log.spills"
  echo "check_cuda: $source: $kernels kernels, at most ${registers:-0} registers, $(wc -l <"$log.spills") with spills, $((SECONDS - start)) s"
  cat "$log.spills"
  [ ! -s "$log.spills" ]
}
export -f check
export nvcc options folder
# shellcheck disable=SC2012,SC2086
ls -S ${FILES:-csrc/cuda/*.cu} | xargs -P "${MAX_JOBS:-$(nproc)}" -I{} bash -c 'check {}' # long ones first
