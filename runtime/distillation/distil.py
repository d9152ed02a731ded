"""Carrying out a plan of bypass distillation: the one call that takes teacher and student over."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn, TypedDict, Unpack

import torch
from torch import nn

from ...shared.basics.errors import PlanError, ProtwinError, ScheduleError
from ...shared.pipelines.pipeline import Pipeline
from ...shared.schema.hardware import Disk
from ...shared.schema.plan import Plan
from ...shared.schema.plan_check import check_plan
from ...shared.schema.schedule import Memory
from ...shared.schema.workload import Workload
from ..devices.device import TrainingDevice
from ..lanes.compute_lane import ComputeLane
from ..lanes.progress import Call, TrainingPhase
from ..model.identity import model_hash
from ..model.ownership import check_untaken, taken_over
from ..optimizers.chunk_optimizer import MakeOptimizer
from ..optimizers.loss_scaling import BlockScalers, LossScaling
from ..optimizers.named import named_optimizer
from ..ranks.agreement import agreed
from ..ranks.stages import StageRanks, stage_ranks
from ..ranks.world import World, exchanged
from ..training.carry_out import begun, checked_plan, device_for, joined, with_values_of_a_file
from ..training.evaluation import EvaluatedModel
from ..training.settings import TrainingSettings
from ..training.training import Training
from .ends import Ends
from .handing_on import HandingOn
from .pair_weights import Folder, PairWeights, pair_weights
from .pairs import PairLoss, Pairs, name_of_loss
from .saved_student import saved_student


class DistilOptions(TypedDict, total=False):
    """Options of ``distil`` that ``carry_out`` has too, where it says what each means."""

    optimizer: MakeOptimizer | None
    parameter_groups: Sequence[Mapping[str, Any]] | None
    device: TrainingDevice | torch.device | str | None
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
    plan: Plan | Pipeline,
    workload: Workload,
    loss: PairLoss,
    *,
    blocks: str | Sequence[str] | None = None,
    rank_timeout_s: float = 600.0,
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
    in memory unless the plan has it there.  After ``close`` such a teacher is on the meta device again.  Ranks of a
    pipeline have both models whole on the meta device, and read the blocks of their stage, and what is in no block.

    A plan for several ranks is carried out by as many processes, as ``carry_out`` says.  So is a pipeline, of which
    each rank trains the pairs of its stage: ``losses`` are theirs, from pair ``training.first_pair`` on, and
    ``training.all_losses(losses)`` has those of all stages.  All ranks pass both models whole, but blocks of other
    stages need no memory, and may be on the meta device; the ranks of one pipeline are given the same batches.
    ``workload`` is that of the whole.

    Afterwards the student has its new weights, of a pipeline those of the stage's blocks, and the teacher is unchanged.
    Raises PlanError, before anything moves, if plan, workload, models and loss do not belong together, or if the plan
    may need more memory than the device has; otherwise as ``carry_out``.
    """
    found = _checked(teacher, plan, workload, loss)
    world = joined(found, rank_timeout_s)

    def begin() -> Distilling:
        own = agreed(world, lambda: _own_part(found, workload))
        stages = None if own.pipeline is None or world is None else stage_ranks(own.pipeline, world)
        try:
            return _begun(own.at(stages), world, teacher, student, loss, blocks, options)
        except BaseException:
            if stages is not None:
                stages.forget_groups()
            raise

    return begun(world, begin)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Part:
    """What this rank does."""

    plan: Plan
    workload: Workload
    pipeline: Pipeline | None = None
    workloads: tuple[Workload, ...] = ()
    """Of the stages."""
    stages: StageRanks | None = None

    def at(self, stages: StageRanks | None) -> _Part:
        """Of the stage that this rank has."""
        if stages is None:
            return self
        stage = stages.pipeline.stages[stages.stage]
        return replace(self, plan=stage.plan, workload=self.workloads[stages.stage], stages=stages)


def _own_part(found: Plan | Pipeline | ProtwinError, workload: Workload) -> _Part:
    """Raises what is wrong with the plan, or with another argument."""
    if isinstance(found, ProtwinError):
        raise found
    if isinstance(found, Plan):
        return _Part(plan=found, workload=workload)
    workloads = found.workloads(workload)
    first = found.stages[0].plan
    if found.num_stages == 1:
        return _Part(plan=first, workload=workload)
    return _Part(plan=first, workload=workload, pipeline=found, workloads=workloads)


def _begun(
    own: _Part,
    world: World | None,
    teacher: nn.Module,
    student: nn.Module,
    loss: PairLoss,
    blocks: str | Sequence[str] | None,
    options: DistilOptions,
) -> Distilling:
    """The training of this rank's part; what is wrong on one rank is raised on all."""

    def made() -> tuple[Pairs, PairWeights | None, TrainingSettings]:
        for model in (teacher, student):
            check_untaken(model)
        pairs_of_stage = None if own.stages is None else own.stages.own_pairs
        micro_batches = own.plan.micro_batches
        pairs = Pairs(teacher, student, loss, blocks=blocks, micro_batches=micro_batches, own=pairs_of_stage)
        weights = pair_weights(pairs, options.get("teacher_weights"), options.get("student_weights"))
        return pairs, weights, _settings(own, world, pairs, weights, options)

    pairs, weights, settings = agreed(world, made)
    settings = replace(settings, saved=saved_student(pairs, weights, world, own.stages))
    with ExitStack() as undo:
        undo.enter_context(pairs.learning())
        if own.stages is not None:
            settings = replace(settings, traced_hash=model_hash(pairs))
            undo.enter_context(pairs.alone())
        ends = Ends(pairs, own.workload)
        undo.enter_context(ends.on_host())
        training = Distilling(pairs, own.plan, own.workload, settings)
        training.ends = ends
        pairs.scalers = training.block_scalers
        try:
            agreed(world, lambda: undo.enter_context(ends.filled(weights)))
        except BaseException:
            training.close()
            raise
        for model in (teacher, student):
            undo.enter_context(taken_over(model, training))
        training.held = undo.pop_all()
    return training


def _settings(
    own: _Part, world: World | None, pairs: Pairs, weights: PairWeights | None, options: DistilOptions
) -> TrainingSettings:
    """What the options of ``distil`` mean for a training of the pairs."""
    device = options.get("device")
    found = own.plan
    return TrainingSettings(
        optimizer=options.get("optimizer") or named_optimizer(found.optimizer),
        parameter_groups=options.get("parameter_groups"),
        device=device if isinstance(device, TrainingDevice) else device_for(pairs, device, world),
        meter_every=options.get("meter_every"),
        check_gradients=options.get("check_gradients", True),
        loss_scaling=options.get("loss_scaling"),
        keep_last_step=options.get("keep_last_step", False),
        disk_folder=options.get("disk_folder"),
        stated_disk=options.get("stated_disk"),
        follow=lambda compute: _Announcing(pairs, compute),
        evaluated=_evaluated(pairs),
        weights=weights,
        returning=frozenset(parameter for parameter in pairs.teacher.parameters() if parameter.is_meta),
        world=world if own.stages is None else own.stages.peers,
        stages=own.stages,
    )


def _checked(
    teacher: nn.Module, plan: Plan | Pipeline, workload: Workload, loss: PairLoss
) -> Plan | Pipeline | ProtwinError:
    """The plan with the values that a file of it would have; what is wrong is given, so that other ranks hear of it."""
    pipeline = plan if isinstance(plan, Pipeline) else None
    found = checked_plan(teacher, None if isinstance(plan, Pipeline) else plan, workload)
    if isinstance(found, ProtwinError):
        return found
    try:
        return _of_one_distillation(pipeline or found, workload, loss)
    except ProtwinError as error:
        return error


def _of_one_distillation(found: Plan | Pipeline | None, workload: Workload, loss: PairLoss) -> Plan | Pipeline:
    """Raises PlanError unless all are of one distillation."""
    if found is None:
        raise PlanError("plan is None. Pass a plan, or a pipeline.")
    if isinstance(found, Pipeline):
        found = with_values_of_a_file(found, "distil")
        found.workloads(workload)
    else:
        check_plan(found, workload)
    if workload.distillation is None:
        raise PlanError(
            f"the workload ({workload.model_name}) is one of full training. Trace both models with "
            f"trace_distillation(teacher, student, batch, loss)."
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

    @property
    def first_pair(self) -> int:
        """The pair of the first of the losses: stages before this one have as many."""
        return 0 if self.stages is None else self.stages.own_pairs.start

    def all_losses(self, losses: torch.Tensor) -> torch.Tensor:
        """(n,) the losses of all pairs, on the host, from those of the stages' micro-batch; waits for them.

        To be called on all ranks.  Each gets those of its own replica.
        """
        if self.stages is None:
            return losses.detach().cpu()
        of_ranks = exchanged(self.stages.world, losses.tolist())
        return torch.tensor([loss for rank in self.stages.of_replica for loss in of_ranks[rank]])

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
        """Refused: every pair runs its own backward."""
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

        All ranks of a pipeline evaluate together: each calls the same models, equally often, in the same order and with
        the same batches.  The blocks run on their stages, what is behind them on every rank, so that every rank has the
        result of one rank.  An error that leaves the block on one rank ends training on all.
        """

        def check() -> None:
            self._progress.check(Call.EVALUATE, self._compute.task_at_hand, "both models can be evaluated")
            self.ends.check_room(self.schedule.static_bytes(Memory.DEVICE), self.device.limit_bytes)

        agreed(None if self.stages is None else self.everybody, check)
        try:
            with super().evaluation(), self.model.whole(), self.ends.coming(self.device), self._handing_on():
                yield
        except BaseException as error:
            if self.stages is not None:
                # Others wait for what this one would have sent.
                self._compute.failed(error)
            raise

    def _handing_on(self) -> AbstractContextManager[None]:
        return nullcontext() if self.stages is None else HandingOn(self.model, self.stages, self.device).running()

    def skip_step(self) -> None:
        """As ``Training.skip_step``; refused of a pipeline: its stages have exchanged activations of the step."""
        if self.stages is not None:
            raise ScheduleError(
                f"skip_step() is not known of a pipeline of {self.stages.pipeline.num_stages} stages. After close() "
                f"every rank's student has its own blocks' weights; or carry out a plan in which every rank has all."
            )
        super().skip_step()

    def close(self) -> None:
        """As ``Training.close``; both models then have their flags and modes back.

        Of a pipeline all ranks have to call it: a stage ends when its neighbours have what it has sent.
        """
        try:
            if self.stages is not None and self._progress.phase is TrainingPhase.IDLE:
                try:
                    self.synchronize()
                    exchanged(self.stages.world, None)
                except BaseException as error:
                    self._compute.failed(error)
                    super().close()
                    raise
            super().close()
        finally:
            self.held.close()


class _Announcing:
    """Lets the compute lane hear where the pairs are."""

    def __init__(self, pairs: Pairs, compute: ComputeLane) -> None:
        self._pairs = pairs
        pairs.listener = pairs.stage_listener = compute

    def remove(self) -> None:
        """Announce nothing any more."""
        self._pairs.listener = self._pairs.stage_listener = None

    def forget(self) -> None:
        """A forward that was given up has left no hooks behind."""
