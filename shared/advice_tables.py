"""Advice as a table."""

from __future__ import annotations

from typing import Final

from rich.console import Group, RenderableType
from rich.text import Text

from .advice import Advice, MachineAdvice
from .report_words import NO_VALUE
from .table_style import FittingTable, titled
from .units import format_bytes, format_number, format_seconds

_PRICES: Final = (">USD per\nhour", ">USD per\nM tokens")


def advice_tables(advice: Advice) -> RenderableType:
    """Machines by time, what a million tokens costs where a price is known, and why others cannot."""
    columns = ("machine", ">iteration", ">tokens\nper s", ">device\npeak", ">micro-\nbatch", *_PRICES)
    rows = [_cells(one) for one in advice.machines if one.plan is not None]
    title = f"{advice.model}, global batch {advice.global_batch_size:,}: machines by time"
    table = titled(title, FittingTable(columns, rows, always=5, expendable=_PRICES[:1]))
    parts: list[RenderableType] = [table]
    if advice.by_cost:
        best = advice.by_cost[0]
        parts += [
            Text(""),
            Text(f"Cheapest: {best.hardware_name}, ${best.usd_per_million_tokens:.3f} a million tokens."),
        ]
    without = [one.hardware_name for one in advice.machines if one.plan is None]
    if without:
        parts += [Text(""), Text(f"Nothing fits, or nothing is known: {', '.join(without)}.  --json says why.")]
    if not advice.is_complete:
        parts += [Text(""), Text(interruption_sentence(advice))]
    return Group(*parts)


def interruption_sentence(advice: Advice) -> str:
    """What an interrupted sweep did not get to."""
    asked = len(advice.machines) + len(advice.unanswered)
    return (
        f"interrupted: this is the ranking so far, and it is not complete: {len(advice.machines)} of {asked} machines. "
        f"Not searched: {', '.join(advice.unanswered)}."
    )


def _cells(one: MachineAdvice) -> tuple[str, ...]:
    assert one.iteration_s is not None
    assert one.tokens_per_s is not None
    cost, price = one.usd_per_million_tokens, one.price_usd_per_hour
    return (
        one.hardware_name,
        format_seconds(one.iteration_s),
        format_number(one.tokens_per_s),
        format_bytes(one.guaranteed_peak_device_bytes or 0),
        f"{one.micro_batch_size} x {one.plan.micro_batches if one.plan is not None else 0}",
        NO_VALUE if price is None else f"{price:.2f}",
        NO_VALUE if cost is None else f"{cost:.3f}",
    )
