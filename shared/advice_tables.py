"""Advice as a table."""

from __future__ import annotations

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from .advice import Advice, MachineAdvice
from .units import format_bytes, format_seconds


def advice_tables(advice: Advice) -> RenderableType:
    """Machines by time, what a million tokens costs where a price is known, and why others cannot."""
    table = Table(
        title=Text(f"{advice.model}, global batch {advice.global_batch_size:,}: machines by time", style="bold"),
        title_justify="left",
        box=box.SIMPLE_HEAD,
        show_edge=False,
        pad_edge=False,
        padding=(0, 1),
        header_style="dim",
    )
    table.add_column("machine", no_wrap=True)
    for heading in (
        "iteration",
        "tokens\nper s",
        "device\npeak",
        "micro-\nbatch",
        "USD per\nhour",
        "USD per\nM tokens",
    ):
        table.add_column(heading, justify="right", no_wrap=True)
    for one in advice.machines:
        if one.plan is not None:
            table.add_row(*_cells(one))
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
    return Group(*parts)


def _cells(one: MachineAdvice) -> tuple[str, ...]:
    assert one.iteration_s is not None
    assert one.tokens_per_s is not None
    cost, price = one.usd_per_million_tokens, one.price_usd_per_hour
    return (
        one.hardware_name,
        format_seconds(one.iteration_s),
        f"{one.tokens_per_s:,.0f}",
        format_bytes(one.guaranteed_peak_device_bytes or 0),
        f"{one.micro_batch_size} x {one.plan.micro_batches if one.plan is not None else 0}",
        "-" if price is None else f"{price:.2f}",
        "-" if cost is None else f"{cost:.3f}",
    )
