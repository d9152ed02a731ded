"""Gradients between the last backward and the step, as everybody but the training sees them.

[Note: Gradients that were handed over]
When the last backward of a step has ended, gradients of offloaded chunks have left the device, and some may have been
stepped.  Whoever reads ``parameter.grad`` then would see a part of all gradients, and whoever scales it would scale
that part.  So ``parameter.grad`` shows a stand-in until the step: a tensor of the right shape without values, which
torch asks before every operation (``__torch_function__``).  The same holds between two micro-batches: a loop that
scales what it finds there, and passes by parameters without a gradient, would scale some of them, or none.

A plan with ``max_gradient_norm`` takes the norm of all gradients before it steps any, and clips.  There the stand-ins
know their norms.  ``torch.nn.utils.clip_grad_norm_`` takes these (``vector_norm``), adds them up, divides its limit by
the sum and multiplies every gradient by the quotient.  Each of its results therefore carries along whose norm it is
(``GradientNorm``).  The division compares the two limits, and the multiplication by a quotient of the plan's own limit
has nothing to do: the step multiplies.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

import torch
from torch import nn

from ...shared.basics.errors import ScheduleError
from ..model.parameters import asks_for_facts

Norms = Mapping[int, torch.Tensor]
"""The norm of each gradient by the ``id`` of its parameter."""
_STEP_STILL: Final = "Nothing was changed; step() is still possible."


class GradientStandIns:
    """What ``parameter.grad`` shows of gradients that were handed over (Note: Gradients that were handed over)."""

    def __init__(self, parameters: Iterable[nn.Parameter], max_norm: float | None, *, has_parts: bool = False) -> None:
        """``parameters`` are those that may get a gradient; ``max_norm`` is the plan's limit of the norm.

        ``has_parts``: ranks have parts of gradients.
        """
        self.max_norm = max_norm
        self._has_parts = has_parts
        self._norms: Callable[[], Norms] | None = None
        self._made = {parameter: _stand_in(parameter, self) for parameter in parameters}
        self._shown: list[nn.Parameter] = []
        self._is_handed_over = False
        self._after = ""

    @property
    def num_shown(self) -> int:
        """Gradients of this step."""
        return len(self._shown)

    def show(
        self,
        gradients: Mapping[nn.Parameter, torch.Tensor | None],
        norms: Callable[[], Norms] | None,
        *,
        after: str = "",
    ) -> None:
        """Put a stand-in in the place of every gradient; None is one that has left its parameter already.

        ``norms`` waits for the norms of this step's gradients; None where the plan takes none.  ``after``: which
        micro-batch that is not the last one has added to them, in words.
        """
        self._norms = norms
        self._after = after
        self._is_handed_over = True
        self._shown = list(gradients)
        for parameter, gradient in gradients.items():
            stand_in = self._made[parameter]
            stand_in.held = gradient
            parameter.grad = stand_in

    def take_back(self) -> None:
        """Give parameters the gradients that they had.  Raises ScheduleError if a stand-in was replaced."""
        shown = set(self._shown)
        # Who had no gradient has none that somebody put there since, such as one of torch.autograd.grad.
        for parameter, stand_in in self._made.items() if self._is_handed_over else ():
            if parameter.grad is not (stand_in if parameter in shown else None):
                raise ScheduleError(CHANGED)
        for parameter in self._shown:
            parameter.grad = self._made[parameter].held
        self.forget()

    def forget(self) -> None:
        """Let go of the gradients, without giving them back.  Idempotent."""
        for parameter in self._shown:
            self._made[parameter].held = None
        self._shown = []
        self._is_handed_over = False
        self._norms = None

    def close(self) -> None:
        """Show nothing any more.  Stand-ins and this hold each other, and would hold the parameters."""
        self.forget()
        self._made.clear()

    def norm_of(self, stand_in: StandIn) -> GradientNorm:
        """The norm of one gradient, when that of all of them has been taken.  Raises ScheduleError without a limit."""
        if self._after:
            raise ScheduleError(
                f"a norm of gradients was to be taken {self._after}, but those of offloaded chunks have left the "
                f"device, and are added up elsewhere. Run the other micro-batches first, or search a plan with as many "
                f"as the loop has: the norm of their sum is limited (max_gradient_norm). Nothing was changed; the next "
                f"micro-batch is still possible."
            )
        if self._norms is None and self.max_norm is not None:
            raise ScheduleError(
                f"the plan limits the norm of each block's gradients by itself to {self.max_norm:g} "
                f"(max_gradient_norm), and blocks may have been stepped by now. Leave clip_grad_norm_ out. "
                f"{_STEP_STILL}"
            )
        if self._norms is None:
            raise ScheduleError(
                f"gradients were to be read or changed between backward() and step(), but those of offloaded chunks "
                f"have left the device, and CPU Adam may have stepped them. To limit their norm, set "
                f"max_gradient_norm of the plan (model_copy(update={{'max_gradient_norm': 1.0}}), a large number if "
                f"nothing is to be clipped): torch.nn.utils.clip_grad_norm_ with the same limit then returns the norm "
                f"that step() clips. {_STEP_STILL}"
            )
        norm = self._norms().get(stand_in.parameter)
        if norm is None and self._has_parts:
            raise ScheduleError(
                f"ranks have parts of gradients here, so that the norm of all of them is known, but of no single one. "
                f"Leave clip_grad_norm_ out: the plan clips to {self.max_norm:g} (max_gradient_norm). {_STEP_STILL}"
            )
        if norm is None:
            raise ScheduleError(
                f"losses are scaled here, so the norm of unscaled gradients is known within the step alone. Leave "
                f"clip_grad_norm_ out: the plan clips to {self.max_norm:g} (max_gradient_norm). {_STEP_STILL}"
            )
        return _norm(norm, self, num_gradients=1)

    def check_limit(self, limit: Any, norm: GradientNorm) -> None:
        """Raise ScheduleError unless clipping ``norm`` to ``limit`` is what the step does, or nothing at all."""
        if norm.num_gradients != self.num_shown:
            raise ScheduleError(
                f"the norm of {norm.num_gradients} of {self.num_shown} gradients was to be limited, but the plan "
                f"limits the norm of all of them (max_gradient_norm={self.max_norm:g}). Call clip_grad_norm_ with all "
                f"of model.parameters(). {_STEP_STILL}"
            )
        if float(limit) not in (self.max_norm, math.inf):
            raise ScheduleError(
                f"gradients were to be clipped to a norm of {float(limit):g} under a plan that clips them to "
                f"{self.max_norm:g}. Set max_gradient_norm of the plan to {float(limit):g} "
                f"(model_copy(update={{'max_gradient_norm': ...}})), or call clip_grad_norm_ with {self.max_norm:g}. "
                f"{_STEP_STILL}"
            )


CHANGED: Final = (
    "gradients were changed between backward() and step(), by clipping, unscaling or zero_grad() perhaps, but those of "
    "offloaded chunks have left by then, and would be stepped as they were. To limit their norm, set max_gradient_norm "
    "of the plan (model_copy(update={'max_gradient_norm': 1.0})); to drop them, call training.skip_step(). Or keep "
    "every chunk persistent (n_persist), and change what you like."
)


def held_gradient(gradient: torch.Tensor | None) -> torch.Tensor | None:
    """The gradient itself, where a stand-in may be shown in its place."""
    return gradient.held if isinstance(gradient, StandIn) else gradient


class StandIn(torch.Tensor):
    """The shape of a gradient; its values are not to be had."""

    of: GradientStandIns
    parameter: int
    """``id`` of the parameter."""
    held: torch.Tensor | None
    """The gradient, if it stays on the device until the step."""

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Facts and norms may be asked for; all else is refused."""
        kwargs = kwargs or {}
        if asks_for_facts(function):
            with torch._C.DisableTorchFunctionSubclass():
                return function(*args, **kwargs)
        if function is torch.Tensor.__repr__:
            return "<a gradient that was handed over to the step>"
        given = args[0] if isinstance(args[0], list | tuple) else [args[0]]
        found = [gradient for gradient in given if isinstance(gradient, StandIn)]
        if function in (torch.linalg.vector_norm, torch._foreach_norm) and len(found) == len(given):
            _check_order(function, *args[1:], **kwargs)
            norms = [gradient.of.norm_of(gradient) for gradient in found]
            return norms if function is torch._foreach_norm else norms[0]
        if function in _SCALING and found and _changes_nothing(args[1], found[0].of):
            return args[0]
        raise _refusal(function, args)


_SCALING: Final = frozenset({torch.Tensor.mul_, torch.Tensor.__imul__, torch._foreach_mul_})


class GradientNorm(torch.Tensor):
    """The norm of some gradients on its way through ``clip_grad_norm_``, or what gradients are multiplied by then."""

    of: GradientStandIns
    num_gradients: int
    is_factor: bool

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """The operation itself; its result is of this class where it is still such a norm, or such a factor."""
        kwargs = kwargs or {}
        if any(issubclass(kind, StandIn) for kind in types):
            return NotImplemented
        first = args[0] if args else None
        sources: list[Any] = list(first) if isinstance(first, list | tuple) else [first]
        if function is torch.linalg.vector_norm:
            _check_order(function, *args[1:], **kwargs)
        with torch._C.DisableTorchFunctionSubclass():
            result = function(*args, **kwargs)
        if not sources or not all(isinstance(source, GradientNorm) for source in sources):
            return result
        norms: list[GradientNorm] = sources
        source, num_gradients = norms[0], sum(one.num_gradients for one in norms)
        if function in _QUOTIENT and not source.is_factor:
            source.of.check_limit(args[1], source)
            return _norm(result, source.of, num_gradients=num_gradients, is_factor=True)
        if function in (_OF_FACTORS if source.is_factor else _OF_NORMS):
            return _norm(result, source.of, num_gradients=num_gradients, is_factor=source.is_factor)
        return result


_QUOTIENT: Final = frozenset({torch.Tensor.__rdiv__, torch.Tensor.__rtruediv__})
_OF_NORMS: Final = frozenset(
    {torch.Tensor.to, torch.stack, torch.linalg.vector_norm, torch.Tensor.add, torch.Tensor.__add__}
)
_OF_FACTORS: Final = frozenset({torch.Tensor.to, torch.clamp, torch.Tensor.clamp})


def _norm(value: torch.Tensor, of: GradientStandIns, *, num_gradients: int, is_factor: bool = False) -> GradientNorm:
    made = value.detach().as_subclass(GradientNorm)
    made.of, made.num_gradients, made.is_factor = of, num_gradients, is_factor
    return made


def _stand_in(parameter: nn.Parameter, of: GradientStandIns) -> StandIn:
    with torch._C.DisableTorchFunctionSubclass():
        # torch takes a gradient of the parameter's shape, dtype and device alone; memory it needs none.
        shape = torch.empty((), dtype=parameter.dtype, device=parameter.device).expand(parameter.shape)
        shape.untyped_storage().resize_(0)
        made = shape.as_subclass(StandIn)
    made.of, made.parameter, made.held = of, id(parameter), None
    return made


def _check_order(function: Any, order: Any = 2, *others: Any, **options: Any) -> None:
    """Raise ScheduleError unless it is the norm of order 2 of all of it, as the plan takes it."""
    order = options.pop("ord", order)
    if float(order) != 2 or any(other is not None and other is not False for other in (*others, *options.values())):
        raise ScheduleError(
            f"a norm of order {order} of gradients was to be taken ({function.__name__}) between backward() and "
            f"step(). The plan limits the norm of order 2 (max_gradient_norm); no other is known. {_STEP_STILL}"
        )


def _changes_nothing(factor: Any, of: GradientStandIns) -> bool:
    """Whether gradients may be multiplied by ``factor`` without a hand being moved: the step does, or it is 1."""
    if isinstance(factor, GradientNorm):
        return factor.is_factor and factor.of is of
    return isinstance(factor, float | int) and factor == 1


def _refusal(function: Any, args: tuple[Any, ...]) -> ScheduleError:
    name = getattr(function, "__name__", str(function))
    attribute = getattr(getattr(function, "__self__", None), "__name__", "")
    if name == "_amp_foreach_non_finite_check_and_unscale_":
        return ScheduleError(
            f"gradients were to be unscaled, as torch.amp.GradScaler does, but those of offloaded chunks have left the "
            f"device. Leave the GradScaler out: carry_out(..., loss_scaling=protwin.runtime.LossScaling()) with a plan "
            f"that has a max_gradient_norm scales, and training.scale(loss).backward() is the backward. In bfloat16 no "
            f"loss has to be scaled. {_STEP_STILL}"
        )
    return ScheduleError(
        f"gradients were to be read or changed ({attribute or name}) between backward() and step(), but the plan has "
        f"taken them over: those of offloaded chunks have left the device, and CPU Adam may have stepped them. Limit "
        f"their norm by max_gradient_norm of the plan, drop them by training.skip_step(), or keep every chunk "
        f"persistent (n_persist) without max_gradient_norm. {_STEP_STILL}"
    )
