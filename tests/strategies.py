"""Hypothesis strategies for everything that the schema describes.

Sizes are small (parameters of a few kilobytes) so that chunk boundaries, alignment and evictions all occur within a
few blocks.  Every draw shrinks towards one block, one parameter, one chunk, KEEP everywhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from hypothesis import strategies as st
from hypothesis.strategies import DrawFn, SearchStrategy

from protwin.shared.layout.layout import Layout, build_layout
from protwin.shared.schema.calibration import Calibration, Contention, Factor
from protwin.shared.schema.hardware import Device, DeviceKind, Disk, Hardware, Host, Link, LinkPoint
from protwin.shared.schema.memory_accounts import DeviceReserved, HostMemory, PinnedRule
from protwin.shared.schema.optimizer import HostGradients, Optimizer
from protwin.shared.schema.plan import ActivationMode, ParallelMode, Plan
from protwin.shared.schema.record import (
    ChunkCounts,
    Holding,
    IterationPhase,
    LaneUse,
    MemoryCurve,
    Origin,
    PhaseWait,
    Record,
    Remedy,
    RemedyKind,
    TaskTiming,
)
from protwin.shared.schema.schedule import LANE_OF, Content, Lane, Memory, TaskKind
from protwin.shared.schema.shared_inputs import SharedInput
from protwin.shared.schema.workload import (
    Block,
    BlockProfile,
    DType,
    Operation,
    OperationClass,
    OuterSection,
    Parameter,
    Phase,
    Uses,
    Workload,
    in_forward_order,
)

CHUNK_BYTES: Final = (2**30, 8192, 4096, 2048, 1024, 512, 256, 1)
"""From one chunk for everything to one chunk per parameter."""

_SIZES: Final = st.integers(0, 40_000)
_TRAINED_DTYPES: Final = st.sampled_from((DType.FLOAT32, DType.BFLOAT16))


@dataclass(frozen=True)
class PlannedWorkload:
    """A workload, a plan that it can follow, and the layout of the two."""

    workload: Workload
    plan: Plan
    layout: Layout


# -- workloads -------------------------------------------------------------------------------------------------------


def operations() -> SearchStrategy[Operation]:
    """Operations of every class, small and cheap."""
    return st.builds(
        Operation,
        name=st.sampled_from(("aten.mm", "aten.add", "aten.native_layer_norm")),
        operation_class=st.sampled_from(OperationClass),
        dtype=_TRAINED_DTYPES,
        flops=st.integers(0, 10**9),
        bytes_moved=st.integers(0, 10**8),
        count=st.integers(1, 8),
        shape=st.just(()) | st.tuples(*[st.integers(1, 2**12)] * 4),
    )


def _curves(draw: DrawFn, net_bytes: int) -> tuple[tuple[float, int], ...]:
    """A curve that begins at 0 or higher and ends at ``net_bytes`` or higher.

    Each entry is the highest level within its stretch; a phase that adds nothing may have none.
    """
    num_stretches = draw(st.integers(0 if net_bytes <= 0 else 1, 3))
    curve = []
    for stretch in range(num_stretches):
        floor = 0 if stretch == 0 else min(0, net_bytes)
        if stretch == num_stretches - 1:
            floor = max(floor, net_bytes)
        curve.append(((stretch + 1) / num_stretches, floor + draw(_SIZES)))
    return tuple(curve)


@st.composite
def phases(draw: DrawFn, net_bytes: int = 0, measured: bool | None = True, gradient_bytes: int | None = None) -> Phase:
    """A phase of the given net bytes, of which ``gradient_bytes`` are gradients, with curves that agree with them.

    ``measured``: whether it carries seconds, None for either.
    """
    curve = _curves(draw, net_bytes)
    adding_curve = _curves(draw, net_bytes - gradient_bytes) if gradient_bytes and draw(st.booleans()) else ()
    is_measured = draw(st.booleans()) if measured is None else measured
    return Phase(
        operations=() if is_measured else tuple(draw(st.lists(operations(), max_size=2))),
        net_bytes=net_bytes,
        gradient_bytes=gradient_bytes,
        curve=curve,
        adding_curve=adding_curve,
        measured_s=draw(st.integers(0, 2000)) / 1000 if is_measured else None,
    )


@dataclass(frozen=True)
class _BlockKind:
    """What equal blocks share."""

    parameters: tuple[tuple[int, DType, bool], ...]
    """Elements, element type and trainability of each."""
    profile: BlockProfile


@st.composite
def _parameter_lists(
    draw: DrawFn, dtypes: SearchStrategy[DType], min_size: int, max_size: int
) -> tuple[tuple[int, DType, bool], ...]:
    trained = st.sampled_from((True, True, True, False))
    number = draw(st.integers(min_size, max_size))
    return tuple((draw(st.integers(0, 1000)), draw(dtypes), draw(trained)) for _ in range(number))


def _gradient_bytes(parameters: Sequence[tuple[int, DType, bool]]) -> int:
    return sum(elements * dtype.item_bytes for elements, dtype, trainable in parameters if trainable)


@st.composite
def _block_kinds(draw: DrawFn, dtypes: SearchStrategy[DType], min_parameters: int, measured: bool | None) -> _BlockKind:
    """A backward releases what its block saved and its output, and leaves the block's gradients.

    (It also exchanges the incoming gradient, of its output's size, for one of its input's, and releases that input.)
    A checkpointed forward may leave a little beside its output: the state of the random generator.  A block that runs
    under ``torch.no_grad()`` leaves no gradients; one that leaves all may not say so.
    """
    parameters = draw(_parameter_lists(dtypes, min_parameters, 4))
    gradient_bytes = draw(st.sampled_from((_gradient_bytes(parameters),) * 3 + (0,)))
    is_all = gradient_bytes == _gradient_bytes(parameters)
    stated_bytes = draw(st.sampled_from((gradient_bytes, None))) if is_all else gradient_bytes
    output_bytes, saved_bytes = draw(_SIZES), draw(_SIZES)
    recomputed_bytes = draw(st.integers(0, saved_bytes))
    generator_bytes = draw(st.sampled_from((0, 0, 5056)))
    return _BlockKind(
        parameters,
        BlockProfile(
            output_bytes=output_bytes,
            forward=draw(phases(output_bytes + saved_bytes, measured)),
            backward=draw(phases(gradient_bytes - saved_bytes - output_bytes, measured, stated_bytes)),
            checkpoint_forward=draw(phases(output_bytes + generator_bytes, measured)),
            recompute=draw(phases(recomputed_bytes, measured)),
            checkpoint_backward=draw(
                phases(gradient_bytes - recomputed_bytes - output_bytes - generator_bytes, measured, stated_bytes)
            ),
            swappable_bytes=draw(st.integers(0, saved_bytes)),
        ),
    )


@st.composite
def _shared_inputs(draw: DrawFn, num_blocks: int) -> SharedInput:
    """A mask or the like, held by any blocks."""
    blocks = st.integers(0, num_blocks - 1)
    holders = st.sets(blocks).map(sorted).map(tuple)
    return SharedInput(
        size_bytes=draw(st.integers(1, 3_000)),
        let_go_by=draw(st.none() | blocks),
        kept_by=draw(holders),
        checkpointed_by=draw(holders),
        freed_in_kept=draw(holders),
        freed_in_checkpointed=draw(holders),
    )


@st.composite
def uses(draw: DrawFn, num_blocks: int) -> Uses:
    """Any sections: a tied head, an embedding of several, weights that blocks share, what a block alone would own."""
    sections = st.sampled_from(OuterSection) | st.integers(0, num_blocks - 1)
    users = st.lists(sections, max_size=3, unique=True).map(tuple)
    forward = draw(users.filter(len))
    backward = draw(st.just(forward) | users)
    return Uses(forward=forward, backward=backward, gradient=min((draw(sections), *backward), key=in_forward_order))


@st.composite
def workloads(draw: DrawFn, max_blocks: int = 6, measured: bool | None = True, min_parameters: int = 1) -> Workload:
    """Workloads of one to ``max_blocks`` blocks of several kinds, with parameters that no block alone uses anywhere.

    ``measured``: whether phases carry seconds (None: some do); without, they carry operations.
    ``min_parameters``: of each block.
    """
    dtypes = draw(st.sampled_from((st.just(DType.FLOAT32), st.just(DType.BFLOAT16), _TRAINED_DTYPES)))
    num_blocks = draw(st.integers(1, max_blocks))
    kinds = [
        draw(_block_kinds(dtypes, min_parameters, measured)) for _ in range(draw(st.integers(1, min(3, num_blocks))))
    ]
    kind_of_block = [draw(st.integers(0, len(kinds) - 1)) for _ in range(num_blocks)]
    parameters = [
        Parameter(name=f"layers.{block}.{place}", shape=(elements,), dtype=dtype, trainable=trainable, block=block)
        for block, kind in enumerate(kind_of_block)
        for place, (elements, dtype, trainable) in enumerate(kinds[kind].parameters)
    ]
    unowned = draw(_parameter_lists(dtypes, 0, 3))
    used = [draw(st.none() | uses(num_blocks)) for _ in unowned]
    for number, (elements, dtype, trainable) in enumerate(unowned):
        place = draw(st.integers(0, len(parameters)))
        aliases = ("tied",) if number == 0 and elements % 2 else ()
        parameters.insert(
            place,
            Parameter(
                name=f"unowned.{number}",
                shape=(elements, 1),
                dtype=dtype,
                trainable=trainable,
                uses=used[number],
                aliases=aliases,
            ),
        )
    embedded_bytes, loss_bytes = draw(_SIZES), draw(_SIZES)
    embedding_gradient_bytes, head_gradient_bytes = (
        _gradient_bytes([p for p, of_p in zip(unowned, used, strict=True) if (of_p and of_p.gradient) == completed])
        for completed in (OuterSection.PROLOGUE, OuterSection.EPILOGUE)
    )
    unknown_bytes = _gradient_bytes([p for p, of_p in zip(unowned, used, strict=True) if of_p is None])
    embedding_gradient_bytes += unknown_bytes
    return Workload(
        model_name="random",
        model_hash="0123456789abcdef",
        batch_shapes={"input_ids": (2, 8)},
        num_samples=2,
        num_tokens=16,
        compute_dtype=DType.FLOAT32,
        parameters=tuple(parameters),
        blocks=tuple(Block(name=f"layers.{block}", profile=kind) for block, kind in enumerate(kind_of_block)),
        profiles=tuple(kind.profile for kind in kinds),
        prologue_forward=draw(phases(embedded_bytes, measured)),
        epilogue_forward=draw(phases(loss_bytes, measured)),
        epilogue_backward=draw(phases(head_gradient_bytes - loss_bytes, measured, head_gradient_bytes)),
        prologue_backward=draw(phases(embedding_gradient_bytes - embedded_bytes, measured, embedding_gradient_bytes)),
        shared_inputs=tuple(draw(st.lists(_shared_inputs(num_blocks), max_size=3))),
        resident_bytes=draw(_SIZES),
        traced_with="real",
        measured_on="random machine" if measured else None,
    )


# -- plans -----------------------------------------------------------------------------------------------------------


ADAMW: Final = st.just(Optimizer.ADAMW)
AS_PARAMETERS: Final = st.just(HostGradients.PARAMETERS)


def any_optimizer(workload: Workload) -> SearchStrategy[Optimizer]:
    """AdamW in every second plan, else any that can step the workload's parameters."""
    dtypes = {parameter.dtype for parameter in workload.parameters if parameter.trainable}
    has_empty = any(parameter.trainable and not parameter.num_elements for parameter in workload.parameters)
    able = [
        optimizer
        for optimizer in Optimizer
        if not (optimizer.is_of_bitsandbytes and DType.FLOAT64 in dtypes)
        and not (optimizer is Optimizer.ADAFACTOR and has_empty)
        and not (optimizer is Optimizer.ADAMW_BF16 and dtypes and DType.BFLOAT16 not in dtypes)
    ]
    return ADAMW | st.sampled_from(able)


def any_host_gradients(workload: Workload) -> SearchStrategy[HostGradients]:
    """Those of the parameters, or float32 where any trained parameter is narrower."""
    narrow = any(parameter.trainable and parameter.dtype.item_bytes < 4 for parameter in workload.parameters)
    return st.sampled_from(tuple(HostGradients) if narrow else (HostGradients.PARAMETERS,))


@st.composite
def plans(
    draw: DrawFn,
    workload: Workload,
    max_prefetch_depth: int = 4,
    optimizers: SearchStrategy[Optimizer] = ADAMW,
    host_gradients: SearchStrategy[HostGradients] = AS_PARAMETERS,
    *,
    has_disk: bool = False,
) -> tuple[Plan, Layout]:
    """A plan that ``workload`` can follow, and its layout; ``has_disk``: with chunks on a disk in every other plan."""
    chunk_bytes = draw(st.sampled_from(CHUNK_BYTES) | st.integers(1, 20_000))
    layout = build_layout(workload.parameters, num_blocks=workload.num_blocks, chunk_bytes=chunk_bytes)
    n_persist = draw(st.integers(0, len(layout.chunks)))
    n_host_stepped = draw(st.just(0) | st.integers(0, len(layout.chunks) - n_persist))
    n_buffer = layout.min_buffers(n_persist + n_host_stepped) + draw(st.integers(0, 5) | st.just(len(layout.chunks)))
    modes = None
    n_checkpoint = draw(st.integers(0, workload.num_blocks))
    n_swap = draw(st.integers(0, workload.num_blocks - n_checkpoint))
    if draw(st.booleans()):
        modes = tuple(
            draw(st.lists(st.sampled_from(ActivationMode), min_size=workload.num_blocks, max_size=workload.num_blocks))
        )
        n_checkpoint, n_swap = (modes.count(mode) for mode in (ActivationMode.CHECKPOINT, ActivationMode.SWAP))
    num_offloaded = len(layout.chunks) - n_persist - n_host_stepped
    n_disk_state = draw(st.just(0) | st.integers(0, num_offloaded)) if has_disk else 0
    # Where nothing is trained there is no norm to limit, and nothing harms one that is taken early.
    norms = (None, None, 1.0) if any(parameter.trainable for parameter in workload.parameters) else (None,)
    plan = Plan(
        workload_id=workload.identity,
        n_disk_state=n_disk_state,
        n_disk=draw(st.integers(0, n_disk_state)),
        n_staging=draw(st.integers(1, 3)) if n_disk_state else 0,
        optimizer=draw(optimizers),
        host_gradients=draw(host_gradients),
        chunk_bytes=chunk_bytes,
        n_persist=n_persist,
        n_host_stepped=n_host_stepped,
        n_buffer=n_buffer,
        prefetch_depth=draw(st.integers(1, max_prefetch_depth)),
        n_checkpoint=n_checkpoint,
        n_swap=n_swap,
        activation_modes=modes,
        micro_batches=draw(st.sampled_from((1, 1, 2, 3))),
        max_gradient_norm=draw(st.sampled_from(norms)),
    )
    return plan, layout


@st.composite
def planned_workloads(
    draw: DrawFn,
    max_blocks: int = 6,
    measured: bool | None = True,
    min_parameters: int = 1,
    *,
    has_disk: bool = False,
) -> PlannedWorkload:
    """A random workload with a random plan for it."""
    workload = draw(workloads(max_blocks, measured, min_parameters))
    chosen = {"optimizers": any_optimizer(workload), "host_gradients": any_host_gradients(workload)}
    plan, layout = draw(plans(workload, **chosen, has_disk=has_disk))
    return PlannedWorkload(workload, plan, layout)


@st.composite
def parallel_workloads(draw: DrawFn, max_blocks: int = 6, measured: bool | None = True) -> PlannedWorkload:
    """A random workload with a random plan for several ranks; often more of them than a chunk has scalars."""
    case = draw(planned_workloads(max_blocks, measured))
    mode = draw(st.sampled_from((ParallelMode.SHARDED, ParallelMode.REPLICATED, ParallelMode.DDP)))
    knobs: dict[str, object] = {"parallel": mode, "num_ranks": draw(st.sampled_from((2, 3, 5, 8, 1000)))}
    if mode is ParallelMode.DDP:
        knobs |= {"n_persist": len(case.layout.chunks), "n_host_stepped": 0}
    if mode is ParallelMode.SHARDED:
        if case.plan.optimizer is Optimizer.ADAFACTOR:
            knobs["optimizer"] = Optimizer.SGD
        knobs |= {"n_persist": case.plan.num_kept, "n_host_stepped": 0}
        num_left = len(case.layout.chunks) - case.plan.num_kept
        knobs["n_shard"] = draw(st.just(0) | st.just(num_left) | st.integers(0, num_left))
    return PlannedWorkload(case.workload, case.plan.model_copy(update=knobs), case.layout)


# -- machines --------------------------------------------------------------------------------------------------------

_RATES: Final = st.floats(1e6, 1e12)
_TIMES: Final = st.floats(0, 1e-2)
_MEMORY: Final = st.integers(2**20, 2**40)


@st.composite
def links(draw: DrawFn, name: str = "link") -> Link:
    """A link; some with a measured table of one to three copies."""
    sizes = sorted(draw(st.sets(st.integers(1, 2**24), max_size=3)))
    return Link(
        name=name,
        latency_s=draw(_TIMES),
        bandwidth_bytes_per_s=draw(_RATES),
        table=tuple(LinkPoint(size_bytes=size, seconds=draw(st.floats(1e-7, 1))) for size in sizes),
    )


@st.composite
def hardware(draw: DrawFn) -> Hardware:
    """A small machine."""
    memory_bytes = draw(_MEMORY)
    return Hardware(
        name="random machine",
        device=Device(
            name="random device",
            kind=draw(st.sampled_from(DeviceKind)),
            memory_bytes=memory_bytes,
            reserved_bytes=draw(st.integers(0, memory_bytes // 2)),
            memory_bandwidth_bytes_per_s=draw(_RATES),
            peak_flop_per_s=draw(
                st.dictionaries(
                    st.sampled_from((DType.FLOAT32, DType.BFLOAT16, DType.FLOAT16)),
                    st.floats(1e9, 1e15),
                    min_size=1,
                )
            ),
            vector_flop_per_s=draw(st.floats(1e9, 1e14)),
            launch_overhead_s=draw(_TIMES),
            num_multiprocessors=draw(st.none() | st.integers(1, 400)),
            efficiency=draw(st.dictionaries(st.sampled_from(OperationClass), st.floats(0.01, 1), max_size=3)),
        ),
        host=Host(
            name="random host",
            num_cores=draw(st.integers(1, 256)),
            memory_bytes=draw(_MEMORY),
            memory_bandwidth_bytes_per_s=draw(_RATES),
            adam_bytes_per_s=draw(st.none() | _RATES),
        ),
        host_to_device=draw(links("host to device")),
        device_to_host=draw(links("device to host")),
        full_duplex=draw(st.booleans()),
    )


@st.composite
def disks(draw: DrawFn) -> Disk:
    """A disk with room for everything, slower or faster than other parts."""
    return Disk(
        name="random disk",
        capacity_bytes=2**50,
        read_bytes_per_s=draw(_RATES),
        write_bytes_per_s=draw(_RATES),
        latency_s=draw(_TIMES),
    )


@st.composite
def contentions(draw: DrawFn) -> Contention:
    """Slowdowns of two or more lanes side by side."""
    lanes = tuple(draw(st.lists(st.sampled_from(Lane), min_size=2, unique=True)))
    slowdowns = st.lists(st.floats(1, 4), min_size=len(lanes), max_size=len(lanes))
    return Contention(lanes=lanes, slowdowns=tuple(draw(slowdowns)))


@st.composite
def calibrations(draw: DrawFn) -> Calibration:
    """Factors, overheads and contention, any of them absent."""
    factors = st.builds(Factor, value=st.floats(0.1, 10), relative_std=st.floats(0, 1), num_pairs=st.integers(0, 100))
    return Calibration(
        hardware_name="random machine",
        machine="random machine, 2 cores",
        software=draw(st.dictionaries(st.sampled_from(("python", "torch")), st.just("1.0"))),
        factors=draw(st.dictionaries(st.sampled_from(TaskKind), factors)),
        overhead_s=draw(st.dictionaries(st.sampled_from(TaskKind), _TIMES)),
        contention=tuple(draw(st.lists(contentions(), max_size=4, unique_by=lambda entry: frozenset(entry.lanes)))),
        iteration_noise_frac=draw(st.floats(0, 0.5)),
        fitted_to=tuple(draw(st.lists(st.sampled_from(("gpt2", "llama")), unique=True))),
        num_runs=draw(st.integers(1, 9)),
    )


# -- records ---------------------------------------------------------------------------------------------------------


@st.composite
def memory_curves(draw: DrawFn, memory: Memory) -> MemoryCurve:
    """One memory over a few moments."""
    times_s = sorted(draw(st.lists(st.floats(-1, 10), max_size=4)))
    return MemoryCurve(
        memory=memory,
        times_s=tuple(times_s),
        levels_bytes=tuple(draw(st.integers(0, 2**40)) for _ in times_s),
        peak_bytes=draw(st.integers(0, 2**40)),
        peak_at="backward 1",
        alive_at_peak=tuple(
            draw(
                st.lists(
                    st.builds(Holding, content=st.none() | st.sampled_from(Content), size_bytes=st.integers(0, 2**40)),
                    max_size=2,
                )
            )
        ),
    )


@st.composite
def device_reserves(draw: DrawFn) -> DeviceReserved:
    """Accounts of the device's allocator whose range ascends."""
    at_least, expected, at_most = sorted(draw(_SIZES) for _ in range(3))
    return DeviceReserved(
        at_least_bytes=at_least,
        expected_bytes=expected,
        at_most_bytes=at_most,
        workspace_bytes=draw(_SIZES),
        outside_bytes=draw(_SIZES),
        limit_bytes=draw(st.integers(1, 2**40)),
        num_retries=draw(st.none() | st.integers(0, 9)),
        expandable_bytes=draw(st.none() | _SIZES),
        expandable_retries=draw(st.none() | st.integers(0, 9)),
        num_iterations=draw(st.integers(1, 9)),
        is_settled=draw(st.booleans()),
    )


def host_memories() -> SearchStrategy[HostMemory]:
    """Accounts of a process."""
    return st.builds(
        HostMemory,
        pinned_requested_bytes=_SIZES,
        pinned_rounded_bytes=_SIZES,
        pinned_rule=st.sampled_from(PinnedRule),
        state_bytes=_SIZES,
        device_bytes=_SIZES,
        loading_bytes=_SIZES,
        process_bytes=_SIZES,
        step_bytes=_SIZES,
    )


@st.composite
def records(draw: DrawFn) -> Record:
    """Records of a random plan, with a few tasks; they need not be the outcome of any schedule."""
    workload = draw(workloads(max_blocks=3))
    plan, _ = draw(plans(workload))
    tasks = []
    for number in range(draw(st.integers(0, 3))):
        kind, start_s = draw(st.sampled_from(TaskKind)), draw(st.floats(-1, 10))
        duration_s = draw(_TIMES)
        tasks.append(
            TaskTiming(
                task=number,
                name=f"{kind} {number}",
                kind=kind,
                lane=LANE_OF[kind],
                start_s=start_s,
                end_s=start_s + duration_s,
                duration_s=duration_s,
            )
        )
    waits = st.builds(
        PhaseWait,
        phase=st.sampled_from(IterationPhase),
        cause=st.none() | st.sampled_from(TaskKind),
        seconds=_TIMES,
    )
    remedies = st.builds(
        Remedy,
        kind=st.sampled_from(RemedyKind),
        num_samples=st.integers(1, 64),
        plan=st.just(plan),
        iteration_s=st.floats(1e-6, 100),
        speedup=st.floats(0.1, 10),
    )
    lanes = draw(st.lists(st.sampled_from(Lane), unique=True))
    memories = draw(st.lists(st.sampled_from(Memory), unique=True))
    return Record(
        origin=draw(st.sampled_from(Origin)),
        plan=plan,
        plan_id=plan.identity,
        model_name="random",
        hardware_name="random machine",
        machine=draw(st.sampled_from(("", "random machine, 2 cores"))),
        software=draw(st.dictionaries(st.sampled_from(("python", "torch")), st.just("1.0"))),
        emulated=tuple(draw(st.lists(st.sampled_from(("budget", "links")), unique=True))),
        num_samples=draw(st.integers(1, 64)),
        num_tokens=draw(st.integers(1, 4096)),
        iteration_s=draw(st.floats(1e-6, 100)),
        iteration_noise_frac=draw(st.floats(0, 1)),
        num_iterations=draw(st.integers(1, 30)),
        forward_s=draw(_TIMES),
        backward_s=draw(_TIMES),
        optimizer_s=draw(_TIMES),
        waits=draw(st.none() | st.lists(waits, max_size=2).map(tuple)),
        remedies=tuple(draw(st.lists(remedies, max_size=2))),
        tasks=tuple(tasks),
        lanes=tuple(
            LaneUse(lane=lane, num_tasks=draw(st.integers(0, 9)), busy_s=draw(_TIMES), moved_bytes=draw(_SIZES))
            for lane in lanes
        ),
        memory=tuple(draw(memory_curves(memory)) for memory in memories),
        guaranteed_peak_device_bytes=draw(_SIZES),
        num_gathers=draw(st.integers(0, 99)),
        num_cpu_adam_steps=draw(st.integers(0, 99)),
        chunks=draw(
            st.none() | st.builds(ChunkCounts, **{name: st.integers(0, 99) for name in ChunkCounts.model_fields})
        ),
        device_reserved=draw(st.none() | device_reserves()),
        host_memory=draw(st.none() | host_memories()),
    )
