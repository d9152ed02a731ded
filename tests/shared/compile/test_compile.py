"""Compiled schedules against counts and tables that are worked out by hand."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protwin.shared.basics.errors import PlanError
from protwin.shared.compile.compile import compile_schedule
from protwin.shared.layout.layout import build_layout
from protwin.shared.schema.plan import ActivationMode, Plan
from protwin.shared.schema.schedule import Content, Lane, Memory, OuterSection, Schedule, Task, TaskKind
from protwin.shared.schema.workload import DType, Uses, Workload
from protwin.shared.verify.verify import verify_schedule
from tests.proof_size import examples
from tests.shared.abstract_machine import AbstractMachine
from tests.shared.adversaries import at_random, preferring
from tests.shared.small_models import OUTPUT_BYTES, SAVED_BYTES, chain, parameter, plan, workload
from tests.strategies.plans import plans
from tests.strategies.workloads import workloads


def tasks_of(schedule: Schedule, kind: TaskKind) -> list[Task]:
    return [task for task in schedule.tasks if task.kind is kind]


def moved_bytes(schedule: Schedule, kind: TaskKind) -> int:
    return sum(task.moved_bytes for task in tasks_of(schedule, kind))


def check_everything(schedule: Schedule, plan: Plan, model: Workload) -> None:
    """Verified, and run on the abstract machine in a few ways."""
    layout = build_layout(model.parameters, num_blocks=model.num_blocks, chunk_bytes=plan.chunk_bytes)
    verify_schedule(schedule, plan, model, layout)
    for adversary in (at_random(1), preferring(Lane.H2D), preferring(Lane.COMPUTE)):
        AbstractMachine(schedule, plan, model, layout).run(adversary)


# -- by hand ---------------------------------------------------------------------------------------------------------


def table(schedule: Schedule) -> list[tuple[str, set[str], set[str]]]:
    """Every task with what it waits for, by names that are unique."""
    seen: Counter[str] = Counter()
    names = []
    for task in schedule.tasks:
        seen[task.name] += 1
        names.append(task.name if seen[task.name] == 1 else f"{task.name} again")
    return [
        (name, {names[t] for t in task.after}, {names[t] for t in task.after_previous})
        for name, task in zip(names, schedule.tasks, strict=True)
    ]


def test_two_blocks_in_one_buffer() -> None:
    """Steps: three forwards, the epilogue, three backwards.  Chunk 1 stays across the turn, chunk 0 comes twice."""
    model = chain(2)
    schedule = compile_schedule(plan(model), model)
    assert table(schedule) == [
        # Gradients of the step two before have gone.
        ("forward prologue", set(), {"gradient_offload chunk 0"}),
        # Its buffer was last used by backward 0; the step two before its own was the prologue's backward.
        ("gather chunk 0", set(), {"backward 0", "backward prologue", "cpu_adam chunk 0"}),
        ("forward 0", {"gather chunk 0"}, set()),
        ("gather chunk 1", {"forward prologue", "forward 0"}, {"cpu_adam chunk 1"}),
        ("forward 1", {"gather chunk 1"}, set()),
        ("forward epilogue", set(), set()),
        ("backward epilogue", set(), set()),
        ("backward 1", set(), set()),
        ("gradient_offload chunk 1", {"backward 1"}, set()),
        ("cpu_adam chunk 1", {"gradient_offload chunk 1"}, set()),
        ("gather chunk 0 again", {"backward 1", "backward epilogue", "forward 0"}, set()),
        ("backward 0", {"gather chunk 0 again"}, set()),
        ("gradient_offload chunk 0", {"backward 0"}, set()),
        ("cpu_adam chunk 0", {"gradient_offload chunk 0"}, set()),
        ("backward prologue", {"gradient_offload chunk 1"}, set()),
        ("device_adam", set(), set()),
    ]


def tied(*, prefetch_depth: int = 1, n_buffer: int = 1) -> Schedule:
    """One block between an embedding that is the head too, and that the prologue's backward only adds to."""
    uses = Uses(
        forward=(OuterSection.PROLOGUE, OuterSection.EPILOGUE),
        backward=(OuterSection.EPILOGUE,),
        gradient=OuterSection.PROLOGUE,
    )
    head = parameter("embedding", 1_000, None).model_copy(update={"uses": uses})
    model = workload([parameter("w", 1_000, 0), head], 1)
    knobs = plan(model, prefetch_depth=prefetch_depth, n_buffer=n_buffer)
    schedule = compile_schedule(knobs, model)
    check_everything(schedule, knobs, model)
    return schedule


def test_a_tied_head_comes_for_both_ends_and_leaves_with_its_last_gradient() -> None:
    """Chunk 0, of the prologue, comes before it and again before the epilogue; its backward needs it no more."""
    assert table(tied()) == [
        ("gather chunk 0", set(), {"backward 0", "cpu_adam chunk 0"}),
        ("forward prologue", {"gather chunk 0"}, {"gradient_offload chunk 1"}),
        ("gather chunk 1", {"forward prologue"}, {"backward prologue", "cpu_adam chunk 1"}),
        ("forward 0", {"gather chunk 1"}, {"gradient_offload chunk 0"}),
        ("gather chunk 0 again", {"forward prologue", "forward 0"}, set()),
        ("forward epilogue", {"gather chunk 0 again"}, set()),
        ("backward epilogue", set(), set()),
        ("gather chunk 1 again", {"forward 0", "backward epilogue"}, set()),
        ("backward 0", {"gather chunk 1 again"}, set()),
        ("gradient_offload chunk 1", {"backward 0"}, set()),
        ("cpu_adam chunk 1", {"gradient_offload chunk 1"}, set()),
        ("backward prologue", set(), set()),
        ("gradient_offload chunk 0", {"backward prologue"}, set()),
        ("cpu_adam chunk 0", {"gradient_offload chunk 0"}, set()),
        ("device_adam", set(), set()),
    ]


def test_with_two_buffers_a_tied_head_stays_from_end_to_end() -> None:
    assert [task.chunk for task in tasks_of(tied(n_buffer=2), TaskKind.GATHER)] == [0, 1]


def test_a_checkpointed_block_waits_before_its_recomputation() -> None:
    model = chain(2)
    schedule = compile_schedule(plan(model, n_checkpoint=2), model)
    rows = {name: (after, previous) for name, after, previous in table(schedule)}
    assert rows["recompute 0"] == ({"gather chunk 0 again"}, set())
    assert rows["backward 0"] == (set(), set())
    assert rows["recompute 1"] == (set(), set())


def test_persistent_chunks_are_neither_gathered_nor_offloaded() -> None:
    model = chain(3)
    schedule = compile_schedule(plan(model, n_persist=3, n_buffer=0), model)
    assert [task.lane for task in schedule.tasks] == [Lane.COMPUTE] * len(schedule.tasks)
    adam = schedule.tasks[-1]
    assert adam.kind is TaskKind.DEVICE_ADAM
    assert adam.num_stepped == 3_000
    # Two moments and the weights, read and written, and the gradient read: 7 times 4 bytes per element.
    assert adam.stepped_bytes == 3_000 * 28
    assert schedule.static_bytes(Memory.HOST) == schedule.static_bytes(Memory.PINNED_HOST) == 0
    assert schedule.static_bytes(Memory.DEVICE) == 64 + 3 * (4_096 + 8_004)


def test_bytes_of_three_blocks_by_hand() -> None:
    """4 000 bytes per block, 4 096 with alignment, all offloaded; one, two and three buffers."""
    model = chain(3)
    for n_buffer, num_gathers in ((1, 5), (2, 4), (3, 3), (9, 3)):
        schedule = compile_schedule(plan(model, n_buffer=n_buffer), model)
        assert len(tasks_of(schedule, TaskKind.GATHER)) == num_gathers
        assert moved_bytes(schedule, TaskKind.GATHER) == num_gathers * 4_096
        assert moved_bytes(schedule, TaskKind.GRADIENT_OFFLOAD) == 3 * 4_000
        assert [t.num_stepped for t in tasks_of(schedule, TaskKind.CPU_ADAM)] == [1_000] * 3
        assert [t.stepped_bytes for t in tasks_of(schedule, TaskKind.CPU_ADAM)] == [28_000] * 3
        # Parameters and staged gradients; two moments and a count of steps.
        assert schedule.static_bytes(Memory.PINNED_HOST) == 3 * (4_096 + 4_096)
        assert schedule.static_bytes(Memory.HOST) == 3 * 8_004
        assert schedule.static_bytes(Memory.DEVICE) == 64


def test_narrow_parameters_have_masters() -> None:
    model = workload([parameter("w", 1_000, 0, dtype="bfloat16")], 1)
    schedule = compile_schedule(plan(model), model)
    adam = tasks_of(schedule, TaskKind.CPU_ADAM)[0]
    # Moments and master read and written (24), the gradient read (2), the parameter written (2).
    assert adam.stepped_bytes == 1_000 * 28
    assert schedule.static_bytes(Memory.HOST) == 12_004
    wide = workload([parameter("w", 1_000, 0, dtype="float64")], 1)
    schedule = compile_schedule(plan(wide), wide)
    assert tasks_of(schedule, TaskKind.CPU_ADAM)[0].stepped_bytes == 1_000 * 56
    assert schedule.static_bytes(Memory.HOST) == 16_004


def test_activations_of_both_modes_by_hand() -> None:
    model = chain(2)
    schedule = compile_schedule(plan(model, n_checkpoint=1), model)
    sizes = {
        (buffer.content, buffer.section): buffer.size_bytes
        for buffer in schedule.buffers
        if buffer.section is not None and buffer.content is not Content.GRADIENTS
    }
    assert sizes == {
        (Content.OUTPUT, OuterSection.PROLOGUE): OUTPUT_BYTES,
        (Content.OUTPUT, 0): OUTPUT_BYTES,
        (Content.ACTIVATIONS, 0): SAVED_BYTES,
        (Content.OUTPUT, 1): OUTPUT_BYTES,
        (Content.ACTIVATIONS, OuterSection.EPILOGUE): 3_000,
        (Content.INCOMING_GRADIENT, OuterSection.EPILOGUE): OUTPUT_BYTES,
        (Content.ACTIVATIONS, 1): SAVED_BYTES - 500,
        (Content.INCOMING_GRADIENT, 1): OUTPUT_BYTES,
        # The prologue's output is dropped by the prologue's backward, so nothing is left over here.
        (Content.INCOMING_GRADIENT, 0): 0,
        (Content.INCOMING_GRADIENT, OuterSection.PROLOGUE): 0,
    }


def test_gradients_outside_blocks_leave_as_those_of_blocks() -> None:
    """Nobody knows who uses the embedding: it comes at both ends of forward and backward."""
    model = workload([parameter("embedding", 1_000, None), parameter("w", 1_000, 0)], 1)
    schedule = compile_schedule(plan(model), model)
    last = next(
        b for b in schedule.buffers if b.content is Content.INCOMING_GRADIENT and b.section is OuterSection.PROLOGUE
    )
    assert last.size_bytes == 0
    gradients = [b for b in schedule.buffers if b.content is Content.GRADIENTS and not b.is_static]
    assert [(b.chunk, b.section, b.size_bytes) for b in gradients] == [(1, 0, 4_000), (0, OuterSection.PROLOGUE, 4_000)]
    assert [task.chunk for task in tasks_of(schedule, TaskKind.GRADIENT_OFFLOAD)] == [1, 0]
    assert [task.chunk for task in tasks_of(schedule, TaskKind.GATHER)] == [0, 1, 0, 1, 0]
    assert schedule.tasks[-1].num_stepped == 0


def test_nothing_is_nailed_to_the_device() -> None:
    """Beside activations, a plan without persistent chunks holds module buffers and the batch for good."""
    model = workload([parameter("embedding", 1_000, None), parameter("w", 1_000, 0), parameter("head", 70, None)], 1)
    schedule = compile_schedule(plan(model, n_buffer=2), model)
    assert [b.content for b in schedule.buffers if b.is_static and b.memory is Memory.DEVICE] == [Content.RESIDENT]


# -- counts ----------------------------------------------------------------------------------------------------------


@given(st.integers(1, 8), st.integers(1, 10), st.integers(1, 4))
def test_each_buffer_beyond_the_first_saves_a_gather(num_blocks: int, n_buffer: int, prefetch_depth: int) -> None:
    """With a chunk per block, the chunks of the last ``n_buffer`` blocks stay across the turn."""
    model = chain(num_blocks)
    schedule = compile_schedule(plan(model, n_buffer=n_buffer, prefetch_depth=prefetch_depth), model)
    kept = min(n_buffer, num_blocks)
    assert len(tasks_of(schedule, TaskKind.GATHER)) == 2 * num_blocks - kept


@given(st.integers(1, 8).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n), st.integers(0, n))))
def test_tasks_are_as_many_as_the_plan_says(drawn: tuple[int, int, int]) -> None:
    num_blocks, n_persist, n_checkpoint = drawn
    model = chain(num_blocks)
    schedule = compile_schedule(plan(model, n_persist=n_persist, n_buffer=num_blocks, n_checkpoint=n_checkpoint), model)
    offloaded = num_blocks - n_persist
    assert Counter(task.kind for task in schedule.tasks) == +Counter(
        {
            TaskKind.FORWARD: num_blocks + 2,
            TaskKind.RECOMPUTE: n_checkpoint,
            TaskKind.BACKWARD: num_blocks + 2,
            TaskKind.GATHER: offloaded,
            TaskKind.GRADIENT_OFFLOAD: offloaded,
            TaskKind.CPU_ADAM: offloaded,
            TaskKind.DEVICE_ADAM: 1,
        }
    )


@settings(max_examples=examples(200, 20))
@given(st.data())
def test_odd_workloads_compile(data: st.DataObject) -> None:
    """Blocks without parameters, empty parameters, depths beyond the iteration."""
    model = data.draw(workloads(max_blocks=4, min_parameters=0))
    knobs, layout = data.draw(plans(model, max_prefetch_depth=20))
    check_everything(compile_schedule(knobs, model, layout), knobs, model)


@given(workloads(max_blocks=3).flatmap(lambda model: st.tuples(st.just(model), plans(model))))
def test_the_same_input_gives_the_same_schedule(drawn: tuple[Workload, tuple[Plan, object]]) -> None:
    model, (knobs, _) = drawn
    schedule = compile_schedule(knobs, model)
    assert schedule == compile_schedule(Plan(**knobs.model_dump()), Workload(**model.model_dump()))
    assert schedule.plan_id == knobs.identity


# -- corners ---------------------------------------------------------------------------------------------------------


def test_a_frozen_chunk_is_gathered_without_waiting_for_an_adam() -> None:
    model = chain(3, frozen=(0, 1, 2))
    knobs = plan(model)
    schedule = compile_schedule(knobs, model)
    kinds = {task.kind for task in schedule.tasks}
    assert not kinds & {TaskKind.CPU_ADAM, TaskKind.GRADIENT_OFFLOAD}
    assert schedule.static_bytes(Memory.HOST) == 0
    assert schedule.static_bytes(Memory.PINNED_HOST) == 3 * 4_096
    assert all(b.content is not Content.GRADIENTS for b in schedule.buffers)
    check_everything(schedule, knobs, model)


def test_a_chunk_that_is_partly_frozen_is_stepped_in_part() -> None:
    """As with adapters: one small trainable parameter beside a large frozen one."""
    model = workload([parameter("base", 900, 0, trainable=False), parameter("adapter", 100, 0)], 1)
    knobs = plan(model, chunk_bytes=8_192)
    schedule = compile_schedule(knobs, model)
    assert moved_bytes(schedule, TaskKind.GATHER) == 3_840 + 512
    assert moved_bytes(schedule, TaskKind.GRADIENT_OFFLOAD) == 400
    assert tasks_of(schedule, TaskKind.CPU_ADAM)[0].num_stepped == 100
    # Only the trainable part is staged.
    assert schedule.static_bytes(Memory.PINNED_HOST) == 3_840 + 512 + 512
    check_everything(schedule, knobs, model)


def test_empty_parameters_move_nothing() -> None:
    model = workload([parameter("empty", 0, 0), parameter("w", 10, 1)], 2)
    knobs = plan(model, chunk_bytes=1)
    schedule = compile_schedule(knobs, model)
    assert [task.moved_bytes for task in tasks_of(schedule, TaskKind.GATHER) if task.chunk == 0] == [0, 0]
    assert [task.chunk for task in tasks_of(schedule, TaskKind.CPU_ADAM)] == [1]
    check_everything(schedule, knobs, model)


def test_blocks_without_parameters_need_no_buffer() -> None:
    model = workload([parameter("embedding", 10, None)], 3)
    for n_persist, num_gathers in ((1, 0), (0, 1)):
        knobs = plan(model, n_persist=n_persist, n_buffer=1 - n_persist)
        schedule = compile_schedule(knobs, model)
        assert len(tasks_of(schedule, TaskKind.GATHER)) == num_gathers
        assert schedule.tasks[-1].num_stepped == 10 * n_persist
        check_everything(schedule, knobs, model)


@pytest.mark.parametrize("prefetch_depth", [1, 2, 3, 100])
def test_one_block_and_any_prefetch_depth(prefetch_depth: int) -> None:
    model = chain(1)
    knobs = plan(model, prefetch_depth=prefetch_depth)
    schedule = compile_schedule(knobs, model)
    assert len(tasks_of(schedule, TaskKind.GATHER)) == 1
    check_everything(schedule, knobs, model)


def test_gathers_stay_within_one_iteration_however_deep_the_prefetch() -> None:
    """A frozen chunk could otherwise be gathered for ever: nothing but the window holds it back."""
    model = chain(2, frozen=(0, 1))
    knobs = plan(model, n_buffer=2, prefetch_depth=50)
    schedule = compile_schedule(knobs, model)
    for task in tasks_of(schedule, TaskKind.GATHER):
        assert task.after_previous
    check_everything(schedule, knobs, model)


def test_a_checkpointed_output_holds_whatever_its_forward_leaves() -> None:
    """The state of the random generator, above all, which recomputation restores."""
    model = chain(2)
    left = model.profiles[0].checkpoint_forward.model_copy(update={"net_bytes": OUTPUT_BYTES + 5_056})
    model = model.model_copy(
        update={"profiles": (model.profiles[0].model_copy(update={"checkpoint_forward": left}), model.profiles[1])}
    )
    schedule = compile_schedule(plan(model, n_checkpoint=2), model)
    outputs = {b.section: b.size_bytes for b in schedule.buffers if b.content is Content.OUTPUT}
    assert outputs == {OuterSection.PROLOGUE: OUTPUT_BYTES, 0: OUTPUT_BYTES + 5_056, 1: OUTPUT_BYTES}


# -- refusals --------------------------------------------------------------------------------------------------------


def test_a_plan_of_another_workload() -> None:
    with pytest.raises(PlanError, match="belongs to workload"):
        compile_schedule(plan(chain(4)), chain(3))


def test_too_few_buffers() -> None:
    parameters = [parameter(f"w{index}", 1_000, min(1, index)) for index in range(4)]
    model = workload(parameters, 2)
    with pytest.raises(PlanError, match=r"needs 3 gathered chunks at once but n_buffer is 0\. Raise n_buffer to 3,"):
        compile_schedule(plan(model, n_buffer=0), model)
    with pytest.raises(PlanError, match="Raise n_buffer to 3,"):
        compile_schedule(plan(model, n_buffer=2), model)
    compile_schedule(plan(model, n_buffer=3), model)


def test_more_persistent_chunks_than_there_are() -> None:
    model = chain(3)
    compile_schedule(plan(model, n_persist=3), model)
    with pytest.raises(PlanError, match="n_persist is 4 but chunk_bytes = 4096 gives 3 chunks"):
        compile_schedule(plan(model, n_persist=4), model)


def test_modes_for_another_number_of_blocks() -> None:
    model = chain(3)
    modes = (ActivationMode.CHECKPOINT, ActivationMode.KEEP)
    knobs = Plan(**plan(model, n_checkpoint=1).model_dump() | {"activation_modes": modes})
    with pytest.raises(PlanError, match="names 2 blocks but the workload has 3"):
        compile_schedule(knobs, model)
    with pytest.raises(PlanError, match="n_checkpoint is 4 but the workload has 3"):
        compile_schedule(plan(model, n_checkpoint=4), model)


def test_a_layout_of_another_plan() -> None:
    model = chain(3)
    layout = build_layout(model.parameters, num_blocks=3, chunk_bytes=8_192)
    with pytest.raises(PlanError, match="chunk_bytes"):
        compile_schedule(plan(model), model, layout)
    assert model.compute_dtype is DType.FLOAT32
