"""Tables on a terminal: a rule below the headings, no frame, figures set right, titles of their own above.

Every cell is plain ``Text``: names from models and files are never read as markup.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from io import StringIO
from typing import Final

from rich import box
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.measure import Measurement
from rich.table import Table as RichTable
from rich.text import Text

from .labels import NO_VALUE
from .table import Heading, Parts, Table, heading_words

_BETWEEN: Final = 3
"""Columns between two columns of a table."""
_READABLE: Final = 16
"""Words that are longer may be folded."""
_ANY_WIDTH: Final = 10_000


def as_text(parts: Parts, *, width: int = 100) -> str:
    """The parts as plain text of ``width`` columns, more where figures need more; equal input, equal text."""
    out = StringIO()
    console = Console(
        file=out,
        width=width,
        height=25,
        color_system=None,
        force_terminal=False,
        force_jupyter=False,
        legacy_windows=False,
        highlight=False,
        markup=False,
        emoji=False,
    )
    console.width = max(width, least_width(parts))
    console.print(Printed(parts))
    return "".join(f"{line.rstrip()}\n" for line in out.getvalue().splitlines())


@dataclass(frozen=True, slots=True)
class Printed:
    """The parts as rich prints them, an empty line between each two."""

    parts: Parts

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """One after another."""
        for place, part in enumerate(self.parts):
            if place:
                yield Text("")
            if isinstance(part, Table):
                yield from _printed_table(part, console, options)
            else:
                yield Text(part, style="bold" if isinstance(part, Heading) else "")


def least_width(parts: Parts) -> int:
    """Columns that the tables need so that no figure is cut and no word is folded into slivers.

    What is expendable does not count.
    """
    widths = [0]
    for table in (part for part in parts if isinstance(part, Table)):
        needs = [
            _least_column(table, place) for place in _places(table)[0] if table.columns[place] not in table.expendable
        ]
        widths.append(sum(needs) + _BETWEEN * (len(needs) - 1))
    return max(widths)


def _least_column(table: Table, place: int) -> int:
    """Of figures the widest line; of words the longest one, or as much of it as is read well."""
    if _is_whole(table, place):
        return _widest_line(table, place)
    return min(_READABLE, _longest_word(table, place))


def _longest_word(table: Table, place: int) -> int:
    cells = (table.columns[place], *(row[place] for row in table.rows))
    return max((cell_len(word) for cell in cells for word in cell.split()), default=0)


def _is_whole(table: Table, place: int) -> bool:
    """Whether cells are never broken: half a number is another number, and names without a head are short."""
    return table.is_figure(place) or (place == 0 and not table.has_head)


def _widest_line(table: Table, place: int) -> int:
    cells = (table.columns[place].removeprefix(">"), *(row[place] for row in table.rows))
    return max((cell_len(line) for cell in cells for line in cell.splitlines()), default=0)


def _places(table: Table) -> tuple[list[int], list[int]]:
    """Columns to show, and those that say the same in every row."""
    places = range(len(table.columns))
    alike = [
        place
        for place in places[table.always :]
        if table.always is not None and len(table.rows) > 1 and len({row[place] for row in table.rows}) == 1
    ]
    return [place for place in places if place not in alike], alike


def _printed_table(table: Table, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
    """The table, without columns that say nothing and those that have no room; and what they are in words."""
    shown, alike = _places(table)
    left_out = []
    for place in map(table.columns.index, table.expendable):
        drawn = _rich_table(table, shown, _ANY_WIDTH)
        needs = Measurement.get(console, options.update(width=_ANY_WIDTH), drawn).maximum
        if needs <= options.max_width:
            break
        if place in shown:
            shown.remove(place)
            left_out.append(place)
    if table.title:
        yield Text(table.title, style="bold")
    yield _rich_table(table, shown, options.max_width)
    names = [heading_words(column) for column in table.columns]
    told = []
    facts = [f"{names[i]} {table.rows[0][i]}" for i in alike if table.rows[0][i] not in ("", NO_VALUE)]
    if facts:
        told.append(f"In all of them: {', '.join(facts)}.")
    if left_out:
        told.append(f"Left out for want of room: {', '.join(names[i] for i in left_out)} (--json has all).")
    for line in ([" ".join(told)] if told else []) + [*table.notes]:
        yield Text(line, style="dim")


def _widths_that_hold(table: Table, places: Sequence[int], width: int) -> dict[int, int]:
    """Columns of words that would become too narrow for their longest word, and the width that each gets instead.

    Where room is short, rich narrows the widest columns, whatever stands in them, to one common width.  Long words stay
    whole where the others leave room, the shortest of them first.  Empty where even slivers have no room.
    """
    room = width - _BETWEEN * (len(places) - 1)
    least = {place: _least_column(table, place) for place in places}
    words = [place for place in places if not _is_whole(table, place)]
    for place in sorted(words, key=lambda place: _longest_word(table, place)):
        longest = _longest_word(table, place)
        if sum(least.values()) - least[place] + longest <= room:
            least[place] = longest
    if sum(least.values()) > room:
        return {}
    held: dict[int, int] = {}
    while True:
        taken = sum(least[place] for place in places if place in held or place not in words)
        free = [place for place in words if place not in held]
        common = _common_width([_widest_line(table, place) for place in free], room - taken)
        narrow = {place: least[place] for place in free if common < least[place]}
        if not narrow:
            return held
        held |= narrow


def _common_width(widest: Sequence[int], room: int) -> int:
    """The most that columns may take, each no more than it needs (``widest``), so that all of them fit in ``room``."""
    for count, need in zip(range(len(widest), 0, -1), sorted(widest), strict=True):
        if need > room // count:
            return room // count
        room -= need
    return _ANY_WIDTH


def _rich_table(table: Table, places: Sequence[int], width: int) -> RichTable:
    """Where room is short, words wrap and figures do not."""
    held = _widths_that_hold(table, places, width)
    drawn = RichTable(
        box=box.SIMPLE_HEAD,
        show_edge=False,
        pad_edge=False,
        padding=(0, 1),
        header_style="dim",
        show_header=table.has_head,
    )
    for place in places:
        is_whole = _is_whole(table, place)
        drawn.add_column(
            Text(table.columns[place].removeprefix(">")),
            justify="right" if table.is_figure(place) else "left",
            no_wrap=is_whole,
            overflow="fold",
            width=held.get(place),
            min_width=_widest_line(table, place) if is_whole else None,
        )
    for number, row in enumerate(table.rows):
        if number in table.ruled:
            drawn.add_section()
        drawn.add_row(*(Text(row[place]) for place in places), style=table.styles.get(number))
    return drawn
