"""What compute waits for in each phase: every second in which it stands still, by the task that ran and held it up.

[Note: The chain of waits]
A compute task that starts late was held up by the last to end of what it waits for and of the task before it on its
lane.  While that one ran, it is the cause.  Before it started it was held up itself, by the same rule; so the chain is
followed back until it has covered the whole gap between two compute tasks.  A gap of 100 ms before a forward is thus
30 ms of its gather and 70 ms of the CPU Adam step that the gather waited for.  Every second has one cause, so causes
add up to the gap.  Of tasks that end at the same instant, one that is waited for in this iteration counts before one
of the previous iteration, and this one before the task before it on the lane.

Where the chain comes to a collective that began late because other ranks came to it late, that time is a wait for
ranks.

It is the critical path of the iteration as it ran: shortening the cause shortens the wait until another chain is as
long.  No compute task is ever a cause, since all that a compute task can wait for through other tasks has ended when
the compute task before it ends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Final

from ..schema.record import IterationPhase, PhaseWait, TaskTiming
from ..schema.schedule import Lane, Schedule, TaskId, TaskKind
from .phase_times import phase_spans_s

Span = tuple[float, float]
"""Start and end, in seconds."""
SpanOf = Callable[[int, TaskId], Span | None]
"""The span of a task in the iteration that is looked at (0), in those before it (-1, ...) and in the next one (1); None
for iterations that are not known."""
_Occurrence = tuple[int, TaskId]
_Cause = tuple[TaskKind | None, bool]
"""The kind of what runs, if anything does; else whether other ranks had not come to a collective."""
_PHASES: Final = tuple(IterationPhase)
_ROUNDING_FRAC: Final = 1e-12
"""Of the iteration: waits below are differences of rounded times."""


def phase_waits(
    schedule: Schedule,
    span_of: SpanOf,
    window_s: Span,
    rank_waits_s: Mapping[TaskId, float] = MappingProxyType({}),
) -> tuple[PhaseWait, ...]:
    """Seconds of every phase in which compute waits, by cause; see [Note: The chain of waits].

    ``window_s``: begin and end of the iteration.  ``rank_waits_s``: of collectives that begin when the last of several
    ranks has come to them, what this one waits before.  In the order of the phases, the longest wait of each first;
    together with the time in which compute tasks run they are the phase.
    """
    begin_s = window_s[0]
    ends_s = [_known(span_of(0, task.id))[1] - begin_s for task in schedule.tasks]
    phases = list(phase_spans_s(schedule, ends_s))
    before_on_lane = _before_on_lane(schedule)
    totals: dict[tuple[IterationPhase, _Cause], float] = {}
    for gap_s, waiting in _gaps(schedule, span_of, window_s):
        # A phase ends when a compute task does, so a gap is never in two of them.
        at_s = gap_s[0] - begin_s
        phase = next((phase for phase, _, end_s in phases if at_s < end_s), IterationPhase.OPTIMIZER)
        for cause, seconds in _causes(schedule, span_of, before_on_lane, rank_waits_s, gap_s, waiting):
            totals[phase, cause] = totals.get((phase, cause), 0.0) + seconds
    rounding_s = _ROUNDING_FRAC * (window_s[1] - begin_s)
    waits = [
        PhaseWait(phase=phase, cause=cause, seconds=seconds, for_ranks=for_ranks)
        for (phase, (cause, for_ranks)), seconds in totals.items()
        if seconds > rounding_s
    ]
    return tuple(sorted(waits, key=lambda wait: (_PHASES.index(wait.phase), -wait.seconds)))


def repeating(timings: Sequence[TaskTiming], iteration_s: float) -> SpanOf:
    """Spans where every iteration is the record's, one period later than the one before; ``timings`` by task id."""

    def span_of(iteration: int, task: TaskId) -> Span:
        timing = timings[task]
        return timing.start_s + iteration * iteration_s, timing.end_s + iteration * iteration_s

    return span_of


def _gaps(schedule: Schedule, span_of: SpanOf, window_s: Span) -> Iterator[tuple[Span, _Occurrence]]:
    """Every stretch of the iteration in which compute stands still, and the compute task that it waits to start."""
    program = schedule.lanes[Lane.COMPUTE]
    free_s, last_s = window_s
    for occurrence in (*((0, task) for task in program), (1, program[0])):
        span = span_of(*occurrence)
        start_s, end_s = (last_s, last_s) if span is None else span
        if min(start_s, last_s) > free_s:
            yield (free_s, min(start_s, last_s)), occurrence
        free_s = max(free_s, end_s)


def _causes(
    schedule: Schedule,
    span_of: SpanOf,
    before_on_lane: dict[TaskId, _Occurrence],
    rank_waits_s: Mapping[TaskId, float],
    gap_s: Span,
    waiting: _Occurrence,
) -> Iterator[tuple[_Cause, float]]:
    """The causes of one gap with their seconds, the last first."""
    begin_s, at_s = gap_s
    while at_s > begin_s:
        found = _held_up_by(schedule, span_of, before_on_lane, waiting)
        start_s, end_s = (begin_s, begin_s) if found is None else _known(span_of(*found))
        if (ended_s := max(end_s, begin_s)) < at_s:
            came_s = max(ended_s, at_s - rank_waits_s.get(waiting[1], 0.0))
            if came_s < at_s:
                yield (None, True), at_s - came_s
            if ended_s < came_s:
                yield (None, False), came_s - ended_s
            at_s = ended_s
        if found is None:
            return
        if (started_s := max(start_s, begin_s)) < at_s:
            yield (schedule.tasks[found[1]].kind, False), at_s - started_s
            at_s = started_s
        waiting = found


def _held_up_by(
    schedule: Schedule, span_of: SpanOf, before_on_lane: dict[TaskId, _Occurrence], waiting: _Occurrence
) -> _Occurrence | None:
    """The last to end of all that a task waits for; None if nothing of it is known."""
    iteration, task_id = waiting
    task, (lane_distance, lane_task) = schedule.tasks[task_id], before_on_lane[task_id]
    candidates = [
        *((2, iteration, source) for source in task.after),
        *((1, iteration - 1, source) for source in task.after_previous),
        (0, iteration - lane_distance, lane_task),
    ]
    ends = [
        (span[1], preference, source, at)
        for preference, at, source in candidates
        if (span := span_of(at, source)) is not None
    ]
    if not ends:
        return None
    _, _, source, at = max(ends)
    return at, source


def _before_on_lane(schedule: Schedule) -> dict[TaskId, _Occurrence]:
    """The task before each on its lane, with how many iterations before."""
    return {
        task: (int(place == 0), program[place - 1])
        for program in schedule.lanes.values()
        for place, task in enumerate(program)
    }


def _known(span: Span | None) -> Span:
    assert span is not None, "the iteration that is looked at is known"
    return span
