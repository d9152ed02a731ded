"""Teachers and students without memory, filled chunk by chunk from files: the bits of loaded ones, and less memory."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from protwin.runtime import CpuDevice, distil, trace_distillation, training_of
from protwin.runtime.chunks.saved_weights import SavedWeights
from protwin.shared import FileError, Plan, PlanError
from protwin.shared.compile.compile import compile_schedule
from protwin.shared.layout.layout import layout_of
from protwin.shared.schema.schedule import Memory
from tests.runtime.distillation.cases import adamw, changed, expected, mse, quiet, snapshot, steps_of, unlike
from tests.runtime.distillation.distilling import plan_in, random_bypass_plans, workload_of
from tests.runtime.distillation.families import COMMON, NARROW, build, families
from tests.runtime.equality import FAST_FOLDER
from tests.runtime.saved_models import HostPeak, on_meta, save

STEPS = 2


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    """Of the teacher and the student of the first test's families."""
    found = tmp_path / "teacher", tmp_path / "student"
    for folder in found:
        folder.mkdir()
    return found


def saved(name: str, folders: tuple[Path, Path]) -> tuple[nn.Module, nn.Module]:
    """Both models on the meta device, with their files."""
    models = families()[name].teacher(), families()[name].student()
    for model, folder in zip(models, folders, strict=True):
        save(model, folder)
    return on_meta(models[0]), on_meta(models[1])


@pytest.mark.parametrize(("name", "seed"), [("llama", 2), ("gpt2", 3)])
def test_the_bits_are_those_of_models_that_were_loaded(name: str, seed: int, folders: tuple[Path, Path]) -> None:
    """Neither is whole anywhere; a checkpoint of the one goes on with the other, and both can be evaluated."""
    plan = next(plan for plan in random_bypass_plans(name, 12, seed=seed) if plan.micro_batches == 1)
    reference, workload = expected(name, 1, STEPS, plan.max_gradient_norm), workload_of(name)
    family = reference.family
    teacher, student = saved(name, folders)
    before = [*teacher.parameters(), *student.parameters()]
    given: dict[str, Any] = {"optimizer": adamw, "device": CpuDevice()}
    with TemporaryDirectory(dir=FAST_FOLDER) as disk, quiet():
        weights: Any = {"teacher_weights": folders[0], "student_weights": SavedWeights(folders[1])}
        with distil(teacher, student, plan, workload, mse, disk_folder=disk, **weights, **given) as training:
            (batch,) = reference.steps[0]
            training(**batch)
            training.step()
            training.save(folders[0] / "saved")
            with training.evaluation():
                found = teacher(**batch).logits
        assert torch.equal(found, family.teacher()(**batch, use_cache=False).logits)
        assert all(parameter.is_meta for parameter in teacher.parameters())
        assert not any(parameter.is_meta for parameter in student.parameters())
        assert all(
            one is other for one, other in zip(before, (*teacher.parameters(), *student.parameters()), strict=True)
        )
        loaded, again = family.teacher(), family.student()
        with distil(loaded, again, plan, workload, mse, disk_folder=disk, **given) as training:
            training.resume(folders[0] / "saved")
            training(**reference.steps[1][0])
            training.step()
    for block, alone in zip(family.blocks, reference.learnt, strict=True):
        assert unlike(alone, again.get_submodule(block)) == []
    plain = dict(family.student().named_parameters())
    inside = tuple(f"{block}." for block in family.blocks)
    assert [n for n, p in student.named_parameters() if not n.startswith(inside) and not torch.equal(p, plain[n])] == []


def test_a_teacher_never_lies_whole_in_memory(tmp_path: Path) -> None:
    """With all of it on the disk the host has its ends and places; a teacher that is loaded first shows."""
    deep = COMMON | {"num_hidden_layers": 7}
    llama = transformers.LlamaForCausalLM, transformers.LlamaConfig
    teacher, student = build(*llama, deep, 0), build(*llama, deep | NARROW, 1)
    save(teacher, tmp_path)
    with quiet():
        workload = trace_distillation(teacher, student, families()["llama"].batches(1)[0], mse, repeats=0)
    layout = layout_of(workload, 9_000)
    num_chunks = len(layout.chunks)
    plan = Plan(
        workload_id=workload.identity,
        method="bypass",
        chunk_bytes=9_000,
        n_persist=0,
        n_buffer=layout.min_buffers(0) + 2,
        prefetch_depth=2,
        n_disk_state=num_chunks,
        n_disk=num_chunks,
        n_staging=2,
    )
    schedule = compile_schedule(plan, workload, layout)
    places_bytes = schedule.static_bytes(Memory.PINNED_HOST) + schedule.static_bytes(Memory.HOST)
    teacher_bytes = sum(parameter.nbytes for parameter in teacher.parameters())
    ends_bytes = sum(p.nbytes for n, p in teacher.named_parameters() if n in ("lm_head.weight", "model.norm.weight"))
    on_meta(teacher)
    peaks = []
    for loads_first in (False, True):
        own, files = (build(*llama, deep, 0), {}) if loads_first else (teacher, {"teacher_weights": tmp_path})
        made = build(*llama, deep | NARROW, 1)
        there = list(made.parameters()) + (list(own.parameters()) if loads_first else [])
        with TemporaryDirectory(dir=FAST_FOLDER) as disk, quiet():
            options: Any = {"device": CpuDevice(), "disk_folder": disk, **files}
            with HostPeak(*there) as memory:
                training = distil(own, made, plan, workload, mse, **options)
            training.close()
        peaks.append(memory.peak_bytes - sum(parameter.nbytes for parameter in made.parameters()))
    bound_bytes = places_bytes + ends_bytes + max(chunk.size_bytes for chunk in layout.chunks) + 30_000
    assert teacher_bytes > 1.2 * bound_bytes
    assert peaks[0] <= bound_bytes
    assert peaks[1] > bound_bytes


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({}, PlanError, r"of the teacher is on the meta device and has no values. Pass teacher_weights=FOLDER"),
        ({"teacher_weights": "teacher"}, PlanError, r"of the student is on the meta .* student_weights=FOLDER"),
        ({"teacher_weights": "teacher", "student_weights": 3}, PlanError, "student_weights is a int"),
        ({"teacher_weights": "student", "student_weights": "student"}, FileError, "are of another model"),
        ({"teacher_weights": "none", "student_weights": "student"}, FileError, "none"),
    ],
)
def test_what_is_missing_is_refused(
    given: dict[str, Any], error: type[Exception], message: str, tmp_path: Path, folders: tuple[Path, Path]
) -> None:
    teacher, student = saved("llama", folders)
    files: Any = {key: tmp_path / value if isinstance(value, str) else value for key, value in given.items()}
    with pytest.raises(error, match=message):
        distil(teacher, student, plan_in("llama", "mixed"), workload_of("llama"), mse, device=CpuDevice(), **files)
    assert training_of(teacher) is training_of(student) is None
    assert all(parameter.is_meta for model in (teacher, student) for parameter in model.parameters())


def test_a_student_of_a_teacher_with_values(folders: tuple[Path, Path]) -> None:
    """One model alone may be on the meta device."""
    name, reference = "llama", expected("llama", 1, STEPS)
    _, student = saved(name, folders)
    teacher = families()[name].teacher()
    before = snapshot(teacher)
    with (
        quiet(),
        distil(
            teacher,
            student,
            plan_in(name, "mixed"),
            workload_of(name),
            mse,
            optimizer=adamw,
            device=CpuDevice(),
            student_weights=folders[1],
        ) as training,
    ):
        for (batch,) in steps_of(families()[name], 1, STEPS):
            training(**batch)
            training.step()
    assert changed(teacher, before) == []
    for block, alone in zip(reference.family.blocks, reference.learnt, strict=True):
        assert unlike(alone, student.get_submodule(block)) == []
