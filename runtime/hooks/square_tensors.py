"""Which storages hold tensors of the sequence's length squared, as operations make them."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from functools import partial
from typing import Any, Final

import torch
from torch import nn

from ...shared.phases.quadratic import SHORTEST_SQUARE
from ..model.nested_tensors import has_storage, tensors_in

_BATCHED_PRODUCTS: Final = (torch.ops.aten.bmm, torch.ops.aten.baddbmm)


class SquareTensors:
    """Counts the bytes of storages of which somebody has seen a tensor with two dims of a sequence's length.

    [Note: What is a square]
    A tensor of numbers with as many features as the sequence has tokens looks alike: of a model with parameters of that
    size, or a batch of it, floating-point tensors count from four dims on, if the last two are the sequence's, and if
    they come from a square.  Scores and masks have such views.  Features have them too where all heads stand side by
    side (DeepSeek's keys and values), but come from a product with a weight, or from parts of what has features.
    Integers and truth values have no features.

    [Note: Where squares come from]
    From another square; from nothing, as a mask that is filled; from a batch of products, as scores are, while what a
    linear map gives is one product of matrices; or from a row and a column that are laid across each other, as
    distances of positions are.
    """

    def __init__(self, model: nn.Module, batch: Sequence[torch.Tensor]) -> None:
        texts = [tensor for tensor in batch if tensor.dim() > 1 and not tensor.is_floating_point()]
        self._lengths = {tensor.shape[1] for tensor in texts if tensor.shape[1] >= SHORTEST_SQUARE}
        parameters = list(model.parameters())
        self._widths = {dim for parameter in parameters for dim in parameter.shape} | {t.shape[0] for t in texts}
        self._known: dict[int, Any] = {t.untyped_storage()._cdata: None for t in (*parameters, *model.buffers())}
        self._squares: dict[int, Any] = {
            tensor.untyped_storage()._cdata: tensor for tensor in batch if self._is_long_twice(tensor)
        }
        """Storages that hold a square by what they come from, whether somebody has seen four dims of it or not."""
        self.total_bytes = 0
        """Of all that are alive."""

    def note(self, operator: Any, given: Any, result: Any) -> None:
        """See what an operation has given, and what it was given."""
        if not self._lengths:
            return
        for tensor in tensors_in(result):
            if self._is_long_twice(tensor) and has_storage(tensor):
                storage = tensor.untyped_storage()
                if self._comes_from_square(operator, given, tensor):
                    key = storage._cdata
                    self._squares[key] = weakref.ref(storage, partial(self._forget_square, key))
                if self._is_square(tensor):
                    self._add(storage)

    def _comes_from_square(self, operator: Any, given: Any, result: torch.Tensor) -> bool:
        """See [Note: Where squares come from]."""
        if not result.is_floating_point():
            return True
        inputs = [tensor for tensor in tensors_in(given) if has_storage(tensor)]
        if not inputs or any(tensor.untyped_storage()._cdata in self._squares for tensor in inputs):
            return True
        if getattr(operator, "overloadpacket", None) in _BATCHED_PRODUCTS:
            return not any(tensor.untyped_storage()._cdata in self._known for tensor in inputs)
        if any(self._is_long_twice(tensor) for tensor in inputs):
            return False
        is_row = [tensor.dim() == 1 or (tensor.dim() > 1 and tensor.shape[-2] == 1) for tensor in inputs]
        is_column = [tensor.dim() > 1 and tensor.shape[-1] == 1 for tensor in inputs]
        return any(is_row) and any(is_column)

    def _add(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key in self._known:
            return
        size_bytes = storage.nbytes()
        self._known[key] = weakref.ref(storage, lambda _: self._forget(key, size_bytes))
        self.total_bytes += size_bytes

    def _forget_square(self, key: int, _: object) -> None:
        self._squares.pop(key, None)

    def _forget(self, key: int, size_bytes: int) -> None:
        self._known.pop(key, None)
        self.total_bytes -= size_bytes

    def _is_long_twice(self, tensor: torch.Tensor) -> bool:
        return sum(dim in self._lengths for dim in tensor.shape) > 1

    def _is_square(self, tensor: torch.Tensor) -> bool:
        """Whether two dims are a sequence's; see [Note: What is a square]."""
        if not self._is_long_twice(tensor):
            return False
        if not tensor.is_floating_point() or not self._widths.intersection(self._lengths, tensor.shape):
            return True
        has_place = tensor.dim() >= 4 and all(dim in self._lengths for dim in tensor.shape[-2:])
        return has_place and tensor.untyped_storage()._cdata in self._squares
