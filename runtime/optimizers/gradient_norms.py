"""The norm of the gradients of a step, of all or of one block's, with those that it is made of."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.utils._foreach_utils import _group_tensors_by_device_and_dtype


@dataclass(frozen=True, slots=True)
class ClippedNorm:
    """How the gradients of one step keep the limit of their norm."""

    norm: torch.Tensor
    """Of all gradients, before they are clipped; a scalar on the host, NaN where losses are scaled."""
    factor: torch.Tensor
    """What every gradient is multiplied by; a scalar, at most 1 where losses are not scaled.  NaN: none is stepped."""
    norms: Mapping[int, torch.Tensor]
    """The norm of each gradient by the ``id`` of its parameter; empty where losses are scaled, or ranks have parts."""
    is_held: bool = False
    """Whether it is of a block that is held in this step, since its norm is not finite."""

    def or_held(self) -> ClippedNorm:
        """Itself, or held if the norm is not finite."""
        if self.norm.isfinite():
            return self
        return replace(self, factor=torch.tensor(torch.nan), is_held=True)


def clipped_norm(gradients: Mapping[nn.Parameter, torch.Tensor], max_norm: float) -> ClippedNorm:
    """The norms of ``gradients``, and the factor that keeps them at ``max_norm``.

    The same operations in the same order as ``torch.nn.utils.clip_grad_norm_``, so the bits are the same; that one
    gives the norm of each gradient to nobody, and taking it again would read all gradients again.
    """
    if not gradients:
        return ClippedNorm(torch.zeros(()), torch.ones(()), {})
    parameters, tensors = list(gradients), list(gradients.values())
    groups: Any = _group_tensors_by_device_and_dtype([[*tensors]], with_indices=True)
    norms: list[torch.Tensor] = []
    of: dict[int, torch.Tensor] = {}
    for [members], places in groups.values():
        found = torch._foreach_norm(members, 2.0)
        norms += found
        of.update((id(parameters[place]), norm) for place, norm in zip(places, found, strict=True))
    norm = torch.linalg.vector_norm(torch.stack([one.to(tensors[0].device) for one in norms]), 2.0).cpu()
    return ClippedNorm(norm, torch.clamp(max_norm / (norm + 1e-6), max=1.0), of)


def sum_of_squares(gradients: Iterable[torch.Tensor]) -> torch.Tensor:
    """Of all their scalars, a float64: ranks that have parts of gradients add these up."""
    total = torch.zeros((), dtype=torch.float64)
    for gradient in gradients:
        total += torch.linalg.vector_norm(gradient, dtype=torch.float64).square().cpu()
    return total


def clipped_by(squares: torch.Tensor, max_norm: float) -> ClippedNorm:
    """The norm from the sum of the squares of all gradients, and the factor that keeps these at ``max_norm``."""
    norm = squares.sqrt().float()
    return ClippedNorm(norm, torch.clamp(max_norm / (norm + 1e-6), max=1.0), {})
