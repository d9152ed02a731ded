"""Which storages hold tensors of the sequence's length squared, as operations make them."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from ...shared.phases.quadratic import SHORTEST_SQUARE
from ..model.nested_tensors import has_storage, tensors_in


class SquareTensors:
    """Counts the bytes of storages of which somebody has seen a tensor with two dims of a sequence's length.

    [Note: What is a square]
    A tensor of numbers with as many features as the sequence has tokens looks alike: of a model with parameters of that
    size, or a batch of it, floating-point tensors count from four dims on, if the last two are the sequence's.  Scores
    and masks have such views.  Integers and truth values have no features.
    """

    def __init__(self, model: nn.Module, batch: Sequence[torch.Tensor]) -> None:
        texts = [tensor for tensor in batch if tensor.dim() > 1 and not tensor.is_floating_point()]
        self._lengths = {tensor.shape[1] for tensor in texts if tensor.shape[1] >= SHORTEST_SQUARE}
        parameters = list(model.parameters())
        self._widths = {dim for parameter in parameters for dim in parameter.shape} | {t.shape[0] for t in texts}
        self._known: dict[int, Any] = {t.untyped_storage()._cdata: None for t in (*parameters, *model.buffers())}
        self.total_bytes = 0
        """Of all that are alive."""

    def note(self, result: Any) -> None:
        """See what an operation has given."""
        if not self._lengths:
            return
        for tensor in tensors_in(result):
            if self._is_square(tensor) and has_storage(tensor):
                self._add(tensor.untyped_storage())

    def _add(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key in self._known:
            return
        size_bytes = storage.nbytes()
        self._known[key] = weakref.ref(storage, lambda _: self._forget(key, size_bytes))
        self.total_bytes += size_bytes

    def _forget(self, key: int, size_bytes: int) -> None:
        self._known.pop(key, None)
        self.total_bytes -= size_bytes

    def _is_square(self, tensor: torch.Tensor) -> bool:
        """Whether two dims are a sequence's; see [Note: What is a square]."""
        found = [dim for dim in tensor.shape if dim in self._lengths]
        if len(found) < 2:
            return False
        if not tensor.is_floating_point() or not self._widths.intersection(found):
            return True
        return tensor.dim() >= 4 and all(dim in self._lengths for dim in tensor.shape[-2:])
