"""Whether a plan that fits by what it allocates also fits by the segments that PyTorch's allocator holds.

[Note: Plans that survive]
The allocator holds more than is allocated: it rounds, and cached segments do not always fit what is asked for next.  A
plan *survives* if the segments that it is expected to hold with the allocator's default settings leave the margin free
(``DeviceReserved.expected_bytes``).  No bound of them is known that would be sharp for a plan that was not compiled.  A
replay of the allocator takes 20 ms, and up to twenty thousand plans are faster than the fastest one that survives.

So the search first finds the fastest plan that fits by what it allocates.  If that does not survive, plans of its
layout wait whose guaranteed peaks, times the same overhead, exceed what segments may take.  The search goes on until
the fastest plan survives.  The overhead depends on the sizes of chunks more than on all else, so every layout of every
space has a limit of its own.  If nothing is left of a kind, its plans come back half way.

What waits is left out by an estimate.  Its bounds of time hold, and the certificate counts apart how many of these
plans might be faster than the recommended one.  What is recommended was replayed.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from ...shared.schema.hardware import Device
from ...shared.schema.plan import Plan
from ...shared.schema.schedule import Schedule
from ..engine.kept_schedule import memory_schedule
from ..memory.libraries import more_collective_bytes
from ..memory.request_replay import RequestLog, reserved_by
from ..memory.reserved import expected_requests, expected_segments_bytes
from ..memory.rules import round_size
from .branch_and_bound import BranchAndBound, Simulated
from .problem import SearchProblem
from .request import SearchRequest

_SMALLEST_STEP_FRAC: Final = 0.01
"""Limits are not looked for more closely."""
_MOST_LOGS: Final = 4
"""Plans whose requests are kept: the fastest are asked about once more, with expandable segments."""


@dataclass(frozen=True)
class SegmentRoom:
    """What segments may take of one rank's device."""

    device: Device
    limit_bytes: int
    _logs: dict[Simulated, RequestLog] = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def of(cls, request: SearchRequest) -> SegmentRoom | None:
        """The room on the request's device, less its margin; None where segments do not count.

        A device budget above what the device has asks about a larger device, which it then stands for.
        """
        device = request.hardware.device
        limit_bytes = request.segment_limit_bytes
        if limit_bytes is None:
            return None
        budget_bytes = request.device_budget_bytes
        if budget_bytes is not None and budget_bytes > device.usable_bytes:
            limit_bytes = max(limit_bytes, budget_bytes)
        return cls(device, max(1, limit_bytes))

    def wanted_bytes(self, found: Simulated, problem: SearchProblem) -> int:
        """Segments that the plan is expected to hold, and what its collectives take beyond those of all ranks."""
        return self._wanted_bytes(found, problem)

    def holds_expandable(self, found: Simulated, problem: SearchProblem) -> bool:
        """Whether the plan leaves the margin free with expandable segments."""
        return self._wanted_bytes(found, problem, expandable_segments=True) <= self.limit_bytes

    def _wanted_bytes(self, found: Simulated, problem: SearchProblem, *, expandable_segments: bool = False) -> int:
        step = problem.step
        more_bytes = more_collective_bytes(problem.together, step.num_ranks, step.shard_ranks)
        replayed = reserved_by(
            self._log(found, problem),
            expandable_segments=expandable_segments,
            stop_above_bytes=self.limit_bytes - more_bytes if expandable_segments else None,
        )
        return more_bytes + replayed.peak_reserved_bytes

    def _log(self, found: Simulated, problem: SearchProblem) -> RequestLog:
        """What the plan asks for."""
        if found not in self._logs:
            layout = problem.layouts[found.candidate.layout].grid.layout
            self._logs[found] = expected_requests(self._schedule(found, problem), problem.workload, layout, self.device)
        log = self._logs[found]
        if len(self._logs) > _MOST_LOGS:
            del self._logs[max(self._logs, key=lambda one: one.time_s)]
        return log

    def holds(self, plan: Plan, problem: SearchProblem) -> bool:
        """Whether the segments of a plan that nobody has simulated are expected to leave the margin free."""
        layout = next(one.grid.layout for one in problem.layouts if one.grid.layout.chunk_bytes == plan.chunk_bytes)
        schedule = memory_schedule(
            plan, problem.workload, layout, policies=problem.method.policies, rounded_bytes=round_size
        )
        step = problem.step
        more_bytes = more_collective_bytes(problem.together, step.num_ranks, step.shard_ranks)
        wanted_bytes = expected_segments_bytes(schedule, problem.workload, layout, self.device)
        return more_bytes + wanted_bytes <= self.limit_bytes

    @staticmethod
    def _schedule(found: Simulated, problem: SearchProblem) -> Schedule:
        """One that takes as much memory: what comes and goes with micro-batches that are alike depends on no timing."""
        num_kept, fold = problem.kept_compute.positions.micro_batches, found.timing.fold
        if found.schedule.micro_batches == num_kept or not problem.num_left_out:
            return found.schedule if fold is None else fold.kept.with_all_left_over(round_size)
        return memory_schedule(
            found.plan,
            problem.workload,
            problem.layouts[found.candidate.layout].grid.layout,
            policies=problem.method.policies,
            rounded_bytes=round_size,
        )

    def lowered_peak_bytes(self, found: Simulated, wanted_bytes: int) -> int:
        """The guaranteed peak up to which plans with the overhead of ``found`` survive; below its own."""
        peak_bytes = found.candidate.peak_bytes
        return min(peak_bytes - 1, peak_bytes * self.limit_bytes // wanted_bytes)


class LayoutLimit:
    """The limit of the guaranteed peaks of one layout's plans in one space.

    Who changes limits has the space sort its plans out (``BranchAndBound.sort_out``).
    """

    def __init__(self, branch: BranchAndBound, layout: int) -> None:
        self.branch = branch
        self.layout = layout
        self._searched_bytes = 0
        """Plans up to here do not wait again."""
        self._fragile_bytes = branch.problem.device_budget_bytes + 1
        """The least peak of its plans that is known not to survive."""

    def lower(self, peak_bytes: int, limit_bytes: int) -> None:
        """Have plans with higher peaks wait; ``peak_bytes``: of the plan whose overhead says so."""
        self._fragile_bytes = min(self._fragile_bytes, peak_bytes)
        self._set(min(self._now_bytes, max(limit_bytes, self._searched_bytes)))

    @property
    def may_rise(self) -> bool:
        """Whether plans wait, and the limit is well below the least peak that is known not to survive."""
        is_close = self._fragile_bytes - self._now_bytes <= _SMALLEST_STEP_FRAC * self._fragile_bytes
        return not is_close and self.branch.waits(self.layout)

    def rise_half_way(self) -> None:
        """Bring back plans up to half way to that peak."""
        self._searched_bytes = self._now_bytes
        self._set((self._now_bytes + self._fragile_bytes) // 2)

    @property
    def _now_bytes(self) -> int:
        return self.branch.candidates.limit_bytes(self.layout)

    def _set(self, limit_bytes: int) -> None:
        self.branch.candidates.set_limit(self.layout, limit_bytes)
