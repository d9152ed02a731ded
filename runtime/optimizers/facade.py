"""The optimizer that a training loop and torch's schedulers see: the model's own parameters in the user's groups."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import torch
from torch import nn

from ...shared.basics.errors import PlanError, ScheduleError
from .step_options import StepOptions, check_options

ParameterStates = Mapping[nn.Parameter, Mapping[str, Any]]
"""What the optimizer keeps for each parameter that it has stepped."""

KEPT_ZEROS: Final = (
    "zero_grad(set_to_none=False) would keep gradients of zeros, which the optimizer steps; here a step leaves none at "
    "all. Call zero_grad()."
)


class TrainingOptimizer(torch.optim.Optimizer):
    """Stands for the optimizers of all chunks.

    ``param_groups`` are the user's, with every option filled in, and may be changed between one step and the next
    forward, as the schedulers of ``torch.optim.lr_scheduler`` do; the next step is done with them.  ``step`` is
    ``Training.step``.  Optimizer state is with the chunks, so ``state`` is empty; ``state_dict`` collects it.
    """

    def __init__(
        self,
        options: StepOptions,
        *,
        step: Callable[[], None],
        has_gradients: Callable[[], bool],
        is_ahead: bool,
        read_state: Callable[[], ParameterStates],
        write_state: Callable[[list[dict[str, Any]], ParameterStates], None],
    ) -> None:
        """Take the groups of ``options``, whose parameters have their optimizers by now.

        ``step`` ends an iteration, ``has_gradients`` says whether this one has gradients already, ``is_ahead`` whether
        chunks are stepped before it ends.  ``read_state`` gives copies of the optimizers' state on the host,
        ``write_state`` replaces the options of the groups and the state.  Raises PlanError if an option makes no sense.
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
        self._read_state = read_state
        self._write_state = write_state
        self._is_complete = True

    @property
    def options(self) -> StepOptions:
        """What the steps of the present plan are done with."""
        return self._options

    def go_on_with(self, options: StepOptions, *, is_ahead: bool) -> None:
        """Between two steps: from now on these optimizers stand behind it; groups and state_dict stay what they are."""
        self._options, self._is_ahead = options, is_ahead

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
            raise ScheduleError(KEPT_ZEROS)
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

    # -- state -------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """What the plain loop's optimizer would give, in copies on the host, whatever lies where.

        A parameter narrower than float32 has its float32 master beside the state, as ``master_param``.  To be called
        between step() and the next forward; changes nothing that follows.  Raises ScheduleError elsewhere.
        """
        for parameter, state in self._read_state().items():
            self.state[parameter] = dict(state)
        try:
            return super().state_dict()
        finally:
            self.state.clear()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from what ``state_dict`` gave, here or of the plain loop's optimizer.

        Options that say how an optimizer computes (fused, foreach, capturable, differentiable) stay what they are.
        Narrow parameters without ``master_param`` get the master that they are rounded from: themselves.  To be
        called between step() and the next forward.  Raises PlanError, with nothing changed, if groups, parameters or
        shapes are not those of this optimizer.
        """
        state_dict = dict(state_dict)
        for hook in self._optimizer_load_state_dict_pre_hooks.values():
            state_dict = hook(self, state_dict) or state_dict
        groups = self._matched_groups(state_dict)
        names = [index for group in groups for index in group["params"]]
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        parameter_of = dict(zip(names, parameters, strict=True))
        unknown = state_dict["state"].keys() - parameter_of.keys()
        if unknown:
            raise PlanError(
                f"the optimizer's state_dict has state of parameter {min(unknown, key=str)}, which is in none of its "
                f"groups. Load what state_dict() of one optimizer gave."
            )
        self._write_state(groups, {parameter_of[index]: state for index, state in state_dict["state"].items()})
        for hook_after in self._optimizer_load_state_dict_post_hooks.values():
            hook_after(self)

    def _matched_groups(self, state_dict: Mapping[str, Any]) -> list[dict[str, Any]]:
        """The groups of ``state_dict``.  Raises PlanError unless they are as large as this optimizer's."""
        missing = [key for key in ("state", "param_groups") if key not in state_dict]
        if missing:
            raise PlanError(f"the optimizer's state_dict has no {missing[0]!r}. Load what state_dict() gave.")
        groups: list[dict[str, Any]] = state_dict["param_groups"]
        found, own = ([len(group["params"]) for group in of] for of in (groups, self.param_groups))
        if found != own:
            raise PlanError(
                f"the optimizer's state_dict has parameter groups of {found} parameters; this optimizer has {own}. "
                f"Pass the same parameter_groups to carry_out() as the saved optimizer had."
            )
        check_options(groups)
        return groups

    # -- what would not reach the chunks -----------------------------------------------------------------------------

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Raise PlanError: the groups are those that the plan is carried out with."""
        if self._is_complete:
            raise PlanError(
                "a parameter group cannot be added while a plan is being carried out. Close the training and carry "
                "the plan out again with parameter_groups=."
            )
        super().add_param_group(param_group)
