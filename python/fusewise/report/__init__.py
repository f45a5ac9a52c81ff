"""Tables, pages and terminal output, shared by all commands."""

from .page import Bars, Plot, Section, Tile, write_page
from .table import Table, markdown_table
from .terminal import show

__all__ = ["Bars", "Plot", "Section", "Table", "Tile", "markdown_table", "show", "write_page"]
