"""The training of one Trainer: the plan that is found when it begins, and what carries the plan out while it runs."""

from __future__ import annotations

import math
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ...shared.basics.errors import PlanError, ScheduleError, WorkloadError
from ...shared.schema.optimizer import Optimizer
from ...shared.schema.plan import Plan
from ...shared.schema.workload import Workload
from ..devices.device import TrainingDevice
from ..model.batches import Batch, Loss
from ..planning.planned import Planned, planned
from ..planning.request import PlanRequest, Tell
from ..ranks.own_device import device_of_rank
from ..recording.counts import Counts
from ..training.carry_out import carry_out
from ..training.training import Training
from .computed_loss import call_and_loss, with_own_notes
from .largest_batch import largest_batch, random_states_kept, size_of
from .made_optimizer import made_optimizer, refuse_optim
from .refusals import limit_of, refuse_arguments, refuse_other_step


@dataclass(frozen=True, kw_only=True)
class TrainerWishes:
    """What a Trainer's plan is to be, beside what its arguments say."""

    request: Mapping[str, Any]
    """Fields of a ``PlanRequest``; the step's are the Trainer's."""
    batch: Batch | None = None
    loss: Loss | None = None
    device: TrainingDevice | str | None = None
    carrying_out: Mapping[str, Any]
    """Options of ``carry_out``."""
    tell: Tell


def tell_stderr(line: str) -> None:
    """Say it on standard error."""
    print(f"protwin: {line}", file=sys.stderr)  # noqa: T201


class TrainerRun:
    """What a Trainer knows of its plan: ``planned`` from the first step on, ``training`` while ``train()`` runs."""

    def __init__(self, wishes: TrainerWishes) -> None:
        self._wishes = wishes
        self.planned: Planned | None = None
        """The answer of the search, with the machine; None before the training begins, or where plan and workload were
        given."""
        self.plan: Plan | None = None
        """What is carried out; None before the training begins."""
        self.workload: Workload | None = None
        """What the plan is for."""
        self.device: TrainingDevice | None = None
        """What the plan is carried out on."""
        self.training: Training | None = None
        """What carries the plan out; None while no training runs, and the model is an ordinary one."""
        self._ending: ExitStack | None = None
        self._planned_for: tuple[Any, ...] = ()
        self._counts = Counts()
        self._peak_bytes = 0
        self._micro_batches = 0
        """Of the running step, done."""
        self._traced_size = 0
        self.weights: dict[str, Any] | None = None
        """All weights on the host, while they are being saved."""

    @property
    def is_ready(self) -> bool:
        """Whether a training is about to begin."""
        return self._ending is not None and self.training is None

    @property
    def counts(self) -> Counts:
        """What was moved and stepped so far, in all trainings of this Trainer."""
        return self._counts if self.training is None else self._counts + self.training.counts

    @property
    def peak_device_bytes(self) -> int:
        """Highest level of the device's memory so far (``Training.peak_device_bytes``)."""
        return max(self._peak_bytes, 0 if self.training is None else self.training.peak_device_bytes)

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
        kind = device if isinstance(device, str) else None if device is None else device.torch_device.type
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
        _prepare_forward(accelerator, model, self._ending)
        self._find(trainer, optimizer.name)
        training = self._take_over(model, self._ending, optimizer=optimizer.make, parameter_groups=optimizer.groups)
        self._micro_batches = 0
        accelerator.clip_grad_norm_ = _clipping(accelerator.clip_grad_norm_, training)
        self._ending.callback(accelerator.__dict__.pop, "clip_grad_norm_", None)
        return _accelerated(training)

    def _take_over(self, model: nn.Module, ending: ExitStack, **optimizing: Any) -> Training:
        assert self.workload is not None
        options = {**self._wishes.carrying_out, **optimizing}
        training = carry_out(model, self.plan, self.workload, device=self.device, **options)
        ending.callback(self._ended)
        ending.push(training.__exit__)
        self.training = training
        return training

    def _ended(self) -> None:
        assert self.training is not None
        self._counts += self.training.counts
        self._peak_bytes = self.peak_device_bytes
        self.training = None

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
            self.plan, self.workload, self.device = plan, workload, self._given_device(trainer.model, arguments)
        else:
            self._search(trainer, optimizer if plan is None else plan.optimizer)
        self._planned_for = key

    def _given_device(self, model: nn.Module, arguments: Any) -> TrainingDevice:
        device, budget_bytes = self._wishes.device, self._wishes.request.get("budget_bytes")
        if isinstance(device, TrainingDevice):
            return device
        return device_of_rank(device or arguments.device.type, arguments.local_process_index, budget_bytes=budget_bytes)

    def _search(self, trainer: Any, optimizer: Optimizer) -> None:
        arguments, wishes = trainer.args, self._wishes
        with random_states_kept(), _training_mode(trainer.model):
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
        self._micro_batches += 1
        if not trainer.accelerator.sync_gradients:
            return
        missing = self.training.plan.micro_batches - self._micro_batches
        self._micro_batches = 0
        for _ in range(missing):
            with random_states_kept(), _buffers_kept(trainer.model):
                twin = with_own_notes(trainer)
                with twin.compute_loss_context_manager():
                    loss = twin.compute_loss(trainer.model, twin._prepare_inputs(inputs), num_items_in_batch=num_items)
                (loss * 0.0).backward()

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


def _clipping(clip: Callable[..., Any], training: Training) -> Callable[..., Any]:
    """``clip_grad_norm_`` of Accelerate on a model that a plan is carried out on."""
    limit = training.plan.max_gradient_norm

    def clip_grad_norm_(parameters: Any, max_norm: float, norm_type: float = 2) -> Any:
        """As Accelerate's; None where the plan takes no norm, and none is to be limited."""
        if limit is None and math.isinf(max_norm):
            return None
        return clip(parameters, max_norm, norm_type=norm_type)

    return clip_grad_norm_


def _prepare_forward(accelerator: Any, model: nn.Module, ending: ExitStack) -> None:
    """What Accelerate does to a model, but for moving it and for DDP: its forward computes in the type asked for.

    A forward that was prepared before stays so.
    """
    if "_original_forward" in vars(model):
        accelerator._models.append(model)
    else:
        model.__dict__.pop("_is_accelerate_prepared", None)
        accelerator.prepare_model(model, device_placement=False, evaluation_mode=True)
    # Other trainings of the model, without a plan, are to wrap it as usual.
    model._is_accelerate_prepared = True  # type: ignore[assignment]
    ending.callback(model.__dict__.pop, "_is_accelerate_prepared", None)


def _accelerated(training: Training) -> Any:
    """The optimizer of ``training`` as Accelerate wraps optimizers, which leaves its state where it is."""
    from accelerate.optimizer import AcceleratedOptimizer

    wrapped = AcceleratedOptimizer(training.optimizer, device_placement=False, scaler=None)
    wrapped._is_accelerate_prepared = True
    return wrapped


@contextmanager
def _training_mode(model: nn.Module) -> Iterator[None]:
    """A plan is for training mode."""
    flags = [(module, module.training) for module in model.modules()]
    model.train()
    try:
        yield
    finally:
        for module, flag in flags:
            module.training = flag


@contextmanager
def _buffers_kept(model: nn.Module) -> Iterator[None]:
    values = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, value in values:
                buffer.copy_(value)
