"""The optimizer that a training loop and torch's schedulers see: the model's own parameters in the user's groups."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch

from ...shared.basics.errors import PlanError, ScheduleError
from .step_options import StepOptions, check_options


class TrainingOptimizer(torch.optim.Optimizer):
    """Stands for the optimizers of all chunks.

    ``param_groups`` are the user's, with every option filled in, and may be changed between one step and the next
    forward, as the schedulers of ``torch.optim.lr_scheduler`` do; the next step is done with them.  ``step`` is
    ``Training.step``.  Optimizer state is with the chunks, so ``state`` is empty.
    """

    def __init__(
        self,
        options: StepOptions,
        *,
        step: Callable[[], None],
        has_gradients: Callable[[], bool],
        is_ahead: bool,
    ) -> None:
        """Take the groups of ``options``, whose parameters have their optimizers by now.

        ``step`` ends an iteration, ``has_gradients`` says whether this one has gradients already, ``is_ahead`` whether
        chunks are stepped before it ends.  Raises PlanError if an option makes no sense.
        """
        self._is_complete = False
        groups = [
            {**options.filled(index), "params": list(group.parameters)} for index, group in enumerate(options.groups)
        ]
        check_options(groups)
        super().__init__(groups, dict(options.defaults))
        self._options = options
        self._end_iteration = step
        self._has_gradients = has_gradients
        self._is_ahead = is_ahead
        self._is_complete = True

    # -- the loop ----------------------------------------------------------------------------------------------------

    def begin_iteration(self) -> None:
        """The iteration that begins is stepped with the options as they are now.  Raises PlanError if they are bad."""
        self._options.plan_step(self.param_groups)

    def begin_step(self) -> None:
        """Raise ScheduleError if options were changed since the iteration began, and chunks stepped with the old."""
        if self._options.equals_latest(self.param_groups):
            return
        if self._is_ahead:
            raise ScheduleError(
                "options of the optimizer, such as the learning rate, were changed between forward and step(), when "
                "CPU Adam has begun with the old ones. Change them between step() and the next forward; for this step, "
                "set them back and call step() again."
            )
        self._options.plan_step(self.param_groups)

    def end_step(self) -> None:
        """The iteration has ended."""
        self._options.end_step()

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """End the iteration, as ``Training.step`` does.  Raises ScheduleError if a closure is given."""
        if closure is not None:
            raise ScheduleError(
                "step(closure) would run the model within the step, but the schedule expects forward and backward "
                "before it. Call model and backward() first, then step()."
            )
        self._end_iteration()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Nothing to do: a step leaves no gradients.  Raises ScheduleError where gradients would be lost."""
        if not set_to_none:
            raise ScheduleError(
                "zero_grad(set_to_none=False) would keep gradients of zeros, which the optimizer steps; here a step "
                "leaves none at all. Call zero_grad()."
            )
        if self._has_gradients():
            raise ScheduleError(
                "zero_grad() between backward and step() would lose gradients, and those of offloaded chunks have left "
                "already. Call it after step(), or not at all: a step leaves no gradients. To give the iteration up, "
                "call training.skip_step()."
            )

    def set_learning_rate(self, learning_rate: float) -> None:
        """Set the rate of every group."""
        for group in self.param_groups:
            is_tensor = isinstance(group["lr"], torch.Tensor)
            group["lr"] = torch.full_like(group["lr"], learning_rate) if is_tensor else learning_rate

    # -- what would not reach the chunks -----------------------------------------------------------------------------

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Raise PlanError: the groups are those that the plan is carried out with."""
        if self._is_complete:
            raise PlanError(
                "a parameter group cannot be added while a plan is being carried out. Close the training and carry "
                "the plan out again with parameter_groups=."
            )
        super().add_param_group(param_group)

    def state_dict(self) -> NoReturn:
        """Raise ScheduleError: the state is with the chunks."""
        raise ScheduleError(_NO_STATE)

    def load_state_dict(self, state_dict: Any) -> NoReturn:
        """Raise ScheduleError: the state is with the chunks."""
        raise ScheduleError(_NO_STATE)


_NO_STATE = (
    "the optimizer's state lies with the chunks, some of it on the host, and is neither read nor written through "
    "training.optimizer. Save and load the whole training instead; schedulers have a state_dict of their own."
)
