"""Dynamic loss scaling, for gradients in float16: scale the loss, unscale the gradients, clip, step.

[Note: Scaled losses]
float16 has no place for gradients below 6e-8, so the loss is multiplied by a scale before backward, and gradients are
divided by it, in float32, before they are clipped and stepped.  If one has overflowed, the step of the whole model is
given up and the scale lowered; after a while without overflow it is raised.  That must be decided before the first
chunk is stepped, so it is the task that takes the norm of all gradients that decides, and a plan without one does not
do.  Rule and defaults are those of ``torch.amp.GradScaler`` (Micikevicius et al., Mixed Precision Training, ICLR 2018).

In bypass distillation every student block has a loss, a scale and a norm of its own: a block whose gradients have
overflowed is held, its scale lowered, and the others step.  A block may be held for other reasons than its scale, and
that must not stop the others: its scale then stays at the least one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch

from ...shared.basics.errors import PlanError, ScheduleError
from ...shared.schema.plan import Plan, TrainingMethod
from ...shared.schema.schedule import Section
from ...shared.schema.workload import BlockId, Workload
from .non_finite import refuse_non_finite, refuse_overflow

_SMALLEST_SCALE: Final = 2.0**-14
"""Gradients that overflow at such a scale do so for another reason than the scale."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LossScaling:
    """How the scale of the loss follows overflows."""

    initial_scale: float = 2.0**16
    """The scale of the first loss."""
    growth_factor: float = 2.0
    """What the scale is multiplied by after ``growth_interval`` steps in a row without overflow."""
    backoff_factor: float = 0.5
    """What it is multiplied by after an overflow."""
    growth_interval: int = 2000
    """Steps without overflow before the scale grows."""

    def __post_init__(self) -> None:
        for name, value, is_good, bound in (
            ("initial_scale", self.initial_scale, 0 < self.initial_scale < math.inf, "positive and finite"),
            ("growth_factor", self.growth_factor, 1 < self.growth_factor < math.inf, "finite and more than 1"),
            ("backoff_factor", self.backoff_factor, 0 < self.backoff_factor < 1, "between 0 and 1"),
            ("growth_interval", self.growth_interval, self.growth_interval >= 1, "at least 1"),
        ):
            if not is_good:
                raise PlanError(f"{name} of the loss scaling is {value}; it must be {bound}.")


class LossScaler:
    """The scale of the running iteration (Note: Scaled losses)."""

    def __init__(self, scaling: LossScaling, *, micro_batches: int, holds: bool = False) -> None:
        """``holds``: it is of one block, whose loss is always scaled, and which is held where gradients overflow."""
        self.scaling = scaling
        self._holds = holds
        self.scale = _rounded(scaling.initial_scale)
        """What losses are multiplied by; a float32."""
        self.num_good_steps = 0
        """Steps without overflow since the scale last changed."""
        self.num_skipped_steps = 0
        """Steps that were given up so far."""
        self._micro_batches = micro_batches
        self._num_scaled = 0
        self._has_overflowed = False

    def of(self, section: Section | None) -> LossScaler:
        """The scale of these gradients: there is one for all."""
        del section
        return self

    # -- an iteration ------------------------------------------------------------------------------------------------

    def scale_loss(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss that is to run backward, in float32 at least."""
        self._num_scaled += 1
        # Filled where it is needed: a copy from here would wait for the device to end the forward.
        return loss * torch.full((), self.scale, dtype=torch.float32, device=loss.device)

    def factor_for(self, gradients: Sequence[torch.Tensor], max_norm: float, labels: Sequence[str]) -> torch.Tensor:
        """What scaled gradients are to be multiplied by: they are unscaled and clipped then.  NaN if one overflowed.

        A float32 scalar on the host.  The norm is taken of float32 gradients.  Raises ScheduleError unless every loss
        of the iteration was scaled, and NonFiniteGradientError if the scale cannot be the reason of an overflow;
        ``labels`` say whose the gradients are.
        """
        if not self._holds:
            self._check_scaled()
        norms = [torch.linalg.vector_norm(gradient, dtype=_wide(gradient)).float().cpu() for gradient in gradients]
        norm = torch.linalg.vector_norm(torch.stack(norms)) if norms else torch.zeros(())
        return self._factor(norm, max_norm, lambda: refuse_non_finite(gradients, labels))

    def factor_from(self, squares: torch.Tensor, max_norm: float) -> torch.Tensor:
        """The same from the sum of the squares of scaled gradients, of which ranks have parts; equal on all of them."""
        self._check_scaled()
        return self._factor(squares.sqrt().float(), max_norm, refuse_overflow)

    def _check_scaled(self) -> None:
        if self._num_scaled != self._micro_batches:
            raise ScheduleError(
                f"{self._num_scaled} losses were scaled in a step of {self._micro_batches} backwards. With "
                f"loss_scaling=, call training.scale(loss).backward() in the place of every loss.backward()."
            )

    def _factor(self, scaled_norm: torch.Tensor, max_norm: float, refuse: Callable[[], None]) -> torch.Tensor:
        """``refuse`` is called where the scale cannot be the reason of an overflow."""
        inverse = torch.tensor(self.scale, dtype=torch.float64).reciprocal().float()
        norm = scaled_norm * inverse
        self._has_overflowed = not bool(norm.isfinite())
        if self._has_overflowed:
            if self.scale <= _SMALLEST_SCALE and not self._holds:
                refuse()
            return torch.tensor(math.nan)
        # The same operations as those of torch.nn.utils.clip_grad_norm_; a scale is a power of two, as a rule, so that
        # multiplying by both factors at once gives the bits of multiplying by one after the other.
        return inverse * torch.clamp(max_norm / (norm + 1e-6), max=1.0)

    def end_step(self) -> None:
        """The iteration has ended: set the next one's scale."""
        self._num_scaled = 0
        if self._has_overflowed:
            self._has_overflowed = False
            self.num_skipped_steps += 1
            self.num_good_steps = 0
            if self.scale > _SMALLEST_SCALE or not self._holds:
                self.scale = _rounded(self.scale * self.scaling.backoff_factor)
            return
        self.num_good_steps += 1
        if self.num_good_steps == self.scaling.growth_interval:
            self.num_good_steps = 0
            grown = _rounded(self.scale * self.scaling.growth_factor)
            self.scale = grown if math.isfinite(grown) else self.scale

    def skip_step(self) -> None:
        """The iteration has been given up: its losses and overflows say nothing about the scale."""
        self._num_scaled = 0
        self._has_overflowed = False

    # -- saving ------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """What it needs to go on, between two iterations."""
        return {
            "scale": self.scale,
            "num_good_steps": self.num_good_steps,
            "num_skipped_steps": self.num_skipped_steps,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from there."""
        self.scale = float(state_dict["scale"])
        self.num_good_steps = int(state_dict["num_good_steps"])
        self.num_skipped_steps = int(state_dict["num_skipped_steps"])

    def check(self, state_dict: dict[str, Any]) -> None:
        """Raise KeyError, TypeError or ValueError unless it can go on from there; changes nothing."""
        LossScaler(self.scaling, micro_batches=1).load_state_dict(state_dict)


class BlockScalers:
    """A scale for the loss of every student block that learns anything, each by itself (Note: Scaled losses)."""

    def __init__(self, scaling: LossScaling, plan: Plan, workload: Workload) -> None:
        blocks = {p.block for p in workload.parameters if p.trainable and p.block is not None}
        self._names: dict[Section | None, str] = {BlockId(b): workload.blocks[b].name for b in sorted(blocks)}
        self._of: dict[Section | None, LossScaler] = {
            section: LossScaler(scaling, micro_batches=plan.micro_batches, holds=True) for section in self._names
        }

    def of(self, section: Section | None) -> LossScaler:
        """The scale of one block's loss."""
        return self._of[section]

    @property
    def scales(self) -> dict[str, float]:
        """What the losses of the running step are multiplied by, by the names of their blocks."""
        return {name: self._of[section].scale for section, name in self._names.items()}

    def end_step(self) -> None:
        """The iteration has ended: set the next one's scales."""
        for one in self._of.values():
            one.end_step()

    def skip_step(self) -> None:
        """The iteration has been given up."""
        for one in self._of.values():
            one.skip_step()

    def state_dict(self) -> dict[str, Any]:
        """What they need to go on, between two iterations, by the names of their blocks."""
        return {name: self._of[section].state_dict() for section, name in self._names.items()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from there."""
        for section, name in self._names.items():
            self._of[section].load_state_dict(state_dict[name])

    def check(self, state_dict: dict[str, Any]) -> None:
        """Raise KeyError, TypeError or ValueError unless they can go on from there; changes nothing."""
        for section, name in self._names.items():
            self._of[section].check(state_dict[name])


def _rounded(scale: float) -> float:
    """``scale`` as a float32."""
    return float(torch.tensor(scale, dtype=torch.float32))


def _wide(gradient: torch.Tensor) -> torch.dtype:
    return torch.promote_types(gradient.dtype, torch.float32)


def scaler_for(scaling: LossScaling | None, plan: Plan, workload: Workload) -> LossScaler | BlockScalers | None:
    """What scales the losses of a plan; None without ``scaling``.  Raises PlanError if it cannot be."""
    if scaling is None:
        return None
    if plan.max_gradient_norm is None:
        raise PlanError(
            "loss_scaling needs a plan with max_gradient_norm: an overflow anywhere must be known before the first "
            "chunk is stepped. Set it, to a large number if nothing is to be clipped."
        )
    if plan.method is TrainingMethod.BYPASS:
        return BlockScalers(scaling, plan, workload)
    return LossScaler(scaling, micro_batches=plan.micro_batches)
