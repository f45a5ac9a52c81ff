"""The C++ core asks for no more CMake than it needs."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def asked_for(path):
    return re.search(r"cmake_minimum_required\(VERSION ([\d.]+)\)", path.read_text()).group(1)


def test_every_place_asks_for_the_same():
    files = ("CMakeLists.txt", "examples/cpp/CMakeLists.txt", "docs/cpp.md")
    assert {asked_for(ROOT / name) for name in files} == {"3.25"}
    assert "CMake 3.25 or newer, 3.30 with CUDA" in (ROOT / "docs/cpp.md").read_text()


def test_the_core_configures_with_the_systems_cmake(tmp_path):
    """On Debian 12 that is 3.25."""
    cmake = shutil.which("cmake", path="/usr/bin:/usr/local/bin")
    if not cmake:
        pytest.skip("the system has no cmake")
    version = subprocess.run([cmake, "--version"], capture_output=True, text=True).stdout
    numbers = tuple(map(int, re.search(r"(\d+)\.(\d+)", version).groups()))
    if numbers < (3, 25):
        pytest.skip(f"the system's cmake is {numbers[0]}.{numbers[1]}")
    ninja = shutil.which("ninja") or Path(sys.executable).with_name("ninja")
    command = [cmake, "--preset", "core", "-B", tmp_path, "-DFUSEWISE_CUDA=OFF"]
    command += [f"-DCMAKE_MAKE_PROGRAM={ninja}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "build.ninja").is_file()
    assert "Fusewise: GEMMs on the CPU by " in done.stdout
