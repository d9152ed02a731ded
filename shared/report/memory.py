"""Memory over time in the report: both curves against the budget, and what the predicted one consists of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from markupsafe import Markup

from ..basics.units import format_bytes, format_seconds
from ..records.chrome_trace import is_slowed, paced_times_s
from ..records.memory_by_content import Stack
from ..schema.memory_accounts import DeviceReserved
from ..schema.record import MemoryCurve, Record
from ..schema.schedule import Content, Memory
from ..tables.labels import CONTENT_NAMES, ORIGIN_NAMES, format_interval_bytes, peak_name
from .axes import Scale, across, bytes_unit, time_unit, x_axis, y_axis
from .svg import PLOT_PX, Figure, area_mark, circle, joined, line, share, spread, stretched, tag, text, zoomable
from .svg import value_text as px

CONTENT_COLOURS: Final[dict[Content | None, str]] = {
    Content.PARAMETERS: "blue",
    Content.OPTIMIZER_STATE: "purple",
    Content.GRADIENTS: "orange",
    Content.ARRIVING_GRADIENTS: "pink",
    Content.LOOKED_UP_ROWS: "lime",
    Content.ROW_GRADIENTS: "maroon",
    Content.ACTIVATIONS: "green",
    Content.KEPT_RESULTS: "moss",
    Content.SWAPPED: "teal",
    Content.OUTPUT: "sky",
    Content.LOSS: "coral",
    Content.INCOMING_GRADIENT: "red",
    Content.RESIDENT: "grey",
    Content.FLAT_GRADIENTS: "olive",
    Content.REDUCED_GRADIENTS: "brown",
    Content.PAGED_STATE: "navy",
    Content.OWNED_FROZEN: "slate",
    Content.OWNED_TRAINED: "mint",
    Content.PASSING_PARTS: "plum",
    Content.BUCKET: "steel",
    Content.SECOND_BUCKET: "sand",
    Content.HELD_INPUT: "rose",
    Content.CACHED_KEYS: "indigo",
    None: "gold",
}
CURVE_COLOURS: Final = ("blue", "orange")
"""Of the first record and the second; the second is also dashed."""

_TOP: Final = 16.0
_BOTTOM: Final = 316.0
_LEAST_NAME_Y: Final = _TOP - 9
"""Of the middle of a limit's name."""
_FINENESS: Final = 2
"""Columns per pixel: a closer look needs more than the page shows at first."""
_FAR_FACTOR: Final = 3.0
"""A limit this many times above the peaks is named at the upper edge instead of flattening the curves."""


@dataclass(frozen=True, slots=True)
class Limit:
    """A horizontal line to hold the curves against."""

    words: str
    size_bytes: int
    line_class: str
    text_class: str | None = None


def limits(
    *, budget_bytes: int | None, plain_peak_bytes: int | None, reserved: DeviceReserved | None = None
) -> list[Limit]:
    """The budget, what plain training needs and what the allocator reserves, where they are known."""
    known = []
    if budget_bytes is not None:
        known.append(Limit(f"budget {format_bytes(budget_bytes)}", budget_bytes, "limit-line", "limit"))
    if plain_peak_bytes is not None:
        known.append(Limit(f"plain training {format_bytes(plain_peak_bytes)}", plain_peak_bytes, "plain-line"))
    if reserved is not None:
        size_bytes = reserved.expected_bytes
        known.append(Limit(f"reserved by the allocator {format_bytes(size_bytes)}", size_bytes, "plain-line"))
    return known


def memory_chart(
    records: Sequence[Record], time_range_s: tuple[float, float], limits: Sequence[Limit]
) -> Figure | None:
    """The device memory of all records over time, one drawing; None if none holds a curve."""
    curves = [(record, curve) for record in records if (curve := record.curve(Memory.DEVICE)) and curve.times_s]
    if not curves:
        return None
    highest = max(max(curve.peak_bytes, *curve.levels_bytes) for _, curve in curves)
    rightwards, upwards = _scales(time_range_s, highest, limits)
    drawn = [_curve(record, curve, rightwards, upwards, index) for index, (record, curve) in enumerate(curves)]
    bands = [found for record, _ in curves if (found := _band(record, upwards)) is not None]
    drawn = [*bands, *drawn]
    marks = [(_curve_mark(_line_class(i)), _curve_words(record, curve)) for i, (record, curve) in enumerate(curves)]
    return Figure(
        name="memory",
        height=_BOTTOM + 24,
        drawing=_laid_over(drawn, rightwards, upwards, limits),
        caption=("How much is held", " over one iteration"),
        label="Device memory over one iteration: " + "; ".join(words for _, words in marks),
        legend=(*marks, *([(_band_mark(), "where the measured peak is expected")] if bands else [])),
        class_="levels",
    )


def _band(record: Record, upwards: Scale) -> Markup | None:
    """Where the measured peak is expected, across the drawing; None where it is one size, or unknown."""
    interval = record.peak_interval_bytes
    if interval is None or interval.low == interval.high:
        return None
    top, bottom = upwards(min(interval.high, upwards.high)), upwards(interval.low)
    title = tag("title", f"peak expected {format_interval_bytes(interval)}")
    return tag("rect", title, x=0.0, y=top, width="100%", height=bottom - top, class_="band")


def _band_mark() -> Markup:
    return tag("rect", x=0.0, y=1.0, width=24.0, height=10.0, class_="band")


def stack_chart(stack: Stack, time_range_s: tuple[float, float], limits: Sequence[Limit]) -> Figure:
    """Predicted device memory over time, stacked by what it holds; where a pixel has several levels, its highest."""
    rightwards, upwards = _scales(time_range_s, int(stack.total_bytes.max()), limits)
    columns = _highest_per_pixel(stack, rightwards)
    contents = [content for content in CONTENT_COLOURS if content in stack.levels_bytes]
    base = [0] * len(columns)
    ends_s = [float(stack.begins_s[step]) for step in columns[1:]] + [stack.end_s]
    xs = [px(rightwards(float(stack.begins_s[step]))) for step in columns]
    x_ends = [px(rightwards(end_s)) for end_s in ends_s]
    drawn = []
    for content in contents:
        levels = stack.levels_bytes[content]
        top = [below + int(levels[step]) for below, step in zip(base, columns, strict=True)]
        area = _area(xs, x_ends, [px(upwards(level)) for level in base], [px(upwards(level)) for level in top])
        drawn.append(_layer(CONTENT_NAMES[content], int(levels.max()), area, CONTENT_COLOURS[content]))
        base = top
    return Figure(
        name="memory-contents",
        height=_BOTTOM + 24,
        drawing=_laid_over(drawn, rightwards, upwards, limits),
        label="Predicted device memory over one iteration by content: "
        + ", ".join(CONTENT_NAMES[content] for content in contents),
        caption=("What is held", ", predicted, with the most of each at any time"),
        legend=tuple(
            (
                area_mark(CONTENT_COLOURS[content]),
                f"{CONTENT_NAMES[content]}, {format_bytes(int(stack.levels_bytes[content].max()))}",
            )
            for content in reversed(contents)
        ),
        class_="levels",
    )


def _layer(name: str, most_bytes: int, area: str, colour: str) -> Markup:
    """One content: an area that is cut out of a texture, which stays as fine as it is when the area is stretched."""
    cut_id = f"cut-{colour}"
    scale = f"scale({1 / PLOT_PX:.9f} {1 / _BOTTOM:.9f})"
    path = tag("path", d=area, transform=scale, data_name=name)
    return joined(
        [
            tag("clipPath", path, id=cut_id, clipPathUnits="objectBoundingBox"),
            tag(
                "rect",
                tag("title", f"{name}, at most {format_bytes(most_bytes)}"),
                width="100%",
                height=_BOTTOM,
                class_=f"fill-{colour}",
                clip_path=f"url(#{cut_id})",
            ),
            stretched(_BOTTOM, tag("path", d=area, class_="layer")),
        ]
    )


def _scales(time_range_s: tuple[float, float], highest_bytes: int, limits: Sequence[Limit]) -> tuple[Scale, Scale]:
    """Both axes; the vertical one has the limits that are not far above the curves, and room for the names of all."""
    near_bytes = [limit.size_bytes for limit in limits if limit.size_bytes <= _FAR_FACTOR * highest_bytes]
    upwards = Scale(0.0, 1.06 * max(highest_bytes, 1, *near_bytes), _BOTTOM, _TOP)
    # Names that stand above each other at the upper edge have room within the drawing; above it are the page's buttons.
    while (least := min(_name_ys(limits, upwards), default=_LEAST_NAME_Y)) < _LEAST_NAME_Y - 0.5:
        upwards = replace(upwards, high_px=upwards.high_px + _LEAST_NAME_Y - least)
    return across(*time_range_s), upwards


def _laid_over(drawn: Sequence[Markup], rightwards: Scale, upwards: Scale, limits: Sequence[Limit]) -> Markup:
    """The axes, what is drawn over time, and the limits."""
    unit = bytes_unit(upwards.high)
    times = x_axis(
        rightwards, time_unit(rightwards.high), top=upwards.high_px, bottom=_BOTTOM, at_most=12, group="time"
    )
    levels = tag("g", y_axis(upwards, unit), class_="heights", **_heights(upwards, unit.worth, unit.name))
    return joined([times, levels, zoomable(_BOTTOM, *drawn), _limit_lines(limits, upwards)])


def _heights(upwards: Scale, worth: float, unit: str) -> dict[str, str | float]:
    """The vertical axis, for the script that reads levels off a curve."""
    return {
        "data_unit": unit,
        "data_high": repr(upwards.high / worth),
        "data_top": upwards.high_px,
        "data_bottom": upwards.low_px,
    }


def _highest_per_pixel(stack: Stack, rightwards: Scale) -> list[int]:
    """Per column of a share of a pixel the step with the highest total, of those that begin within it; ascending."""
    total = stack.total_bytes
    columns: dict[int, int] = {}
    for step, begin_s in enumerate(stack.begins_s.tolist()):
        column = int(_FINENESS * rightwards(begin_s))
        best = columns.setdefault(column, step)
        if total[step] > total[best]:
            columns[column] = step
    return sorted(columns.values())


def _area(xs: Sequence[str], x_ends: Sequence[str], low: Sequence[str], high: Sequence[str]) -> str:
    """The stepped area between two curves: along the upper one, and back along the lower one."""
    there, back = [f"M{xs[0]} {high[0]}"], []
    for place in range(len(xs)):
        if place == 0 or high[place] != high[place - 1]:
            there.append(f"H{xs[place]}V{high[place]}")
        if place + 1 == len(xs) or low[place] != low[place + 1]:
            back.append(f"H{x_ends[place]}V{low[place]}")
    return "".join([*there, f"H{x_ends[-1]}", *reversed(back), f"H{xs[0]}Z"])


def _line_class(index: int) -> str:
    return f"line stroke-{CURVE_COLOURS[index % 2]}" + (" dashed" if index % 2 else "")


def _curve_words(record: Record, curve: MemoryCurve) -> str:
    words = f"{ORIGIN_NAMES[record.origin]}, peak {format_bytes(curve.peak_bytes)} in {peak_name(curve)}"
    if is_slowed(record, curve):
        watched = format_seconds(curve.times_s[-1])
        words += f" (from an iteration that watching stretched to {watched}, drawn to the length of the timed ones)"
    return words


def _curve_mark(line_class: str) -> Markup:
    return line(0, 6, 24, 6, line_class) + circle(12, 6, 3.5, _ring_class(line_class))


def _ring_class(line_class: str) -> str:
    return line_class.replace("line", "ring").replace(" dashed", "")


def _curve(record: Record, curve: MemoryCurve, rightwards: Scale, upwards: Scale, index: int) -> Markup:
    """The steps of one curve up to the end of the iteration, and a ring at its peak; the first has a wash below it."""
    times_s = paced_times_s(record, curve)
    points = thinned(times_s, curve.levels_bytes, rightwards.per_px / _FINENESS)
    points = _from_zero([(at_s, level) for at_s, level in points if at_s <= rightwards.high] or points[:1])
    end_s = min(max(record.iteration_s, points[-1][0]), rightwards.high)
    path = f"M{px(rightwards(points[0][0]))} {px(upwards(points[0][1]))}"
    path += "".join(f"H{px(rightwards(at_s))}V{px(upwards(level))}" for at_s, level in points[1:])
    path += f"H{px(rightwards(end_s))}"
    drawn = []
    if index == 0:
        area = f"{path}V{px(upwards(0))}H{px(rightwards(points[0][0]))}Z"
        drawn.append(tag("path", d=area, class_="wash"))
    drawn.append(tag("path", d=path, class_=_line_class(index), data_name=ORIGIN_NAMES[record.origin]))
    peak_s = times_s[curve.levels_bytes.index(max(curve.levels_bytes))]
    ring = _ring_class(_line_class(index))
    x, y = share(rightwards(peak_s)), upwards(curve.peak_bytes)
    return stretched(_BOTTOM, *drawn) + circle(x, y, 4.5, ring, title=_curve_words(record, curve))


def _from_zero(points: Sequence[tuple[float, int]]) -> list[tuple[float, int]]:
    """The points with the level that they have at time 0 in place of what came before; a measurement begins early."""
    before = [level for at_s, level in points if at_s <= 0]
    return [(0.0, level) for level in before[-1:]] + [point for point in points if point[0] > 0]


def thinned(times_s: Sequence[float], levels: Sequence[int], per_px: float) -> list[tuple[float, int]]:
    """The points of a step curve, at most four per pixel: first, lowest, highest and last, in order of time.

    A level that holds too briefly to be timed is a level all the same: the peak may be one.
    """
    columns: dict[int, list[int]] = {}
    for index, at_s in enumerate(times_s):
        columns.setdefault(int((at_s - times_s[0]) / per_px) if per_px > 0 else index, []).append(index)
    kept: set[int] = set()
    for members in columns.values():
        kept |= {members[0], members[-1]}
        kept |= {min(members, key=lambda i: levels[i]), max(members, key=lambda i: levels[i])}
    return [(times_s[index], levels[index]) for index in sorted(kept)]


def _limit_lines(limits: Sequence[Limit], upwards: Scale) -> Markup:
    """The limits, each named above its line; those far above the drawing are named at its upper edge."""
    lines, names = [], []
    for limit, name_y in zip(limits, _name_ys(limits, upwards), strict=True):
        is_far = limit.size_bytes > upwards.high
        if not is_far:
            y = upwards(limit.size_bytes)
            lines.append(line(0, y, "100%", y, limit.line_class))
        words = f"{limit.words}{' ↑' if is_far else ''}"
        names.append(text("100%", name_y, words, anchor="end", class_=f"halo {limit.text_class or ''}".strip()))
    return joined([*lines, *names])


def _name_ys(limits: Sequence[Limit], upwards: Scale) -> list[float]:
    """Where the middles of the limits' names are."""
    heights = [upwards(min(limit.size_bytes, upwards.high)) for limit in limits]
    # Names make room upwards: moved down, one would lie on its own line.  They lie upon the lines of the others.
    return [-label_y - 9 for label_y in spread([-y for y in heights], gap=16.0)]
