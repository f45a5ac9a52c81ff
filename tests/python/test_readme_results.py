"""The README's picture and table are those of the results that it cites."""

import re
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"

matplotlib = pytest.importorskip("matplotlib")
if not README.is_file():
    pytest.skip("there is no README.md here", allow_module_level=True)


@pytest.fixture(scope="module")
def tool():
    return runpy.run_path(str(ROOT / "tools" / "readme_results.py"))


@pytest.mark.parametrize("look", ["light", "dark"])
def test_the_picture_shows_the_results(tool, look):
    pinned = re.search(r"^matplotlib==(.+)$", (ROOT / "requirements-dev.txt").read_text(), re.M)[1]
    if matplotlib.__version__ != pinned:
        pytest.skip(f"matplotlib {matplotlib.__version__} may draw otherwise than {pinned}")
    path = ROOT / "docs" / "images" / f"speedups-{look}.svg"
    # assert on the whole texts would print both
    assert (tool["picture"](look) == path.read_text()) is True, "run tools/readme_results.py"
    assert path.stat().st_size < 100_000


def test_the_picture_has_every_row_and_every_loss(tool):
    for _, rival, each in tool["lines"]():
        for clock, (score, ratios) in each.items():
            assert len(ratios) == score.total > 0, (rival, clock)
            assert sum(ratio < 1 for ratio in ratios) >= score.slower


def test_the_table_has_the_figures_of_the_results(tool):
    table = tool["table"]()
    assert len(table.splitlines()) > 10
    assert table in README.read_text()


def test_the_readme_names_date_and_commit_of_each_result(tool):
    text = README.read_text()
    first_screen = text[: text.index("## Operators")]
    for folder in tool["RESULTS"].values():
        environment = tool["read"](folder)["environment"]
        assert environment["commit"] in first_screen
        assert environment["date"] in first_screen
        assert f"(docs/results/{folder}/summary.md)" in text
