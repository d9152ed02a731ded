"""Draw docs/iteration.svg: one simulated iteration of gpt2 under a plan that uses every mechanism once.

Run it with ``make docs``; a test fails while the picture is stale.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Final

from protwin.shared import Lane, Plan, Record, TaskKind, format_bytes, load_hardware, load_workload
from protwin.sim import simulate

PICTURE: Final = Path(__file__).resolve().parent / "iteration.svg"

_LEFT_PX: Final = 112.0
_RIGHT_PX: Final = 1180.0
_TOP_PX: Final = 64.0
_LANE_PX: Final = 46.0
_BAR_PX: Final = 24.0
_MEMORY_PX: Final = 84.0
_DIGIT_PX: Final = 6.2
"""Width of one digit of a bar's label."""

_LANES: Final = {
    Lane.COMPUTE: "compute",
    Lane.H2D: "host to device",
    Lane.D2H: "device to host",
    Lane.CPU_OPTIM: "CPU Adam",
}
_COLOURS: Final = {
    TaskKind.FORWARD: ("#4c78a8", "forward"),
    TaskKind.RECOMPUTE: ("#9ecae9", "recompute"),
    TaskKind.BACKWARD: ("#54a24b", "backward"),
    TaskKind.DEVICE_ADAM: ("#79706e", "device Adam"),
    TaskKind.GATHER: ("#f58518", "gather"),
    TaskKind.GRADIENT_OFFLOAD: ("#e45756", "gradient offload"),
    TaskKind.CPU_ADAM: ("#b279a2", "CPU Adam"),
    TaskKind.ACTIVATION_OFFLOAD: ("#eeca3b", "swap out"),
    TaskKind.ACTIVATION_FETCH: ("#bab0ac", "swap in"),
}


def main() -> None:
    """Write the picture."""
    PICTURE.write_text(picture(), encoding="utf-8")


def record() -> Record:
    """The iteration that is drawn: 4 of 14 chunks persistent, 1 block swapped, 5 checkpointed, 6 kept."""
    workload = load_workload("gpt2", batch_size=4, sequence_length=1024)
    plan = Plan(
        workload_id=workload.identity,
        chunk_bytes=2**25,
        n_persist=4,
        n_buffer=5,
        prefetch_depth=1,
        n_swap=1,
        n_checkpoint=5,
    )
    return simulate(plan, workload, load_hardware("rtx-3090"))


def picture() -> str:
    """The picture as text."""
    drawn = record()
    bottom = _TOP_PX + len(_LANES) * _LANE_PX + 26 + _MEMORY_PX
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 1200 {bottom + 40:g}" '
        'font-family="system-ui, sans-serif" font-size="13" fill="#222">',
        '<rect width="1200" height="100%" rx="8" fill="#fff"/>',
        *_legend(drawn),
        *_lanes(drawn),
        *_memory(drawn, bottom),
        *_axis(drawn, bottom),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _x(drawn: Record, at_s: float) -> float:
    return _LEFT_PX + at_s / drawn.iteration_s * (_RIGHT_PX - _LEFT_PX)


def _legend(drawn: Record) -> Iterator[str]:
    present = {task.kind for task in drawn.tasks}
    at_px = 16.0
    for kind, (colour, words) in _COLOURS.items():
        if kind in present:
            yield f'<rect x="{at_px:.1f}" y="18" width="14" height="14" rx="2" fill="{colour}"/>'
            yield f'<text x="{at_px + 20:.1f}" y="30">{words}</text>'
            at_px += 44 + 6.6 * len(words)


def _lanes(drawn: Record) -> Iterator[str]:
    for row, (lane, words) in enumerate(_LANES.items()):
        top = _TOP_PX + row * _LANE_PX
        yield f'<text x="{_LEFT_PX - 12:g}" y="{top + 17:g}" text-anchor="end">{words}</text>'
        line = top + _BAR_PX + 1
        yield f'<path d="M{_LEFT_PX:g} {line:g}H{_RIGHT_PX:g}" stroke="#ccc"/>'
        for task in drawn.tasks:
            if task.lane is not lane:
                continue
            begin, end = _x(drawn, task.start_s), _x(drawn, task.end_s)
            colour = _COLOURS[task.kind][0]
            yield (
                f'<rect x="{begin:.1f}" y="{top:g}" width="{max(end - begin - 0.6, 0.8):.1f}" height="{_BAR_PX:g}" '
                f'fill="{colour}"><title>{task.name}</title></rect>'
            )
            number = task.name.rsplit(" ", 1)[1] if " " in task.name else ""
            if number.isdigit():
                middle = (begin + end) / 2
                inside = end - begin > _DIGIT_PX * len(number) + 2
                yield (
                    f'<text x="{middle:.1f}" y="{top + (16 if inside else -4):g}" text-anchor="middle" '
                    f'font-size="10">{number}</text>'
                )


def _memory(drawn: Record, bottom: float) -> Iterator[str]:
    curve = drawn.memory[0]
    highest = max(curve.levels_bytes)
    heights = [level / highest * (_MEMORY_PX - 6) for level in curve.levels_bytes]
    path = f"M{_x(drawn, curve.times_s[0]):.1f} {bottom:g}"
    for at_s, height in zip(curve.times_s, heights, strict=True):
        path += f"H{_x(drawn, at_s):.1f}V{bottom - height:.1f}"
    path += f"H{_RIGHT_PX:g}V{bottom:g}Z"
    yield f'<text x="{_LEFT_PX - 12:g}" y="{bottom - 46:g}" text-anchor="end">device</text>'
    yield f'<text x="{_LEFT_PX - 12:g}" y="{bottom - 30:g}" text-anchor="end">memory</text>'
    yield f'<path d="{path}" fill="#dbe5f1" stroke="#4c78a8"/>'
    at = _x(drawn, curve.times_s[curve.levels_bytes.index(highest)])
    words = f"peak {format_bytes(curve.peak_bytes)}"
    yield f'<text x="{at - 6:.1f}" y="{bottom - _MEMORY_PX + 14:g}" text-anchor="end" font-size="12">{words}</text>'


def _axis(drawn: Record, bottom: float) -> Iterator[str]:
    yield f'<path d="M{_LEFT_PX:g} {bottom:g}H{_RIGHT_PX:g}" stroke="#666"/>'
    step_s = 0.02
    for place in range(int(drawn.iteration_s / step_s) + 1):
        at = _x(drawn, place * step_s)
        yield f'<path d="M{at:.1f} {bottom:g}v5" stroke="#666"/>'
        label = f"{place * step_s * 1000:.0f}" + (" ms" if place == 0 else "")
        yield f'<text x="{at:.1f}" y="{bottom + 20:g}" text-anchor="middle" font-size="12">{label}</text>'


if __name__ == "__main__":
    main()
