"""The one look of tables: a rule below the headings, no frame, figures set right, titles of their own above."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from rich import box
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, Group, JustifyMethod, RenderableType, RenderResult
from rich.measure import Measurement
from rich.table import Column, Table
from rich.text import Text

from .labels import NO_VALUE

_BETWEEN: Final = 3
"""Columns between two columns of a table."""
_READABLE: Final = 16
"""Words that are longer may be folded."""
_ANY_WIDTH: Final = 10_000


def plain_table(*columns: str) -> Table:
    """A table whose columns are named by ``columns``; a name that begins with ``>`` holds figures, set right.

    Where room is short, words wrap and figures do not: half a number is another number.
    """
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1), header_style="dim")
    for column in columns:
        is_figure = column.startswith(">")
        justify: JustifyMethod = "right" if is_figure else "left"
        table.add_column(Text(column.removeprefix(">")), justify=justify, no_wrap=is_figure, overflow="fold")
    _keep_whole(table, columns)
    return table


def add_row(table: Table, *cells: str, style: str = "") -> None:
    """One row of plain text: names from models and files are never read as markup."""
    table.add_row(*(Text(cell) for cell in cells), style=style or None)
    _keep_whole(table, cells)


def _keep_whole(table: Table, cells: Sequence[str]) -> None:
    """Columns of figures become as wide as these."""
    for column, cell in zip(table.columns, cells, strict=True):
        if column.no_wrap:
            widths = [cell_len(line.removeprefix(">")) for line in cell.splitlines()]
            column.min_width = max(column.min_width or 0, *widths, 0)


def least_width(renderable: RenderableType) -> int:
    """Columns that tables in ``renderable`` need so that no figure is cut and no word is folded into slivers."""
    if isinstance(renderable, Group):
        return max(map(least_width, renderable.renderables), default=0)
    if isinstance(renderable, FittingTable):
        return renderable.least_width
    if not isinstance(renderable, Table):
        return 0
    widths = [column.min_width if column.no_wrap else _least_words(column) for column in renderable.columns]
    return sum(width or 0 for width in widths) + _BETWEEN * (len(widths) - 1)


def _least_words(column: Column) -> int:
    """The longest word, or as much of it as is read well."""
    cells = [str(cell) for cell in (column.header, *column.cells)]
    return min(_READABLE, max((cell_len(word) for cell in cells for word in cell.split()), default=0))


@dataclass(frozen=True)
class FittingTable:
    """A table that leaves out columns rather than cut figures.

    A column that says the same in every row becomes a line below, or nothing if it is empty; then, where the table is
    still too wide, the ``expendable`` columns go, and the line says so.
    """

    columns: tuple[str, ...]
    """Their names, as of ``plain_table``."""
    rows: Sequence[tuple[str, ...]]
    always: int = 1
    """The first columns, which are shown in any case."""
    expendable: tuple[str, ...] = ()
    """Those that go where room is short, the first one first."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """The table, and what is not in it in words."""
        alike, shown = self._places()
        unbound = options.update(width=_ANY_WIDTH)
        left_out = []
        for place in map(self.columns.index, self.expendable):
            if Measurement.get(console, unbound, self._table(shown)).maximum <= options.max_width:
                break
            if place in shown:
                shown.remove(place)
                left_out.append(place)
        yield self._table(shown)
        lines = []
        facts = [f"{self._name(i)} {self.rows[0][i]}" for i in alike if self.rows[0][i] not in ("", NO_VALUE)]
        if facts:
            lines.append(f"In all of them: {', '.join(facts)}.")
        if left_out:
            lines.append(f"Left out for want of room: {', '.join(map(self._name, left_out))} (--json has all).")
        if lines:
            yield Text(" ".join(lines), style="dim")

    @property
    def least_width(self) -> int:
        """Columns that it needs without all that is expendable."""
        _, shown = self._places()
        return least_width(self._table([place for place in shown if self.columns[place] not in self.expendable]))

    def _places(self) -> tuple[list[int], list[int]]:
        """Columns that say the same in every row, and the others."""
        places = range(len(self.columns))
        alike = [
            place
            for place in places[self.always :]
            if len(self.rows) > 1 and len({row[place] for row in self.rows}) == 1
        ]
        return alike, [place for place in places if place not in alike]

    def _table(self, places: Sequence[int]) -> Table:
        table = plain_table(*(self.columns[place] for place in places))
        for row in self.rows:
            add_row(table, *(row[place] for place in places))
        return table

    def _name(self, place: int) -> str:
        """A heading on one line, such as ``chunk_bytes`` of two."""
        return self.columns[place].removeprefix(">").replace("_\n", "_").replace("-\n", "-").replace("\n", " ")


def titled(title: str, table: RenderableType) -> Group:
    """A table under its title, which may be wider than the table."""
    return Group(Text(title, style="bold"), table)


def spaced(parts: Iterable[RenderableType]) -> Group:
    """The parts with an empty line between each two."""
    lines: list[RenderableType] = []
    for part in parts:
        lines += [part, Text("")]
    return Group(*lines[:-1])
