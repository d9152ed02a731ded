"""A table as a value: what it says, and nothing of how it looks on a terminal (``terminal.py``) or on a page."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

Row = tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Rows of text below headings; every cell is plain words, whatever stands in it."""

    title: str = ""
    columns: Row
    """Headings.  ``>`` before one says that figures stand below it: they are set right and never broken.  A heading
    may be broken where it has a line's end.  Where all are empty there is no head, and the first column has names."""
    rows: Sequence[Row]
    styles: Mapping[int, Literal["bold", "dim"]] = field(default_factory=dict)
    """Rows that are stressed, or of less weight."""
    ruled: frozenset[int] = frozenset()
    """Rows with a rule above them on a terminal."""
    notes: Sequence[str] = ()
    """Lines below the table."""
    always: int | None = None
    """The first columns, which are shown in any case.  On a terminal, others that say the same in every row become a
    line below.  None keeps all columns."""
    expendable: tuple[str, ...] = ()
    """Columns that go where a terminal has no room, the first one first; the line below names them."""
    errors_frac: Sequence[float | None] = ()
    """Signed errors, one per row, which a page also draws as bars; () in tables without errors."""

    @property
    def has_head(self) -> bool:
        """Whether any column has a heading."""
        return any(self.columns)

    def is_figure(self, place: int) -> bool:
        """Whether the column holds figures."""
        return self.columns[place].startswith(">")


class Heading(str):
    """Stressed words between tables."""

    __slots__ = ()


Parts = Sequence[Table | str]
"""What a terminal shows, with an empty line between each two; words are paragraphs."""


def in_words_of(parts: Parts, words: Callable[[str], str]) -> Parts:
    """The same parts with every text as ``words`` gives it, so that columns are as wide as what stands in them."""
    return [
        replace(
            part,
            title=words(part.title),
            columns=tuple(map(words, part.columns)),
            rows=[tuple(map(words, row)) for row in part.rows],
            notes=[*map(words, part.notes)],
            expendable=tuple(map(words, part.expendable)),
        )
        if isinstance(part, Table)
        else type(part)(words(part))
        for part in parts
    ]


def heading_words(column: str) -> str:
    """A heading on one line, such as ``chunk_bytes`` of two."""
    return column.removeprefix(">").replace("_\n", "_").replace("-\n", "-").replace("\n", " ")


def breakable(name: str) -> str:
    """The name of a knob as a heading, which may be broken after its underscores."""
    return name.replace("_", "_\n")
