"""The fastest split of a distillation into the stages of pipelines, on a machine's ranks.

[Note: The best split]
A pipeline goes at the pace of its slowest stage, so the best split is the one whose slowest stage is fastest.  What a
stage takes, a search for its plan tells (``sim/searching/search.py``), and that is dear: there are n (n + 1) / 2 stages
of n pairs.  So every stage has a lower bound until it is searched:

- its compute, alone on the machine: no plan takes less;
- what a stage takes that it contains, less the tolerance: a stage of more pairs has more to do on every lane, and
  keeps no more of it on the device.

The split that is best by the bounds is looked for (``_best_split``), and its stages are searched; then again, until the
best split is one whose stages have all been searched, or none is better than the best one found by more than the
tolerance.  Stages that do the same work are searched once.  With a tolerance of 0 the first bound alone counts, so that
nothing is assumed.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate
from math import inf

from ...shared.answers.search_result import SearchResult
from ...shared.basics.errors import HardwareError, InfeasibleError, PlanError
from ...shared.basics.progress import OnProgress, no_progress
from ...shared.pipelines.pipeline import Pipeline, Stage
from ...shared.pipelines.prediction import PipelinePrediction
from ...shared.pipelines.split_search import SplitOutcome, SplitSearch
from ...shared.schema.plan import Plan
from ...shared.schema.record import Record
from ...shared.schema.schedule import TaskKind
from ...shared.schema.workload import Workload
from ...shared.workloads.stages import stage_workload
from ..costs.task_costs import CostModel
from ..engine.pipelines import predicted_pipeline, with_interval
from ..searching.request import GlobalBatch, SearchRequest
from ..searching.search import search

_BOUND_FRAC = 1 - 1e-5
"""Covers what the simulator tolerates as periodic, and rounding."""


def search_splits(request: SearchRequest, *, on_progress: OnProgress = no_progress) -> SplitSearch:
    """The fastest way to have a distillation on the request's ranks, over all numbers of stages and replicas.

    ``request.step.num_ranks`` ranks are so many stages times so many replicas; the modes of the step are those that
    replicas may use.  Its micro-batches are those of every rank where all are replicas; with n stages each has n times
    as many, so that all ways train on the same samples in a step.  Ctrl-C ends the search with the best pipeline so
    far, if there is one.  See [Note: The best split].

    Raises InfeasibleError if nothing fits, PlanError if the request is none for pipelines, and what ``search`` raises.
    """
    workload = _checked(request)
    found: list[tuple[SplitOutcome, PipelinePrediction | None]] = []
    is_interrupted = False
    numbers = list(_numbers_of_stages(request.step.num_ranks, workload.num_blocks // 2))
    try:
        for place, num_stages in enumerate(numbers):
            on_progress(place, len(numbers))
            found.append(best_pipeline(request, num_stages))
    except KeyboardInterrupt:
        if not any(prediction for _, prediction in found):
            raise
        is_interrupted = True
    predictions = [prediction for _, prediction in found if prediction is not None]
    if not predictions:
        reasons = [f"With {split.num_stages} stage{'s'[: split.num_stages - 1]}: {split.reason}" for split, _ in found]
        raise InfeasibleError(f"no pipeline on {request.step.num_ranks} ranks fits. {' '.join(reasons)}")
    fastest = max(prediction.tokens_per_s for prediction in predictions)
    tolerance_frac = request.effort.tolerance_frac
    chosen = next(one for one in predictions if one.tokens_per_s >= fastest * (1 - tolerance_frac))
    device_bytes = replace(request, workload=workload).budgets_bytes()[0]
    return SplitSearch(
        model_name=workload.model_name,
        hardware_name=request.hardware.name,
        num_ranks=request.step.num_ranks,
        chosen=with_interval(chosen, workload, request.hardware, request.calibration),
        splits=tuple(split for split, _ in found),
        device_budget_bytes=device_bytes,
        tolerance_frac=tolerance_frac,
        is_interrupted=is_interrupted,
    )


def best_pipeline(request: SearchRequest, num_stages: int) -> tuple[SplitOutcome, PipelinePrediction | None]:
    """The best split into ``num_stages`` on the request's ranks; None, with the reason, where none fits.

    See [Note: The best split].  Raises what ``search_splits`` raises.
    """
    workload, num_replicas = _checked(request), request.step.num_ranks // num_stages
    # All ways train on the same samples in a step: fewer replicas have as many more micro-batches.
    step = replace(request.step, num_ranks=num_replicas, micro_batches=request.step.micro_batches * num_stages)
    stages = _Stages(replace(request, step=step, baselines=None), workload, num_stages)
    split = SplitOutcome(num_stages=num_stages, num_replicas=num_replicas)
    try:
        num_pairs = stages.best()
    except (InfeasibleError, HardwareError) as error:
        return split.model_copy(update={"reason": str(error), "num_searches": stages.num_searches}), None
    prediction = stages.pipeline(num_pairs)
    # Searches of one rank have no use for tables.
    from ...shared.tables.labels import bottleneck

    record = prediction.stages[prediction.slowest].record
    told = split.model_copy(
        update={
            "num_pairs": num_pairs,
            "iteration_s": prediction.iteration_s,
            "tokens_per_s": prediction.tokens_per_s,
            "peak_bytes": prediction.peak_bytes,
            "bottleneck": bottleneck(record),
            "num_searches": stages.num_searches,
        }
    )
    return told, prediction


def _checked(request: SearchRequest) -> Workload:
    if isinstance(request.workload, GlobalBatch):
        raise PlanError("pipelines are searched at one size of the micro-batch. Name it, in place of a global batch.")
    if any(request.space.n_disk_state or ()):
        raise PlanError("ranks of a pipeline have no chunks on a disk. Leave out n_disk_state, n_disk and n_staging.")
    return request.workload


def _numbers_of_stages(num_ranks: int, num_pairs: int) -> Iterator[int]:
    """Every number of stages that divides the ranks, and of which each has a pair."""
    return (number for number in range(1, min(num_ranks, num_pairs) + 1) if num_ranks % number == 0)


@dataclass
class _Stages:
    """The stages that a pipeline of ``num_stages`` may have, each by its first pair and its number of pairs."""

    request: SearchRequest
    workload: Workload
    num_stages: int
    _found: dict[Hashable, SearchResult | InfeasibleError] = field(default_factory=dict)
    """By what the stage does."""
    _keys: dict[tuple[int, int], Hashable] = field(default_factory=dict)

    @property
    def num_searches(self) -> int:
        """Stages that were searched."""
        return len(self._found)

    @property
    def num_pairs(self) -> int:
        """Pairs of all stages."""
        return self.workload.num_blocks // 2

    @property
    def _tolerance_frac(self) -> float:
        return self.request.effort.tolerance_frac

    def best(self) -> tuple[int, ...]:
        """Pairs of every stage of the best split.  Raises InfeasibleError if no split fits."""
        best_s, best = inf, None
        while True:
            bounds = self._bounds()
            bound_s, split = best_split(bounds, self.num_stages)
            if best is not None and bound_s >= best_s * (1 - self._tolerance_frac):
                return best
            if bound_s == inf:
                raise self._nothing_fits()
            slowest_s = self._slowest_s(split)
            if slowest_s < best_s:
                best_s, best = slowest_s, split
            if slowest_s <= bound_s:
                # Their bounds are what they take: nothing is left that could be better.
                assert best is not None
                return best

    def _slowest_s(self, split: Sequence[int]) -> float:
        """What the split takes; of one that does not fit, stages behind the first that does not are left alone."""
        slowest_s, first = 0.0, 0
        for number in split:
            slowest_s = max(slowest_s, self.seconds(first, number))
            if slowest_s == inf:
                return inf
            first += number
        return slowest_s

    def seconds(self, first: int, number: int) -> float:
        """What the stage takes by its best plan; infinite where none fits."""
        found = self._search(first, number)
        return inf if isinstance(found, InfeasibleError) else found.prediction.iteration_s

    def pipeline(self, split: Sequence[int]) -> PipelinePrediction:
        """The pipeline of a split whose stages have plans."""
        stages, workloads, records = [], [], []
        first = 0
        for number in split:
            found, own = self._search(first, number), self._stage(first, number)
            assert isinstance(found, SearchResult), "the split fits"
            plan = found.certificate.noted(found.plan).model_copy(update={"workload_id": own.identity})
            stages.append(Stage(num_pairs=number, plan=plan))
            workloads.append(own)
            records.append(_of_plan(found.prediction, plan))
            first += number
        notes = {stage.plan.note for stage in stages if stage.plan.note is not None}
        pipeline = Pipeline(
            workload_id=self.workload.identity,
            num_replicas=self.request.step.num_ranks,
            stages=tuple(stages),
            note=" ".join(sorted(notes)) or None,
        )
        return predicted_pipeline(pipeline, tuple(workloads), records)

    def _stage(self, first: int, number: int) -> Workload:
        return stage_workload(self.workload, first, number, self.num_stages)

    def _key(self, first: int, number: int) -> Hashable:
        """What the stage does: equal ones have equal plans."""
        if (first, number) not in self._keys:
            kinds, outside = self._kinds
            begin, end = 2 * first, 2 * (first + number)
            users = tuple(tuple(user - begin for user in blocks if begin <= user < end) for blocks in outside)
            self._keys[first, number] = (tuple(kinds[begin:end]), users, first > 0, end < len(kinds))
        return self._keys[first, number]

    @cached_property
    def _kinds(self) -> tuple[list[int], list[list[int]]]:
        """Of every block a number that alike ones share; of every parameter outside the blocks those that use it."""
        facts: dict[int, list[Hashable]] = {block: [] for block in range(self.workload.num_blocks)}
        outside = []
        for parameter in self.workload.parameters:
            if parameter.block is not None:
                facts[parameter.block].append((parameter.shape, parameter.dtype, parameter.trainable))
            elif parameter.uses is not None:
                outside.append([user for user in parameter.uses.forward if isinstance(user, int)])
        numbers: dict[Hashable, int] = {}
        kinds = [
            numbers.setdefault((block.profile, tuple(facts[place])), len(numbers))
            for place, block in enumerate(self.workload.blocks)
        ]
        return kinds, outside

    def _search(self, first: int, number: int) -> SearchResult | InfeasibleError:
        key = self._key(first, number)
        if key not in self._found:
            try:
                self._found[key] = search(replace(self.request, workload=self._stage(first, number)))
            except InfeasibleError as error:
                self._found[key] = error
        return self._found[key]

    def _nothing_fits(self) -> InfeasibleError:
        """Why not even the smallest stages fit."""
        reasons = [found for found in self._found.values() if isinstance(found, InfeasibleError)]
        return reasons[0] if self.num_stages == 1 else InfeasibleError(f"some pairs fit in no stage: {reasons[0]}")

    # -- bounds ------------------------------------------------------------------------------------------------------

    @cached_property
    def _compute_s(self) -> tuple[float, list[float]]:
        """Seconds of the prologue, and the sums of those of the first so many pairs; of all micro-batches."""
        request, workload = self.request, self.workload
        costs = CostModel.of(
            self._stage(0, self.num_pairs - self.num_stages + 1),
            request.hardware,
            request.calibration,
            num_ranks=request.step.num_ranks,
        )
        assert workload.distillation is not None
        num = request.step.micro_batches
        of_pairs = []
        for student in range(1, workload.num_blocks, 2):
            profile, loss = workload.profile_of(student), workload.distillation.losses[workload.blocks[student].profile]
            phases = (
                (workload.profile_of(student - 1).checkpoint_forward, TaskKind.TEACHER_FORWARD),
                (profile.forward, TaskKind.FORWARD),
                (loss, TaskKind.LOSS),
                (profile.backward, TaskKind.BACKWARD),
            )
            of_pairs.append(num * sum(costs.phase_s(phase, kind) for phase, kind in phases))
        prologue_s = num * costs.phase_s(workload.prologue_forward, TaskKind.TEACHER_FORWARD)
        return prologue_s, list(accumulate(of_pairs, initial=0.0))

    def _bounds(self) -> dict[tuple[int, int], float]:
        """By first pair and number of pairs, what the stage takes at least; infinite where it does not fit."""
        prologue_s, sums_s = self._compute_s
        bounds: dict[tuple[int, int], float] = {}
        floors: dict[tuple[int, int], float] = {}
        """What stages take at least that contain each and exchange as much."""
        tolerance_frac = self._tolerance_frac
        for first, number in self._possible():
            end, floor_s = first + number, 0.0
            if tolerance_frac and end < self.num_pairs:
                floor_s = max(floor_s, floors.get((first, number - 1), 0.0))
            if tolerance_frac and first:
                floor_s = max(floor_s, floors.get((first + 1, number - 1), 0.0))
            if self._key(first, number) in self._found:
                seconds = bounds[first, number] = self.seconds(first, number)
                floor_s = max(floor_s, seconds * (1 - tolerance_frac))
            else:
                compute_s = prologue_s + sums_s[end] - sums_s[first]
                bounds[first, number] = max(_BOUND_FRAC * compute_s, floor_s)
            floors[first, number] = floor_s
        return bounds

    def _possible(self) -> Iterator[tuple[int, int]]:
        """The first pair and the number of pairs of every stage there may be, the smallest first."""
        for number in range(1, self.num_pairs - self.num_stages + 2):
            for first in range(self.num_pairs - number + 1):
                num_others = (first > 0) + (first + number < self.num_pairs)
                if num_others < self.num_stages and (self.num_stages > 1 or number == self.num_pairs):
                    yield first, number


def best_split(seconds: dict[tuple[int, int], float], num_stages: int) -> tuple[float, tuple[int, ...]]:
    """The least time of the slowest stage, and the pairs of every stage of a split that has it.

    ``seconds``: by first pair and number of pairs, of every stage there may be.  Of equal splits the one with the most
    even stages, then with more pairs in the last ones.
    """
    num_pairs = max(first + number for first, number in seconds)
    best: dict[int, tuple[float, int, tuple[int, ...]]] = {0: (0.0, 0, ())}
    for stage in range(num_stages):
        following: dict[int, tuple[float, int, tuple[int, ...]]] = {}
        for begin, (slowest_s, squares, split) in best.items():
            behind = num_stages - stage - 1
            for number in range(1, num_pairs - begin - behind + 1):
                end = begin + number
                if not behind and end < num_pairs:
                    continue
                if (begin, number) not in seconds:
                    continue
                own = (max(slowest_s, seconds[begin, number]), squares + number**2, (*split, number))
                if end not in following or own < following[end]:
                    following[end] = own
        best = following
    slowest_s, _, found = best[num_pairs]
    return slowest_s, found


def _of_plan(record: Record, plan: Plan) -> Record:
    """The record of an alike stage as that of ``plan``."""
    return record.model_copy(update={"plan": plan, "plan_id": plan.identity})
