"""The report of ``protwin advise``: machines ranked as bars, and what a token costs against how fast it comes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Final

from ..basics.units import format_number, format_seconds
from ..schema.advice import Advice, MachineAdvice
from ..tables.advice import interruption_sentence, machine_table, meaning_sentence, reason_table
from ..tables.question import asked_of_all_table
from .axes import ONE, BarRow, Scale, Segment, across, bar_rows, time_unit, x_axis, y_axis
from .page import Card, PageTable, Report, Section, quiet
from .svg import PLOT_PX, Figure, area_mark, circle, joined, share, shortened, spread, text, zoomable

_LONGEST_NAME: Final = 34
_TOP: Final = 24.0
_BOTTOM: Final = 380.0


def advice_report(advice: Advice) -> Report:
    """One page about all machines that were asked about."""
    ranked, sections = advice.deals, []
    if not advice.is_complete:
        sections.append(Section("Not complete", (quiet(interruption_sentence(advice)),)))
    if advice.question is not None:
        asked = asked_of_all_table(advice.question, advice.global_batch_size)
        sections.append(Section(asked.title, (PageTable(replace(asked, title="")),)))
    if ranked:
        table = PageTable(machine_table("Best plans, fastest first", ranked))
        sections.append(Section("Machines by time", (ranking_chart(ranked), quiet(meaning_sentence(advice)), table)))
    if costs := cost_chart(advice.by_cost):
        sections.append(Section("Cost against time", (costs,)))
    if without := advice.without_plan:
        sections.append(Section("Without an answer", (PageTable(reason_table(without)),)))
    length = f", {advice.sequence_length:,} tokens each" if advice.sequence_length is not None else ""
    return Report(
        title=f"{advice.model}: which machine to rent",
        subtitle=f"The best plan on each of {len(_names(advice.machines))} machines, for "
        f"{advice.global_batch_size:,} samples per step{length}",
        cards=_cards(advice, ranked),
        sections=tuple(sections),
    )


def _cards(advice: Advice, ranked: Sequence[MachineAdvice]) -> tuple[Card, ...]:
    cards = []
    if ranked:
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
    best = cost_front(priced)
    axes = [
        x_axis(rightwards, time_unit(rightwards.high), top=_TOP, bottom=_BOTTOM, title="iteration"),
        y_axis(upwards, ONE, title="$ a million tokens"),
    ]
    drawn = []
    for one in priced:
        title = f"{one.name}: {_words(one)}, {_dollars(one)} a million tokens"
        class_ = "dot" if one in best else "ring stroke-blue"
        drawn.append(circle(share(rightwards(_seconds(one))), upwards(_cost(one)), 5.0, class_, title=title))
    names_y = spread([upwards(_cost(one)) - 8 for one in best], gap=15.0)
    for one, y in zip(best, names_y, strict=True):
        x = rightwards(_seconds(one))
        dx, anchor = (-10.0, "end") if x > PLOT_PX / 2 else (10.0, "start")
        name = shortened(one.name, _LONGEST_NAME)
        drawn.append(text(share(x), y, name, anchor=anchor, class_="strong halo", dx=dx))
    told = "; ".join(f"{one.name} {format_seconds(_seconds(one))}, {_dollars(one)}" for one in priced)
    return Figure(
        name="cost",
        height=_BOTTOM + 42,
        drawing=joined([*axes, zoomable(_BOTTOM, *drawn)]),
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
    kept: list[MachineAdvice] = []
    for one in sorted(priced, key=lambda each: (_seconds(each), _cost(each), each.name)):
        if not kept or _cost(one) < _cost(kept[-1]):
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


def _words(one: MachineAdvice) -> str:
    rate = "" if one.tokens_per_s is None else f", {format_number(one.tokens_per_s)} tokens/s"
    return f"{format_seconds(_seconds(one))}{rate}"
