"""The search in the report, read back from the page and held against the result."""

from __future__ import annotations

import re
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protwin.shared.answers.search_result import BatchChoice, BatchSizes
from protwin.shared.basics.errors import ProtwinError
from protwin.shared.basics.units import format_bytes, format_seconds
from protwin.shared.report.front import front_chart, lower_envelope
from protwin.shared.report.report import Facts, report
from protwin.shared.report.search import funnel_chart, funnel_steps, search_sections
from protwin.shared.tables.search import front_table, outcome_table
from tests.shared.found import outcome, result_of
from tests.shared.laid_out import LaidOut, laid_out
from tests.shared.report_pages import HOSTILE, check_self_contained, hostile, html_report, parse


@pytest.fixture(scope="module")
def example() -> LaidOut:
    return laid_out(6)


def test_the_page_tells_what_became_of_every_plan(example: LaidOut) -> None:
    page = parse(html_report(title="t", predicted=example.predicted, search=result_of(example)))
    check_self_contained(page)
    headings = [heading.words for heading in page.named("h2")]
    assert headings[:4] == ["What to do", "Search", "Time against device memory", "Next best plans"]
    for words in ("50,000", "40,000 cannot fit", "9,985 cannot be faster", "15"):
        assert any(words in element.words for element in page.named("span")), words
    assert "No plan of the space is more than 1.0 % faster." in page.words


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, "none of them is more than 1.0 % faster"),
        ({"best_unsimulated_bound_s": None}, "none of them is faster"),
        ({"best_unsimulated_bound_s": "just below"}, "none of them is faster by 0.1 %"),
        ({"num_undecided": 7, "num_candidates": 50_007}, "nothing is proven of the rest"),
        ({"num_bounded_by_segments": 7, "num_candidates": 50_007}, "none whose segments fit is more than 1.0 % faster"),
    ],
)
def test_the_headline_says_what_is_proven(example: LaidOut, changes: dict[str, object], words: str) -> None:
    result = result_of(example)
    if changes.get("best_unsimulated_bound_s") == "just below":
        changes = {"best_unsimulated_bound_s": example.predicted.iteration_s * (1 - 1e-4)}
    result = result.model_copy(update={"certificate": result.certificate.model_copy(update=changes)})
    page = parse(html_report(title="t", predicted=example.predicted, search=result, budget_bytes=2**30))
    (found,) = [
        card.words
        for card in page.named("div")
        if (card.attributes.get("class") == "card" and "Plans in" in card.words)
    ]
    assert words in found


def test_steps_leave_over_what_the_certificate_counts(example: LaidOut) -> None:
    certificate = result_of(example, num_undecided=300).certificate
    steps = list(funnel_steps(certificate))
    assert steps[0][1] == certificate.num_candidates
    for (_, before, _, _), (_, left, taken, _) in pairwise(steps[:-1]):
        assert left == before - taken
    assert sum(taken for _, _, taken, _ in steps) == certificate.num_candidates - certificate.num_simulated
    assert steps[-2][1] == steps[-1][1] == certificate.num_simulated


def test_only_what_is_proven_is_called_so(example: LaidOut) -> None:
    proven, cut_short = (funnel_chart(result_of(example, num_undecided=count).certificate) for count in (0, 300))
    assert [words for _, words in proven.legend] == ["left", "taken away, with a proof"]
    assert cut_short.legend[-1][1] == "taken away, nothing proven"
    assert "300 left undecided" in cut_short.drawing
    assert 'class="fill-rest"' in cut_short.drawing
    assert 'class="fill-rest"' not in proven.drawing
    certificate = result_of(example, num_undecided=0).certificate
    changes = {"num_bounded_by_segments": 300, "num_candidates": certificate.num_candidates + 300}
    estimated = funnel_chart(certificate.model_copy(update=changes))
    assert estimated.legend[-1][1] == "taken away, nothing proven"
    assert "300 expected to take too much in segments" in estimated.drawing


def test_the_front_is_that_of_the_result(example: LaidOut) -> None:
    """Every plan is a mark with its figures, further right where it needs more and further up where it is slower."""
    result = result_of(example, num_front=6)
    figure = front_chart(result)
    assert figure is not None
    marks = re.findall(r'<circle cx="([\d.]+)%" cy="([\d.]+)" r="5" class="([\w -]+)"><title>(.*?)\n', figure.drawing)
    assert len(marks) == len(result.pareto)
    for (_, _, class_, words), one in zip(marks, result.pareto, strict=True):
        assert words == f"{format_bytes(one.guaranteed_peak_device_bytes)}, {format_seconds(one.iteration_s)}"
        assert (class_ == "dot") == one.is_simulated
    xs, ys = ([float(mark[place]) for mark in marks] for place in (0, 1))
    assert xs == sorted(xs, reverse=True), "less memory lies further left"
    assert ys == sorted(ys, reverse=True), "slower lies further up"
    steps_x = [xs[0] - x for x in xs]
    assert steps_x == pytest.approx([place * steps_x[1] for place in range(6)], abs=0.005), "memory is drawn to scale"
    prediction = result.prediction
    own = f"{format_bytes(prediction.guaranteed_peak_device_bytes)}, {format_seconds(prediction.iteration_s)}"
    assert f"the plan: {own}" in figure.drawing
    assert f"budget {format_bytes(result.device_budget_bytes)}" in figure.drawing


@given(st.lists(st.tuples(st.integers(1, 9), st.sampled_from((1.0, 2.0, 3.0, 4.0))), min_size=1, max_size=12))
def test_the_staircase_is_the_fastest_for_every_size(points: list[tuple[int, float]]) -> None:
    stairs = lower_envelope(points)
    for size in range(1, 10):
        within = [time for need, time in points if need <= size]
        on_stairs = [time for need, time in stairs if need <= size]
        assert min(within, default=None) == (on_stairs[-1] if on_stairs else None)


def test_a_front_of_one_plan_is_not_drawn(example: LaidOut) -> None:
    assert front_chart(result_of(example, num_front=1)) is None
    headings = [section.heading for section in search_sections(result_of(example, num_front=1))]
    assert "Time against device memory" not in headings


def test_a_long_front_is_told_in_part_and_says_so(example: LaidOut) -> None:
    result = result_of(example, num_front=37)
    chosen = front_table(result)
    assert len(chosen.rows) == 10
    ends = [format_bytes(one.guaranteed_peak_device_bytes) for one in (result.pareto[0], result.pareto[-1])]
    assert [chosen.rows[0][2], chosen.rows[-1][2]] == ends
    page = parse(html_report(title="t", predicted=example.predicted, search=result))
    assert "10 of its 37 plans" in page.words
    assert len(front_table(result_of(example, num_front=10)).rows) == 10


def test_a_plan_as_fast_as_the_chosen_one_has_no_sign(example: LaidOut) -> None:
    result = result_of(example)
    table = outcome_table("t", (outcome(example, slower_frac=-1e-9, less_bytes=0),), result)
    assert table.rows[0][1] == "0.0 %"
    table = outcome_table("t", (outcome(example, slower_frac=0.1, less_bytes=0),), result)
    assert table.rows[0][1] == "+10.0 %"


def test_a_search_for_another_plan_is_refused(example: LaidOut) -> None:
    other = laid_out(3)
    with pytest.raises(ProtwinError, match="the search found plan"):
        report("t", Facts(predicted=example.predicted, search=result_of(other)))


def test_sizes_of_the_micro_batch_are_told(example: LaidOut) -> None:
    result = result_of(example)
    choices = (
        BatchChoice(
            micro_batch_size=4,
            micro_batches=2,
            num_candidates=30_000,
            num_simulated=15,
            best_iteration_s=example.predicted.iteration_s,
            shortest_possible_s=example.predicted.iteration_s * 0.99,
        ),
        BatchChoice(
            micro_batch_size=8,
            micro_batches=1,
            num_candidates=20_000,
            num_simulated=0,
            best_iteration_s=None,
            shortest_possible_s=None,
        ),
    )
    sizes = BatchSizes(global_batch_size=8, micro_batch_size=4, choices=choices)
    found = result.model_copy(update={"batch": sizes})
    page = parse(html_report(title="t", predicted=example.predicted, search=found))
    (table,) = [t for t in page.named("table") if "8 samples per step" in t.words]
    assert "30,000" in table.words
    best = next(row for row in page.named("tr") if row.attributes.get("class") == "total")
    assert best.words.startswith("42" + format_seconds(example.predicted.iteration_s))


def test_hostile_names_stay_words(example: LaidOut, monkeypatch: pytest.MonkeyPatch) -> None:
    import protwin.shared.report.search

    record = hostile(example.predicted)
    result = result_of(example).model_copy(update={"model_name": HOSTILE, "prediction": record})
    check_self_contained(parse(html_report(title=HOSTILE, predicted=record, search=result)))
    monkeypatch.setattr(protwin.shared.report.search, "certificate_sentence", lambda _: HOSTILE)
    check_self_contained(parse(html_report(title=HOSTILE, predicted=record, search=result)))


def test_beside_a_measurement_the_search_stands_last(example: LaidOut) -> None:
    """As in the demo: what was measured is the news there."""
    html = html_report(
        title="t",
        predicted=example.predicted,
        measured=example.measured,
        schedule=example.schedule,
        search=result_of(example),
    )
    headings = [heading.words for heading in parse(html).named("h2")]
    assert headings[0] == "Plan"
    assert headings.index("Search") > headings.index("Predicted against measured")
    assert headings[-1] == "Notes"
