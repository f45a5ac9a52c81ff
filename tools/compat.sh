#!/usr/bin/env bash
# Checks that one build serves every torch from 2.11 on. Tests the library from `make build` and the
# wheel of a clean `pip install .`, both with the newest torch. `make test-compat` calls this.
set -euo pipefail
cd "$(dirname "$0")/.."

[ -x .venv-compat/bin/python ] || "${PYTHON:-python3}" -m venv .venv-compat
pip=(.venv-compat/bin/python -m pip --disable-pip-version-check)

# `pip install .` in two steps, so that the wheel can be checked in between. The compiler gets the
# name under which CMake finds it; under another name, ccache would not recognise the files.
rm -rf build/wheel
CC=${CC:-cc} CXX=${CXX:-c++} "${pip[@]}" wheel . --no-deps --wheel-dir build/wheel
.venv/bin/python tools/check_wheel.py build/wheel/*.whl
.venv/bin/python tools/check_leaks.py build/wheel/*.whl
"${pip[@]}" install --upgrade --upgrade-strategy eager torch pytest
"${pip[@]}" install --force-reinstall --no-deps build/wheel/*.whl

root=$PWD
cd build # not the source tree, so that only what is installed can be imported
echo "compat: the wheel under the newest torch"
"$root/.venv-compat/bin/python" "$root/tests/compat/check.py"
echo "compat: the library of make build under the newest torch"
PYTHONPATH="$root/python" "$root/.venv-compat/bin/python" "$root/tests/compat/check.py"
echo "compat: private names of the newest torch"
PYTHONPATH="$root/python" "$root/.venv-compat/bin/python" -m pytest -q --noconftest -p no:cacheprovider \
  "$root/tests/python/test_torch_private.py"
