#!/usr/bin/env bash
# The main job, on real input: sets everything up and trains a byte-level Mamba language model on English text in under four minutes.
# Arguments go to examples/train_bytes.py.
source "$(dirname "$0")/environment.sh"
install_package examples
say "what is installed"
python -m mamba_ops
say "training"
python examples/train_bytes.py "$@"
