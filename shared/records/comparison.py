"""The comparison: two records of one plan side by side, above all a prediction and its measurement.

Errors are signed: predicted over measured, minus one.  Where nothing was measured but something predicted the error
has no value (None); where both are zero it is zero.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from enum import StrEnum
from typing import ClassVar, Final

from pydantic import NonNegativeFloat, NonNegativeInt

from ..basics.documents import Document, FrozenModel, Name
from ..basics.errors import ProtwinError
from ..basics.interval import Interval
from ..schema.record import Origin, Record, TaskTiming
from ..schema.schedule import Lane, Memory, TaskKind, in_kind_order

MIN_TOLERANCE_FRAC: Final = 0.10
"""Tasks that differ by less are not said to part, however quiet the machine."""
_NUM_LARGEST: Final = 5


class TimePair(FrozenModel):
    """One time, predicted and measured."""

    predicted_s: NonNegativeFloat
    measured_s: NonNegativeFloat
    error_frac: float | None
    interval_s: Interval | None = None
    """Where the measured one was expected; None where the prediction does not say."""

    @property
    def is_inside(self) -> bool | None:
        """Whether it was measured there; None without an interval."""
        return None if self.interval_s is None else self.interval_s.contains(self.measured_s)


class BytesPair(FrozenModel):
    """One size, predicted and measured."""

    predicted_bytes: NonNegativeInt
    measured_bytes: NonNegativeInt
    error_frac: float | None
    interval_bytes: Interval | None = None
    """Where the measured one was expected; None where the prediction does not say."""

    @property
    def is_inside(self) -> bool | None:
        """Whether it was measured there; None without an interval."""
        return None if self.interval_bytes is None else self.interval_bytes.contains(self.measured_bytes)


class KindComparison(FrozenModel):
    """All tasks of one kind."""

    kind: TaskKind
    num_predicted: NonNegativeInt
    num_measured: NonNegativeInt
    duration: TimePair
    """Durations summed."""


class LaneComparison(FrozenModel):
    """One lane."""

    lane: Lane
    busy: TimePair


class Difference(StrEnum):
    """In what two timings of one task differ beyond the tolerance."""

    START = "start"
    """By more than the tolerance times the measured iteration: starts have no scale of their own."""
    DURATION = "duration"
    """By more than the tolerance times the measured duration."""


class TaskComparison(FrozenModel):
    """One task in both records."""

    task: NonNegativeInt
    name: str
    kind: TaskKind
    lane: Lane
    predicted_start_s: float
    measured_start_s: float
    duration: TimePair
    differs_in: tuple[Difference, ...]


class RankComparison(FrozenModel):
    """One of several ranks; its prediction is that of a rank like it."""

    rank: NonNegativeInt
    """Its number."""
    name: Name = ""
    """What tells it from the others in words: its host."""
    iteration: TimePair
    """Mean seconds from one start of its first compute task to the next."""
    computing: TimePair
    """Tasks of its compute lane together."""
    waiting: TimePair
    """For other ranks, on the collective lane."""
    peak_device: BytesPair | None
    """None if one of the records does not hold that memory."""


class Comparison(Document):
    """Two records of one plan."""

    KIND: ClassVar[str] = "comparison"
    TABLES: ClassVar[str] = "tables.comparison:comparison_tables"

    plan_id: str
    model_name: str
    predicted_hardware: str
    measured_hardware: str
    machine: str
    """The machine that measured."""
    iteration: TimePair
    noise_frac: NonNegativeFloat
    """Noise of the measured iteration time, as its record has it."""
    tolerance_frac: NonNegativeFloat
    """The larger of 10 % and twice the noise."""
    forward: TimePair
    backward: TimePair
    optimizer: TimePair
    """From the end of backward to the start of the next iteration."""
    peak_device: BytesPair | None
    """None if one of the records does not hold that memory; likewise below."""
    peak_pinned: BytesPair | None
    kinds: tuple[KindComparison, ...]
    lanes: tuple[LaneComparison, ...]
    first_parting: TaskComparison | None
    """The task of the earliest predicted start that differs beyond the tolerance; None if none does."""
    largest_differences: tuple[TaskComparison, ...]
    """Up to five tasks whose durations differ by the most seconds, largest first."""
    only_predicted: tuple[str, ...]
    """Names of tasks that the measured record lacks."""
    only_measured: tuple[str, ...]
    rank: NonNegativeInt = 0
    """The measured rank that everything above is of, where several were: the one that waits least for the others."""
    ranks: tuple[RankComparison, ...] = ()
    """Every measured rank, where several were."""


def signed_error_frac(predicted: float, measured: float) -> float | None:
    """``predicted / measured - 1``; 0 if both are 0, None if only ``measured`` is or the ratio overflows."""
    if measured == 0:
        return 0.0 if predicted == 0 else None
    error_frac = predicted / measured - 1
    return error_frac if math.isfinite(error_frac) else None


def compare_records(predicted: Record, measured: Record) -> Comparison:
    """Lay two records of one plan side by side.

    Of several measured ranks the slowest is laid beside the prediction of a rank like it, and each in ``ranks``.
    Raises ProtwinError if they follow different plans, if they are given in the wrong order, or if they name one task
    differently.
    """
    _check_pair(predicted, measured)
    ranks = _compare_ranks(predicted, measured)
    predicted = predicted.of_rank(measured.rank)
    tolerance_frac = max(MIN_TOLERANCE_FRAC, 2 * measured.iteration_noise_frac)
    tasks = _compare_tasks(predicted, measured, tolerance_frac)
    return Comparison(
        plan_id=predicted.plan_id,
        model_name=predicted.model_name,
        predicted_hardware=predicted.hardware_name,
        measured_hardware=measured.hardware_name,
        machine=measured.machine,
        iteration=_times(predicted.iteration_s, measured.iteration_s, predicted.iteration_interval_s),
        noise_frac=measured.iteration_noise_frac,
        tolerance_frac=tolerance_frac,
        forward=_times(predicted.forward_s, measured.forward_s),
        backward=_times(predicted.backward_s, measured.backward_s),
        optimizer=_times(predicted.optimizer_s, measured.optimizer_s),
        peak_device=_peaks(predicted, measured, Memory.DEVICE),
        peak_pinned=_peaks(predicted, measured, Memory.PINNED_HOST),
        kinds=_compare_kinds(predicted, measured),
        lanes=tuple(
            LaneComparison(lane=lane, busy=_times(predicted.lane(lane).busy_s, measured.lane(lane).busy_s))
            for lane in (measured if len(measured.lanes_shown) > len(predicted.lanes_shown) else predicted).lanes_shown
        ),
        first_parting=next((task for task in tasks if task.differs_in), None),
        largest_differences=_largest(tasks),
        only_predicted=_missing(predicted, measured),
        only_measured=_missing(measured, predicted),
        rank=measured.rank,
        ranks=ranks,
    )


def _compare_ranks(predicted: Record, measured: Record) -> tuple[RankComparison, ...]:
    compared = []
    for one in measured.ranks:
        left, right = predicted.of_rank(one.rank), measured.of_rank(one.rank)
        predicted_waits_s = sum(found.waited_s for found in predicted.ranks if found.rank == left.rank)
        compared.append(
            RankComparison(
                rank=one.rank,
                name=one.name,
                iteration=_times(left.iteration_s, right.iteration_s),
                computing=_times(left.lane(Lane.COMPUTE).busy_s, right.lane(Lane.COMPUTE).busy_s),
                waiting=_times(predicted_waits_s, one.waited_s),
                peak_device=_peaks(left, right, Memory.DEVICE),
            )
        )
    return tuple(compared)


def _check_pair(predicted: Record, measured: Record) -> None:
    if predicted.plan_id != measured.plan_id:
        raise ProtwinError(
            f"the records follow different plans: the predicted one {predicted.plan_id}, the measured one "
            f"{measured.plan_id}. Simulate the plan that was run, then compare again."
        )
    if predicted.origin is Origin.MEASURED and measured.origin is Origin.SIMULATED:
        raise ProtwinError("the first record is measured and the second simulated. Give the prediction first.")
    name_of = {timing.task: timing.name for timing in predicted.tasks}
    for timing in measured.tasks:
        name = name_of.get(timing.task, timing.name)
        if name != timing.name:
            raise ProtwinError(
                f"task {timing.task} of plan {measured.plan_id} is {name!r} in the predicted record and "
                f"{timing.name!r} in the measured one. They come from different releases: make both again."
            )


def _times(predicted_s: float, measured_s: float, interval_s: Interval | None = None) -> TimePair:
    return TimePair(
        predicted_s=predicted_s,
        measured_s=measured_s,
        error_frac=signed_error_frac(predicted_s, measured_s),
        interval_s=interval_s,
    )


def _peaks(predicted: Record, measured: Record, memory: Memory) -> BytesPair | None:
    predicted_curve, measured_curve = predicted.curve(memory), measured.curve(memory)
    if predicted_curve is None or measured_curve is None:
        return None
    return BytesPair(
        predicted_bytes=predicted_curve.peak_bytes,
        measured_bytes=measured_curve.peak_bytes,
        error_frac=signed_error_frac(predicted_curve.peak_bytes, measured_curve.peak_bytes),
        interval_bytes=predicted.peak_interval_bytes if memory is Memory.DEVICE else None,
    )


def _compare_kinds(predicted: Record, measured: Record) -> tuple[KindComparison, ...]:
    """Kinds that occur in either record, in their order."""
    compared = []
    for kind in in_kind_order(timing.kind for timing in (*predicted.tasks, *measured.tasks)):
        left = [timing.duration_s for timing in predicted.tasks if timing.kind is kind]
        right = [timing.duration_s for timing in measured.tasks if timing.kind is kind]
        duration = _times(sum(left), sum(right))
        compared.append(KindComparison(kind=kind, num_predicted=len(left), num_measured=len(right), duration=duration))
    return tuple(compared)


def _compare_tasks(predicted: Record, measured: Record, tolerance_frac: float) -> list[TaskComparison]:
    """Tasks that both records hold, by predicted start."""
    measured_of = {timing.task: timing for timing in measured.tasks}
    in_order = sorted(predicted.tasks, key=lambda timing: (timing.start_s, timing.task))
    return [
        _compare_task(timing, measured_of[timing.task], tolerance_frac, measured.iteration_s)
        for timing in in_order
        if timing.task in measured_of
    ]


def _compare_task(
    predicted: TaskTiming, measured: TaskTiming, tolerance_frac: float, iteration_s: float
) -> TaskComparison:
    differs_in = []
    if abs(predicted.start_s - measured.start_s) > tolerance_frac * iteration_s:
        differs_in.append(Difference.START)
    if abs(predicted.duration_s - measured.duration_s) > tolerance_frac * measured.duration_s:
        differs_in.append(Difference.DURATION)
    return TaskComparison(
        task=predicted.task,
        name=predicted.name,
        kind=predicted.kind,
        lane=predicted.lane,
        predicted_start_s=predicted.start_s,
        measured_start_s=measured.start_s,
        duration=_times(predicted.duration_s, measured.duration_s),
        differs_in=tuple(differs_in),
    )


def _largest(tasks: Sequence[TaskComparison]) -> tuple[TaskComparison, ...]:
    def gap_s(task: TaskComparison) -> float:
        return abs(task.duration.predicted_s - task.duration.measured_s)

    return tuple(sorted((task for task in tasks if gap_s(task) > 0), key=lambda task: -gap_s(task))[:_NUM_LARGEST])


def _missing(record: Record, other: Record) -> tuple[str, ...]:
    present = {timing.task for timing in other.tasks}
    return tuple(timing.name for timing in record.tasks if timing.task not in present)
