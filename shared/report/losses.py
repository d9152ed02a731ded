"""Losses in the report: several runs over the same steps, drawn so that identical ones are seen to be identical."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from markupsafe import Markup

from .axes import ONE, BarRow, Scale, Segment, across, bar_rows, x_axis, y_axis
from .svg import Figure, area_mark, circle, joined, line, share, stretched, tag, zoomable
from .svg import value_text as px

_TOP: Final = 20.0
_BOTTOM: Final = 260.0
_COLOURS: Final = ("sky", "orange", "blue", "green", "purple")
_MOST_MARKERS: Final = 60


@dataclass(frozen=True, slots=True)
class LossTolerance:
    """By how much losses of runs may differ whose sums are added in another order."""

    most: float
    """The largest difference of two losses of a step."""
    source: str
    """Where it comes from, behind "the tolerance of 1e-6, ": "4 times what roundings do to plain training"."""


def losses_chart(losses: Mapping[str, Sequence[float]], tolerance: LossTolerance | None = None) -> Figure | None:
    """The first run as a broad band, every other as a thin line with rings upon it; None without a finite loss."""
    finite = [loss for run in losses.values() for loss in run if math.isfinite(loss)]
    if not finite:
        return None
    low, high = min(finite), max(finite)
    margin = 0.05 * (high - low) or 0.05 * abs(high) or 1.0
    rightwards = across(0.0, max(1, max(len(run) for run in losses.values()) - 1))
    upwards = Scale(low - margin, high + margin, _BOTTOM, _TOP)
    num_steps = int(rightwards.high)
    axes = [
        x_axis(rightwards, ONE, top=_TOP, bottom=_BOTTOM, at_most=min(13, num_steps + 1), title="step"),
        y_axis(upwards, ONE, title="loss"),
    ]
    drawn, marks = [], []
    for index, (name, run) in enumerate(losses.items()):
        colour = _COLOURS[index % len(_COLOURS)]
        line_class = f"line stroke-{colour}" + (" broad" if index == 0 and len(losses) > 1 else "")
        drawn.append(stretched(_BOTTOM, tag("path", d=_path(run, rightwards, upwards), class_=line_class)))
        mark = line(0, 6, 24, 6, line_class)
        if index > 0 or len(losses) == 1:
            drawn.append(_rings(run, rightwards, upwards, colour))
            mark += circle(12, 6, 3.5, f"ring stroke-{colour}")
        marks.append((mark, name))
    return Figure(
        name="losses",
        height=_BOTTOM + 36,
        drawing=joined([*axes, zoomable(_BOTTOM, *drawn)]),
        label="Loss by step: " + ", ".join(losses),
        caption=_caption(losses, tolerance),
        legend=tuple(marks),
    )


def block_losses_chart(losses: Mapping[str, Sequence[float]]) -> Figure | None:
    """The loss of every block of a distillation by steps, counted from 1; None without a finite loss."""
    finite = [loss for block in losses.values() for loss in block if math.isfinite(loss)]
    if not finite:
        return None
    num_steps = max(len(block) for block in losses.values())
    low, high = min(0.0, *finite), max(finite)
    rightwards = across(0.0, max(1, num_steps - 1))
    upwards = Scale(low, high + 0.05 * (high - low or 1.0), _BOTTOM, _TOP)
    counted = across(1.0, max(2, num_steps))
    axes = [
        x_axis(counted, ONE, top=_TOP, bottom=_BOTTOM, at_most=min(13, num_steps), title="step"),
        y_axis(upwards, ONE, title="loss"),
    ]
    classes = [f"line stroke-{_COLOURS[index % len(_COLOURS)]}" for index in range(len(losses))]
    drawn = [
        stretched(_BOTTOM, tag("path", d=_path(block, rightwards, upwards), class_=line_class))
        for line_class, block in zip(classes, losses.values(), strict=True)
    ]
    marks = [(line(0, 6, 24, 6, line_class), name) for line_class, name in zip(classes, losses, strict=True)]
    return Figure(
        name="block-losses",
        height=_BOTTOM + 36,
        drawing=joined([*axes, zoomable(_BOTTOM, *drawn)]),
        label="Loss of every block by step: " + ", ".join(losses),
        caption=("Every block by itself", ", against the output of the teacher's block"),
        legend=tuple(marks),
    )


@dataclass(frozen=True, slots=True)
class Agreement:
    """How several runs relate to the first."""

    headline: str
    detail: str


def _caption(losses: Mapping[str, Sequence[float]], tolerance: LossTolerance | None) -> tuple[str, str]:
    found = agreement(losses, tolerance)
    return (found.headline.capitalize(), f", {found.detail}") if found is not None else ("", "")


def agreement(losses: Mapping[str, Sequence[float]], tolerance: LossTolerance | None = None) -> Agreement | None:
    """Whether the runs are identical, and if not, by how much they differ; None for a single run.

    With a ``tolerance``, whether all of them are within it of the first.
    """
    runs = list(losses.values())
    if len(runs) < 2 or not any(runs):
        return None
    steps = len(runs[0])
    if any(len(run) != steps for run in runs):
        return Agreement("different", f"runs of {', '.join(str(len(run)) for run in runs)} steps")
    if all(_same(left, right) for run in runs[1:] for left, right in zip(runs[0], run, strict=True)):
        return Agreement("identical", f"bit for bit in all {steps} steps")
    first = next(step for step in range(steps) if any(not _same(runs[0][step], run[step]) for run in runs[1:]))
    gaps = [abs(left - right) for run in runs[1:] for left, right in zip(runs[0], run, strict=True)]
    if not all(map(math.isfinite, gaps)):
        return Agreement("different", f"from step {first} on, some of them not finite")
    by = f"from step {first} on, by at most {max(gaps):.3g}"
    if tolerance is None:
        return Agreement("different", by)
    allowed = f"the tolerance of {tolerance.most:.3g}, {tolerance.source}"
    if max(gaps) <= tolerance.most:
        return Agreement("equal within tolerance", f"different {by}; {allowed}")
    return Agreement("different", f"{by}: more than {allowed}")


def _same(left: float, right: float) -> bool:
    return left == right or (math.isnan(left) and math.isnan(right))


def _path(run: Sequence[float], rightwards: Scale, upwards: Scale) -> str:
    """A line through the finite losses, broken where there is none."""
    path, is_drawing = [], False
    for step, loss in enumerate(run):
        if math.isfinite(loss):
            path.append(f"{'L' if is_drawing else 'M'}{px(rightwards(step))} {px(upwards(loss))}")
        is_drawing = math.isfinite(loss)
    return "".join(path)


def _rings(run: Sequence[float], rightwards: Scale, upwards: Scale, colour: str) -> Markup:
    every = max(1, math.ceil(len(run) / _MOST_MARKERS))
    return joined(
        circle(share(rightwards(step)), upwards(loss), 3.5, f"ring stroke-{colour}", title=f"step {step}: {loss:.6g}")
        for step, loss in enumerate(run)
        if step % every == 0 and math.isfinite(loss)
    )


@dataclass(frozen=True, slots=True)
class BeforeAndAfter:
    """A loss before a training and after it."""

    before: float
    after: float


def forgetting_chart(losses: Mapping[str, tuple[BeforeAndAfter, BeforeAndAfter]], texts: tuple[str, str]) -> Figure:
    """By way of training, the losses on a first text and on the second, which is then learned; names of both texts."""
    rows = [
        BarRow(
            name=f"{way}: {text}",
            words=f"{one.before:.3f} → {one.after:.3f}",
            title=f"{way}, loss on {text}: {one.before:.3f} before, {one.after:.3f} after",
            bars=(Segment(0.0, one.after, colour),),
            bound=one.before,
        )
        for text, colour, number in zip(texts, ("orange", "blue"), (0, 1), strict=True)
        for way, both in losses.items()
        for one in (both[number],)
    ]
    rightwards = across(0.0, max(max(row.bars[0].high, row.bound or 0.0) for row in rows) or 1.0)
    return Figure(
        name="forgetting",
        is_rows=True,
        drawing=bar_rows(rows, rightwards, ONE, title="loss, nats per byte"),
        label="Losses before and after: " + "; ".join(f"{row.name} {row.words}" for row in rows),
        caption=("What is forgotten, and what is learned", ": losses on sequences that no training has seen"),
        legend=(
            (area_mark("orange"), f"{texts[0]}, learned before"),
            (area_mark("blue"), f"{texts[1]}, learned now"),
            (line(12, 0, 12, 12, "limit-line"), "before"),
        ),
    )
