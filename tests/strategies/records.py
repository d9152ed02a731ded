"""Records and their parts."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.strategies import DrawFn, SearchStrategy

from protwin.shared.schema.memory_accounts import DeviceReserved, HostMemory, PinnedRule
from protwin.shared.schema.record import (
    ChunkCounts,
    Holding,
    IterationPhase,
    LaneUse,
    MemoryCurve,
    Origin,
    PhaseWait,
    RankRecord,
    RankWait,
    Record,
    Remedy,
    RemedyKind,
    TaskTiming,
)
from protwin.shared.schema.schedule import LANE_OF, Content, Lane, Memory, TaskKind
from tests.strategies.machines import TIMES_S
from tests.strategies.plans import plans
from tests.strategies.workloads import SIZES_BYTES, workloads


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
    at_least, expected, at_most = sorted(draw(SIZES_BYTES) for _ in range(3))
    return DeviceReserved(
        at_least_bytes=at_least,
        expected_bytes=expected,
        at_most_bytes=at_most,
        workspace_bytes=draw(SIZES_BYTES),
        outside_bytes=draw(SIZES_BYTES),
        limit_bytes=draw(st.integers(1, 2**40)),
        num_retries=draw(st.none() | st.integers(0, 9)),
        expandable_bytes=draw(st.none() | SIZES_BYTES),
        expandable_retries=draw(st.none() | st.integers(0, 9)),
        num_iterations=draw(st.integers(1, 9)),
        is_settled=draw(st.booleans()),
    )


def host_memories() -> SearchStrategy[HostMemory]:
    """Accounts of a process."""
    return st.builds(
        HostMemory,
        pinned_requested_bytes=SIZES_BYTES,
        pinned_rounded_bytes=SIZES_BYTES,
        pinned_rule=st.sampled_from(PinnedRule),
        state_bytes=SIZES_BYTES,
        device_bytes=SIZES_BYTES,
        loading_bytes=SIZES_BYTES,
        process_bytes=SIZES_BYTES,
        step_bytes=SIZES_BYTES,
    )


@st.composite
def rank_records(draw: DrawFn, rank: int, tasks: tuple[TaskTiming, ...]) -> RankRecord:
    """Some ranks that are alike, the first of them ``rank``."""
    waits = [RankWait(task=timing.task, seconds=draw(TIMES_S)) for timing in tasks if timing.lane is Lane.COLLECTIVE]
    return RankRecord(
        rank=rank,
        num_alike=draw(st.integers(1, 3)),
        name=draw(st.sampled_from(("", "host 1", "host 2"))),
        machine=draw(st.sampled_from(("", "random machine, 2 cores"))),
        begins_s=draw(st.floats(-1, 1)),
        iteration_s=draw(st.floats(1e-6, 100)),
        forward_s=draw(TIMES_S),
        backward_s=draw(TIMES_S),
        optimizer_s=draw(TIMES_S),
        waits=draw(
            st.none()
            | st.just((PhaseWait(phase=IterationPhase.FORWARD, cause=None, seconds=draw(TIMES_S), for_ranks=True),))
        ),
        rank_waits=tuple(waits),
        tasks=tasks,
        lanes=(),
        memory=(draw(memory_curves(Memory.DEVICE)),),
    )


@st.composite
def records(draw: DrawFn) -> Record:
    """Records of a random plan, with a few tasks; they need not be the outcome of any schedule."""
    workload = draw(workloads(max_blocks=3))
    plan, _ = draw(plans(workload))
    tasks = []
    for number in range(draw(st.integers(0, 3))):
        kind, start_s = draw(st.sampled_from(TaskKind)), draw(st.floats(-1, 10))
        duration_s = draw(TIMES_S)
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
        seconds=TIMES_S,
    )
    remedies = st.builds(
        Remedy,
        kind=st.sampled_from(RemedyKind),
        num_samples=st.integers(1, 64),
        plan=st.just(plan),
        iteration_s=st.floats(1e-6, 100),
        speedup=st.floats(0.1, 10),
    )
    ranks, following = [], 0
    for _ in range(draw(st.integers(0, 3))):
        first = following + draw(st.integers(0, 2))
        ranks.append(draw(rank_records(first, tuple(tasks))))
        following = first + ranks[-1].num_alike
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
        forward_s=draw(TIMES_S),
        backward_s=draw(TIMES_S),
        optimizer_s=draw(TIMES_S),
        waits=draw(st.none() | st.lists(waits, max_size=2).map(tuple)),
        remedies=tuple(draw(st.lists(remedies, max_size=2))),
        tasks=tuple(tasks),
        lanes=tuple(
            LaneUse(lane=lane, num_tasks=draw(st.integers(0, 9)), busy_s=draw(TIMES_S), moved_bytes=draw(SIZES_BYTES))
            for lane in lanes
        ),
        memory=tuple(draw(memory_curves(memory)) for memory in memories),
        guaranteed_peak_device_bytes=draw(SIZES_BYTES),
        num_gathers=draw(st.integers(0, 99)),
        num_cpu_adam_steps=draw(st.integers(0, 99)),
        chunks=draw(
            st.none() | st.builds(ChunkCounts, **{name: st.integers(0, 99) for name in ChunkCounts.model_fields})
        ),
        device_reserved=draw(st.none() | device_reserves()),
        host_memory=draw(st.none() | host_memories()),
        rank=draw(st.sampled_from([one.rank for one in ranks])) if ranks else 0,
        ranks=tuple(ranks),
    )
