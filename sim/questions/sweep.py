"""The best plan at every shape of a batch, many shapes at once, and what a device of unlimited memory would bring.

[Note: Points that need no search]
A larger batch, or a longer sequence, needs more memory.  Points are searched in the order of their tokens.  Where no
plan fits one, those that are at least as large in both are left out, and answered with it.  Some of them may be under
way in other processes by then, and are answered by themselves.

[Note: Unlimited memory]
The best plan on a device with memory for everything keeps everything and recomputes nothing.  What is left open is the
size of its chunks.  Parameters are the same at every point.  So the first point is searched over all sizes, and others
take its size, in a third of the time.  Of several ranks chunks also decide what hides behind compute: there each point
is searched over all sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Final

from ...shared.answers.plan_kind import PlanKind
from ...shared.answers.search_result import SearchResult
from ...shared.basics.errors import InfeasibleError, PlanError, ProtwinError
from ...shared.basics.progress import OnProgress
from ...shared.compile.compile import compile_schedule
from ...shared.schema.record import Record
from ...shared.schema.workload import Workload
from ...shared.sweeps.sweep import SweepPlan, SweepPoint
from ...shared.tables.labels import bottleneck
from ...shared.verify.guaranteed_peak import guaranteed_device_peak
from ..engine.simulator import simulate
from ..searching.request import SearchRequest
from ..searching.search import search_batches
from ..space.space import SearchSpace
from .in_tiles import AskedTiles
from .processes import interruptions_held, searching_processes

_UNLIMITED_BYTES: Final = 2**50
"""More than any batch needs."""
_ON_DEVICE: Final = (PlanKind.RESIDENT, PlanKind.CHECKPOINTED)

_OF_RECOMPUTATION: Final = ("n_checkpoint", "n_selective", "product_stride", "mlp_tiles", "loss_tiles")
"""Knobs that decide what runs again in backward."""

Shape = tuple[int, int]
"""Samples of a micro-batch, and tokens of a sample."""


@dataclass(frozen=True, kw_only=True)
class SweepRequest:
    """The same question about batches of many shapes."""

    workload_at: Callable[[int, int], Workload]
    """The workload of so many samples of so many tokens.  Goes to other processes, as all of this does."""
    workload_in_tiles: Callable[[int, int], Workload]
    """The same where nothing fits unless something runs in tiles."""
    tiles: AskedTiles
    request: SearchRequest
    """About any of the shapes, the smallest best."""
    run_tokens: int | None = None
    """What training on so many tokens takes is told of every point; None: nothing."""
    unlimited_chunk_bytes: int | None = None
    """Chunks of plans on a device of unlimited memory; None: every size.  See [Note: Unlimited memory]."""

    def num_tokens(self, shape: Shape) -> int:
        """Tokens of a step of all ranks."""
        batch_size, length = shape
        step = self.request.step
        return batch_size * length * step.micro_batches * (step.num_ranks // self.request.sequence_unit)


def sweep(
    asked: SweepRequest,
    shapes: Sequence[Shape],
    *,
    num_processes: int,
    on_progress: OnProgress,
) -> tuple[list[SweepPoint], bool]:
    """The points, in the order of ``shapes``, and whether all were answered: Ctrl-C ends the sweep with those so far.

    Raises PlanError if something else than memory stands against every shape, ProtwinError if a process was ended from
    outside.
    """
    found: dict[Shape, SweepPoint] = {}
    ordered = sorted(shapes, key=lambda shape: (shape[0] * shape[1], shape[1]))
    on_progress(0, len(ordered))
    is_complete = True
    try:
        asked = _with_what_points_share(asked)
        for shape, point in _answers(asked, ordered, num_processes):
            found[shape] = point
            on_progress(len(found), len(ordered))
    except KeyboardInterrupt:
        if not found:
            raise
        is_complete = False
    if is_complete and all(point.found is None and not point.lacks_memory for point in found.values()):
        # What stands against every point is no lack of memory, but the question.
        raise PlanError(found[ordered[0]].reason)
    missing = (_unanswered(asked, shape) for shape in shapes if shape not in found)
    found |= {(point.batch_size, point.sequence_length): point for point in missing}
    return [found[shape] for shape in shapes], is_complete


def search_point(asked: SweepRequest, shape: Shape) -> SweepPoint:
    """The recommended plan at one shape, beside plans on a device of unlimited memory; or why there is none."""
    nothing = _unanswered(asked, shape).model_copy(update={"is_searched": True})
    try:
        request = replace(asked.request, workload=asked.workload_at(*shape))
        request, result = _searched(asked, request, shape)
    except ProtwinError as error:
        return nothing.model_copy(update={"reason": str(error), "lacks_memory": isinstance(error, InfeasibleError)})
    workload = request.workload
    assert isinstance(workload, Workload), "a sweep names the size of the micro-batch"
    unlimited = _unlimited(request, asked.unlimited_chunk_bytes)
    same = simulate(
        unlimited.plan.model_copy(update={knob: getattr(result.plan, knob) for knob in _OF_RECOMPUTATION}),
        workload,
        request.hardware,
        request.calibration,
    )
    record, tokens = result.prediction, asked.run_tokens
    found = _plan_of(record if tokens is None else record.for_tokens(tokens), result)
    is_on_device, budget_bytes = result.plan_kind in _ON_DEVICE, result.device_budget_bytes
    return nothing.model_copy(
        update={
            "found": found,
            "on_device": found if is_on_device else _on_device(request, unlimited, budget_bytes),
            "unlimited_s": unlimited.prediction.iteration_s,
            "same_recomputation_s": same.iteration_s,
        }
    )


def _searched(asked: SweepRequest, request: SearchRequest, shape: Shape) -> tuple[SearchRequest, SearchResult]:
    """The recommended plan, and the request that it answers: one for tiles where nothing fits whole."""
    _, length = shape
    try:
        return request, search_batches(request).result
    except InfeasibleError:
        tiled = asked.tiles.search_in_tiles(request, lambda size: asked.workload_in_tiles(size, length))
        if tiled is None:
            raise
        return tiled, search_batches(tiled).result


def _unlimited(request: SearchRequest, chunk_bytes: int | None) -> SearchResult:
    """The best plan on a device, and a host, of unlimited memory; see [Note: Unlimited memory]."""
    tiles = {"mlp_tiles": request.space.mlp_tiles or (1,), "loss_tiles": request.space.loss_tiles or (1,)}
    allowed: dict[str, tuple[int, ...] | None] = {"n_checkpoint": (0,), "n_swap": (0,), **tiles}
    allowed["sequence_ranks"] = request.space.sequence_ranks
    if chunk_bytes is not None:
        allowed["chunk_bytes"] = (chunk_bytes,)
    return search_batches(
        replace(
            request,
            device_budget_bytes=_UNLIMITED_BYTES,
            host_budget_bytes=_UNLIMITED_BYTES,
            margin_frac=None,
            space=SearchSpace.model_validate(allowed),
        )
    ).result


def _on_device(request: SearchRequest, unlimited: SearchResult, budget_bytes: int) -> SweepPlan | None:
    """The fastest plan with everything on the device, where one fits."""
    plan, workload = unlimited.plan, request.workload
    assert isinstance(workload, Workload)
    if unlimited.plan_kind not in _ON_DEVICE:
        return None
    # The least that such plans need: no search where that is too much.
    tiles = {
        "mlp_tiles": max((one.mlp_tiles for one in workload.tilings), default=1),
        "loss_tiles": max((one.loss_tiles for one in workload.loss_tilings), default=1),
    }
    least = plan.model_copy(update={"n_checkpoint": workload.num_blocks, **tiles})
    if guaranteed_device_peak(compile_schedule(least, workload)).size_bytes > budget_bytes:
        return None
    space = request.space.model_copy(update={"chunk_bytes": (plan.chunk_bytes,), "n_persist": (plan.n_persist,)})
    try:
        found = search_batches(replace(request, space=space)).result
    except InfeasibleError:
        return None
    return _plan_of(found.prediction, found) if found.plan_kind in _ON_DEVICE else None


def _plan_of(record: Record, result: SearchResult) -> SweepPlan:
    host = record.host_memory
    return SweepPlan(
        plan=result.plan,
        plan_kind=result.plan_kind,
        iteration_s=record.iteration_s,
        iteration_interval_s=record.iteration_interval_s,
        tokens_per_s=record.tokens_per_s,
        guaranteed_peak_device_bytes=record.guaranteed_peak_device_bytes,
        host_bytes=0 if host is None else host.planned_bytes,
        mfu_frac=record.mfu_frac,
        bottleneck=bottleneck(record),
        survives=result.survives,
        usd_per_million_tokens=record.usd_per_million_tokens,
        run=record.run,
    )


def _unanswered(asked: SweepRequest, shape: Shape) -> SweepPoint:
    batch_size, length = shape
    return SweepPoint(
        batch_size=batch_size, sequence_length=length, num_tokens=asked.num_tokens(shape), is_searched=False
    )


def _with_what_points_share(asked: SweepRequest) -> SweepRequest:
    """``asked`` with the size of chunks on a device of unlimited memory; see [Note: Unlimited memory]."""
    if asked.request.step.num_ranks > 1:
        return asked
    return replace(asked, unlimited_chunk_bytes=_unlimited(asked.request, None).plan.chunk_bytes)


def _answers(asked: SweepRequest, ordered: Sequence[Shape], num_processes: int) -> Iterator[tuple[Shape, SweepPoint]]:
    """Points as they come; those that need no search too.  Ctrl-C ends all processes."""
    todo = _ToDo(asked, list(ordered))
    num_processes = min(num_processes, len(ordered))
    if num_processes == 1:
        for shape in todo:
            yield from todo.skipped()
            yield shape, todo.taken(search_point(asked, shape))
        yield from todo.skipped()
        return
    searching: dict[Future[SweepPoint], Shape] = {}
    with searching_processes(num_processes) as pool:
        while True:
            for shape in islice(todo, num_processes - len(searching)):
                with interruptions_held():
                    searching[pool.submit(search_point, asked, shape)] = shape
            yield from todo.skipped()
            if not searching:
                return
            for future in wait(searching, return_when=FIRST_COMPLETED).done:
                yield searching.pop(future), todo.taken(future.result())


@dataclass
class _ToDo:
    """Shapes that are still to be searched, in order; see [Note: Points that need no search]."""

    asked: SweepRequest
    shapes: list[Shape]
    too_large: list[SweepPoint] = field(default_factory=list)
    answered: list[tuple[Shape, SweepPoint]] = field(default_factory=list)

    def __iter__(self) -> Iterator[Shape]:
        while self.shapes:
            shape = self.shapes.pop(0)
            if (reason := self._why_too_large(shape)) is None:
                yield shape
            else:
                point = _unanswered(self.asked, shape).model_copy(update={"reason": reason, "lacks_memory": True})
                self.answered.append((shape, point))

    def skipped(self) -> Iterator[tuple[Shape, SweepPoint]]:
        """Points that smaller ones have answered since it was asked last."""
        found, self.answered = self.answered, []
        yield from found

    def taken(self, point: SweepPoint) -> SweepPoint:
        """The point, which may answer for larger ones."""
        if point.lacks_memory:
            self.too_large.append(point)
        return point

    def _why_too_large(self, shape: Shape) -> str | None:
        batch_size, length = shape
        for one in self.too_large:
            if one.batch_size <= batch_size and one.sequence_length <= length:
                return f"no less than {one.words} tokens need, for which {one.reason}"
        return None
