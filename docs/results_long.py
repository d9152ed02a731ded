"""The section of docs/results.md on tiles at a long sequence; ``results_page.py`` runs it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from protwin.shared import format_bytes


def peers_of_long(content: Any) -> Iterator[str]:
    """Per contestant, step time and peak, and ours over those of the peer in the row before."""
    figures = ("step", "peer = 1", "spread", "of the processor", "peer = 1", "peak", "peer = 1", "loss difference")
    yield f"| contestant | how | {' | '.join(figures)} |"
    yield f"| --- | --- |{' ---: |' * len(figures)}"
    for one in content["contestants"]:
        if one["failure"]:
            yield f"| {one['name']} | {one['failure']} | | | | | | | | |"
            continue
        told = (
            f"{one['median_step_s']:.2f} s",
            _ratio(one["times_peer"]),
            f"{one['spread_frac'] * 100:.1f} %",
            f"{one['median_processor_s']:.2f} s",
            _ratio(one["processor_times_peer"]),
            format_bytes(one["peak_bytes"]),
            _ratio(one["peak_times_peer"]),
            "" if one["largest_loss_difference"] is None else f"{one['largest_loss_difference']:.1g}",
        )
        yield f"| {one['name']} | {one['about']} | {' | '.join(told)} |"
    yield (
        f"\nAll train a {content['model']}, one sequence of {content['sequence_length']:,} tokens, "
        f"{content['num_tiles']} tiles, with {content['threads_per_process']} thread per process. The peer of a row is "
        f"in the row above it. Ratios of times are medians over the rounds; seconds of the processor are of all "
        f"threads, and others on the machine change them little. Peaks are of one ledger that watches every "
        f"operation of a step: everything is on the device, weights and optimizer included; of two ranks it is the "
        f"larger one's. Losses are held against the first row's."
    )


def _ratio(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"
