"""A calibration as tables for people."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.table import Table

from ..shared.calibration import Calibration
from ..shared.schedule import Lane
from ..shared.units import format_seconds


def calibration_tables(calibration: Calibration) -> RenderableType:
    """The factor of every task kind and the slowdowns of every measured set of lanes."""
    factors = Table(title=f"calibration of {calibration.hardware_name}", title_justify="left")
    factors.add_column("task kind")
    for heading in ("factor", "± 1 sigma", "overhead", "tasks"):
        factors.add_column(heading, justify="right")
    for kind, factor in calibration.factors.items():
        factors.add_row(
            kind,
            f"{factor.value:.3f}",
            f"{factor.relative_std * factor.value:.3f}",
            format_seconds(calibration.overhead_s.get(kind, 0.0)),
            str(factor.num_pairs),
        )
    slowdowns = Table(title="slowdown of lanes that run side by side", title_justify="left")
    for lane in Lane:
        slowdowns.add_column(lane, justify="right")
    for entry in calibration.contention:
        by_lane = dict(zip(entry.lanes, entry.slowdowns, strict=True))
        slowdowns.add_row(*(f"{by_lane[lane]:.2f}" if lane in by_lane else "" for lane in Lane))
    noise = f"run-to-run noise of an iteration: {calibration.iteration_noise_frac:.1%}"
    return Group(factors, slowdowns, noise)
