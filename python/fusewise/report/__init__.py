"""What every command shares to show its findings: tables, pages, nothing of what is in them."""

from .page import Plot, Section, write_page
from .table import Table, markdown_table, show_tables

__all__ = ["Plot", "Section", "Table", "markdown_table", "show_tables", "write_page"]
