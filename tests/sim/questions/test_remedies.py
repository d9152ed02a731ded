"""Remedies against complete simulations of the changed machine or batch, and leaner plans against the verifier."""

from __future__ import annotations

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from protwin.shared.basics.errors import WorkloadError
from protwin.shared.catalogue.machines import machine as known_machine
from protwin.shared.catalogue.parts import device_names, device_part
from protwin.shared.compile.compile import compile_schedule
from protwin.shared.schema.hardware import Hardware
from protwin.shared.schema.record import Remedy, RemedyKind
from protwin.shared.schema.workload import DType, Operation, OperationClass, Workload
from protwin.shared.verify.guaranteed_peak import guaranteed_device_peak
from protwin.shared.verify.verify import verify_schedule
from protwin.shared.workloads.source import WorkloadRequest, load_workload, untraced_workload
from protwin.sim.costs.task_costs import CostModel
from protwin.sim.engine.simulator import simulate
from protwin.sim.operations.efficiency import KERNEL_FIXED_S
from protwin.sim.operations.roofline import operation_s
from protwin.sim.questions.faster_parts import faster_device, faster_host, faster_links
from protwin.sim.questions.leaner_plans import Room, may_have_room, plan_with_room
from protwin.sim.questions.remedies import least_compute_s, remedies, with_remedies
from protwin.sim.searching.request import GlobalBatch, SearchRequest
from protwin.sim.searching.search import search_batches
from protwin.sim.space.space import SearchSpace
from tests.cli.saved import decoder
from tests.proof_size import examples
from tests.sim.hand_made import machine, plan, workload
from tests.sim.host_account import host_bytes
from tests.strategies.machines import hardware
from tests.strategies.plans import PlannedWorkload, parallel_workloads, planned_workloads

HERE = known_machine("rtx-3090")
ROOMY = Room(2**50, 2**50)


def gpt2_of(batch_size: int, sequence_length: int | None) -> Workload | None:
    return untraced_workload(WorkloadRequest("gpt2", batch_size=batch_size, sequence_length=sequence_length))


def gpt2(batch_size: int) -> Workload:
    return load_workload("gpt2", batch_size=batch_size, sequence_length=512)


# -- one part of the machine -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "box", "faster"),
    [
        (RemedyKind.HOST, machine(cpu_adam_s=6), faster_host),
        (RemedyKind.LINKS, machine(gather_s=4, offload_s=3, cpu_adam_s=2), faster_links),
    ],
)
def test_the_part_that_compute_waits_for_helps(kind: RemedyKind, box: Hardware, faster: object) -> None:
    """The compute seconds of this workload are measured, so that a faster device would not show."""
    assert callable(faster)
    model = workload()
    chosen = plan(model, n_buffer=1, n_checkpoint=2)
    record = simulate(chosen, model, box)
    (told,) = remedies(record, model, box, room=ROOMY)
    then = simulate(chosen, model, faster(box))
    assert told == Remedy(
        kind=kind,
        num_samples=1,
        plan=chosen,
        iteration_s=then.iteration_s,
        speedup=then.tokens_per_s / record.tokens_per_s,
    )
    assert told.speedup > 1.2


def test_what_waits_for_nothing_needs_a_faster_device() -> None:
    model = decoder()
    chosen = plan(model).model_copy(update={"chunk_bytes": 2**40, "n_persist": 2, "n_buffer": 0})
    record = simulate(chosen, model, HERE)
    assert record.waits == ()
    (told,) = remedies(record, model, HERE, room=ROOMY)
    assert told.kind is RemedyKind.DEVICE
    assert told.iteration_s == simulate(chosen, model, faster_device(HERE)).iteration_s
    measured = model.model_copy(update={"measured_on": HERE.name})
    assert remedies(record, measured, HERE, room=ROOMY) == (), "measured seconds say nothing of another device"


@pytest.mark.parametrize("dtype", [DType.FLOAT32, DType.BFLOAT16])
@pytest.mark.parametrize("name", device_names())
def test_a_device_twice_as_fast_halves_what_its_own_work_takes(name: str, dtype: DType) -> None:
    """Its multiprocessors are of the same kind, so that no share of a peak changes.

    What a kernel takes besides its work stays.
    """
    box = HERE.model_copy(update={"device": device_part(name)})
    products = (
        Operation(
            name="mm",
            operation_class=OperationClass.MATMUL,
            dtype=dtype,
            flops=2 * 65535 * 1021 * 1025,
            bytes_moved=2**24,
            shape=(1, 65535, 1021, 1025),
        ),
        Operation(
            name="mul",
            operation_class=OperationClass.ELEMENTWISE,
            dtype=dtype,
            flops=2**26,
            bytes_moved=int(2.5 * 2**26 * dtype.item_bytes),
        ),
    )
    for operation in products:
        own_s = operation_s(operation, box.device) - KERNEL_FIXED_S
        faster_s = operation_s(operation, faster_device(box).device) - KERNEL_FIXED_S
        assert own_s / faster_s == pytest.approx(2, rel=1e-9), operation.name


# -- a larger batch --------------------------------------------------------------------------------------------------


def test_a_larger_batch_is_told_as_far_as_it_fits() -> None:
    """gpt2 stepped on the host: compute waits, and more samples per step share the wait."""
    model = gpt2(1)
    chosen = plan(model, n_persist=0, n_buffer=4).model_copy(update={"chunk_bytes": 64 * 2**20})
    record = simulate(chosen, model, HERE)
    found = {one.kind: one for one in remedies(record, model, HERE, room=ROOMY, workload_at=gpt2)}
    assert found[RemedyKind.BATCH].num_samples == 4
    assert found[RemedyKind.BATCH].plan == chosen.model_copy(update={"workload_id": gpt2(4).identity})
    # With no more room than the plan needs at twice the batch, four times the batch takes a leaner plan.
    twice = compile_schedule(chosen.model_copy(update={"workload_id": gpt2(2).identity}), gpt2(2))
    tight = Room(guaranteed_device_peak(twice).size_bytes, 2**50)
    found = {one.kind: one for one in remedies(record, model, HERE, room=tight, workload_at=gpt2)}
    larger = found[RemedyKind.BATCH]
    then = simulate(larger.plan, gpt2(larger.num_samples), HERE)
    assert then.guaranteed_peak_device_bytes <= tight.device_bytes
    assert larger.iteration_s == then.iteration_s
    assert larger.speedup == pytest.approx(then.tokens_per_s / record.tokens_per_s, rel=1e-12)
    assert (larger.num_samples, larger.plan.n_checkpoint > 0) == (4, True)
    # With no room for more, or without other batches, the batch is as it is.
    none = Room(record.guaranteed_peak_device_bytes // 2, 2**50)
    assert all(one.kind is not RemedyKind.BATCH for one in remedies(record, model, HERE, room=none, workload_at=gpt2))
    assert all(one.kind is not RemedyKind.BATCH for one in remedies(record, model, HERE, room=ROOMY))


def test_segments_count_as_the_plan_has_them() -> None:
    """A plan whose segments already fill what the allocator can have leaves no room, however low its peak."""
    model = gpt2(1)
    record = simulate(plan(model, n_persist=0, n_buffer=4).model_copy(update={"chunk_bytes": 64 * 2**20}), model, HERE)
    assert record.device_reserved is not None
    full = Room(2**50, 2**50, record.device_reserved.expected_bytes)
    lowered = full.lowered(record.device_reserved, record.guaranteed_peak_device_bytes)
    assert lowered.device_bytes == record.guaranteed_peak_device_bytes


def test_batches_that_cannot_be_had_are_left_out() -> None:
    def impossible(size: int) -> Workload:
        raise WorkloadError(f"no batch of {size}")

    model = workload()
    box = machine(cpu_adam_s=6)
    record = simulate(plan(model), model, box)
    with_none = remedies(record, model, box, room=ROOMY, workload_at=lambda size: None)
    assert with_none == remedies(record, model, box, room=ROOMY, workload_at=impossible)
    assert [one.kind for one in with_none] == [RemedyKind.HOST]


def test_a_search_tells_them_of_its_plan() -> None:
    space = SearchSpace(chunk_bytes=(64 * 2**20,), prefetch_depth=(1,), n_persist=(0,), n_buffer=(4,))
    request = SearchRequest(workload=gpt2(2), hardware=HERE, space=space)
    told = with_remedies(search_batches(request), request, gpt2_of).result.prediction.remedies
    assert told[0].speedup == max(one.speedup for one in told)
    assert RemedyKind.BATCH in {one.kind for one in told}
    whole = SearchRequest(workload=GlobalBatch(num_samples=2, workload_at=gpt2), hardware=HERE, space=space)
    told = with_remedies(search_batches(whole), whole, gpt2_of).result.prediction.remedies
    assert {one.kind for one in told} == {RemedyKind.HOST}, "a global batch stays what it is"


# -- leaner plans ----------------------------------------------------------------------------------------------------


@settings(max_examples=examples(200, 9), deadline=None)
@given(case=planned_workloads(4) | parallel_workloads(3), share=st.floats(0.3, 1.1), host_share=st.floats(0.5, 3))
def test_a_leaner_plan_is_safe_and_fits(case: PlannedWorkload, share: float, host_share: float) -> None:
    schedule = compile_schedule(case.plan, case.workload, case.layout)
    peak_bytes = guaranteed_device_peak(schedule).size_bytes
    needed = host_bytes(case.plan, case.workload, case.layout, schedule)
    room = Room(round(share * peak_bytes), round(host_share * needed) + 1)
    found = plan_with_room(case.plan, case.workload, case.layout, room)
    if peak_bytes <= room.device_bytes and needed <= room.host_bytes:
        assert found is not None
        assert found[0] == case.plan, "a plan that fits stays as it is"
    if not may_have_room(case.workload, case.layout, room):
        assert found is None
    if found is not None:
        verify_schedule(
            found[1],
            found[0],
            case.workload,
            case.layout,
            device_limit_bytes=room.device_bytes,
            host_limit_bytes=room.host_bytes,
        )
        assert host_bytes(found[0], case.workload, case.layout) <= room.host_bytes
        kept = {"n_persist", "n_host_stepped", "n_buffer", "n_checkpoint", "n_swap", "activation_modes"}
        assert found[0].model_dump(exclude=kept) == case.plan.model_dump(exclude=kept)
        assert found[0].n_persist <= case.plan.n_persist
        assert found[0].num_kept <= case.plan.num_kept


@settings(max_examples=examples(200, 9), deadline=None)
@given(case=planned_workloads(4), box=hardware())
def test_no_plan_computes_faster_than_the_bound(case: PlannedWorkload, box: Hardware) -> None:
    costs = CostModel.of(case.workload, box)
    assume(least_compute_s(case.workload, costs) > 0)
    record = simulate(case.plan, case.workload, box, layout=case.layout)
    assert case.plan.micro_batches * least_compute_s(case.workload, costs) <= record.iteration_s * (1 + 1e-9)
