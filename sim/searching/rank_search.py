"""The search over plans of several equal ranks: every parallel mode that the machine allows, under one certificate.

[Note: Search with ranks]
Each mode has a space of its own: DDP the plans that keep every chunk, REPLICATED those that offload some, SHARDED those
that offload some or shard some over the devices; a mode that is asked for alone has them all.  Modes share the best
time, as sizes of micro-batches do (``sim/searching/batch_search.py``).  In every other respect a mode is searched as
the plans of one rank are, whose lanes are one more here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from ...shared.basics.errors import InfeasibleError, PlanError, ProtwinError
from ...shared.schema.calibration import Calibration
from ...shared.schema.hardware import Hardware
from ...shared.schema.plan import ParallelMode
from ...shared.schema.search_result import ModeChoice, SearchResult
from ...shared.schema.workload import Workload
from ..space.space import SearchSpace
from ..space.step_spec import SEVERAL, StepSpec
from .branch_and_bound import BranchAndBound, OnProgress, run_in_turns, was_interrupted
from .infeasible import explain_infeasible, least_of, smallest_changes
from .outcomes import search_result
from .problem import SearchProblem, search_problem
from .search import check_effort

MODES: Final = SEVERAL


@dataclass(frozen=True)
class RankSetting:
    """What is asked about several equal ranks, whatever they train on."""

    hardware: Hardware
    """Of all ranks."""
    calibration: Calibration | None
    num_ranks: int
    modes: tuple[ParallelMode, ...]
    device_budget_bytes: int | None = None
    """Of one rank, like the host's."""
    host_budget_bytes: int | None = None
    space: SearchSpace | None = None
    max_gradient_norm: float | None = None
    tolerance_frac: float = 0.005
    max_replays: int | None = None

    def hunts(
        self, workload: Workload, micro_batches: int = 1
    ) -> tuple[dict[ParallelMode, BranchAndBound], dict[ParallelMode, str]]:
        """One search per mode, none of them begun, and why some modes have no plan."""
        hunts: dict[ParallelMode, BranchAndBound] = {}
        reasons: dict[ParallelMode, str] = {}
        for mode in self.modes:
            try:
                problem = search_problem(
                    workload,
                    self.hardware,
                    self.calibration,
                    device_budget_bytes=self.device_budget_bytes,
                    host_budget_bytes=self.host_budget_bytes,
                    space=self.space,
                    rule=StepSpec(micro_batches, self.max_gradient_norm, mode, self.num_ranks),
                    is_offloading=_is_offloading(mode, alone=len(self.modes) == 1),
                )
            except PlanError as error:
                reasons[mode] = str(error)
                continue
            hunts[mode] = BranchAndBound(problem, tolerance_frac=self.tolerance_frac, max_replays=self.max_replays)
        if not hunts:
            raise PlanError(
                next(iter(reasons.values()), "no parallel mode is allowed. Name ddp, replicated or sharded.")
            )
        return hunts, reasons


def modes_among(parallel: Sequence[ParallelMode]) -> tuple[ParallelMode, ...]:
    """The modes of several ranks that are named, simplest first."""
    return tuple(mode for mode in MODES if mode in parallel)


def search_ranks(
    workload: Workload,
    hardware: Hardware,
    calibration: Calibration | None = None,
    *,
    num_ranks: int,
    parallel: Sequence[ParallelMode] = MODES,
    device_budget_bytes: int | None = None,
    host_budget_bytes: int | None = None,
    space: SearchSpace | None = None,
    micro_batches: int = 1,
    max_gradient_norm: float | None = None,
    tolerance_frac: float = 0.005,
    max_replays: int | None = None,
    on_progress: OnProgress | None = None,
    keep_interrupted: bool = False,
) -> SearchResult:
    """The fastest plan of ``num_ranks`` equal ranks in any of the modes ``parallel``; see [Note: Search with ranks].

    Budgets are those of one rank: what it has of the machine, by default.  ``max_replays`` ends the search of each mode
    after so many plans.  Everything else as of ``search``.

    Raises InfeasibleError if no plan of any mode fits, PlanError if no mode has a plan, and what ``simulate`` raises.
    """
    check_effort(tolerance_frac, max_replays)
    setting = RankSetting(
        hardware,
        calibration,
        num_ranks,
        modes_among(parallel),
        device_budget_bytes,
        host_budget_bytes,
        space,
        max_gradient_norm,
        tolerance_frac,
        max_replays,
    )
    hunts, reasons = setting.hunts(workload, micro_batches)
    report = on_progress or (lambda done, total: None)
    interrupted = was_interrupted(
        hunts.values(), lambda: run_in_turns(list(hunts.values()), report), keep=keep_interrupted
    )
    settled = {mode: plan for mode, hunt in hunts.items() if (plan := hunt.simplest_near()) is not None}
    if not settled:
        raise nothing_fits(hunts)
    chosen = next(iter(settled))
    result = search_result(hunts[chosen], settled[chosen], hunts=tuple(hunts.values()), is_interrupted=interrupted)
    choices = tuple(
        mode_choice(mode, [hunts[mode]] if mode in hunts else [], reasons.get(mode, ""), interrupted)
        for mode in setting.modes
    )
    return result.model_copy(update={"modes": choices})


def _is_offloading(mode: ParallelMode, *, alone: bool) -> bool | None:
    """Which plans a mode has: DDP those that keep every chunk; the others the rest, or all if asked for alone."""
    if mode is ParallelMode.DDP:
        return False
    return None if alone else True


def mode_choice(mode: ParallelMode, hunts: Sequence[BranchAndBound], reason: str, is_interrupted: bool) -> ModeChoice:
    """What became of a mode; ``hunts``: its searches, one for each size of the micro-batch, ascending.

    ``reason``: why it has no plan, where there is no search.
    """
    best_s = [hunt.best.timing.iteration_s for hunt in hunts if hunt.best is not None]
    bounds_s = [hunt.open_bound_s for hunt in hunts if np.isfinite(hunt.open_bound_s)]
    if hunts and not best_s and not bounds_s:
        reason = _why(hunts[0].problem)
    return ModeChoice(
        parallel=mode,
        num_candidates=sum(hunt.problem.num_candidates for hunt in hunts),
        num_simulated=sum(len(hunt.simulated) for hunt in hunts),
        best_iteration_s=min(best_s, default=None),
        shortest_possible_s=None if is_interrupted else min(best_s + bounds_s, default=None),
        reason=reason,
    )


def _why(problem: SearchProblem) -> str:
    try:
        return str(explain_infeasible(problem))
    except ProtwinError as error:
        return str(error)


def nothing_fits(hunts: dict[ParallelMode, BranchAndBound]) -> InfeasibleError:
    """Why not even the mode fits that asks for the least, and the smallest changes with which a plan of any does."""
    changes = {mode: smallest_changes(hunt.problem) for mode, hunt in hunts.items()}

    def need(mode: ParallelMode) -> tuple[float, tuple[int, int]]:
        alone_bytes = changes[mode].device_bytes
        return (np.inf if alone_bytes is None else alone_bytes), changes[mode].both_bytes

    mode = min(reversed(hunts), key=need)
    problem = hunts[mode].problem
    others = f", nor in {' or '.join(other for other in hunts if other is not mode)}" if len(hunts) > 1 else ""
    reason = explain_infeasible(problem, least_of(changes.values()))
    return InfeasibleError(f"in mode {mode} on each of {problem.rule.num_ranks} ranks{others}: {reason}")
