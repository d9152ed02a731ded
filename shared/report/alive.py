"""What was alive at the peak in the report: one stacked bar per record."""

from __future__ import annotations

from collections.abc import Sequence

from markupsafe import Markup

from ..basics.units import format_bytes
from ..schema.record import MemoryCurve, Record
from ..schema.schedule import Memory
from ..tables.labels import CONTENT_NAMES, ORIGIN_NAMES, alive_at_peak, format_share
from .axes import BarRow, Segment, across, bar_rows, bytes_unit
from .memory import CONTENT_COLOURS, Limit
from .svg import Figure, area_mark, line


def alive_chart(records: Sequence[Record], limits: Sequence[Limit]) -> Figure | None:
    """One stacked bar per record of what its device memory held at the peak; None if none holds a curve."""
    curves = [(record, curve) for record in records if (curve := record.curve(Memory.DEVICE)) and curve.peak_bytes]
    if not curves:
        return None
    highest = max(curve.peak_bytes for _, curve in curves)
    budgets = [one for one in limits if one.line_class == "limit-line" and one.size_bytes <= 1.5 * highest]
    budget_bytes = max((one.size_bytes for one in budgets), default=None)
    rightwards = across(0.0, 1.02 * max(highest, budget_bytes) if budget_bytes is not None else highest)
    rows = [
        BarRow(
            name=ORIGIN_NAMES[record.origin],
            words=format_bytes(curve.peak_bytes),
            title=f"{ORIGIN_NAMES[record.origin]}, peak {format_bytes(curve.peak_bytes)}",
            bars=_segments(curve),
            bound=budget_bytes,
            is_stressed=True,
        )
        for record, curve in curves
    ]
    legend = _contents_legend([curve for _, curve in curves])
    return Figure(
        name="alive",
        is_rows=True,
        drawing=bar_rows(rows, rightwards, bytes_unit(rightwards.high), title=""),
        label="Device memory at the peak by content: " + "; ".join(row.title for row in rows),
        caption=("What is held at the peak", ""),
        legend=(*legend, *((line(2, 6, 22, 6, one.line_class), one.words) for one in budgets)),
    )


def _contents_legend(curves: Sequence[MemoryCurve]) -> tuple[tuple[Markup, str], ...]:
    held = {row.content for curve in curves for row in alive_at_peak(curve) if row.is_itemized}
    marks = [
        (area_mark(colour), CONTENT_NAMES[content]) for content, colour in CONTENT_COLOURS.items() if content in held
    ]
    if any(not row.is_itemized for curve in curves for row in alive_at_peak(curve)):
        marks.append((area_mark("rest"), "not itemized"))
    return tuple(marks)


def _segments(curve: MemoryCurve) -> tuple[Segment, ...]:
    """The parts of one bar, in the order of the legend."""
    order = {name: place for place, name in enumerate(CONTENT_NAMES[content] for content in CONTENT_COLOURS)}
    segments, level = [], 0
    for row in sorted(alive_at_peak(curve), key=lambda row: order.get(row.name, len(order))):
        size = format_bytes(row.size_bytes)
        colour = CONTENT_COLOURS[row.content] if row.is_itemized else "rest"
        title = f"{row.name}: {size}, {format_share(row.size_bytes / curve.peak_bytes)} of the peak"
        label = size if row.is_itemized else ""
        segments.append(Segment(level, level + row.size_bytes, colour, title, label))
        level += row.size_bytes
    return tuple(segments)
