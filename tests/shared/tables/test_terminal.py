"""Tables at any width: no figure is ever cut, and what a narrow table leaves out is said."""

from __future__ import annotations

import re
from collections import Counter
from io import StringIO

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from protwin.shared.tables.table import Table
from protwin.shared.tables.terminal import as_text, least_width
from tests.shared.report_pages import html_table, parse

FIGURES = st.from_regex(r"[−+]?[1-9][0-9]{0,8}(\.[0-9]{1,3})?( (GiB|ms|%))?", fullmatch=True)
WORDS = st.text("abc def", min_size=1, max_size=60)


@st.composite
def filled(draw: st.DrawFn) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Column names and rows; figures in the columns that say so."""
    is_figure = draw(st.lists(st.booleans(), min_size=1, max_size=10))
    names = tuple(f"{'>' * one}column\n{place}" for place, one in enumerate(is_figure))
    rows = draw(
        st.lists(st.tuples(*(FIGURES if one else WORDS for one in is_figure)), min_size=1, max_size=4),
    )
    return names, rows


def shown(table: Table, width: int = 100) -> str:
    return as_text([table], width=width)


def is_whole(text: str, figure: str) -> bool:
    """Whether it stands somewhere with nothing of a figure beside it."""
    return re.search(rf"(?<![\w.,−+]){re.escape(figure)}(?![\w.,%])", text) is not None


@settings(max_examples=40)
@given(content=filled(), width=st.integers(1, 130))
def test_figures_are_whole_at_every_width(content: tuple[tuple[str, ...], list[tuple[str, ...]]], width: int) -> None:
    names, rows = content
    text = shown(Table(title="t", columns=names, rows=rows), width)
    for row in rows:
        for name, cell in zip(names, row, strict=True):
            assert not name.startswith(">") or is_whole(text, cell)


@settings(max_examples=40)
@given(content=filled(), width=st.integers(1, 130))
def test_lines_are_no_wider_than_asked_or_needed(
    content: tuple[tuple[str, ...], list[tuple[str, ...]]], width: int
) -> None:
    names, rows = content
    table = Table(columns=names, rows=rows)
    assert max(map(len, shown(table, width).splitlines())) <= max(width, least_width([table]))


@st.composite
def columns_that_fit(draw: st.DrawFn, width: int) -> list[tuple[str, ...]]:
    """Rows whose longest words have room side by side, three columns between each two; a row may have many words."""
    num_columns = draw(st.integers(2, 5))
    room = width - 3 * (num_columns - 1)
    columns = []
    for left in range(num_columns - 1, -1, -1):
        longest = draw(st.integers(5, room - 5 * left))
        room -= longest
        words = st.lists(st.integers(1, longest).map(lambda length: ("abcdefgh._" * 12)[:length]), min_size=1)
        columns.append([("x" * longest), *(draw(words.map(" ".join)) for _ in range(2))])
    return list(zip(*draw(st.permutations(columns)), strict=True))


@settings(max_examples=60)
@given(data=st.data(), width=st.sampled_from((80, 100, 120)))
def test_words_are_whole_wherever_the_longest_of_all_columns_have_room(data: st.DataObject, width: int) -> None:
    rows = data.draw(columns_that_fit(width))
    text = shown(Table(columns=("words",) * len(rows[0]), rows=rows), width)
    assert max(map(len, text.splitlines())) <= width
    assert Counter(text.split()) >= Counter(word for row in rows for cell in row for word in cell.split())


def test_the_check_notices_cut_figures() -> None:
    """The wrong variants: what rich does by itself where room is short."""
    for overflow in ("ellipsis", "crop", "fold"):
        for no_wrap in (True, False):
            table = RichTable()
            for _ in range(8):
                table.add_column(Text("figure"), no_wrap=no_wrap, overflow=overflow)
            table.add_row(*(Text("123456789.25") for _ in range(8)))
            out = StringIO()
            Console(file=out, width=60).print(table)
            assert not is_whole(out.getvalue(), "123456789.25")


@settings(max_examples=40)
@given(content=filled(), width=st.integers(20, 130))
def test_what_is_the_same_in_every_row_is_said_once(
    content: tuple[tuple[str, ...], list[tuple[str, ...]]], width: int
) -> None:
    names, rows = content
    assume(len(rows) > 1)
    rows = [(*row, "42 GiB", "17") for row in rows]
    table = Table(columns=(*names, ">n_\nswap", ">micro-\nbatch"), rows=rows, always=len(names))
    text = " ".join(shown(table, width).split())
    assert text.endswith("In all of them: n_swap 42 GiB, micro-batch 17.")
    assert text.count("42 GiB") >= 1
    assert "n_ " not in text, "no heading is left"


def test_one_row_is_shown_as_it_is() -> None:
    text = shown(Table(columns=("name", ">size"), rows=[("a", "42 GiB")], always=1))
    assert "42 GiB" in text
    assert "In all" not in text


def test_what_is_expendable_goes_where_room_is_short_and_is_named() -> None:
    rows = [("a", "123456789 GiB", "1", "7"), ("b", "987654321 GiB", "2", "8")]
    columns = (">name", ">size", ">first\nto go", ">n_\nnext")
    table = Table(columns=columns, rows=rows, expendable=columns[2:])
    wide, narrow, narrowest = (shown(table, width) for width in (60, 30, 10))
    assert "Left out" not in wide
    assert "Left out for want of room: first to go (--json has all)." in " ".join(narrow.split())
    assert "n_" in narrow.splitlines()[0]
    assert "first to go, n_next" in " ".join(narrowest.split())
    assert all(is_whole(text, "123456789 GiB") for text in (wide, narrow, narrowest))


@pytest.mark.parametrize("width", [1, 40, 80])
def test_words_wrap_and_are_never_lost(width: int) -> None:
    row = ("first", "12.5 GiB", "a long sentence about what it is that this row says")
    text = shown(Table(columns=("name", ">size", "words"), rows=[row]), width)
    for word in ["a", "long", "sentence", "about", "what", "it", "is", "that", "this", "row", "says"]:
        assert word in text


def test_columns_without_anything_go_without_a_word() -> None:
    rows = [("a", "1", "–", ""), ("b", "2", "–", "")]
    text = shown(Table(columns=("name", ">size", ">price", ">more"), rows=rows, always=1))
    assert text.split() == ["name", "size", "─" * len("name   size"), "a", "1", "b", "2"]


def test_a_table_is_the_same_on_a_terminal_and_on_a_page() -> None:
    """One value: every heading and cell of both; on the page nothing is left out."""
    rows = [("a", "1", "–", "7"), ("b", "2", "–", "7")]
    table = Table(
        title="the title",
        columns=("name", ">chunk_\nbytes", ">price", ">more"),
        rows=rows,
        styles={1: "bold"},
        notes=("a note",),
        always=1,
        expendable=(">more",),
    )
    text, page = shown(table), parse(html_table(table))
    for words in ("the title", "a note", "chunk_", "bytes", "name"):
        assert words in text
        assert words in page.words
    cells = [element.words for element in page.elements if element.tag in ("th", "td")]
    assert cells == ["name", "chunk_bytes", "price", "more", *rows[0], *rows[1]]
    assert [row.words for row in page.named("tr") if row.attributes.get("class") == "total"] == ["".join(rows[1])]
    assert "In all of them: more 7." in text
