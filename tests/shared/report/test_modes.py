"""Parallel modes in the report and in tables, read back and held against the result."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protwin.shared.answers.search_result import ModeChoice, SearchResult
from protwin.shared.report.search import modes_chart
from protwin.shared.report.svg import PLOT_PX
from protwin.shared.schema.plan import ParallelMode
from protwin.shared.tables.search import mode_table, search_tables
from protwin.shared.tables.terminal import as_text
from tests.shared.found import result_of
from tests.shared.laid_out import laid_out
from tests.shared.report_pages import HOSTILE, check_self_contained, html_report, parse, row_bars

SEVERAL = tuple(mode for mode in ParallelMode if mode is not ParallelMode.SINGLE)


def choice(mode: ParallelMode, best_s: float | None, bound_s: float | None, reason: str = "") -> ModeChoice:
    return ModeChoice(
        parallel=mode,
        num_candidates=1000,
        num_simulated=0 if best_s is None else 3,
        best_iteration_s=best_s,
        shortest_possible_s=bound_s,
        reason=reason,
    )


@pytest.fixture(scope="module")
def found() -> SearchResult:
    """Of two ranks: sharded is the fastest, replicated cannot win, ddp fits nowhere."""
    result = result_of(laid_out(6))
    own_s = result.prediction.iteration_s
    plan = result.plan.model_copy(update={"parallel": ParallelMode.SHARDED, "num_ranks": 2})
    modes = (
        choice(ParallelMode.DDP, None, None, reason=HOSTILE),
        choice(ParallelMode.REPLICATED, 3 * own_s, 2 * own_s),
        choice(ParallelMode.SHARDED, own_s, 0.99 * own_s),
    )
    return result.model_copy(update={"plan": plan, "modes": modes})


def test_one_rank_alone_has_no_modes() -> None:
    assert modes_chart(result_of(laid_out(3))) is None


@given(st.lists(st.tuples(st.floats(0.01, 100), st.floats(0, 1)), min_size=3, max_size=3))
def test_bars_are_as_long_as_iterations(times: list[tuple[float, float]]) -> None:
    modes = tuple(choice(mode, best_s, best_s * share) for mode, (best_s, share) in zip(SEVERAL, times, strict=True))
    figure = modes_chart(result_of(laid_out(3)).model_copy(update={"modes": modes}))
    assert figure is not None
    drawn = row_bars(figure.drawing)
    widths = [width for mode in SEVERAL for _, width, _ in drawn[mode]]
    longest_s = max(best_s for best_s, _ in times)
    assert widths == [pytest.approx(max(1 / PLOT_PX, best_s / longest_s), abs=1e-5) for best_s, _ in times]
    marks = re.findall(r'<line x1="([\d.]+)%"[^>]*class="limit-line"', figure.drawing)
    expected = [pytest.approx(100 * best_s * share / longest_s, abs=1e-3) for best_s, share in times]
    assert [float(x) for x in marks] == expected


def test_the_page_shows_every_mode_and_keeps_hostile_reasons_words(found: SearchResult) -> None:
    example = laid_out(6)
    result = found.model_copy(update={"plan": example.predicted.plan})
    page = parse(html_report(title="t", predicted=example.predicted, search=result))
    check_self_contained(page)
    assert "Parallel modes" in [heading.words for heading in page.named("h2")]
    assert any(HOSTILE in note.words for note in page.named("p"))
    assert any(HOSTILE in title.words for title in page.named("title"))
    assert {mode.value for mode in SEVERAL} <= {heading.words for heading in page.named("th")}


def test_the_table_says_why_only_where_something_does_not_fit(found: SearchResult) -> None:
    table = mode_table(found)
    assert [row[-1] for row in table.rows] == ["does not fit", "", "◀ chosen"]
    assert list(table.notes) == [f"ddp: {HOSTILE}"]
    fitting = mode_table(found.model_copy(update={"modes": found.modes[1:]}))
    assert not fitting.notes


def test_the_terminal_says_why_too(found: SearchResult) -> None:
    text = " ".join(as_text(search_tables(found)).split())
    assert "What 2 ranks do together" in text
    assert f"ddp: {' '.join(HOSTILE.split())}" in text
    assert "replicated:" not in text
