"""Whether a plan that fits by what it allocates also fits by the segments that PyTorch's allocator holds.

[Note: Plans that survive]
The allocator holds more than is allocated: it rounds, and cached segments do not always fit what is asked for next.  A
plan *survives* if the segments that it is expected to hold with the allocator's default settings leave the margin free
(``DeviceReserved.expected_bytes``).  No bound of them is known that would be sharp for a plan that was not compiled. A
replay of the allocator takes 20 ms, and up to twenty thousand plans are faster than the fastest one that survives.

So the search first finds the fastest plan that fits by what it allocates.  If that does not survive, every plan of its
kind waits whose guaranteed peak, times the same overhead, exceeds what segments may take, and the search goes on, until
the fastest plan survives.  If nothing is left of the kind, half of them come back.

[Note: Limits come back]
The overhead depends on the sizes of chunks more than on all else, so that of one layout is a poor estimate for others.
Once a plan survives, layouts with waiting plans that may be faster are searched further, each up to a limit of its own:
by the overheads of its own plans whose segments are known, or the budget if none is.  The layout with the best bound
comes first.  A limit never falls below what was searched before.  So the fastest plan only gets faster.

What still waits then is left out by an estimate.  Its bounds of time hold, and the certificate counts apart how many of
these plans might be faster than the recommended one.  What is recommended was replayed.
"""

from __future__ import annotations

from dataclasses import dataclass

from ...shared.schema.hardware import Device
from ...shared.schema.plan import Plan
from ...shared.schema.schedule import Schedule
from ..engine.kept_schedule import memory_schedule
from ..memory.libraries import more_collective_bytes
from ..memory.reserved import expected_segments_bytes
from ..memory.rules import round_size
from .branch_and_bound import BranchAndBound, Simulated
from .problem import SearchProblem
from .request import SearchRequest


@dataclass(frozen=True)
class SegmentRoom:
    """What segments may take of one rank's device."""

    device: Device
    limit_bytes: int

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
        layout = problem.layouts[found.candidate.layout].grid.layout
        step = problem.step
        more_bytes = more_collective_bytes(problem.together, step.num_ranks, step.shard_ranks)
        return more_bytes + expected_segments_bytes(
            self._schedule(found, problem),
            problem.workload,
            layout,
            self.device,
            expandable_segments=expandable_segments,
            stop_above_bytes=self.limit_bytes - more_bytes if expandable_segments else None,
        )

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

    def limit_like(self, found: Simulated, wanted_bytes: int) -> int:
        """The guaranteed peak up to which plans with the overhead of ``found`` survive; below its own if that fails."""
        peak_bytes = found.candidate.peak_bytes
        limit_bytes = peak_bytes * self.limit_bytes // wanted_bytes
        return limit_bytes if wanted_bytes <= self.limit_bytes else min(peak_bytes - 1, limit_bytes)


class LayoutLimit:
    """The limit of the guaranteed peaks of one layout's plans in one space; see [Note: Limits come back].

    Who changes limits has the space sort its plans out (``BranchAndBound.sort_out``).
    """

    def __init__(self, branch: BranchAndBound, layout: int) -> None:
        self.branch = branch
        self.layout = layout
        self._searched_bytes = 0
        """Plans up to here do not wait again."""
        self._fragile_bytes = branch.problem.device_budget_bytes
        """By the overheads of its own plans that did not survive."""
        self._surviving_bytes: int | None = None
        """By the least overhead of its own plans that survive; None if none is known."""

    @property
    def own_bytes(self) -> int:
        """By the overheads of its own plans; the budget if none is known."""
        surviving_bytes = self._fragile_bytes if self._surviving_bytes is None else self._surviving_bytes
        return min(self._fragile_bytes, surviving_bytes)

    @property
    def limit_bytes(self) -> int:
        """As it is now."""
        return self.branch.candidates.limit_bytes(self.layout)

    def lower(self, limit_bytes: int) -> None:
        """Have plans with higher peaks wait, by the overhead of one of the same kind."""
        self._set(min(self.limit_bytes, limit_bytes))

    def lower_own(self, limit_bytes: int) -> None:
        """The same by a plan of this layout."""
        self._fragile_bytes = min(self._fragile_bytes, limit_bytes)
        self.lower(limit_bytes)

    def raise_to(self, limit_bytes: int) -> None:
        """Bring back plans up to a limit."""
        self._set(max(self.limit_bytes, min(limit_bytes, self.branch.problem.device_budget_bytes)))

    def raise_own(self) -> None:
        """Bring back plans up to what is known of the layout itself."""
        self._searched_bytes = max(self._searched_bytes, self.limit_bytes)
        self._set(self.own_bytes)

    def keep(self, peak_bytes: int, limit_bytes: int) -> None:
        """Do not lower the limit below the peak of a plan that survives; ``limit_bytes``: by its overhead."""
        self._searched_bytes = max(self._searched_bytes, peak_bytes)
        self._surviving_bytes = max(self._surviving_bytes or 0, limit_bytes)

    def may_rise(self, limit_s: float) -> bool:
        """Whether plans wait within what is known of the layout itself that may take less than ``limit_s``."""
        return self.own_bytes > self.limit_bytes and self.bound_s < limit_s

    @property
    def bound_s(self) -> float:
        """No plan that waits takes less."""
        return self.branch.beyond_bound_s(self.layout)

    def _set(self, limit_bytes: int) -> None:
        limit_bytes = max(limit_bytes, self._searched_bytes)
        if limit_bytes != self.limit_bytes:
            self.branch.candidates.set_limit(self.layout, limit_bytes)
