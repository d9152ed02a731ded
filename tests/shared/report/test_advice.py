"""The report of advice, read back from its page."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protwin.shared.answers.advice import Advice, MachineAdvice
from protwin.shared.answers.search_result import Goal
from protwin.shared.report.advice import advice_report, cost_chart, cost_front, length_chart, ranking_chart
from protwin.shared.report.svg import PLOT_PX
from protwin.shared.schema.record import Factorisation
from protwin.shared.tables.advice import advice_tables
from protwin.shared.tables.terminal import as_text
from tests.shared.report_pages import HOSTILE, check_self_contained, parse, row_bars

PLAN = {"workload_id": "w", "chunk_bytes": 2**26, "n_persist": 3, "n_buffer": 2}


def ranked(name: str, iteration_s: float, cost: float | None = None, *, is_certified: bool = True) -> MachineAdvice:
    return MachineAdvice.model_validate(
        {
            "hardware_name": name,
            "price_usd_per_hour": None if cost is None else 1.0,
            "plan": PLAN,
            "micro_batch_size": 4,
            "iteration_s": iteration_s,
            "num_tokens": 100,
            "tokens_per_s": 100 / iteration_s,
            "usd_per_million_tokens": cost,
            "guaranteed_peak_device_bytes": 2**30,
            "is_certified": is_certified,
        }
    )


def advice(*machines: MachineAdvice) -> Advice:
    ordered = tuple(sorted(machines, key=MachineAdvice.rank))
    return Advice(model="model", sequence_length=None, global_batch_size=8, machines=ordered)


@given(st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=30))
def test_bars_are_as_long_as_iterations(times_s: list[float]) -> None:
    machines = [ranked(f"m{place}", time_s, is_certified=place % 2 == 0) for place, time_s in enumerate(times_s)]
    drawn = row_bars(ranking_chart(machines).drawing)
    assert len(drawn) == len(machines)
    for one in machines:
        ((_, width, colour),) = drawn[one.hardware_name]
        assert one.iteration_s is not None
        assert width == pytest.approx(max(1 / PLOT_PX, one.iteration_s / max(times_s)), abs=1e-5)
        assert colour == ("blue" if one.is_certified else "rest")


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=2, max_size=20))
def test_the_front_holds_what_nothing_equals_or_beats(points: list[tuple[int, int]]) -> None:
    machines = [ranked(f"m{place:02}", time_s, cost) for place, (time_s, cost) in enumerate(points)]
    front = {one.hardware_name for one in cost_front(machines)}
    for one, (time_s, cost) in zip(machines, points, strict=True):
        better = [
            other
            for other, at in zip(machines, points, strict=True)
            if other is not one
            and at[0] <= time_s
            and at[1] <= cost
            and (at != (time_s, cost) or other.hardware_name < one.hardware_name)
        ]
        assert (one.hardware_name in front) == (not better)
    chart = cost_chart(machines)
    assert chart is not None
    assert chart.drawing.count('class="dot"') == len(front)
    assert chart.drawing.count('class="ring stroke-blue"') == len(machines) - len(front)


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=20))
def test_lengths_are_drawn_and_what_nothing_equals_in_length_and_speed_is_named(points: list[tuple[int, int]]) -> None:
    machines = [
        ranked(f"m{place:02}", 100 / rate).model_copy(update={"longest_sequence": 128 * length})
        for place, (length, rate) in enumerate(points)
    ]
    best = {at for at in points if not any(o != at and o[0] >= at[0] and o[1] >= at[1] for o in points)}
    chart = length_chart(machines)
    assert chart.drawing.count('class="dot"') == len(best)
    assert chart.drawing.count('class="ring stroke-blue"') == len(machines) - len(best)
    found = Advice(
        model="model",
        sequence_length=None,
        global_batch_size=8,
        goal=Goal.LONGEST_SEQUENCE,
        machines=tuple(sorted(machines, key=MachineAdvice.rank)),
    )
    page = advice_report(found)
    check_self_contained(parse(page.html))
    assert [figure.name for figure in page.figures] == ["longest"]


def test_cost_is_drawn_only_where_there_are_prices_to_compare() -> None:
    assert cost_chart([ranked("a", 1.0, 2.0)]) is None
    page = advice_report(advice(ranked("a", 1.0, 2.0), ranked("b", 2.0)))
    assert [figure.name for figure in page.figures] == ["ranking"]
    page = advice_report(advice(ranked("a", 1.0, 2.0), ranked("b", 2.0, 1.0)))
    assert [figure.name for figure in page.figures] == ["ranking", "cost"]


def test_the_page_stands_alone_and_hostile_names_stay_words() -> None:
    without = MachineAdvice(hardware_name=HOSTILE, price_usd_per_hour=None, reason=HOSTILE)
    page = parse(advice_report(advice(ranked(HOSTILE + "1", 1.0, 2.0), ranked("b" * 60, 2.0, 1.0), without)).html)
    check_self_contained(page)
    headings = [heading.words for heading in page.named("h2")]
    assert headings == ["Machines by time", "Cost against time", "Without an answer"]


def test_where_nothing_fits_the_reasons_are_all_there_is() -> None:
    page = advice_report(advice(MachineAdvice(hardware_name="a", price_usd_per_hour=None, reason="too small"))).html
    check_self_contained(parse(page))
    assert "too small" in page
    assert "0 of 1" in page


def test_decompositions_before_the_first_step_have_a_column_where_there_are_any() -> None:
    plain, factorised = ranked("a", 1.0), ranked("b", 2.0)
    before = Factorisation(num_weights=7, flops=10**9, host_s=123.0, working_bytes=2**20)
    factorised = factorised.model_copy(update={"factorisation": before})
    assert "before" not in as_text(advice_tables(advice(plain)))
    for text in (as_text(advice_tables(advice(plain, factorised))), advice_report(advice(plain, factorised)).html):
        assert "step 1" in text
        assert "123" in text
        assert "7 singular value decompositions, once" in text
