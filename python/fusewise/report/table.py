"""A table, its colours, and its form in Markdown."""

from dataclasses import dataclass

# The words that give a cell or a line its colour, wherever it is shown.
_BAD = ("SLOWER", "WORSE", "WRONG", "FAILED", "NOT MEASURED", "INTERRUPTED", "BUSY MACHINE")
_GOOD = ("faster", "better", "right")


@dataclass(frozen=True)
class Table:
    title: str
    header: list[str]
    rows: list[list[str]]
    text_columns: int = 1
    """So many columns from the left are words; the others are figures, to the right."""
    keep: int | None = None
    """So many columns from the left are shown on every terminal, the others where there is room;
    None: all."""

    def without_empty_columns(self) -> "Table":
        """Without the columns of figures in which no row has one."""
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
