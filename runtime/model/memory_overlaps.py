"""Parameters that lie in the memory of another one, which a chunk cannot keep.

``lm_head.weight = nn.Parameter(embedding.weight)`` makes a second parameter over the same memory: a plain loop steps it
twice, by two gradients.  In chunks every parameter has memory of its own, so that a step of one would not be seen in
the other; and a buffer that is a view of a parameter would keep what that parameter was.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import combinations

import torch
from torch import nn


@dataclass(frozen=True)
class _Place:
    """A tensor and its extent in its storage."""

    name: str
    tensor: torch.Tensor
    is_parameter: bool
    first_bytes: int
    end_bytes: int


def overlap_of(model: nn.Module) -> str | None:
    """What is wrong and what to do about it, if a parameter shares bytes with another parameter or a buffer.

    Parameters that are one object under several names are tied, and no overlap; neither are views side by side.
    """
    by_storage: dict[int, list[_Place]] = {}
    with torch._C.DisableTorchFunctionSubclass():
        for place in (*_places(model.named_parameters(), True), *_places(model.named_buffers(), False)):
            by_storage.setdefault(place.tensor.untyped_storage()._cdata, []).append(place)
        for places in by_storage.values():
            for one, other in combinations(places, 2):
                if one.is_parameter and _overlap(one, other):
                    kind = "parameter" if other.is_parameter else "buffer"
                    remedy = (
                        f"To tie them, assign the parameter itself (nn.Parameter(x) makes another one over the same "
                        f"memory); else give {other.name} its own by clone()."
                    )
                    return (
                        f"parameter {one.name} and {kind} {other.name} are two tensors over the same memory. {remedy}"
                    )
    return None


def _places(named: Iterable[tuple[str, torch.Tensor]], is_parameter: bool) -> list[_Place]:
    found = []
    for name, tensor in named:
        if tensor.numel() > 0 and not nn.parameter.is_lazy(tensor):
            reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
            first_bytes = int(tensor.storage_offset()) * tensor.element_size()
            end_bytes = first_bytes + (reach + 1) * tensor.element_size()
            found.append(_Place(name, tensor, is_parameter, first_bytes, end_bytes))
    return found


def _overlap(one: _Place, other: _Place) -> bool:
    if one.end_bytes <= other.first_bytes or other.end_bytes <= one.first_bytes:
        return False
    # Columns of one matrix reach past each other without a byte in common: only a map of the bytes tells.
    end_bytes = max(one.end_bytes, other.end_bytes)
    if one.tensor.is_contiguous() and other.tensor.is_contiguous():
        return True
    return bool((_bytes_of(one, end_bytes) & _bytes_of(other, end_bytes)).any())


def _bytes_of(place: _Place, end_bytes: int) -> torch.Tensor:
    width = place.tensor.element_size()
    taken = torch.zeros(end_bytes, dtype=torch.bool, device="cpu")
    strides = tuple(stride * width for stride in place.tensor.stride())
    taken.as_strided((*place.tensor.shape, width), (*strides, 1), place.first_bytes).fill_(True)
    return taken
