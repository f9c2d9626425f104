#!/usr/bin/env bash
# Checks every way to install (reports B02 and B10), each in a fresh virtual environment and without nvcc on the path: wheel, in place,
# isolated build; prints the time each took.
# Then that a missing, truncated and foreign library is answered with one sentence. Takes several minutes: not part of the tests.
# MAMBA_OPS_OTHER_TORCH (for example torch==2.14.1) also runs the wheel's operator tests under that release.
set -euo pipefail
cd "$(dirname "$0")/.."
checkout=$PWD
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
torch=${MAMBA_OPS_TORCH:-torch==2.13.0}
PATH=$(tr ':' '\n' <<< "$PATH" | while read -r folder; do [ -x "$folder/nvcc" ] || printf '%s:' "$folder"; done)
command -v nvcc && { echo "nvcc is still on the path"; exit 1; }

fresh() { python3 -m venv "$work/$1" && "$work/$1/bin/pip" install -q --upgrade pip; }
timed() {
  local start=$SECONDS label=$1
  shift
  "$@" && echo "$label: $((SECONDS - start)) s"
}
self_test() { (cd "$work" && "$1/bin/python" -m mamba_ops | sed -n '/self-test/,$p'); }

git clone -q "$checkout" "$work/source"

fresh wheel
"$work/wheel/bin/pip" install -q "$torch" 'setuptools>=77' wheel
timed "pip wheel --no-build-isolation" "$work/wheel/bin/pip" wheel -q --no-build-isolation --no-deps -w "$work/dist" "$work/source"
ls -l "$work"/dist/*.whl
"$work/wheel/bin/pip" install -q "$work"/dist/*.whl
unzip -p "$work"/dist/*.whl '*/METADATA' | grep '^Requires-Dist'
self_test "$work/wheel"

library=$("$work/wheel/bin/python" -c 'import mamba_ops._library as l; print(l.FOLDER / "_C.so")')
nm -D --undefined-only "$library" | grep -c ' Py' && { echo "the library has Python symbols"; exit 1; }
refusal() { (cd "$work" && "$work/wheel/bin/python" -c 'import mamba_ops' 2>&1 | grep '^ImportError' || true); }
cp "$library" "$work/good.so"
head -c 5000 "$work/good.so" > "$library" && echo "truncated: $(refusal)"
rm "$library" && echo "missing:   $(refusal)"
printf 'int foreign_function(int); int use(int x) { return foreign_function(x); }' | cc -shared -fPIC -x c - -o "$library"
echo "foreign:   $(refusal)"
cp "$work/good.so" "$library"

if [ -n "${MAMBA_OPS_OTHER_TORCH:-}" ]; then
  fresh other
  "$work/other/bin/pip" install -q "$MAMBA_OPS_OTHER_TORCH" pytest numpy "$work"/dist/*.whl
  echo "the same wheel under $("$work/other/bin/python" -c 'import torch; print(torch.__version__)')"
  self_test "$work/other"
  (cd "$work" && cp -r "$checkout/tests" . && MAMBA_OPS_TEST_EMULATED=0 "$work/other/bin/python" -m pytest -q -p no:cacheprovider --rootdir="$work" -c /dev/null -o markers=slow:slow tests/ops tests/test_reference.py | tail -3)
fi

fresh editable
"$work/editable/bin/pip" install -q "$torch" 'setuptools>=77' wheel
timed "pip install --no-build-isolation -e" "$work/editable/bin/pip" install -q --no-build-isolation -e "$work/source"
self_test "$work/editable"

fresh isolated
timed "pip install (isolated build)" "$work/isolated/bin/pip" install -q "$work/source" "$torch"
self_test "$work/isolated"
