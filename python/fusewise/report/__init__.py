"""What every command shares to show its findings: tables, pages, nothing of what is in them."""

from .page import Bars, Plot, Section, Tile, write_page
from .table import Table, markdown_table
from .terminal import show

__all__ = ["Bars", "Plot", "Section", "Table", "Tile", "markdown_table", "show", "write_page"]
