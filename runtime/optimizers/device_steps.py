"""Device Adam: how the parameters of persistent chunks are stepped where they are.

[Note: Widened gradients]
A parameter narrower than float32 is stepped through a float32 master, and its gradient is widened for that.  Of a large
embedding that would be more memory than anything else at the end of an iteration, so it is done piece by piece, each
with an optimizer of its own.  That gives the same bits if the optimizer treats every scalar by itself; one that does
not (Adafactor, Muon) gets the parameter whole.  Small parameters of one chunk are stepped in one call, as many as have
the scalars of one piece together ([Note: Steps of device Adam] in ``shared/layout/adam_memory.py``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch
from torch import nn

from ...shared.layout.adam_memory import WIDENED_SCALARS, neighbours
from ..model.strides import copy_strided, in_memory_order
from .chunk_optimizer import ChunkOptimizer, MakeOptimizer
from .step_options import StepOptions

PIECE_SCALARS: Final = WIDENED_SCALARS
"""Scalars whose gradients are widened at once."""
ELEMENTWISE: Final = (
    torch.optim.Adadelta,
    torch.optim.Adagrad,
    torch.optim.Adam,
    torch.optim.Adamax,
    torch.optim.AdamW,
    torch.optim.ASGD,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.RMSprop,
    torch.optim.Rprop,
    torch.optim.SGD,
)
"""Those that treat every scalar by itself, so that pieces of a parameter can be stepped one by one."""


class DeviceStep:
    """Steps some parameters, or one stretch of the scalars of one parameter, with the gradients that they hold."""

    def __init__(
        self,
        optimizer: ChunkOptimizer,
        parameters: Sequence[nn.Parameter],
        *,
        stretch: slice | None = None,
        is_last: bool = True,
    ) -> None:
        self.optimizer = optimizer
        self.parameters = tuple(parameters)
        self.stretch = stretch
        """The scalars of the one parameter that it steps, as they lie in memory; None for whole parameters."""
        self._is_last = is_last
        """Whether the gradients are not needed afterwards."""

    def run(self, *, factor: torch.Tensor | None = None) -> None:
        """Step with the gradients, times ``factor``, and drop those that nothing needs any more."""
        self.optimizer.step([self._gradient(parameter) for parameter in self.parameters], factor=factor)
        if self._is_last:
            for parameter in self.parameters:
                parameter.grad = None

    def _gradient(self, parameter: nn.Parameter) -> torch.Tensor | None:
        gradient = parameter.grad
        if gradient is None or self.stretch is None:
            return gradient
        if gradient.stride() != parameter.stride():
            # Autograd gives it the parameter's strides; a hook may have exchanged it.
            gradient = copy_strided(gradient, parameter)
        return in_memory_order(gradient)[self.stretch]


def whole_step(wide: Sequence[nn.Parameter], options: StepOptions, make_optimizer: MakeOptimizer) -> DeviceStep:
    """The step of parameters that are stepped themselves, where they are."""
    return DeviceStep(ChunkOptimizer(wide, wide, options, make_optimizer), wide)


def narrow_steps(
    parameters: Sequence[nn.Parameter],
    masters: Sequence[torch.Tensor],
    options: StepOptions,
    make_optimizer: MakeOptimizer,
    *,
    is_elementwise: bool,
) -> list[DeviceStep]:
    """The steps of parameters of one chunk that are narrower than their float32 ``masters`` (Note: Widened gradients).

    ``is_elementwise``: several may be stepped in one call.
    """
    steps = []
    most = PIECE_SCALARS if is_elementwise else 0
    for start, end in neighbours([parameter.numel() for parameter in parameters], most):
        chosen, own = parameters[start:end], masters[start:end]
        targets = [parameter.detach() for parameter in chosen]
        together = ChunkOptimizer(own, chosen, options, make_optimizer, targets=targets)
        if chosen[0].numel() > PIECE_SCALARS and isinstance(together.optimizer, ELEMENTWISE):
            steps += _steps_in_pieces(chosen[0], own[0], options, make_optimizer)
        else:
            steps.append(DeviceStep(together, chosen))
    return steps


def _steps_in_pieces(
    parameter: nn.Parameter, master: torch.Tensor, options: StepOptions, make_optimizer: MakeOptimizer
) -> list[DeviceStep]:
    steps = []
    flat_master, flat_target = in_memory_order(master), in_memory_order(parameter.detach())
    for start in range(0, parameter.numel(), PIECE_SCALARS):
        stretch = slice(start, start + PIECE_SCALARS)
        weights, targets = [flat_master[stretch]], [flat_target[stretch]]
        stepper = ChunkOptimizer(weights, [parameter], options, make_optimizer, targets=targets)
        is_last = start + PIECE_SCALARS >= parameter.numel()
        steps.append(DeviceStep(stepper, [parameter], stretch=stretch, is_last=is_last))
    return steps
