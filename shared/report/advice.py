"""The report of ``protwin advise``: machines ranked as bars, and what a token costs against how fast it comes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from typing import Final

from ..basics.units import format_bytes, format_number, format_seconds
from ..schema.advice import Advice, MachineAdvice
from ..tables.advice import meaning_sentence
from ..tables.labels import NO_VALUE, format_share
from .page import Report, Section, card, card_grid
from .svg import Figure, Scale, Unit, area_mark, line, spread, tag, text, ticks, time_unit

_WIDTH: Final = 1120.0
_LEFT: Final = 250.0
_RIGHT: Final = 860.0
_TOP: Final = 8.0
_PITCH: Final = 28.0
_BAR_PX: Final = 16.0
_LONGEST_NAME: Final = 34


def advice_report(advice: Advice) -> Report:
    """One page about all machines that were asked about."""
    ranked = advice.deals
    parts: list[Figure | str] = []
    if ranked:
        parts += [ranking_chart(ranked), tag("p", escape(meaning_sentence(advice)), class_="quiet")]
    sections = [Section("Machines by time", (*parts, machine_table(ranked)))] if ranked else []
    costs = cost_chart(advice.by_cost)
    if costs is not None:
        sections.append(Section("Cost against time", (costs,)))
    if without := advice.without_plan:
        sections.append(Section("Without an answer", (reason_table(without),)))
    length = f", {advice.sequence_length:,} tokens each" if advice.sequence_length is not None else ""
    return Report(
        title=f"{advice.model}: which machine to rent",
        subtitle=f"The best plan on each of {len(_names(advice.machines))} machines, for "
        f"{advice.global_batch_size:,} samples per step{length}",
        cards=card_grid(_cards(advice, ranked)),
        sections=tuple(sections),
    )


def _cards(advice: Advice, ranked: Sequence[MachineAdvice]) -> list[str]:
    cards = []
    if ranked:
        fastest = ranked[0]
        cards.append(card("fastest", fastest.name, escape(f"{format_seconds(_seconds(fastest))} a step")))
    if advice.by_cost:
        cheapest = advice.by_cost[0]
        cards.append(card("cheapest token", cheapest.name, escape(f"{_dollars(cheapest)} a million tokens")))
    cards.append(card("machines with a plan", f"{len(_names(ranked))} of {len(_names(advice.machines))}"))
    return cards


# -- by time ---------------------------------------------------------------------------------------------------------


def ranking_chart(ranked: Sequence[MachineAdvice]) -> Figure:
    """One bar per machine, as long as its best plan's iteration, fastest first."""
    across = Scale(0.0, max(map(_seconds, ranked)), _LEFT, _RIGHT)
    bottom = _TOP + len(ranked) * _PITCH
    unit = time_unit(across.high)
    drawn = []
    for tick in ticks(0.0, across.high, unit, at_most=8):
        x = across(tick.value)
        drawn.append(line(x, _TOP - 4, x, bottom, "grid"))
        drawn.append(text(x, bottom + 12, f"{tick.label} {unit.name}", anchor="middle"))
    drawn.append(text((_LEFT + _RIGHT) / 2, bottom + 28, "iteration", anchor="middle"))
    for row, one in enumerate(ranked):
        middle = _TOP + (row + 0.5) * _PITCH
        end = across(_seconds(one))
        drawn.append(text(_LEFT - 10, middle, _short(one.name), anchor="end"))
        drawn.append(
            tag(
                "rect",
                tag("title", escape(f"{one.name}: {_words(one)}")),
                x=_LEFT,
                y=middle - _BAR_PX / 2,
                width=max(1.0, end - _LEFT),
                height=_BAR_PX,
                class_="fill-blue" if one.is_certified else "fill-rest",
            )
        )
        drawn.append(text(end + 8, middle, _words(one), class_="halo"))
    told = "; ".join(f"{one.name} {format_seconds(_seconds(one))}" for one in ranked)
    uncertain = any(not one.is_certified for one in ranked)
    return Figure(
        name="ranking",
        width=_WIDTH,
        height=bottom + 40,
        drawing="".join(drawn),
        label=f"Seconds of the best plan's iteration on each machine: {told}",
        caption=("The best plan's iteration", " on each machine; shorter is better"),
        legend=(
            (area_mark("blue"), "proven to be the best plan of its space, within the search's tolerance"),
            *([(area_mark("rest"), "proven within the share that the table names")] if uncertain else []),
        ),
    )


def machine_table(ranked: Sequence[MachineAdvice]) -> str:
    """Machines with time, memory, batch, and cost where a price is known."""
    head = (
        "machine",
        "ranks",
        "mode",
        "iteration",
        "best within",
        "tokens/s",
        "device, at most",
        "micro-batch",
        "$ per hour",
        "$ per million tokens",
    )
    rows = []
    for one in ranked:
        assert one.plan is not None
        price, cost = one.price_usd_per_hour, one.usd_per_million_tokens
        cells = (
            f"{one.num_ranks:,}",
            one.plan.parallel,
            format_seconds(_seconds(one)),
            NO_VALUE if one.gap_frac is None else format_share(one.gap_frac),
            NO_VALUE if one.tokens_per_s is None else format_number(one.tokens_per_s),
            format_bytes(one.guaranteed_peak_device_bytes or 0),
            f"{one.micro_batch_size} x {one.plan.micro_batches}",
            NO_VALUE if price is None else f"{price:.2f}",
            NO_VALUE if cost is None else f"{cost:.3f}",
        )
        rows.append(
            tag(
                "tr",
                tag("th", escape(one.hardware_name), scope="row"),
                *(tag("td", escape(words), class_="number") for words in cells),
            )
        )
    cells_of_head = (
        tag("th", escape(name), scope="col", class_="number" if name != "machine" else None) for name in head
    )
    caption = tag("caption", "Best plans, fastest first")
    table = tag("table", caption, tag("thead", tag("tr", *cells_of_head)), tag("tbody", *rows))
    return tag("div", table, class_="scroll")


def reason_table(without: Sequence[MachineAdvice]) -> str:
    """Why some machines have no plan."""
    rows = (
        tag("tr", tag("th", escape(one.hardware_name), scope="row"), tag("td", escape(one.reason))) for one in without
    )
    head = tag("tr", tag("th", "machine", scope="col"), tag("th", "why there is no plan", scope="col"))
    table = tag("table", tag("caption", "Machines without a plan"), tag("thead", head), tag("tbody", *rows))
    return tag("div", table, class_="scroll")


# -- cost against time -----------------------------------------------------------------------------------------------

_PLOT_LEFT: Final = 112.0
_PLOT_RIGHT: Final = 1044.0
_PLOT_TOP: Final = 24.0
_PLOT_BOTTOM: Final = 380.0
_DOLLAR: Final = Unit(1.0, "$")


def cost_chart(priced: Sequence[MachineAdvice]) -> Figure | None:
    """What a million tokens costs against the iteration's time; machines that no other one equals in both are named.

    None where fewer than two machines have a price.
    """
    if len(priced) < 2:
        return None
    points = {one.name: (_seconds(one), _cost(one)) for one in priced}
    front = {one.name for one in cost_front(priced)}
    across = Scale(0.0, 1.05 * max(x for x, _ in points.values()), _PLOT_LEFT, _PLOT_RIGHT)
    upwards = Scale(0.0, 1.08 * max(y for _, y in points.values()), _PLOT_BOTTOM, _PLOT_TOP)
    drawn = [_cost_axes(across, upwards)]
    named = [one for one in priced if one.name in front]
    names_y = spread([upwards(_cost(one)) - 8 for one in named], gap=15.0)
    for one in priced:
        x, y = across(_seconds(one)), upwards(_cost(one))
        is_best = one.name in front
        title = tag("title", escape(f"{one.name}: {_words(one)}, {_dollars(one)} a million tokens"))
        class_ = "dot" if is_best else "ring stroke-blue"
        drawn.append(tag("circle", title, cx=x, cy=y, r=5.0, class_=class_))
    for one, y in zip(named, names_y, strict=True):
        x = across(_seconds(one))
        is_right = x > (_PLOT_LEFT + _PLOT_RIGHT) / 2
        place, anchor = (x - 10, "end") if is_right else (x + 10, "start")
        drawn.append(text(place, y, _short(one.name), anchor=anchor, class_="strong halo"))
    told = "; ".join(f"{one.name} {format_seconds(_seconds(one))}, {_dollars(one)}" for one in priced)
    return Figure(
        name="cost",
        width=_WIDTH,
        height=_PLOT_BOTTOM + 42,
        drawing="".join(drawn),
        label=f"Dollars a million tokens against seconds of an iteration: {told}",
        caption=(
            "What a token costs against how fast it comes",
            "; named machines have none that is both faster and cheaper",
        ),
        legend=(
            (tag("circle", cx=12.0, cy=6.0, r=4.0, class_="dot"), "nothing is faster and cheaper"),
            (tag("circle", cx=12.0, cy=6.0, r=4.0, class_="ring stroke-blue"), "another machine is both"),
        ),
    )


def cost_front(priced: Sequence[MachineAdvice]) -> list[MachineAdvice]:
    """Machines that no other one equals or beats in both time and cost, fastest first."""
    kept: list[MachineAdvice] = []
    for one in sorted(priced, key=lambda each: (_seconds(each), _cost(each), each.name)):
        if not kept or _cost(one) < _cost(kept[-1]):
            kept.append(one)
    return kept


def _cost_axes(across: Scale, upwards: Scale) -> str:
    unit, drawn = time_unit(across.high), []
    for tick in ticks(0.0, across.high, unit, at_most=10):
        x = across(tick.value)
        drawn.append(line(x, _PLOT_TOP, x, _PLOT_BOTTOM, "grid"))
        drawn.append(text(x, _PLOT_BOTTOM + 12, f"{tick.label} {unit.name}", anchor="middle"))
    for tick in ticks(0.0, upwards.high, _DOLLAR, at_most=7):
        y = upwards(tick.value)
        drawn.append(line(_PLOT_LEFT, y, _PLOT_RIGHT, y, "grid"))
        drawn.append(text(_PLOT_LEFT - 8, y, f"${tick.label}", anchor="end"))
    drawn.append(text((_PLOT_LEFT + _PLOT_RIGHT) / 2, _PLOT_BOTTOM + 30, "iteration", anchor="middle"))
    drawn.append(text(0, _PLOT_TOP - 12, "a million tokens"))
    return "".join(drawn)


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


def _short(name: str) -> str:
    return name if len(name) <= _LONGEST_NAME else f"{name[: _LONGEST_NAME - 1]}…"
