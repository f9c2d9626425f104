# Sourced by the other scripts: brings up a Python environment with torch and this package, built from this checkout.
# Uses the active virtual environment, else .venv in the checkout. MAMBA_OPS_TORCH names another torch to install (default below).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

say() { printf '\n== %s\n' "$*"; }

if [ -z "${VIRTUAL_ENV:-}" ]; then
  if [ ! -x .venv/bin/python ]; then
    say "creating the virtual environment .venv"
    if ! python3 -m venv .venv; then
      rm -rf .venv
      if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
        apt-get update -q && apt-get install -yq python3-venv && python3 -m venv .venv
      else
        echo "Python's venv module is missing: install it (Debian, Ubuntu: apt-get install python3-venv) and run this again" >&2
        exit 1
      fi
    fi
  fi
  # shellcheck disable=SC1091
  source .venv/bin/activate
fi

if ! command -v "${CXX:-c++}" >/dev/null && ! command -v g++ >/dev/null && ! command -v clang++ >/dev/null; then
  echo "A C++20 compiler is needed: install one (Debian, Ubuntu: apt-get install g++) and run this again" >&2
  exit 1
fi

# $1: extras to install. Does nothing when the sources and the environment are those of the last run.
install_package() {
  local stamp="$VIRTUAL_ENV/.mamba_ops_built" state
  state="$1 $PWD ${MAMBA_OPS_CUDA:-auto} $({ cat setup.py pyproject.toml scripts/environment.sh; find csrc -type f -print0 | sort -z | xargs -0 cat; } | cksum)"
  if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$state" ] && python -c 'import mamba_ops' 2>/dev/null; then return; fi
  if ! python -c 'import torch, sys; sys.exit(tuple(map(int, torch.__version__.split("+")[0].split(".")[:2])) < (2, 10))' 2>/dev/null; then
    say "installing torch"
    python -m pip install -q "${MAMBA_OPS_TORCH:-torch==2.13.0}"
  fi
  say "building and installing mamba_ops[$1]"
  python -m pip install -q 'setuptools>=77' wheel numpy
  python -m pip install -q --no-build-isolation -e ".[$1]"
  echo "$state" > "$stamp"
}
