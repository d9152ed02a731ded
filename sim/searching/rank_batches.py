"""The search over parallel modes and sizes of the micro-batch: several ranks that share one global batch.

[Note: One search over modes and sizes]
Every size of the micro-batch in every mode has a space of its own, and all of them share the best time that was found,
as sizes alone do in ``sim/searching/batch_search.py`` and modes alone in ``sim/searching/rank_search.py``.  What is
proven of all of them together is one certificate.
"""

from __future__ import annotations

from collections.abc import Sequence

from ...shared.basics.errors import InfeasibleError
from ...shared.schema.calibration import Calibration
from ...shared.schema.hardware import Hardware
from ...shared.schema.plan import ParallelMode
from ...shared.schema.search_result import BatchSearchResult
from ..space.space import SearchSpace
from .batch_search import WorkloadAt, batch_choice, batch_sizes
from .branch_and_bound import BranchAndBound, OnProgress, Simulated, run_in_turns, was_interrupted
from .outcomes import search_result
from .rank_search import MODES, RankSetting, mode_choice, modes_among, nothing_fits
from .search import check_effort

Where = tuple[int, ParallelMode]
"""A size of the micro-batch and a mode."""


def search_rank_batches(
    workload_at: WorkloadAt,
    global_batch: int,
    hardware: Hardware,
    calibration: Calibration | None = None,
    *,
    num_ranks: int,
    parallel: Sequence[ParallelMode] = MODES,
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
    """The fastest plan of a step on ``global_batch`` samples, which ``num_ranks`` equal ranks share evenly.

    Over the modes ``parallel`` and all sizes of the micro-batch; see [Note: One search over modes and sizes].
    ``max_replays`` ends the search after so many plans were looked at closely in all.  Of plans within the tolerance of
    the fastest, one of the simplest mode counts, then one with the fewest micro-batches.  Everything else as of
    ``search_batches`` and ``search_ranks``.  Raises InfeasibleError if no plan of any mode and size fits, and PlanError
    if the ranks cannot share the batch or a size is none.
    """
    check_effort(tolerance_frac, max_replays)
    sizes = batch_sizes(global_batch, micro_batch_sizes, num_ranks)
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
    )
    hunts: dict[Where, BranchAndBound] = {}
    reasons: dict[ParallelMode, str] = {}
    for size in sizes:
        of_size, reasons = setting.hunts(workload_at(size), global_batch // num_ranks // size)
        hunts |= {(size, mode): hunt for mode, hunt in of_size.items()}
    report, ordered = (
        on_progress or (lambda done, total: None),
        [hunts[where] for where in sorted(hunts, key=_simplest)],
    )
    interrupted = was_interrupted(
        ordered, lambda: run_in_turns(ordered, report, max_replays=max_replays), keep=keep_interrupted
    )
    chosen = _chosen(hunts)
    if chosen is None:
        raise _nothing_fits(global_batch, hunts)
    where, plan = chosen
    result = search_result(hunts[where], plan, hunts=tuple(hunts.values()), is_interrupted=interrupted)
    modes = tuple(
        mode_choice(mode, [hunt for at, hunt in hunts.items() if at[1] is mode], reasons.get(mode, ""), interrupted)
        for mode in setting.modes
    )
    return BatchSearchResult(
        global_batch_size=global_batch,
        micro_batch_size=where[0],
        result=result.model_copy(update={"modes": modes}),
        choices=tuple(
            batch_choice(size, [hunt for at, hunt in hunts.items() if at[0] == size], interrupted) for size in sizes
        ),
    )


def _simplest(where: Where) -> tuple[int, int]:
    """Orders by mode, then by fewer micro-batches."""
    size, mode = where
    return MODES.index(mode), -size


def _chosen(hunts: dict[Where, BranchAndBound]) -> tuple[Where, Simulated] | None:
    """Of the plans within the tolerance of the fastest one of the simplest mode, then of the largest micro-batch."""
    near = {where: plan for where, hunt in hunts.items() if (plan := hunt.simplest_near()) is not None}
    if not near:
        return None
    where = min(near, key=_simplest)
    return where, near[where]


def _nothing_fits(global_batch: int, hunts: dict[Where, BranchAndBound]) -> InfeasibleError:
    """Why not even the smallest micro-batches fit."""
    size = min(size for size, _ in hunts)
    num_sizes = len({size for size, _ in hunts})
    largest = f" and with it none of {num_sizes} sizes of the micro-batch" if num_sizes > 1 else ""
    reason = nothing_fits({mode: hunt for (one, mode), hunt in hunts.items() if one == size})
    return InfeasibleError(f"at micro-batches of {size} of the global batch of {global_batch}{largest}: {reason}")
