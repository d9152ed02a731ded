"""Schedules of ZeRO-1, ZeRO-2, offloaded optimizers and visiting moments: what they hold, and what waits for what."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protwin.shared import load_workload
from protwin.shared.basics.errors import PlanError, ScheduleError
from protwin.shared.compile.compile import compile_schedule
from protwin.shared.layout.keeping import AS_PLANNED
from protwin.shared.layout.layout import layout_of
from protwin.shared.methods.full_training import FULL_TRAINING
from protwin.shared.methods.method import Method
from protwin.shared.methods.runtime_profile import Runtime, RuntimeProfile
from protwin.shared.schema.plan import ParallelMode, Plan
from protwin.shared.schema.schedule import Memory, Schedule, TaskKind
from protwin.shared.schema.workload import DType, Workload
from protwin.shared.verify.verify import verify_schedule
from tests.proof_size import examples

WORKLOAD = load_workload("gpt2", batch_size=1, sequence_length=64, dtype=DType.BFLOAT16)
SCALARS = sum(p.num_elements for p in WORKLOAD.parameters)
CHUNK_BYTES = max(
    sum(p.size_bytes for p in WORKLOAD.parameters if p.block == block) for block in range(WORKLOAD.num_blocks)
)
CHUNKS = len(layout_of(WORKLOAD, CHUNK_BYTES).chunks)


def plan_of(**knobs: object) -> Plan:
    fields: dict[str, object] = {
        "workload_id": WORKLOAD.identity,
        "chunk_bytes": CHUNK_BYTES,
        "n_persist": 0,
        "n_buffer": 0,
        "max_gradient_norm": 1.0,
    }
    return Plan.model_validate(fields | knobs)


def sharded(num_ranks: int = 4, **knobs: object) -> Plan:
    fields = {"parallel": ParallelMode.SHARDED, "num_ranks": num_ranks, "n_shard": CHUNKS, "n_buffer": CHUNKS}
    return plan_of(**{**fields, **knobs})


def method_of(runtime: Runtime, *, keeps_parts: bool = False) -> Method:
    """Without buckets, of which ``test_buckets.py`` tells."""
    bucket_scalars = 0 if runtime.is_deepspeed else None
    return RuntimeProfile(runtime, keeps_parts=keeps_parts, bucket_scalars=bucket_scalars).method(FULL_TRAINING)


def compiled(plan: Plan, method: Method, workload: Workload = WORKLOAD) -> Schedule:
    """Compiled by the policies, and proven by the rules, which are written apart."""
    schedule = compile_schedule(plan, workload, policies=method.policies)
    verify_schedule(schedule, plan, workload, rules=method.rules)
    return schedule


def static_bytes(plan: Plan, method: Method, memory: Memory = Memory.DEVICE) -> int:
    return compiled(plan, method).static_bytes(memory)


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_zero_holds_what_is_whole_and_what_is_in_parts(num_ranks: int) -> None:
    """Bytes per scalar of one rank between two steps, beside the buffers of whole parameters."""
    plan, own = sharded(num_ranks), static_bytes(sharded(num_ranks), FULL_TRAINING)
    parts = SCALARS / num_ranks
    # Here a part of parameters, gradients, master and two moments: 2 + 2 + 12 bytes.
    assert own == pytest.approx((2 + 2 + 12) * parts, rel=0.01)
    zero2 = static_bytes(plan, method_of(Runtime.DEEPSPEED_ZERO2))
    assert zero2 == pytest.approx((2 + 12) * parts, rel=0.01)  # the part is within the whole
    zero1 = static_bytes(plan, method_of(Runtime.DEEPSPEED_ZERO1))
    assert zero1 == pytest.approx(12 * parts + 2 * SCALARS, rel=0.01)  # gradients are whole


def test_devices_keep_parts_of_what_hosts_step() -> None:
    plan = sharded(n_shard=0, n_buffer=4)
    own = static_bytes(plan, FULL_TRAINING)
    for method in (method_of(Runtime.DEEPSPEED_OFFLOAD), method_of(Runtime.FSDP2, keeps_parts=True)):
        assert static_bytes(plan, method) - own == pytest.approx(2 * SCALARS / 4, rel=0.01)
        assert static_bytes(plan, method, Memory.PINNED_HOST) == static_bytes(plan, FULL_TRAINING, Memory.PINNED_HOST)


@pytest.mark.parametrize("plan", [plan_of(n_persist=CHUNKS), sharded(n_buffer=4)])
def test_moments_are_on_the_device_for_the_step_alone(plan: Plan) -> None:
    scalars = SCALARS / plan.num_ranks
    method = method_of(Runtime.OFFLOADED_STATES)
    less = static_bytes(plan, FULL_TRAINING) - static_bytes(plan, method)
    assert less == pytest.approx(8 * scalars, rel=0.01)  # two moments of 4 bytes; masters stay
    (step,) = (t for t in compiled(plan, method).tasks if t.kind is TaskKind.DEVICE_ADAM)
    (before,) = (t for t in compiled(plan, FULL_TRAINING).tasks if t.kind is TaskKind.DEVICE_ADAM)
    assert step.phase is not None
    widened = max(level for _, level in before.phase.curve) if before.phase is not None else 0
    assert max(level for _, level in step.phase.curve) == widened + less


@pytest.mark.parametrize("num_ranks", [4, 32])
def test_deepspeed_copies_gradients_of_a_step_together(num_ranks: int) -> None:
    """A norm is of eight bytes a scalar, of the largest gradient; flat and float32 copies of all have six."""
    part, largest = SCALARS / num_ranks, max(p.num_elements for p in WORKLOAD.parameters)
    zero2, zero3 = (step_bytes(runtime, num_ranks) for runtime in (Runtime.DEEPSPEED_ZERO2, Runtime.DEEPSPEED_ZERO3))
    assert zero2 == pytest.approx(8 * min(part, largest), rel=0.01)
    assert zero3 == pytest.approx(max(6 * part, 8 * largest / num_ranks), rel=0.01)


def step_bytes(runtime: Runtime, num_ranks: int) -> int:
    schedule = compiled(sharded(num_ranks), method_of(runtime))
    (step,) = (task for task in schedule.tasks if task.kind is TaskKind.DEVICE_ADAM)
    assert step.phase is not None
    return step.phase.peak_bytes


RUNTIMES = (Runtime.DEEPSPEED_ZERO1, Runtime.DEEPSPEED_ZERO2, Runtime.DEEPSPEED_OFFLOAD, Runtime.HOST_STEP)


@settings(max_examples=examples(60, 8))
@given(
    st.sampled_from(RUNTIMES),
    st.integers(0, 12),
    st.integers(1, 2),
    st.integers(1, 5),
    st.sampled_from((1, 2, 3)),
    st.booleans(),
)
def test_every_schedule_is_proven(
    runtime: Runtime, n_checkpoint: int, micro_batches: int, depth: int, num_ranks: int, on_host: bool
) -> None:
    """Whatever the plan: by rules that do not read the policies; and nothing overlaps with a step of the host."""
    knobs = {"n_checkpoint": n_checkpoint, "micro_batches": micro_batches, "prefetch_depth": depth}
    if num_ranks == 1:
        plan = plan_of(**knobs, **({"n_host_stepped": CHUNKS} if on_host else {"n_persist": CHUNKS}))
    else:
        plan = sharded(num_ranks, **knobs, n_shard=0 if on_host else CHUNKS)
    schedule = compiled(plan, method_of(runtime))
    first = min(t.id for t in schedule.tasks if t.kind is TaskKind.FORWARD)
    stepped = {t.id for t in schedule.tasks if t.kind is TaskKind.CPU_ADAM}
    assert stepped <= set(schedule.tasks[first].after_previous)
    if runtime in (Runtime.DEEPSPEED_ZERO1, Runtime.DEEPSPEED_ZERO2) and num_ranks > 1:
        gathers = {t.id for t in schedule.tasks if t.kind is TaskKind.ALL_GATHER}
        assert len(gathers) == CHUNKS
        assert gathers <= set(schedule.tasks[first].after)


def test_rules_tell_one_runtime_from_another() -> None:
    """A schedule that is compiled otherwise is refused, and so is one that holds otherwise."""
    plan, host = sharded(), sharded(n_shard=0, n_buffer=4)
    zero1, zero2 = method_of(Runtime.DEEPSPEED_ZERO1), method_of(Runtime.DEEPSPEED_ZERO2)
    with pytest.raises(ScheduleError, match="device_adam has another phase"):
        verify_schedule(compiled(plan, FULL_TRAINING), plan, WORKLOAD, rules=zero2.rules)
    with pytest.raises(ScheduleError, match="static buffers"):
        verify_schedule(compiled(plan, zero2), plan, WORKLOAD, rules=zero1.rules)
    # Everything is where it should be, but gathers overlap.
    policies = replace(zero2.policies, residency=FULL_TRAINING.policies.residency)
    with pytest.raises(ScheduleError, match=r"gather .* may run beside computations"):
        verify_schedule(compile_schedule(plan, WORKLOAD, policies=policies), plan, WORKLOAD, rules=zero2.rules)
    offload = method_of(Runtime.DEEPSPEED_OFFLOAD)
    policies = replace(offload.policies, updates=FULL_TRAINING.policies.updates)
    with pytest.raises(ScheduleError, match=r"cpu_adam .* may run beside the next iteration"):
        verify_schedule(compile_schedule(host, WORKLOAD, policies=policies), host, WORKLOAD, rules=offload.rules)
    policies = replace(zero2.policies, keeping=AS_PLANNED)
    with pytest.raises(ScheduleError, match="static buffers"):
        verify_schedule(compile_schedule(plan, WORKLOAD, policies=policies), plan, WORKLOAD, rules=zero2.rules)


def test_zero_needs_a_place_for_every_chunk() -> None:
    with pytest.raises(PlanError, match=rf"4 places for {CHUNKS} chunks \(n_buffer\).*Set n_buffer to {CHUNKS}"):
        compiled(sharded(n_buffer=4), method_of(Runtime.DEEPSPEED_ZERO2))


@pytest.mark.parametrize(
    ("profile", "plan", "words"),
    [
        (
            RuntimeProfile(Runtime.DEEPSPEED_OFFLOAD),
            sharded(n_shard=0, n_buffer=4, max_gradient_norm=None),
            "deepspeed-offload steps on the host behind all gradients.*no max_gradient_norm",
        ),
        (
            RuntimeProfile(Runtime.HOST_STEP),
            plan_of(n_host_stepped=CHUNKS, max_gradient_norm=None),
            "host-step steps on the host behind all gradients",
        ),
        (
            RuntimeProfile(Runtime.DEEPSPEED_ZERO2),
            plan_of(n_persist=CHUNKS, parallel=ParallelMode.DDP, num_ranks=2),
            "deepspeed-zero2 carries out plans with parallel single or sharded, but this one has parallel ddp",
        ),
        (
            RuntimeProfile(Runtime.FSDP2, keeps_parts=True),
            plan_of(n_host_stepped=CHUNKS),
            "fsdp2 carries out plans with parallel sharded",
        ),
        (
            RuntimeProfile(keeps_parts=True),
            plan_of(n_host_stepped=CHUNKS),
            "devices keep parts of what hosts step in plans with parallel sharded.*Set n_host_stepped",
        ),
    ],
)
def test_plans_that_a_runtime_does_not_carry_out(profile: RuntimeProfile, plan: Plan, words: str) -> None:
    with pytest.raises(PlanError, match=words):
        profile.check(plan)


def test_without_steps_of_the_host_no_norm_is_asked_for() -> None:
    RuntimeProfile(Runtime.DEEPSPEED_ZERO2).check(sharded(max_gradient_norm=None))
    RuntimeProfile(Runtime.DEEPSPEED_ZERO2).check(plan_of(n_persist=CHUNKS, max_gradient_norm=None))
