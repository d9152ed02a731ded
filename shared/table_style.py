"""The one look of tables: a rule below the headings, no frame, figures set right, titles of their own above."""

from __future__ import annotations

from collections.abc import Iterable

from rich import box
from rich.console import Group, JustifyMethod, RenderableType
from rich.table import Table
from rich.text import Text


def plain_table(*columns: str) -> Table:
    """A table whose columns are named by ``columns``; a name that begins with ``>`` holds figures, set right."""
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1), header_style="dim")
    for column in columns:
        justify: JustifyMethod = "right" if column.startswith(">") else "left"
        table.add_column(Text(column.removeprefix(">")), justify=justify, overflow="fold")
    return table


def add_row(table: Table, *cells: str, style: str = "") -> None:
    """One row of plain text: names from models and files are never read as markup."""
    table.add_row(*(Text(cell) for cell in cells), style=style or None)


def titled(title: str, table: Table) -> Group:
    """A table under its title, which may be wider than the table."""
    return Group(Text(title, style="bold"), table)


def spaced(parts: Iterable[RenderableType]) -> Group:
    """The parts with an empty line between each two."""
    lines: list[RenderableType] = []
    for part in parts:
        lines += [part, Text("")]
    return Group(*lines[:-1])
