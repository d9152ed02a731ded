"""The search in the report: what was bounded away, and the plans that were left, by time and memory."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from html import escape
from typing import Final

from ..basics.units import format_bytes, format_seconds
from ..schema.search_result import BatchSearchResult, Certificate, PlanOutcome, SearchResult
from ..tables.labels import NO_VALUE, knobs
from ..tables.search import budget_sentence, certificate_sentence
from .modes import mode_table, modes_chart
from .page import Section
from .sensitivity import sensitivity_chart
from .svg import Figure, Scale, area_mark, bytes_unit, line, tag, text, ticks, time_unit
from .svg import value_text as px

_WIDTH: Final = 1120.0
_LEFT: Final = 112.0
_RIGHT: Final = 1044.0


def search_sections(search: SearchResult | BatchSearchResult) -> tuple[Section, ...]:
    """What the search proves, the front of time against memory, and what other machines would change.

    Of several batch sizes and of several ranks' modes also what became of each.
    """
    result = plain_result(search)
    sentences = tag("p", escape(certificate_sentence(result))) + tag("p", escape(budget_sentence(result)))
    parts: list[Figure | str] = [sentences, funnel_chart(result.certificate)]
    if isinstance(search, BatchSearchResult):
        parts.append(batch_table(search))
    sections = [Section("Search", tuple(parts))]
    if modes := modes_chart(result):
        sections.append(Section("Parallel modes", (modes, mode_table(result))))
    front = front_chart(result)
    if front is not None:
        table = outcome_table(_front_caption(result.pareto), evenly(result.pareto), result)
        sections.append(Section("Time against device memory", (front, table)))
    if answers := sensitivity_chart(result.prediction.iteration_s, result.what_if):
        sections.append(Section("What if", (answers,)))
    if result.alternatives:
        sections.append(
            Section("Next best plans", (outcome_table("Plans of another kind", result.alternatives, result),))
        )
    return tuple(sections)


def plain_result(search: SearchResult | BatchSearchResult) -> SearchResult:
    """The result with the best plan."""
    return search.result if isinstance(search, BatchSearchResult) else search


# -- what was bounded away -------------------------------------------------------------------------------------------

_ROW_PITCH: Final = 40.0
_ROW_HEIGHT: Final = 22.0
_FUNNEL_LEFT: Final = 250.0
_FUNNEL_TOP: Final = 8.0


def funnel_steps(certificate: Certificate) -> Iterator[tuple[str, int, int, str]]:
    """Per step of the search: its words, how many plans are left after it, how many it took away, and why."""
    left = certificate.num_candidates
    yield "plans in the space", left, 0, ""
    for words, taken, why in (
        ("after bounds of memory", certificate.num_bounded_by_memory, "cannot fit"),
        ("after bounds of time", certificate.num_bounded_by_time, "cannot be faster"),
        ("without the undecided", certificate.num_undecided, "left undecided"),
    ):
        left -= taken
        if taken or words.startswith("after"):
            yield words, left, taken, why
    yield "simulated", certificate.num_simulated, 0, ""


def funnel_chart(certificate: Certificate) -> Figure:
    """How many plans every step of the search left over, on a logarithmic axis."""
    steps = list(funnel_steps(certificate))
    across = Scale(0.0, max(1.0, math.log10(certificate.num_candidates)), _FUNNEL_LEFT, _RIGHT - 180)
    bottom = _FUNNEL_TOP + len(steps) * _ROW_PITCH
    drawn = []
    for power in range(math.floor(across.high) + 1):
        x = across(power)
        drawn.append(line(x, _FUNNEL_TOP, x, bottom, "grid"))
        drawn.append(text(x, bottom + 12, f"{10**power:,}", anchor="middle"))
    drawn.append(text(across(0) - 12, bottom + 12, "plans, logarithmic", anchor="end"))
    for row, (words, left, taken, why) in enumerate(steps):
        middle = _FUNNEL_TOP + (row + 0.5) * _ROW_PITCH
        end = across(math.log10(left)) if left > 0 else _FUNNEL_LEFT
        before = across(math.log10(left + taken)) if left + taken > 0 else _FUNNEL_LEFT
        title = f"{words}: {left:,} left" + (f"; {taken:,} {why}" if taken else "")
        away = "fill-rest" if why == "left undecided" else "fill-orange"
        for x1, x2, class_ in ((_FUNNEL_LEFT, end, "fill-blue"), (end, before, away)):
            if x2 > x1 or class_ == "fill-blue":
                drawn.append(
                    tag(
                        "rect",
                        tag("title", escape(title)),
                        x=x1,
                        y=middle - _ROW_HEIGHT / 2,
                        width=max(1.5, x2 - x1) if left or taken else 0.0,
                        height=_ROW_HEIGHT,
                        class_=class_,
                    )
                )
        drawn.append(text(0, middle, words))
        drawn.append(text(_FUNNEL_LEFT - 10, middle, f"{left:,}", anchor="end", class_="strong"))
        if taken:
            drawn.append(text(before + 8, middle, f"{taken:,} {why}", class_="halo"))
    label = "How many plans every step of the search left: " + "; ".join(f"{w} {n:,}" for w, n, _, _ in steps)
    return Figure(
        name="search",
        width=_WIDTH,
        height=bottom + 24,
        drawing="".join(drawn),
        label=label,
        caption=("What was left after every step", ", and what the step took away"),
        legend=(
            (area_mark("blue"), "left"),
            (area_mark("orange"), "taken away, with a proof"),
            *([(area_mark("rest"), "taken away, nothing proven")] if certificate.num_undecided else []),
        ),
    )


# -- the front -------------------------------------------------------------------------------------------------------

_FRONT_TOP: Final = 20.0
_FRONT_BOTTOM: Final = 340.0
_MOST_ROWS: Final = 10
"""Rows of a front that a person reads; the drawing has them all, and so has the JSON."""


def front_chart(result: SearchResult) -> Figure | None:
    """Iteration time of the front's plans against their guaranteed peak; None if it is a single plan.

    It is drawn as a staircase: for every size, the fastest of the plans that are at most as large.  The plan itself
    counts too: the front leaves out plans that save little memory beside a faster one or an equal one.
    """
    if len(result.pareto) < 2:
        return None
    prediction = result.prediction
    own = (prediction.guaranteed_peak_device_bytes, prediction.iteration_s)
    points = [(one.guaranteed_peak_device_bytes, one.iteration_s) for one in result.pareto]
    low_bytes, high_bytes = min(x for x, _ in [*points, own]), max(x for x, _ in [*points, own])
    budget_bytes = result.device_budget_bytes
    shows_budget = budget_bytes <= high_bytes + 1.5 * (high_bytes - low_bytes)
    right_bytes = max(high_bytes, budget_bytes) if shows_budget else high_bytes
    margin = 0.05 * (right_bytes - low_bytes) or 1.0
    across = Scale(max(0.0, low_bytes - margin), right_bytes + margin, _LEFT, _RIGHT)
    low_s, high_s = min(y for _, y in [*points, own]), max(y for _, y in [*points, own])
    margin_s = 0.08 * (high_s - low_s) or 0.05 * high_s
    upwards = Scale(max(0.0, low_s - 2 * margin_s), high_s + margin_s, _FRONT_BOTTOM, _FRONT_TOP)
    drawn = [_front_axes(across, upwards)]
    stairs = lower_envelope([*points, own])
    path = f"M{px(across(stairs[0][0]))} {px(_FRONT_TOP)}V{px(upwards(stairs[0][1]))}"
    path += "".join(f"H{px(across(x))}V{px(upwards(y))}" for x, y in stairs[1:])
    drawn.append(tag("path", d=f"{path}H{px(_RIGHT)}", class_="front"))
    if shows_budget:
        x = across(budget_bytes)
        drawn.append(line(x, _FRONT_TOP, x, _FRONT_BOTTOM, "limit-line"))
        words = f"budget {format_bytes(budget_bytes)}"
        drawn.append(text(x - 6, _FRONT_TOP - 10, words, anchor="end", class_="limit"))
    for one in result.pareto:
        drawn.append(_dot(one, across(one.guaranteed_peak_device_bytes), upwards(one.iteration_s)))
    drawn.append(_own_mark(result, across(own[0]), upwards(own[1]), upwards(low_s)))
    leanest = stairs[0]
    if leanest != own:
        words = f"least memory: {format_bytes(leanest[0])}, {format_seconds(leanest[1])}"
        drawn.append(text(across(leanest[0]) + 10, upwards(leanest[1]) - 10, words, class_="halo"))
    return Figure(
        name="front",
        width=_WIDTH,
        height=_FRONT_BOTTOM + 42,
        drawing="".join(drawn),
        label=f"Iteration time against device memory: {len(points)} plans, none of which is slower and larger than "
        f"another",
        caption=("The price of memory", ": the fastest plan that was found for every size. Axes begin above 0."),
        legend=(
            (_diamond(12, 6, 5.5), "the plan"),
            (tag("circle", cx=12.0, cy=6.0, r=4.0, class_="dot"), "simulated"),
            (tag("circle", cx=12.0, cy=6.0, r=4.0, class_="ring stroke-blue"), "replayed by the same rules"),
        ),
    )


def lower_envelope(points: Sequence[tuple[int, float]]) -> list[tuple[int, float]]:
    """Of plans as (bytes, seconds) those that no other one equals or beats in both, ascending in bytes."""
    kept: list[tuple[int, float]] = []
    for point in sorted(points):
        if not kept or point[1] < kept[-1][1]:
            kept.append(point)
    return kept


def _front_axes(across: Scale, upwards: Scale) -> str:
    unit, drawn = bytes_unit(across.high), []
    for tick in ticks(across.low, across.high, unit, at_most=10):
        x = across(tick.value)
        drawn.append(line(x, _FRONT_TOP, x, _FRONT_BOTTOM, "grid"))
        drawn.append(text(x, _FRONT_BOTTOM + 12, f"{tick.label} {unit.name}", anchor="middle"))
    seconds = time_unit(upwards.high)
    for tick in ticks(upwards.low, upwards.high, seconds, at_most=7):
        y = upwards(tick.value)
        drawn.append(line(_LEFT, y, _RIGHT, y, "grid"))
        drawn.append(text(_LEFT - 8, y, f"{tick.label} {seconds.name}", anchor="end"))
    drawn.append(
        text((_LEFT + _RIGHT) / 2, _FRONT_BOTTOM + 30, "device memory that the plan never exceeds", anchor="middle")
    )
    drawn.append(text(0, _FRONT_TOP - 10, "iteration"))
    return "".join(drawn)


def _dot(outcome: PlanOutcome, x: float, y: float) -> str:
    return tag(
        "circle",
        tag("title", escape(_outcome_words(outcome))),
        cx=x,
        cy=y,
        r=5.0,
        class_="dot" if outcome.is_simulated else "ring stroke-blue",
    )


def _own_mark(result: SearchResult, x: float, y: float, free_y: float) -> str:
    """The plan, named where the front leaves room: below ``free_y`` on the right, else above itself."""
    prediction = result.prediction
    words = f"{format_bytes(prediction.guaranteed_peak_device_bytes)}, {format_seconds(prediction.iteration_s)}"
    plan = ", ".join(f"{knob.name} {knob.value}" for knob in knobs(result.plan))
    is_right = x > (_LEFT + _RIGHT) / 2
    return _diamond(x, y, 8.0, title=f"the plan: {words}\n{plan}") + text(
        x + (-12 if is_right else 12),
        free_y + 18 if is_right else y - 14,
        f"the plan: {words}",
        anchor="end" if is_right else "start",
        class_="strong halo",
    )


def _diamond(x: float, y: float, size: float, *, title: str = "") -> str:
    path = f"M{px(x)} {px(y - size)}L{px(x + size)} {px(y)}L{px(x)} {px(y + size)}L{px(x - size)} {px(y)}Z"
    return tag("path", tag("title", escape(title)) if title else "", d=path, class_="chosen-dot")


def _outcome_words(outcome: PlanOutcome) -> str:
    plan = ", ".join(f"{knob.name} {knob.value}" for knob in knobs(outcome.plan))
    return f"{format_bytes(outcome.guaranteed_peak_device_bytes)}, {format_seconds(outcome.iteration_s)}\n{plan}"


def evenly(front: Sequence[PlanOutcome]) -> list[PlanOutcome]:
    """At most ``_MOST_ROWS`` of the front's plans: both ends, and between them at even steps of its order."""
    if len(front) <= _MOST_ROWS:
        return list(front)
    return [front[round(step * (len(front) - 1) / (_MOST_ROWS - 1))] for step in range(_MOST_ROWS)]


def _front_caption(front: Sequence[PlanOutcome]) -> str:
    if len(front) <= _MOST_ROWS:
        return "Plans of the front"
    return f"{_MOST_ROWS} of the {len(front)} plans of the front"


# -- tables ----------------------------------------------------------------------------------------------------------


def outcome_table(caption: str, outcomes: Sequence[PlanOutcome], result: SearchResult) -> str:
    """Plans with their time, memory and knobs; columns for those knobs alone that any of them has."""
    found = [{knob.name: knob.value for knob in knobs(one.plan)} for one in outcomes]
    names = list(dict.fromkeys(name for row in found for name in row))
    head = ["iteration", "over the plan", "device, at most", "pinned host", *names]
    rows = [
        tag(
            "tr",
            tag("th", escape(format_seconds(one.iteration_s)), scope="row", class_="number"),
            *(
                tag("td", escape(words), class_="number")
                for words in (
                    _over(one.iteration_s, result.prediction.iteration_s),
                    format_bytes(one.guaranteed_peak_device_bytes),
                    format_bytes(one.pinned_host_bytes),
                    *(row.get(name, "0") for name in names),
                )
            ),
        )
        for one, row in zip(outcomes, found, strict=True)
    ]
    cells = (tag("th", _breakable(name), scope="col", class_="number") for name in head)
    table = tag("table", tag("caption", escape(caption)), tag("thead", tag("tr", *cells)), tag("tbody", *rows))
    return tag("div", table, class_="scroll")


def batch_table(search: BatchSearchResult) -> str:
    """Per size of the micro-batch its best plan's time, and what no plan of it can beat."""
    head = ["micro-batch size", "micro-batches", "best iteration", "not below", "plans", "simulated"]
    rows = []
    for choice in search.choices:
        cells = [
            str(choice.micro_batches),
            NO_VALUE if choice.best_iteration_s is None else format_seconds(choice.best_iteration_s),
            NO_VALUE if choice.shortest_possible_s is None else format_seconds(choice.shortest_possible_s),
            f"{choice.num_candidates:,}",
            f"{choice.num_simulated:,}",
        ]
        rows.append(
            tag(
                "tr",
                tag("th", str(choice.micro_batch_size), scope="row", class_="number"),
                *(tag("td", escape(words), class_="number") for words in cells),
                class_="total" if choice.micro_batch_size == search.micro_batch_size else None,
            )
        )
    cells_of_head = (tag("th", escape(name), scope="col", class_="number") for name in head)
    caption = tag("caption", escape(f"Sizes of the micro-batch at {search.global_batch_size:,} samples per step"))
    table = tag("table", caption, tag("thead", tag("tr", *cells_of_head)), tag("tbody", *rows))
    return tag("div", table, class_="scroll")


def _breakable(name: str) -> str:
    """A heading that may be broken after its underscores."""
    return escape(name).replace("_", "_<wbr>")


def _over(iteration_s: float, own_s: float) -> str:
    percent = round((iteration_s / own_s - 1) * 100, 1)
    return f"{percent + 0.0:+.1f} %".replace("-", "−") if percent else "0.0 %"
