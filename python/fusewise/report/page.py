"""One HTML file that needs nothing else: style, script and plots are inside it."""

import base64
import io
from dataclasses import dataclass, field
from pathlib import Path

from .table import Table, tone


@dataclass(frozen=True)
class Plot:
    name: str
    """Of the PNG beside the page."""
    caption: str
    figure: object
    """A matplotlib figure."""

    @property
    def svg(self) -> str:
        """For the page, base64 of the drawing; as an image of its own, its ids meet no others."""
        buffer = io.BytesIO()
        # Transparent: the page shows through, and inverts what is drawn where it is dark.
        self.figure.savefig(buffer, format="svg", metadata={"Date": None}, transparent=True)
        return base64.b64encode(buffer.getvalue()).decode()


@dataclass(frozen=True)
class Tile:
    """One figure that is read before all others, and how many rows are behind it."""

    value: str
    label: str
    counts: dict[str, int]
    """"faster", "same" and "slower"."""


@dataclass(frozen=True)
class Bars:
    """Ratios as bars in groups, with a line at 1."""

    title: str
    groups: dict[str, dict[str, float]]

    @property
    def longest(self) -> float:
        return max(value for group in self.groups.values() for value in group.values())


@dataclass(frozen=True)
class Section:
    """What stands under one heading."""

    title: str
    lines: list[str] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)
    plots: list[Plot] = field(default_factory=list)
    tiles: list[Tile] = field(default_factory=list)
    bars: list[Bars] = field(default_factory=list)
    box: str = ""
    """A class of the style: "bad" sets the section into a red frame."""
    folded: bool = False
    """Only its heading is seen until a reader opens it."""


def write_page(
    path: Path, title: str, command: str, facts: dict[str, object], sections: list[Section]
) -> None:
    """`facts`, the environment and what else one must know, come last; needs jinja2."""
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent), autoescape=True, trim_blocks=True
    )
    template = environment.get_template("page.html")
    text = template.render(title=title, command=command, facts=facts, sections=sections, tone=tone)
    path.write_text(text, encoding="utf-8")
