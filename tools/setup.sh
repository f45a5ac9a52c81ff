#!/usr/bin/env bash
# Makes .venv with the pinned packages, and links this source tree into it. `make setup` calls this.
set -euo pipefail
cd "$(dirname "$0")/.."

fail() {
  echo "setup: $1" >&2
  exit 1
}

python=${PYTHON:-python3}
command -v "$python" >/dev/null || fail "no $python found; on Debian: apt-get install python3 python3-venv"
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' ||
  fail "$("$python" --version) is too old; Python 3.10 or newer is needed (PYTHON=... picks another)"
"$python" -c 'import ensurepip, venv' 2>/dev/null ||
  fail "$python has no venv module; on Debian: apt-get install python3-venv"
command -v g++ >/dev/null || fail "no g++ found; on Debian: apt-get install g++"
gxx=$(g++ -dumpfullversion)
[ "${gxx%%.*}" -ge 12 ] || fail "g++ $gxx is too old; g++ 12 or newer is needed"

# Installs a system package, for what Python packages do not provide.
install() {
  command -v apt-get >/dev/null || return 0
  local as_root
  if [ "$(id -u)" = 0 ]; then
    as_root=()
  elif sudo -n true 2>/dev/null; then
    as_root=(sudo -n)
  else
    return 0
  fi
  echo "setup: installing $1"
  { "${as_root[@]}" apt-get update -qq &&
    "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends "$1"; } || true
}

has_gtest() { echo '#include <gtest/gtest.h>' | g++ -E -x c++ - >/dev/null 2>&1; }
has_gtest || install libgtest-dev
if ! has_gtest; then
  [ "${CI:-}" != true ] || fail "CI needs GoogleTest: apt-get install libgtest-dev"
  echo "setup: GoogleTest is missing, C++ tests will be SKIPPED; to have them: apt-get install libgtest-dev"
fi

# CI builds the same files three times. With a cache each is compiled once.
if [ "${CI:-}" = true ] && ! command -v ccache >/dev/null; then install ccache; fi

# A browser is a large install for a few tests, so only CI installs it automatically.
has_chromium() { command -v chromium chromium-browser >/dev/null; }
if ! has_chromium && [ "${CI:-}" = true ]; then install chromium; fi
has_chromium ||
  echo "setup: no Chromium, tests of the HTML pages will be SKIPPED; to have them: apt-get install chromium"

"$python" -m venv .venv
.venv/bin/python -m pip install --disable-pip-version-check -r requirements-dev.txt

# The package is used from the source tree; CMake puts the compiled operators into it.
site=$(.venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
echo "$PWD/python" >"$site/fusewise-source.pth"
cat >.venv/bin/fusewise <<LAUNCHER
#!$PWD/.venv/bin/python
from fusewise.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
LAUNCHER
chmod +x .venv/bin/fusewise
touch .venv/ready
