"""Writes a self-contained HTML file: style, script and plots are embedded."""

import base64
import io
from dataclasses import dataclass, field
from pathlib import Path

from .table import Table, tone


@dataclass(frozen=True)
class Plot:
    name: str
    """The name of the PNG file next to the page."""
    caption: str
    figure: object
    """A matplotlib figure."""

    @property
    def svg(self) -> str:
        """The drawing in base64. As an image of its own, its ids cannot clash with others."""
        buffer = io.BytesIO()
        # Transparent, because the page's background shows through and dark mode inverts the
        # drawing.
        self.figure.savefig(buffer, format="svg", metadata={"Date": None}, transparent=True)
        return base64.b64encode(buffer.getvalue()).decode()


@dataclass(frozen=True)
class Tile:
    """A headline figure, and the counts of the rows behind it."""

    value: str
    label: str
    counts: dict[str, int]
    """The number of "faster", "same" and "slower" rows."""


@dataclass(frozen=True)
class Bars:
    """Ratios as grouped bars, with a line at 1."""

    title: str
    groups: dict[str, dict[str, float]]

    @property
    def longest(self) -> float:
        return max(value for group in self.groups.values() for value in group.values())


@dataclass(frozen=True)
class Section:
    """A heading and its contents."""

    title: str
    lines: list[str] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)
    plots: list[Plot] = field(default_factory=list)
    tiles: list[Tile] = field(default_factory=list)
    bars: list[Bars] = field(default_factory=list)
    box: str = ""
    """A CSS class: "bad" puts the section into a red frame."""
    folded: bool = False
    """Only the heading is visible until the reader opens it."""


def write_page(
    path: Path, title: str, command: str, facts: dict[str, object], sections: list[Section]
) -> None:
    """Writes the page. `facts` (the environment and measured rates) come last. Needs jinja2."""
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent), autoescape=True, trim_blocks=True
    )
    template = environment.get_template("page.html")
    text = template.render(title=title, command=command, facts=facts, sections=sections, tone=tone)
    path.write_text(text, encoding="utf-8")
