#!/usr/bin/env bash
# One build serves every torch from 2.11 on: the library that `make build` made, and the wheel of a
# clean `pip install .`, both under the newest torch. `make test-compat` calls this.
set -euo pipefail
cd "$(dirname "$0")/.."

[ -x .venv-compat/bin/python ] || "${PYTHON:-python3}" -m venv .venv-compat
pip=(.venv-compat/bin/python -m pip --disable-pip-version-check)

# `pip install .` in its two halves, so that the wheel can be looked at in between.
# The compiler by the name that CMake finds: by another one, ccache would not know the files again.
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
