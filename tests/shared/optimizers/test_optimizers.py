"""Optimizers in plans: where their state lies, what a step costs, names, and what is refused."""

from __future__ import annotations

import json
from math import prod

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protwin.shared.basics.errors import FileError, PlanError, ScheduleError
from protwin.shared.compile.compile import compile_schedule
from protwin.shared.layout.layout import build_layout
from protwin.shared.optimizers.names import optimizer_named
from protwin.shared.optimizers.state import stepped_of
from protwin.shared.optimizers.work import traffic_bytes
from protwin.shared.schema.hardware import DeviceKind
from protwin.shared.schema.optimizer import Optimizer
from protwin.shared.schema.plan import ParallelMode, Plan
from protwin.shared.schema.schedule import ChunkId, Content, Memory, TaskKind
from protwin.shared.schema.workload import DType, Parameter, Workload
from protwin.shared.verify.guaranteed_peak import guaranteed_device_peak
from protwin.shared.verify.verify import verify_schedule
from protwin.sim.costs.task_costs import CostModel
from protwin.sim.memory.host import host_memory
from protwin.sim.searching.problem import search_problem
from protwin.sim.searching.request import SearchRequest, Step
from protwin.sim.space.chunk_table import chunk_table
from protwin.sim.space.step_spec import StepSpec
from tests.shared.small_models import chain
from tests.sim.hand_made import machine

SIZES = st.sampled_from([(4095,), (4096,), (5000,), (99_999,), (400, 250), (64, 64), (3,)])


def model_of(shapes: list[tuple[int, ...]], dtype: DType) -> Workload:
    """A chain whose blocks have one parameter each."""
    bare = chain(len(shapes))
    parameters = tuple(
        Parameter(name=f"blocks.{block}.weight", shape=shape, dtype=dtype, block=block)
        for block, shape in enumerate(shapes)
    )
    return bare.model_copy(update={"parameters": parameters})


def plan_of(model: Workload, optimizer: Optimizer, n_persist: int, **knobs: object) -> Plan:
    layout = build_layout(model.parameters, num_blocks=model.num_blocks, chunk_bytes=1)
    plan = Plan(
        workload_id=model.identity,
        chunk_bytes=1,
        n_persist=n_persist,
        n_buffer=0 if n_persist == len(layout.chunks) else 2,
        optimizer=optimizer,
    )
    return plan.model_copy(update=knobs)


WORDS = {
    # float32 words per scalar of a float32 weight: moments that each keeps, by the papers.
    Optimizer.ADAMW: 2,
    Optimizer.ADAM: 2,
    Optimizer.SGD: 1,
    Optimizer.LION: 1,
}


@settings(max_examples=25)
@given(
    st.lists(SIZES, min_size=2, max_size=4),
    st.sampled_from((DType.FLOAT32, DType.BFLOAT16)),
    st.sampled_from(Optimizer),
    st.data(),
)
def test_state_lies_where_its_chunk_is_stepped(
    shapes: list[tuple[int, ...]], dtype: DType, optimizer: Optimizer, data: st.DataObject
) -> None:
    """The verifier agrees; the tables of the search have the same bytes; only paged moments leave the device."""
    if optimizer is Optimizer.ADAMW_BF16:
        dtype = DType.BFLOAT16
    model = model_of(shapes, dtype)
    n_persist = data.draw(st.integers(0, len(shapes)))
    plan = plan_of(model, optimizer, n_persist)
    layout = build_layout(model.parameters, num_blocks=model.num_blocks, chunk_bytes=1)
    schedule = compile_schedule(plan, model, layout)
    verify_schedule(schedule, plan, model, layout)
    held = {(b.content, b.memory, b.chunk): b.size_bytes for b in schedule.buffers if b.is_static}
    for number, shape in enumerate(shapes):
        chunk = ChunkId(number)
        count, narrow = prod(shape), dtype is DType.BFLOAT16
        place = Memory.DEVICE if chunk < n_persist else Memory.HOST
        kept = held[Content.OPTIMIZER_STATE, place, chunk]
        if optimizer in WORDS:
            steps = 4 if optimizer in (Optimizer.ADAMW, Optimizer.ADAM) else 0
            assert kept == 4 * count * (WORDS[optimizer] + narrow) + steps
        if optimizer is Optimizer.ADAMW_BF16:
            assert kept == 2 * 2 * count + 4
        is_paged = optimizer is Optimizer.PAGED_ADAMW_8BIT and chunk < n_persist and count >= 100_000
        assert held.get((Content.PAGED_STATE, Memory.HOST, chunk), 0) == (2 * count if is_paged else 0)
    costs = CostModel(machine(), optimizer=optimizer)
    table = chunk_table(model, layout, costs, StepSpec(optimizer=optimizer))
    static = table.static_device_bytes(table.places.all, model.resident_bytes)[n_persist]
    assert static == schedule.static_bytes(Memory.DEVICE)
    assert table.host_bytes(table.places.all)[n_persist] == schedule.static_bytes(Memory.HOST)
    (adam,) = (task for task in schedule.tasks if task.kind is TaskKind.DEVICE_ADAM)
    assert table.device_adam_s[n_persist] == costs.task_s(adam) == costs.durations_s(schedule)[adam.id]


def test_shards_on_devices_page_their_own_moments() -> None:
    model = model_of([(1000, 401), (1000, 400), (400, 100)], DType.BFLOAT16)
    knobs = {"parallel": ParallelMode.SHARDED, "num_ranks": 2, "n_shard": 3}
    plan = plan_of(model, Optimizer.PAGED_ADAMW_8BIT, 0, **knobs)
    schedule = compile_schedule(plan, model)
    verify_schedule(schedule, plan, model)
    paged = {b.chunk: (b.memory, b.size_bytes) for b in schedule.buffers if b.content is Content.PAGED_STATE}
    # A rank's part of the third has 20,000 scalars, too few for pages; the first is padded to whole 256 bytes.
    assert paged == {0: (Memory.HOST, 2 * 200_512), 1: (Memory.HOST, 2 * 200_000)}


def test_a_schedule_of_another_optimizer_is_rejected() -> None:
    model = model_of([(64, 64), (64, 64)], DType.FLOAT32)
    plan, other = (plan_of(model, optimizer, 1) for optimizer in (Optimizer.ADAM, Optimizer.ADAMW))
    found = compile_schedule(other, model)
    with pytest.raises(ScheduleError):
        verify_schedule(found, plan, model)
    object.__setattr__(found, "plan_id", plan.identity)
    with pytest.raises(ScheduleError, match="its optimizer is adamw, that of the plan is adam"):
        verify_schedule(found, plan, model)


@pytest.mark.parametrize("optimizer", [o for o in Optimizer if o is not Optimizer.ADAMW])
def test_the_verifier_rejects_state_and_work_of_adamw(optimizer: Optimizer) -> None:
    """The wrong variant: a compiler that knows AdamW alone."""
    dtype = DType.BFLOAT16 if optimizer is Optimizer.ADAMW_BF16 else DType.FLOAT32
    model = model_of([(400, 250), (64, 64)], dtype)
    plan = plan_of(model, optimizer, 1)
    wrong = compile_schedule(plan_of(model, Optimizer.ADAMW, 1), model)
    object.__setattr__(wrong, "plan_id", plan.identity)
    object.__setattr__(wrong, "optimizer", optimizer)
    if optimizer is Optimizer.ADAM:
        verify_schedule(wrong, plan, model)  # it keeps and moves the same
        return
    with pytest.raises(ScheduleError, match=r"static buffers|tensors, not|scalars and|another phase"):
        verify_schedule(wrong, plan, model)


# -- time ------------------------------------------------------------------------------------------------------------


def test_a_step_moves_what_its_tensors_weigh() -> None:
    """By hand, for a float32 weight: moments and weight in and out, the gradient in."""
    (stepped,) = stepped_of([Parameter(name="w", shape=(256, 256), dtype=DType.FLOAT32)])
    per_scalar = {o: traffic_bytes(stepped, o) / 65_536 for o in Optimizer}
    assert per_scalar[Optimizer.ADAMW] == per_scalar[Optimizer.ADAM] == 2 * (8 + 4) + 4
    assert per_scalar[Optimizer.SGD] == per_scalar[Optimizer.LION] == 2 * (4 + 4) + 4
    assert per_scalar[Optimizer.ADAMW_8BIT] == 2 * (2 + 2 * 4 / 256 + 4) + 4
    assert per_scalar[Optimizer.ADAFACTOR] == 17 * 4


def test_stated_seconds_of_an_optimizer_are_its_own() -> None:
    model = model_of([(400, 250)] * 2, DType.FLOAT32)
    box = machine()
    stated = box.model_copy(
        update={"host": box.host.model_copy(update={"optimizer_s_per_scalar": {Optimizer.LION: 1e-6}})}
    )
    for optimizer in (Optimizer.LION, Optimizer.SGD):
        schedule = compile_schedule(plan_of(model, optimizer, 0), model)
        seconds = {
            task.kind: found_s
            for task, found_s in zip(schedule.tasks, CostModel(stated).durations_s(schedule), strict=True)
        }
        bare = CostModel(box).durations_s(schedule)
        adam = next(task for task in schedule.tasks if task.kind is TaskKind.CPU_ADAM)
        expected = 1e-6 * 100_000 if optimizer is Optimizer.LION else bare[adam.id]
        assert seconds[TaskKind.CPU_ADAM] == pytest.approx(expected)


def test_quantizing_takes_cores_and_paging_takes_the_link() -> None:
    model = model_of([(400, 250)] * 2, DType.FLOAT32)
    box = machine()
    slow = box.model_copy(update={"host": box.host.model_copy(update={"adam_bytes_per_s": 1e15, "num_cores": 4})})

    def seconds(optimizer: Optimizer, n_persist: int, kind: TaskKind) -> float:
        schedule = compile_schedule(plan_of(model, optimizer, n_persist), model)
        durations_s = CostModel(slow).durations_s(schedule)
        return next(durations_s[task.id] for task in schedule.tasks if task.kind is kind)

    assert seconds(Optimizer.ADAMW_8BIT, 0, TaskKind.CPU_ADAM) == pytest.approx(22e-9 * 100_000 / 4)
    usual, paged = (
        seconds(optimizer, 2, TaskKind.DEVICE_ADAM) for optimizer in (Optimizer.ADAMW_8BIT, Optimizer.PAGED_ADAMW_8BIT)
    )
    links = (box.host_to_device, box.device_to_host)
    assert paged - usual == pytest.approx(sum(CostModel(slow).copy_s(2 * 200_000, link) for link in links))


def test_less_state_is_less_device_memory() -> None:
    model = model_of([(400, 250)] * 3, DType.FLOAT32)
    peaks = {o: guaranteed_device_peak(compile_schedule(plan_of(model, o, 3), model)).size_bytes for o in WORDS}
    by_8_bit = guaranteed_device_peak(compile_schedule(plan_of(model, Optimizer.ADAMW_8BIT, 3), model)).size_bytes
    assert peaks[Optimizer.ADAMW] - peaks[Optimizer.SGD] == 3 * (400_000 + 4)
    scales = 2 * 4 * -(-100_000 // 256) + 2048
    assert peaks[Optimizer.ADAMW] - by_8_bit == 3 * (800_000 + 4 - 200_000 - scales)


@pytest.mark.parametrize(
    ("optimizer", "n_persist", "kind", "expected"),
    [
        (Optimizer.ADAMW, 0, DeviceKind.CUDA, 0),
        (Optimizer.ADAMW_8BIT, 0, DeviceKind.CUDA, 20 * 100_000),
        (Optimizer.LION, 0, DeviceKind.CUDA, 12 * 100_000),
        (Optimizer.ADAFACTOR, 0, DeviceKind.CUDA, 4 * (100_000 + 400 + 250 + 1)),
        # The largest is persistent: nothing of it is the host's, unless the CPU is the device.
        (Optimizer.ADAMW_8BIT, 1, DeviceKind.CUDA, 20 * 4096),
        (Optimizer.ADAMW_8BIT, 1, DeviceKind.CPU, 20 * 100_000),
    ],
)
def test_the_host_holds_what_the_largest_step_makes(
    optimizer: Optimizer, n_persist: int, kind: DeviceKind, expected: int
) -> None:
    model = model_of([(400, 250), (64, 64)], DType.FLOAT32)
    schedule = compile_schedule(plan_of(model, optimizer, n_persist), model)
    layout = build_layout(model.parameters, num_blocks=2, chunk_bytes=1)
    found = host_memory(schedule, model.parameters, layout, machine(kind=kind), widens=False, device_peak_bytes=0)
    assert found.step_bytes == expected
    assert found.training_bytes == found.pinned_bytes + found.state_bytes + expected


# -- names and refusals ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", Optimizer)
def test_every_optimizer_is_called_by_its_name(optimizer: Optimizer) -> None:
    for name in (optimizer, optimizer.upper(), optimizer.replace("-", "_")):
        assert optimizer_named(name) is optimizer
    assert optimizer.words


def test_usual_names_are_known_and_others_refused() -> None:
    assert optimizer_named("AdamW8bit") is optimizer_named("adamw_bnb_8bit") is Optimizer.ADAMW_8BIT
    assert optimizer_named("bitsandbytes.optim.PagedAdamW8bit") is Optimizer.PAGED_ADAMW_8BIT
    with pytest.raises(PlanError, match=r"no optimizer 'adamw-8bits'\. Did you mean adamw-8bit"):
        optimizer_named("adamw-8bits")


def test_a_plan_of_before_is_refused_with_one_message() -> None:
    model = model_of([(64, 64)], DType.FLOAT32)
    content = json.loads(plan_of(model, Optimizer.SGD, 1).to_json())
    assert Plan.from_mapping(dict(content), origin="plan.json").optimizer is Optimizer.SGD
    with pytest.raises(FileError, match=r"plan\.json has schema_version 1; this release reads 2\. Write it again"):
        Plan.from_mapping(content | {"schema_version": 1}, origin="plan.json")


@pytest.mark.parametrize(
    ("optimizer", "dtype", "shape", "knobs", "message"),
    [
        (Optimizer.ADAMW_BF16, DType.FLOAT32, (4, 4), {}, "bfloat16 moments of bfloat16 weights"),
        (Optimizer.LION, DType.FLOAT64, (4, 4), {}, r"float32 at most, but parameter blocks\.0\.weight is float64"),
        (Optimizer.ADAFACTOR, DType.FLOAT32, (0, 4), {}, r"blocks\.0\.weight is empty"),
        (
            Optimizer.ADAFACTOR,
            DType.FLOAT32,
            (4, 4),
            {"parallel": ParallelMode.SHARDED, "num_ranks": 2},
            "adafactor needs whole matrices",
        ),
    ],
)
def test_what_cannot_be_stepped_is_refused_by_name(
    optimizer: Optimizer, dtype: DType, shape: tuple[int, ...], knobs: dict[str, object], message: str
) -> None:
    model = model_of([shape, (4, 4)], dtype)
    plan = plan_of(model, optimizer, 0, **knobs)
    with pytest.raises(PlanError, match=message):
        compile_schedule(plan, model)
    if not knobs:
        request = SearchRequest(workload=model, hardware=machine(), step=Step(optimizer=optimizer))
        with pytest.raises(PlanError, match=message):
            search_problem(request)


def test_ranks_are_searched_in_the_modes_that_an_optimizer_allows() -> None:
    step = Step(num_ranks=2, optimizer=Optimizer.ADAFACTOR)
    assert step.allowed_modes == (ParallelMode.DDP, ParallelMode.REPLICATED)
    with pytest.raises(PlanError, match="adafactor needs whole matrices"):
        _ = Step(num_ranks=2, optimizer=Optimizer.ADAFACTOR, modes=(ParallelMode.SHARDED,)).allowed_modes
