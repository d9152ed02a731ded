"""Intervals in reports: whiskers on times, a band on the peak, and what cards say of a measurement."""

from __future__ import annotations

import pytest

from protwin.shared.basics.interval import Interval
from protwin.shared.report.expected import expected_chart
from protwin.shared.report.memory import memory_chart
from protwin.shared.schema.record import Record
from protwin.shared.tables.labels import format_interval_bytes, format_interval_s
from protwin.shared.tables.record import iteration_table, memory_table
from protwin.shared.tables.terminal import as_text
from tests.shared.laid_out import laid_out
from tests.shared.report_pages import html_report, parse


def sure(record: Record, *, widest: float) -> Record:
    """The record with intervals from half to ``widest`` times its figures."""
    times = Interval(low=record.iteration_s / 2, high=record.iteration_s * widest)
    peaks = Interval(low=record.peak_device_bytes / 2, high=record.peak_device_bytes * 1.01)
    return record.model_copy(update={"iteration_interval_s": times, "peak_interval_bytes": peaks, "chance_oom": 0.25})


def test_a_whisker_spans_the_interval_on_the_scale_of_the_bars() -> None:
    told = sure(laid_out(8).predicted, widest=2.0)
    chart = expected_chart([told], None)
    assert chart is not None
    lines = [one for one in parse(chart.drawing).named("line") if one.attributes.get("class") == "whisker"]
    across = [tuple(float(str(one.attributes[name]).removesuffix("%")) for name in ("x1", "x2")) for one in lines]
    (low, high), *caps = across
    assert high == pytest.approx(4 * low, rel=1e-3)
    assert sorted(caps) == [(low, low), (high, high)]
    assert format_interval_s(told.iteration_interval_s) in chart.label


def test_records_without_intervals_have_no_chart() -> None:
    example = laid_out(8)
    bare = example.predicted.model_copy(update={"iteration_interval_s": None})
    assert expected_chart([bare, example.measured], None) is None


def test_the_peak_has_a_band_unless_it_is_one_size() -> None:
    told = sure(laid_out(8).predicted, widest=2.0)
    point = Interval(low=told.peak_device_bytes, high=told.peak_device_bytes)
    exact = told.model_copy(update={"peak_interval_bytes": point})
    drawn = []
    for record in (told, exact):
        chart = memory_chart([record], (0.0, record.iteration_s), [])
        assert chart is not None
        drawn.append([one for one in parse(chart.drawing).named("rect") if one.attributes.get("class") == "band"])
    assert [len(bands) for bands in drawn] == [1, 0]
    (band,) = drawn[0]
    assert float(str(band.attributes["height"])) > 100


def test_cards_and_tables_say_where_a_measurement_lies() -> None:
    example = laid_out(8)
    ratio = example.measured.iteration_s / example.predicted.iteration_s
    for widest, where in ((ratio * 1.1, "inside"), (ratio * 0.9, "outside")):
        predicted = sure(example.predicted, widest=max(widest, 0.6))
        page = html_report(title="t", predicted=predicted, measured=example.measured)
        assert f"{where} {format_interval_s(predicted.iteration_interval_s)}" in page


def test_tables_say_the_intervals_and_the_chance() -> None:
    told = sure(laid_out(8).predicted, widest=2.0)
    assert format_interval_s(told.iteration_interval_s) in as_text((iteration_table(told),))
    memory = " ".join(as_text((memory_table(told),)).split())
    assert f"expected {format_interval_bytes(told.peak_interval_bytes)}" in memory
    assert "chance to run out of memory 25.0 %" in memory
    rare = told.model_copy(update={"chance_oom": 1e-5})
    assert "below 0.1 %" in as_text((memory_table(rare),))
    assert "run out" not in as_text((memory_table(told.model_copy(update={"chance_oom": 0.0})),))
