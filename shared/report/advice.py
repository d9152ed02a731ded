"""The report of ``protwin advise``: machines ranked as bars, and what a token costs against how fast it comes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Final, NamedTuple

from markupsafe import Markup

from ..answers.advice import Advice, MachineAdvice
from ..basics.units import format_number, format_seconds
from ..tables.advice import (
    interruption_sentence,
    limit_table,
    machine_table,
    meaning_sentence,
    price_table,
    reason_table,
)
from ..tables.question import asked_of_all_table
from .axes import ONE, BarRow, Scale, Segment, Unit, across, bar_rows, time_unit, x_axis, y_axis
from .page import Card, PageTable, Report, Section, quiet
from .svg import PLOT_PX, Figure, area_mark, circle, joined, share, shortened, spread, text, zoomable

_LONGEST_NAME: Final = 34
_TOP: Final = 24.0
_BOTTOM: Final = 380.0
_THOUSANDS: Final = Unit(1000.0, "thousand tokens")


def advice_report(advice: Advice) -> Report:
    """One page about all machines that were asked about."""
    ranked, sections = advice.deals, []
    if not advice.is_complete:
        sections.append(Section("Not complete", (quiet(interruption_sentence(advice)),)))
    if advice.question is not None:
        asked = asked_of_all_table(advice.question, advice.global_batch_size, is_longest=advice.is_longest)
        sections.append(Section(asked.title, (PageTable(replace(asked, title="")),)))
    if ranked and advice.is_longest:
        table = PageTable(machine_table("Longest first", ranked))
        limits = limit_table(ranked)
        more = () if limits is None else (PageTable(limits),)
        said = quiet(meaning_sentence(advice))
        sections.append(Section("Longest sequences", (length_chart(ranked), said, table, *more)))
    elif ranked:
        table = PageTable(machine_table("Best plans, fastest first", ranked))
        sections.append(Section("Machines by time", (ranking_chart(ranked), quiet(meaning_sentence(advice)), table)))
    if costs := cost_chart(advice.by_cost):
        sections.append(Section("Cost against time", (costs,)))
    if prices := price_table(advice):
        sections.append(Section(prices.title, (PageTable(replace(prices, title="")),)))
    if without := advice.without_plan:
        sections.append(Section("Without an answer", (PageTable(reason_table(without)),)))
    length = f", {advice.sequence_length:,} tokens each" if advice.sequence_length is not None else ""
    number = len(_names(advice.machines))
    machines = "one machine" if number == 1 else f"each of {number} machines"
    what = "The longest sequences" if advice.is_longest else "The best plan"
    return Report(
        title=f"{advice.model}: which machine to rent",
        subtitle=f"{what} on {machines}, for {advice.global_batch_size:,} samples per step{length}",
        cards=_cards(advice, ranked),
        sections=tuple(sections),
    )


def _cards(advice: Advice, ranked: Sequence[MachineAdvice]) -> tuple[Card, ...]:
    cards = []
    if ranked and advice.is_longest:
        cards.append(Card("Longest sequence", ranked[0].name, (_length_words(ranked[0]),)))
    elif ranked:
        cards.append(Card("Fastest", ranked[0].name, (f"{format_seconds(_seconds(ranked[0]))} a step",)))
    if advice.by_cost:
        cheapest = advice.by_cost[0]
        cards.append(Card("Cheapest token", cheapest.name, (f"{_dollars(cheapest)} a million tokens",)))
    cards.append(Card("Machines with a plan", f"{len(_names(ranked))} of {len(_names(advice.machines))}"))
    return tuple(cards)


def ranking_chart(ranked: Sequence[MachineAdvice]) -> Figure:
    """One bar per machine, as long as its best plan's iteration, fastest first."""
    rightwards = across(0.0, max(map(_seconds, ranked)))
    rows = [
        BarRow(
            name=shortened(one.name, _LONGEST_NAME),
            words=_words(one),
            title=f"{one.name}: {_words(one)}",
            bars=(Segment(0.0, _seconds(one), "blue" if one.is_certified else "rest"),),
        )
        for one in ranked
    ]
    drawing = bar_rows(rows, rightwards, time_unit(rightwards.high), title="iteration")
    told = "; ".join(f"{one.name} {format_seconds(_seconds(one))}" for one in ranked)
    uncertain = any(not one.is_certified for one in ranked)
    return Figure(
        name="ranking",
        is_rows=True,
        drawing=drawing,
        label=f"Seconds of the best plan's iteration on each machine: {told}",
        caption=("The best plan's iteration", " on each machine; shorter is better"),
        legend=(
            (area_mark("blue"), "proven to be the best plan of its space, within the search's tolerance"),
            *([(area_mark("rest"), "proven within the share that the table names")] if uncertain else []),
        ),
    )


def cost_chart(priced: Sequence[MachineAdvice]) -> Figure | None:
    """What a million tokens costs against the iteration's time; machines that no other one equals in both are named.

    None where fewer than two machines have a price.
    """
    if len(priced) < 2:
        return None
    rightwards = across(0.0, 1.05 * max(map(_seconds, priced)))
    upwards = Scale(0.0, 1.08 * max(map(_cost, priced)), _BOTTOM, _TOP)
    places = [
        _Place(one, _seconds(one), _cost(one), f"{_words(one)}, {_dollars(one)} a million tokens") for one in priced
    ]
    axes = [
        x_axis(rightwards, time_unit(rightwards.high), top=_TOP, bottom=_BOTTOM, title="iteration"),
        y_axis(upwards, ONE, title="$ a million tokens"),
    ]
    told = "; ".join(f"{one.name} {format_seconds(_seconds(one))}, {_dollars(one)}" for one in priced)
    return Figure(
        name="cost",
        height=_BOTTOM + 42,
        drawing=joined([*axes, _scattered(places, cost_front(priced), rightwards, upwards)]),
        label=f"Dollars a million tokens against seconds of an iteration: {told}",
        caption=(
            "What a token costs against how fast it comes",
            "; named machines have none that is both faster and cheaper",
        ),
        legend=(
            (circle(12, 6, 4, "dot"), "nothing is faster and cheaper"),
            (circle(12, 6, 4, "ring stroke-blue"), "another machine is both"),
        ),
    )


def cost_front(priced: Sequence[MachineAdvice]) -> list[MachineAdvice]:
    """Machines that no other one equals or beats in both time and cost, fastest first."""
    return _front(priced, _seconds, _cost)


def length_chart(found: Sequence[MachineAdvice]) -> Figure:
    """Tokens per second against the longest sequence, machine by machine; those that none equals in both are named."""
    rightwards = across(0.0, 1.05 * max(map(_length, found)))
    upwards = Scale(0.0, 1.08 * max(map(_rate, found)), _BOTTOM, _TOP)
    places = [_Place(one, _length(one), _rate(one), _length_words(one)) for one in found]
    axes = [
        x_axis(rightwards, _THOUSANDS, top=_TOP, bottom=_BOTTOM, title="longest sequence"),
        y_axis(upwards, ONE, title="tokens per second"),
    ]
    told = "; ".join(f"{one.name} {_length_words(one)}" for one in found)
    front = _front(found, lambda one: -_length(one), lambda one: -_rate(one))
    return Figure(
        name="longest",
        height=_BOTTOM + 42,
        drawing=joined([*axes, _scattered(places, front, rightwards, upwards)]),
        label=f"Tokens per second against the longest sequence that trains on each machine: {told}",
        caption=(
            "The longest sequence that trains",
            " against tokens per second at that length; named machines have none that is longer and faster",
        ),
        legend=(
            (circle(12, 6, 4, "dot"), "nothing trains longer sequences faster"),
            (circle(12, 6, 4, "ring stroke-blue"), "another machine does"),
        ),
    )


class _Place(NamedTuple):
    """A machine on a chart of two figures, with its words."""

    one: MachineAdvice
    x: float
    y: float
    words: str


def _scattered(places: Sequence[_Place], named: Sequence[MachineAdvice], rightwards: Scale, upwards: Scale) -> Markup:
    """A dot for each machine that is named, a ring for every other one."""
    drawn = []
    for one, x, y, words in places:
        class_ = "dot" if one in named else "ring stroke-blue"
        drawn.append(circle(share(rightwards(x)), upwards(y), 5.0, class_, title=f"{one.name}: {words}"))
    best = [next(place for place in places if place.one is one) for one in named]
    names_y = spread([upwards(place.y) - 8 for place in best], gap=15.0)
    for place, y in zip(best, names_y, strict=True):
        x = rightwards(place.x)
        dx, anchor = (-10.0, "end") if x > PLOT_PX / 2 else (10.0, "start")
        name = shortened(place.one.name, _LONGEST_NAME)
        drawn.append(text(share(x), y, name, anchor=anchor, class_="strong halo", dx=dx))
    return zoomable(_BOTTOM, *drawn)


def _front(
    found: Sequence[MachineAdvice], first: Callable[[MachineAdvice], float], second: Callable[[MachineAdvice], float]
) -> list[MachineAdvice]:
    """Machines that no other one equals or beats in both figures, of which less is better; by the first of them."""
    kept: list[MachineAdvice] = []
    for one in sorted(found, key=lambda each: (first(each), second(each), each.name)):
        if not kept or second(one) < second(kept[-1]):
            kept.append(one)
    return kept


# -- words -----------------------------------------------------------------------------------------------------------


def _names(found: Iterable[MachineAdvice]) -> set[str]:
    return {one.hardware_name for one in found}


def _seconds(one: MachineAdvice) -> float:
    assert one.iteration_s is not None
    return one.iteration_s


def _cost(one: MachineAdvice) -> float:
    assert one.usd_per_million_tokens is not None
    return one.usd_per_million_tokens


def _dollars(one: MachineAdvice) -> str:
    return f"${_cost(one):.3f}"


def _length(one: MachineAdvice) -> float:
    assert one.longest_sequence is not None
    return one.longest_sequence


def _rate(one: MachineAdvice) -> float:
    assert one.tokens_per_s is not None
    return one.tokens_per_s


def _length_words(one: MachineAdvice) -> str:
    return f"{one.longest_sequence:,} tokens, {format_number(_rate(one))} tokens/s"


def _words(one: MachineAdvice) -> str:
    rate = "" if one.tokens_per_s is None else f", {format_number(one.tokens_per_s)} tokens/s"
    return f"{format_seconds(_seconds(one))}{rate}"
