"""Tables as Python shows them: a screenful of plain text, and HTML in a notebook."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Final

from markupsafe import Markup

from .table import Heading, Parts, Table, heading_words
from .terminal import as_text

_MOST_LINES: Final = 40
"""Of a screenful."""
_FEWEST_ROWS: Final = 5
"""Of a table that is cut short; where fewer have room, the table is only named."""


def screenful(parts: Parts | Table) -> str:
    """The parts as plain text of at most 40 lines or so: all sentences, and tables in order as far as they have room.

    The first table without room is cut short; those after it are named.  The text does not end with a line's end.
    """
    parts = _as_parts(parts)
    kept: dict[int, Table | str] = {place: part for place, part in enumerate(parts) if not isinstance(part, Table)}
    left_out: list[Table] = []
    for place, part in enumerate(parts):
        if not isinstance(part, Table):
            continue
        whole = _with(kept, place, part)
        missing = _num_lines(whole) - _MOST_LINES
        if left_out:
            left_out.append(part)
        elif missing <= 0:
            kept = whole
        elif len(part.rows) - missing - 1 >= _FEWEST_ROWS:
            num_rows = len(part.rows) - missing - 1
            told = f"{len(part.rows) - num_rows:,} more rows are not shown."
            kept = _with(
                kept, place, replace(part, rows=part.rows[:num_rows], notes=(*part.notes, told), errors_frac=())
            )
        else:
            left_out.append(part)
    shown = [*(kept[place] for place in sorted(kept))]
    if left_out:
        shown.append(f"Not shown: {'; '.join(table.title or 'a table' for table in left_out)}.")
    return as_text(shown).rstrip("\n")


def as_html(parts: Parts | Table) -> str:
    """All of the parts as HTML without a style of its own; names are escaped."""
    return str(Markup("\n").join(line for part in _as_parts(parts) for line in _html(part)))


def _as_parts(parts: Parts | Table) -> Parts:
    return (parts,) if isinstance(parts, Table) else parts


def _with(kept: dict[int, Table | str], place: int, part: Table) -> dict[int, Table | str]:
    return kept | {place: part}


def _num_lines(kept: dict[int, Table | str]) -> int:
    return len(as_text([kept[place] for place in sorted(kept)]).splitlines())


def _html(part: Table | str) -> Iterator[Markup]:
    if isinstance(part, Heading):
        yield Markup("<h4>{}</h4>").format(str(part))
        return
    if not isinstance(part, Table):
        yield from (Markup("<p>{}</p>").format(line) for line in part.splitlines())
        return
    yield Markup("<table>")
    if part.title:
        yield Markup("<caption>{}</caption>").format(part.title)
    if part.has_head:
        cells = (
            Markup('<th scope="col"{}>{}</th>').format(_side(part, i), heading_words(c))
            for i, c in enumerate(part.columns)
        )
        yield Markup("<thead><tr>{}</tr></thead>").format(Markup("").join(cells))
    yield Markup("<tbody>")
    for number, row in enumerate(part.rows):
        pattern = Markup("<b>{}</b>") if part.styles.get(number) == "bold" else Markup("{}")
        cells = (Markup("<td{}>{}</td>").format(_side(part, i), pattern.format(cell)) for i, cell in enumerate(row))
        yield Markup("<tr>{}</tr>").format(Markup("").join(cells))
    yield Markup("</tbody></table>")
    yield from (Markup("<p>{}</p>").format(note) for note in part.notes)


def _side(table: Table, place: int) -> Markup:
    """Figures stand right, words left; notebooks set all of them right."""
    return Markup(' style="text-align: {}"').format("right" if table.is_figure(place) else "left")
