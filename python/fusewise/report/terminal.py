"""Shows tables and lines on a terminal of any width; prints Markdown if it is not a terminal."""

import os
import shutil
import sys
import textwrap
from itertools import zip_longest

from .table import Table, markdown_table, tone

_GAP = 2
_SHORT = 16  # length of a text cell that is not broken
_COLOURS = {"bad": "\033[1;31m", "good": "\033[32m"}
_BOLD, _PLAIN = "\033[1m", "\033[0m"


def show(*parts: Table | str) -> None:
    """Shows the parts one after the other."""
    if not sys.stdout.isatty():
        for part in parts:
            print(part if isinstance(part, str) else "\n".join(markdown_table(part)))
        return
    width = shutil.get_terminal_size().columns
    colour = "NO_COLOR" not in os.environ and os.environ.get("TERM") != "dumb"
    for part in parts:
        print("\n".join(lines(part, width, colour)))


def lines(part: Table | str, width: int, colour: bool = False) -> list[str]:
    """Lines no wider than `width`. Words are only cut if they do not fit at all."""
    if isinstance(part, str):
        found = textwrap.wrap(part, width, break_on_hyphens=False) or [""]
        return [_painted(line, "bad" if tone(part) == "bad" else "", colour) for line in found]
    found = ["", *(_painted(line, "title", colour) for line in textwrap.wrap(part.title, width))]
    shown = _that_fit(part, width)
    widths = _widths(shown, width)
    found += _row(shown.header, shown, widths, False)
    found.append("─" * (sum(widths) + _GAP * (len(widths) - 1)))
    names = {row[0] for row in shown.rows}
    fold = len({_cut(name, widths[0]) for name in names}) < len(names)
    for row in shown.rows:
        found += _row(row, shown, widths, colour, fold)
    return found


def _that_fit(table: Table, width: int) -> Table:
    """The columns that are always shown, then the others from the left as long as there is room."""
    if table.keep is None:
        return table
    natural = _natural(table)
    natural[0] = min(natural[0], 2 * width // 5)  # a long name may be cut, but not a whole column
    chosen = list(range(table.keep))
    for column in range(table.keep, len(natural)):
        if sum(natural[i] + _GAP for i in [*chosen, column]) - _GAP <= width:
            chosen.append(column)
    return table.columns(chosen)


def _natural(table: Table) -> list[int]:
    return [max(map(len, column)) for column in zip(table.header, *table.rows, strict=True)]


def _least(table: Table) -> list[int]:
    """The least widths: sentences and headings may wrap, figures and short texts may not."""
    found = []
    for column, (heading, *cells) in enumerate(zip(table.header, *table.rows, strict=True)):
        sentences = column < table.text_columns and max(map(len, cells)) > _SHORT
        parts = [word for cell in cells for word in cell.split()] if sentences else cells
        found.append(max(map(len, [*heading.split(), *parts]), default=0))
    found[0] = min(found[0], _SHORT)
    return found


def _widths(table: Table, width: int) -> list[int]:
    """Column widths. Those that lack least get their full width first; the longest get the rest."""
    widths, natural = _least(table), _natural(table)
    spare = width - sum(widths) - _GAP * (len(widths) - 1)
    wanting = sorted(range(len(widths)), key=lambda i: natural[i] - widths[i])
    for column in wanting:
        more = min(natural[column] - widths[column], max(spare, 0))
        widths[column] += more
        spare -= more
    while spare < 0:  # too narrow even for whole words
        widths[widths.index(max(widths))] -= 1
        spare += 1
    return widths


def _row(
    row: list[str], table: Table, widths: list[int], colour: bool, fold: bool = False
) -> list[str]:
    name = _folded if fold else lambda cell, width: [_cut(cell, width)]
    cells = [
        name(cell, width) if column == 0 else _broken(cell, width)
        for column, (cell, width) in enumerate(zip(row, widths, strict=True))
    ]
    found = []
    for parts in zip_longest(*cells, fillvalue=""):
        line = [
            _painted(
                part.ljust(width) if column < table.text_columns else part.rjust(width),
                tone(row[column]),
                colour,
            )
            for column, (part, width) in enumerate(zip(parts, widths, strict=True))
        ]
        found.append((" " * _GAP).join(line).rstrip())
    return found


def _cut(name: str, width: int) -> str:
    """Cuts out the middle, because the end of a name says as much as its beginning."""
    if len(name) <= width:
        return name
    end = (width - 1) // 2
    return name[: width - 1 - end] + "…" + name[len(name) - end :]


def _folded(name: str, width: int) -> list[str]:
    """Wraps behind a dot where there is one. For names that would be equal if they were cut."""
    found = []
    while len(name) > width:
        end = name.rfind(".", 0, width) + 1 or width
        found.append(name[:end])
        name = name[end:]
    return [*found, name]


def _broken(cell: str, width: int) -> list[str]:
    """Wraps between words; a word that is too long is cut."""
    found = textwrap.wrap(cell, width, break_long_words=False, break_on_hyphens=False)
    return [_cut(line, width) for line in found] or [""]


def _painted(text: str, how: str, colour: bool) -> str:
    if not colour or not how:
        return text
    return f"{_BOLD if how == 'title' else _COLOURS[how]}{text}{_PLAIN}"
