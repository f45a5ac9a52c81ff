"""Tables on terminals of any width: no line too wide, words and figures whole."""

import functools
import re

import pytest

from fusewise.bench import compare, progress, report, tables
from fusewise.report import Table, show
from fusewise.report.terminal import lines
from results import gpu_results
from test_report import with_rival

WIDTHS = (60, 80, 100, 120, 200)


@functools.cache
def long_results():
    """Names as long as the longest that we have, and losses."""
    results = with_rival(gpu_results(), "addmm_activation", 1.5)
    with_rival(results, "products", 1.5)
    for place, row in enumerate(results["rows"]):
        row["case"] = f"gelu_tanh-1024x784-2048-2048-{place}-bf16"
        row["mode"] = ("forward", "forward+backward", "train step")[place % 3]
        row["host"] = {"overhead_us": 18.0, "empty_us": 12.5}
    return results


@functools.cache
def compared():
    found = compare.compare(long_results(), long_results())
    return [*compare.lines(found), *compare.tables(found)]


@pytest.mark.parametrize("width", WIDTHS)
def test_no_line_is_too_wide_and_no_word_is_broken(width):
    results = long_results()
    for part in report.terminal(results):
        found = lines(part, width)
        assert max(map(len, found)) <= width
        if isinstance(part, Table):
            ruler = next(i for i, line in enumerate(found) if line.startswith("─"))
            below = found[ruler + 1 :]
            whole = {word for row in part.rows for cell in row for word in cell.split()}
            words = {word for line in below for word in line.split()}
            assert all(word in whole or "…" in word for word in words)
            assert len(below) == len(part.rows) or width < 80  # a line for each row


@pytest.mark.parametrize("width", WIDTHS)
def test_comparisons_fit_too(width):
    for part in compared():
        assert max(map(len, lines(part, width))) <= width


def headings(width):
    table = tables.family_table(long_results(), "squeeze_excite")
    found = lines(table, width)
    return re.split(r"\s{2,}", next(line for line in found if line.startswith("case")))


def test_what_is_shown_at_80_columns_and_more_where_there_is_room():
    first = ["case", "direction", "GPU µs", "vs eager", "vs compile"]
    assert headings(80) == first
    assert headings(60) == first[:4]
    assert headings(120)[:7] == [*first, "of floor", "wall µs"]
    assert {"host µs", "empty µs"} <= set(headings(200))


def test_the_headline_then_the_losses_then_the_families():
    text = "\n".join(line for part in report.terminal(long_results()) for line in lines(part, 80))
    places = [
        text.index(said) for said in ("12 rows on", "Losses:", "squeeze_excite:", "Ratios say")
    ]
    assert places == sorted(places)


def test_names_lose_their_middle_and_figures_nothing():
    table = Table("", ["case", "µs"], [["a-very-long-name-of-a-case-in-bf16", "1234567.8"]])
    assert lines(table, 26)[-1] == "a-very-…in-bf16  1234567.8"


def test_names_that_would_be_equal_if_cut_are_wrapped():
    names = ["features.1.block.0.1", "features.2.block.0.1"]
    table = Table("", ["module", "µs"], [[name, "1234567.8"] for name in names])
    found = ["features.1.block.  1234567.8", "0.1", "features.2.block.  1234567.8", "0.1"]
    assert lines(table, 28)[-4:] == found


def test_sentences_break_between_words():
    table = Table("", ["try", "because", "x"], [["this", "it is said to be quite fast", "1"]], 2)
    assert lines(table, 26)[-2:] == ["this  it is said to be   1", "      quite fast"]


def test_colours_only_on_a_terminal_that_wants_them(monkeypatch, capsys):
    table = Table("", ["case", "x"], [["a", "0.5x SLOWER"]])
    show(table)
    assert "| a | 0.5x SLOWER |" in capsys.readouterr().out  # no terminal: Markdown
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    show(table)
    assert "\033[1;31m0.5x SLOWER\033[0m" in capsys.readouterr().out
    monkeypatch.setenv("NO_COLOR", "1")
    show(table)
    assert "\033" not in capsys.readouterr().out


def test_lines_are_red_or_plain():
    legend = report.terminal(long_results())[-1]
    assert lines(legend, 80, colour=True) == lines(legend, 80)
    assert lines("INTERRUPTED", 80, colour=True) == ["\033[1;31mINTERRUPTED\033[0m"]


def test_a_long_name_leaves_the_bar_whole(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    bar = progress.Bar()
    bar.start("measuring", 20)
    bar.now("a name that does not fit in what is left of a line of eighty columns, by far")
    bar.stop()
    said = capsys.readouterr().out
    assert "0/20" in said and "a name that" in said and "…" in said
