"""Hidden states behind the last block that are not there: what makes them, such as the final norm, runs by tiles.

[Note: Hidden states that are not there]
A final norm keeps its input, copies of it in float32, and its output, for all tokens.  Between the last block and the
head nothing but the head asks for that output.  So it gives a stand-in, which knows its shape, the norm's input and
what is to be done with a token of it; the head's logits take that over, and the norm runs within their tiles.

The stand-in is a tensor, because models look whether it is one, and every use of it is seen:

- A slice or a view of tokens, a cast and a factor give another stand-in.
- Whatever else is done with it makes it real: the modules run whole, once, with their graph, as they would have run at
  first.  From then on the head takes the real one too, so that its hooks see all of its gradient.
- What looks past Python functions (an autograd function of somebody's own) is refused: its gradient would get lost.
- When the model's forward has ended there is no stand-in any more: what it gives to its caller has been made real, and
  what somebody has kept of it is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import nn
from torch.nn import functional
from torch.utils import _pytree as pytree

from ...shared.basics.errors import ScheduleError
from .head_function import TokenFunction, casting_anew, head_function

_Whole = Callable[[torch.Tensor], torch.Tensor]


class NotOneTensorError(Exception):
    """A module gives something else than hidden states."""


@dataclass(eq=False)
class Scope:
    """Where stand-ins may be made real, such as one forward of a model, and what they stand for."""

    is_open: bool = True
    what: str = "the output of the model's final norm"
    where: str = "the model's forward"
    knob: str = "loss_tiles"

    def refused(self, what: str) -> ScheduleError:
        """For what is done with hidden states that are not there."""
        return ScheduleError(
            f"{self.knob}: {self.what} {what}. With {self.knob} it is made by tiles, together with what it is made "
            f"for, and never whole. Train with {self.knob} 1."
        )


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What an operation depends on beside its tensors: whether there is a graph, and autocast."""

    has_graph: bool
    kind: str
    casts: bool
    dtype: torch.dtype

    @classmethod
    def of(cls, kind: str) -> Surroundings:
        """Those of now, on devices of this kind."""
        casts = torch.is_autocast_enabled(kind)
        return cls(torch.is_grad_enabled(), kind, casts, torch.get_autocast_dtype(kind))

    @contextmanager
    def again(self) -> Iterator[None]:
        """Within the block, these are those of now."""
        with torch.set_grad_enabled(self.has_graph), self._cast():
            yield

    def casting(self, run: TokenFunction) -> TokenFunction:
        """``run`` with autocast as it was, whatever it is then."""

        def cast(hidden: torch.Tensor, values: Sequence[torch.Tensor]) -> torch.Tensor:
            with self._cast():
                return run(hidden, values)

        return cast

    def _cast(self) -> Any:
        now = Surroundings.of(self.kind)
        if (now.casts, now.dtype) == (self.casts, self.dtype):
            return nullcontext()
        return torch.autocast(self.kind, dtype=self.dtype, enabled=self.casts, cache_enabled=False)


@dataclass(frozen=True, slots=True)
class TokenSteps:
    """What is to be done with each token, (tokens, hidden) to (tokens, hidden), and the values that it takes."""

    steps: tuple[tuple[TokenFunction, int], ...] = ()
    """Functions, and how many weights each takes."""
    weights: tuple[torch.Tensor, ...] = ()

    def run(self, hidden: torch.Tensor, values: Sequence[torch.Tensor]) -> torch.Tensor:
        """All of it, with ``values`` of ``weights``."""
        begin = 0
        for step, count in self.steps:
            hidden = step(hidden, values[begin : begin + count])
            begin += count
        return hidden

    def then(self, step: TokenFunction, weights: Sequence[torch.Tensor] = ()) -> TokenSteps:
        """These, and one more."""
        return TokenSteps((*self.steps, (step, len(weights))), (*self.weights, *weights))


class DeferredHidden(torch.Tensor):
    """Hidden states (..., hidden) that are not computed: see [Note: Hidden states that are not there]."""

    origin: torch.Tensor
    """What the first of the modules was given."""
    version: int
    """Of ``origin``, at that time."""
    base: torch.Tensor
    """The tokens of ``origin`` that these hidden states have."""
    todo: TokenSteps
    around: Surroundings
    _source: DeferredHidden | None
    _whole: _Whole
    scope: Scope
    """Where it may be made real."""
    _real: torch.Tensor | None

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"DeferredHidden(shape={list(self.shape)})"

    @property
    def is_first(self) -> bool:
        """Whether one module makes it of ``base``, and nothing has been done with it since."""
        return self._source is None

    def is_whole_for(self, around: Surroundings) -> bool:
        """Whether the head takes the real ones: they are there already, or it runs in other surroundings."""
        source = self._source
        if self.is_stale or self.around != around or self.if_computed() is not None:
            return True
        return source is not None and source.is_whole_for(around)

    @property
    def is_stale(self) -> bool:
        """Whether what it is made from has been changed in place meanwhile."""
        return self.origin._version != self.version

    def computed(self) -> torch.Tensor:
        """The hidden states, which are there from now on.  Raises ScheduleError if the model's forward has ended."""
        if self._real is None:
            if not self.scope.is_open:
                raise self.scope.refused(f"is looked at when {self.scope.where} has ended, and is gone then")
            if self.is_stale:
                raise self.scope.refused("would be another one by now: its input was changed in place behind it")
            given = self.base if self._source is None else self._source.computed()
            with self.around.again():
                self._real = self._whole(given)
        return self._real

    def if_computed(self) -> torch.Tensor | None:
        """The hidden states if these, or some from which they come, have been made real."""
        if self._real is None and self._source is not None and self._source.if_computed() is not None:
            return self.computed()
        return self._real

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        named = kwargs or {}
        if function in _FACTS:
            with torch._C.DisableTorchFunctionSubclass():
                return function(*args, **named)
        found = args[0] if args else None
        if isinstance(found, DeferredHidden) and found.if_computed() is None:
            deferred = found._followed(function, args[1:], named)
            if deferred is not None:
                return deferred
        made = pytree.tree_map_only(DeferredHidden, DeferredHidden.computed, (args, dict(named)))
        return function(*made[0], **made[1])

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        found = next(value for value in pytree.tree_leaves((args, kwargs)) if isinstance(value, DeferredHidden))
        raise found.scope.refused(f"is given to what cannot be seen into, at {function}")

    def _followed(self, function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> torch.Tensor | None:
        """What a function of these alone gives, as another stand-in; None if it needs the real ones."""
        if (sizes := _sizes(function, args, self.shape[-1])) is not None and not kwargs:
            base = function(self.base, *sizes[:-1], self.base.shape[-1])
            return _made(self, base, self.todo, lambda whole: function(whole, *sizes), self.scope)
        if function is torch.Tensor.__getitem__ and _is_of_tokens(args[0], self.ndim):
            return _made(self, self.base[args[0]], self.todo, lambda whole: whole[args[0]], self.scope)
        values = (*args, *kwargs.values())
        if function is torch.Tensor.contiguous and not values:
            return self
        if function in _OF_NUMBERS and all(_is_plain(value, self.device) for value in values):
            todo = self.todo.then(lambda part, _: function(part, *args, **kwargs))
            return _made(self, self.base, todo, lambda whole: function(whole, *args, **kwargs), self.scope)
        return None


def defer(
    module: nn.Module,
    forward: Callable[..., torch.Tensor],
    hidden: torch.Tensor,
    scope: Scope,
    whole: _Whole | None = None,
) -> torch.Tensor:
    """A stand-in for ``forward(hidden)`` of a token-wise ``module``; ``whole`` makes it real, if not ``forward``.

    Raises NotOneTensorError if ``forward`` gives something else than a tensor.
    """
    run, weights = head_function(module, forward)
    dims = hidden.ndim

    def step(part: torch.Tensor, values: Sequence[torch.Tensor]) -> torch.Tensor:
        # As many dims as it was given: a tile is one sample.
        result = run(part.reshape(*(1,) * (dims - 2), *part.shape), values)
        if not isinstance(result, torch.Tensor):
            raise NotOneTensorError
        return result.reshape(len(part), result.shape[-1])

    base, todo = (hidden.base, hidden.todo) if isinstance(hidden, DeferredHidden) else (hidden, TokenSteps())
    return _made(hidden, base, todo.then(step, weights), whole or forward, scope)


def are_hidden(given: Any) -> bool:
    """Whether it is a tensor that has features by token, from which a stand-in may be made."""
    return isinstance(given, torch.Tensor) and given.ndim > 1 and given.is_floating_point()


def has_hooks(module: nn.Module) -> bool:
    """Whether somebody sees what a module or a part of it is given or gives."""
    return any(
        hooks
        for part in module.modules()
        for hooks in (part._forward_hooks, part._forward_pre_hooks, part._backward_hooks, part._backward_pre_hooks)
    )


def made_whole(output: Any) -> Any:
    """``output`` of a model with real hidden states in place of stand-ins, in mappings, tuples and lists."""
    if isinstance(output, DeferredHidden):
        return output.computed()
    if isinstance(output, Mapping):
        for name, value in output.items():
            if (real := made_whole(value)) is not value:
                output[name] = real  # type: ignore[index]
        return output
    if isinstance(output, tuple | list):
        values = [made_whole(value) for value in output]
        if all(one is other for one, other in zip(values, output, strict=True)):
            return output
        made: Any = type(output)
        return made(*values) if hasattr(output, "_fields") else made(values)
    return output


def _made(given: torch.Tensor, base: torch.Tensor, todo: TokenSteps, whole: _Whole, scope: Scope) -> torch.Tensor:
    source = given if isinstance(given, DeferredHidden) else None
    around = Surroundings.of(base.device.type)
    with torch.no_grad(), casting_anew(base.device.type):
        none = todo.run(base.detach().reshape(-1, base.shape[-1])[:0], todo.weights)
    shape, dtype = (*base.shape[:-1], none.shape[-1]), none.dtype

    def make() -> DeferredHidden:
        made: DeferredHidden = torch.Tensor._make_wrapper_subclass(
            DeferredHidden, shape, dtype=dtype, device=base.device
        )
        return made

    found: DeferredHidden = _Unseen.apply(scope, make, base, *todo.weights)  # type: ignore[no-untyped-call]
    found.origin, found.version = (base, base._version) if source is None else (source.origin, source.version)
    found.base, found.todo, found.around = base, todo, around
    found._source, found._whole, found.scope, found._real = source, whole, scope, None
    return found


class _Unseen(torch.autograd.Function):
    """A stand-in that wants a gradient, as what it stands for would, and refuses one that reaches it."""

    @staticmethod
    def forward(ctx: Any, scope: Scope, make: Callable[[], DeferredHidden], *inputs: torch.Tensor) -> torch.Tensor:
        """The stand-in."""
        ctx.scope = scope
        return make()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        """None of it."""
        raise ctx.scope.refused("was used where it could not be seen")


def _sizes(function: Any, args: Sequence[Any], num_features: int) -> list[int] | None:
    """Of a view of hidden states that leaves features as they are; None for anything else."""
    if function not in _RESHAPING:
        return None
    sizes = args[0] if len(args) == 1 and isinstance(args[0], tuple | list) else args
    is_of_tokens = len(sizes) > 1 and all(isinstance(size, int) for size in sizes) and sizes[-1] == num_features
    return list(sizes) if is_of_tokens else None


def _is_of_tokens(index: Any, ndim: int) -> bool:
    """Whether an index of hidden states leaves features as they are, by numbers and slices."""
    parts = index if isinstance(index, tuple) else (index,)
    if any(isinstance(part, bool) or not isinstance(part, slice | int) for part in parts):
        return False
    return len(parts) < ndim or (len(parts) == ndim and parts[-1] == slice(None))


def _is_plain(value: Any, device: torch.device) -> bool:
    return isinstance(value, int | float | torch.dtype) or (isinstance(value, torch.device) and value == device)


_T: Final = torch.Tensor
_FACTS: Final = frozenset(
    (
        *(getattr(_T, name).__get__ for name in ("shape", "dtype", "device", "ndim", "layout", "requires_grad")),
        *(getattr(_T, name).__get__ for name in ("is_cuda", "is_cpu", "is_meta", "is_sparse", "is_nested", "itemsize")),
        *(getattr(_T, name) for name in ("size", "dim", "numel", "nelement", "is_floating_point", "is_complex")),
        *(getattr(_T, name) for name in ("element_size", "__len__")),
    )
)
"""What is known of hidden states that are not there."""
_RESHAPING: Final = frozenset((_T.view, _T.reshape))
_OF_NUMBERS: Final = frozenset(
    (
        *(torch.mul, _T.mul, _T.__mul__, _T.__rmul__, torch.div, _T.div, _T.__truediv__),
        *(_T.to, _T.float, _T.half, _T.bfloat16, _T.double),
        *(functional.gelu, functional.silu, functional.relu, torch.relu, torch.tanh, _T.tanh),
    )
)
"""What treats each number by itself, if all else that it is given is a number or a type."""
