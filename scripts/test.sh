#!/usr/bin/env bash
# Sets everything up and runs the tests. Arguments go to pytest.
source "$(dirname "$0")/environment.sh"
install_package test
say "lint"
ruff check .
ruff format --check .
git ls-files -z 'csrc/*.h' 'csrc/*.cpp' 'csrc/*.cu' 'csrc/*.cuh' 'tests/*.h' 'tests/*.cpp' 'tests/*.cu' | xargs -0 clang-format --dry-run --Werror
say "CUDA kernels, compiled"
bash scripts/check_cuda.sh
say "tests"
python -m pytest -q "$@"
