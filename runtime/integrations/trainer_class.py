"""A Trainer of transformers, or a class that is made of it, that trains by a plan."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Final, TypeVar

import torch
from torch import nn

from ...shared.basics.errors import PlanError
from ..devices.device import TrainingDevice
from ..model.batches import Batch, Loss
from ..planning.request import Tell
from .loop_run import Wishes, tell_stderr, wishes_of
from .trainer_run import TrainerRun

_T = TypeVar("_T", bound=type)
_OF_ARGUMENTS: Final[Mapping[str, str]] = {
    "micro_batches": "gradient_accumulation_steps of the Trainer",
    "max_gradient_norm": "max_grad_norm of the Trainer",
    "optimizer": "optim of the Trainer",
    "autocast": "bf16 of the Trainer",
    "weights": "the model of the Trainer",
}
"""Fields of a request that are arguments of the Trainer."""


def planned_trainer(
    trainer_class: _T,
    *,
    batch: Batch | None = None,
    loss: Loss | None = None,
    device: TrainingDevice | torch.device | str | None = None,
    carry_out: Mapping[str, Any] | None = None,
    tell: Tell = tell_stderr,
    **request: Any,
) -> _T:
    """The class ``trainer_class``, transformers' ``Trainer`` or one made of it, whose ``train()`` carries a plan out.

    ``planned_trainer(Trainer, budget_bytes="20GiB")(model, args, train_dataset=...)`` trains as the Trainer itself
    does, within the budget: its losses, norms, metrics and weights are bit for bit those without a plan, in float32 on
    the CPU.  The plan is searched when ``train()`` begins, for the step of the TrainingArguments, and the model is an
    ordinary one again when it ends.  ``trainer.protwin`` tells of the plan, and of the training while it runs.

    Args:
        trainer_class: ``Trainer``, ``SFTTrainer`` of TRL, or a class of your own.
        batch: What the model is called with, where the plan is for another batch than the largest of the first that
            the data have.
        loss: The scalar loss of (output, batch), with ``batch`` alone; None: the output has its own.
        device: ``CpuDevice(...)``, ``CudaDevice(...)`` or their kinds; by default that of the TrainingArguments.
        carry_out: Further options of ``carry_out``, such as ``{"keep_last_step": True}``.
        tell: Hears what is being done; by default standard error does.
        request: What the plan is to be: ``budget_bytes``, ``host_budget_bytes``, ``hardware``, ``calibration``,
            ``plan``, ``workload``, ``knobs``, ``modes``, ``blocks`` (``PlanRequest``).

    Raises PlanError if something named is an argument of the Trainer; making the Trainer raises PlanError if its
    arguments contradict the plan, or ask for DeepSpeed, FSDP, compiling or checkpointing beside it; ``train()`` raises
    InfeasibleError if no plan fits, before anything is trained.
    """
    if loss is not None and batch is None:
        raise PlanError("loss= is that of batch=, which is missing. Pass both, or leave the loss to the Trainer.")
    wishes = wishes_of(_OF_ARGUMENTS, "a Trainer", batch, loss, device, carry_out, tell, request)
    names = {"_wishes": wishes, "__doc__": trainer_class.__doc__, "__module__": trainer_class.__module__}
    made: _T = type(trainer_class)(f"Planned{trainer_class.__name__}", (PlannedTraining, trainer_class), names)
    return made


class PlannedTraining:
    """What a Trainer does otherwise where it trains by a plan; to stand before the Trainer's class among the bases."""

    _wishes: ClassVar[Wishes]
    protwin: TrainerRun
    """The plan, and the training while ``train()`` runs."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.protwin = TrainerRun(self._wishes)
        base: Callable[..., None] = super().__init__
        given = inspect.signature(base).bind_partial(*args, **kwargs).arguments
        if given.get("args") is not None:
            self._check(given["args"], given)
        base(*args, **kwargs)
        self._check(self.args, given)  # type: ignore[attr-defined]

    def _check(self, arguments: Any, given: Mapping[str, Any]) -> None:
        optimizer = (given.get("optimizers") or (None, None))[0]
        self.protwin.check(
            arguments, has_optimizer=optimizer is not None or given.get("optimizer_cls_and_kwargs") is not None
        )

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """As the Trainer's; the plan is found first, and the model is an ordinary one again when it ends."""
        with self.protwin.ready(self):
            return super().train(*args, **kwargs)  # type: ignore[misc]

    def create_optimizer(self, *args: Any, **kwargs: Any) -> Any:
        """The optimizer of the plan, as the Trainer would have made it."""
        made = super().create_optimizer(*args, **kwargs)  # type: ignore[misc]
        if self.protwin.is_ready:
            made = self.optimizer = self.protwin.begin(self, made)
        return made

    def training_step(self, model: nn.Module, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """As the Trainer's; the plan hears of every micro-batch."""
        given = self.protwin.given_to(inputs)
        loss = super().training_step(model, inputs, *args, **kwargs)  # type: ignore[misc]
        num_items = args[0] if args else kwargs.get("num_items_in_batch")
        self.protwin.after_micro_batch(self, given, num_items)
        return loss

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """As the Trainer's; of an offloaded model, block by block comes to the device."""
        with self.protwin.evaluation(self):
            return super().evaluation_loop(*args, **kwargs)  # type: ignore[misc]

    def save_model(self, *args: Any, **kwargs: Any) -> Any:
        """As the Trainer's."""
        with self.protwin.weights_at_hand():
            return super().save_model(*args, **kwargs)  # type: ignore[misc]

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        if state_dict is None:
            state_dict = self.protwin.weights
        super()._save(output_dir, state_dict=state_dict)  # type: ignore[misc]

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        with self.protwin.saving(self, output_dir):
            super()._save_optimizer_and_scheduler(output_dir)  # type: ignore[misc]

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)  # type: ignore[misc]
        self.protwin.resume(checkpoint)

    def _load_best_model(self) -> None:
        self.protwin.end()
        super()._load_best_model()  # type: ignore[misc]

    def _move_model_to_device(self, model: nn.Module, device: Any) -> None:
        """Nothing: a plan brings to the device what it has room for."""
