"""What is measured of a distillation: teacher, student and batch, on the machine that trains them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ...runtime.distillation.block_losses import block_loss
from ...runtime.distillation.distil import distil
from ...runtime.distillation.pairs import PairLoss
from ...runtime.distillation.tracing import trace_distillation
from ...runtime.model.batches import Batch, batch_tensors
from ...runtime.students.student_model import make_student
from ...runtime.training.training import Training
from ...shared.schema.plan import Plan
from ...shared.students.families import family_of
from ...shared.students.student import (
    ExpertInitialization,
    FfnInitialization,
    Initialization,
    LinearInitialization,
    Student,
)
from .subject import Subject

_UNTAUGHT = Initialization(
    ffn=FfnInitialization.TRUNCATE, experts=ExpertInitialization.FIRST, linear=LinearInitialization.RANDOM
)
"""What a student begins with where only its time and memory count: no statistics of a teacher are needed."""


@dataclass(frozen=True)
class PairSubject(Subject):
    """A teacher (``model``) and its student on a machine, ready to be measured.  Runs train copies of both."""

    student: nn.Module | None = None
    pair_loss: PairLoss | None = None
    """Of a student block's output and its teacher's."""
    blocks: str = ""
    """Path of the list of blocks in both."""

    @classmethod
    def of(cls, teacher: nn.Module, student: Student, batch: Batch, *, name: str, **fields: Any) -> PairSubject:
        """The pair of ``teacher``, called ``name``, with what ``student`` says; traced and timed here.

        ``fields``: those of ``Subject`` that say where and how it is measured.
        """
        configuration: Mapping[str, Any] = teacher.config.to_dict()  # type: ignore[union-attr, operator]
        made = make_student(teacher, student.model_copy(update={"initialization": _UNTAUGHT}))
        loss = block_loss(student.loss)
        # Blocks end before the head: nothing reads labels.
        given = {key: tensor for key, tensor in batch_tensors(batch).items() if key != "labels"}
        workload = trace_distillation(teacher, made, given, loss, keys_to_learn=student.keys_to_learn)
        return cls(
            teacher,
            given,
            workload.model_copy(update={"model_name": f"a student of {name}"}),
            student=made,
            pair_loss=loss,
            blocks=family_of(configuration, name).blocks,
            **fields,
        )

    def begin(self, plan: Plan, *, disk_folder: Path | None = None) -> Training:
        """A training of copies of both models by ``plan``, on a device of its own; a context manager."""
        assert self.student is not None
        assert self.pair_loss is not None
        return distil(
            copy.deepcopy(self.model),
            copy.deepcopy(self.student),
            plan,
            self.workload,
            self.pair_loss,
            optimizer=self.make_optimizer,
            device=self.make_device(),
            disk_folder=disk_folder,
        )

    def run_step(self, training: Training) -> None:
        """One step of ``training`` on as many micro-batches as its plan has, each the subject's batch."""
        for _ in range(training.plan.micro_batches):
            training(**batch_tensors(self.batch))  # type: ignore[operator]
        training.step()

    def plain_step(self) -> Callable[[], None]:
        """A step without a plan: both models whole on the device, a loop that runs pair after pair, and one optimizer.

        What a block of the teacher is given and gives is seen by hooks, as anybody would do it.
        """
        return self.plain_pair()[0]

    def plain_pair(self) -> tuple[Callable[[], None], nn.Module]:
        """``plain_step``, and the student that it trains."""
        assert self.student is not None
        assert self.pair_loss is not None
        teacher, student = copy.deepcopy(self.model).eval(), copy.deepcopy(self.student).train()
        teacher.requires_grad_(False)
        learners = list(student.get_submodule(self.blocks).children())
        taught = list(teacher.get_submodule(self.blocks).children())
        optimizer = self.make_optimizer([{"params": [p for p in student.parameters() if p.requires_grad]}])
        loss_of_pair = self.pair_loss

        def learn(learner: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            target = output[0] if isinstance(output, tuple) else output
            with torch.enable_grad():
                found = learner(*args, **kwargs)
                loss = loss_of_pair(found[0] if isinstance(found, tuple) else found, target)
                loss.backward()  # type: ignore[no-untyped-call]

        for learner, block in zip(learners, taught, strict=True):
            block.register_forward_hook(
                lambda module, args, kwargs, output, learner=learner: learn(learner, args, kwargs, output),
                with_kwargs=True,
            )
        given = batch_tensors(self.batch)
        body = teacher.get_submodule(self.blocks.partition(".")[0])

        def step() -> None:
            with torch.no_grad():
                body(**given, use_cache=False)
            optimizer.step()
            optimizer.zero_grad()

        return step, student
