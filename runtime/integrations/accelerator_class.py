"""An Accelerator of Accelerate whose ``prepare`` finds a plan, and whose loop then carries it out.

[Note: Micro-batches that are missing]
At the end of a data loader ``accumulate`` ends a step, however few micro-batches it had.  A plan has as many in every
step.  So what the model was called with last is kept until its backward ends, and the missing micro-batches run on it
again, for nothing: their gradients are zeros, and random states and buffers are put back.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any, ClassVar, TypeVar

import torch
from torch import nn
from torch.utils.data import DataLoader

from ...shared.basics.errors import PlanError, ScheduleError
from ...shared.schema.optimizer import Optimizer
from ...shared.schema.plan import Plan
from ...shared.schema.workload import Workload
from ..devices.device import TrainingDevice
from ..model.batches import Batch, Loss
from ..model.nested_tensors import tensors_in
from ..model.snapshot import random_states_kept
from ..planning.planned import Planned, planned
from ..planning.request import PlanRequest, Tell
from ..recording.counts import Counts
from ..training.carry_out import carry_out, fill_step
from ..training.training import Training
from .accelerated import (
    clipping,
    planned_optimizer,
    prepare_forward,
    resume_apart,
    save_apart,
    state_elsewhere,
    training_mode,
)
from .largest_batch import generators_kept, largest_batch, size_of
from .loop_run import Wishes, tell_stderr, wishes_of
from .made_optimizer import made_optimizer, rebind
from .refusals import refuse_accelerator, refuse_launched

_T = TypeVar("_T", bound=type)


def planned_accelerator(
    accelerator_class: _T,
    *,
    batch: Batch | None = None,
    loss: Loss | None = None,
    device: TrainingDevice | torch.device | str | None = None,
    carry_out: Mapping[str, Any] | None = None,
    tell: Tell = tell_stderr,
    **request: Any,
) -> _T:
    """The class ``accelerator_class``, Accelerate's ``Accelerator`` or one made of it, whose loop carries a plan out.

    ``accelerator = planned_accelerator(Accelerator, budget_bytes="20GiB")(gradient_accumulation_steps=2)``, and the
    loop stays what it is: ``accelerator.prepare(model, optimizer, loader, scheduler)`` searches the plan and takes the
    model over, on all processes that ``accelerate launch`` or torchrun has started.  ``accelerator.end_training()``
    gives the model back; ``accelerator.protwin`` tells of the plan.

    Args:
        accelerator_class: ``Accelerator``, or a class of your own.
        batch: What the model is called with; None: the largest of the first batches of the loader that is prepared.
        loss: The scalar loss of (output, batch); None: the output has its own.
        device: ``CpuDevice(...)``, ``CudaDevice(...)`` or their kinds; by default the accelerator's.
        carry_out: Further options of ``carry_out``.
        tell: Hears what is being done; by default standard error does.
        request: What the plan is to be: ``budget_bytes``, ``max_gradient_norm``, ``hardware``, ``plan``, ``workload``,
            ``knobs`` and others of ``PlanRequest``.

    Raises PlanError if ``micro_batches`` or ``optimizer`` are named, which the accelerator and ``prepare`` are given.
    ``prepare`` raises PlanError if DeepSpeed, FSDP, compiling or fp16 were asked for, and InfeasibleError if no plan
    fits, before anything is taken over.
    """
    given = {"micro_batches": "gradient_accumulation_steps", "optimizer": "the optimizer that prepare() is given"}
    wishes = wishes_of(given, "an Accelerator", batch, loss, device, carry_out, tell, request)
    names = {"_wishes": wishes, "__doc__": accelerator_class.__doc__, "__module__": accelerator_class.__module__}
    made: _T = type(accelerator_class)(f"Planned{accelerator_class.__name__}", (PlannedLoop, accelerator_class), names)
    return made


class AcceleratorRun:
    """The plan of an accelerator's loop, and the training that carries it out from ``prepare`` to ``end_training``."""

    def __init__(self, wishes: Wishes) -> None:
        self.wishes = wishes
        self.planned: Planned | None = None
        """The answer of the search; None before ``prepare``, or where plan and workload were given."""
        self.plan: Plan | None = None
        self.workload: Workload | None = None
        self.training: Training | None = None
        """What carries the plan out; None before ``prepare`` and after ``end_training``."""
        self.optimizer: Any = None
        """What stands for the optimizer in the loop."""
        self._ending = ExitStack()
        self._counts = Counts()
        self._called: tuple[tuple[Any, ...], dict[str, Any]] | None = None

    @property
    def counts(self) -> Counts:
        """What was moved and stepped so far."""
        return self._counts if self.training is None else self.training.counts

    def begin(
        self, accelerator: Any, model: nn.Module, optimizer: torch.optim.Optimizer, loader: Any, scheduler: Any
    ) -> None:
        """Find the plan and take ``model`` over."""
        if self.training is not None:
            raise ScheduleError("prepare() was given a second model; a plan is for one. Call end_training() first.")
        made = made_optimizer(optimizer)
        with ExitStack() as undo:
            prepare_forward(accelerator, model, undo)
            device = self._find(accelerator, model, made.name, loader)
            assert self.workload is not None
            training = carry_out(
                model,
                self.plan,
                self.workload,
                optimizer=made.make,
                parameter_groups=made.groups,
                device=device,
                **self.wishes.carrying_out,
            )
            undo.callback(self._ended)
            undo.push(training.__exit__)
            self.training, self.optimizer = training, planned_optimizer(training)
            self._counts = Counts()
            for bound, former in [] if scheduler is None else rebind(scheduler, training.optimizer):
                undo.callback(setattr, bound, "optimizer", former)
            hearing = model.register_forward_pre_hook(self._hear, with_kwargs=True)
            undo.callback(hearing.remove)
            self._ending = undo.pop_all()

    def _find(self, accelerator: Any, model: nn.Module, optimizer: Optimizer, loader: Any) -> TrainingDevice:
        steps = accelerator.gradient_accumulation_steps
        wishes = self.wishes
        plan, workload = wishes.request.get("plan"), wishes.request.get("workload")
        if plan is not None and plan.micro_batches != steps:
            raise PlanError(
                f"gradient_accumulation_steps of the accelerator is {steps}, but the plan has {plan.micro_batches} "
                f"micro-batches. Set gradient_accumulation_steps={plan.micro_batches}, or search a plan with {steps}."
            )
        if plan is not None and workload is not None:
            self.plan, self.workload = plan, workload
            return wishes.given_device(accelerator.device.type, accelerator.local_process_index)
        with random_states_kept(), training_mode(model):
            asked = {"micro_batches": steps, "optimizer": optimizer if plan is None else plan.optimizer}
            asked |= {"loss": wishes.loss, "name": type(model).__name__}
            self.planned = planned(
                model,
                self._batch(loader),
                PlanRequest(**{**asked, **wishes.request}),
                device=wishes.device or accelerator.device.type,
                tell=wishes.tell,
            )
        self.plan, self.workload = self.planned.plan, self.planned.workload
        return self.planned.device

    def _batch(self, loader: Any) -> Batch:
        if self.wishes.batch is not None:
            return self.wishes.batch
        if loader is None:
            raise PlanError(
                "a plan is for batches of a size, and prepare() was given no DataLoader. Prepare it together with the "
                "model and its optimizer, or pass batch= what the model is called with."
            )
        with generators_kept(loader):
            batch, number, is_all = largest_batch(loader)
        if not is_all:
            self.wishes.tell(
                f"the plan is for the largest of the first {number} batches ({size_of(batch):,} scalars). Pass batch= "
                f"if training meets larger ones."
            )
        found: Batch = batch
        return found

    def _hear(self, model: nn.Module, args: Any, kwargs: Any) -> None:
        if torch.is_grad_enabled():
            self._called = args, kwargs

    def after_backward(self, accelerator: Any) -> None:
        """A micro-batch is through.  See [Note: Micro-batches that are missing]."""
        training, called = self.training, self._called
        self._called = None
        if training is None or called is None:
            return
        if accelerator.sync_gradients:
            fill_step(training, lambda: _loss_in(training.model(*called[0], **called[1])))
            self._called = None

    def _ended(self) -> None:
        assert self.training is not None
        self._counts = self.training.counts
        self.training = None

    def end(self) -> None:
        """The model is an ordinary one from now on.  Idempotent."""
        self._ending.close()


def _loss_in(output: Any) -> torch.Tensor:
    """A loss from what a model gives: its own, or else one of all that has gradients."""
    loss = getattr(output, "loss", None)
    found = [loss] if loss is not None else [tensor for tensor in tensors_in(output) if tensor.requires_grad]
    return torch.stack([tensor.float().sum() for tensor in found]).sum()


class PlannedLoop:
    """What an Accelerator does otherwise where its loop carries a plan out; a base that stands before its class."""

    _wishes: ClassVar[Wishes]
    protwin: AcceleratorRun
    """The plan, and the training from ``prepare`` to ``end_training``."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        refuse_launched()
        super().__init__(*args, **kwargs)
        self.protwin = AcceleratorRun(self._wishes)
        refuse_accelerator(self)
        self.register_save_state_pre_hook(self._save_weights)  # type: ignore[attr-defined]
        self.register_load_state_pre_hook(self._load_weights)  # type: ignore[attr-defined]

    def prepare(self, *args: Any, **kwargs: Any) -> Any:
        """As Accelerate's; a model and its optimizer, which come together, are those of the plan."""
        models = [one for one in args if isinstance(one, nn.Module)]
        optimizers = [one for one in args if isinstance(one, torch.optim.Optimizer)]
        if not any(parameter.requires_grad for model in models for parameter in model.parameters()):
            return super().prepare(*args, **kwargs)  # type: ignore[misc]
        if len(models) != 1 or len(optimizers) != 1:
            raise PlanError(
                f"prepare() was given {len(models)} models and {len(optimizers)} optimizers. A plan is for one model "
                f"and its optimizer, which are prepared together, with the DataLoader and the scheduler."
            )
        loaders = {index: one for index, one in enumerate(args) if isinstance(one, DataLoader)}
        prepared = {index: super(PlannedLoop, self).prepare(one) for index, one in loaders.items()}  # type: ignore[misc]
        schedulers = [one for one in args if hasattr(one, "last_epoch") or hasattr(one, "get_last_lr")]
        first = next(iter(prepared.values()), None)
        self.protwin.begin(self, models[0], optimizers[0], first, schedulers[0] if schedulers else None)
        given = [
            self.protwin.optimizer if one is optimizers[0] else prepared.get(index, one)
            for index, one in enumerate(args)
        ]
        # What is prepared already goes through as it is.
        rest = [index for index in range(len(args)) if index not in prepared]
        found = super().prepare(*[given[index] for index in rest], **kwargs)  # type: ignore[misc]
        for index, one in zip(rest, found if len(rest) > 1 else [found], strict=True):
            given[index] = one
        return tuple(given)

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        """As Accelerate's; the plan hears of every micro-batch."""
        super().backward(loss, **kwargs)  # type: ignore[misc]
        self.protwin.after_backward(self)

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2) -> Any:
        """As Accelerate's; the plan's limit is the one that is known."""
        clip = super().clip_grad_norm_  # type: ignore[misc]
        training = self.protwin.training
        return (clip if training is None else clipping(clip, training))(parameters, max_norm, norm_type=norm_type)

    def get_state_dict(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        """As Accelerate's: all weights on the host, of rank 0; the others, who have to call it too, an empty dict."""
        training = self.protwin.training
        if training is None or model is not training.model:
            return super().get_state_dict(model, *args, **kwargs)  # type: ignore[misc]
        return {} if self.protwin.optimizer.state_elsewhere else training.state_dict()

    def save_state(self, output_dir: str | None = None, *args: Any, **kwargs: Any) -> Any:
        """As Accelerate's; weights and the optimizer's state are in a checkpoint of the training within the folder."""
        if self.protwin.training is None:
            return super().save_state(output_dir, *args, **kwargs)  # type: ignore[misc]
        with state_elsewhere(self.protwin.optimizer):
            return super().save_state(output_dir, *args, **kwargs)  # type: ignore[misc]

    def _save_weights(self, models: list[Any], weights: list[Any], output_dir: str) -> None:
        training = self.protwin.training
        if training is None:
            return
        place = next(index for index, model in enumerate(models) if model is training.model)
        del weights[place]
        save_apart(training, output_dir)

    def _load_weights(self, models: list[Any], input_dir: str) -> None:
        training = self.protwin.training
        if training is None:
            return
        place = next(index for index, model in enumerate(models) if model is training.model)
        del models[place]
        resume_apart(training, input_dir)

    def end_training(self) -> None:
        """As Accelerate's; the model is an ordinary one afterwards."""
        self.protwin.end()
        super().end_training()  # type: ignore[misc]
