"""The C++ samples of the README are the files that `make test-core` builds and runs."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("language, file", [("cpp", "main.cpp"), ("cmake", "CMakeLists.txt")])
def test_the_readme_prints_the_example(language, file):
    text = (ROOT / "README.md").read_text()
    samples = re.findall(rf"^```{language}\n(.*?)^```", text, re.M | re.S)
    assert samples == [(ROOT / "examples" / "cpp" / file).read_text()]
