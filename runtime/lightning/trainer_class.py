"""A Trainer of Lightning, or a class that is made of it, whose ``fit`` carries a plan out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Final, TypeVar

import torch

from ..devices.device import TrainingDevice
from ..integrations.loop_run import Wishes, tell_stderr, wishes_of
from ..planning.request import Tell
from .refusals import refuse_given, refuse_trainer
from .run import LightningRun, to_device

_T = TypeVar("_T", bound=type)
_OF_TRAINER: Final[Mapping[str, str]] = {
    "micro_batches": "accumulate_grad_batches of the Trainer",
    "max_gradient_norm": "gradient_clip_val of the Trainer",
    "optimizer": "what configure_optimizers() gives",
    "autocast": "precision of the Trainer",
    "weights": "the module that fit() is given",
}
"""Fields of a request that Lightning is told of."""


def planned_lightning(
    trainer_class: _T,
    *,
    batch: Any = None,
    device: TrainingDevice | torch.device | str | None = None,
    carry_out: Mapping[str, Any] | None = None,
    tell: Tell = tell_stderr,
    **request: Any,
) -> _T:
    """The class ``trainer_class``, Lightning's ``Trainer`` or one made of it, whose ``fit()`` carries a plan out.

    ``planned_lightning(Trainer, budget_bytes="20GiB")(max_epochs=1)`` fits as the Trainer itself does, within the
    budget: losses, metrics and weights are bit for bit those without a plan, in float32 on the CPU.  The plan is
    searched when ``fit()`` begins, for the step that Trainer and LightningModule ask for, and the module is an ordinary
    one again when it ends.  ``trainer.protwin`` tells of the plan, and of the training while it runs.

    Args:
        trainer_class: ``Trainer`` of ``lightning.pytorch`` or ``pytorch_lightning``, or a class of your own.
        batch: What ``training_step`` is given, where the plan is for another batch than the largest of the first that
            the data have.
        device: ``CpuDevice(...)``, ``CudaDevice(...)`` or their kinds; by default that of the Trainer.
        carry_out: Further options of ``carry_out``, such as ``{"keep_last_step": True}``.
        tell: Hears what is being done; by default standard error does.
        request: What the plan is to be: ``budget_bytes``, ``host_budget_bytes``, ``hardware``, ``calibration``,
            ``plan``, ``workload``, ``knobs``, ``modes``, ``blocks`` (``PlanRequest``).

    Raises PlanError if something named is an argument of the Trainer; making the Trainer raises PlanError if its
    arguments ask for DeepSpeed, FSDP, a precision or a clipping that no plan is carried out with; ``fit()`` raises
    PlanError for manual optimization, several optimizers or a given plan for another step, and InfeasibleError if no
    plan fits, before anything is trained.
    """
    wishes = wishes_of(_OF_TRAINER, "a Lightning Trainer", batch, None, device, carry_out, tell, request)
    names = {"_wishes": wishes, "__doc__": trainer_class.__doc__, "__module__": trainer_class.__module__}
    made: _T = type(trainer_class)(f"Planned{trainer_class.__name__}", (PlannedFit, trainer_class), names)
    return made


class PlannedFit:
    """What a Trainer does otherwise where it fits by a plan; to stand before the Trainer's class among the bases."""

    _wishes: ClassVar[Wishes]
    protwin: LightningRun
    """The plan, and the training while ``fit()`` runs."""
    strategy: Any
    _accelerator_connector: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        refuse_given(kwargs)
        base: Callable[..., None] = super().__init__
        base(*args, **kwargs)
        refuse_trainer(self)
        self.protwin = LightningRun(self._wishes)
        self._accelerator_connector.strategy = _planned(self.strategy, self.protwin)
        for name in ("validate_loop", "test_loop", "predict_loop"):
            # Chunks come and go within them; tensors that are made in inference mode could not be trained afterwards.
            getattr(self, name).inference_mode = False

    def save_checkpoint(self, filepath: Any, weights_only: bool | None = None, **kwargs: Any) -> None:
        """As the Trainer's; behind ``fit()``, where the plan's optimizer has ended, the weights alone, as is told."""
        if self.protwin.has_ended and not weights_only:
            self._wishes.tell(
                f"{filepath} holds the weights alone: the optimizer's state has ended with fit(). To resume a training "
                f"from a checkpoint, let ModelCheckpoint save it (save_last=True)."
            )
            weights_only = True
        super().save_checkpoint(filepath, weights_only, **kwargs)  # type: ignore[misc]


def _planned(strategy: Any, run: LightningRun) -> Any:
    """A strategy with everything that ``strategy`` has, which chooses devices and processes, and carries a plan out."""
    kind = type(strategy)
    metaclass: Any = type(kind)
    made = metaclass(f"Planned{kind.__name__}", (PlannedStrategy, kind), {"__module__": kind.__module__})
    found: Any = made.__new__(made)
    found.__dict__ = vars(strategy)
    found.protwin = run
    return found


class PlannedStrategy:
    """What a strategy does otherwise where a plan is carried out; a base that stands before its class."""

    protwin: LightningRun
    accelerator: Any
    lightning_module: Any
    model: Any
    precision_plugin: Any
    root_device: Any

    def setup(self, trainer: Any) -> None:
        """As the strategy's; in the place of moving the module, the plan is found and begins."""
        is_fit = trainer.state.fn.value == "fit"
        if not is_fit and not self.protwin.plans_for(self.lightning_module):
            super().setup(trainer)  # type: ignore[misc]
            return
        self.accelerator.setup(trainer)
        self.model = self.precision_plugin.convert_module(self.model)
        to_device(self.lightning_module, self.root_device)
        if not is_fit:
            self.protwin.begin_evaluation(self, trainer)
            return
        self.setup_optimizers(trainer)  # type: ignore[attr-defined]
        self.setup_precision_plugin()  # type: ignore[attr-defined]
        self.protwin.begin(self, trainer)

    def teardown(self) -> None:
        """As the strategy's, of a module that is an ordinary one again."""
        self.protwin.end()
        super().teardown()  # type: ignore[misc]

    # -- steps -------------------------------------------------------------------------------------------------------

    def training_step(self, *args: Any) -> Any:
        """As the strategy's, under the plan."""
        return self.protwin.training_step(self.lightning_module.trainer, args)

    def backward(self, closure_loss: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        """As the strategy's; the plan hears of every micro-batch."""
        found = super().backward(closure_loss, optimizer, *args, **kwargs)  # type: ignore[misc]
        self.protwin.after_backward(is_last=not self.lightning_module.trainer.fit_loop._should_accumulate())
        return found

    def optimizer_step(self, optimizer: Any, closure: Any, model: Any = None, **kwargs: Any) -> Any:
        """As the strategy's, but for the order: the plan's step follows what Lightning runs within a step."""
        found = self.precision_plugin._wrap_closure(model or self.lightning_module, optimizer, closure)
        optimizer.step(**kwargs)
        return found

    def validation_step(self, *args: Any) -> Any:
        """As the strategy's; of an offloaded model, block by block comes to the device."""
        return self._evaluated("validation_step", args)

    def test_step(self, *args: Any) -> Any:
        """As ``validation_step``."""
        return self._evaluated("test_step", args)

    def predict_step(self, *args: Any) -> Any:
        """As ``validation_step``."""
        return self._evaluated("predict_step", args)

    def _evaluated(self, step: str, args: tuple[Any, ...]) -> Any:
        if self.protwin.training is None:
            return getattr(super(), step)(*args)
        return self.protwin.evaluate(step, args)

    def on_validation_end(self) -> None:
        """As the strategy's."""
        self.protwin.leave_evaluation()
        super().on_validation_end()  # type: ignore[misc]

    # -- checkpoints -------------------------------------------------------------------------------------------------

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """As the strategy's: copies on the host; of several processes, the first one's."""
        if self.protwin.training is None:
            found: dict[str, Any] = super().lightning_module_state_dict()  # type: ignore[misc]
            return found
        return self.protwin.state_dict()

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """As the strategy's."""
        return self.protwin.optimizer_state()

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """As the strategy's."""
        self.protwin.load_optimizer_state(checkpoint["optimizer_states"][0])
