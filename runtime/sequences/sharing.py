"""A causal language model whose sequences several ranks share, without a change of its code.

[Note: The loss of a whole sequence]
Labels are shifted before they are cut: the last token of a rank learns the first of the next rank.  A rank's loss is
the sum over its own tokens, divided by the number of tokens of the whole sequence that count, times the ranks that
share it.  Gradients are averaged over all ranks, as ever, and this mean is the gradient of the whole.  What the user
sees as the loss is the mean of these losses, which is that of the whole sequence.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Final

import torch
from torch import nn

from ...shared.basics.errors import PlanError, ScheduleError
from .attention import REGISTRY, SharedAttention
from .exchange import EmulatedPeers, Peers, check_heads, mean_of_ranks

IGNORED: Final = -100
"""The label of a token that does not count."""
_MIXING: Final = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.RNNBase, nn.MultiheadAttention)
"""Modules that let tokens see each other without transformers' registry."""
_ELSEWHERE: Final = "takes its attention from elsewhere than transformers' registry"
_IN_A_ROW: Final = re.compile(r"(.+?)\.\d+\.")
"""The path of a part of a block, with that of the row of blocks."""
_WHOLE: Final = frozenset({"attention_mask"})
"""Arguments that stay whole: attention is told of all tokens."""
_CACHES: Final = ("past_key_values", "cache", "past_key_value")


@contextmanager
def shared_sequences(model: nn.Module, peers: Peers) -> Iterator[None]:
    """Within the block, ``model`` runs on this rank's tokens of each sequence, wherever it is given labels.

    It is called with the whole batch (B, S), the same on all of ``peers``, of which it takes S / P tokens.  Its loss is
    that of the whole sequence; gradients are to be averaged over ranks.  Logits are of the rank's own tokens.  A
    forward without labels runs whole, unless gradients are on (ScheduleError).  Raises PlanError if ranks cannot divide
    the model's heads, or the model is none whose attention and loss can be shared.
    """
    check_model(model, peers.num_ranks)
    shared = SharedAttention(model, peers)
    state = _State(model, peers, shared)
    original, had = model.forward, model.__dict__.get("forward")

    @functools.wraps(original)
    def forward(*args: Any, **kwargs: Any) -> Any:
        return state.forward(original, args, kwargs)

    REGISTRY.add(shared)
    model.forward = forward
    try:
        yield
    finally:
        REGISTRY.remove(shared)
        if had is None:
            del model.forward
        else:
            model.forward = had


def one_of_ranks(model: nn.Module, sequence_ranks: int) -> AbstractContextManager[None]:
    """``shared_sequences`` of one rank alone, as the first of so many would run; of 1, nothing."""
    return nullcontext() if sequence_ranks == 1 else shared_sequences(model, EmulatedPeers(sequence_ranks))


def check_shared(model: nn.Module, batch: Any, loss: object | None, sequence_ranks: Sequence[int]) -> None:
    """Raise PlanError if one of these numbers of ranks cannot share the sequences of ``batch``, of whole rows."""
    for number in sequence_ranks:
        if loss is not None:
            raise PlanError(
                "sequence_ranks: the loss is a function of whole logits outside of the model (loss=...). Leave it "
                "out, and put labels into the batch, or train with sequence_ranks 1."
            )
        check_model(model, number)
        labels = batch.get("labels") if isinstance(batch, Mapping) else None
        if not isinstance(labels, torch.Tensor) or labels.dim() != 2:
            raise PlanError(
                "sequence_ranks: the batch has no labels of (samples, tokens), of which each rank has its own. Put "
                "them into it, by name, or train with sequence_ranks 1."
            )
        check_length(labels.shape[1], number)


def check_model(model: nn.Module, sequence_ranks: int) -> None:
    """Raise PlanError if so many ranks cannot share sequences of ``model``, as far as its modules tell."""
    if sequence_ranks == 1:
        return
    name, config = type(model).__name__, getattr(model, "config", None)
    if config is None or not hasattr(model, "loss_function"):
        raise _refused(name, "is no model of transformers, whose attention and loss can be found")
    loss = getattr(model.loss_function, "__name__", "")
    if loss != "ForCausalLMLoss":
        raise _refused(name, f"has the loss {loss or type(model.loss_function).__name__}, not that of causal language")
    if getattr(config, "output_router_logits", False):
        raise _refused(name, "has an auxiliary loss of its router (output_router_logits), a mean over all tokens")
    mixing = next((path for path, part in model.named_modules() if isinstance(part, _MIXING)), None)
    if mixing is not None:
        kind = type(model.get_submodule(mixing)).__name__
        raise _refused(name, f"has {mixing} ({kind}), which mixes tokens outside of attention")
    for path, part in model.named_modules():
        if isinstance(part, nn.Embedding) and "position" in path.rpartition(".")[2] and part.padding_idx is not None:
            raise _refused(name, f"counts positions from the number of its padding token ({path})")
    if "position_ids" not in inspect.signature(model.forward).parameters:
        raise _refused(name, "takes no position_ids, and would count every rank's tokens from 0")
    if (heads := heads_of(model)) is not None:
        check_heads(*heads, sequence_ranks, name)


def heads_of(model: nn.Module) -> tuple[int, int] | None:
    """Query heads and key-value heads of a model's attention; None where its configuration does not say."""
    config: Any = getattr(model, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    heads = getattr(text, "num_attention_heads", None)
    return (heads, getattr(text, "num_key_value_heads", None) or heads) if isinstance(heads, int) else None


def check_length(num_tokens: int, sequence_ranks: int) -> None:
    """Raise PlanError unless so many ranks divide a sequence of ``num_tokens``."""
    if num_tokens % sequence_ranks:
        more = -(-num_tokens // sequence_ranks) * sequence_ranks
        raise PlanError(
            f"sequence_ranks: {sequence_ranks} ranks do not divide the {num_tokens:,} tokens of a sequence. Pad it to "
            f"{more:,} with ignored labels, or choose other numbers of tokens or ranks."
        )


def _refused(name: str, why: str) -> PlanError:
    return PlanError(f"sequence_ranks: {name} {why}. Train it with sequence_ranks 1.")


class _State:
    """What the wrapped forward of a model does."""

    def __init__(self, model: nn.Module, peers: Peers, shared: SharedAttention) -> None:
        self._model = model
        self._name = type(model).__name__
        self._peers = peers
        self._shared = shared
        self._num_losses = 0

    def forward(self, original: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        given = _by_name(original, args, kwargs)
        labels, shifted = given.get("labels"), given.get("shift_labels")
        if labels is None and shifted is None:
            if torch.is_grad_enabled():
                raise ScheduleError(
                    f"sequence_ranks: {self._name} is trained without labels, so that its loss is computed outside of "
                    f"it, from whole sequences. Put labels into the batch, or train with sequence_ranks 1."
                )
            self._shared.num_tokens = None
            return original(**given)
        whole: torch.Tensor = shifted_labels(labels) if shifted is None else shifted  # type: ignore[arg-type]
        self._peers.check_same(_numbers_in(given, whole.numel()))
        own = self._own(given, whole.shape[0], whole.shape[1])
        counted = given.get("num_items_in_batch")
        if counted is None:
            counted = (whole != IGNORED).sum()
        own_labels = self._cut(whole, 1).contiguous()
        own["labels"] = own_labels
        own.pop("shift_labels", None)
        own.pop("num_items_in_batch", None)
        self._shared.called.clear()
        self._num_losses = 0
        try:
            with REGISTRY.running(self._shared), self._loss_of(own_labels, counted / self._peers.num_ranks):
                output = original(**own)
        except (RuntimeError, ValueError) as error:
            if self._shared.called or isinstance(error, torch.OutOfMemoryError):
                raise
            raise _refused(self._name, f"{_ELSEWHERE}, which fails: {error}") from error
        if not self._num_losses:
            raise _refused(self._name, "computes its loss by itself, not by its loss_function")
        self._check_attention()
        return self._with_whole_loss(output)

    def _check_attention(self) -> None:
        """Refuse a model with a block that lets tokens see each other its own way: it would see a rank's alone."""
        called = tuple(self._shared.called)
        if not called:
            raise _refused(self._name, _ELSEWHERE)
        rows = {found.group(1) for name in called if (found := _IN_A_ROW.match(name)) is not None}
        for row in rows:
            for place, _ in self._model.get_submodule(row).named_children():
                if not any(name.startswith(f"{row}.{place}.") for name in called):
                    raise _refused(self._name, f"{_ELSEWHERE} in {row}.{place}")

    def _own(self, given: dict[str, Any], batch_size: int, num_tokens: int) -> dict[str, Any]:
        """The arguments for this rank's tokens."""
        check_length(num_tokens, self._peers.num_ranks)
        if given.get("use_cache") or any(given.get(name) is not None for name in _CACHES):
            raise ScheduleError("sequence_ranks: a cache of keys has its own tokens. Leave use_cache out.")
        keep = given.get("logits_to_keep", 0)
        if not isinstance(keep, int) or keep:
            raise ScheduleError("sequence_ranks: logits_to_keep names tokens of the whole sequence. Leave it out.")
        positions = given.get("position_ids")
        self._shared.num_tokens, self._shared.positions = num_tokens, positions
        own = {
            name: self._cut(value, 1)
            if isinstance(value, torch.Tensor) and name not in _WHOLE and value.shape[:2] == (batch_size, num_tokens)
            else value
            for name, value in given.items()
        }
        if positions is None:
            device = next(v.device for v in given.values() if isinstance(v, torch.Tensor))
            positions = torch.arange(num_tokens, device=device).unsqueeze(0)
        if positions.shape[-1] != num_tokens:
            raise ScheduleError(
                f"sequence_ranks: position_ids are of {positions.shape[-1]:,} tokens, labels of {num_tokens:,}. Give "
                f"every token its position."
            )
        own["position_ids"] = self._cut(positions, positions.dim() - 1)
        return own

    def _cut(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        """This rank's tokens of ``tensor``, which has all along ``dim``."""
        length = tensor.shape[dim] // self._peers.num_ranks
        return tensor.narrow(dim, self._peers.rank * length, length)

    @contextmanager
    def _loss_of(self, labels: torch.Tensor, counted: torch.Tensor | float) -> Iterator[None]:
        """Within the block, the model's loss function has these shifted labels, of which so many count."""
        model: Any = self._model
        original, had = model.loss_function, model.__dict__.get("_loss_function")

        def loss_function(*args: Any, **kwargs: Any) -> Any:
            self._num_losses += 1
            return original(*args, **{**kwargs, "shift_labels": labels, "num_items_in_batch": counted})

        model._loss_function = loss_function
        try:
            yield
        finally:
            if had is None:
                del model._loss_function
            else:
                model._loss_function = had

    def _with_whole_loss(self, output: Any) -> Any:
        if isinstance(output, Mapping):
            output["loss"] = mean_of_ranks(self._peers, output["loss"])  # type: ignore[index]
            return output
        return (mean_of_ranks(self._peers, output[0]), *output[1:])


def _numbers_in(given: Mapping[str, Any], most: int) -> dict[str, torch.Tensor | int]:
    """What tells one batch from another: tokens, labels, positions, counts; no tensor of more than ``most`` numbers."""
    return {
        name: value
        for name, value in given.items()
        if isinstance(value, int)
        or (isinstance(value, torch.Tensor) and not value.is_floating_point() and value.numel() <= most)
    }


def shifted_labels(labels: torch.Tensor) -> torch.Tensor:
    """(B, S): for each token the label of the next one; the last has none."""
    return nn.functional.pad(labels, (0, 1), value=IGNORED)[..., 1:]


def _by_name(forward: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """All arguments by name."""
    if not args:
        return dict(kwargs)
    bound = inspect.signature(forward).bind_partial(*args)
    return {**bound.arguments, **kwargs}
