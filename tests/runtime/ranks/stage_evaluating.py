"""Evaluations within pipelines, and models that each rank reads from files: what each rank finds."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import nn

from protwin.runtime import CpuDevice
from protwin.runtime.chunks.saved_weights import SavedWeights
from protwin.runtime.distillation.distil import distil
from protwin.runtime.distillation.handing_on import HandingOn
from protwin.runtime.distillation.validation import ValidationLosses, validation_losses
from protwin.shared.basics.errors import ProtwinError
from protwin.shared.compile.compile import compile_schedule
from protwin.shared.pipelines.pipeline import Pipeline
from protwin.shared.schema.schedule import Memory
from protwin.shared.schema.workload import Workload
from protwin.shared.verify.guaranteed_peak import guaranteed_device_peak
from protwin.shared.workloads.stages import stage_workloads
from tests.runtime.distillation.cases import Expected, adamw, mse, quiet, unlike
from tests.runtime.ranks.beside_ddp import in_default_group
from tests.runtime.ranks.processes import without_a_word
from tests.runtime.ranks.staging import subject
from tests.runtime.saved_models import on_meta

Batch = dict[str, torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class Evaluated:
    """Evaluations before each step of a run, and behind the last one."""

    name: str
    pipeline: Pipeline
    workload: Workload
    reference: Expected
    batches: list[Batch]
    folders: tuple[Path, Path] | None = None
    """Of teacher and student, where each rank reads its part."""


def output_of(model: nn.Module, batch: Batch) -> Any:
    """In an array: a tensor would lie in the device's memory as long as somebody has it."""
    output = model(**batch)
    return (output if isinstance(output, torch.Tensor) else output.logits).numpy().copy()


def room_for(case: Evaluated, rank: int) -> CpuDevice:
    """What training needs, or what stays with a block that runs on more tokens than were traced."""
    stage = case.pipeline.stage_of(rank)
    own = stage_workloads(case.workload, [stage.num_pairs for stage in case.pipeline.stages])[stage]
    schedule = compile_schedule(case.pipeline.stages[stage].plan, own)
    static_bytes = schedule.static_bytes(Memory.DEVICE)
    return CpuDevice(60_000 + max(guaranteed_device_peak(schedule).size_bytes, static_bytes + 190_000))


def models_of(case: Evaluated, rank: int) -> tuple[nn.Module, nn.Module, list[str]]:
    """Both models, and the names of the rank's own blocks; the others are on the meta device."""
    family = subject(case.name)
    teacher, student = family.teacher(), family.student()
    stage = case.pipeline.stage_of(rank)
    first = case.pipeline.first_pair(stage)
    own = list(family.blocks[first : first + case.pipeline.stages[stage].num_pairs])
    for model in (teacher, student):
        for block in set(family.blocks) - set(own):
            model.get_submodule(block).to("meta")
    return teacher, student, own


@in_default_group
def evaluate(
    rank: int, case: Evaluated, variant: str | None = None
) -> tuple[list[list[Any]], list[ValidationLosses], list[str], list[str]]:
    """What the teacher and the student give at each time, their losses, what is wrong with the weights, what was read.

    At each time: of each batch the teacher's output and the student's.
    """
    teacher, student, own = models_of(case, rank)
    given: dict[str, Any] = {"device": room_for(case, rank), "optimizer": adamw, "rank_timeout_s": 60.0}
    if case.folders is not None:
        on_meta(teacher), on_meta(student)
        given |= {"teacher_weights": case.folders[0], "student_weights": case.folders[1], "device": CpuDevice()}
    found, losses, read = [], [], set[str]()
    read_one = SavedWeights.read

    def reading(self: SavedWeights, held: Any, *args: Any) -> None:
        read.add(f"{Path(held.file).parent.name}.{held.name}")
        read_one(self, held, *args)

    with (
        WRONG[variant](),
        quiet(),
        mock.patch.object(SavedWeights, "read", reading),
        distil(teacher, student, case.pipeline, case.workload, mse, **given) as training,
    ):
        for step in range(len(case.reference.steps) + 1):
            with training.evaluation():
                student.eval()
                found.append([output_of(m, batch) for batch in case.batches for m in (teacher, student)])
                student.train()
            if "input_ids" in case.batches[0]:
                losses.append(validation_losses(training, case.batches))
            if step < len(case.reference.steps):
                training(**case.reference.steps[step][0])
                training.step()
    wrong = []
    for block, alone in zip(subject(case.name).blocks, case.reference.learnt, strict=True):
        wrong += [f"{block}.{n}" for n in unlike(alone, student.get_submodule(block))] if block in own else []
    if case.folders is not None:
        wrong += [n for n, parameter in teacher.named_parameters() if not parameter.is_meta]
        inside = tuple(f"{block}." for block in subject(case.name).blocks if block not in own)
        wrong += [n for n, p in student.named_parameters() if p.is_meta != n.startswith(inside)]
    return found, losses, wrong, sorted(read)


@in_default_group
def evaluate_otherwise(rank: int, case: Evaluated, how: str) -> str:
    """Ranks that do not do the same, or ask for what no rank has; what is said."""
    teacher, student, _ = models_of(case, rank)
    given: dict[str, Any] = {"device": CpuDevice(), "optimizer": adamw, "rank_timeout_s": 60.0}
    try:
        with (
            without_a_word(),
            quiet(),
            distil(teacher, student, case.pipeline, case.workload, mse, **given) as training,
            training.evaluation(),
        ):
            batch = case.batches[0]
            if how == "another model" and rank:
                student(**batch)
            elif how == "another batch" and rank:
                teacher(input_ids=batch["input_ids"][:1])
            elif how == "hidden states":
                teacher(**batch, output_hidden_states=True)
            elif how == "an error" and rank == 0:
                raise ValueError("trouble")
            else:
                teacher(**batch)
    except (ProtwinError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


@in_default_group
def without_values(rank: int, case: Evaluated, given: dict[str, Any], different: int | None) -> None:
    """Begin with both models on the meta device; ``different`` is a rank that is given other folders."""
    family = subject(case.name)
    teacher, student = on_meta(family.teacher()), on_meta(family.student())
    folders = dict(given)
    if rank == different:
        folders["teacher_weights"] = folders["other"]
    folders.pop("other", None)
    with quiet():
        distil(teacher, student, case.pipeline, case.workload, mse, device=CpuDevice(), **folders).close()


# -- wrong variants --------------------------------------------------------------------------------------------------


def _not_written(self: HandingOn, part: str, hidden: torch.Tensor, sender: int) -> None:
    _RECEIVE(self, part, hidden.clone(), sender)


def _last_is_not_written(self: HandingOn, part: str, hidden: torch.Tensor, sender: int) -> None:
    is_last = sender == self._last_rank and self._pairs.has_next
    _RECEIVE(self, part, hidden.clone() if is_last else hidden, sender)


_RECEIVE = HandingOn._receive
WRONG: dict[str | None, Callable[[], AbstractContextManager[Any]]] = {
    None: nullcontext,
    "nothing is written": lambda: mock.patch.object(HandingOn, "_receive", _not_written),
    "the last is not written": lambda: mock.patch.object(HandingOn, "_receive", _last_is_not_written),
}
