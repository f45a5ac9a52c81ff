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
        self.figure.savefig(buffer, format="svg", metadata={"Date": None})
        return base64.b64encode(buffer.getvalue()).decode()


@dataclass(frozen=True)
class Section:
    """Text, tables and plots under one heading."""

    title: str
    lines: list[str] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)
    plots: list[Plot] = field(default_factory=list)


def write_page(
    path: Path, title: str, command: str, facts: dict[str, object], sections: list[Section]
) -> None:
    """`facts` are the environment and what else one must know; needs jinja2."""
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent), autoescape=True, trim_blocks=True
    )
    template = environment.get_template("page.html")
    text = template.render(title=title, command=command, facts=facts, sections=sections, tone=tone)
    path.write_text(text, encoding="utf-8")
