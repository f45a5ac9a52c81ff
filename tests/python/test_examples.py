"""The C++ samples of the pages are the files that `make test-core` builds and runs."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def samples(page, language):
    text = (ROOT / page).read_text()
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.M | re.S)


@pytest.mark.parametrize("language, file", [("cpp", "main.cpp"), ("cmake", "CMakeLists.txt")])
def test_the_page_prints_the_example(language, file):
    assert samples("docs/cpp.md", language) == [(ROOT / "examples" / "cpp" / file).read_text()]


def test_the_readme_prints_a_part_of_the_example():
    (sample,) = samples("README.md", "cpp")
    assert "squeeze_excite" in sample
    assert sample in (ROOT / "examples" / "cpp" / "main.cpp").read_text()
