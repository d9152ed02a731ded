"""Whether host memory binds: a plan that is slower only because faster ones need more of the host than there is."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from ...shared.answers.plan_kind import PlanKind
from ...shared.answers.search_result import BatchSearchResult, HostBound, SearchResult
from ...shared.basics.progress import OnProgress, no_progress
from ...shared.schema.hardware import DeviceKind
from ...shared.schema.plan import Plan
from ..memory.host import memory_with_room
from ..searching.branch_and_bound import BranchAndBound
from ..searching.problem import SearchProblem
from ..searching.request import SearchRequest
from ..searching.search import Spaces, problems, search_batches

_UNLIMITED_BYTES: Final = 2**50
"""More than any plan needs."""
_MOST_REPLAYS: Final = 1024
"""Plans that are replayed at most to spare a second search."""


def host_bound(
    found: BatchSearchResult, request: SearchRequest, on_progress: OnProgress = no_progress
) -> HostBound | None:
    """The best plan with any host memory, if it is faster than ``found`` by more than the tolerance.

    Or if it leaves the margin of device memory that ``found`` does not.

    A second search, but only where some plan that needs more than the budget of the host may be so much faster.  None
    too where the CPU is the device, whose memory is the host's: then the two budgets are shares of one.
    """
    spaces = Spaces()
    if request.hardware.device.kind is DeviceKind.CPU or not _is_restricting(request, spaces):
        return None
    if _needs_a_faster_one(found.result) and not _may_be_faster(found.result, request, spaces, on_progress):
        return None
    # The rest of the answer is there: baselines are not asked for again.
    unlimited = replace(request, host_budget_bytes=_UNLIMITED_BYTES, baselines=None)
    other = search_batches(unlimited, on_progress=on_progress, spaces=spaces).result
    limit_s = found.result.prediction.iteration_s * (1 - request.effort.tolerance_frac)
    host, is_faster = other.prediction.host_memory, other.prediction.iteration_s < limit_s
    is_safer = found.result.survives is False and other.survives is True
    if host is None or not (is_safer or (is_faster and other.survives is not False)):
        return None
    need_bytes = host.planned_bytes
    if need_bytes <= found.result.host_budget_bytes:
        return None
    return HostBound(
        plan=other.plan,
        iteration_s=other.prediction.iteration_s,
        survives=other.survives,
        host_bytes=need_bytes,
        host_memory_bytes=_memory_bytes(other.plan, need_bytes, request),
    )


def with_host_bound(
    found: BatchSearchResult, request: SearchRequest, on_progress: OnProgress = no_progress
) -> tuple[BatchSearchResult, bool]:
    """The outcome of a search of ``request`` with its ``host_bound``, and whether Ctrl-C ended that question.

    On a machine with a disk, where the host's memory binds, a plan with chunks on the disk may take the place of the
    outcome's: its certificate then is about all plans that a search with the disk looked through.
    """
    try:
        bound = host_bound(found, request, on_progress)
    except KeyboardInterrupt:
        return found, True
    if bound is not None and request.may_use_disk and found.result.plan.n_disk_state == 0:
        try:
            found, bound = _with_disk(found, bound, request, on_progress)
        except KeyboardInterrupt:
            return found, True
    return found.model_copy(update={"result": found.result.model_copy(update={"host_bound": bound})}), False


def _with_disk(
    found: BatchSearchResult, bound: HostBound, request: SearchRequest, on_progress: OnProgress
) -> tuple[BatchSearchResult, HostBound | None]:
    """The better of ``found`` and the best plan with what the host cannot hold on the disk, and what still binds."""
    other = search_batches(request.with_disk(), on_progress=on_progress)
    result, least_frac = other.result, 1 - request.effort.tolerance_frac
    is_faster = result.prediction.iteration_s < found.result.prediction.iteration_s * least_frac
    is_safer = found.result.survives is False and result.survives is True
    if not (is_safer or (is_faster and result.survives is not False)):
        return found, bound
    still_binds = bound.iteration_s < result.prediction.iteration_s * least_frac
    return other, bound if still_binds else None


def _memory_bytes(plan: Plan, host_bytes: int, request: SearchRequest) -> int:
    """The memory of the machine's host that leaves every rank on it so much."""
    num_sharing = min(plan.num_ranks, request.hardware.devices_per_node)
    return num_sharing * memory_with_room(host_bytes, request.hardware.device.kind)


def _needs_a_faster_one(result: SearchResult) -> bool:
    """Whether nothing but a faster plan of the same spaces could take the place of the one that was found.

    Spaces with inputs on the host, or chunks on the disk, are searched where nothing fits in those before.
    """
    plan = result.plan
    return result.survives is not False and not (plan.n_offload_input or plan.n_disk_state or plan.n_disk)


def _may_be_faster(result: SearchResult, request: SearchRequest, spaces: Spaces, on_progress: OnProgress) -> bool:
    """Whether some plan that needs more of the host than the budget may be faster by more than the tolerance.

    Bounds decide, and replays where these do not.  Whether such a plan leaves the margin is not asked, and of many that
    cannot be told apart it is left to the search, which widens.
    """
    unlimited = replace(request, host_budget_bytes=_UNLIMITED_BYTES)
    limit_s = result.prediction.iteration_s * (1 - request.effort.tolerance_frac)
    branches = []
    for problem in problems(unlimited, spaces):
        beyond = replace(problem, beyond_host_bytes=result.host_budget_bytes)
        for kind in PlanKind:
            branch = BranchAndBound(beyond, kind, tolerance_frac=0.0)
            branch.incumbent_s = limit_s
            branches.append(branch)
    while True:
        on_progress(sum(branch.num_decided for branch in branches), sum(branch.num_candidates for branch in branches))
        best = min(branches, key=lambda branch: branch.candidates.next_bound_s)
        if best.candidates.next_bound_s >= limit_s:
            return False
        if sum(branch.num_replays for branch in branches) >= _MOST_REPLAYS:
            return True
        best.step()
        # Those that do not become periodic may be as fast as their bounds.
        if any(one.bound_s < limit_s and not one.period_s >= limit_s for one in best.replayed):
            return True


def _is_restricting(request: SearchRequest, spaces: Spaces | None = None) -> bool:
    """Whether some plan of the spaces of ``request`` needs more of the host than its budget."""
    return any(_most_host_bytes(problem) > problem.host_budget_bytes for problem in problems(request, spaces))


def _most_host_bytes(problem: SearchProblem) -> int:
    return max(
        int(problem.host_bytes(index, layout.prefixes, trips).max())
        for index, layout in enumerate(problem.layouts)
        for trips, _ in layout.grid.modes.groups
    )
