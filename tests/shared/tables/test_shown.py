"""Objects in Python: one line of repr, a screenful of words, whole tables as HTML, and nothing slow to import."""

from __future__ import annotations

import subprocess
import sys
from importlib import import_module
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protwin.shared.answers.advice import Advice
from protwin.shared.basics.documents import Document
from protwin.shared.basics.shown import Shown
from protwin.shared.basics.units import format_bytes, format_seconds
from protwin.shared.catalogue.machines import machine
from protwin.shared.layout.layout import build_layout
from protwin.shared.records.comparison import compare_records
from protwin.shared.schema.schedule import Schedule
from protwin.shared.tables.shown import as_html, screenful
from protwin.shared.tables.table import Table
from tests.shared.found import result_of
from tests.shared.laid_out import decoder_workload, laid_out
from tests.shared.report.test_advice import ranked
from tests.shared.report_pages import HOSTILE, crowded, hostile, parse


def large_objects() -> list[Shown]:
    """Results and inputs of a model of 80 blocks, and a record of 4,000 tasks."""
    example = laid_out(80, noise_frac=0.2)
    many = tuple(ranked(f"machine {place}", place + 1.0) for place in range(100))
    return [
        result_of(example, num_front=60),
        crowded(example.predicted, 1000),
        compare_records(example.predicted, example.measured),
        Advice(model="model", sequence_length=None, global_batch_size=8, machines=many),
        example.predicted.plan,
        example.workload,
        example.schedule,
        machine("h100-80gb-x8"),
    ]


@pytest.mark.parametrize("shown", large_objects(), ids=lambda shown: type(shown).__name__)
def test_objects_print_themselves_in_a_screenful(shown: Shown) -> None:
    assert repr(shown).startswith(f"{type(shown).__name__}(")
    assert "\n" not in repr(shown)
    assert len(repr(shown)) < 700
    lines = str(shown).splitlines()
    assert 3 < len(lines) <= 46
    assert max(map(len, lines)) <= 110
    html = shown._repr_html_()
    assert html is not None
    assert len(parse(f"<body>{html}</body>").named("table")) >= 1


def test_a_result_says_the_plan_its_time_its_memory_and_the_proof() -> None:
    result = result_of(laid_out(8))
    for text in (str(result), result._repr_html_() or ""):
        assert format_seconds(result.prediction.iteration_s) in text
        assert format_bytes(result.prediction.peak_device_bytes) in text
        assert "No plan of the" in text
    html = parse(f"<body>{result._repr_html_()}</body>")
    assert len([row for row in html.named("tr") if "\n" not in row.words]) > len(result.pareto)


def test_every_tables_function_is_there() -> None:
    kinds: list[Any] = [Schedule, *(kind for kind in Document.__subclasses__() if kind.TABLES)]
    assert len(kinds) > 8
    for kind in kinds:
        module, _, function = kind.TABLES.partition(":")
        assert callable(getattr(import_module(f"protwin.shared.{module}"), function))


def test_data_that_is_part_of_a_document_is_short_too() -> None:
    record = laid_out(8).predicted
    assert repr(record.tasks[0]).startswith("TaskTiming(task=0, name='forward prologue'")
    assert str(record.tasks[0]) == repr(record.tasks[0])
    assert record.tasks[0]._repr_html_() is None
    assert "<6 entries>" in repr(record)
    assert "MemoryCurve(…)" in repr(record)
    assert "num_ranks" not in repr(record.plan), "what is as it is by default is left out"
    layout = build_layout(decoder_workload(40).parameters, num_blocks=40, chunk_bytes=2**23)
    assert (
        str(layout)
        == repr(layout)
        == f"Layout(chunk_bytes=8388608, chunks=<{len(layout.chunks)} entries>, num_blocks=40)"
    )
    assert "n_swap=3" in repr(record.plan.model_copy(update={"n_swap": 3}))


def test_hostile_names_stay_words() -> None:
    record = hostile(laid_out(4).predicted)
    page = parse(f"<body>{record._repr_html_()}</body>")
    assert HOSTILE in page.words
    assert {element.tag for element in page.elements} <= {
        *("body", "h4", "p", "table", "caption", "thead", "tbody", "tr", "th", "td", "b")
    }


@settings(max_examples=30)
@given(
    sizes=st.lists(st.integers(1, 90), max_size=5),
    sentences=st.lists(st.just("A sentence."), max_size=3),
    data=st.data(),
)
def test_every_table_is_shown_counted_or_named(sizes: list[int], sentences: list[str], data: st.DataObject) -> None:
    tables = [
        Table(title=f"table {place}", columns=("name",), rows=[(f"row {place}.{row}.",) for row in range(size)])
        for place, size in enumerate(sizes)
    ]
    every: list[Table | str] = [*tables, *sentences]
    parts = data.draw(st.permutations(every))
    text = screenful(parts)
    assert len(text.splitlines()) <= 40 + 3, "the line that names tables comes on top"
    assert text.count("A sentence.") == len(sentences)
    for place, size in enumerate(sizes):
        shown = sum(f"row {place}.{row}." in text for row in range(size))
        assert f"table {place}" in text
        if 0 < shown < size:
            assert f"{size - shown} more rows" in text
    html = as_html(parts)
    assert all(f"row {place}.{row}." in html for place, size in enumerate(sizes) for row in range(size))


def test_tables_are_imported_only_to_show_something() -> None:
    program = (
        "import sys; import protwin.shared.answers.search_result, protwin.shared.schema.schedule;"
        "loaded = [name for name in sys.modules if name.startswith('protwin.shared.tables') or name == 'rich'];"
        "sys.exit(', '.join(loaded) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
