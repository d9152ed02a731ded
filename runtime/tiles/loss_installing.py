"""A language model whose loss is computed by tiles, without a change of its code."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Final

import torch
from torch import nn

from ...shared.basics.errors import PlanError, ScheduleError
from ...shared.phases.tiling import MOST_TILES
from ..model.blocks import NamedBlock
from .deferred_hidden import DeferredHidden, Scope, Surroundings, TokenSteps, are_hidden, defer, has_hooks, made_whole
from .final_modules import FinalModules, final_modules
from .head_function import casting_anew, head_function
from .loss_logits import DeferredLogits, TiledHead, refused

_BY_TOKEN: Final = (nn.Linear, nn.LayerNorm, nn.RMSNorm, nn.Dropout, nn.Identity, nn.GELU, nn.ReLU, nn.SiLU, nn.Tanh)
"""Modules that treat each token by itself."""


@contextmanager
def tiled_loss(model: nn.Module, loss_tiles: int, final: FinalModules | None = None) -> Iterator[None]:
    """Within the block, ``model`` computes its loss in ``loss_tiles`` tiles of tokens wherever it is given labels.

    Head, what follows it and cross-entropy run tile by tile, so that the output has no logits (None); so do those of
    the ``final`` modules that run ahead of the head, unless they have hooks or hidden states are asked for.  A forward
    without labels gives logits as ever, unless gradients are on: a training whose loss others compute needs them whole,
    which is refused (ScheduleError).  Modules, parameters and hooks stay as they are.  Raises PlanError if the model
    has no head that treats each token by itself, or ``loss_tiles`` is no number of tiles.
    """
    check_tiled_loss(model, loss_tiles)
    if loss_tiles == 1:
        yield
        return
    head = head_of_tokens(model)
    state = _State(head, loss_tiles)
    with ExitStack() as stack:
        stack.enter_context(forward_as(head, state.head_forward))
        stack.enter_context(forward_as(model, functools.partial(state.model_forward, model)))
        if final is not None:
            stack.callback(final.last_block.register_forward_hook(state.note_last_block).remove)
            for module in final.modules:
                stack.enter_context(forward_as(module, functools.partial(state.final_forward, module)))
        yield


def final_of_loss(model: nn.Module, blocks: Sequence[NamedBlock], loss_tiles: int) -> FinalModules | None:
    """What may run by tiles with the loss, ahead of the head; None for nothing.  Raises as ``tiled_loss``."""
    check_tiled_loss(model, loss_tiles)
    return final_modules(model, blocks, head_of_tokens(model)) if loss_tiles > 1 else None


def check_loss_tiles(loss_tiles: int) -> None:
    """Raise PlanError unless it is a number of tiles."""
    if not isinstance(loss_tiles, int) or not 1 <= loss_tiles <= MOST_TILES:
        raise PlanError(f"loss_tiles is {loss_tiles}; it must be a whole number from 1 to {MOST_TILES:,}.")


def check_tiled_loss(model: nn.Module, loss_tiles: int) -> None:
    """Raise PlanError if ``model`` cannot compute its loss in so many tiles, as far as its modules tell."""
    check_loss_tiles(loss_tiles)
    if loss_tiles > 1:
        head_of_tokens(model)
    if loss_tiles > 1 and is_of_liger(model):
        raise PlanError(
            f"loss_tiles is {loss_tiles}, but {type(model).__name__} computes its loss by Liger's kernel "
            f"(fused_linear_cross_entropy), which forms no whole logits either. Train it with loss_tiles 1, or apply "
            f"Liger's kernels without that one."
        )


def is_of_liger(model: nn.Module) -> bool:
    """Whether Liger has replaced the forward of ``model``, as it does for its fused loss alone."""
    return any(
        str(getattr(module.forward, "__module__", "")).startswith("liger_kernel.transformers.model.")
        for module in model.modules()
    )


def loss_tile_counts(counts: int | Sequence[int], loss: object | None) -> list[int]:
    """Numbers of tiles to trace beside 1, ascending.  Raises PlanError if the loss is computed outside of the model."""
    asked = [counts] if isinstance(counts, int) else counts
    for count in asked:
        check_loss_tiles(count)
    found = sorted(set(asked) - {1})
    if found and loss is not None:
        raise PlanError(
            "loss_tiles: the loss is a function of whole logits outside of the model (loss=...). Leave it out, and put "
            "labels into the batch, or train with loss_tiles 1."
        )
    return found


def head_of_tokens(model: nn.Module) -> nn.Module:
    """The module that makes logits of hidden states.  Raises PlanError if there is none, or it may mix tokens."""
    get: Any = getattr(model, "get_output_embeddings", None)
    head = get() if callable(get) else None
    name = type(model).__name__
    if not isinstance(head, nn.Module):
        raise PlanError(
            f"loss_tiles: {name} names no module that makes logits (get_output_embeddings() of transformers gives "
            f"{type(head).__name__}). Train it with loss_tiles 1."
        )
    if head is model:
        raise PlanError(f"loss_tiles: the whole of {name} is its own head. Train it with loss_tiles 1.")
    if (wrong := next((part for part in head.modules() if not _is_by_token(part)), None)) is not None:
        raise PlanError(
            f"loss_tiles: nobody knows whether {type(wrong).__name__}, in the head of {name}, treats each token by "
            f"itself. Train it with loss_tiles 1."
        )
    return head


def _is_by_token(part: nn.Module) -> bool:
    if any(type(part).forward is known.forward for known in _BY_TOKEN):
        return True
    if isinstance(part, nn.ModuleDict | nn.ModuleList | nn.ParameterDict | nn.Sequential):
        return True
    # A linear layer with an adapter beside it, and one that has its weight transposed.
    return (type(part).__module__, type(part).__name__) in _KNOWN


_KNOWN: Final = frozenset({("peft.tuners.lora.layer", "Linear"), ("transformers.pytorch_utils", "Conv1D")})


class _State:
    """What the wrapped forwards of a model and of its head know of each other."""

    def __init__(self, head: nn.Module, loss_tiles: int) -> None:
        self._original = head.forward
        self._head = head
        self._tiles = loss_tiles
        self._depth = 0
        self._losses = 0
        self._heads = 0
        self._scope = Scope(is_open=False)
        self._may_defer = False
        self._defers = False
        """Whether final modules give stand-ins: behind the last block."""

    def _note_loss(self) -> None:
        self._losses += 1

    def note_last_block(self, *_: Any) -> None:
        """A hook on it."""
        self._defers = self._depth > 0 and self._may_defer

    def final_forward(self, module: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """That of a token-wise module: a stand-in for what it gives behind the last block."""
        if not self._defers or kwargs or len(args) != 1 or not are_hidden(args[0]) or has_hooks(module):
            return forward(*args, **kwargs)
        return defer(module, forward, args[0], self._scope)

    def head_forward(self, forward: Callable[..., Any], hidden: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """The head's: a stand-in where the model computes a loss."""
        if not self._depth:
            return forward(hidden, *args, **kwargs)
        if args or kwargs or not isinstance(hidden, torch.Tensor):
            raise refused(f"a head that takes more than hidden states ({type(self._head).__name__})")
        self._heads += 1
        run, weights = head_function(self._head, forward)
        around = Surroundings.of(hidden.device.type)
        if isinstance(hidden, DeferredHidden) and hidden.is_whole_for(around):
            hidden = hidden.computed()
        size = _vocabulary(self._head, run, hidden, weights)
        todo = hidden.todo if isinstance(hidden, DeferredHidden) else TokenSteps()
        todo = todo.then(run, weights)
        head = TiledHead(around.casting(todo.run), todo.weights, size, self._tiles, self._note_loss)
        return DeferredLogits(head, hidden.base if isinstance(hidden, DeferredHidden) else hidden)

    def model_forward(self, model: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """The model's."""
        if not has_labels(forward, args, kwargs):
            if torch.is_grad_enabled():
                raise ScheduleError(
                    f"loss_tiles: {type(model).__name__} is trained without labels, so that its loss is computed "
                    f"outside of it, and needs whole logits. Put labels into the batch, or train with loss_tiles 1."
                )
            return forward(*args, **kwargs)
        if not self._depth:
            self._scope = Scope()
            self._may_defer = not _gives_hidden_states(model, kwargs)
        self._depth, self._losses, self._heads = self._depth + 1, 0, 0
        try:
            output = made_whole(forward(*args, **kwargs))
        finally:
            self._depth -= 1
            self._scope.is_open, self._defers = self._depth > 0, False
        if not self._losses:
            what = "no cross-entropy of what its head gives" if self._heads else "another head than it names"
            raise refused(f"{what} ({type(model).__name__})")
        return without_logits(output)


def _gives_hidden_states(model: nn.Module, kwargs: Mapping[str, Any]) -> bool:
    """Whether the model's output is to have the hidden states, of which the final norm's are the last."""
    asked = kwargs.get("output_hidden_states")
    return bool(getattr(getattr(model, "config", None), "output_hidden_states", False) if asked is None else asked)


def _vocabulary(head: nn.Module, run: Any, hidden: torch.Tensor, weights: Any) -> int:
    for name in ("out_features", "nf"):
        if isinstance(size := getattr(head, name, None), int):
            return size
    with torch.no_grad(), casting_anew(hidden.device.type):
        return int(run(hidden.detach().reshape(-1, hidden.shape[-1])[:0], weights).shape[-1])


def has_labels(forward: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether a call of a model's ``forward`` gives it labels."""
    if kwargs.get("labels") is not None:
        return True
    if not args:
        return False
    try:
        bound = inspect.signature(forward).bind_partial(*args)
    except TypeError:
        return False
    return bound.arguments.get("labels") is not None


def without_logits(output: Any) -> Any:
    """``output`` with None in place of logits that are not there."""
    if isinstance(output, Mapping):
        kept = {name: value for name, value in output.items() if not isinstance(value, DeferredLogits)}
        if len(kept) == len(output):
            return output
        # An output class of transformers has fields that are None unless they are given.
        return type(output)(**kept) if hasattr(output, "__dataclass_fields__") else {**output, **_gone(output)}
    if isinstance(output, tuple) and any(isinstance(value, DeferredLogits) for value in output):
        values = [None if isinstance(value, DeferredLogits) else value for value in output]
        made: Any = type(output)
        return made(*values) if hasattr(output, "_fields") else tuple(values)
    return output


def _gone(output: Mapping[str, Any]) -> dict[str, None]:
    return {name: None for name, value in output.items() if isinstance(value, DeferredLogits)}


@contextmanager
def forward_as(module: nn.Module, wrapped: Callable[..., Any]) -> Iterator[None]:
    """Within the block, ``wrapped(forward, ...)`` is the forward of ``module``, which afterwards has what it had."""
    original = module.forward
    had = module.__dict__.get("forward")

    @functools.wraps(original)
    def forward(*args: Any, **kwargs: Any) -> Any:
        return wrapped(original, *args, **kwargs)

    module.forward = forward
    try:
        yield
    finally:
        if had is None:
            del module.forward
        else:
            module.forward = had
