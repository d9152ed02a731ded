"""What Accelerate prepares, where a plan trains: the model's forward, the optimizer, clipping, and their state."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path
from typing import Any, Final

from torch import nn

from ...shared.basics.errors import ScheduleError
from ...shared.schema.plan import ParallelMode
from ..training.carry_out import gradient_norm
from ..training.training import Training

FOLDER: Final = "protwin"
"""Of a checkpoint of the training's own, within one of Accelerate's or of the Trainer's."""
_MARK: Final = {FOLDER: 1}
"""What stands for the state of an optimizer that lies in ``FOLDER``."""


def prepare_forward(accelerator: Any, model: nn.Module, ending: ExitStack) -> None:
    """What Accelerate does to a model, but for moving it and for DDP: its forward computes in the type asked for.

    A forward that was prepared before stays so.
    """
    if "_original_forward" in vars(model):
        accelerator._models.append(model)
    else:
        model.__dict__.pop("_is_accelerate_prepared", None)
        accelerator.prepare_model(model, device_placement=False, evaluation_mode=True)
    # Other trainings of the model, without a plan, are to wrap it as usual.
    model.__dict__["_is_accelerate_prepared"] = True
    ending.callback(model.__dict__.pop, "_is_accelerate_prepared", None)


def planned_optimizer(training: Training) -> Any:
    """The optimizer of ``training`` as Accelerate wraps optimizers; its state stays where it is.

    ``state_elsewhere`` says whether a mark stands for its state, which is in a checkpoint of the training's own.
    """
    wrapped = _kind()(training.optimizer, device_placement=False, scaler=None)
    wrapped.state_elsewhere = False
    wrapped._is_accelerate_prepared = True
    return wrapped


@cache
def _kind() -> type:
    from accelerate.optimizer import AcceleratedOptimizer

    class PlannedOptimizer(AcceleratedOptimizer):  # type: ignore[misc]
        state_elsewhere: bool

        def state_dict(self) -> dict[str, Any]:
            found: dict[str, Any] = dict(_MARK) if self.state_elsewhere else super().state_dict()
            return found

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            if FOLDER not in state_dict:
                super().load_state_dict(state_dict)

    return PlannedOptimizer


def saves_apart(training: Training) -> bool:
    """Whether ranks have parts of the optimizer's state, which no single file of the Trainer's could hold."""
    return training.plan.parallel is ParallelMode.SHARDED


def save_apart(training: Training, folder: str | Path) -> None:
    """Save all of ``training`` in a folder within ``folder``; on all ranks.  Raises as ``Training.save`` does."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    training.save(Path(folder) / FOLDER)


@contextmanager
def state_elsewhere(optimizer: Any) -> Iterator[None]:
    """Within the block a mark stands for the state of ``optimizer``, a ``planned_optimizer``."""
    optimizer.state_elsewhere = True
    try:
        yield
    finally:
        optimizer.state_elsewhere = False


def resume_apart(training: Training, folder: str | Path) -> None:
    """Go on from what ``save_apart`` has saved within ``folder``.  Raises FileError as ``Training.resume`` does."""
    training.resume(Path(folder) / FOLDER)


def clipping(clip: Callable[..., Any], training: Training) -> Callable[..., Any]:
    """``clip_grad_norm_`` of Accelerate on a model that a plan is carried out on."""
    limit = training.plan.max_gradient_norm

    def clip_grad_norm_(parameters: Any, max_norm: float, norm_type: float = 2) -> Any:
        """As Accelerate's; None where the plan takes no norm, and none is to be limited."""
        if limit is None:
            if math.isinf(max_norm):
                return None
            raise ScheduleError(
                f"clip_grad_norm_ is to limit the norm to {max_norm:g}, but the plan limits none. Pass "
                f"max_gradient_norm={max_norm:g}, so that the plan does, or leave it out. Nothing was changed; step() "
                f"is still possible."
            )
        if saves_apart(training) and norm_type == 2 and max_norm in (limit, math.inf):
            # Ranks have parts of gradients: the norm of all of them is known, that of each is not.
            return gradient_norm(training)
        return clip(parameters, max_norm, norm_type=norm_type)

    return clip_grad_norm_


@contextmanager
def training_mode(model: nn.Module) -> Iterator[None]:
    """A plan is for training mode; afterwards every module is in the mode that it was in."""
    flags = [(module, module.training) for module in model.modules()]
    model.train()
    try:
        yield
    finally:
        for module, flag in flags:
            module.training = flag
