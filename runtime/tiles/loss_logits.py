"""Logits that are not there: what a model does with them is noted, and done tile by tile once a loss asks.

[Note: Logits that are not there]
Between its head and its loss a model may scale logits, cap them, widen them, cut off padding of the vocabulary, or
flatten tokens.  Each of these treats every token by itself, so that it commutes with cutting into tiles.  The head
gives a stand-in, which is no tensor, so that nothing can take it for one.  It notes such operations; what reduces each
token to one number (cross-entropy, logsumexp) then runs head, operations and reduction by tiles.  Every other operation
is refused by name, so that no loss is silently another one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from types import EllipsisType
from typing import Any, Final

import torch
from torch.nn import functional

from ...shared.basics.errors import ScheduleError
from .head_function import TokenFunction, casting_anew
from .loss_function import TiledWork, tiled

_Step = Callable[[torch.Tensor, Sequence[torch.Tensor]], torch.Tensor]


@dataclass(frozen=True, slots=True)
class TiledHead:
    """A head whose logits are computed by tiles."""

    run: TokenFunction
    """Logits (tokens, vocabulary) of hidden states (tokens, hidden)."""
    weights: tuple[torch.Tensor, ...]
    vocabulary: int
    num_tiles: int
    on_loss: Callable[[], None]
    """Called for each loss that was computed of its logits."""


class WholeLogitsError(ScheduleError):
    """What is done with logits needs them whole."""


def refused(what: str) -> WholeLogitsError:
    """For an operation that mixes tokens, or of which that is not known."""
    return WholeLogitsError(
        f"loss_tiles: the model's loss needs whole logits: it uses {what} between head and loss. Known are "
        f"cross-entropy of every token, logsumexp, and what treats each logit by itself (scaling, capping, casts). "
        f"Train with loss_tiles 1."
    )


@dataclass(frozen=True, slots=True)
class _Noted:
    """What stands between head and loss."""

    steps: tuple[_Step, ...] = ()
    extras: tuple[torch.Tensor, ...] = ()
    """Tensors that steps use, such as a bias of the vocabulary."""


class DeferredLogits:
    """Logits (..., vocabulary) of ``hidden`` (..., hidden) that are not computed.

    See [Note: Logits that are not there].  Raises WholeLogitsError for what cannot be done by tiles.
    """

    def __init__(
        self, head: TiledHead, hidden: torch.Tensor, *, vocabulary: int | None = None, noted: _Noted | None = None
    ) -> None:
        self._head, self._hidden, self._noted = head, hidden, noted or _Noted()
        self._vocabulary = head.vocabulary if vocabulary is None else vocabulary

    # -- facts -------------------------------------------------------------------------------------------------------

    @property
    def shape(self) -> torch.Size:
        """Of the logits."""
        return torch.Size((*self._hidden.shape[:-1], self._vocabulary))

    @property
    def device(self) -> torch.device:
        """Of the logits."""
        return self._hidden.device

    @property
    def dtype(self) -> torch.dtype:
        """Of the logits: that of no token's, which cost nothing."""
        none = self._hidden.detach().reshape(-1, self._hidden.shape[-1])[:0]
        with torch.no_grad(), casting_anew(none.device.type):
            return _logits(self._head, self._noted, none, (*self._head.weights, *self._noted.extras)).dtype

    @property
    def ndim(self) -> int:
        """Number of dims."""
        return self._hidden.ndim

    def dim(self) -> int:
        """Number of dims."""
        return self._hidden.ndim

    def size(self, dim: int | None = None) -> torch.Size | int:
        """Of the logits, or of one dim."""
        return self.shape if dim is None else self.shape[dim]

    def __len__(self) -> int:
        return self.shape[0]

    # -- what treats each token by itself ------------------------------------------------------------------------------

    def view(self, *shape: Any) -> DeferredLogits:
        """With other dims of tokens."""
        asked = tuple(shape[0]) if len(shape) == 1 and not isinstance(shape[0], int | torch.dtype) else shape
        is_of_words = asked[-1:] == (self._vocabulary,)
        is_left_over = asked[-1:] == (-1,) and all(isinstance(size, int) and size >= 0 for size in asked[:-1])
        if not is_of_words and not (is_left_over and prod(asked[:-1]) == self._hidden.shape[:-1].numel()):
            raise refused(f"a view of shape {list(asked)}, whose last dim is not the vocabulary ({self._vocabulary})")
        return self._with_hidden(self._hidden.reshape(*asked[:-1], self._hidden.shape[-1]))

    reshape = view

    def flatten(self, start_dim: int = 0, end_dim: int = -1) -> DeferredLogits:
        """With dims of tokens joined."""
        if end_dim % self.ndim == self.ndim - 1:
            raise refused("flatten of the vocabulary")
        return self._with_hidden(self._hidden.flatten(start_dim, end_dim))

    def contiguous(self, **_: Any) -> DeferredLogits:
        """Itself."""
        return self

    def __getitem__(self, index: Any) -> DeferredLogits:
        asked = index if isinstance(index, tuple) else (index,)
        if any(not isinstance(part, slice | int | EllipsisType) for part in asked):
            raise refused("an index that is neither a number nor a slice")
        if sum(part is ... for part in asked) > 1 or len(asked) - (... in asked) > self.ndim:
            raise refused(f"the index {list(asked)}")
        place = asked.index(...) if ... in asked else len(asked)
        missing = self.ndim - (len(asked) - (... in asked))
        full = (*asked[:place], *[slice(None)] * missing, *asked[place + 1 :])
        *leading, last = full
        if not isinstance(last, slice):
            raise refused("the logits of one word")
        chosen = self._with_hidden(self._hidden[(*leading, slice(None))])
        if last == slice(None):
            return chosen
        size = len(range(*last.indices(self._vocabulary)))
        return chosen._with_step(lambda logits, _: logits[..., last], vocabulary=size)

    def _with_hidden(self, hidden: torch.Tensor) -> DeferredLogits:
        return DeferredLogits(self._head, hidden, vocabulary=self._vocabulary, noted=self._noted)

    def _with_step(
        self, step: _Step, extras: Sequence[torch.Tensor] = (), *, vocabulary: int | None = None
    ) -> DeferredLogits:
        noted = replace(self._noted, steps=(*self._noted.steps, step), extras=(*self._noted.extras, *extras))
        return DeferredLogits(self._head, self._hidden, vocabulary=vocabulary or self._vocabulary, noted=noted)

    def _elementwise(self, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """``function(*args, **kwargs)``, with this stand-in among the arguments, noted."""
        extras: list[torch.Tensor] = []
        first = len(self._noted.extras)
        given: list[Any] = []
        for value in args:
            if isinstance(value, DeferredLogits):
                if value is not self:
                    raise refused(f"{_name(function)} of two kinds of logits")
                given.append(_ITSELF)
            elif isinstance(value, torch.Tensor):
                if value.ndim and value.numel() != value.shape[-1]:
                    raise refused(f"{_name(function)} with a tensor of shape {list(value.shape)}")
                if value.ndim and value.shape[-1] not in (1, self._vocabulary):
                    raise refused(f"{_name(function)} with a tensor of shape {list(value.shape)}")
                given.append(_Extra(first + len(extras)))
                extras.append(value.reshape(-1) if value.ndim else value)
            else:
                given.append(value)
        if any(isinstance(value, torch.Tensor | DeferredLogits) for value in kwargs.values()):
            raise refused(f"{_name(function)} with tensors by name")

        def step(logits: torch.Tensor, known: Sequence[torch.Tensor]) -> torch.Tensor:
            values = [logits if v is _ITSELF else known[v.place] if isinstance(v, _Extra) else v for v in given]
            result: torch.Tensor = function(*values, **kwargs)
            return result

        return self._with_step(step, extras)

    def __getattr__(self, name: str) -> Any:
        method = getattr(torch.Tensor, name, None)
        if name.startswith("__") or method is None:
            raise AttributeError(name)
        if name in _REDUCTIONS:
            return lambda *args, **kwargs: self._reduced(name, args, kwargs)
        if name not in _ELEMENTWISE:
            raise refused(f"Tensor.{name}")
        return lambda *args, **kwargs: self._elementwise(method, (self, *args), kwargs)

    def __add__(self, other: Any) -> Any:
        return self._elementwise(torch.add, (self, other), {})

    def __radd__(self, other: Any) -> Any:
        return self._elementwise(torch.add, (other, self), {})

    def __sub__(self, other: Any) -> Any:
        return self._elementwise(torch.sub, (self, other), {})

    def __mul__(self, other: Any) -> Any:
        return self._elementwise(torch.mul, (self, other), {})

    __rmul__ = __mul__

    def __truediv__(self, other: Any) -> Any:
        return self._elementwise(torch.div, (self, other), {})

    def __neg__(self) -> Any:
        return self._elementwise(torch.neg, (self,), {})

    # -- what reduces each token to a number ---------------------------------------------------------------------------

    def _tiled(
        self,
        reduce: Callable[[torch.Tensor, Sequence[torch.Tensor]], torch.Tensor],
        by_token: Sequence[torch.Tensor],
        *,
        adds_up: bool,
    ) -> torch.Tensor:
        """``reduce`` of the logits, (tokens, vocabulary), and tensors by token, by tiles."""
        # What backward keeps holds neither this stand-in nor its hidden states.
        head, noted = self._head, replace(self._noted, extras=())
        flat = self._hidden.reshape(-1, self._hidden.shape[-1])
        weights = (*head.weights, *self._noted.extras)

        def run(part: torch.Tensor, given: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> torch.Tensor:
            return reduce(_logits(head, noted, part, values), given)

        is_half = torch.float16 in (flat.dtype, *(weight.dtype for weight in weights)) or (
            torch.is_autocast_enabled(flat.device.type) and torch.get_autocast_dtype(flat.device.type) is torch.float16
        )
        work = TiledWork(run, self._head.num_tiles, adds_up, forms_gradients=adds_up and not is_half)
        self._head.on_loss()
        return tiled(work, flat, by_token, weights)

    def _reduced(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> torch.Tensor:
        dim = args[0] if args else kwargs.get("dim")
        keeps = args[1] if len(args) > 1 else kwargs.get("keepdim", False)
        if dim not in (-1, self.ndim - 1) or keeps:
            raise refused(f"Tensor.{name} over dim {dim}")
        by_token = self._tiled(lambda logits, _: torch.logsumexp(logits, -1), (), adds_up=False)
        return by_token.reshape(self._hidden.shape[:-1])

    def _cross_entropy(
        self,
        target: torch.Tensor,
        weight: torch.Tensor | None = None,
        size_average: bool | None = None,
        ignore_index: int = -100,
        reduce: bool | None = None,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
    ) -> torch.Tensor:
        """``torch.nn.functional.cross_entropy`` of these logits."""
        if weight is not None or size_average is not None or reduce is not None:
            raise refused("cross_entropy with weights of classes (or size_average, reduce)")
        if target.is_floating_point():
            raise refused("cross_entropy with probabilities in place of labels")
        if self.ndim != 2 or target.ndim != 1 or len(target) != self.shape[0]:
            raise refused(f"cross_entropy of logits {list(self.shape)} with labels {list(target.shape)}")
        if reduction == "none":
            return self._tiled(
                lambda logits, given: functional.cross_entropy(
                    logits, given[0], ignore_index=ignore_index, reduction="none", label_smoothing=label_smoothing
                ),
                (target,),
                adds_up=False,
            )
        count = (target != ignore_index).sum() if reduction == "mean" else None

        def loss(logits: torch.Tensor, given: Sequence[torch.Tensor]) -> torch.Tensor:
            total = functional.cross_entropy(
                logits, given[0], ignore_index=ignore_index, reduction="sum", label_smoothing=label_smoothing
            )
            return total if count is None else total / count

        return self._tiled(loss, (target,), adds_up=True)

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        named = kwargs or {}
        if function is functional.cross_entropy:
            bound = dict(zip(_CROSS_ENTROPY, args, strict=False)) | named
            logits = bound.pop("input")
            if not isinstance(logits, DeferredLogits):
                raise refused("cross_entropy with logits in place of labels")
            return logits._cross_entropy(**bound)
        found = next((value for value in args if isinstance(value, DeferredLogits)), None)
        if found is None:
            raise refused(_name(function))
        if function is torch.logsumexp and args[0] is found:
            return found._reduced("logsumexp", args[1:], named)
        if getattr(function, "__name__", "") in _ELEMENTWISE and getattr(function, "__module__", None) != "torch.nn":
            return found._elementwise(function, args, named)
        raise refused(_name(function))


def _logits(head: TiledHead, noted: _Noted, hidden: torch.Tensor, values: Sequence[torch.Tensor]) -> torch.Tensor:
    """Of hidden states (tokens, hidden), with ``values`` of the head's parameters and of what is noted beside."""
    logits = head.run(hidden, values[: len(head.weights)])
    for step in noted.steps:
        logits = step(logits, values[len(head.weights) :])
    return logits


_ITSELF: Final = object()


@dataclass(frozen=True, slots=True)
class _Extra:
    place: int


_REDUCTIONS: Final = frozenset({"logsumexp"})
_ELEMENTWISE: Final = frozenset(
    """abs add bfloat16 clamp clip cos div divide double exp float half log1p mul multiply neg pow relu sigmoid sin
    softplus sqrt square sub subtract tanh to true_divide""".split()  # noqa: SIM905
)
"""Functions of torch, its functional module and tensors that treat each number by itself."""
_CROSS_ENTROPY: Final = (
    *("input", "target", "weight", "size_average", "ignore_index", "reduce", "reduction", "label_smoothing"),
)


def _name(function: Any) -> str:
    return str(getattr(function, "__name__", function))
