"""The C++ sample of the README is the program that `make test-core` builds and runs."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_readme_prints_the_example():
    samples = re.findall(r"^```cpp\n(.*?)^```", (ROOT / "README.md").read_text(), re.M | re.S)
    assert samples == [(ROOT / "examples" / "cpp" / "main.cpp").read_text()]
