"""Workloads of bypass distillation that are composed from a teacher's and a student's, without a trace."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings

from protwin.shared.basics.errors import PlanError, WorkloadError
from protwin.shared.compile.compile import compile_schedule
from protwin.shared.layout.layout import layout_of
from protwin.shared.phases.seen_memory import PhaseMemory, SeenMemory
from protwin.shared.schema.plan import Plan, TrainingMethod
from protwin.shared.schema.schedule import Content, OuterSection, TaskKind
from protwin.shared.schema.workload import DType, Phase, Workload
from protwin.shared.verify.verify import verify_schedule
from protwin.shared.workloads.block_losses import loss_phases
from protwin.shared.workloads.bypass import bypass_workload
from protwin.shared.workloads.source import load_workload
from tests.proof_size import examples
from tests.shared.small_models import chain
from tests.strategies.workloads import workloads

GIB = 2**30
PHASES = ("forward", "backward", "checkpoint_forward", "recompute", "checkpoint_backward")


def resident_plan(workload: Workload, **knobs: object) -> Plan:
    layout = layout_of(workload, GIB)
    fields: dict[str, Any] = {"n_persist": len(layout.chunks), "n_buffer": 0} | knobs
    return Plan(workload_id=workload.identity, method=TrainingMethod.BYPASS, chunk_bytes=GIB, **fields)


@pytest.fixture(scope="module")
def llama() -> Workload:
    return load_workload("llama-3.2-1b", batch_size=1, sequence_length=256)


def test_a_model_of_the_catalogue_teaches_another(llama: Workload) -> None:
    found = bypass_workload(llama, [llama])
    assert found.method is TrainingMethod.BYPASS
    assert [b.name for b in found.blocks[:3]] == [
        "teacher.model.layers.0",
        "student.model.layers.0",
        "teacher.model.layers.1",
    ]
    outside = [p.name for p in found.parameters if p.block is None]
    assert outside == ["teacher.model.embed_tokens.weight"]  # the last norm is behind the last block
    assert {p.trainable for p in found.parameters if p.name.startswith("teacher.")} == {False}
    schedule = compile_schedule(resident_plan(found), found)
    verify_schedule(schedule, resident_plan(found), found)
    assert not [b for b in schedule.buffers if b.content is Content.INCOMING_GRADIENT], "everything is accounted for"
    flops = dict.fromkeys(TaskKind, 0)
    for task in schedule.tasks:
        flops[task.kind] += 0 if task.phase is None else task.phase.flops
    blocks = [llama.profile_of(block) for block in range(llama.num_blocks)]
    forward_flops = sum(profile.checkpoint_forward.flops for profile in blocks)
    assert flops[TaskKind.TEACHER_FORWARD] == forward_flops + llama.prologue_forward.flops
    assert flops[TaskKind.FORWARD] == sum(profile.forward.flops for profile in blocks)
    # Backward of matrix products is twice their forward; losses are next to nothing.
    assert flops[TaskKind.BACKWARD] == pytest.approx(2 * flops[TaskKind.FORWARD], rel=0.1)


def test_what_is_not_learnt_has_no_gradients_and_what_learns_nothing_no_backward(llama: Workload) -> None:
    found = bypass_workload(llama, [llama], is_learnt=lambda block, name: block > 0 and ".mlp." in name)
    learnt = [p for p in found.parameters if p.trainable]
    assert {p.name.split(".")[4] for p in learnt} == {"mlp"}
    assert {p.block for p in learnt} == {2 * pair + 1 for pair in range(1, llama.num_blocks)}
    schedule = compile_schedule(resident_plan(found), found)
    made = sum(b.size_bytes for b in schedule.buffers if b.content is Content.GRADIENTS)
    assert made == sum(p.size_bytes for p in learnt)
    first = next(task for task in schedule.tasks if task.kind is TaskKind.BACKWARD)
    assert first.phase is not None
    assert first.phase.flops == 0
    assert not [b for b in schedule.buffers if b.content is Content.INCOMING_GRADIENT]


@settings(max_examples=examples(300, 15))
@given(workloads())
def test_any_workload_is_its_own_teacher(model: Workload) -> None:
    users = [p.uses for p in model.parameters if p.uses is not None]
    shares = any(not isinstance(section, OuterSection) for of in users for section in (*of.forward, *of.backward))
    if shares or not any(p.trainable for p in model.parameters if p.block is not None):
        with pytest.raises(WorkloadError, match=r"share|nothing of the student is learnt"):
            bypass_workload(model, [model])
        return
    found = bypass_workload(model, [model])
    plan = resident_plan(found, n_persist=0, n_buffer=layout_of(found, GIB).min_buffers(0))
    verify_schedule(compile_schedule(plan, found), plan, found)


def lower(phase: Phase) -> Phase:
    """With half of what it holds beyond what it leaves."""
    base = max(0, phase.net_bytes)
    fields = {name: getattr(phase, name) for name in Phase.model_fields}
    for name in ("curve", "adding_curve"):
        fields[name] = tuple(
            (end, base + (level - base) // 2 if level > base else level) for end, level in fields[name]
        )
    return Phase(**fields)


def routed(model: Workload) -> tuple[Workload, Workload]:
    """The model, of whose batch less was seen than its values may take; and one that always takes as little."""
    less, known = [], []
    for profile in model.profiles:
        phases = {name: lower(getattr(profile, name)) for name in PHASES}
        memory = {name: PhaseMemory.of(phase, getattr(profile, name)) for name, phase in phases.items()}
        seen = SeenMemory(**memory, swappable_bytes=profile.swappable_bytes, is_forced=True, num_tried=4)
        less.append(profile.model_copy(update=phases))
        known.append(profile.model_copy(update={"seen": seen}))
    fields = {name: getattr(model, name) for name in Workload.model_fields}
    return Workload(**fields | {"profiles": tuple(known)}), Workload(**fields | {"profiles": tuple(less)})


@settings(max_examples=examples(200, 10))
@given(workloads(max_blocks=3))
def test_pairs_of_models_whose_memory_depends_on_values_know_both(model: Workload) -> None:
    """What was seen of the pairs is what pairs of what was seen take; the most is what pairs of the most take."""
    known, less = routed(model)
    try:
        found, seen, worst = (bypass_workload(one, [one]) for one in (known, less, model))
    except WorkloadError:
        return  # its blocks share, or nothing is learnt
    for block in range(found.num_blocks):
        profile = found.profile_of(block)
        assert profile.model_copy(update={"seen": None}) == worst.profile_of(block)
        assert profile.seen is not None
        assert profile.seen.num_tried == 4
        as_seen, expected = found.as_seen.profile_of(block), seen.profile_of(block)
        for name in PHASES:
            for field in ("net_bytes", "curve", "adding_curve", "gradient_bytes"):
                assert getattr(getattr(as_seen, name), field) == getattr(getattr(expected, name), field)
    assert found.as_seen.identity == found.identity


def test_the_loss_saves_a_difference_in_float32() -> None:
    """Of E elements: float32 takes 4 E bytes; narrow outputs are copied, and their gradient is narrow."""
    wide, narrow = loss_phases("mse", 4_000, DType.FLOAT32), loss_phases("mse", 2_000, DType.BFLOAT16)
    for phases, output_bytes in ((wide, 4_000), (narrow, 2_000)):
        assert phases.forward.net_bytes == 4_000 + 12
        assert phases.backward.net_bytes == output_bytes - phases.forward.net_bytes
    assert wide.forward.peak_bytes == 8_000
    assert narrow.forward.peak_bytes == 16_000


def test_what_does_not_belong_together_is_refused(llama: Workload) -> None:
    longer = load_workload("llama-3.2-1b", batch_size=1, sequence_length=512)
    small, other = chain(3), chain(4)
    for teacher, students, message in (
        (small, [other], "have 3 and 4 blocks"),
        (small, [small, small], "2 workloads of a student for the 3 blocks"),
        (llama, [longer], "other batches or element types"),
        (bypass_workload(small, [small]), [small], "a distillation already"),
        (small, [chain(3, frozen=(0, 1, 2))], "nothing of the student is learnt"),
    ):
        with pytest.raises(WorkloadError, match=message):
            bypass_workload(teacher, students)
    with pytest.raises(WorkloadError, match="Did you mean normalized_mse"):
        bypass_workload(small, [small], loss="normalised_mse")
    found = bypass_workload(small, [small])
    plan = resident_plan(found).model_copy(update={"method": TrainingMethod.FULL})
    with pytest.raises(PlanError, match=r"method full, the workload .* method bypass"):
        compile_schedule(plan, found)
