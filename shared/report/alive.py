"""What was alive at the peak in the report: one stacked bar per record."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from markupsafe import Markup

from ..basics.units import format_bytes
from ..schema.record import MemoryCurve, Record
from ..schema.schedule import Memory
from ..tables.labels import CONTENT_NAMES, ORIGIN_NAMES, Alive, alive_at_peak, format_share
from .axes import LEFT_PX, Scale, bytes_unit, x_axis
from .memory import CONTENT_COLOURS, Limit
from .svg import WIDTH, Figure, area_mark, joined, line, tag, text

_BAR_RIGHT: Final = 1096.0
_BAR_HEIGHT: Final = 36.0
_BAR_PITCH: Final = 52.0
_CHARACTER_PX: Final = 7.2


def alive_chart(records: Sequence[Record], limits: Sequence[Limit]) -> Figure | None:
    """One stacked bar per record of what its device memory held at the peak; None if none holds a curve."""
    curves = [(record, curve) for record in records if (curve := record.curve(Memory.DEVICE)) and curve.peak_bytes]
    if not curves:
        return None
    highest = max(curve.peak_bytes for _, curve in curves)
    near = [limit for limit in limits if limit.line_class == "limit-line" and limit.size_bytes <= 1.5 * highest]
    across = Scale(
        0.0, 1.02 * max(highest, *(limit.size_bytes for limit in near)) if near else highest, LEFT_PX, _BAR_RIGHT
    )
    bottom = 20 + len(curves) * _BAR_PITCH
    drawn = [x_axis(across, bytes_unit(across.high), top=16, bottom=bottom)]
    for row, (record, curve) in enumerate(curves):
        top = 24 + row * _BAR_PITCH
        drawn.append(text(0, top + _BAR_HEIGHT / 2, ORIGIN_NAMES[record.origin], class_="strong"))
        drawn.append(_stack(alive_at_peak(curve), across, top, curve.peak_bytes))
    for limit in near:
        x = across(limit.size_bytes)
        drawn.append(line(x, 16, x, bottom, limit.line_class))
        drawn.append(text(x, 6, limit.words, anchor="end" if x > WIDTH - 100 else "middle", class_=limit.text_class))
    return Figure(
        name="alive",
        height=bottom + 24,
        drawing=joined(drawn),
        label="Device memory at the peak by content",
        legend=_contents_legend([curve for _, curve in curves]),
    )


def _contents_legend(curves: Sequence[MemoryCurve]) -> tuple[tuple[Markup, str], ...]:
    held = {row.content for curve in curves for row in alive_at_peak(curve) if row.is_itemized}
    marks = [
        (area_mark(colour), CONTENT_NAMES[content]) for content, colour in CONTENT_COLOURS.items() if content in held
    ]
    if any(not row.is_itemized for curve in curves for row in alive_at_peak(curve)):
        marks.append((area_mark("rest"), "not itemized"))
    return tuple(marks)


def _stack(rows: Sequence[Alive], across: Scale, top: float, peak_bytes: int) -> Markup:
    """The segments of one bar, each with its size where there is room."""
    order = {name: place for place, name in enumerate(CONTENT_NAMES[content] for content in CONTENT_COLOURS)}
    drawn, level = [], 0
    for row in sorted(rows, key=lambda row: order.get(row.name, len(order))):
        left, right = across(level), across(level + row.size_bytes)
        level += row.size_bytes
        colour = CONTENT_COLOURS[row.content] if row.is_itemized else None
        words = f"{row.name}: {format_bytes(row.size_bytes)}, {format_share(row.size_bytes / peak_bytes)} of the peak"
        drawn.append(
            tag(
                "rect",
                tag("title", words),
                x=left,
                y=top,
                width=max(0.5, right - left),
                height=_BAR_HEIGHT,
                class_=f"segment fill-{colour or 'rest'}",
            )
        )
        size = format_bytes(row.size_bytes)
        if colour and len(size) * _CHARACTER_PX + 8 <= right - left:
            middle = (left + right) / 2
            drawn.append(text(middle, top + _BAR_HEIGHT / 2, size, anchor="middle", class_=f"mark on-{colour}"))
    return joined(drawn)
