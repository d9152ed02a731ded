"""Inputs of recomputed blocks on the host: a constant number of them is on the device, and none too early or late."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings

from protwin.shared.basics.errors import PlanError, ScheduleError
from protwin.shared.compile.compile import compile_schedule
from protwin.shared.layout.layout import layout_of
from protwin.shared.layout.travelling_inputs import input_bytes
from protwin.shared.phases.shared_inputs import SharedInput
from protwin.shared.schema.plan import ActivationMode, Plan, place_activation_modes
from protwin.shared.schema.schedule import Content, Lane, Memory, Schedule, Task, TaskId, TaskKind
from protwin.shared.schema.workload import Workload
from protwin.shared.verify.guaranteed_peak import guaranteed_device_peak
from protwin.shared.verify.verify import verify_schedule
from tests.proof_size import examples
from tests.shared.abstract_machine import AbstractMachine
from tests.shared.adversaries import at_random
from tests.shared.small_models import OUTPUT_BYTES, chain, plan
from tests.shared.symbolic_values import Violation
from tests.strategies.plans import PlannedWorkload, planned_workloads

KEEP, CHECKPOINT, SWAP, OFFLOAD_INPUT, SELECTIVE = ActivationMode
OF_ACTIVATIONS = (Content.OUTPUT, Content.ACTIVATIONS, Content.SWAPPED, Content.INCOMING_GRADIENT)


def compiled(model: Workload, **knobs: int) -> tuple[Plan, Schedule]:
    chosen = plan(model, **{"n_buffer": 2, **knobs})
    return chosen, compile_schedule(chosen, model)


def peak_of_activations(num_blocks: int, depth: int, *, offloads: bool, micro_batches: int = 1) -> int:
    model = chain(num_blocks)
    number = num_blocks if offloads else 0
    knobs = {"n_checkpoint": num_blocks, "n_offload_input": number, "prefetch_depth": depth}
    _, schedule = compiled(model, **knobs, micro_batches=micro_batches)
    nothing = [b if b.content in OF_ACTIVATIONS else replace(b, size_bytes=0) for b in schedule.buffers]
    return guaranteed_device_peak(replace(schedule, buffers=tuple(nothing))).size_bytes


@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("depth", [1, 2])
def test_the_peak_of_activations_does_not_grow_with_the_number_of_blocks(depth: int, micro_batches: int) -> None:
    """Beside a plan that checkpoints all blocks, of which one more holds one input more."""
    few, more, most = (peak_of_activations(n, depth, offloads=True, micro_batches=micro_batches) for n in (8, 16, 32))
    assert few == more == most
    kept = [peak_of_activations(n, depth, offloads=False, micro_batches=micro_batches) for n in (8, 16, 32)]
    assert [kept[1] - kept[0], kept[2] - kept[1]] == [8 * OUTPUT_BYTES, 16 * OUTPUT_BYTES]


def test_every_input_has_its_place_on_the_host_but_the_first() -> None:
    model = chain(5)
    _, schedule = compiled(model, n_checkpoint=5, n_offload_input=5)
    homes = [b for b in schedule.buffers if b.is_static and b.content is Content.SWAPPED]
    assert [(b.section, b.memory, b.size_bytes) for b in homes] == [
        (block, Memory.PINNED_HOST, OUTPUT_BYTES) for block in (1, 2, 3, 4)
    ]
    for kind, lane in ((TaskKind.ACTIVATION_OFFLOAD, Lane.D2H), (TaskKind.ACTIVATION_FETCH, Lane.H2D)):
        found = [task for task in schedule.tasks if task.kind is kind]
        assert sorted(task.section for task in found if isinstance(task.section, int)) == [1, 2, 3, 4]
        assert all(task.lane is lane and task.moved_bytes == OUTPUT_BYTES for task in found)


def test_the_earliest_blocks_offload_their_input_and_the_first_one_last() -> None:
    def placed(number: int) -> tuple[ActivationMode, ...]:
        return place_activation_modes(4, n_checkpoint=4, n_offload_input=number)

    assert placed(0) == (CHECKPOINT,) * 4
    assert placed(1) == (CHECKPOINT, OFFLOAD_INPUT, CHECKPOINT, CHECKPOINT)
    assert placed(3) == (CHECKPOINT, OFFLOAD_INPUT, OFFLOAD_INPUT, OFFLOAD_INPUT)
    assert placed(4) == (OFFLOAD_INPUT,) * 4
    mixed = place_activation_modes(6, n_swap=2, n_checkpoint=2, n_offload_input=1)
    assert mixed == (SWAP, SWAP, KEEP, OFFLOAD_INPUT, KEEP, CHECKPOINT)
    with pytest.raises(PlanError, match="n_offload_input is 3 but n_checkpoint is 2"):
        place_activation_modes(4, n_checkpoint=2, n_offload_input=3)
    with pytest.raises(ValueError, match="n_offload_input: 1 with n_checkpoint 0; only blocks that are recomputed"):
        plan(chain(2), n_offload_input=1)


def test_a_plan_without_the_knob_has_no_such_field() -> None:
    assert "n_offload_input" not in plan(chain(2), n_checkpoint=2).to_json()
    written = plan(chain(2), n_checkpoint=2, n_offload_input=1)
    assert Plan.model_validate_json(written.model_dump_json()) == written


def test_inputs_that_are_no_block_s_output_alone_stay() -> None:
    """Behind the end of an encoder, and what a block makes for all later ones besides its output."""
    model = chain(6)
    biases = SharedInput(size_bytes=300, checkpointed_by=(1, 2), freed_in_checkpointed=(1,))
    ends = SharedInput(size_bytes=100, let_go_by=2, checkpointed_by=(0, 1, 2), freed_in_checkpointed=(0,))
    larger = model.profiles[0].model_copy(update={"output_bytes": OUTPUT_BYTES + 300})
    model = model.model_copy(update={"profiles": (larger, *model.profiles[1:]), "shared_inputs": (biases, ends)})
    assert input_bytes(model) == [0, OUTPUT_BYTES, OUTPUT_BYTES, 0, OUTPUT_BYTES, OUTPUT_BYTES]
    seen = model.model_copy(update={"staying_inputs": (4,)})
    assert input_bytes(seen) == [0, OUTPUT_BYTES, OUTPUT_BYTES, 0, 0, OUTPUT_BYTES]
    assert Workload.model_validate_json(seen.model_dump_json()) == seen
    assert "staying_inputs" not in model.to_json()
    with pytest.raises(ValueError, match="staying_inputs names block 6 of 6"):
        Workload(**{name: getattr(seen, name) for name in Workload.model_fields} | {"staying_inputs": (6,)})


# -- hazards ---------------------------------------------------------------------------------------------------------


def only(schedule: Schedule, kind: TaskKind, section: int) -> Task:
    (found,) = [task for task in schedule.tasks if task.kind is kind and task.section == section]
    return found


def without_wait(schedule: Schedule, task: Task, other: Task) -> Schedule:
    assert other.id in task.after
    changed = replace(task, after=tuple(waited for waited in task.after if waited != other.id))
    return with_task(schedule, changed)


def with_task(schedule: Schedule, changed: Task) -> Schedule:
    return replace(schedule, tasks=tuple(changed if t.id == changed.id else t for t in schedule.tasks))


def harms(schedule: Schedule, case: PlannedWorkload) -> bool:
    """Whether one of many timings harms training, as the abstract machine sees it."""
    for seed in range(60):
        try:
            AbstractMachine(schedule, case.plan, case.workload, case.layout).run(at_random(seed))
        except Violation:
            return True
    return False


@pytest.mark.parametrize(
    ("task", "other"),
    [
        (TaskKind.RECOMPUTE, TaskKind.ACTIVATION_FETCH),
        (TaskKind.ACTIVATION_OFFLOAD, TaskKind.FORWARD),
        (TaskKind.ACTIVATION_FETCH, TaskKind.ACTIVATION_OFFLOAD),
    ],
    ids=["recomputed before the input is back", "gone while its forward reads it", "back before it has left"],
)
def test_dropped_waits_of_inputs_are_rejected(task: TaskKind, other: TaskKind) -> None:
    model = chain(4)
    chosen, schedule = compiled(model, n_persist=4, n_buffer=0, n_checkpoint=4, n_offload_input=4, prefetch_depth=8)
    case = PlannedWorkload(model, chosen, layout_of(model, chosen.chunk_bytes))
    verify_schedule(schedule, chosen, model, case.layout)
    assert not harms(schedule, case)
    changed = without_wait(schedule, only(schedule, task, 3), only(schedule, other, 3))
    assert harms(changed, case)
    with pytest.raises(ScheduleError):
        verify_schedule(changed, chosen, model, case.layout)


def test_an_input_that_is_freed_with_the_block_that_makes_it_is_rejected() -> None:
    """The wrong variant: the output of the block before goes behind that block's forward, before its reader runs."""
    model = chain(4)
    chosen, schedule = compiled(model, n_checkpoint=4, n_offload_input=4)
    offload = only(schedule, TaskKind.ACTIVATION_OFFLOAD, 2)
    early = replace(offload, after=(TaskId(only(schedule, TaskKind.FORWARD, 1).id),))
    with pytest.raises(ScheduleError):
        verify_schedule(with_task(schedule, early), chosen, model, layout_of(model, chosen.chunk_bytes))


@given(planned_workloads())
@settings(max_examples=examples(100, 15))
def test_inputs_move_as_often_as_their_blocks_say(case: PlannedWorkload) -> None:
    """In any residency and mixture: bytes out and back, and one place on the host for each."""
    schedule = compile_schedule(case.plan, case.workload, case.layout)
    modes = case.plan.modes(case.workload.num_blocks)
    saved = [profile.swappable_bytes for profile in map(case.workload.profile_of, range(len(modes)))]
    of_mode = {OFFLOAD_INPUT: input_bytes(case.workload), SWAP: saved}
    expected = sum(of_mode[mode][block] for block, mode in enumerate(modes) if mode in of_mode)
    for kind in (TaskKind.ACTIVATION_OFFLOAD, TaskKind.ACTIVATION_FETCH):
        moved = sum(task.moved_bytes for task in schedule.tasks if task.kind is kind)
        assert moved == case.plan.micro_batches * expected
    homes = [b.size_bytes for b in schedule.buffers if b.is_static and b.content is Content.SWAPPED]
    assert sum(homes) == expected
