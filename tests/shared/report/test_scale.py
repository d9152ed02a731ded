"""Reports of thousands of tasks: what is merged and thinned, and what of it is said."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protwin.shared.records.period import Piece
from protwin.shared.report.bars import merged
from protwin.shared.report.memory import thinned
from protwin.shared.report.timeline import lane_charts, telling_stretch_s
from protwin.shared.schema.record import TaskTiming
from protwin.shared.schema.schedule import Lane, TaskKind
from tests.proof_size import some_quick
from tests.shared.laid_out import LaidOut, laid_out
from tests.shared.report_pages import (
    LOSSES,
    crowded,
    html_report,
    parse,
)


@pytest.fixture(scope="module")
def example() -> LaidOut:
    return laid_out(8, noise_frac=0.2)


@pytest.mark.parametrize("num_tasks", [300, 3000])
def test_what_is_thinned_is_counted(example: LaidOut, num_tasks: int) -> None:
    """Single bars and the counts of joint ones make up all tasks, and the caption says how many are not drawn."""
    figure = lane_charts([crowded(example.predicted, num_tasks)], None)[0]
    titles = re.findall(r"<title>(.*?)\n", figure.drawing)
    joint = [int(found[1]) for title in titles if (found := re.match(r"(\d+) tasks: ", title))]
    single = [title for title in titles if not re.match(r"(\d+) tasks: ", title)]
    assert sum(joint) + len(single) == 4 * num_tasks
    assert f"{sum(joint):,} of {4 * num_tasks:,} tasks are too short" in figure.caption[1]
    assert f"drawn as {len(joint):,} joint bars" in figure.caption[1]


def test_a_closer_look_tells_tasks_apart(example: LaidOut) -> None:
    record = crowded(example.predicted, 2000)
    overview, closer = lane_charts([record], None)
    low, high = telling_stretch_s(record)
    within = [t for t in record.tasks if t.end_s > low and t.start_s < high]
    assert closer.drawing.count('class="bar ') == len(within) > 24
    assert "joint bar" not in closer.caption[1]
    assert "joint bar" in overview.caption[1]


@some_quick("num_tasks", [300, 470, 3000], quick=1)
def test_thousands_of_tasks_stay_below_two_megabytes(example: LaidOut, num_tasks: int) -> None:
    predicted, measured = crowded(example.predicted, num_tasks), crowded(example.measured, num_tasks)
    html = html_report(
        title="Crowded",
        predicted=predicted,
        measured=measured,
        losses={"plain": LOSSES * 300, "planned": LOSSES * 300},
    )
    parse(html)
    assert len(html.encode()) < 2 * 10**6


@st.composite
def lanes_of_tasks(draw: st.DrawFn) -> list[TaskTiming]:
    """Tasks of one lane, one after another, of any width and with any gaps."""
    at_s, timings = draw(st.floats(-2, 2)), []
    for task, (gap_s, long_s, kind) in enumerate(
        draw(
            st.lists(
                st.tuples(
                    st.sampled_from((0.0, 0.01, 0.5, 3.0)),
                    st.sampled_from((0.0, 0.01, 0.3, 1.9, 2.1, 40.0)),
                    st.sampled_from((TaskKind.FORWARD, TaskKind.BACKWARD)),
                ),
                max_size=60,
            )
        )
    ):
        at_s += gap_s
        timings.append(
            TaskTiming(
                task=task,
                name=f"{kind} {task}",
                kind=kind,
                lane=Lane.COMPUTE,
                start_s=at_s,
                end_s=at_s + long_s,
                duration_s=long_s,
            )
        )
        at_s += long_s
    return timings


@given(timings=lanes_of_tasks())
def test_merging_loses_no_task_and_merges_only_narrow_ones(timings: list[TaskTiming]) -> None:
    """One second is one pixel."""
    bars = list(merged([Piece(t, t.start_s, t.end_s, 0) for t in timings[::-1]], per_px=1.0))
    assert [piece.timing.task for bar in bars for piece in bar.pieces] == [timing.task for timing in timings]
    for bar in bars:
        if len(bar.pieces) > 1:
            assert all(piece.end_s - piece.start_s < 2.0 for piece in bar.pieces)
            assert bar.end_s - bar.start_s <= 6.0
            assert 0 <= bar.busy_frac <= 1
    if bars:
        span_s = bars[-1].end_s - bars[0].start_s
        assert len(bars) <= span_s + 2, "more bars than pixels"


@given(
    steps=st.lists(st.tuples(st.sampled_from((0.0, 0.01, 0.4, 2.0)), st.integers(0, 1000)), min_size=1, max_size=200)
)
def test_thinning_keeps_the_extremes_of_every_pixel(steps: list[tuple[float, int]]) -> None:
    times_s, levels, at_s = [], [], 0.0
    for wait_s, level in steps:
        at_s += wait_s
        times_s.append(at_s)
        levels.append(level)
    kept = thinned(times_s, levels, per_px=1.0)
    assert [at for at, _ in kept] == sorted(at for at, _ in kept)
    assert kept[-1] == (times_s[-1], levels[-1])
    points = list(zip(times_s, levels, strict=True))
    assert set(kept) <= set(points)
    for column in {int(at - times_s[0]) for at in times_s}:
        before = [level for at, level in points if int(at - times_s[0]) == column]
        after = [level for at, level in kept if int(at - times_s[0]) == column]
        assert (min(after), max(after), after[-1]) == (min(before), max(before), before[-1])
        assert len(after) <= 4
