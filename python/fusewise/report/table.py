"""Tables: rich on a terminal, Markdown elsewhere. Losses are as visible as wins."""

import sys
from dataclasses import dataclass

# The words that give a cell or a line its colour, wherever it is shown.
_BAD = ("SLOWER", "WORSE", "WRONG", "NOT MEASURED", "INTERRUPTED", "BUSY MACHINE")
_GOOD = ("faster", "better", "right")


@dataclass(frozen=True)
class Table:
    title: str
    header: list[str]
    rows: list[list[str]]
    text_columns: int = 1
    """So many columns from the left are words; the others are figures, to the right."""


def tone(text: str) -> str:
    """ "bad", "good" or "" (neither)."""
    if any(word in text for word in _BAD):
        return "bad"
    return "good" if any(word in text for word in _GOOD) else ""


def markdown_table(table: Table) -> list[str]:
    ruler = ["---"] * table.text_columns + ["---:"] * (len(table.header) - table.text_columns)
    return [
        f"## {table.title}",
        "",
        *("| " + " | ".join(cells) + " |" for cells in (table.header, ruler, *table.rows)),
        "",
    ]


def show_tables(tables: list[Table], lines: list[str]) -> None:
    """On the terminal, or as Markdown where the output is none or rich is not there."""
    if sys.stdout.isatty():
        try:
            _show_rich(tables, lines)
            return
        except ImportError:
            pass  # rich comes with fusewise[bench]
    for table in tables:
        print("\n".join(markdown_table(table)))
    print("\n".join(lines))


def _show_rich(tables: list[Table], lines: list[str]) -> None:
    from rich.box import SIMPLE
    from rich.console import Console
    from rich.table import Table as RichTable
    from rich.text import Text

    console = Console()
    styles = {"bad": "bold red", "good": "green", "": ""}
    for table in tables:
        shown = RichTable(title=table.title, title_justify="left", box=SIMPLE, padding=(0, 1, 0, 0))
        for i, name in enumerate(table.header):
            # Where the terminal is narrow others break their lines; the first says which row it is.
            justify = "left" if i < table.text_columns else "right"
            shown.add_column(name, justify=justify, no_wrap=i == 0, overflow="fold")
        for row in table.rows:
            shown.add_row(*(Text(cell, styles[tone(cell)]) for cell in row))
        console.print(shown)
    for line in lines:
        console.print(Text(line, styles["bad"] if tone(line) == "bad" else ""), soft_wrap=True)
