"""The search: the fastest plan that fits, with a proof that none of its space is faster by more than a tolerance.

[Note: Branch and bound]
Plans come from a queue in the order of a lower bound of their time (``sim/searching/candidates.py``).  A batch of them
is replayed at once (``sim/bounds/replay.py``), which sharpens their bounds to what the simulator would say; then the
best are compiled and simulated, until no bound is left below the best simulated time less the tolerance
(``sim/searching/branch_and_bound.py``).  Every plan that was not simulated then either fails a memory bound or has a
time bound above that.

Bounds sort, and never decide: the plan that is returned was compiled and simulated, and its guaranteed peak checked.
"""

from __future__ import annotations

from ...shared.basics.errors import PlanError
from ...shared.schema.calibration import Calibration
from ...shared.schema.hardware import Hardware
from ...shared.schema.search_result import SearchResult as SearchResult
from ...shared.schema.workload import Workload
from ..space.space import SearchSpace
from ..space.step_spec import StepSpec
from .branch_and_bound import BranchAndBound, OnProgress, was_interrupted
from .infeasible import explain_infeasible
from .outcomes import search_result
from .problem import search_problem


def search(
    workload: Workload,
    hardware: Hardware,
    calibration: Calibration | None = None,
    *,
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
    """The fastest plan of ``space`` whose memory fits for every timing.

    A plan fits if its guaranteed device peak is within ``device_budget_bytes`` (the device's usable bytes) and its
    pinned and other host memory within ``host_budget_bytes`` (``default_host_budget_bytes``).  No plan of the space
    is faster than the fastest one found by more than ``tolerance_frac``; with 0 the result is that of simulating every
    plan.  Of plans within the tolerance of the fastest, the simplest counts (``LayoutGrid.simplicity``).
    ``micro_batches`` and ``max_gradient_norm`` say what a step is, and every plan has them.
    ``max_replays`` ends the search after that many plans were looked at closely; then the certificate says so.
    ``on_progress`` is told, now and then, how many plans of how many are decided.  ``keep_interrupted``: Ctrl-C ends
    the search with the best plan so far, if there is one, and the certificate says so.

    Raises InfeasibleError if no plan fits, PlanError if the space holds no plan, and what ``simulate`` raises.
    """
    check_effort(tolerance_frac, max_replays)
    problem = search_problem(
        workload,
        hardware,
        calibration,
        device_budget_bytes=device_budget_bytes,
        host_budget_bytes=host_budget_bytes,
        space=space,
        rule=StepSpec(micro_batches, max_gradient_norm),
    )
    report = on_progress or (lambda done, total: None)
    hunt = BranchAndBound(problem, tolerance_frac=tolerance_frac, max_replays=max_replays, on_progress=report)

    def work() -> None:
        hunt.run()
        hunt.settle()

    interrupted = was_interrupted([hunt], work, keep=keep_interrupted)
    chosen = hunt.simplest_near()
    if chosen is None:
        raise explain_infeasible(problem)
    if not interrupted:
        report(problem.num_candidates, problem.num_candidates)
    return search_result(hunt, chosen, is_interrupted=interrupted)


def check_effort(tolerance_frac: float, max_replays: int | None) -> None:
    """Raise PlanError unless a search can be asked for so much."""
    if not 0 <= tolerance_frac < 1:
        raise PlanError(f"tolerance_frac is {tolerance_frac}; it must be at least 0 and below 1.")
    if max_replays is not None and max_replays < 1:
        raise PlanError(f"max_replays is {max_replays}; it must be at least 1.")
