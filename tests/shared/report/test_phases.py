"""The chart of phases: bars that add up to each phase, what they wait for, and nothing where nothing is known."""

from __future__ import annotations

import pytest

from protwin.shared.basics.units import format_seconds
from protwin.shared.report.bars import KIND_COLOURS
from protwin.shared.report.phases import phase_chart
from protwin.shared.schema.record import IterationPhase, PhaseWait, Record, Remedy, RemedyKind
from protwin.shared.schema.schedule import TaskKind
from tests.shared.laid_out import laid_out
from tests.shared.report_pages import html_report, parse, row_bars


def with_waits(record: Record) -> Record:
    """The record, in the forward of which compute waits for CPU Adam and for gathers."""
    waits = tuple(
        PhaseWait(phase=IterationPhase.FORWARD, cause=cause, seconds=share * record.forward_s)
        for cause, share in ((TaskKind.CPU_ADAM, 0.4), (TaskKind.GATHER, 0.2))
    )
    remedy = Remedy(kind=RemedyKind.HOST, num_samples=4, plan=record.plan, iteration_s=0.1, speedup=1.5)
    return record.model_copy(update={"waits": waits, "remedies": (remedy,)})


def test_each_phase_is_a_bar_with_its_waits() -> None:
    told = with_waits(laid_out(8).predicted)
    chart = phase_chart([told])
    assert chart is not None
    page = parse(chart.drawing)
    rows = [element.words.split("\n") for element in page.named("title")]
    assert [row[0].partition(":")[0] for row in rows] == [str(phase) for phase in IterationPhase]
    assert f"waiting for CPU Adam: {format_seconds(0.4 * told.forward_s)}" in rows[0]
    assert f"computing: {format_seconds(0.4 * told.forward_s)}" in rows[0]
    forward, backward = (
        bars
        for name, bars in row_bars(chart.drawing).items()
        if name in (IterationPhase.FORWARD, IterationPhase.BACKWARD)
    )
    assert [colour for _, _, colour in forward[1:]] == [
        KIND_COLOURS[kind] for kind in (TaskKind.CPU_ADAM, TaskKind.GATHER)
    ]
    # The bars of a phase stand end to end, on one scale for all phases.
    assert len(forward) == 3
    ends = [(left, left + width) for left, width, _ in forward]
    assert [end for _, end in ends[:-1]] == pytest.approx([start for start, _ in ends[1:]], abs=2e-5)
    forward_share, backward_share = (sum(width for _, width, _ in row) for row in (forward, backward))
    assert forward_share / backward_share == pytest.approx(told.forward_s / told.backward_s, rel=0.02)
    assert "1.50 times the tokens per second" in chart.below


def extent(bar: dict[str, str | None], name: str) -> float:
    """A place or a width, in pixels or percent."""
    return float(str(bar[name]).removesuffix("%"))


def test_both_records_of_a_pair_are_shown() -> None:
    example = laid_out(8)
    pair = [with_waits(record) for record in (example.predicted, example.measured)]
    page = parse(html_report(title="t", predicted=pair[0], measured=pair[1]))
    titles = [element.words for element in page.named("title")]
    for name in ("forward, predicted", "forward, measured", "optimizer, measured"):
        assert sum(title.startswith(f"{name}: ") for title in titles) == 1


def test_records_that_do_not_say_have_no_chart() -> None:
    example = laid_out(8)
    assert phase_chart([example.predicted]) is None
