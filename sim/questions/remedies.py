"""What would help a plan most: the part that compute waits for twice as fast, or a larger batch.

Each remedy is a simulation of the record's own plan with one thing changed, so that it costs milliseconds; ``what_if``
searches the best plan for a changed machine, which takes as long as a search.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Final

import numpy as np

from ...shared.answers.search_result import BatchSearchResult
from ...shared.basics.errors import WorkloadError
from ...shared.catalogue.rank_share import machine_of_rank
from ...shared.layout.layout import layout_of
from ...shared.methods.known import method_named
from ...shared.phases.sequence_sharing import why_no_sequence_ranks
from ...shared.schema.calibration import Calibration
from ...shared.schema.hardware import Hardware
from ...shared.schema.plan import Plan
from ...shared.schema.record import Record, Remedy, RemedyKind
from ...shared.schema.schedule import Lane, Schedule
from ...shared.schema.workload import Workload
from ..costs.contention import ContentionModel
from ..costs.task_costs import CostModel
from ..engine.kept_schedule import memory_schedule
from ..engine.simulator import simulate_plan, simulate_timing
from ..searching.request import GlobalBatch, SearchRequest
from ..searching.survival import SegmentRoom
from ..space.prices import PriceList
from ..space.section_program import SectionProgram
from .faster_parts import faster_device, faster_device_links, faster_disk, faster_host, faster_links, faster_network
from .leaner_plans import Room, may_have_room, plan_with_room

WorkloadAt = Callable[[int], Workload | None]
"""The workload of a micro-batch with so many samples; None where there is none at hand."""
_LEAST_SPEEDUP: Final = 1.05
"""What helps less is not worth a line."""
_LARGER: Final = (2, 4)
"""Times the batch."""
_FASTER: Final[dict[RemedyKind, Callable[[Hardware], Hardware]]] = {
    RemedyKind.HOST: faster_host,
    RemedyKind.LINKS: faster_links,
    RemedyKind.DEVICE: faster_device,
    RemedyKind.DEVICE_LINKS: faster_device_links,
    RemedyKind.NETWORK: faster_network,
    RemedyKind.DISK: faster_disk,
}


def remedies(
    record: Record,
    workload: Workload,
    hardware: Hardware,
    calibration: Calibration | None = None,
    *,
    schedule: Schedule | None = None,
    room: Room,
    workload_at: WorkloadAt | None = None,
) -> tuple[Remedy, ...]:
    """What would help the plan of a predicted record most: one part of the machine, and a larger batch.

    The part is the one whose lane is the busiest, or the one that compute spends most of the iteration on or waits
    for; where they differ, both are simulated and the better one is told.  The batch is twice or four times the
    record's, whichever trains more tokens per second, as far as the plan, or a leaner one (``leaner_plans.py``), fits.
    The most helpful first; what gains less than 5 % is left out.

    Args:
        record: What ``simulate`` says of its plan.
        workload: One rank's micro-batch.
        hardware: The machine of all ranks.
        calibration: As of ``simulate``.
        schedule: Spares compiling the plan again.
        room: Memory that one rank's plan may fill.
        workload_at: Other batches; None leaves the batch as it is.
    """
    plan = record.plan
    workload = workload.shared_among(plan.sequence_ranks).tiled(plan.mlp_tiles, plan.loss_tiles)
    if schedule is None:
        schedule = memory_schedule(plan, workload)
    found = [
        _remedy(kind, record, plan, schedule, workload, _FASTER[kind](hardware), calibration)
        for kind in dict.fromkeys(_decisive_parts(record, workload, hardware))
    ]
    found = sorted(found, key=lambda remedy: -remedy.speedup)[:1]
    if workload_at is not None:
        room = room.lowered(record.device_reserved, record.guaranteed_peak_device_bytes)
        costs = _costs(workload, hardware, calibration, plan.num_ranks)
        batches = [
            _remedy(RemedyKind.BATCH, record, larger_plan, larger_schedule, larger, hardware, calibration)
            for larger in _larger_batches(record, workload, workload_at, costs)
            for larger_plan, larger_schedule in _with_room(plan, larger, room)
        ]
        found += sorted(batches, key=lambda remedy: (-remedy.speedup, remedy.num_samples))[:1]
    worthwhile = [remedy for remedy in found if remedy.speedup >= _LEAST_SPEEDUP]
    return tuple(sorted(worthwhile, key=lambda remedy: -remedy.speedup))


def with_remedies(
    found: BatchSearchResult, request: SearchRequest, workload_of: Callable[[int, int | None], Workload | None]
) -> BatchSearchResult:
    """The outcome of a search of ``request``, with what would help the plan that it found.

    ``workload_of``: the workload of so many samples of so many tokens, if it is at hand; where that of the plan is not,
    nothing is told.  A global batch stays what it is.
    """
    result, workload = found.result, request.workload
    plan, question = result.plan, result.prediction.question
    assert question is not None, "a prediction says what was asked"
    length = question.sequence_length
    is_asked = isinstance(workload, Workload) and workload.identity == plan.workload_id
    own = workload if is_asked else workload_of(question.samples_per_micro_batch, length)
    if not isinstance(own, Workload):
        return found
    segments = SegmentRoom.of(replace(request, step=replace(request.step, num_ranks=plan.num_ranks)))
    told = remedies(
        result.prediction,
        own,
        request.hardware,
        request.calibration,
        room=Room(result.device_budget_bytes, result.host_budget_bytes, segments.limit_bytes if segments else None),
        workload_at=None if isinstance(workload, GlobalBatch) else lambda size: workload_of(size, length),
    )
    prediction = result.prediction.model_copy(update={"remedies": told})
    return found.model_copy(update={"result": result.model_copy(update={"prediction": prediction})})


def _decisive_parts(record: Record, workload: Workload, hardware: Hardware) -> Iterator[RemedyKind]:
    """The part of the busiest lane, which no iteration is shorter than, and the one that takes most of compute's time.

    Nothing where no part can be faster: measured seconds stay what they are.
    """
    busy_s: dict[RemedyKind, float] = {}
    spent_s: dict[RemedyKind, float] = {}
    for lane in Lane:
        kind = _part_of(lane, workload, hardware, record.plan.num_ranks)
        if kind is None:
            continue
        waits_s = sum(w.seconds for w in record.waits or () if w.cause is not None and w.cause.lane is lane)
        lane_s = record.lane(lane).busy_s
        busy_s[kind] = max(busy_s.get(kind, 0.0), lane_s)
        spent_s[kind] = spent_s.get(kind, 0.0) + (lane_s if lane is Lane.COMPUTE else waits_s)
    for seconds in (busy_s, spent_s):
        most = max(seconds, key=lambda kind: seconds[kind])
        if seconds[most] > 0:
            yield most


def _part_of(lane: Lane, workload: Workload, hardware: Hardware, num_ranks: int) -> RemedyKind | None:
    """The part that carries a lane; None where a faster one would not show."""
    match lane:
        case Lane.COMPUTE:
            return None if workload.measured_on == hardware.name else RemedyKind.DEVICE
        case Lane.H2D | Lane.D2H:
            return RemedyKind.LINKS
        case Lane.CPU_OPTIM:
            return RemedyKind.HOST
        case Lane.DISK:
            return None if hardware.disk is None else RemedyKind.DISK
        case Lane.COLLECTIVE:
            if hardware.network is not None and num_ranks > hardware.devices_per_node:
                return RemedyKind.NETWORK
            has_own = hardware.node is not None and hardware.node.device_link is not None
            return RemedyKind.DEVICE_LINKS if has_own else RemedyKind.LINKS


def _remedy(
    kind: RemedyKind,
    record: Record,
    plan: Plan,
    schedule: Schedule,
    workload: Workload,
    hardware: Hardware,
    calibration: Calibration | None,
) -> Remedy:
    """The simulation of ``plan`` on ``hardware`` beside the record."""
    costs = _costs(workload, hardware, calibration, plan.num_ranks)
    contention = ContentionModel.for_plan(plan, hardware, calibration, num_stages=workload.num_stages)
    if schedule.micro_batches == plan.micro_batches:
        iteration_s = simulate_timing(schedule, costs.durations_s(schedule), contention).iteration_s
    else:
        iteration_s = simulate_plan(plan, workload, costs, contention)[1].iteration_s
    num_tokens = workload.num_tokens * plan.num_batches
    return Remedy(
        kind=kind,
        num_samples=workload.num_samples,
        plan=plan,
        iteration_s=iteration_s,
        speedup=num_tokens / iteration_s / record.tokens_per_s,
    )


def _costs(workload: Workload, hardware: Hardware, calibration: Calibration | None, num_ranks: int) -> CostModel:
    """What the search counts with: a workload without seconds or operations costs what its copies and steps cost."""
    num_stages = workload.num_stages
    own = machine_of_rank(hardware, num_ranks * num_stages) if num_ranks * num_stages > 1 else hardware
    return CostModel(
        own,
        calibration,
        use_measured=workload.measured_on == hardware.name,
        together=hardware,
        num_ranks=num_ranks,
        num_stages=num_stages,
    )


def _larger_batches(
    record: Record, workload: Workload, workload_at: WorkloadAt, costs: CostModel
) -> Iterator[Workload]:
    """Larger batches that could help: compute alone leaves them the time for it, however little a plan waits."""
    for times in _LARGER:
        try:
            larger = _in_tiles(workload_at(times * workload.num_samples), record.plan)
        except WorkloadError:
            return  # a batch that nobody has asked for may be too large for the model
        if larger is None:
            return
        least_s = least_compute_s(larger, costs)
        if larger.num_tokens * record.plan.num_groups >= _LEAST_SPEEDUP * record.tokens_per_s * least_s:
            yield larger


def _in_tiles(workload: Workload | None, plan: Plan) -> Workload | None:
    """``workload`` shared as by ``plan``, and in as many tiles of MLPs and loss; None if nobody knows it so."""
    if workload is None or why_no_sequence_ranks(plan.sequence_ranks, workload.sequence_sharings, "") is not None:
        return None
    workload = workload.shared_among(plan.sequence_ranks)
    mlp, loss = ({1, *(of.mlp_tiles for of in workload.tilings)}, {1, *(of.loss_tiles for of in workload.loss_tilings)})
    known = plan.mlp_tiles in mlp and plan.loss_tiles in loss
    return workload.tiled(plan.mlp_tiles, plan.loss_tiles) if known else None


def least_compute_s(workload: Workload, costs: CostModel) -> float:
    """Seconds that no plan's compute takes less of for one micro-batch: what every mode of a block has to do."""
    policies = method_named(workload.method).policies
    every = np.array([[False], [True]] if policies.sections.has_modes else [[False]])
    program = SectionProgram.of(policies, workload, np.repeat(every, workload.num_blocks, axis=1))
    return float(program.seconds(PriceList(costs)).min(axis=0).sum())


def _with_room(plan: Plan, larger: Workload, room: Room) -> Iterator[tuple[Plan, Schedule]]:
    """The plan for a larger batch, or one close to it, if one fits."""
    layout = layout_of(larger, plan.chunk_bytes)
    plan = plan.model_copy(update={"workload_id": larger.identity})
    if not may_have_room(larger, layout, room):
        return
    found = plan_with_room(plan, larger, layout, room)
    if found is not None:
        yield found
