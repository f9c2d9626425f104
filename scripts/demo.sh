#!/usr/bin/env bash
# The main job, on real input: sets everything up and trains a byte-level Mamba language model on English text in under four minutes.
# Arguments go to examples/train_bytes.py.
source "$(dirname "$0")/environment.sh"
export MAMBA_OPS_CUDA=${MAMBA_OPS_CUDA:-0} # it trains on the CPU: this spares what nvcc takes
install_package examples
say "what is installed"
python -m mamba_ops
say "training"
python examples/train_bytes.py "$@"
