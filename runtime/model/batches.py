"""Batches and losses: how a model is called, and what backward starts from."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any, Final

import torch
from torch import nn

from ...shared.basics.errors import WorkloadError

Batch = Mapping[str, Any] | Sequence[Any] | torch.Tensor
"""Keyword arguments of the model, positional ones, or a single tensor; tensors may lie deeper in each of them."""
Loss = Callable[[Any, Any], torch.Tensor]
"""Scalar loss from (output, batch)."""


_WRITTEN: Final = ("decoder_input_ids", "labels")
"""What of a batch is text where its input is none."""


class BatchRefusedError(WorkloadError):
    """The model's forward does not take the batch."""


class NothingLearntError(WorkloadError):
    """The loss depends on no trainable parameter."""


def call_model(model: nn.Module, batch: Batch) -> Any:
    """The model's output for one batch."""
    # Autocast keeps casts of weights until it ends: those of an earlier call would be no part of this one.
    torch.clear_autocast_cache()
    if isinstance(batch, torch.Tensor):
        output = model(batch)
    else:
        output = model(**batch) if isinstance(batch, Mapping) else model(*batch)
    torch.clear_autocast_cache()
    return output


def loss_of(model: nn.Module, batch: Batch, loss: Loss | None, *, kept: list[Any] | None = None) -> torch.Tensor:
    """The scalar that backward starts from: ``loss(output, batch)``, ``output.loss``, or the output itself.

    ``kept`` holds the output from here on, in the place of the one before, as a loop's variable does.  Raises
    WorkloadError if the model refuses the batch, or if there is no scalar, and NothingLearntError if it depends on no
    parameter.
    """
    value = scalar_of(model, batch, loss, kept=kept)
    if not value.requires_grad:
        raise NothingLearntError(
            f"the loss of {type(model).__name__} depends on no trainable parameter, though some require gradients: it "
            f"was computed without gradients, or detached. Leave detach(), item() and torch.no_grad() out of it."
        )
    return value


def scalar_of(model: nn.Module, batch: Batch, loss: Loss | None, *, kept: list[Any] | None = None) -> torch.Tensor:
    """As ``loss_of``, where nothing goes backward."""
    try:
        output = call_model(model, batch)
    except (TypeError, ValueError, RuntimeError, IndexError, KeyError) as error:
        if isinstance(error, torch.OutOfMemoryError):
            raise
        shapes = ", ".join(f"{name} {list(shape)}" for name, shape in batch_shapes(batch).items())
        raise BatchRefusedError(
            f"{type(model).__name__} refuses the batch ({shapes}): {type(error).__name__}: "
            + " ".join(str(error).split())
        ) from error
    if kept is not None:
        kept[:] = [output]
    value = loss(output, batch) if loss is not None else getattr(output, "loss", None)
    if value is None and isinstance(output, Mapping):
        value = output.get("loss")
    if value is None and isinstance(output, torch.Tensor):
        value = output
    if not isinstance(value, torch.Tensor) or value.numel() != 1:
        raise WorkloadError(
            f"{type(model).__name__} gives no scalar loss. Put labels into the batch, or pass loss=function(output, "
            f"batch)."
        )
    return value


def batch_tensors(batch: Batch) -> dict[str, torch.Tensor]:
    """The tensors of a batch by name or by place, those within mappings, lists and tuples as ``inputs.input_ids``."""
    if isinstance(batch, torch.Tensor):
        return {"0": batch}
    return {name: value for name, value in named_leaves(_entered(batch)) if isinstance(value, torch.Tensor)}


def with_tensors(batch: Batch, change: Callable[[str, torch.Tensor], torch.Tensor]) -> Batch:
    """The batch with ``change(name, tensor)`` in the place of each of its tensors, named as by ``batch_tensors``."""
    if isinstance(batch, torch.Tensor):
        return change("0", batch)
    held = _entered(batch)
    named = dict(named_leaves(held))
    changed = {name: change(name, value) if isinstance(value, torch.Tensor) else value for name, value in named.items()}
    return filled(held, changed)  # type: ignore[no-any-return]


def _entered(batch: Batch) -> Batch:
    """The batch as mapping, list or tuple, which ``named_leaves`` enters."""
    return batch if isinstance(batch, (Mapping, list, tuple)) else list(batch)


def named_leaves(batch: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """What a batch holds, within mappings, lists and tuples, by names such as ``input_ids`` and ``0.mask``."""
    parts = _parts(batch)
    if parts is None:
        yield path or "batch", batch
        return
    for key, part in parts:
        yield from named_leaves(part, f"{path}.{key}" if path else str(key))


def filled(batch: Any, named: Mapping[str, Any], path: str = "") -> Any:
    """A batch such as ``batch`` that holds what is ``named`` as ``named_leaves`` does."""
    parts = _parts(batch)
    if parts is None:
        return named[path or "batch"]
    made = {key: filled(part, named, f"{path}.{key}" if path else str(key)) for key, part in parts}
    if isinstance(batch, Mapping):
        if not isinstance(batch, MutableMapping):
            return made
        found: Any = copy.copy(batch)
        for key, part in made.items():
            found[key] = part
        return found
    values = list(made.values())
    return type(batch)(*values) if hasattr(batch, "_fields") else type(batch)(values)


def _parts(value: Any) -> list[tuple[Any, Any]] | None:
    if isinstance(value, Mapping):
        return list(value.items())
    if isinstance(value, Sequence) and isinstance(value, list | tuple):
        return list(enumerate(value))
    return None


def batch_shapes(batch: Batch) -> dict[str, tuple[int, ...]]:
    """The shape of every tensor of a batch."""
    return {name: tuple(tensor.shape) for name, tensor in batch_tensors(batch).items()}


def count_samples_and_tokens(batch: Batch, model: nn.Module | None = None) -> tuple[int, int]:
    """Samples (the first dim) and tokens (elements of integer inputs of two dims or more, else samples).

    Where ``model`` has a decoder and reads sounds or images, the tokens are those of the text that it writes.  Raises
    WorkloadError for a batch without tensors or with an empty first dim.
    """
    tensors = batch_tensors(batch)
    if not tensors:
        raise WorkloadError("the batch holds no tensors. Pass keyword arguments of the model as a dict of tensors.")
    by_last = {name.rpartition(".")[2]: tensor for name, tensor in reversed(tensors.items())}
    first = by_last.get("input_ids", next(iter(tensors.values())))
    if first.dim() == 0 or first.shape[0] == 0:
        raise WorkloadError(f"the batch's first tensor has shape {list(first.shape)}; it needs a non-empty first dim.")
    samples = int(first.shape[0])
    if first.is_floating_point() and getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        first = next((by_last[name] for name in _WRITTEN if _is_text(by_last.get(name), samples)), first)
    is_sequence = first.dim() >= 2 and not first.is_floating_point()
    return samples, max(1, first.numel()) if is_sequence else samples


def _is_text(tensor: torch.Tensor | None, samples: int) -> bool:
    """Whether it holds a row of integers for each sample; a plane of them are labels of pixels."""
    return tensor is not None and tensor.dim() == 2 and len(tensor) == samples and not tensor.is_floating_point()


def on_device(batch: Batch, device: torch.device) -> Batch:
    """The batch with its tensors on ``device``."""
    return with_tensors(batch, lambda _, tensor: tensor.to(device))
