"""The search: the plan to train by, with a proof of how much faster than it any plan of its spaces could be.

[Note: Branch and bound]
Plans of one kind come from a queue in the order of a lower bound of their time (``sim/searching/candidates.py``).  A
batch of them is replayed at once (``sim/bounds/replay.py``), which sharpens their bounds to what the simulator would
say; then the best are compiled and simulated, until no bound is left below the best simulated time less the tolerance
(``sim/searching/branch_and_bound.py``).  Every plan that was not simulated then either fails a memory bound or has a
time bound above that.

Bounds sort, and never decide: the plan that is returned was compiled, verified and simulated, and its guaranteed peak
checked.

[Note: One search over several spaces]
Every size of the micro-batch in every parallel mode has a workload and plans of its own, and so has every kind of plan;
one rank and one size are the case of one problem with a space for each kind.  Numbers of tiles make no spaces of their
own ([Note: Tilings] in ``sim/space/tilings.py``).  All spaces are bounded first, then searched in turns, wherever the
lowest bound is.  They share the best time found so far: a space whose best bound lies above it is left out as a whole.
One certificate covers all of them.  Which of the plans is recommended says [Note: The recommended plan] in
``sim/searching/choice.py``.

Modes of several ranks divide the plans among them: DDP has those that keep every chunk, REPLICATED those that offload
some, SHARDED those that offload some or shard some over the devices.  A mode that is asked for alone has them all.
SHARDED has a space for every size of its shard groups (``Step.shard_groups``).
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import replace
from itertools import product

from ...shared.answers.plan_kind import PlanKind
from ...shared.answers.search_result import BatchSearchResult, BatchSizes, Risk
from ...shared.answers.search_result import SearchResult as SearchResult
from ...shared.basics.errors import InfeasibleError, PlanError
from ...shared.phases.sequence_sharing import why_no_sequence_ranks, why_not_shared
from ...shared.schema.hardware import DeviceKind
from ...shared.schema.plan import ParallelMode, ProjectionPlace, TrainingMethod
from ...shared.schema.workload import Workload
from ..space.step_spec import StepSpec
from ..space.tilings import WHOLE, Tiles, tile_counts
from .baselines import baselines
from .branch_and_bound import BranchAndBound, OnProgress, was_interrupted
from .choice import Chooser, Grouping, Where
from .infeasible import nothing_fits, with_advice_on_disk
from .left_out import left_out
from .outcomes import batch_choice, mode_choice, search_result
from .problem import SearchProblem, search_problem
from .request import GlobalBatch, SearchRequest
from .spent_effort import SpentEffort
from .survival import SegmentRoom


def search(
    request: SearchRequest, *, on_progress: OnProgress | None = None, keep_interrupted: bool = False
) -> SearchResult:
    """The plan to train by, over all spaces of ``request``; see [Note: One search over several spaces].

    A plan fits if its guaranteed device peak and its pinned and other host memory are within the request's budgets.  Of
    these, [Note: The recommended plan] in ``sim/searching/choice.py`` chooses.  The schedule of the plan is verified.
    ``on_progress`` is told, now and then, how many plans of how many are decided.  ``keep_interrupted``: Ctrl-C ends
    the search with the best plan so far, if there is one, and the certificate says so.

    Raises InfeasibleError if no plan fits, PlanError if there is no plan at all, and what ``simulate`` raises.
    """
    return search_batches(request, on_progress=on_progress, keep_interrupted=keep_interrupted).result


def search_batches(
    request: SearchRequest,
    *,
    on_progress: OnProgress | None = None,
    keep_interrupted: bool = False,
    spaces: Spaces | None = None,
) -> BatchSearchResult:
    """What ``search`` finds, and besides what became of every size of the micro-batch.  Errors as of ``search``.

    Where nothing fits, inputs of checkpointed blocks may go to the host, and what that cannot hold may lie on the
    machine's disk, if it has one.  ``spaces``: those that are laid out already.
    """
    reason: InfeasibleError
    spaces = spaces or Spaces()
    for asked in request.tries:
        try:
            return _with_margin(asked, spaces, on_progress=on_progress, keep_interrupted=keep_interrupted)
        except InfeasibleError as error:
            reason = error
    raise with_advice_on_disk(reason.explained() if isinstance(reason, _UnexplainedError) else reason, request)


class _UnexplainedError(InfeasibleError):
    """Nothing fits; why, takes as long to say as to find."""

    def __init__(self, request: SearchRequest, branches: dict[Where, BranchAndBound]) -> None:
        super().__init__("no plan fits.")
        self._asked = request, branches

    def explained(self) -> InfeasibleError:
        """The same with the reason."""
        return _nothing_fits(*self._asked)


class Spaces:
    """Spaces that are laid out once, for searches on one machine that differ in their budgets.

    On a disk lies what the host's budget leaves, and where the CPU is the device both budgets are shares of one memory:
    there every search lays out its own.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[int, int, Hashable], tuple[SearchRequest, SearchProblem]] = {}
        """By ``id`` of the workload and the machine, and the rest; requests and problems keep these alive."""

    def problem(
        self, request: SearchRequest, workload: Workload, step: StepSpec, is_offloading: bool | None, tiles: list[Tiles]
    ) -> SearchProblem:
        """``search_problem``, with what is known of the space from before.  Errors as of it."""
        hardware = request.hardware
        if hardware.disk is not None or hardware.device.kind is DeviceKind.CPU or request.method is not None:
            return search_problem(request, workload, step, is_offloading=is_offloading, tiles=tiles)
        key = id(workload), id(hardware), (step, is_offloading, tuple(tiles), request.space)
        if key in self._known:
            first, problem = self._known[key]
            assert first.calibration is request.calibration, "searches of one machine count alike"
            return problem.within(request)
        problem = search_problem(request, workload, step, is_offloading=is_offloading, tiles=tiles)
        self._known[key] = request, problem
        return problem


def _with_margin(
    request: SearchRequest, spaces: Spaces, *, on_progress: OnProgress | None, keep_interrupted: bool
) -> BatchSearchResult:
    """The plan that leaves the margin, or the best one where none does."""

    def searched(asked: SearchRequest) -> BatchSearchResult:
        return _search(asked, spaces, on_progress=on_progress, keep_interrupted=keep_interrupted)

    if not request.margin_frac:
        return searched(request)
    without_margin = replace(request, margin_frac=0.0)
    found = None
    try:
        found = searched(request)
    except InfeasibleError:
        if request.device_budget_bytes is not None or without_margin.budgets_bytes() == request.budgets_bytes():
            raise
    if found is not None and (found.result.survives is not False or found.result.certificate.is_interrupted):
        return found
    # No plan leaves the margin: one that fits without it is better than one that does not.
    without = searched(without_margin)
    if found is not None and not without.result.survives:
        return found
    told = {"survives": False, "margin_frac": request.margin_frac}
    return without.model_copy(update={"result": without.result.model_copy(update=told)})


def _search(
    request: SearchRequest, spaces: Spaces, *, on_progress: OnProgress | None, keep_interrupted: bool
) -> BatchSearchResult:
    branches, refusals = _branches(request, spaces)
    report = on_progress or (lambda done, total: None)
    chooser = Chooser(request, branches, report)
    interrupted = was_interrupted(branches.values(), chooser.search, keep=keep_interrupted)
    choice = chooser.choice()
    if choice is None:
        raise _UnexplainedError(request, branches)
    if request.risk is Risk.HIGH:
        choice = chooser.least_high_end(choice)
    chosen = choice.chosen.where
    result = search_result(request, choice, tuple(branches.values()), is_interrupted=interrupted)
    if request.baselines is not None:
        # Other systems run MLPs and the loss whole; some share sequences.
        asked = (chosen.grouping, chosen.place, chosen.sequence_ranks)
        alike: dict[int, SearchProblem] = {}
        for at, branch in branches.items():
            if (at.grouping, at.place, at.sequence_ranks) == asked:
                alike.setdefault(at.size, branch.problem)
        whole = {size: problem.in_tiles(request, (WHOLE,)) for size, problem in alike.items()}
        found = baselines(whole, SegmentRoom.of(request), result.plan, own=request.baselines)
        result = result.model_copy(update={"baselines": found})
        if not interrupted:
            distinct = {id(branch.problem): branch.problem for branch in branches.values()}
            others = left_out(request, distinct.values(), result.prediction.iteration_s)
            result = result.model_copy(update={"left_out": others})
    if request.step.num_ranks > 1:
        modes = tuple(
            mode_choice(
                mode,
                [branch for at, branch in branches.items() if at.grouping == (mode, group)],
                shard_ranks=group,
                refusal=refusals.get((mode, group)),
                is_interrupted=interrupted,
                chosen_s=choice.chosen.iteration_s if chosen.grouping == (mode, group) else None,
            )
            for mode, group in _groupings(request)
        )
        result = result.model_copy(update={"modes": modes})
    sizes = BatchSizes(
        global_batch_size=chosen.size * result.plan.num_batches,
        micro_batch_size=chosen.size,
        choices=tuple(
            batch_choice(
                size, [branch for at, branch in branches.items() if at.size == size], is_interrupted=interrupted
            )
            for size in sorted({at.size for at in branches})
        ),
    )
    if isinstance(request.workload, GlobalBatch):
        result = result.model_copy(update={"batch": sizes})
    return BatchSearchResult(**dict(sizes), result=result)


def _groupings(request: SearchRequest) -> list[Grouping]:
    """What ranks may do together: every mode, with every size of its shard groups."""
    step = request.step
    return [(mode, group) for mode in step.allowed_modes for group in step.shard_groups(request.hardware, mode)]


def _branches(request: SearchRequest, spaces: Spaces) -> tuple[dict[Where, BranchAndBound], dict[Grouping, PlanError]]:
    """A search of every space, none of them begun, and why some modes have no plan.

    Raises PlanError if none of the modes has a plan at one of the sizes.
    """
    branches: dict[Where, BranchAndBound] = {}
    refusals: dict[Grouping, PlanError] = {}
    groupings, sizes = _groupings(request), list(request.micro_batches())
    spent = SpentEffort(widens=any(micro_batches > 1 for *_, micro_batches in sizes))
    if not groupings:
        raise PlanError("no parallel mode is allowed. Name ddp, replicated or sharded.")
    for size, workload, micro_batches in sizes:
        refusals = {}
        for problem, (mode, group) in _problems_of(request, workload, micro_batches, refusals, spaces):
            step = problem.step
            for kind in PlanKind:
                if step.projects_gradients_on is ProjectionPlace.DEVICE and not kind.uses_host:
                    continue
                branch = BranchAndBound(problem, kind, tolerance_frac=request.effort.tolerance_frac, spent=spent)
                if branch.num_candidates:
                    where = Where(
                        size=size,
                        mode=mode,
                        shard_ranks=group,
                        kind=kind,
                        place=step.projects_gradients_on,
                        sequence_ranks=step.sequence_ranks,
                    )
                    branches[where] = branch
        if len(refusals) == len(groupings):
            raise refusals[groupings[0]]
    return branches, refusals


def problems(request: SearchRequest, spaces: Spaces | None = None) -> Iterator[SearchProblem]:
    """Every space of ``request``; those without a plan are left out.  Errors as of ``search``, but for these."""
    spaces = spaces or Spaces()
    for _, workload, micro_batches in request.micro_batches():
        for problem, _ in _problems_of(request, workload, micro_batches, {}, spaces):
            yield problem


def _problems_of(
    request: SearchRequest,
    workload: Workload,
    micro_batches: int,
    refusals: dict[Grouping, PlanError],
    spaces: Spaces,
) -> Iterator[tuple[SearchProblem, Grouping]]:
    """The spaces of one size of the micro-batch; ``refusals`` gets why some modes have none."""
    modes, groupings = request.step.allowed_modes, _groupings(request)
    shares = _shares(request, workload)
    for mode, group in groupings:
        # Plans that keep every chunk count once, whatever the groups.
        is_first = (mode, group) == next(one for one in groupings if one[0] is mode)
        is_offloading = _is_offloading(mode, modes) if is_first else True
        found_any = False
        for place, (sequence_ranks, tiles) in product(_places(workload, mode), shares.items()):
            shared = workload.shared_among(sequence_ranks)
            try:
                number = request.micro_batches_of(sequence_ranks, micro_batches)
                step = replace(request.step.spec(mode, number, group, place=place), sequence_ranks=sequence_ranks)
                own = spaces.problem(request, shared, step, is_offloading, tiles)
            except PlanError as error:
                if place is ProjectionPlace.HOST and not found_any:
                    refusals[mode, group] = error
                continue
            found_any = True
            refusals.pop((mode, group), None)
            yield own, (mode, group)


def _places(workload: Workload, mode: ParallelMode) -> tuple[ProjectionPlace, ...]:
    """Where gradients that leave may be projected."""
    none_leave = mode in (ParallelMode.DDP, ParallelMode.SHARDED)
    if workload.method is not TrainingMethod.OSFT or none_leave:
        return (ProjectionPlace.HOST,)
    return tuple(ProjectionPlace)


def _shares(request: SearchRequest, workload: Workload) -> dict[int, list[Tiles]]:
    """The ranks that may share each sequence, the fewest first, with the numbers of tiles that each of them may have.

    All that the workload knows and the ranks allow, or those that the space names.  Raises PlanError if the workload
    knows one that is named for no ranks, or none of the tiles for any.
    """
    known = (1, *(sharing.sequence_ranks for sharing in workload.sequence_sharings))
    named = request.space.sequence_ranks
    for number in named or ():
        if (reason := why_no_sequence_ranks(number, workload.sequence_sharings, workload.model_name)) is not None:
            raise PlanError(f"{reason}.")
    num_ranks, found = request.step.num_ranks, {}
    refusal: PlanError | None = None
    for number in known:
        if number in named if named is not None else why_not_shared(number, num_ranks) is None:
            try:
                found[number] = tile_counts(request.space, workload.shared_among(number))
            except PlanError as error:
                refusal = refusal or error
    if not found and refusal is not None:
        raise refusal
    return found


def _is_offloading(mode: ParallelMode, modes: tuple[ParallelMode, ...]) -> bool | None:
    """Which plans a mode has: DDP those that keep every chunk; the others the rest, or all if searched alone."""
    if mode is ParallelMode.DDP:
        return False
    return None if len(modes) == 1 else True


def _tried(branches: dict[Where, BranchAndBound]) -> str:
    """Which knobs of long sequences were turned, in words."""
    knobs: list[str] = []
    tiles = [one for branch in branches.values() for one in branch.problem.tiles]
    for place, knob in enumerate(("mlp_tiles", "loss_tiles")):
        numbers = sorted({one[place] for one in tiles} - {1})
        knobs += [f"{knob} {' and '.join(map(str, numbers))}"] if numbers else []
    inputs = [branch.problem.compute.modes.n_offload_input for branch in branches.values()]
    most = max((int(numbers.max()) for numbers in inputs if numbers is not None), default=0)
    knobs += [f"inputs of {'1 block' if most == 1 else f'up to {most} blocks'} on the host"] if most else []
    return f" Tried with {', '.join(knobs)}, too." if knobs else ""


def _nothing_fits(request: SearchRequest, branches: dict[Where, BranchAndBound]) -> InfeasibleError:
    """Why not even the smallest micro-batches fit."""
    sizes = {where.size for where in branches}
    smallest: dict[Grouping, SearchProblem] = {}
    for where, branch in branches.items():
        if where.size == min(sizes):
            found = smallest.setdefault(where.grouping, branch.problem)
            if branch.problem.least_activation_bytes < found.least_activation_bytes:
                smallest[where.grouping] = branch.problem
    reason = InfeasibleError(f"{nothing_fits(list(smallest.values()))}{_tried(branches)}")
    if not isinstance(request.workload, GlobalBatch):
        return reason
    others = f" and with it none of {len(sizes)} sizes of the micro-batch" if len(sizes) > 1 else ""
    return InfeasibleError(
        f"at micro-batches of {min(sizes)} of the global batch of {request.workload.num_samples}{others}: {reason}"
    )
