"""What the tasks of one kind cost: a factor of their modelled seconds, some for each, and some for bytes that came.

[Note: Slope or intercept]
Tasks that are alike cannot tell what grows with a task's work from what every task costs alike.  Taken for the one, it
is carried to models with other tasks as the other.  So an intercept is held to be small until tasks of different sizes
tell more: the estimate that is most probable if errors grow with the root of a task's work, and intercepts scatter by
what starting a task takes (``_STARTING_S``) and a share of the task: what it finds cold, or waits for another thread.
Of tasks that have hardly any work, next to what starting them takes, all is overhead then, whatever many of them would
say: a slope that makes their microseconds of work the milliseconds that they take is a hundred, and a larger model's
copies would be said to take a hundred times what its link does.  So a slope is held to be about 1, the less firmly the
longer tasks are (``work_prior``).

[Note: Cold reads]
What a copy has just written is in no cache of the core that computes with it, or in those of another core.  A task that
is the first to read it pays for that, by the byte.  Phases are measured with everything in place, so that no factor of
them holds it, and plans differ in how much arrives: a factor that does holds for none of them.  Until tasks with and
without such bytes tell more, a byte is held to cost nothing, give or take a few reads of it at the bandwidth of the
memory that it lies in (``cold_read_prior``): one core that waits for lines of another one's cache has a share of that
bandwidth.  Where every task of a kind has bytes in proportion to its work, as CPU Adam has of the gradients that it
steps with, nothing tells the two apart, and the slope holds both: such kinds have no coefficient of their own.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from types import MappingProxyType
from typing import Final

import numpy as np

from ...shared.basics.errors import CalibrationError
from ...shared.schema.hardware import Hardware
from ...shared.schema.schedule import TaskKind
from .linear import Estimate, FloatArray, IntArray, Prior, estimate

_STARTING_S: Final = 3e-4
"""Hooks, launches and a thread's wake-up, as far as one knows before measuring ([Note: Slope or intercept])."""
_STARTING_FRAC: Final = 0.3
"""Of a usual task of the kind, on top."""
_DESCRIBED_STD: Final = 2.0
"""Of a slope, before tasks with work tell: descriptions of machines that nobody has measured are off by up to two to
four times (``sim/engine/error_sources.py``)."""
_COLD_READS: Final = 4.0
"""Of two cores of an AMD EPYC, 1.5 to 9 were measured, with an error of 1 to 2."""
LOWEST: Final = 0.02
_TELLING_S: Final = 1e-3
"""Tasks that should take less in all say nothing of whose machine it is: a clock's own error is as long."""


class Coefficient(StrEnum):
    """Of a kind's seconds: modelled seconds * slope + overhead_s + arrived bytes * arrival_s_per_byte."""

    SLOPE = "slope"
    OVERHEAD_S = "overhead_s"
    ARRIVAL_S_PER_BYTE = "arrival_s_per_byte"


Priors = Mapping[str, Prior]
"""By ``Coefficient``."""
NOTHING_KNOWN: Final[Priors] = MappingProxyType({})


def starting_prior(usual_s: float) -> Prior:
    """What a task of a kind that usually takes ``usual_s`` costs however small it is ([Note: Slope or intercept])."""
    return Prior(0.0, _STARTING_S + _STARTING_FRAC * usual_s)


def work_prior(work_s: float) -> Prior:
    """What a second of work takes, of a kind whose tasks have ``work_s`` of it; see [Note: Slope or intercept]."""
    return Prior(1.0, _DESCRIBED_STD * (1 + work_s / _STARTING_S))


def cold_read_prior(hardware: Hardware) -> Prior:
    """What a byte that has just come to the device costs its first reader: 0 s, give or take a few reads of it."""
    return Prior(0.0, _COLD_READS / hardware.device.memory_bandwidth_bytes_per_s)


def estimate_tasks(
    kind: TaskKind,
    modelled_s: FloatArray,
    arrived_bytes: FloatArray,
    measured_s: FloatArray,
    hardware: Hardware,
    priors: Priors = NOTHING_KNOWN,
    runs: IntArray | None = None,
    run_std_frac: float = 0.0,
) -> Estimate:
    """The coefficients of tasks of one kind; (n,) each of what they should take, read first, and took.

    ``priors`` stand in the place of [Note: Slope or intercept] and [Note: Cold reads], for instance those of an earlier
    calibration.  ``runs``: (n,) which run each task is of; ``run_std_frac``: what runs as a whole differ by.
    Where no task has modelled seconds, all that they take is overhead, by the median.
    Raises CalibrationError if the slope is far below what the hardware's description allows.
    """
    present = modelled_s > 0
    if not present.any():
        return _of_overhead_alone(measured_s)
    x, y, arrived = modelled_s[present], measured_s[present], arrived_bytes[present]
    alone = float(y.sum() / x.sum())
    if alone < LOWEST and x.sum() >= _TELLING_S:
        raise CalibrationError(
            f"{kind} took {alone:.3g} times what the hardware's description says. It describes another machine: probe "
            f"this one (protwin hardware probe)."
        )
    alone = max(alone, LOWEST)
    columns: dict[str, FloatArray] = {Coefficient.SLOPE: x, Coefficient.OVERHEAD_S: np.ones_like(x)}
    row_weights = scatter(x) ** -2
    known: dict[str, Prior] = {
        Coefficient.SLOPE: work_prior(float((x**2 @ row_weights) / (x @ row_weights))),
        Coefficient.OVERHEAD_S: starting_prior(float(np.median(y))),
    }
    if arrived.any() or Coefficient.ARRIVAL_S_PER_BYTE in priors:
        columns[Coefficient.ARRIVAL_S_PER_BYTE] = arrived
        known[Coefficient.ARRIVAL_S_PER_BYTE] = cold_read_prior(hardware)
    of_run = None if runs is None else runs[present]
    found = estimate(columns, y, 1 / scatter(x), known | dict(priors), of_run, run_std_frac)
    if found[Coefficient.SLOPE] < LOWEST:
        values = np.zeros_like(found.values)
        values[:2] = without_growth(alone, float(x @ row_weights), float(y @ row_weights), float(row_weights.sum()))
        return Estimate(found.names, values, found.covariance, found.num_rows)
    return found


def without_growth(alone: float, work: float, taken: float, weight: float) -> tuple[float, float]:
    """Slope and overhead of tasks whose cost does not grow with their work: a slope must be something all the same.

    It is ``alone``, what seconds are over modelled ones, but not more than the description says: the rest is overhead.
    ``work``, ``taken`` and ``weight`` are sums over tasks of modelled and measured seconds and of 1, with the weights
    of ``scatter``.
    """
    slope = min(alone, 1.0)
    return slope, max(0.0, (taken - slope * work) / weight)


def scatter(modelled_s: FloatArray) -> FloatArray:
    """Of tasks that should take so long, in proportion to their errors' standard deviation; by it rows are weighted.

    A task's variance grows with its duration, and starting it is part of that: otherwise tasks that have hardly any
    work would say alone what all the others' overhead is.
    """
    found: FloatArray = np.sqrt(modelled_s + _STARTING_S)
    return found


def _of_overhead_alone(measured_s: FloatArray) -> Estimate:
    """Half of the measurements take longer."""
    variance = float(np.var(measured_s)) / len(measured_s)
    value = np.array([float(np.median(measured_s))])
    return Estimate((Coefficient.OVERHEAD_S,), value, np.array([[variance]]), len(measured_s))
