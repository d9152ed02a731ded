"""Buckets of gradients, and gradients that stay: how much of them lies on the device, and when."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protwin.shared import load_workload
from protwin.shared.basics.errors import PlanError, ScheduleError
from protwin.shared.catalogue.machines import machine
from protwin.shared.compile.compile import compile_schedule
from protwin.shared.layout.keeping import AS_PLANNED, Buckets, BucketStay, Keeping
from protwin.shared.layout.layout import layout_of
from protwin.shared.methods.full_training import FULL_TRAINING
from protwin.shared.methods.method import Method
from protwin.shared.methods.runtime_profile import Runtime, RuntimeProfile
from protwin.shared.schema.plan import ParallelMode, Plan
from protwin.shared.schema.schedule import Content, Lane, Memory, Schedule, TaskKind
from protwin.shared.schema.training_options import LoraOptions, TrainingOptions
from protwin.shared.schema.workload import DType, Workload
from protwin.shared.verify.guaranteed_peak import guaranteed_device_peak
from protwin.shared.verify.verify import verify_schedule
from protwin.sim.engine.simulator import simulate
from tests.proof_size import examples
from tests.shared.small_models import OUTPUT_BYTES, SAVED_BYTES, chain, parameter, plan, workload
from tests.strategies.plans import PlannedWorkload, parallel_workloads, planned_workloads

BUCKETS = (Content.BUCKET, Content.SECOND_BUCKET)
FIVE_HUNDRED_MILLION = 500_000_000
STATIC_BYTES_PER_SCALAR = 4 + 8
"""A float32 parameter and two moments."""


def method_of(keeping: Keeping) -> Method:
    rules = replace(FULL_TRAINING.rules, keeping=keeping)
    return Method(policies=replace(FULL_TRAINING.policies, keeping=keeping), rules=rules)


def compiled(plan: Plan, workload: Workload, method: Method) -> Schedule:
    """Compiled by the policies, and proven by the rules, which are written apart."""
    schedule = compile_schedule(plan, workload, policies=method.policies)
    verify_schedule(schedule, plan, workload, rules=method.rules)
    return schedule


def spans(schedule: Schedule, contents: Iterable[Content]) -> list[tuple[int, set[tuple[TaskKind, int]]]]:
    """Bytes of every buffer of these contents, and the (kind, micro-batch) of compute tasks that run beside it."""
    lane = [schedule.tasks[task] for task in schedule.lanes[Lane.COMPUTE]]
    found = []
    for buffer in schedule.buffers:
        if buffer.content not in contents or buffer.memory is not Memory.DEVICE:
            continue
        alive, beside = buffer.is_static, set()
        for task in lane:
            if alive:
                beside.add((task.kind, task.micro_batch))
            # What a compute task makes counts from its end on.
            alive = (alive or buffer.id in task.allocates) and buffer.id not in task.frees
        found.append((buffer.size_bytes, beside))
    return found


# -- when buckets are there --------------------------------------------------------------------------------------------


def test_zero_2_has_its_bucket_in_the_backward_of_every_micro_batch() -> None:
    model = chain(3)
    asked = plan(model, n_persist=3, n_checkpoint=1, micro_batches=3)
    schedule = compiled(asked, model, RuntimeProfile(Runtime.DEEPSPEED_ZERO2).method(FULL_TRAINING))
    backward = [{(TaskKind.BACKWARD, m), (TaskKind.RECOMPUTE, m)} for m in range(3)]
    assert spans(schedule, BUCKETS) == [(4 * FIVE_HUNDRED_MILLION, beside) for beside in backward]


def test_zero_1_has_it_from_the_first_backward_to_the_last() -> None:
    model = chain(2)
    asked = plan(model, n_persist=2, micro_batches=3)
    schedule = compiled(asked, model, RuntimeProfile(Runtime.DEEPSPEED_ZERO1).method(FULL_TRAINING))
    both = {(kind, m) for kind in (TaskKind.FORWARD, TaskKind.BACKWARD) for m in range(3)}
    assert spans(schedule, BUCKETS) == [(4 * FIVE_HUNDRED_MILLION, both - {(TaskKind.FORWARD, 0)})]


@pytest.mark.parametrize("runtime", [Runtime.DEEPSPEED_ZERO3, Runtime.DEEPSPEED_OFFLOAD])
def test_zero_3_has_it_for_good(runtime: Runtime) -> None:
    model = chain(2)
    kept = "n_host_stepped" if runtime is Runtime.DEEPSPEED_OFFLOAD else "n_persist"
    asked = plan(model, max_gradient_norm=1.0, n_buffer=0).model_copy(update={kept: 2})
    method, without = (RuntimeProfile(runtime, bucket_scalars=n).method(FULL_TRAINING) for n in (None, 0))
    schedule, before = compiled(asked, model, method), compiled(asked, model, without)
    assert schedule.static_bytes(Memory.DEVICE) - before.static_bytes(Memory.DEVICE) == 4 * FIVE_HUNDRED_MILLION
    assert guaranteed_device_peak(schedule).size_bytes - guaranteed_device_peak(before).size_bytes == 2 * 10**9


def test_two_buckets_are_two_buffers() -> None:
    model = chain(2)
    profile = RuntimeProfile(Runtime.DEEPSPEED_ZERO2, bucket_scalars=1_000_000, has_two_buckets=True)
    schedule = compiled(plan(model, n_persist=2), model, profile.method(FULL_TRAINING))
    assert [size for size, _ in spans(schedule, BUCKETS)] == [4_000_000, 4_000_000]
    assert not spans(schedule, BUCKETS[:1])[0][1] - {(TaskKind.BACKWARD, 0)}


def test_a_bucket_has_its_size_however_little_is_trained() -> None:
    """It is of the element type of what is trained first, and there is none where nothing is."""
    parameters = [
        parameter("frozen", 1_000, 0, trainable=False, dtype="float32"),
        parameter("adapter", 2, 0, dtype="bfloat16"),
        parameter("norm", 2, 1, dtype="float32"),
    ]
    method = RuntimeProfile(Runtime.DEEPSPEED_ZERO2, bucket_scalars=700_000).method(FULL_TRAINING)
    model = workload(parameters, 2)
    schedule = compiled(plan(model, chunk_bytes=10_000, n_persist=1), model, method)
    assert [size for size, _ in spans(schedule, BUCKETS)] == [1_400_000]
    frozen = chain(2, frozen=(0, 1))
    assert not spans(compiled(plan(frozen, n_persist=2), frozen, method), BUCKETS)


def test_buckets_are_in_the_peak_and_in_what_the_allocator_holds() -> None:
    """The peak is in backward: two buckets of 200 million scalars of two bytes, beside a few adapters."""
    model = load_workload(
        "gpt2",
        batch_size=4,
        sequence_length=512,
        dtype=DType.BFLOAT16,
        options=TrainingOptions(lora=LoraOptions(rank=2)),
    )
    chunks = len(layout_of(model, 2**40).chunks)
    asked = Plan(workload_id=model.identity, chunk_bytes=2**40, n_persist=chunks, n_buffer=0)
    profiles = (
        RuntimeProfile(Runtime.DEEPSPEED_ZERO2, bucket_scalars=200_000_000, has_two_buckets=True),
        RuntimeProfile(Runtime.DEEPSPEED_ZERO2, bucket_scalars=0),
    )
    with_both, without = (simulate(asked, model, machine("a100-80gb"), runtime=profile) for profile in profiles)
    more_bytes = 2 * 2 * 200_000_000
    assert with_both.guaranteed_peak_device_bytes - without.guaranteed_peak_device_bytes == more_bytes
    assert with_both.peak_device_bytes - without.peak_device_bytes == more_bytes
    assert with_both.device_reserved is not None
    assert without.device_reserved is not None
    held = with_both.device_reserved.expected_bytes - without.device_reserved.expected_bytes
    assert more_bytes <= held <= 1.1 * more_bytes  # segments are rounded up, and may be taken in turn


# -- gradients that stay -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_gradients_that_stay_lie_beside_the_activations(micro_batches: int) -> None:
    """Three blocks of 1,000 float32 scalars, all resident: the account of every task, by hand."""
    model, static = chain(3), 3 * 1_000 * STATIC_BYTES_PER_SCALAR + 64
    asked = plan(model, n_persist=3, micro_batches=micro_batches)
    kept = compiled(asked, model, method_of(Keeping(keeps_gradients=True)))
    dropped = compiled(asked, model, FULL_TRAINING)
    assert dropped.static_bytes(Memory.DEVICE) == pytest.approx(static, abs=3 * 2 * 256)
    assert kept.static_bytes(Memory.DEVICE) - dropped.static_bytes(Memory.DEVICE) == 3 * 4_000
    # The most is there behind the last forward: outputs, what blocks and the epilogue saved, and all gradients.
    held = OUTPUT_BYTES + 3 * (OUTPUT_BYTES + SAVED_BYTES) + 3_000
    most = guaranteed_device_peak(kept)
    assert kept.tasks[most.task].name == "backward epilogue"
    assert most.size_bytes == kept.static_bytes(Memory.DEVICE) + held + 1_000
    # Here they are not, in the first micro-batch.
    if micro_batches == 1:
        assert guaranteed_device_peak(dropped).size_bytes == most.size_bytes - 3 * 4_000
    backwards = [t for t in kept.tasks if t.kind is TaskKind.BACKWARD]
    assert all(kept.buffers[b].content is not Content.GRADIENTS for t in backwards for b in t.allocates)
    of_block = [t for t in backwards if t.section == 1]
    assert len({t.writes[-1] if kept.buffers[t.writes[-1]].is_static else t.writes[0] for t in of_block}) == 1


def test_zero_3_of_one_rank_keeps_gradients_and_no_other_does() -> None:
    model = chain(2)
    asked = plan(model, n_persist=2)
    for runtime in (Runtime.OURS, Runtime.DEEPSPEED_ZERO1, Runtime.DEEPSPEED_ZERO2, Runtime.DEEPSPEED_ZERO3):
        schedule = compiled(asked, model, RuntimeProfile(runtime).method(FULL_TRAINING))
        stay = [b for b in schedule.buffers if b.content is Content.GRADIENTS and b.is_static]
        assert [b.size_bytes for b in stay] == ([4_000, 4_000] if runtime is Runtime.DEEPSPEED_ZERO3 else [])


def test_a_step_beside_gradients_that_stay_widens_them_on_top() -> None:
    """Masters of 1,000 bfloat16 scalars are stepped with float32 gradients; two of them together."""
    model = workload([parameter(f"w{b}", 1_000, b, dtype="bfloat16") for b in range(2)], 2)
    asked = plan(model, chunk_bytes=10_000, n_persist=1)
    levels = []
    for keeps in (False, True):
        schedule = compiled(asked, model, method_of(Keeping(keeps_gradients=keeps)))
        (step,) = (t for t in schedule.tasks if t.kind is TaskKind.DEVICE_ADAM)
        assert step.phase is not None
        levels.append(step.phase.peak_bytes)
    assert levels == [2 * 4_000, 2 * 4_000]  # one call of both: they are dropped behind it
    one = workload([parameter("w", 2**25, 0, dtype="bfloat16")] * 1, 1)
    schedule = compiled(plan(one, chunk_bytes=2**40, n_persist=1), one, method_of(Keeping(keeps_gradients=True)))
    (step,) = (t for t in schedule.tasks if t.kind is TaskKind.DEVICE_ADAM)
    assert step.phase is not None
    assert step.phase.peak_bytes == 4 * 2**24  # piece by piece


# -- any plan ----------------------------------------------------------------------------------------------------------

KEEPINGS = st.builds(
    Keeping,
    buckets=st.none()
    | st.builds(
        Buckets, num_scalars=st.integers(0, 10_000), number=st.integers(1, 2), stay=st.sampled_from(list(BucketStay))
    ),
    keeps_gradients=st.booleans(),
)


@settings(max_examples=examples(400, 20))
@given(planned_workloads() | parallel_workloads(), KEEPINGS)
def test_every_schedule_is_proven(case: PlannedWorkload, keeping: Keeping) -> None:
    """By rules that do not read the policies; and each task has the memory of the plan's own, and what is kept."""
    method = method_of(keeping)
    found = compile_schedule(case.plan, case.workload, case.layout, policies=method.policies)
    verify_schedule(found, case.plan, case.workload, case.layout, rules=method.rules)
    own = compile_schedule(case.plan, case.workload, case.layout)
    assert [t.name for t in found.tasks] == [t.name for t in own.tasks]
    trained = [p for p in case.workload.parameters if p.trainable]
    most = 0
    if keeping.buckets is not None and trained:
        most = keeping.buckets.num_scalars * keeping.buckets.number * trained[0].dtype.item_bytes
    if not keeping.keeps_gradients:
        peaks = [guaranteed_device_peak(schedule).size_bytes for schedule in (own, found)]
        assert peaks[0] <= peaks[1] <= peaks[0] + most
        if not most:
            assert found == own


@settings(max_examples=examples(200, 15))
@given(planned_workloads() | parallel_workloads(), KEEPINGS, KEEPINGS)
def test_rules_tell_what_is_kept(case: PlannedWorkload, keeping: Keeping, other: Keeping) -> None:
    """A schedule is refused by the rules of another runtime, if it holds anything else."""
    schedules = [
        compile_schedule(case.plan, case.workload, case.layout, policies=method_of(of).policies)
        for of in (keeping, other)
    ]
    rules = method_of(other).rules
    if schedules[0] == schedules[1]:
        verify_schedule(schedules[0], case.plan, case.workload, case.layout, rules=rules)
        return
    with pytest.raises(ScheduleError):
        verify_schedule(schedules[0], case.plan, case.workload, case.layout, rules=rules)


def test_a_bucket_that_goes_early_comes_late_or_is_smaller_is_refused() -> None:
    model = chain(2)
    asked = plan(model, n_persist=2)
    method = RuntimeProfile(Runtime.DEEPSPEED_ZERO2, bucket_scalars=10).method(FULL_TRAINING)
    schedule = compiled(asked, model, method)
    (bucket,) = (b.id for b in schedule.buffers if b.content is Content.BUCKET)
    lane = [schedule.tasks[t] for t in schedule.lanes[Lane.COMPUTE]]
    forward = [t for t in lane if t.kind is TaskKind.FORWARD][-1]
    first, *_, last = (t for t in lane if t.kind is TaskKind.BACKWARD)

    def changed(**by_task: Mapping[str, Any]) -> Schedule:
        tasks = [replace(task, **by_task.get(f"t{task.id}", {})) for task in schedule.tasks]
        return replace(schedule, tasks=tuple(tasks))

    def without(buffers: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(b for b in buffers if b != bucket)

    less: dict[str, Any] = {"frees": without(last.frees), "reads": without(last.reads)}
    early = changed(**{f"t{last.id}": less, f"t{first.id}": {"frees": (*first.frees, bucket)}})
    gone: dict[str, Any] = {"allocates": without(forward.allocates), "writes": without(forward.writes)}
    come: dict[str, Any] = {"allocates": (*first.allocates, bucket), "writes": (*first.writes, bucket)}
    late = changed(**{f"t{forward.id}": gone, f"t{first.id}": come})
    small = replace(
        schedule, buffers=tuple(replace(b, size_bytes=36) if b.id == bucket else b for b in schedule.buffers)
    )
    for wrong in (early, late, small):
        with pytest.raises(ScheduleError, match="bucket"):
            verify_schedule(wrong, asked, model, rules=method.rules)


# -- what is asked for -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("profile", "words"),
    [
        (RuntimeProfile(Runtime.FSDP2, bucket_scalars=1), "fsdp2 has none to choose.*deepspeed-zero2"),
        (RuntimeProfile(has_two_buckets=True), "ours has none to choose"),
        (RuntimeProfile(Runtime.DEEPSPEED_ZERO3, has_two_buckets=True), "deepspeed-zero3 has one whatever overlaps"),
        (RuntimeProfile(Runtime.DEEPSPEED_ZERO2, bucket_scalars=-1), r"must be 0 to 1,000,000,000,000 \(got -1\)"),
        (RuntimeProfile(Runtime.DEEPSPEED_ZERO2, bucket_scalars=10**13), "must be 0 to 1,000,000,000,000"),
    ],
)
def test_buckets_that_a_runtime_does_not_have(profile: RuntimeProfile, words: str) -> None:
    model = chain(2)
    with pytest.raises(PlanError, match=words):
        profile.check(plan(model, n_persist=2))


def test_what_is_kept_is_told() -> None:
    assert RuntimeProfile(Runtime.DEEPSPEED_ZERO2).other == "copies and waits of deepspeed-zero2"
    assert RuntimeProfile(Runtime.DEEPSPEED_ZERO2, bucket_scalars=2 * 10**8, has_two_buckets=True).other == (
        "copies and waits of deepspeed-zero2, two buckets of gradients of 200,000,000 scalars"
    )
    assert RuntimeProfile(Runtime.DEEPSPEED_ZERO2, bucket_scalars=0).other == (
        "copies and waits of deepspeed-zero2, no bucket of gradients"
    )
    assert RuntimeProfile(keeps_gradients=True).other == "gradients that stay"
    assert RuntimeProfile().method(FULL_TRAINING) is FULL_TRAINING
    assert FULL_TRAINING.policies.keeping is AS_PLANNED


def test_of_parts_gradients_stay_anyway() -> None:
    """Sharded plans have each rank's part of the gradients for good: nothing changes with ZeRO-3's rule."""
    model = chain(4)
    asked = plan(model, n_buffer=2).model_copy(update={"parallel": ParallelMode.SHARDED, "num_ranks": 2, "n_shard": 4})
    kept = compiled(asked, model, method_of(Keeping(keeps_gradients=True)))
    assert kept == compiled(asked, model, FULL_TRAINING)
