"""Measured memory against what the schedule guarantees, and budgets that are enforced."""

from __future__ import annotations

import gc
from functools import lru_cache
from itertools import product

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from protwin.runtime import CpuDevice, CpuOutOfMemoryError, carry_out
from protwin.runtime.devices.ledger import MemoryLedger
from protwin.runtime.timing.plain_loop import train_plainly
from protwin.shared.basics.errors import PlanError
from protwin.shared.basics.units import format_bytes, format_enough_bytes
from protwin.shared.compile.compile import compile_schedule
from protwin.shared.layout.layout import Layout, build_layout
from protwin.shared.schema.plan import Plan
from protwin.shared.schema.schedule import Content, Memory
from protwin.shared.schema.workload import Phase as WorkloadPhase
from protwin.shared.verify.guaranteed_peak import guaranteed_device_peak
from tests.proof_size import some_quick
from tests.runtime.models import SEED, Case, cases, differences, held, snapshot, token_batches, uncached
from tests.strategies.plans import plans

STEADY = 5
"""Three watched iterations, and two where claims stand for them."""


@lru_cache
def long_case(name: str) -> Case:
    """A case with enough batches for watched and unwatched iterations."""
    case = cases()[name]
    return Case(case.build, [*case.batches, *case.batches][:STEADY], case.groups, case.has_loss, case.make_optimizer)


def first(drawn: tuple[Plan, Layout]) -> Plan:
    return drawn[0]


def guaranteed_bytes(case: Case, plan: Plan) -> int:
    return guaranteed_device_peak(compile_schedule(plan, case.workload)).size_bytes


def measured_bytes(case: Case, plan: Plan, device: CpuDevice, *, lowered_to: int | None = None) -> int:
    """The peak of all watched iterations; afterwards the ledger must hold nothing.

    The loop keeps all its batches; the workload says that the device has one at a time.
    ``lowered_to`` is the budget once the plan was accepted.
    """
    model = case.build()
    torch.manual_seed(SEED)
    with carry_out(
        model,
        plan,
        case.workload,
        optimizer=case.make_optimizer,
        parameter_groups=case.groups(model),
        device=device,
    ) as training:
        if lowered_to is not None:
            device.ledger.budget_bytes = lowered_to
        for batches in case.steps(plan.micro_batches):
            for batch in held(case, batches):
                case.loss(model, batch).backward()
            training.step()
    assert device.ledger.named_bytes == 0
    del batch
    gc.collect()
    assert device.ledger.watched_bytes == sum(b.numel() * b.element_size() for b in model.buffers())
    return training.peak_device_bytes


def all_persistent(case: Case, n_checkpoint: int, micro_batches: int = 1) -> Plan:
    layout = build_layout(case.workload.parameters, num_blocks=case.workload.num_blocks, chunk_bytes=9_000)
    return Plan(
        workload_id=case.workload.identity,
        chunk_bytes=9_000,
        n_persist=len(layout.chunks),
        n_buffer=0,
        n_checkpoint=n_checkpoint,
        micro_batches=micro_batches,
    )


NAMES = (
    "llama",
    "gpt2 with dropout, tied",
    "llama in bfloat16",
    "hand-written, frozen tail",
    "hand-written, blocks run twice",
)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=5, phases=[Phase.explicit, Phase.generate])
@given(data=st.data())
def test_no_run_exceeds_what_its_schedule_guarantees(name: str, data: st.DataObject) -> None:
    """With that as its budget, so that iterations that nobody watches are held to it as well."""
    case = long_case(name)
    plan = data.draw(plans(case.workload).map(first))
    guaranteed = guaranteed_bytes(case, plan)
    assert measured_bytes(case, plan, CpuDevice(guaranteed)) <= guaranteed


@some_quick(("name", "n_checkpoint", "micro_batches"), product(NAMES, [0, 2], [1, 2]), quick=5)
def test_without_concurrency_the_guarantee_is_what_happens(name: str, n_checkpoint: int, micro_batches: int) -> None:
    case = long_case(name)
    plan = all_persistent(case, n_checkpoint, micro_batches)
    guaranteed = guaranteed_bytes(case, plan)
    measured = measured_bytes(case, plan, CpuDevice())
    assert measured <= guaranteed
    assert measured / guaranteed == pytest.approx(1, rel=5e-3)


@pytest.mark.parametrize("place", [0, 1])
def test_a_larger_batch_is_held_to_the_budget_wherever_it_comes(place: int) -> None:
    """As any micro-batch of an iteration of which nobody watches the others; a smaller one trains like the plain loop.

    The step that it ended is given up, and the next ones are those of a loop without it.
    """
    case = long_case("llama")
    plan = all_persistent(case, 0, micro_batches=2)
    model, plain = case.build(), uncached(case.build())
    optimizer = case.make_optimizer(case.groups(plain))
    (usual,), (small,), (large,) = (token_batches(1, batch=batch) for batch in (2, 1, 8))
    others = [[usual, small], [usual, small], [usual, large]]
    pairs = [[usual, usual]] * STEADY + [pair[::-1] if place == 0 else pair for pair in others] + [[usual, usual]]
    device = CpuDevice(guaranteed_bytes(case, plan))
    with carry_out(model, plan, case.workload, optimizer=case.make_optimizer, device=device) as training:
        for pair in pairs:
            try:
                for batch in pair:
                    case.loss(model, batch).backward()
            except CpuOutOfMemoryError:
                assert any(batch is large for batch in pair)
                training.skip_step()
                continue
            assert not any(batch is large for batch in pair)
            training.step()
            for batch in pair:
                case.loss(plain, batch).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert training.peak_device_bytes <= device.budget_bytes
    assert differences(model, snapshot(plain)) == []


@settings(max_examples=2, phases=[Phase.explicit, Phase.generate])
@given(data=st.data())
def test_a_smaller_batch_fits_wherever_it_comes(data: st.DataObject) -> None:
    """By any plan: what nobody watched until then, gradients among it, is counted once."""
    case = long_case("llama")
    plan = data.draw(plans(case.workload).map(first)).model_copy(update={"micro_batches": 3})
    (usual,), (small,) = (token_batches(1, batch=batch) for batch in (2, 1))
    places = [(), (), (), (1,), (0, 2)]
    model, device = case.build(), CpuDevice(guaranteed_bytes(case, plan))
    with carry_out(model, plan, case.workload, optimizer=case.make_optimizer, device=device) as training:
        for smaller in places:
            for number in range(plan.micro_batches):
                case.loss(model, small if number in smaller else usual).backward()
            training.step()
    assert training.peak_device_bytes <= guaranteed_bytes(case, plan)
    gc.collect()
    assert device.ledger.named_bytes == 0


@pytest.mark.parametrize("name", NAMES)
def test_a_limit_of_the_norm_takes_no_byte_of_the_device(name: str) -> None:
    """The scale that it gives is the host's, and lives until the next one is known."""
    case = long_case(name)
    plan = all_persistent(case, 0).model_copy(update={"max_gradient_norm": 1e-3})
    guaranteed = guaranteed_bytes(case, plan)
    assert measured_bytes(case, plan, CpuDevice(guaranteed)) <= guaranteed


def test_a_later_micro_batch_adds_to_gradients_that_are_there() -> None:
    """The equality above would not hold if its backward were reckoned like the first one's."""
    case = long_case("gpt2 with dropout, tied")
    plan = all_persistent(case, 2, micro_batches=2)

    def like_the_first(phase: WorkloadPhase) -> WorkloadPhase:
        return phase.model_copy(update={"adding_curve": ()})

    profiles = [
        profile.model_copy(
            update={name: like_the_first(getattr(profile, name)) for name in ("backward", "checkpoint_backward")}
        )
        for profile in case.workload.profiles
    ]
    wrong = case.workload.model_copy(update={"profiles": tuple(profiles)})
    reckoned = compile_schedule(plan.model_copy(update={"workload_id": wrong.identity}), wrong)
    assert guaranteed_device_peak(reckoned).size_bytes > 1.005 * measured_bytes(case, plan, CpuDevice())


@some_quick("name", NAMES, quick=2)
def test_plans_differ_in_what_they_need(name: str) -> None:
    """What the equalities above would not show if every plan measured the same."""
    case = long_case(name)
    keeping = measured_bytes(case, all_persistent(case, 0), CpuDevice())
    checkpointing = measured_bytes(case, all_persistent(case, case.workload.num_blocks), CpuDevice())
    layout = build_layout(case.workload.parameters, num_blocks=case.workload.num_blocks, chunk_bytes=9_000)
    offloading = all_persistent(case, case.workload.num_blocks).model_copy(
        update={"n_persist": 0, "n_buffer": layout.min_buffers(0)}
    )
    assert measured_bytes(case, offloading, CpuDevice()) < checkpointing < keeping


LOSSES_BYTES = 4 * 4
"""Of scaled losses that loops may hold beside the loss, and these do not."""


def test_a_watched_iteration_accounts_for_every_static_byte() -> None:
    """Between iterations nothing is alive but what the schedule calls static, as the ledger counts it."""
    case = long_case("llama")
    plan = all_persistent(case, 0)
    device = CpuDevice()
    model = case.build()
    with carry_out(model, plan, case.workload, optimizer=case.make_optimizer, device=device) as training:
        for batch in case.batches[:2]:
            model(**batch).loss.backward()
            training.step()
        gc.collect()
        static = training.schedule.static_bytes(Memory.DEVICE)
        counted = device.ledger.named_bytes + device.ledger.watched_bytes
        assert counted + LOSSES_BYTES == static


@pytest.mark.parametrize("name", NAMES)
def test_the_peak_is_itemized_by_what_the_schedule_holds(name: str) -> None:
    """Everything persistent: parameters, optimizer state, module buffers and batch are there all the time."""
    case = long_case(name)
    plan = all_persistent(case, 0)
    model = case.build()
    with carry_out(
        model, plan, case.workload, optimizer=case.make_optimizer, parameter_groups=case.groups(model)
    ) as training:
        for batch in held(case, case.batches):
            case.loss(model, batch).backward()
            training.step()
        record = training.record()
    curve = next(curve for curve in record.memory if curve.memory is Memory.DEVICE)
    alive = {holding.content: holding.size_bytes for holding in curve.alive_at_peak}
    static: dict[Content, int] = {}
    for buffer in compile_schedule(plan, case.workload).buffers:
        if buffer.is_static and buffer.memory is Memory.DEVICE:
            static[buffer.content] = static.get(buffer.content, 0) + buffer.size_bytes
    # What never gets a gradient has no optimizer state: two moments and a count, which the schedule reckons with.
    unused = [p for p in case.workload.parameters if p.name.endswith("unused") and p.trainable]
    static[Content.OPTIMIZER_STATE] -= sum(8 * p.num_elements + 4 for p in unused)
    static[Content.RESIDENT] -= LOSSES_BYTES
    assert sum(alive.values()) == curve.peak_bytes
    for content, size_bytes in static.items():
        assert alive.get(content, 0) == size_bytes
    assert alive[Content.ACTIVATIONS] > 0


# -- budgets ---------------------------------------------------------------------------------------------------------


def plain_peak_bytes(case: Case) -> int:
    return train_plainly(case.build(), case.batches[:3], case.make_optimizer, ledger=MemoryLedger()).peak_bytes


def test_plain_training_ends_at_its_budget() -> None:
    case = cases()["llama"]
    peak_bytes = plain_peak_bytes(case)
    run = train_plainly(case.build(), case.batches[:3], case.make_optimizer, ledger=MemoryLedger(peak_bytes))
    assert list(run.losses) == case.plain.losses[:3]
    with pytest.raises(torch.OutOfMemoryError, match=r"out of memory on the CPU device: .* while training plainly"):
        train_plainly(case.build(), case.batches[:3], case.make_optimizer, ledger=MemoryLedger(peak_bytes - 1))


def test_a_plan_runs_where_plain_training_does_not() -> None:
    case = long_case("llama")
    budget = int(plain_peak_bytes(case) * 0.6)
    layout = build_layout(case.workload.parameters, num_blocks=case.workload.num_blocks, chunk_bytes=9_000)
    plan = Plan(
        workload_id=case.workload.identity,
        chunk_bytes=9_000,
        n_persist=0,
        n_buffer=layout.min_buffers(0),
        n_checkpoint=case.workload.num_blocks,
    )
    assert measured_bytes(case, plan, CpuDevice(budget)) <= budget
    with pytest.raises(CpuOutOfMemoryError):
        train_plainly(case.build(), case.batches[:3], case.make_optimizer, ledger=MemoryLedger(budget))


@pytest.mark.parametrize("n_checkpoint", [0, 4])
def test_a_planned_run_ends_one_byte_below_its_peak(n_checkpoint: int) -> None:
    """With everything persistent the peak is the same each time; a byte less is refused, with the numbers."""
    case = long_case("llama")
    plan = all_persistent(case, n_checkpoint)
    peak_bytes = measured_bytes(case, plan, CpuDevice())
    assert measured_bytes(case, plan, CpuDevice(), lowered_to=peak_bytes) == peak_bytes
    with pytest.raises(CpuOutOfMemoryError, match=format_bytes(peak_bytes - 1)) as raised:
        measured_bytes(case, plan, CpuDevice(), lowered_to=peak_bytes - 1)
    assert "while running" in str(raised.value)


def test_iterations_that_nobody_watches_are_held_to_the_budget() -> None:
    case = long_case("llama")
    plan = all_persistent(case, 0)
    device = CpuDevice()
    model = case.build()
    with carry_out(model, plan, case.workload, optimizer=case.make_optimizer, device=device) as training:
        for number, batch in enumerate(case.batches):
            assert device.ledger.budget_bytes is None
            loss = model(**batch).loss
            assert device.ledger.is_metering == (number < 3)
            loss.backward()
            training.step()
        device.ledger.budget_bytes = training.peak_device_bytes - 1
        with pytest.raises(CpuOutOfMemoryError, match="the running task needs"):
            model(**case.batches[0]).loss.backward()


@pytest.mark.parametrize("missing_bytes", [1, 100_000])
def test_a_device_smaller_than_the_plan_is_refused_before_a_chunk_moves(missing_bytes: int) -> None:
    case = cases()["llama"]
    model = case.build()
    before = {name: (id(p), p.data_ptr()) for name, p in model.named_parameters()}
    plan = all_persistent(case, 0)
    need_bytes = guaranteed_bytes(case, plan)
    device = CpuDevice(need_bytes - missing_bytes)
    with pytest.raises(PlanError) as raised:
        carry_out(model, plan, case.workload, device=device)
    for figure in (format_bytes(need_bytes), format_bytes(need_bytes - missing_bytes), format_enough_bytes(need_bytes)):
        assert figure in str(raised.value)
    assert {name: (id(p), p.data_ptr()) for name, p in model.named_parameters()} == before
    assert device.ledger.peak_bytes == 0
    carry_out(model, plan, case.workload, device=CpuDevice(need_bytes)).close()


def test_a_device_without_room_for_the_persistent_chunks_leaves_the_model_alone() -> None:
    case = cases()["llama"]
    model = case.build()
    before = {name: id(p) for name, p in model.named_parameters()}
    plan = all_persistent(case, 0)
    device = CpuDevice(guaranteed_bytes(case, plan))
    device.ledger.allocate(guaranteed_bytes(case, plan) - 20_000, "something else")
    with pytest.raises(CpuOutOfMemoryError, match="chunk"):
        carry_out(model, plan, case.workload, device=device)
    for name, parameter in model.named_parameters():
        assert id(parameter) == before[name]
        assert torch.equal(parameter, case.plain.weights[0][name])
    assert model.config.use_cache is True
    model(**case.batches[0]).loss.backward()


def test_a_device_keeps_its_budget_for_the_next_training() -> None:
    case = long_case("llama")
    plan = all_persistent(case, 0)
    device = CpuDevice(guaranteed_bytes(case, plan))
    measured_bytes(case, plan, device)
    assert device.budget_bytes == guaranteed_bytes(case, plan)
    gc.collect()  # the buffers of the first model, for which the exact account has no room
    measured_bytes(case, plan, device)
