"""The walk through a new operator is true: its blocks, put into a copy of the tree, are built and
called."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "adding-an-operator.md"
if not PAGE.is_file():
    pytest.skip("there is no documentation here", allow_module_level=True)

TEXT = PAGE.read_text()
MOST_FILES = 16
BUILD_SECONDS = 600


def blocks():
    """(path, the text in the line behind which it belongs or '', content) of each block."""
    for body in re.findall(r"^```\w+\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL):
        title, content = body.split("\n", 1)
        path, _, behind = title.lstrip("/# ").partition(", behind: ")
        yield path, behind, content


def tree_with_the_operator() -> dict[str, bytes]:
    """Every file that the build and the package need, and the page's."""
    folders = ("benchmarks/cases", "benchmarks/naive", "bindings", "cmake", "include", "src")
    paths = [ROOT / name for name in ("CMakeLists.txt", "CMakePresets.json", "pyproject.toml")]
    for folder in (*folders, "python"):
        paths += (path for path in (ROOT / folder).rglob("*") if path.is_file())
    left = {"_lib", "__pycache__"}
    files = {
        path.relative_to(ROOT).as_posix(): path.read_bytes()
        for path in paths
        if not left & set(path.parts)
    }
    for path, behind, content in blocks():
        if not behind:
            assert path not in files, f"{path}: is there already"
            files[path] = content.encode()
            continue
        lines = files[path].decode().splitlines(keepends=True)
        (place,) = (i for i, line in enumerate(lines) if behind in line)
        files[path] = "".join([*lines[: place + 1], content, *lines[place + 1 :]]).encode()
    return files


def write(folder: Path, files: dict[str, bytes]) -> None:
    """Only what differs, so that the next build starts where the last one ended."""
    for path in [path for path in folder.rglob("*") if path.is_file()]:
        name = path.relative_to(folder)
        kept = name.parts[0] == "build" or "_lib" in name.parts
        if not kept and name.as_posix() not in files:
            path.unlink()
    for name, content in files.items():
        path = folder / name
        if not path.is_file() or path.read_bytes() != content:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)


def listed() -> list[str]:
    """The files of the page's table."""
    return re.findall(r"^\| `([^`]+)` \|", TEXT, re.MULTILINE)


def test_an_operator_touches_few_files():
    files = listed()
    assert len(files) == len(set(files)) <= MOST_FILES
    names = {path.replace("scale_shift", "foo") for path, _, _ in blocks()}
    assert names <= set(files)
    assert all((ROOT / file).is_file() for file in files if "foo" not in file)
    # What every operator has, but for the files of the page.
    assert {"src/common/foo.cpp", "src/common/operators.h", "tests/cpp/test_foo.cpp"} <= set(files)


def run(*command, cwd, **environment):
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        [*map(str, command)],
        cwd=cwd,
        env=os.environ | {"PATH": path} | environment,
        capture_output=True,
        text=True,
        timeout=BUILD_SECONDS,
    )
    assert done.returncode == 0, f"{done.stdout[-4000:]}\n{done.stderr[-4000:]}"


@pytest.mark.skipif(not (ROOT / "build" / "dev").is_dir(), reason="not a tree that was built")
def test_the_walk_builds_and_runs():
    """Without optimisation, which takes most of a build. The folder stays for the next time."""
    tree = ROOT / "build" / "new_operator"
    write(tree, tree_with_the_operator())
    build_type = ("-DCMAKE_BUILD_TYPE=Debug", "-DCMAKE_CXX_FLAGS_DEBUG=-O0")
    define = (*build_type, "-DFUSEWISE_CUDA=OFF", "-DFUSEWISE_TESTS=OFF")
    run("cmake", "--preset", "dev", *define, f"-DPython_EXECUTABLE={sys.executable}", cwd=tree)
    run("cmake", "--build", "--preset", "dev", "--target", "fusewise_torch", cwd=tree)
    test = tree / "tests" / "python" / "test_scale_shift.py"
    options = ("-q", "-p", "no:cacheprovider")
    python_path = {"PYTHONPATH": str(tree / "python"), "PYTHONDONTWRITEBYTECODE": "1"}
    run(sys.executable, "-m", "pytest", *options, test, cwd=tree, **python_path)
