"""Sections of ``docs/results.md`` about plain trainings on a GPU beside what its data sheet predicts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

_GIB = 2**30


def sheets(content: Any) -> Iterator[str]:
    """Measured and predicted seconds and peaks of every training, whole and by kind of kernel; then kernels alone."""
    of_each = " | ".join(f"{figure} | predicted | error" for figure in ("step", "allocated, GiB", "reserved, GiB"))
    yield f"| training | {of_each} |"
    yield f"| --- |{' ---: |' * 9}"
    for step in content["steps"]:
        guess = step["predicted"]
        seconds = f"{1e3 * step['seconds']:.1f} ms | {1e3 * guess['seconds']:.1f} ms"
        cells = [seconds, f"{guess['seconds'] / step['seconds'] - 1:+.1%}"]
        for key in ("allocated_bytes", "reserved_bytes"):
            cells += [f"{step[key] / _GIB:.2f} | {guess[key] / _GIB:.2f}", f"{guess[key] / step[key] - 1:+.1%}"]
        yield f"| {step['name']} | {' | '.join(cells)} |"
    yield ""
    kinds = ("products", "attention", "others", "optimizer")
    yield f"| predicted of measured ms of kernels | {' | '.join(kinds)} |"
    yield f"| --- |{' ---: |' * len(kinds)}"
    for step in content["steps"]:
        pairs = ((step["predicted"]["kinds"].get(kind, 0.0), step["kinds"].get(kind, 0.0)) for kind in kinds)
        yield f"| {step['name']} | {' | '.join(f'{1e3 * a:.1f} of {1e3 * b:.1f}' for a, b in pairs)} |"
    yield ""
    for row in content["sustained"]:
        rates, board = row["tflop_per_s"], row["board"]
        later = [rate for when, rate in rates if when > rates[-1][0] / 2]
        clocks = [sample[2] for sample in board[len(board) // 2 :]]
        watts = [sample[1] for sample in board[len(board) // 2 :]]
        yield (
            f"- {row['what']}, over and over: {sum(later) / len(later):.0f} TFLOP/s after {rates[-1][0] / 2:.0f} s, "
            f"at {sum(clocks) / len(clocks):.0f} MHz and {sum(watts) / len(watts):.0f} W."
        )
    fixed = next(row for row in content["kernels"] if row["what"].startswith("operation that does nothing"))
    yield f"- An operation that does nothing takes the host {1e6 * fixed['seconds']:.1f} µs."
    yield ""
    yield "| kernel by itself | µs | TFLOP/s | TB/s |"
    yield "| --- | ---: | ---: | ---: |"
    for row in content["kernels"]:
        if "seconds" in row and row is not fixed:
            flops, moved = (f"{row[key]:.3g}" if key in row else "–" for key in ("tflop_per_s", "tb_per_s"))
            yield f"| {row['what']} | {1e6 * row['seconds']:.0f} | {flops} | {moved} |"
