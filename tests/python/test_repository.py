"""Promises about the repository itself."""

import re
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def test_the_core_knows_no_torch():
    """Nothing under include/ or src/ includes a header of torch, ATen or Python."""
    foreign = re.compile(r'#\s*include\s*[<"](torch|ATen|c10|pybind11|Python\.h)')
    sources = [
        path
        for folder in ("include", "src")
        for path in (ROOT / folder).rglob("*")
        if path.suffix in (".h", ".cpp", ".cu", ".cuh")
    ]
    assert sources
    assert not [str(path) for path in sources if foreign.search(path.read_text())]


@pytest.mark.parametrize("what", ["README.md", "CHANGELOG.md", "docs", "bench-results", "dist"])
def test_nothing_tells_about_the_machine_that_made_it(what):
    if not (ROOT / what).exists():
        pytest.skip(f"there is no {what} here")
    leaks = runpy.run_path(str(ROOT / "tools" / "check_leaks.py"))["leaks"]
    assert leaks(ROOT / what) == []


@pytest.mark.parametrize(
    "text, found",
    [
        ("built in /home/ada/fusewise", "home folder"),
        ("see /tmp/out.json", "temporary folder"),
        (f"cd {ROOT} && make", "this checkout"),
        ("pip install --index-url https://x.example/simple torch", "package index"),
        ("docs/results/summary.md at commit 0a1b2c3", None),
    ],
)
def test_the_search_for_leaks_finds_them(tmp_path, text, found):
    (tmp_path / "report.md").write_text(text)
    leaks = runpy.run_path(str(ROOT / "tools" / "check_leaks.py"))["leaks"](tmp_path / "report.md")
    kinds = {leak.removeprefix(f"{tmp_path}/report.md: ").split(":")[0] for leak in leaks}
    assert found in kinds if found else not kinds


@pytest.mark.parametrize("page", ["README.md", "docs/autoencoder.md", "docs/pytorch.md"])
def test_python_samples_run_as_printed(page, run_python):
    if not (ROOT / page).is_file():
        pytest.skip(f"there is no {page} here")
    text = (ROOT / page).read_text()
    samples = re.findall(r"^```python\n(.*?)^```", text, re.M | re.S)
    assert samples
    run_python("\n".join(f"exec({sample!r}, {{}})" for sample in samples))
