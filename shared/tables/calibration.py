"""A calibration as tables for people."""

from __future__ import annotations

from rich.console import RenderableType
from rich.text import Text

from ..basics.units import format_seconds
from ..schema.calibration import Calibration
from ..schema.schedule import LANES_ALONE
from .labels import KIND_NAMES, LANE_NAMES
from .style import add_row, plain_table, spaced, titled


def calibration_tables(calibration: Calibration) -> RenderableType:
    """The factor of every task kind and the slowdowns of every measured set of lanes."""
    factors = plain_table("task kind", ">factor", ">± 1 sigma", ">overhead", ">tasks")
    for kind, factor in calibration.factors.items():
        add_row(
            factors,
            KIND_NAMES[kind],
            f"{factor.value:.3f}",
            f"{factor.relative_std * factor.value:.3f}",
            format_seconds(calibration.overhead_s.get(kind, 0.0)),
            str(factor.num_pairs),
        )
    slowdowns = plain_table(*(f">{LANE_NAMES[lane]}" for lane in LANES_ALONE))
    for entry in calibration.contention:
        by_lane = dict(zip(entry.lanes, entry.slowdowns, strict=True))
        add_row(slowdowns, *(f"{by_lane[lane]:.2f}" if lane in by_lane else "" for lane in LANES_ALONE))
    return spaced(
        (
            titled(f"Calibration of {calibration.hardware_name}", factors),
            titled("Slowdown of lanes that run side by side", slowdowns),
            Text(f"Run-to-run noise of an iteration: {calibration.iteration_noise_frac:.1%}"),
        )
    )
