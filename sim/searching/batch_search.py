"""The search over micro-batch sizes: one global batch, cut into every number of equal micro-batches.

[Note: One search of several]
Each size of the micro-batch has a workload and a space of its own.  All of them are bounded first; then they are
searched in turns, wherever the lowest bound is, and share the best time found so far: a size whose best bound lies
above it is left out as a whole.  What is proven of all of them together is one certificate.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from ...shared.basics.errors import InfeasibleError, PlanError
from ...shared.schema.calibration import Calibration
from ...shared.schema.hardware import Hardware
from ...shared.schema.search_result import BatchChoice, BatchSearchResult
from ...shared.schema.workload import Workload
from ..space.space import SearchSpace
from ..space.step_spec import MOST_MICRO_BATCHES, StepSpec, check_shares
from .branch_and_bound import BranchAndBound, OnProgress, run_in_turns, was_interrupted
from .infeasible import explain_infeasible
from .outcomes import search_result
from .problem import search_problem
from .search import check_effort

WorkloadAt = Callable[[int], Workload]
"""The workload at so many samples per micro-batch."""


def divisors(number: int) -> tuple[int, ...]:
    """All divisors, ascending."""
    small = [divisor for divisor in range(1, int(number**0.5) + 1) if number % divisor == 0]
    return tuple(sorted({*small, *(number // divisor for divisor in small)}))


def search_batches(
    workload_at: WorkloadAt,
    global_batch: int,
    hardware: Hardware,
    calibration: Calibration | None = None,
    *,
    micro_batch_sizes: Sequence[int] | None = None,
    device_budget_bytes: int | None = None,
    host_budget_bytes: int | None = None,
    space: SearchSpace | None = None,
    max_gradient_norm: float | None = None,
    tolerance_frac: float = 0.005,
    max_replays: int | None = None,
    on_progress: OnProgress | None = None,
    keep_interrupted: bool = False,
) -> BatchSearchResult:
    """The fastest plan of a step on ``global_batch`` samples, over all sizes of its micro-batches.

    ``micro_batch_sizes``: those to look through, each a divisor; all divisors that leave at most
    ``MOST_MICRO_BATCHES`` micro-batches if None.  Everything else as of ``search``; of plans within the tolerance of
    the fastest, the one with the fewest micro-batches counts.  Raises InfeasibleError if no plan of any size fits, and
    PlanError if a size is none.
    """
    check_effort(tolerance_frac, max_replays)
    sizes = batch_sizes(global_batch, micro_batch_sizes)
    hunts: dict[int, BranchAndBound] = {}
    for size in sizes:
        problem = search_problem(
            workload_at(size),
            hardware,
            calibration,
            device_budget_bytes=device_budget_bytes,
            host_budget_bytes=host_budget_bytes,
            space=space,
            rule=StepSpec(global_batch // size, max_gradient_norm),
        )
        hunts[size] = BranchAndBound(problem, tolerance_frac=tolerance_frac)
    report, ordered = on_progress or (lambda done, total: None), [hunts[size] for size in reversed(sizes)]
    interrupted = was_interrupted(
        ordered, lambda: run_in_turns(ordered, report, max_replays=max_replays), keep=keep_interrupted
    )
    settled = {size: plan for size, hunt in hunts.items() if (plan := hunt.simplest_near()) is not None}
    if not settled:
        raise _nothing_fits(global_batch, hunts)
    best_size = max(settled)
    result = search_result(
        hunts[best_size], settled[best_size], hunts=tuple(hunts.values()), is_interrupted=interrupted
    )
    return BatchSearchResult(
        global_batch_size=global_batch,
        micro_batch_size=best_size,
        result=result,
        choices=tuple(batch_choice(size, [hunt], interrupted) for size, hunt in sorted(hunts.items())),
    )


def batch_sizes(global_batch: int, wanted: Sequence[int] | None, num_ranks: int = 1) -> tuple[int, ...]:
    """Sizes of the micro-batch that ``num_ranks`` ranks may take to get through a global batch, ascending.

    Those ``wanted``, or all that leave each rank at most ``MOST_MICRO_BATCHES`` micro-batches.  Raises PlanError if
    the ranks cannot share the batch evenly, or one of those wanted does not divide a rank's part.
    """
    if not 1 <= global_batch <= 10**9:
        raise PlanError(f"the global batch is {global_batch}; it must be at least 1 and at most {10**9}.")
    check_shares(global_batch, num_ranks)
    of_one = global_batch // num_ranks
    if wanted is None:
        return tuple(size for size in divisors(of_one) if of_one // size <= MOST_MICRO_BATCHES)
    for size in wanted:
        if size < 1 or of_one % size:
            part = f"each rank's {of_one} of " if num_ranks > 1 else ""
            raise PlanError(
                f"the micro-batch size {size} does not divide {part}the global batch of {global_batch}. "
                f"Choose from {', '.join(map(str, divisors(of_one)))}."
            )
    return tuple(sorted(set(wanted)))


def batch_choice(size: int, hunts: Sequence[BranchAndBound], is_interrupted: bool) -> BatchChoice:
    """What became of one size; ``hunts``: its searches, of several ranks one for each parallel mode."""
    simulated = [hunt.best for hunt in hunts if hunt.best is not None]
    best = min(simulated, key=lambda one: one.order, default=None)
    bounds_s = [hunt.open_bound_s for hunt in hunts if np.isfinite(hunt.open_bound_s)]
    bounds_s += [one.timing.iteration_s for one in simulated]
    return BatchChoice(
        micro_batch_size=size,
        micro_batches=hunts[0].problem.rule.micro_batches,
        num_candidates=sum(hunt.problem.num_candidates for hunt in hunts),
        num_simulated=sum(len(hunt.simulated) for hunt in hunts),
        best_iteration_s=None if best is None else best.timing.iteration_s,
        shortest_possible_s=None if is_interrupted else min(bounds_s, default=None),
        parallel=None if best is None else best.plan.parallel,
    )


def _nothing_fits(global_batch: int, hunts: dict[int, BranchAndBound]) -> InfeasibleError:
    """Why not even the smallest micro-batches fit."""
    size = min(hunts)
    reason = str(explain_infeasible(hunts[size].problem))
    largest = f" and with it none of {len(hunts)} sizes of the micro-batch" if len(hunts) > 1 else ""
    return InfeasibleError(f"at micro-batches of {size} of the global batch of {global_batch}{largest}: {reason}")
