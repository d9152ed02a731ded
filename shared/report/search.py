"""The search in the report: what was bounded away, parallel modes, and what the plan would become on other machines."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Final

from ..answers.search_result import Certificate, ModeChoice, SearchResult, WhatIf
from ..basics.units import format_seconds
from ..tables.answer import baseline_table, recommendation
from ..tables.search import (
    alternatives_table,
    batch_table,
    budget_sentence,
    certificate_sentence,
    front_table,
    left_out_sentence,
    mode_table,
)
from .axes import ONE, BarRow, Segment, Tick, Unit, across, bar_rows, time_unit
from .front import front_chart
from .page import PageTable, Part, Section
from .svg import Figure, area_mark, line, shortened

_LONGEST_CHANGE: Final = 45
_PERCENT: Final = Unit(0.01, "%")


def search_sections(result: SearchResult) -> tuple[Section, ...]:
    """What to do, beside what people do without a search; what is proven; the front of time against memory.

    Of several batch sizes and of several ranks' modes also what became of each.
    """
    answer: list[Part] = [recommendation(result), *([PageTable(baseline_table(result))] if result.baselines else [])]
    proven = (certificate_sentence(result), left_out_sentence(result), budget_sentence(result))
    parts: list[Part] = [*(sentence for sentence in proven if sentence), funnel_chart(result.certificate)]
    if result.batch is not None:
        parts.append(PageTable(batch_table(result.batch)))
    sections = [Section("What to do", tuple(answer)), Section("Search", tuple(parts))]
    if modes := modes_chart(result):
        sections.append(Section("Parallel modes", (modes, PageTable(mode_table(result)))))
    if front := front_chart(result):
        sections.append(Section("Time against device memory", (front, PageTable(front_table(result)))))
    if answers := sensitivity_chart(result.prediction.iteration_s, result.what_if):
        sections.append(Section("What if", (answers,)))
    if result.alternatives:
        sections.append(Section("Next best plans", (PageTable(alternatives_table(result)),)))
    return tuple(sections)


# -- what was bounded away -------------------------------------------------------------------------------------------


_UNDECIDED: Final = "left undecided"
_IN_SEGMENTS: Final = "expected to take too much in segments"


def funnel_steps(certificate: Certificate) -> Iterator[tuple[str, int, int, str]]:
    """Per step of the search: its words, how many plans are left after it, how many it took away, and why."""
    left = certificate.num_candidates
    yield "plans in the space", left, 0, ""
    for words, taken, why in (
        ("after bounds of memory", certificate.num_bounded_by_memory, "cannot fit"),
        ("without too much in segments", certificate.num_bounded_by_segments, _IN_SEGMENTS),
        ("after bounds of time", certificate.num_bounded_by_time, "cannot be faster"),
        ("without the undecided", certificate.num_undecided, _UNDECIDED),
    ):
        left -= taken
        if taken or words.startswith("after"):
            yield words, left, taken, why
    yield "simulated", certificate.num_simulated, 0, ""


def funnel_chart(certificate: Certificate) -> Figure:
    """How many plans every step of the search left over, on a logarithmic axis."""
    steps = list(funnel_steps(certificate))
    rightwards = across(0.0, max(1.0, math.log10(certificate.num_candidates)))
    rows = []
    for words, left, taken, why in steps:
        rest, before = (math.log10(count) if count > 0 else 0.0 for count in (left, left + taken))
        bars = [Segment(0.0, rest, "blue")] if left else []
        if taken:
            bars.append(Segment(rest, before, "rest" if why in (_UNDECIDED, _IN_SEGMENTS) else "orange"))
        told = f"{taken:,} {why}" if taken else ""
        title = f"{words}: {left:,} left" + (f"; {told}" if told else "")
        rows.append(BarRow(name=words, words=told, title=title, bars=tuple(bars), figure=f"{left:,}"))
    marks = [Tick(float(power), f"{10**power:,}") for power in range(math.floor(rightwards.high) + 1)]
    drawing = bar_rows(rows, rightwards, ONE, title="plans, logarithmic", marks=marks)
    is_open = certificate.num_undecided + certificate.num_bounded_by_segments > 0
    return Figure(
        name="search",
        is_rows=True,
        drawing=drawing,
        label="How many plans every step of the search left: " + "; ".join(f"{w} {n:,}" for w, n, _, _ in steps),
        caption=("What was left after every step", ", and what the step took away"),
        legend=(
            (area_mark("blue"), "left"),
            (area_mark("orange"), "taken away, with a proof"),
            *([(area_mark("rest"), "taken away, nothing proven")] if is_open else []),
        ),
    )


# -- parallel modes --------------------------------------------------------------------------------------------------


def modes_chart(result: SearchResult) -> Figure | None:
    """One bar per mode, as long as its best plan's iteration, with a mark at what no plan of it can beat.

    None where one rank alone was asked about.
    """
    if not result.modes:
        return None
    times_s = [time_s for one in result.modes for time_s in (one.best_iteration_s, one.shortest_possible_s) if time_s]
    rightwards = across(0.0, max(times_s, default=result.prediction.iteration_s))
    rows = [_mode_row(one, is_chosen=one.has(result.plan)) for one in result.modes]
    drawing = bar_rows(rows, rightwards, time_unit(rightwards.high), title="iteration")
    is_rivalled = any(one.best_iteration_s and not one.has(result.plan) for one in result.modes)
    return Figure(
        name="modes",
        is_rows=True,
        drawing=drawing,
        label="The best plan's iteration in every parallel mode: " + "; ".join(row.title for row in rows),
        caption=(f"What {result.plan.num_ranks:,} ranks do together", ": the best plan of every mode"),
        legend=(
            (area_mark("blue"), "the chosen mode"),
            *([(area_mark("rest"), "another mode's best plan, as far as it was searched")] if is_rivalled else []),
            (line(2, 6, 22, 6, "limit-line"), "no plan of the mode is faster"),
        ),
    )


def _mode_row(one: ModeChoice, *, is_chosen: bool) -> BarRow:
    best_s, words = one.best_iteration_s, _mode_words(one)
    return BarRow(
        name=one.words,
        words=words,
        title=f"{one.words}: {words}" + (f". {one.reason}" if one.reason else ""),
        bars=() if best_s is None else (Segment(0.0, best_s, "blue" if is_chosen else "rest"),),
        bound=one.shortest_possible_s,
        is_stressed=is_chosen,
    )


def _mode_words(one: ModeChoice) -> str:
    if one.reason:
        return "no plan fits" if one.num_candidates else "has no plan"
    best = "" if one.best_iteration_s is None else format_seconds(one.best_iteration_s)
    bound = "" if one.shortest_possible_s is None else f"not below {format_seconds(one.shortest_possible_s)}"
    counted = f"{one.num_simulated:,} of {one.num_candidates:,} plans simulated"
    return ", ".join(words for words in (best, bound, counted) if words)


# -- what if ---------------------------------------------------------------------------------------------------------


def sensitivity_chart(iteration_s: float, answers: Sequence[WhatIf]) -> Figure | None:
    """One bar per answer: left where tokens take less time than in the best plan's ``iteration_s``, right where more.

    With the same tokens in an iteration that is the iteration's time.  In order of what they save, those where nothing
    fits last; None without answers.
    """
    if not answers:
        return None
    ordered = sorted(answers, key=lambda one: (one.speedup is None, -(one.speedup or 0.0), one.change))
    changes = [_change_frac(one) for one in ordered]
    rightwards = across(min(*changes, -0.01), max(*changes, 0.01))
    rows = [
        BarRow(
            name=shortened(one.change, _LONGEST_CHANGE),
            words=_effect(one),
            title=f"{one.change}: {one.reason or _effect(one)}",
            bars=() if one.speedup is None else (Segment(0.0, change, "blue" if change <= 0 else "orange"),),
        )
        for one, change in zip(ordered, changes, strict=True)
    ]
    drawing = bar_rows(rows, rightwards, _PERCENT, title="change of the time per token")
    return Figure(
        name="sensitivity",
        is_rows=True,
        drawing=drawing,
        label="What the best iteration would become: " + "; ".join(f"{one.change}: {_effect(one)}" for one in ordered),
        caption=("If one thing were different", f": the best plan's time beside today's {format_seconds(iteration_s)}"),
        legend=((area_mark("blue"), "shorter"), (area_mark("orange"), "longer")),
    )


def _change_frac(one: WhatIf) -> float:
    return 0.0 if one.speedup is None else 1 / one.speedup - 1


def _effect(one: WhatIf) -> str:
    if one.iteration_s is None or one.speedup is None:
        return "nothing fits"
    percent = round(_change_frac(one) * 100, 1)
    if not percent:
        return "no change"
    change = f"{percent:+.1f} %".replace("-", "−")
    factor = f", {one.speedup:.2f} times as fast" if one.speedup > 1 else ""
    return f"{change}, {format_seconds(one.iteration_s)}{factor}"
