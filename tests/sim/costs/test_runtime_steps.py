"""Steps of other systems, their hooks, and copies of ZeRO-1 and ZeRO-2: counted by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from protwin.shared import load_workload
from protwin.shared.catalogue.machines import machine
from protwin.shared.catalogue.rank_share import machine_of_rank
from protwin.shared.compile.compile import compile_schedule
from protwin.shared.layout.layout import layout_of
from protwin.shared.methods.full_training import FULL_TRAINING
from protwin.shared.methods.runtime_profile import Runtime, RuntimeProfile
from protwin.shared.schema.hardware import Hardware
from protwin.shared.schema.optimizer import HostGradients
from protwin.shared.schema.plan import ParallelMode, Plan
from protwin.shared.schema.schedule import OuterSection, Schedule, TaskKind
from protwin.shared.schema.workload import BlockId, DType, Workload
from protwin.sim.costs.contention import ContentionModel
from protwin.sim.costs.runtimes import RuntimeCosts, sections_of
from protwin.sim.costs.task_costs import CostModel, host_adam_bytes_per_s
from protwin.sim.engine.simulator import simulate, simulate_plan, simulate_timing

MACHINE = machine("a100-80gb-x8")
STREAMED = 0.85 * MACHINE.device.memory_bandwidth_bytes_per_s
WORKLOAD = load_workload("gpt2", batch_size=4, sequence_length=512, dtype=DType.BFLOAT16)
SCALARS = sum(p.num_elements for p in WORKLOAD.parameters)
CHUNK_BYTES = max(
    sum(p.size_bytes for p in WORKLOAD.parameters if p.block == block) for block in range(WORKLOAD.num_blocks)
)
CHUNKS = len(layout_of(WORKLOAD, CHUNK_BYTES).chunks)


def on(hardware: Hardware, launch_overhead_s: float) -> Hardware:
    device = hardware.device.model_copy(update={"launch_overhead_s": launch_overhead_s})
    return hardware.model_copy(update={"device": device})


def plan_of(num_ranks: int = 1, **knobs: object) -> Plan:
    fields: dict[str, object] = {
        "workload_id": WORKLOAD.identity,
        "chunk_bytes": CHUNK_BYTES,
        "n_persist": 0,
        "n_buffer": 0,
        "num_ranks": num_ranks,
        "parallel": ParallelMode.SHARDED if num_ranks > 1 else ParallelMode.SINGLE,
        "max_gradient_norm": 1.0,
    }
    return Plan.model_validate(fields | knobs)


def seconds_of(
    plan: Plan, profile: RuntimeProfile, hardware: Hardware, workload: Workload = WORKLOAD
) -> tuple[Schedule, dict[TaskKind, list[float]], tuple[float, ...]]:
    """The schedule by the runtime's policies, its seconds by kind, and all of them."""
    schedule = compile_schedule(plan, workload, policies=profile.method(FULL_TRAINING).policies)
    own = CostModel.of(workload, hardware, num_ranks=plan.num_ranks)
    seconds = RuntimeCosts.like(own, profile, workload).durations_s(schedule)
    by_kind: dict[TaskKind, list[float]] = {}
    for task, of_task in zip(schedule.tasks, seconds, strict=True):
        by_kind.setdefault(task.kind, []).append(of_task)
    return schedule, by_kind, seconds


def test_moments_travel_both_ways_around_a_step() -> None:
    plan = plan_of(n_persist=CHUNKS, max_gradient_norm=None)
    (with_copies,) = seconds_of(plan, RuntimeProfile(Runtime.OFFLOADED_STATES), MACHINE)[1][TaskKind.DEVICE_ADAM]
    (without,) = seconds_of(plan, RuntimeProfile(), MACHINE)[1][TaskKind.DEVICE_ADAM]
    links = (MACHINE.host_to_device, MACHINE.device_to_host)
    copies = sum(8 * SCALARS / link.bandwidth_bytes_per_s + link.latency_s for link in links)
    assert with_copies - without == pytest.approx(copies, rel=1e-6)


@pytest.mark.parametrize("num_ranks", [1, 8])
def test_deepspeed_steps_casts_and_copies_one_after_the_other(num_ranks: int) -> None:
    """Scaled float32 gradients (12 bytes), masters and moments (24), two bytes written, eight to cast and to send."""
    residency = {"n_host_stepped": CHUNKS} if num_ranks == 1 else {"n_buffer": 4}
    plan = plan_of(num_ranks, host_gradients=HostGradients.FLOAT32, **residency)
    schedule, by_kind, _ = seconds_of(plan, RuntimeProfile(Runtime.DEEPSPEED_OFFLOAD), on(MACHINE, 0.0))
    scalars = sum(task.num_stepped for task in schedule.tasks if task.kind is TaskKind.CPU_ADAM)
    assert scalars == pytest.approx(SCALARS / num_ranks, rel=0.01)
    # Of several ranks each has one thread: 10 GB/s.
    rate = host_adam_bytes_per_s(MACHINE.host) if num_ranks == 1 else 10e9
    link = machine_of_rank(MACHINE, num_ranks).host_to_device
    steps = (12 + 24 + 2 + 8) * scalars / rate + 2 * scalars / link.bandwidth_bytes_per_s + CHUNKS * link.latency_s
    assert sum(by_kind[TaskKind.CPU_ADAM]) == pytest.approx(steps, rel=1e-3)
    # New values have come with the step, and norms are taken on the device.
    assert sum(by_kind[TaskKind.GATHER]) == 0
    assert sum(by_kind[TaskKind.GRADIENT_NORM]) == 0


def test_deepspeed_adds_gradients_up_on_the_device() -> None:
    """Two bytes leave three times and come back twice; four leave at the end."""
    plan = plan_of(n_host_stepped=CHUNKS, micro_batches=3)
    _, by_kind, _ = seconds_of(plan, RuntimeProfile(Runtime.DEEPSPEED_OFFLOAD), on(MACHINE, 0.0))
    out, back = MACHINE.device_to_host.bandwidth_bytes_per_s, MACHINE.host_to_device.bandwidth_bytes_per_s
    expected = SCALARS * ((3 * 2 + 4) / out + 2 * 2 / back)
    assert sum(by_kind[TaskKind.GRADIENT_OFFLOAD]) == pytest.approx(expected, rel=0.01)
    assert sum(by_kind[TaskKind.GRADIENT_ACCUMULATE]) == 0


def test_parts_that_devices_keep_are_copied_once_per_step() -> None:
    plan = plan_of(8, n_buffer=4, micro_batches=2, n_checkpoint=12)
    profile = RuntimeProfile(Runtime.FSDP2, keeps_parts=True)
    schedule, by_kind, seconds = seconds_of(plan, profile, on(MACHINE, 0.0))
    gathers = [t for t in schedule.tasks if t.kind is TaskKind.GATHER]
    assert len(gathers) > 3 * CHUNKS
    link = machine_of_rank(MACHINE, 8).host_to_device
    once = 2 * SCALARS / 8 / link.bandwidth_bytes_per_s + CHUNKS * link.latency_s
    assert sum(by_kind[TaskKind.GATHER]) == pytest.approx(once, rel=0.01)
    first = {chunk: min(t.id for t in gathers if t.chunk == chunk) for chunk in range(CHUNKS)}
    assert all((seconds[t.id] > 0) == (first[t.chunk or 0] == t.id) for t in gathers)


@pytest.mark.parametrize("micro_batches", [1, 3])
def test_one_rank_makes_the_copies_of_zero_2(micro_batches: int) -> None:
    """A bucket, a division, a join, and its own part twice: two bytes ten times; three more to add."""
    plan = plan_of(n_persist=CHUNKS, micro_batches=micro_batches)
    own, zero2, zero1 = (
        sum(seconds_of(plan, RuntimeProfile(runtime), on(MACHINE, 0.0))[1][TaskKind.BACKWARD])
        for runtime in (Runtime.OURS, Runtime.DEEPSPEED_ZERO2, Runtime.DEEPSPEED_ZERO1)
    )
    passes = 10 * micro_batches + 3 * (micro_batches - 1)
    assert zero2 - own == pytest.approx(passes * 2 * SCALARS / STREAMED, rel=1e-6)
    assert zero1 - own == pytest.approx(10 * 2 * SCALARS / STREAMED, rel=1e-6)  # once per step


def test_zero_2_reduces_to_all_and_zero_1_once_behind_backward() -> None:
    plan = plan_of(8, n_shard=CHUNKS, n_buffer=CHUNKS, micro_batches=3)
    hardware = on(MACHINE, 0.0)
    schedule, zero2, _ = seconds_of(plan, RuntimeProfile(Runtime.DEEPSPEED_ZERO2), hardware)
    _, zero1, _ = seconds_of(plan, RuntimeProfile(Runtime.DEEPSPEED_ZERO1), hardware)
    costs = CostModel.of(WORKLOAD, hardware, num_ranks=8)
    reductions = [t for t in schedule.tasks if t.kind is TaskKind.REDUCE_SCATTER]
    all_reduced = sum(costs.task_s(replace(t, kind=TaskKind.ALL_REDUCE)) for t in reductions)
    reduced_bytes = sum(t.moved_bytes for t in reductions)
    # Beside: a division and a join of all; of the own eighth two copies, and an addition in two micro-batches of three.
    beside = reduced_bytes * (4 + (4 + 3 * 2 / 3) / 8) / STREAMED
    assert sum(zero2[TaskKind.REDUCE_SCATTER]) == pytest.approx(all_reduced + beside, rel=1e-6)
    assert sum(zero1[TaskKind.REDUCE_SCATTER]) == 0
    last = sum(
        seconds
        for task, seconds in zip(reductions, zero2[TaskKind.REDUCE_SCATTER], strict=True)
        if task.micro_batch == 2
    )
    assert zero1[TaskKind.DEVICE_ADAM][0] - zero2[TaskKind.DEVICE_ADAM][0] == pytest.approx(last, rel=1e-6)


def test_modules_and_parameters_of_a_section_by_hand() -> None:
    sections = sections_of(WORKLOAD)
    # A block of GPT-2: itself, two norms, attention with two maps, the MLP with two; weights and biases of six.
    of_block = sections[BlockId(3)]
    assert (of_block.num_modules, of_block.num_parameters) == (9, 12)
    assert of_block.gradient_bytes == sum(p.size_bytes for p in WORKLOAD.parameters if p.block == 3)
    # Tokens and positions; the final norm.
    assert sections[OuterSection.PROLOGUE].num_modules == 2
    assert sections[OuterSection.EPILOGUE].num_modules == 1
    total = sum(section.gradient_bytes for section in sections.values())
    assert total == sum(p.size_bytes for p in WORKLOAD.parameters)


def test_hooks_take_the_host_s_time_and_not_the_device_s() -> None:
    """On a slow host a block takes as long as its operations and its hooks; on a quick one nothing more."""
    plan = plan_of(8, n_shard=CHUNKS, n_buffer=4)
    slow = on(MACHINE, 1e-3)
    schedule, _, seconds = seconds_of(plan, RuntimeProfile(Runtime.DEEPSPEED_ZERO3), slow)
    for kind, operations in (
        (TaskKind.FORWARD, 7.5 * 9 + 1.0 * 12 + 10),
        (TaskKind.BACKWARD, 3.6 * 9 + 3.8 * 12 + 20),
    ):
        task = next(t for t in schedule.tasks if t.kind is kind and t.section == 5)
        assert task.phase is not None
        # Of the three operations of a dropout on a CPU, a device has one.
        launches = sum(one.count for one in task.phase.operations if one.name not in ("bernoulli_", "div_"))
        assert seconds[task.id] == pytest.approx(4 * (launches + operations) * 1e-3, rel=0.02)
    quick, _, at_once = seconds_of(plan, RuntimeProfile(Runtime.DEEPSPEED_ZERO3), on(MACHINE, 1e-9))
    _, _, none = seconds_of(plan, RuntimeProfile(Runtime.DEEPSPEED_ZERO3), on(MACHINE, 0.0))
    forward = next(t.id for t in quick.tasks if t.kind is TaskKind.FORWARD and t.section == 5)
    assert at_once[forward] == pytest.approx(none[forward], rel=0.01)


def test_recomputed_blocks_run_the_hooks_of_forward_under_zero_3_alone() -> None:
    plan = plan_of(8, n_shard=CHUNKS, n_buffer=4, n_checkpoint=12)
    slow = on(MACHINE, 1e-3)

    def recomputed(runtime: Runtime) -> float:
        return sum(seconds_of(plan, RuntimeProfile(runtime), slow)[1][TaskKind.RECOMPUTE])

    of_hooks = 12 * 4 * (7.5 * 9 + 1.0 * 12 + 10) * 1e-3
    assert recomputed(Runtime.DEEPSPEED_ZERO3) - recomputed(Runtime.OURS) == pytest.approx(of_hooks, rel=1e-3)
    assert recomputed(Runtime.FSDP2) == pytest.approx(recomputed(Runtime.OURS), rel=1e-3)


def test_one_rank_under_zero_3_runs_its_hooks_and_copies_its_gradients() -> None:
    """By hand: weights are views of their part; a bucket, a division, a join, and the part, which is added to later."""
    plan = plan_of(n_persist=CHUNKS, micro_batches=2)
    slow = on(MACHINE, 1e-3)
    own, theirs = (
        seconds_of(plan, RuntimeProfile(runtime), slow)[1] for runtime in (Runtime.OURS, Runtime.DEEPSPEED_ZERO3)
    )
    of_blocks = 2 * 12 * 4 * (7.5 * 9 + 1.0 * 12 + 10) * 1e-3
    of_ends = 2 * 4 * (7.5 * (2 + 1) + 1.0 * 4) * 1e-3
    assert sum(theirs[TaskKind.FORWARD]) - sum(own[TaskKind.FORWARD]) == pytest.approx(of_blocks + of_ends, rel=1e-3)
    own, theirs = (
        seconds_of(plan, RuntimeProfile(runtime), on(MACHINE, 0.0))[1]
        for runtime in (Runtime.OURS, Runtime.DEEPSPEED_ZERO3)
    )
    assert theirs[TaskKind.FORWARD] == own[TaskKind.FORWARD]
    gradient_bytes = sum(parameter.size_bytes for parameter in WORKLOAD.parameters)
    streamed = 0.85 * MACHINE.device.memory_bandwidth_bytes_per_s
    copied_s = ((6 + 2) + (6 + 3)) * gradient_bytes / streamed
    assert sum(theirs[TaskKind.BACKWARD]) - sum(own[TaskKind.BACKWARD]) == pytest.approx(copied_s, rel=1e-3)


def test_what_runs_alone_is_slower_and_what_is_kept_comes_to_the_peak() -> None:
    plan = plan_of(n_host_stepped=CHUNKS)
    own, alone = (
        simulate(plan, WORKLOAD, MACHINE, runtime=RuntimeProfile(r)) for r in (Runtime.OURS, Runtime.HOST_STEP)
    )
    assert alone.iteration_s > own.iteration_s
    assert alone.emulated == ("steps of the host that nothing overlaps with",)
    resident = plan_of(n_persist=CHUNKS)
    visited, stayed = (
        simulate(resident, WORKLOAD, MACHINE, runtime=RuntimeProfile(r))
        for r in (Runtime.OFFLOADED_STATES, Runtime.OURS)
    )
    less = stayed.guaranteed_peak_device_bytes - visited.guaranteed_peak_device_bytes
    assert less == pytest.approx(8 * SCALARS, rel=0.01)  # activations are at their peak without them


def test_zero_gathers_what_it_has_stepped_alone() -> None:
    """Frozen parameters are whole on every rank of ZeRO-2, and never gathered."""
    frozen = tuple(p.model_copy(update={"trainable": False}) if p.block is not None else p for p in WORKLOAD.parameters)
    workload = WORKLOAD.model_copy(update={"parameters": frozen})
    plan = plan_of(8, n_shard=CHUNKS, n_buffer=CHUNKS).model_copy(update={"workload_id": workload.identity})
    profile, hardware = RuntimeProfile(Runtime.DEEPSPEED_ZERO2), on(MACHINE, 0.0)
    schedule, by_kind, _ = seconds_of(plan, profile, hardware, workload)
    costs = CostModel.of(workload, hardware, num_ranks=8)
    share = sum(p.size_bytes for p in frozen if p.trainable) / sum(p.size_bytes for p in frozen)
    assert 0.2 < share < 0.5
    gathers = [t for t in schedule.tasks if t.kind is TaskKind.ALL_GATHER]
    expected = sum(costs.task_s(replace(t, moved_bytes=round(t.moved_bytes * share))) for t in gathers)
    assert sum(by_kind[TaskKind.ALL_GATHER]) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(
    ("runtime", "knobs"),
    [
        (Runtime.DEEPSPEED_ZERO1, {"n_shard": CHUNKS, "n_buffer": CHUNKS}),
        (Runtime.DEEPSPEED_OFFLOAD, {"n_buffer": 4}),
    ],
)
def test_few_micro_batches_tell_of_many(runtime: Runtime, knobs: dict[str, int]) -> None:
    """What is added to the first, the last and the others is known from a few of them, to the last digits."""
    plan, profile = plan_of(8, micro_batches=9, **knobs), RuntimeProfile(runtime)
    method = profile.method(FULL_TRAINING)
    costs = RuntimeCosts.like(CostModel.of(WORKLOAD, MACHINE, num_ranks=8), profile, WORKLOAD)
    contention = ContentionModel.for_plan(plan, MACHINE)
    few, folded = simulate_plan(plan, WORKLOAD, costs, contention, method=method)
    assert few.micro_batches < 9
    whole = compile_schedule(plan, WORKLOAD, policies=method.policies)
    timing = simulate_timing(whole, costs.durations_s(whole), contention, num_more_iterations=1)
    assert folded.iteration_s == pytest.approx(timing.iteration_s, rel=1e-6)
