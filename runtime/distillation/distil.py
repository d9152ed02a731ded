"""Carrying out a plan of bypass distillation: the one call that takes teacher and student over."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NoReturn, TypedDict, Unpack

import torch
from torch import nn

from ...shared.basics.errors import PlanError, ProtwinError, ScheduleError
from ...shared.schema.hardware import Disk
from ...shared.schema.plan import Plan
from ...shared.schema.schedule import Memory
from ...shared.schema.workload import Workload, check_plan
from ..devices.device import TrainingDevice
from ..model.ownership import check_untaken, taken_over
from ..optimizers.chunk_optimizer import MakeOptimizer
from ..optimizers.loss_scaling import BlockScalers, LossScaling
from ..optimizers.named import named_optimizer
from ..training.assembly import TrainingSettings
from ..training.carry_out import checked_plan, device_for
from ..training.compute_lane import ComputeLane
from ..training.evaluation import EvaluatedModel
from ..training.training import Training
from .ends import Ends
from .pair_weights import Folder, pair_weights
from .pairs import PairLoss, Pairs, name_of_loss
from .saved_student import saved_student


class DistilOptions(TypedDict, total=False):
    """Options of ``distil`` that ``carry_out`` has too, where it says what each means."""

    optimizer: MakeOptimizer | None
    parameter_groups: Sequence[Mapping[str, Any]] | None
    device: TrainingDevice | str | None
    meter_every: int | None
    check_gradients: bool
    loss_scaling: LossScaling | None
    keep_last_step: bool
    disk_folder: str | Path | None
    stated_disk: Disk | None
    teacher_weights: Folder | None
    student_weights: Folder | None


def distil(
    teacher: nn.Module,
    student: nn.Module,
    plan: Plan,
    workload: Workload,
    loss: PairLoss,
    *,
    blocks: str | Sequence[str] | None = None,
    **options: Unpack[DistilOptions],
) -> Distilling:
    """Take over both models and train every block of ``student`` beside its teacher's, as ``plan`` says.

    Use the result as a context manager::

        with distil(teacher, student, plan, workload, loss) as training:
            for batch in batches:
                losses = training(**batch)
                training.step()

    ``losses`` is an (n,) tensor on the device, one loss per block; nothing waits for it.  With several micro-batches
    call the training so often before each step, which minimises the mean of their losses.  ``loss`` and ``blocks`` are
    those of ``trace_distillation``, which gives ``workload``.  Parameter groups hold what is learnt of the student.
    ``max_gradient_norm`` of the plan limits the norm of each block's gradients by itself; a block whose norm is not
    finite is held in that step (``training.held_blocks``).  ``loss_scaling``, for float16, scales each block's loss by
    itself, and needs that limit.

    ``teacher_weights`` and ``student_weights`` are folders of safetensors files for models whose parameters are on the
    meta device, as ``weights`` of ``carry_out``: each chunk is read when it is made, so that a teacher never lies whole
    in memory unless the plan has it there.  After ``close`` such a teacher is on the meta device again.

    Afterwards the student has its new weights, and the teacher is unchanged.  Raises PlanError, before anything moves,
    if plan, workload, models and loss do not belong together, or if the plan may need more memory than the device has;
    otherwise as ``carry_out``.
    """
    found = _checked(teacher, plan, workload, loss)
    for model in (teacher, student):
        check_untaken(model)
    pairs = Pairs(teacher, student, loss, blocks=blocks, micro_batches=found.micro_batches)
    weights = pair_weights(pairs, options.get("teacher_weights"), options.get("student_weights"))
    device = options.get("device")
    settings = TrainingSettings(
        optimizer=options.get("optimizer") or named_optimizer(found.optimizer),
        parameter_groups=options.get("parameter_groups"),
        device=device if isinstance(device, TrainingDevice) else device_for(pairs, device),
        meter_every=options.get("meter_every"),
        check_gradients=options.get("check_gradients", True),
        loss_scaling=options.get("loss_scaling"),
        keep_last_step=options.get("keep_last_step", False),
        disk_folder=options.get("disk_folder"),
        stated_disk=options.get("stated_disk"),
        follow=lambda compute: _Announcing(pairs, compute),
        evaluated=_evaluated(pairs),
        saved=saved_student(pairs, weights),
        weights=weights,
        returning=frozenset(parameter for parameter in teacher.parameters() if parameter.is_meta),
    )
    with ExitStack() as undo:
        undo.enter_context(pairs.learning())
        ends = Ends(pairs, workload)
        undo.enter_context(ends.on_host())
        training = Distilling(pairs, found, workload, settings)
        training.ends = ends
        pairs.scalers = training.block_scalers
        try:
            undo.enter_context(ends.filled(weights))
        except BaseException:
            training.close()
            raise
        for model in (teacher, student):
            undo.enter_context(taken_over(model, training))
        training.held = undo.pop_all()
    return training


def _checked(teacher: nn.Module, plan: Plan, workload: Workload, loss: PairLoss) -> Plan:
    """The plan with the values that a file of it would have.  Raises PlanError unless all are of one distillation."""
    found = checked_plan(teacher, plan, workload)
    if isinstance(found, ProtwinError):
        raise found
    if found is None:
        raise PlanError("plan is None, but there is one rank alone. Pass a plan.")
    check_plan(found, workload)
    if workload.distillation is None:
        raise PlanError(
            f"the workload ({workload.model_name}) is one of full training. Trace both models with "
            f"trace_distillation(teacher, student, batch, loss)."
        )
    if workload.num_stages > 1 or found.num_ranks > 1:
        raise PlanError(
            f"the plan is for {found.num_ranks} ranks of one of {workload.num_stages} stages; one rank alone carries a "
            f"distillation out so far. Search a plan without --ranks."
        )
    if name_of_loss(loss) != workload.distillation.loss:
        raise PlanError(
            f"the workload was traced with the loss {workload.distillation.loss}, and this one is "
            f"{name_of_loss(loss)}. Pass the same, or trace again."
        )
    return found


def _evaluated(pairs: Pairs) -> list[EvaluatedModel]:
    """Both models as an evaluation calls them.  The schedule has the teacher's prologue; ends are brought otherwise."""
    epilogue = 1 + 2 * pairs.num_pairs
    teacher = tuple((1 + 2 * index, block) for index, block in enumerate(pairs.teacher_blocks))
    student = tuple((2 + 2 * index, block) for index, block in enumerate(pairs.student_blocks))
    return [
        EvaluatedModel(pairs.teacher, teacher, 0, epilogue),
        EvaluatedModel(pairs.student, student, None, epilogue),
    ]


class Distilling(Training):
    """Teacher and student in the hands of a schedule; called with a batch, it gives the losses of all pairs."""

    held = ExitStack()
    """Gives both models their flags back."""
    model: Pairs
    ends: Ends
    """What of both models no task reads."""

    @property
    def teacher(self) -> nn.Module:
        """The teacher, which can be called within ``evaluation``."""
        return self.model.teacher

    @property
    def student(self) -> nn.Module:
        """The student, which can be called within ``evaluation``."""
        return self.model.student

    def __call__(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """(n,) the losses of one micro-batch, whose gradients are added to those of the step."""
        losses: torch.Tensor = self.model(*args, **kwargs)
        return losses

    @property
    def block_scalers(self) -> BlockScalers | None:
        """The scales of the blocks' losses; None without ``loss_scaling``."""
        return self.loss_scaler if isinstance(self.loss_scaler, BlockScalers) else None

    @property
    def held_blocks(self) -> tuple[str, ...]:
        """The blocks that the last completed step has held, since the norm of their gradients was not finite.

        By the names that the workload has for them, such as ``student.model.layers.3``.  None is held without
        ``max_gradient_norm`` in the plan.  Reading it waits for nothing.
        """
        return self._placed.held_blocks

    def scale(self, loss: torch.Tensor) -> NoReturn:
        """Refused: every pair runs its own backward."""
        raise ScheduleError(
            "every pair runs its own backward in a distillation, so that nobody scales a loss by hand. Pass "
            "loss_scaling=LossScaling() to distil()."
        )

    def weigh(self, loss: torch.Tensor, num_tokens: int) -> NoReturn:
        """Refused: there is one rank, and every pair runs its own backward."""
        raise ScheduleError("losses are not weighed in a distillation: every pair runs its own backward.")

    @contextmanager
    def evaluation(self) -> Iterator[None]:
        """Within the block the whole teacher and the whole student can be called, forward and without gradients.

        Otherwise as ``Training.evaluation``: ``teacher(**batch)`` and ``student(**batch)`` take batches of any shape
        that memory allows.  Blocks come to the device one after the other; so does each module outside of them, such as
        the head, which is on the host before and after it runs.  ``student.eval()`` and ``student.train()`` are the
        caller's.  Raises DeviceOutOfMemoryError, with nothing changed, if one of these modules does not fit beside
        what stays on the device; a module that finds no room for its weights and what it makes of a batch raises it
        before it runs, and training can go on.
        """
        self.ends.check_room(self.schedule.static_bytes(Memory.DEVICE), self.device.limit_bytes)
        with super().evaluation(), self.model.whole(), self.ends.coming(self.device):
            yield

    def close(self) -> None:
        """As ``Training.close``; both models then have their flags and modes back."""
        try:
            super().close()
        finally:
            self.held.close()


class _Announcing:
    """Lets the compute lane hear where the pairs are."""

    def __init__(self, pairs: Pairs, compute: ComputeLane) -> None:
        self._pairs = pairs
        pairs.listener = compute

    def remove(self) -> None:
        """Announce nothing any more."""
        self._pairs.listener = None

    def forget(self) -> None:
        """A forward that was given up has left no hooks behind."""
