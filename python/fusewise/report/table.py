"""A table, its colours and its Markdown form."""

from dataclasses import dataclass

# Words that colour a cell or a line, in every output format.
_BAD = ("SLOWER", "WORSE", "WRONG", "FAILED", "NOT MEASURED", "INTERRUPTED", "BUSY MACHINE")
_GOOD = ("faster", "better", "right")


@dataclass(frozen=True)
class Table:
    title: str
    header: list[str]
    rows: list[list[str]]
    text_columns: int = 1
    """The number of leading columns that hold text. The others hold right-aligned figures."""
    keep: int | None = None
    """The number of leading columns that are always shown. The others are shown if there is room.
    None: show all."""

    def without_empty_columns(self) -> "Table":
        """Drops the columns of figures that have no figure in any row."""
        full = [
            column < self.text_columns
            or any(character.isdigit() for row in self.rows for character in row[column])
            for column in range(len(self.header))
        ]
        return self.columns([column for column, has in enumerate(full) if has])

    def columns(self, chosen: list[int]) -> "Table":
        text = sum(column < self.text_columns for column in chosen)
        keep = None if self.keep is None else sum(column < self.keep for column in chosen)
        header, *rows = ([row[i] for i in chosen] for row in (self.header, *self.rows))
        return Table(self.title, header, rows, text, keep)


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
