"""A language model whose cross-entropy is fused, or of logits that are not widened, without a change of its code.

[Note: Logits that are not widened]
Models widen their logits to float32 and hand them to cross-entropy, some with dims joined or the last token cut off.
Behind the head, and until the model has its loss, functions of torch are watched: what would widen logits gives a
stand-in that remembers it, views of a stand-in are stand-ins, and cross-entropy of one is that of the logits as they
are.  Any other use of a stand-in widens them after all, so that nothing is silently another thing.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, Final

import torch
from torch import nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from ...shared.basics.errors import PlanError, ScheduleError
from ...shared.phases.tiling import LossHead
from ...shared.schema.plan import Plan
from ...shared.schema.workload import Workload
from ..model.blocks import NamedBlock
from .fused_cross_entropy import fused_cross_entropy
from .loss_installing import check_tiled_loss, final_of_loss, forward_as, has_labels, is_of_liger, tiled_loss

_UNWIDENED: Final = (LossHead.NARROW, LossHead.FUSED)
_NARROW: Final = (torch.float16, torch.bfloat16)
_CROSS_ENTROPY: Final = (
    *("input", "target", "weight", "size_average", "ignore_index", "reduce", "reduction", "label_smoothing"),
)
_VIEWS: Final = frozenset(("view", "reshape", "flatten", "contiguous", "squeeze", "unsqueeze", "__getitem__"))
_FACTS: Final = frozenset(("size", "dim", "numel", "__len__"))


@contextmanager
def loss_as(model: nn.Module, loss_head: LossHead) -> Iterator[None]:
    """Within the block, ``model`` computes its loss so wherever it is given labels.

    Of a fused one see [Note: Fused cross-entropy] in ``fused_cross_entropy.py``: the output has no logits (None), whose
    place backward takes for their gradient.  A narrow one is torch's cross-entropy of logits that are not widened,
    which the output has too.
    Without gradients the logits stay, and are not widened for the loss; a forward without labels is as ever.  A
    training whose loss others compute is refused (ScheduleError).  Raises PlanError if the model names no head.
    """
    check_loss_head(model, loss_head)
    if loss_head not in _UNWIDENED:
        yield
        return
    watch = _Watch(loss_head)
    with ExitStack() as stack:
        stack.enter_context(forward_as(_head_of(model, loss_head), watch.head_forward))
        stack.enter_context(forward_as(model, partial(watch.model_forward, model)))
        yield


def check_loss_head(model: nn.Module, loss_head: LossHead, loss: object | None = None) -> None:
    """Raise PlanError if ``model`` cannot compute its loss so, as far as its modules tell.

    ``loss``: what computes it outside of the model.
    """
    if loss_head not in _UNWIDENED:
        return
    if loss is not None:
        raise PlanError(
            f"loss {loss_head}: the loss is a function outside of the model (loss=...). Leave it out, and put labels "
            f"into the batch, or train with loss eager."
        )
    _head_of(model, loss_head)
    if is_of_liger(model):
        raise PlanError(
            f"loss {loss_head}: {type(model).__name__} computes its loss by Liger's kernel "
            f"(fused_linear_cross_entropy), which forms no whole logits. Train it with loss eager, or apply Liger's "
            f"kernels without that one."
        )


@contextmanager
def loss_of_plan(model: nn.Module, plan: Plan, workload: Workload, blocks: Sequence[NamedBlock]) -> Iterator[None]:
    """Within the block, ``model`` computes its loss in the plan's tiles, or whole as the workload has it."""
    tiles = plan.loss_tiles
    with tiled_loss(model, tiles, final_of_loss(model, blocks, tiles)), loss_as(model, _loss_head_of(plan, workload)):
        yield


def check_loss_of_plan(model: nn.Module, plan: Plan, workload: Workload) -> None:
    """Raise PlanError if ``model`` cannot compute its loss so, as far as its modules tell."""
    check_tiled_loss(model, plan.loss_tiles)
    check_loss_head(model, _loss_head_of(plan, workload))


def _loss_head_of(plan: Plan, workload: Workload) -> LossHead:
    return LossHead.CHUNKED if plan.loss_tiles > 1 else workload.loss_head


def _head_of(model: nn.Module, loss_head: LossHead) -> nn.Module:
    get: Any = getattr(model, "get_output_embeddings", None)
    head = get() if callable(get) else None
    if not isinstance(head, nn.Module) or head is model:
        raise PlanError(
            f"loss {loss_head}: {type(model).__name__} names no module that makes logits (get_output_embeddings() of "
            f"transformers gives {type(head).__name__}). Train it with loss eager."
        )
    return head


class _Watch:
    """What the wrapped forwards of a model and of its head know of each other."""

    def __init__(self, loss_head: LossHead) -> None:
        self._loss_head = loss_head
        self._depth = 0
        self._mode: _WatchedLogits | None = None
        self._has_head = False

    def head_forward(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """The head's; from here on the loss is looked out for."""
        logits = forward(*args, **kwargs)
        if self._depth and isinstance(logits, torch.Tensor):
            self._has_head = True
            if self._mode is None:
                self._mode = _WatchedLogits(self._loss_head)
                self._mode.__enter__()  # type: ignore[no-untyped-call]
            self._mode.vocabularies.add(logits.shape[-1])
        return logits

    def model_forward(self, model: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """The model's."""
        trains, has_loss = torch.is_grad_enabled(), has_labels(forward, args, kwargs)
        if self._depth or not (trains or has_loss):
            return forward(*args, **kwargs)
        if not has_loss:
            raise ScheduleError(
                f"loss {self._loss_head}: {type(model).__name__} is trained without labels, so that its loss is "
                f"computed outside of it. Put labels into the batch, or train with loss eager."
            )
        self._depth, self._has_head = 1, False
        try:
            output = forward(*args, **kwargs)
        finally:
            self._depth = 0
            watched, self._mode = self._mode, None
            if watched is not None:
                watched.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        if not trains:
            return _with_logits(output)
        if watched is None or not watched.has_loss:
            what = "no cross-entropy of what its head gives" if self._has_head else "another head than it names"
            raise ScheduleError(
                f"loss {self._loss_head}: {type(model).__name__} uses {what}. Train it with loss eager."
            )
        if self._loss_head is LossHead.NARROW:
            return _with_logits(output, are_widened=False)
        return _without_logits(output, watched.storages)


class _WatchedLogits(TorchFunctionMode):
    """See [Note: Logits that are not widened]."""

    def __init__(self, loss_head: LossHead) -> None:
        super().__init__()
        self._is_fused = loss_head is LossHead.FUSED
        self.has_loss = False
        """Whether there was a cross-entropy of logits."""
        self.vocabularies: set[int] = set()
        self.storages: set[int] = set()
        """Of logits whose cross-entropy was fused."""
        self._used: dict[int, tuple[str, weakref.ref[torch.UntypedStorage]]] = {}
        """Storages that another function has had, with its name."""

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """``function``, or what stands for it."""
        named = dict(kwargs or {})
        if function is functional.cross_entropy:
            return self._loss(function, args, named)
        if _widens(function, args, named) and self._are_logits(args[0]):
            return WidenedLogits(args[0])
        result = function(*args, **named)
        self._note_use(function, (*args, *named.values()), result)
        return result

    def _note_use(self, function: Any, given: tuple[Any, ...], result: Any) -> None:
        """Remember what other functions may have saved for their backward.

        Raises ScheduleError if it is logits whose cross-entropy is fused: their place is taken when that runs.
        """
        if not isinstance(result, torch.Tensor) or not result.requires_grad:
            return
        name, own = str(getattr(function, "__name__", function)), result.untyped_storage()._cdata
        for storage in (value.untyped_storage() for value in given if isinstance(value, torch.Tensor)):
            key = storage._cdata
            if key == own:
                continue
            if key in self.storages:
                raise _refused_use(name)
            # Others may have the address of one that is gone.
            self._used[key] = name, weakref.ref(storage)

    def _are_logits(self, tensor: torch.Tensor) -> bool:
        return tensor.dim() > 1 and tensor.shape[-1] in self.vocabularies and _is_of_graph(tensor)

    def _loss(self, function: Any, args: tuple[Any, ...], named: dict[str, Any]) -> torch.Tensor:
        bound = dict(zip(_CROSS_ENTROPY, args, strict=False)) | named
        given, labels = bound.pop("input"), bound.pop("target")
        logits = given.logits if isinstance(given, WidenedLogits) else given
        is_plain = all(bound.pop(name, None) is None for name in ("weight", "size_average", "reduce"))
        is_known = is_plain and logits.dim() == 2 and labels.dim() == 1 and not labels.is_floating_point()
        if not is_known or not self._are_logits(logits):
            result: torch.Tensor = function(*_whole(args), **_whole(named))
            return result
        self.has_loss = True
        if not self._is_fused:
            narrow: torch.Tensor = function(logits, labels, **bound)
            return narrow
        if not torch.is_grad_enabled():
            return fused_cross_entropy(logits, labels, **bound)
        storage = logits.untyped_storage()._cdata
        name, reference = self._used.get(storage, ("", None))
        if storage in self.storages or (reference is not None and reference() is not None):
            raise _refused_use(name or "cross_entropy")
        self.storages.add(storage)
        return fused_cross_entropy(logits, labels, **bound)


def _is_of_graph(tensor: torch.Tensor) -> bool:
    """Whether a graph reaches it, if there is any."""
    return tensor.requires_grad or not torch.is_grad_enabled()


def _refused_use(what: str) -> ScheduleError:
    return ScheduleError(
        f"loss fused: the model's loss uses {what} of the logits too, whose place their gradient takes. Train it with "
        f"loss eager."
    )


class WidenedLogits:
    """Logits that a model has widened to float32, and that are not."""

    def __init__(self, logits: torch.Tensor) -> None:
        self.logits = logits
        """As they are."""

    @property
    def shape(self) -> torch.Size:
        """Of the logits."""
        return self.logits.shape

    @property
    def device(self) -> torch.device:
        """Of the logits."""
        return self.logits.device

    @property
    def dtype(self) -> torch.dtype:
        """Of them widened."""
        return torch.float32

    @property
    def ndim(self) -> int:
        """Number of dims."""
        return self.logits.ndim

    def whole(self) -> torch.Tensor:
        """Widened after all."""
        with torch._C.DisableTorchFunction():
            return self.logits.float()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name in _VIEWS:
            return partial(self._viewed, name)
        return getattr(self.logits if name in _FACTS else self.whole(), name)

    def _viewed(self, name: str, *args: Any, **kwargs: Any) -> WidenedLogits:
        return WidenedLogits(getattr(self.logits, name)(*args, **kwargs))

    def __getitem__(self, index: Any) -> WidenedLogits:
        return self._viewed("__getitem__", index)

    def __len__(self) -> int:
        return len(self.logits)

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """``function`` of the logits widened."""
        return function(*_whole(args), **_whole(dict(kwargs or {})))


def _binary(name: str) -> Callable[..., Any]:
    def operator(self: WidenedLogits, *others: Any) -> Any:
        return getattr(self.whole(), name)(*_whole(others))

    return operator


for _name in ("add", "radd", "sub", "rsub", "mul", "rmul", "truediv", "rtruediv", "neg", "pow"):
    setattr(WidenedLogits, f"__{_name}__", _binary(f"__{_name}__"))


def _whole(given: Any) -> Any:
    """Arguments without stand-ins."""
    if isinstance(given, WidenedLogits):
        return given.whole()
    if isinstance(given, dict):
        return {name: _whole(value) for name, value in given.items()}
    return tuple(_whole(value) for value in given) if type(given) is tuple else given


def _widens(function: Any, args: tuple[Any, ...], named: Mapping[str, Any]) -> bool:
    """Whether a function of a narrow tensor does nothing but give it in float32."""
    if not args or not isinstance(args[0], torch.Tensor) or args[0].dtype not in _NARROW:
        return False
    if function is torch.Tensor.float:
        return len(args) == 1 and not named
    if function is torch.Tensor.to:
        return (args[1:] == (torch.float32,) and not named) or (len(args) == 1 and named == {"dtype": torch.float32})
    return function is torch.Tensor.type and args[1:] == (torch.float32,)


def _with_logits(output: Any, *, are_widened: bool = True) -> Any:
    """``output`` with logits, widened where the model has widened them, or as they are."""

    def given(value: Any) -> Any:
        if not isinstance(value, WidenedLogits):
            return value
        return value.whole() if are_widened else value.logits

    if isinstance(output, Mapping):
        for name, value in output.items():
            if isinstance(value, WidenedLogits):
                output[name] = given(value)  # type: ignore[index]
        return output
    return tuple(given(value) for value in output) if type(output) is tuple else given(output)


def _without_logits(output: Any, storages: set[int]) -> Any:
    """``output`` with None in place of logits that backward overwrites."""

    def is_gone(value: Any) -> bool:
        if isinstance(value, WidenedLogits):
            return True
        return isinstance(value, torch.Tensor) and value.untyped_storage()._cdata in storages

    if isinstance(output, Mapping):
        kept = {name: value for name, value in output.items() if not is_gone(value)}
        if len(kept) == len(output):
            return output
        if hasattr(output, "__dataclass_fields__"):
            made: Any = type(output)
            return made(**kept)
        return {**output, **{name: None for name in output if name not in kept}}
    if isinstance(output, tuple) and any(is_gone(value) for value in output):
        values = [None if is_gone(value) else value for value in output]
        made = type(output)
        return made(*values) if hasattr(output, "_fields") else tuple(values)
    return output
