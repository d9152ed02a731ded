"""One call from a model and data to a trained model: traced, planned, trained, measured, planned again, told."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Unpack

from safetensors.torch import save_model
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from ...runtime.checkpoints.checkpoints import has_checkpoint
from ...runtime.checkpoints.published import check_free, new_folder, save_published
from ...runtime.commands.learning_rates import LearningRates, Schedule
from ...runtime.commands.run_ranks import RunRank, rank_at_hand
from ...runtime.data.documents import load_tokenizer
from ...runtime.optimizers.named import named_optimizer
from ...runtime.planning.planned import Planned, planned
from ...runtime.planning.request import PlanRequest
from ...runtime.training.carry_out import carry_out
from ...runtime.training.training import Training
from ...shared.basics.errors import FileError, ProtwinError, WorkloadError
from ...shared.basics.units import format_bytes, format_seconds
from ...shared.schema.calibration import Calibration
from ...shared.schema.record import Record
from ...shared.schema.workload import DType
from ...sim.questions.by_name import simulate
from ..fitting.fit import Pair
from ..fitting.replanning import Replanner
from ..fitting.updating import updated
from .loop import Loop
from .options import TrainOptions, Wanted, wanted
from .streams import BatchStream, LoaderStream, StreamShape, stream_of
from .trained import Trained


def train(model: nn.Module, data: Any, *, budget: int | str | None = None, **options: Unpack[TrainOptions]) -> Trained:
    """Train ``model`` on ``data`` within ``budget``, by the plan that is searched for it, and say how it went.

    What happens: the model is traced and timed on the first batch, the machine is measured, a plan is searched, and
    training goes by it.  Its first steps are measured; with them predictions are corrected and a plan is searched
    again, which training changes to where it is predicted to be faster by more than a tie (``Replanner``).  A change of
    plan changes no bit of what is trained.  Losses and weights are those of the plain loop with the same batches,
    optimizer, accumulation, limit of the norm and scheduler.

    Args:
        model: A module, with adapters and frozen parts as they are to be trained.  It is set to training mode, and has
            ordinary parameters again afterwards.
        data: Batches as the model is called with: a ``DataLoader``, a list, or any iterable of mappings, sequences or
            tensors.  Or a ``torch.utils.data.Dataset`` or table of ``datasets``, with ``batch_size``; or the path of
            JSON Lines, Parquet or text, several of them, or a table with columns of text, with ``tokenizer``,
            ``batch_size`` and ``sequence_length``.
        budget: Device memory that training may fill, a number or text such as ``"10GiB"``; None for all of it.
        options: As of ``Wanted``: ``steps`` or ``epochs``, ``micro_batches``, ``max_gradient_norm``, ``optimizer``,
            ``learning_rate``, ``schedule`` or ``scheduler``, ``loss``, ``evaluation``, ``checkpoint`` and ``resume``,
            ``save``, ``report``, ``machine``, ``plan`` and others.

    Under torchrun all ranks call this, each with batches of its own, or those that share sequences (``sequence_ranks``
    of a given plan or of ``knobs``) with the same ones; files are shared out so.  Raises ProtwinError before anything
    is trained where options, data, model and budget do not go together: InfeasibleError if no plan fits, with the least
    that would.
    """
    chosen = wanted(options)
    rank = rank_at_hand(os.environ)
    shape = StreamShape(
        batch_size=chosen.batch_size,
        sequence_length=chosen.sequence_length,
        tokenizer=chosen.tokenizer,
        seed=chosen.seed,
        rank=rank.rank,
        num_ranks=rank.num_ranks,
        sequence_ranks=PlanRequest(plan=chosen.plan, knobs=chosen.knobs).sequence_ranks,
    )
    stream = stream_of(data, shape)
    evaluation = None if chosen.evaluation is None else stream_of(chosen.evaluation, shape)
    return _Run(model, chosen, stream, evaluation, budget, rank).run()


@dataclass
class _Run:
    """One call, once its arguments are read."""

    model: nn.Module
    wanted: Wanted
    stream: BatchStream
    evaluation: BatchStream | None
    budget: int | str | None
    rank: RunRank
    notes: list[str] = field(default_factory=list)

    def run(self) -> Trained:
        """All of it."""
        self._check()
        example = self.stream.example()
        self._num_steps()
        self.model.train()
        found = planned(self.model, example, self._request(), device=self.wanted.device, tell=self._tell)
        self.stream.share(found.plan.sequence_ranks)
        steps = self._num_steps()
        predicted = found.prediction
        self._tell(
            f"the plan takes {format_seconds(predicted.iteration_s)} a step and "
            f"{format_bytes(predicted.peak_device_bytes)} of the device, as predicted"
        )
        trained = self._trained(found, steps)
        if self.rank.speaks:
            self._write(trained)
        return trained

    def _check(self) -> None:
        """Raise ProtwinError for what would otherwise be found after the training."""
        wanted = self.wanted
        if not isinstance(self.model, nn.Module):
            raise WorkloadError(
                f"the model is a {type(self.model).__name__}; it must be an nn.Module. Load weights first, such as by "
                f"AutoModelForCausalLM.from_pretrained(folder)."
            )
        if isinstance(self.evaluation, LoaderStream) and isinstance(self.evaluation.data, Iterator):
            raise ProtwinError("evaluation is an iterator, which can be gone through once. Give a loader or a list.")
        if wanted.save is not None:
            check_free(Path(wanted.save))
        if wanted.checkpoint is not None and not wanted.resume and has_checkpoint(Path(wanted.checkpoint)):
            raise FileError(
                f"{wanted.checkpoint} holds a checkpoint already. Pass resume=True to go on from it, or name another "
                f"folder."
            )

    def _request(self) -> PlanRequest:
        wanted = self.wanted
        return PlanRequest(
            budget_bytes=self.budget,
            host_budget_bytes=wanted.host_budget,
            hardware=wanted.machine,
            calibration=wanted.calibration,
            plan=wanted.plan,
            workload=wanted.workload,
            knobs=wanted.knobs,
            micro_batches=wanted.micro_batches,
            max_gradient_norm=wanted.max_gradient_norm,
            optimizer=wanted.named_optimizer,
            loss=wanted.loss,
            blocks=wanted.blocks,
            autocast=None if wanted.autocast is None else DType(wanted.autocast),
            name=wanted.name,
            probe_s=wanted.probe_s,
        )

    def _num_steps(self) -> int | None:
        """Steps to train; None: as many as there are batches for.  Raises ProtwinError if there is none."""
        wanted = self.wanted
        if wanted.steps is not None:
            return wanted.steps
        number = self.stream.num_batches(wanted.epochs or 1)
        if number is None:
            if wanted.epochs is not None:
                raise ProtwinError(
                    "the data do not say how many batches they hold, so that epochs means nothing here. Give steps."
                )
            if wanted.schedule != Schedule.CONSTANT:
                raise ProtwinError(
                    f"schedule {wanted.schedule} needs to know the last step, and the data do not say "
                    "how many batches they hold. Give steps."
                )
            return None
        if number < wanted.micro_batches:
            raise ProtwinError(
                f"the data hold {number} batches, and a step takes {wanted.micro_batches} (micro_batches). Give more, "
                f"lower it, or say how far to train (steps, epochs)."
            )
        return number // wanted.micro_batches

    def _trained(self, found: Planned, steps: int | None) -> Trained:
        wanted, replanner = self.wanted, self._replanner(found, steps)
        with carry_out(
            self.model,
            found.plan,
            found.workload,
            optimizer=named_optimizer(wanted.named_optimizer, lr=wanted.learning_rate, **wanted.optimizer_options),
            parameter_groups=wanted.parameter_groups,
            device=found.device,
            replan_after=None if replanner is None else wanted.replan_after,
            replan=replanner,
        ) as training:
            loop = Loop(training, self.stream, self.evaluation, wanted, self._scheduler(training, steps), self._tell)
            loop.run(steps)
            plans = (found.plan,) if training.plan == found.plan else (found.plan, training.plan)
            measured = self._measured(training)
        if loop.losses:
            self._tell(f"loss {loop.losses[0]:.4f} -> {loop.losses[-1]:.4f} over {len(loop.losses)} steps")
        else:
            self._note("The checkpoint is at the last step: nothing was left to train.")
        calibration = self._learnt(found, replanner, measured)
        prediction = found.prediction
        if calibration is not None or plans[-1] != found.plan:
            prediction = simulate(plans[-1], found.workload, found.hardware, calibration)
        return Trained(
            workload=found.workload,
            hardware=found.hardware,
            plans=plans,
            losses=tuple(loop.losses),
            evaluations=tuple(loop.evaluations),
            first_prediction=found.prediction,
            prediction=prediction,
            measured=measured,
            calibration=calibration,
            search=found.result,
            notes=tuple(self.notes),
        )

    def _replanner(self, found: Planned, steps: int | None) -> Replanner | None:
        """Who looks for a better plan, where one was searched and another can be changed to."""
        after, plan = self.wanted.replan_after, found.plan
        is_given = self.wanted.plan is not None
        if after is None or is_given or plan.num_ranks > 1 or plan.n_disk_state or (steps or after + 1) <= after:
            return None
        made = found.replan(self._note)
        assert isinstance(made, Replanner)
        return made

    def _scheduler(self, training: Training, steps: int | None) -> Any:
        wanted = self.wanted
        if wanted.scheduler is not None:
            return wanted.scheduler(training.optimizer)
        if wanted.schedule == Schedule.CONSTANT and not wanted.warmup_steps:
            return None
        factors = LearningRates(1.0, Schedule(wanted.schedule), wanted.warmup_steps)
        return LambdaLR(training.optimizer, lambda step: factors.at(step, steps or 0))

    def _measured(self, training: Training) -> Record | None:
        try:
            return training.record()
        except ProtwinError as error:
            self._note(f"No times: {error}")
            return None

    def _learnt(self, found: Planned, replanner: Replanner | None, measured: Record | None) -> Calibration | None:
        """What the last plan's record tells of this machine, beside what was known; None where that is nothing."""
        known = found.request.calibration
        assert known is None or isinstance(known, Calibration)
        if replanner is not None and measured is not None and measured.plan != found.plan:
            known = replanner.calibration or known
        if measured is None:
            return known
        try:
            return updated(known, [Pair(found.workload, measured)], found.hardware)
        except ProtwinError as error:
            self._note(f"Nothing was learnt from the run: {error}")
            return known

    def _write(self, trained: Trained) -> None:
        wanted, model = self.wanted, self.model
        if wanted.report is not None:
            trained.save_report(wanted.report)
        if wanted.save is None:
            return
        folder = Path(wanted.save)
        if hasattr(model, "save_pretrained"):
            tokenizer = wanted.tokenizer
            if isinstance(tokenizer, str | Path):
                tokenizer = load_tokenizer(Path(tokenizer))
            config = getattr(model, "config", None)
            save_published(folder, model, tokenizer, base=str(getattr(config, "_name_or_path", "") or "model"))
        else:
            with new_folder(folder, sum(parameter.nbytes for parameter in model.parameters())) as part:
                save_model(model, str(part / "model.safetensors"))
        self._tell(f"saved in {folder}")

    def _note(self, line: str) -> None:
        self.notes.append(line)
        self._tell(line)

    def _tell(self, line: str) -> None:
        if self.wanted.tell is not None and self.rank.speaks:
            self.wanted.tell(line)
