"""A calibration as tables for people."""

from __future__ import annotations

from typing import Final

from ..basics.units import format_seconds
from ..schema.calibration import Calibration
from ..schema.schedule import LANES_ALONE, Lane, TaskKind
from .labels import LANE_NAMES, kind_name
from .table import Parts, Table

_MIB: Final = 2**20
_USUAL: Final = (
    TaskKind.FORWARD,
    TaskKind.RECOMPUTE,
    TaskKind.BACKWARD,
    TaskKind.GATHER,
    TaskKind.GRADIENT_OFFLOAD,
    TaskKind.CPU_ADAM,
    TaskKind.DEVICE_ADAM,
    TaskKind.ACTIVATION_OFFLOAD,
    TaskKind.ACTIVATION_FETCH,
    TaskKind.GRADIENT_ACCUMULATE,
    TaskKind.GRADIENT_NORM,
)
"""Kinds of tasks of plans for one rank without a disk."""


def calibration_tables(calibration: Calibration) -> Parts:
    """The factor of every task kind and the slowdowns of every measured set of lanes."""
    factors = [
        (
            kind_name(kind),
            f"{factor.value:.3f}",
            f"{factor.relative_std * factor.value:.3f}",
            format_seconds(_from_a_nanosecond(calibration.overhead_s.get(kind, 0.0))),
            _per_mib(calibration, kind),
            str(factor.num_pairs),
        )
        for kind, factor in calibration.factors.items()
    ]
    measured = {lane for entry in calibration.contention for lane in entry.lanes}
    lanes = [lane for lane in Lane if lane in LANES_ALONE or lane in measured]
    slowdowns = [
        tuple(f"{by_lane[lane]:.2f}" if lane in by_lane else "" for lane in lanes)
        for by_lane in (dict(zip(entry.lanes, entry.slowdowns, strict=True)) for entry in calibration.contention)
    ]
    return (
        Table(
            title=f"Calibration of {calibration.hardware_name}",
            columns=("task kind", ">factor", ">± 1 sigma", ">overhead", ">per MiB that came", ">tasks"),
            rows=factors,
        ),
        Table(
            title="Slowdown of lanes that run side by side",
            columns=tuple(f">{LANE_NAMES[lane]}" for lane in lanes),
            rows=slowdowns,
        )
        if slowdowns
        else "Slowdown of lanes that run side by side: not measured; taken from the hardware's description",
        *_unknown(calibration),
        f"Run-to-run noise of an iteration: {calibration.iteration_noise_frac:.1%}",
        _error(calibration),
        *_transfer(calibration),
    )


def _from_a_nanosecond(seconds: float) -> float:
    """Less is rounding of an estimate that is nothing."""
    return seconds if seconds >= 1e-9 else 0.0


def _unknown(calibration: Calibration) -> list[str]:
    """Kinds of tasks of one rank that no run had: what counts for them, and how little is known then."""
    unseen = [kind for kind in _USUAL if kind not in calibration.factors]
    if not unseen:
        return []
    told = [
        kind_name(kind)
        if calibration.fitted_kind(kind) is kind or calibration.fitted_kind(kind) not in calibration.factors
        else f"{kind_name(kind)} (as {kind_name(calibration.fitted_kind(kind))})"
        for kind in unseen
    ]
    return [f"No run had tasks of these kinds, so plans with them are predicted less surely: {', '.join(told)}"]


def _error(calibration: Calibration) -> str:
    """How far it was off for plans that it had not seen."""
    found_frac = calibration.iteration_error_frac
    known = "not known yet" if found_frac is None else f"{found_frac:.1%} (root mean square)"
    return f"Error of an iteration that it was not fitted to: {known}"


def _transfer(calibration: Calibration) -> list[str]:
    """How far it was off for models that it had not seen."""
    found_frac, number = calibration.transfer_error_frac, calibration.num_transfers
    if found_frac is None:
        return []
    return [f"Error for a model that it was not fitted to: {found_frac:.1%} ({number} left out)"]


def _per_mib(calibration: Calibration, kind: TaskKind) -> str:
    """What a task of ``kind`` pays for a MiB that it is the first to read."""
    rate, std = calibration.arrival_s_per_byte.get(kind), calibration.arrival_std_s_per_byte.get(kind, 0.0)
    return "" if rate is None else f"{format_seconds(rate * _MIB)} ± {format_seconds(std * _MIB)}"
