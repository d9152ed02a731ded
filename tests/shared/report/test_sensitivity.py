"""Bars of what-if answers, read back from the drawing."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protwin.shared.answers.search_result import WhatIf
from protwin.shared.report.search import sensitivity_chart
from protwin.shared.report.svg import PLOT_PX
from tests.shared.found import result_of
from tests.shared.laid_out import laid_out
from tests.shared.report_pages import HOSTILE, check_self_contained, html_report, parse, row_bars

BASE_S = 8.0


def answer(change: str, iteration_s: float | None, reason: str = "") -> WhatIf:
    return WhatIf(
        change=change,
        iteration_s=iteration_s,
        speedup=None if iteration_s is None else BASE_S / iteration_s,
        reason=reason,
    )


@given(st.lists(st.one_of(st.none(), st.floats(0.01, 100.0)), min_size=1, max_size=12))
def test_bars_are_to_scale_and_point_the_right_way(times_s: list[float | None]) -> None:
    answers = [answer(f"answer {place}", time_s) for place, time_s in enumerate(times_s)]
    figure = sensitivity_chart(BASE_S, answers)
    assert figure is not None
    drawn = row_bars(figure.drawing)
    assert {name for name, found in drawn.items() if found} == {a.change for a in answers if a.iteration_s is not None}
    changes = {one.change: one.iteration_s / BASE_S - 1 for one in answers if one.iteration_s is not None}
    span = max([0.01, *changes.values()]) - min([-0.01, *changes.values()])
    for name, change in changes.items():
        ((left, width, colour),) = drawn[name]
        assert width == pytest.approx(max(1 / PLOT_PX, abs(change) / span), abs=1e-5)
        assert left == pytest.approx((min(change, 0.0) - min([-0.01, *changes.values()])) / span, abs=1e-5)
        if abs(change) > 1e-9:
            assert colour == ("blue" if change < 0 else "orange")
    assert figure.drawing.count(">nothing fits<") == sum(time_s is None for time_s in times_s)


def test_what_saves_most_comes_first_and_is_told_in_words() -> None:
    answers = [
        answer("a slower link", 9.0),
        answer("no device", None),
        answer("more memory", 6.0),
        answer("another colour", 8.0),
    ]
    figure = sensitivity_chart(BASE_S, answers)
    assert figure is not None
    places = [
        figure.drawing.index(f">{name}<") for name in ("more memory", "another colour", "a slower link", "no device")
    ]
    assert places == sorted(places)
    for words in ("−25.0 %, 6 s, 1.33 times as fast", "no change", "+12.5 %, 9 s", "nothing fits"):
        assert words in figure.drawing


def test_without_answers_there_is_no_section() -> None:
    assert sensitivity_chart(BASE_S, ()) is None
    example = laid_out(3)
    page = parse(html_report(title="t", predicted=example.predicted))
    assert "What if" not in [heading.words for heading in page.named("h2")]


def test_the_page_shows_them_and_keeps_hostile_names_words() -> None:
    example = laid_out(6)
    faster = WhatIf(change="more memory", iteration_s=example.predicted.iteration_s / 2, speedup=2.0)
    answers = (faster, answer(HOSTILE, None, reason=HOSTILE))
    result = result_of(example).model_copy(update={"what_if": answers})
    page = parse(html_report(title="t", predicted=example.predicted, search=result))
    check_self_contained(page)
    assert "What if" in [heading.words for heading in page.named("h2")]
    assert any("−50.0 %" in element.words and "2.00 times as fast" in element.words for element in page.named("span"))
    assert any(HOSTILE in element.words for element in page.named("title"))


def test_other_numbers_of_ranks_are_compared_by_their_tokens() -> None:
    """Twice the ranks get through twice the tokens in an iteration that is longer: that is not slower."""
    more = WhatIf(change="twice the ranks", iteration_s=1.25 * BASE_S, speedup=1.6)
    figure = sensitivity_chart(BASE_S, [more])
    assert figure is not None
    assert row_bars(figure.drawing)["twice the ranks"][0][2] == "blue"
    assert "−37.5 %, 10 s, 1.60 times as fast" in figure.drawing
