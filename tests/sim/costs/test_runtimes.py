"""Other systems' copies around collectives: counted by hand, and where they delay computation."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protwin.shared import load_workload
from protwin.shared.basics.errors import PlanError
from protwin.shared.catalogue.machines import machine
from protwin.shared.compile.compile import compile_schedule
from protwin.shared.layout.layout import layout_of
from protwin.shared.methods.full_training import FULL_TRAINING
from protwin.shared.methods.runtime_profile import Runtime, RuntimeProfile
from protwin.shared.schema.hardware import Hardware
from protwin.shared.schema.optimizer import Optimizer
from protwin.shared.schema.plan import ParallelMode, Plan
from protwin.shared.schema.schedule import Lane, TaskKind
from protwin.shared.schema.workload import DType, Workload
from protwin.sim.costs.runtimes import RuntimeCosts
from protwin.sim.costs.task_costs import CostModel
from protwin.sim.engine.simulator import simulate
from protwin.sim.operations.roofline import operation_s
from protwin.sim.operations.streams import loss_metric_bytes

WHOLE_MACHINE = machine("a100-80gb-x8")
MACHINE = WHOLE_MACHINE.model_copy(
    update={"device": WHOLE_MACHINE.device.model_copy(update={"launch_overhead_s": 0.0})}
)
"""Its host dispatches in no time, so that hooks take none and copies alone count."""
STREAMED = 0.85 * MACHINE.device.memory_bandwidth_bytes_per_s


def model() -> Workload:
    return load_workload("gpt2", batch_size=4, sequence_length=512, dtype=DType.BFLOAT16)


def sharded(workload: Workload, num_ranks: int = 8, *, n_checkpoint: int = 0, micro_batches: int = 1) -> Plan:
    block_bytes = max(
        sum(p.size_bytes for p in workload.parameters if p.block == block) for block in range(workload.num_blocks)
    )
    layout = layout_of(workload, block_bytes)
    return Plan(
        workload_id=workload.identity,
        chunk_bytes=block_bytes,
        n_persist=0,
        n_shard=len(layout.chunks),
        n_buffer=2 * layout.min_buffers(0),
        n_checkpoint=n_checkpoint,
        micro_batches=micro_batches,
        parallel=ParallelMode.SHARDED,
        num_ranks=num_ranks,
    )


def costs_of(
    workload: Workload, runtime: Runtime, reduce_dtype: DType | None = None, hardware: Hardware = MACHINE
) -> RuntimeCosts:
    own = CostModel.of(workload, hardware, num_ranks=8)
    return RuntimeCosts.like(own, RuntimeProfile(runtime, reduce_dtype), workload)


def test_fsdp2_copies_what_it_gathers_out_and_what_it_reduces_in() -> None:
    workload = model()
    schedule = compile_schedule(sharded(workload), workload)
    own = costs_of(workload, Runtime.OURS).durations_s(schedule)
    theirs = costs_of(workload, Runtime.FSDP2, DType.FLOAT32).durations_s(schedule)
    more = [b - a for a, b in zip(own, theirs, strict=True)]
    by_lane = {
        lane: sum(seconds for task, seconds in zip(schedule.tasks, more, strict=True) if task.lane is lane)
        for lane in (Lane.COMPUTE, Lane.COLLECTIVE)
    }
    gathered = sum(task.moved_bytes for task in schedule.tasks if task.kind is TaskKind.ALL_GATHER)
    reduced = sum(task.moved_bytes for task in schedule.tasks if task.kind is TaskKind.REDUCE_SCATTER)
    # A gathered byte is read and written; a gradient of two bytes is read and one of four written, element by element
    # (1.2 for each of 1.41e9 clocks of 108 multiprocessors), which takes longer than its bytes.
    by_elements = reduced / 2 / (1.2 * 1.4103e9 * 108)
    assert by_elements > 3 * reduced / STREAMED
    assert by_lane[Lane.COMPUTE] == pytest.approx(2 * gathered / STREAMED + by_elements, rel=1e-3)
    # Parts are cast from float32 before they are gathered, and twice as many bytes are reduced; here gradients are laid
    # flat, with zeros, a read and a write.
    casts, flat = 3 * gathered / 8 / STREAMED, 3 * reduced / STREAMED
    assert by_lane[Lane.COLLECTIVE] > casts - flat
    same = costs_of(workload, Runtime.FSDP2).durations_s(schedule)
    collective = sum(
        b - a for task, a, b in zip(schedule.tasks, own, same, strict=True) if task.lane is Lane.COLLECTIVE
    )
    assert collective == pytest.approx(casts - flat, rel=1e-6)


def test_ddp_copies_gradients_into_buckets_and_back() -> None:
    workload = model()
    layout = layout_of(workload, 2**25)
    plan = Plan(
        workload_id=workload.identity,
        chunk_bytes=2**25,
        n_persist=len(layout.chunks),
        parallel=ParallelMode.DDP,
        num_ranks=8,
        n_buffer=0,
    )
    schedule = compile_schedule(plan, workload)
    own, theirs = (costs_of(workload, of).durations_s(schedule) for of in (Runtime.OURS, Runtime.DDP))
    reduced = sum(task.moved_bytes for task in schedule.tasks if task.kind is TaskKind.ALL_REDUCE)
    assert sum(theirs) - sum(own) == pytest.approx(4 * reduced / STREAMED, rel=1e-6)


@pytest.mark.parametrize(
    ("runtime", "reduce_dtype", "between", "beside"),
    [
        # Views are joined (read, write); beside: cast from 2 to 4 bytes, and 4 read and written to be divided.
        (Runtime.FSDP, DType.FLOAT32, 2 * 2, 2 + 4 + 2 * 4),
        (Runtime.FSDP, None, 2 * 2, 2 * 2),
        # A bucket, a division and a join, each a read and a write, all beside; and a copy of one of eight parts.
        (Runtime.DEEPSPEED_ZERO3, None, 0, 3 * 2 * 2 + 2 * 2 / 8),
    ],
)
def test_copies_of_gradients_by_hand(runtime: Runtime, reduce_dtype: DType | None, between: int, beside: float) -> None:
    """Bytes for each gradient of bfloat16, whatever the links take for what is reduced."""
    workload = model()
    schedule = compile_schedule(sharded(workload), workload)
    # What the collectives themselves take, with as many bytes: those of FSDP2, which copies nothing beside them but
    # casts parts, 2 bytes of 4, before they are gathered; ZeRO keeps them in both types.
    alone, theirs = (costs_of(workload, of, reduce_dtype).durations_s(schedule) for of in (Runtime.FSDP2, runtime))
    gathered = sum(task.moved_bytes for task in schedule.tasks if task.kind is TaskKind.ALL_GATHER)
    gradients = sum(task.moved_bytes for task in schedule.tasks if task.kind is TaskKind.REDUCE_SCATTER) / 2
    own = costs_of(workload, Runtime.OURS).durations_s(schedule)

    def more(first: tuple[float, ...], second: tuple[float, ...], lane: Lane) -> float:
        return sum(b - a for task, a, b in zip(schedule.tasks, first, second, strict=True) if task.lane is lane)

    copied_out = 2 * gathered / STREAMED if runtime is Runtime.DEEPSPEED_ZERO3 else 0.0
    # Of a step: 8 bytes to scale a gradient, 4 + 6 to join and widen it, 2 of its norm, 4 to cast the scalar.
    scalars = sum(task.num_stepped for task in schedule.tasks if task.kind is TaskKind.DEVICE_ADAM)
    copied_out += 24 * scalars / STREAMED if runtime is Runtime.DEEPSPEED_ZERO3 else 0.0
    assert more(own, theirs, Lane.COMPUTE) == pytest.approx(between * gradients / STREAMED + copied_out, rel=1e-6)
    casts = 3 * gathered / 8 / STREAMED if runtime is Runtime.DEEPSPEED_ZERO3 else 0.0
    assert more(alone, theirs, Lane.COLLECTIVE) == pytest.approx(beside * gradients / STREAMED - casts, rel=1e-6)


def test_a_loop_over_tensors_moves_eighty_bytes_for_twenty_eight_or_waits_for_its_dispatches() -> None:
    workload = model()
    layout = layout_of(workload, 2**25)
    plan = Plan(workload_id=workload.identity, chunk_bytes=2**25, n_persist=len(layout.chunks), n_buffer=0)
    schedule = compile_schedule(plan, workload)
    (step,) = (task for task in schedule.tasks if task.kind is TaskKind.DEVICE_ADAM)
    profile = RuntimeProfile(loops_over_tensors=True)

    def seconds(launch_overhead_s: float) -> float:
        device = MACHINE.device.model_copy(update={"launch_overhead_s": launch_overhead_s})
        costs = CostModel.of(workload, MACHINE.model_copy(update={"device": device}))
        return RuntimeCosts.like(costs, profile, workload).durations_s(schedule)[step.id]

    assert seconds(5e-7) == pytest.approx(80 / 28 * step.stepped_bytes / STREAMED)
    # A slow host: eight operations for each of the tensors.
    assert seconds(5e-4) == pytest.approx(8 * sum(p.trainable for p in workload.parameters) * 5e-4)


@pytest.mark.parametrize("n_checkpoint", [0, 5])
def test_reentrant_checkpointing_recomputes_blocks_to_their_end(n_checkpoint: int) -> None:
    """A recomputed block takes as long as its forward: the last product is part of it, which backward does not read."""
    workload = model()
    schedule = compile_schedule(sharded(workload, n_checkpoint=n_checkpoint, micro_batches=2), workload)
    own = costs_of(workload, Runtime.OURS).durations_s(schedule)
    plain = CostModel.of(workload, MACHINE, num_ranks=8)
    whole = RuntimeCosts.like(plain, RuntimeProfile(recomputes_whole=True), workload).durations_s(schedule)
    forward_s = {
        task.section: seconds
        for task, seconds in zip(schedule.tasks, own, strict=True)
        if task.kind is TaskKind.FORWARD
    }
    num_recomputed = 0
    for task, before, after in zip(schedule.tasks, own, whole, strict=True):
        if task.kind is TaskKind.RECOMPUTE:
            num_recomputed += 1
            assert before < after == pytest.approx(forward_s[task.section])
        else:
            assert before == after
    assert num_recomputed == 2 * n_checkpoint


@pytest.mark.parametrize("n_checkpoint", [0, 12])
def test_behind_backward_nothing_is_gathered_beside_it(n_checkpoint: int) -> None:
    """With BACKWARD_POST, no gather that a backward waits for begins before the computation ahead of it has ended."""
    workload = model()
    plan = sharded(workload, n_checkpoint=n_checkpoint, micro_batches=2)
    record = simulate(plan, workload, MACHINE, runtime=RuntimeProfile(Runtime.FSDP_BACKWARD_POST))
    early = simulate(plan, workload, MACHINE, runtime=RuntimeProfile(Runtime.FSDP))
    assert record.iteration_s > early.iteration_s
    # A schedule that was compiled by other policies is not taken.
    plain, post = compile_schedule(plan, workload), RuntimeProfile(Runtime.FSDP_BACKWARD_POST)
    assert simulate(plan, workload, MACHINE, schedule=plain, runtime=post).iteration_s == record.iteration_s
    method = RuntimeProfile(Runtime.FSDP_BACKWARD_POST).method(FULL_TRAINING)
    schedule = compile_schedule(plan, workload, policies=method.policies)
    order = [task for task in schedule.tasks if task.lane is Lane.COMPUTE]
    places = {task.id: place for place, task in enumerate(order)}
    waiting = 0
    for task in order:
        if task.kind not in (TaskKind.BACKWARD, TaskKind.RECOMPUTE):
            continue
        for other in task.after:
            gather = schedule.tasks[other]
            if gather.kind is TaskKind.ALL_GATHER:
                before = order[places[task.id] - 1]
                assert before.id in gather.after
                # Ahead of the gradients of that computation, on the one lane of collectives.
                reductions = [
                    t.id for t in schedule.tasks if t.kind is TaskKind.REDUCE_SCATTER and before.id in t.after
                ]
                assert all(gather.id < reduction for reduction in reductions)
                waiting += 1
    assert waiting >= workload.num_blocks
    # Nothing else is: the same tasks, each once.
    assert sorted(task.name for task in schedule.tasks) == sorted(
        task.name for task in compile_schedule(plan, workload).tasks
    )


@given(
    # ZeRO-1 reduces once, all of it in the step.
    st.sampled_from([runtime for runtime in Runtime if runtime is not Runtime.DEEPSPEED_ZERO1]),
    st.sampled_from((None, DType.FLOAT32)),
    st.integers(0, 12),
    st.integers(1, 3),
    st.sampled_from((2, 8)),
)
def test_nobody_carries_a_plan_out_faster_than_without_copies(
    runtime: Runtime, reduce_dtype: DType | None, n_checkpoint: int, micro_batches: int, num_ranks: int
) -> None:
    workload = model()
    plan = sharded(workload, num_ranks, n_checkpoint=n_checkpoint, micro_batches=micro_batches)
    schedule = compile_schedule(plan, workload)
    costs = CostModel.of(workload, MACHINE, num_ranks=num_ranks)
    own = costs.durations_s(schedule)
    theirs = RuntimeCosts.like(costs, RuntimeProfile(runtime, reduce_dtype), workload).durations_s(schedule)
    bare = [
        seconds - (3 * task.moved_bytes / STREAMED if task.kind is TaskKind.REDUCE_SCATTER else 0)
        for task, seconds in zip(schedule.tasks, own, strict=True)
    ]
    assert all(b >= a * (1 - 1e-12) for a, b in zip(bare, theirs, strict=True))
    as_here = (Runtime.OURS, Runtime.HOST_STEP, Runtime.OFFLOADED_STATES)  # steps apart, which this plan has none of
    assert (own == theirs) == (runtime in as_here)


@pytest.mark.parametrize(
    ("runtime", "update", "words"),
    [
        (Runtime.DDP, {}, "ddp carries out plans with parallel ddp, but this one has parallel sharded"),
        (Runtime.FSDP2, {"parallel": ParallelMode.DDP}, "fsdp2 carries out plans with parallel sharded, but .* ddp"),
        (
            Runtime.FSDP2,
            {"parallel": ParallelMode.SINGLE, "num_ranks": 1},
            "but this one has one rank, which has no collectives",
        ),
    ],
)
def test_nobody_carries_out_another_ones_plans(runtime: Runtime, update: dict[str, object], words: str) -> None:
    workload = model()
    chunks = len(layout_of(workload, sharded(workload).chunk_bytes).chunks)
    resident = {"n_persist": chunks, "n_shard": 0, "n_buffer": 0} if update else {}
    plan = Plan.model_validate(sharded(workload).model_dump() | resident | update)
    with pytest.raises(PlanError, match=words):
        simulate(plan, workload, MACHINE, runtime=RuntimeProfile(runtime))


@pytest.mark.parametrize("dtype", [DType.BFLOAT16, DType.FLOAT32])
def test_a_metric_runs_what_an_eager_loss_runs_forward(dtype: DType) -> None:
    workload = load_workload("gpt2", batch_size=4, sequence_length=512, dtype=dtype)
    epilogue = workload.epilogue_forward.operations
    num_logits = next(one.flops for one in epilogue if one.name == "_log_softmax")
    eager = [one for one in epilogue if one.name in {"_to_copy", "_log_softmax"} and one.flops == num_logits]
    assert len(eager) == (1 if dtype is DType.FLOAT32 else 2)
    own = CostModel.of(workload, WHOLE_MACHINE, num_ranks=8)
    costs = RuntimeCosts.like(own, RuntimeProfile(Runtime.FSDP, loss_metrics=1), workload)
    assert costs.loss_metric_s == pytest.approx(sum(operation_s(one, WHOLE_MACHINE.device) for one in eager))


def test_metrics_follow_the_last_backward_of_each_micro_batch() -> None:
    workload = model()
    plan = sharded(workload, micro_batches=3)
    schedule = compile_schedule(plan, workload)
    own = CostModel.of(workload, MACHINE, num_ranks=8)
    without, costs = (
        RuntimeCosts.like(own, RuntimeProfile(Runtime.FSDP, loss_metrics=metrics), workload) for metrics in (0, 2)
    )
    longer = {
        task.id: after - before
        for task, before, after in zip(
            schedule.tasks, without.durations_s(schedule), costs.durations_s(schedule), strict=True
        )
        if after != before
    }
    last = {task.micro_batch: task.id for task in schedule.tasks if task.kind is TaskKind.BACKWARD}
    assert sorted(longer) == sorted(last.values())
    assert list(longer.values()) == pytest.approx([2 * costs.loss_metric_s] * 3)


def test_metrics_are_refused_where_logits_never_lie_whole() -> None:
    workload = load_workload("gpt2", batch_size=4, sequence_length=512, dtype=DType.BFLOAT16, loss_tiles=(4,))
    plan = sharded(workload).model_copy(update={"loss_tiles": 4})
    with pytest.raises(PlanError, match="all logits"):
        RuntimeProfile(Runtime.FSDP, loss_metrics=2).check(plan)
    for number in (-1, 101):
        with pytest.raises(PlanError, match="0 to 100"):
            RuntimeProfile(loss_metrics=number).check(sharded(workload))


def test_a_looped_step_reads_a_limited_norm_once() -> None:
    workload = load_workload("gpt2", batch_size=4, sequence_length=512, dtype=DType.FLOAT32)
    plan = sharded(workload, num_ranks=8)
    own = CostModel.of(workload, MACHINE, num_ranks=8)
    seconds = {}
    for loops in (False, True):
        costs = RuntimeCosts.like(own, RuntimeProfile(Runtime.FSDP, loops_over_tensors=loops), workload)
        for limit in (None, 1.0):
            schedule = compile_schedule(plan.model_copy(update={"max_gradient_norm": limit}), workload)
            steps = [kind is TaskKind.DEVICE_ADAM for kind in (task.kind for task in schedule.tasks)]
            durations = costs.durations_s(schedule)
            seconds[loops, limit] = sum(one for one, is_step in zip(durations, steps, strict=True) if is_step)
    norms_s = seconds[False, 1.0] - seconds[False, None]
    assert seconds[True, 1.0] - seconds[True, None] == pytest.approx(norms_s * 0.7 / 0.85, rel=0.02)


@pytest.mark.parametrize("dtype", [DType.BFLOAT16, DType.FLOAT32])
def test_a_metric_holds_the_logits_and_two_copies(dtype: DType) -> None:
    workload = load_workload("gpt2", batch_size=4, sequence_length=512, dtype=dtype)
    num_logits = 4 * 512 * 50257
    assert loss_metric_bytes(workload) == num_logits * (dtype.item_bytes + 4 + 4 if dtype is DType.BFLOAT16 else 8)


@pytest.mark.parametrize("optimizer", [Optimizer.SGD, Optimizer.LION, Optimizer.ADAMW])
def test_adams_alone_step_in_loops(optimizer: Optimizer) -> None:
    workload = model()
    plan = sharded(workload).model_copy(update={"optimizer": optimizer})
    schedule = compile_schedule(plan, workload)
    own = CostModel.of(workload, MACHINE, num_ranks=8)
    fused, looped = (
        RuntimeCosts.like(own, RuntimeProfile(loops_over_tensors=loops), workload).durations_s(schedule)
        for loops in (False, True)
    )
    assert (fused == looped) == (optimizer is not Optimizer.ADAMW)


def test_composer_is_what_it_consists_of() -> None:
    workload = model()
    plan = sharded(workload, n_checkpoint=6, micro_batches=2)
    parts = RuntimeProfile(Runtime.FSDP_BACKWARD_POST, loops_over_tensors=True, loss_metrics=2)
    named, spelled = (
        simulate(plan, workload, WHOLE_MACHINE, runtime=profile)
        for profile in (RuntimeProfile(Runtime.COMPOSER), parts)
    )
    assert named.iteration_s == spelled.iteration_s
    assert named.guaranteed_peak_device_bytes == spelled.guaranteed_peak_device_bytes
    without = simulate(plan, workload, WHOLE_MACHINE, runtime=RuntimeProfile(Runtime.COMPOSER, loss_metrics=0))
    assert without.iteration_s < named.iteration_s


@pytest.mark.parametrize(
    ("profile", "asked"),
    [
        (RuntimeProfile(), ("ours", None)),
        (RuntimeProfile(expandable_segments=True), ("ours", "expandable segments")),
        (
            RuntimeProfile(keeps_gradients=True, expandable_segments=True),
            ("ours", "gradients that stay, expandable segments"),
        ),
        (RuntimeProfile(Runtime.HOST_STEP), ("host-step", "steps of the host that nothing overlaps with")),
    ],
)
def test_the_question_says_who_carries_the_plan_out(profile: RuntimeProfile, asked: tuple[str, str | None]) -> None:
    workload = load_workload("gpt2", batch_size=1, sequence_length=64, dtype="bfloat16")
    plan = Plan(workload_id=workload.identity, chunk_bytes=2**30, n_persist=1, n_buffer=0, max_gradient_norm=1.0)
    num_chunks = len(layout_of(workload, plan.chunk_bytes).chunks)
    plan = plan.model_copy(update={"n_persist": num_chunks})
    question = simulate(plan, workload, machine("rtx-4090"), runtime=profile).question
    assert question is not None
    assert (question.runtime, question.runtime_words) == asked
