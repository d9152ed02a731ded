"""The training of one Trainer: the plan that is found when it begins, and what carries the plan out while it runs."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch

from ...shared.basics.errors import PlanError, ScheduleError, WorkloadError
from ...shared.schema.optimizer import Optimizer
from ...shared.schema.plan import Plan
from ...shared.schema.workload import Workload
from ..devices.device import TrainingDevice
from ..model.batches import Batch, Loss
from ..model.snapshot import random_states_kept
from ..planning.planned import planned
from ..planning.request import PlanRequest
from ..ranks.own_device import torch_device_of
from ..training.carry_out import fill_step
from .accelerated import (
    FOLDER,
    clipping,
    planned_optimizer,
    prepare_forward,
    resume_apart,
    save_apart,
    saves_apart,
    state_elsewhere,
    training_mode,
)
from .computed_loss import call_and_loss, with_own_notes
from .largest_batch import largest_batch, size_of
from .loop_run import LoopRun, Wishes
from .made_optimizer import made_optimizer, rebind, refuse_optim
from .refusals import limit_of, refuse_arguments, refuse_other_step


class TrainerRun(LoopRun):
    """What a Trainer knows of its plan: ``planned`` from the first step on, ``training`` while ``train()`` runs."""

    def __init__(self, wishes: Wishes) -> None:
        super().__init__(wishes)
        self._ending: ExitStack | None = None
        self.weights: dict[str, Any] | None = None
        """All weights on the host, while they are being saved."""

    @property
    def is_ready(self) -> bool:
        """Whether a training is about to begin."""
        return self._ending is not None and self.training is None

    # -- before ------------------------------------------------------------------------------------------------------

    def check(self, arguments: Any, *, has_optimizer: bool) -> None:
        """Raise PlanError if TrainingArguments contradict the plan, or ask for what no plan is carried out with.

        ``has_optimizer``: the optimizer is not the one that ``optim`` names.
        """
        refuse_arguments(arguments)
        if not has_optimizer:
            refuse_optim(str(getattr(arguments.optim, "value", arguments.optim)))
        plan, workload = (self._wishes.request.get(name) for name in ("plan", "workload"))
        assert plan is None or isinstance(plan, Plan)
        assert workload is None or isinstance(workload, Workload)
        refuse_other_step(arguments, plan, workload)
        device = self._wishes.device
        named = device.torch_device if isinstance(device, TrainingDevice) else device
        kind = None if named is None else torch_device_of(named).type
        if kind is not None and kind != arguments.device.type:
            raise PlanError(
                f"the Trainer trains on {arguments.device.type}, but the plan is to be carried out on {kind}. "
                f"{'Leave use_cpu out' if kind == 'cuda' else 'Set use_cpu=True'}, or pass another device."
            )

    @contextmanager
    def ready(self, trainer: Any) -> Iterator[None]:
        """Within the block the Trainer trains; ``begin`` is expected, and whatever it began has ended afterwards."""
        if self._ending is not None:
            raise ScheduleError("train() within train(). Let the first one end.")
        given = trainer.optimizer, trainer.lr_scheduler
        try:
            with ExitStack() as self._ending:
                yield
        finally:
            self._ending = None
            # Those of the plan have ended with it.
            trainer.optimizer, trainer.lr_scheduler = given

    def begin(self, trainer: Any, made: torch.optim.Optimizer) -> Any:
        """Find the plan and take the model over.  Gives what stands for ``made`` in the Trainer's loop.

        Raises what ``planned`` and ``carry_out`` raise, with the model as it was.
        """
        assert self._ending is not None
        model, accelerator = trainer.model, trainer.accelerator
        optimizer = made_optimizer(made)
        prepare_forward(accelerator, model, self._ending)
        self._find(trainer, optimizer.name)
        training = self._take_over(model, self._ending, optimizer=optimizer.make, parameter_groups=optimizer.groups)
        if trainer.lr_scheduler is not None:
            for scheduler, former in rebind(trainer.lr_scheduler, training.optimizer):
                self._ending.callback(setattr, scheduler, "optimizer", former)
        accelerator.clip_grad_norm_ = clipping(accelerator.clip_grad_norm_, training)
        self._ending.callback(accelerator.__dict__.pop, "clip_grad_norm_", None)
        return planned_optimizer(training)

    def end(self) -> None:
        """The model is an ordinary one from now on.  Idempotent."""
        if self._ending is not None:
            self._ending.close()

    # -- the plan ----------------------------------------------------------------------------------------------------

    def _find(self, trainer: Any, optimizer: Optimizer) -> None:
        """The plan for the step that is asked for, unless it is known already."""
        arguments, wishes = trainer.args, self._wishes
        key = (
            weakref.ref(trainer.model),
            arguments.gradient_accumulation_steps,
            arguments.max_grad_norm,
            arguments.per_device_train_batch_size,
            optimizer,
        )
        if self._planned_for == key:
            return
        plan, workload = wishes.request.get("plan"), wishes.request.get("workload")
        if plan is not None and workload is not None:
            self.plan, self.workload, self.device = (
                plan,
                workload,
                wishes.given_device(arguments.device.type, arguments.local_process_index),
            )
        else:
            self._search(trainer, optimizer if plan is None else plan.optimizer)
        self._planned_for = key

    def _search(self, trainer: Any, optimizer: Optimizer) -> None:
        arguments, wishes = trainer.args, self._wishes
        with random_states_kept(), training_mode(trainer.model):
            batch, loss = (wishes.batch, wishes.loss) if wishes.batch is not None else self._batch_and_loss(trainer)
            step = {
                "micro_batches": arguments.gradient_accumulation_steps,
                "max_gradient_norm": limit_of(arguments.max_grad_norm),
                "optimizer": optimizer,
                "loss": loss,
                "name": type(trainer.model).__name__,
            }
            self.planned = planned(
                trainer.model,
                batch,
                PlanRequest(**{**step, **wishes.request}),
                device=wishes.device or arguments.device.type,
                tell=wishes.tell,
            )
        self.plan, self.workload, self.device = self.planned.plan, self.planned.workload, self.planned.device

    def _batch_and_loss(self, trainer: Any) -> tuple[Batch, Loss]:
        """The largest batch that the data begin with, as the Trainer calls the model with it."""
        if isinstance(trainer.train_dataset, Iterator):
            raise WorkloadError(
                "the training data can be gone through once alone, and a plan needs to see a batch before. Pass "
                "batch= what the model is called with, or data that begin anew."
            )
        inputs, number, is_all = largest_batch(trainer.get_train_dataloader())
        if not is_all and trainer.args.process_index == 0:
            self._wishes.tell(
                f"the plan is for the largest of the first {number} batches ({size_of(inputs):,} scalars). Pass batch= "
                f"if training meets larger ones."
            )
        twin = with_own_notes(trainer)
        twin.current_gradient_accumulation_steps = trainer.args.gradient_accumulation_steps
        inputs = twin._prepare_inputs(inputs)
        num_items = twin._get_num_items_in_batch([inputs], trainer.args.device)

        def compute(model: Any, given: dict[str, Any]) -> torch.Tensor:
            with twin.compute_loss_context_manager():
                found: torch.Tensor = twin.compute_loss(model, given, num_items_in_batch=num_items)
            return found

        return call_and_loss(trainer.model, inputs, compute)

    # -- the loop ----------------------------------------------------------------------------------------------------

    def after_micro_batch(self, trainer: Any, inputs: Mapping[str, Any], num_items: Any) -> None:
        """A forward and its backward are through.

        An epoch's last step may have fewer of them than the plan.  The last one then runs again, for nothing: its
        gradients are zeros, and random states and buffers are put back.
        """
        if self.training is None:
            return
        if trainer.accelerator.sync_gradients:
            fill_step(self.training, lambda: self._loss_again(trainer, inputs, num_items))

    @staticmethod
    def _loss_again(trainer: Any, inputs: Mapping[str, Any], num_items: Any) -> torch.Tensor:
        twin = with_own_notes(trainer)
        with twin.compute_loss_context_manager():
            loss: torch.Tensor = twin.compute_loss(
                trainer.model, twin._prepare_inputs(inputs), num_items_in_batch=num_items
            )
        return loss

    def given_to(self, inputs: Mapping[str, Any]) -> Mapping[str, Any]:
        """``inputs`` before a step has taken what it wants out of them."""
        return dict(inputs) if self.training is not None and self.training.plan.micro_batches > 1 else inputs

    @contextmanager
    def weights_at_hand(self) -> Iterator[None]:
        """Within the block ``weights`` has them, while a training runs; of several ranks, rank 0's."""
        if self.training is None or self.weights is not None:
            yield
            return
        self.weights = self.training.state_dict()
        try:
            yield
        finally:
            self.weights = None

    @contextmanager
    def saving(self, trainer: Any, folder: str) -> Iterator[None]:
        """Within the block the optimizer's state is in ``folder`` already, if no single file can hold it."""
        with ExitStack() as apart:
            if self.training is not None and saves_apart(self.training):
                save_apart(self.training, folder)
                apart.enter_context(state_elsewhere(trainer.optimizer))
            yield

    def resume(self, checkpoint: str | None) -> None:
        """Go on from what ``saving`` has put apart in ``checkpoint``, if it has."""
        if self.training is not None and checkpoint is not None and (Path(checkpoint) / FOLDER).is_dir():
            resume_apart(self.training, checkpoint)

    @contextmanager
    def evaluation(self, trainer: Any) -> Iterator[None]:
        """Within the block the model runs forward alone: under the plan, once there is one.

        Outside ``train()`` the model is taken over for the block.
        """
        with ExitStack() as ending:
            if self.training is None and self._evaluates(trainer):
                self._take_over(trainer.model, ending)
            if self.training is not None:
                ending.enter_context(self.training.evaluation())
            yield

    def _evaluates(self, trainer: Any) -> bool:
        """Whether an evaluation outside ``train()`` is the plan's: not if all weights are to be converted for it."""
        arguments = trainer.args
        return self.plan is not None and not (arguments.bf16_full_eval or arguments.fp16_full_eval)
