"""Draw docs/published.svg: predicted against measured seconds of all published runs, one colour for classes alike.

Run it with ``make docs``; a test fails while the picture is stale.
"""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from math import log10
from pathlib import Path
from typing import Final

from protwin.calibration.published.measured_runs import MEASURED_RUNS, MeasuredRun
from protwin.calibration.published.outcome import Outcome

PICTURE: Final = Path(__file__).resolve().parent / "published.svg"

_GROUPS: Final = {
    "FSDP on A100": ("#4c78a8", ("FSDP on A100", "FSDP on 128 A100", "FSDP2 on 64 A100")),
    "FSDP on H100": ("#f58518", ("FSDP on H100", "FSDP on 96 H100", "FSDP2 on H100")),
    "FSDP on H200": ("#b279a2", ("FSDP2 on H200",)),
    "FSDP on MI300X": ("#ff9da6", ("FSDP2 on MI300X",)),
    "FSDP on B200": ("#bab0ac", ("FSDP2 on B200",)),
    "offload": ("#e45756", ("offload",)),
    "QLoRA": ("#eeca3b", ("QLoRA",)),
    "LoRA": ("#54a24b", ("LoRA",)),
    "Megatron": ("#d67195", ("Megatron",)),
    "DeepSpeed": ("#9d755d", ("DeepSpeed",)),
    "DDP": ("#72b7b2", ("DDP",)),
    "one GPU": ("#79706e", ("one GPU", "one A100")),
}
"""Classes that have one of the words; the first group that fits counts."""
_LEFT: Final = 70.0
_RIGHT: Final = 570.0
_TOP: Final = 20.0
_BOTTOM: Final = 480.0
_LEAST_S: Final = 0.06
_MOST_S: Final = 400.0
_TICKS_S: Final = (0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)
_NEAR: Final = 0.15


def main() -> None:
    """Write the picture."""
    PICTURE.write_text(picture(), encoding="utf-8")


def group_of(run: MeasuredRun) -> str:
    """The group of the run's class."""
    return next(name for name, (_, words) in _GROUPS.items() if any(word in run.run_class for word in words))


def picture(outcome: Outcome | None = None) -> str:
    """The picture of an outcome; without one, of the one that comes with protwin."""
    return "\n".join(_lines(outcome or Outcome.shipped())) + "\n"


def _lines(outcome: Outcome) -> Iterator[str]:
    yield (
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 790 540" font-family="sans-serif" font-size="12" '
        'fill="#222">'
    )
    yield "<title>Seconds of a step, predicted from data sheets against measured</title>"
    yield '<rect width="790" height="540" fill="white"/>'
    yield from _frame()
    for run in MEASURED_RUNS:
        if run.iteration_s is None:
            continue
        predicted_s = outcome.predicted[run.id].iteration_s
        told = f"{run.trained}; {run.where}: {run.iteration_s:.3g} s, predicted {predicted_s:.3g} s"
        colour, _ = _GROUPS[group_of(run)]
        yield (
            f'<circle cx="{_x(run.iteration_s):.1f}" cy="{_y(predicted_s):.1f}" r="4" fill="{colour}" '
            f'fill-opacity="0.75" stroke="white" stroke-width="0.5"><title>{escape(told)}</title></circle>'
        )
    timed = [run for run in MEASURED_RUNS if run.iteration_s is not None]
    for place, (name, (colour, _)) in enumerate(_GROUPS.items()):
        y = 40 + 22 * place
        number = sum(group_of(run) == name for run in timed)
        yield f'<circle cx="592" cy="{y}" r="5" fill="{colour}"/>'
        yield f'<text x="604" y="{y + 4}">{escape(name)}: {number}</text>'
    yield f'<text x="592" y="{40 + 22 * len(_GROUPS) + 14}">grey: within {_NEAR:.0%}</text>'
    yield "</svg>"


def _frame() -> Iterator[str]:
    corners = [
        (_LEAST_S, _LEAST_S * (1 + _NEAR)),
        (_MOST_S / (1 + _NEAR), _MOST_S),
        (_MOST_S, _MOST_S),
        (_MOST_S, _MOST_S * (1 - _NEAR)),
        (_LEAST_S / (1 - _NEAR), _LEAST_S),
        (_LEAST_S, _LEAST_S),
    ]
    points = " ".join(f"{_x(x):.1f},{_y(y):.1f}" for x, y in corners)
    yield f'<polygon points="{points}" fill="#ececec"/>'
    yield f'<line x1="{_LEFT}" y1="{_BOTTOM}" x2="{_RIGHT}" y2="{_TOP}" stroke="#888" stroke-dasharray="4 3"/>'
    yield (
        f'<rect x="{_LEFT}" y="{_TOP}" width="{_RIGHT - _LEFT}" height="{_BOTTOM - _TOP}" fill="none" stroke="#888"/>'
    )
    for tick in _TICKS_S:
        yield f'<text x="{_x(tick):.1f}" y="{_BOTTOM + 18}" text-anchor="middle">{tick:g}</text>'
        yield f'<text x="{_LEFT - 8}" y="{_y(tick) + 4:.1f}" text-anchor="end">{tick:g}</text>'
        yield f'<line x1="{_x(tick):.1f}" y1="{_BOTTOM}" x2="{_x(tick):.1f}" y2="{_BOTTOM + 4}" stroke="#888"/>'
        yield f'<line x1="{_LEFT - 4}" y1="{_y(tick):.1f}" x2="{_LEFT}" y2="{_y(tick):.1f}" stroke="#888"/>'
    middle = (_LEFT + _RIGHT) / 2
    yield f'<text x="{middle}" y="{_BOTTOM + 42}" text-anchor="middle">measured seconds of a step</text>'
    yield (
        f'<text x="18" y="{(_TOP + _BOTTOM) / 2}" text-anchor="middle" transform="rotate(-90 18 '
        f'{(_TOP + _BOTTOM) / 2})">predicted seconds of a step</text>'
    )


def _part(seconds: float) -> float:
    """How far along an axis it lies."""
    return log10(seconds / _LEAST_S) / log10(_MOST_S / _LEAST_S)


def _x(seconds: float) -> float:
    return _LEFT + _part(seconds) * (_RIGHT - _LEFT)


def _y(seconds: float) -> float:
    return _BOTTOM - _part(seconds) * (_BOTTOM - _TOP)


if __name__ == "__main__":
    main()
