"""Factors of weights that lie dense in files: made target by target, when they are read.

Neither the dense model nor all factors need lie in one place at once: a dense weight is read, decomposed and let go,
and its factors go when each of them has been read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import nn

from .cache import FactorCache
from .factorisation import Factors, factorise
from .linear import factor_names
from .orthogonal_model import orthogonal_maps


@dataclass(frozen=True, slots=True)
class SavedFactor:
    """A factor of a dense weight."""

    weight: str
    """What the model calls the weight where it is dense."""
    factor: str
    """What the factor is called in its map."""
    shape: tuple[int, ...]
    dense_shape: tuple[int, ...]
    siblings: int
    """How many factors the weight has."""
    frozen: int
    is_transposed: bool
    """Whether the dense weight is (m, n)."""


@dataclass
class FactorReader:
    """Makes factors, and keeps those of the latest weight until all have been read."""

    cache: FactorCache | None = None
    """Where decompositions that were made before lie."""
    _latest: dict[str, Factors] = field(default_factory=dict)
    _read: set[str] = field(default_factory=set)
    num_made: int = 0
    """Decompositions so far."""

    def read(self, saved: SavedFactor, dtype: torch.dtype, dense: Callable[[], torch.Tensor]) -> torch.Tensor:
        """One factor in ``dtype``; ``dense`` gives the weight.  Raises WorkloadError if that is not finite."""
        if saved.weight not in self._latest:
            self._latest.clear()
            self._read.clear()
            self._latest[saved.weight] = self.make(saved, dtype, dense)
        found = self._latest[saved.weight].named()[saved.factor]
        self._read.add(saved.factor)
        if len(self._read) == saved.siblings:
            self._latest.clear()
        return found

    def make(self, saved: SavedFactor, dtype: torch.dtype, dense: Callable[[], torch.Tensor]) -> Factors:
        """All factors of the weight that ``saved`` is of, as of ``read``."""
        read = dense().to(dtype)
        weight = read.t() if saved.is_transposed else read

        def decompose() -> Factors:
            self.num_made += 1
            return factorise(weight, saved.frozen, name=saved.weight)

        return decompose() if self.cache is None else self.cache.factors(weight, saved.frozen, decompose)


def saved_factors(model: nn.Module) -> Mapping[str, SavedFactor]:
    """The factors of ``model`` that are to be made of dense weights, by their names."""
    found: dict[str, SavedFactor] = {}
    for path, module in orthogonal_maps(model).items():
        names = factor_names(path, module)
        for factor, name in names.items():
            shape = tuple(getattr(module, factor).shape)
            found[name] = SavedFactor(
                weight=f"{path}.weight",
                factor=factor,
                shape=shape,
                dense_shape=tuple(module.weight.shape),
                siblings=len(names),
                frozen=module.num_frozen,
                is_transposed=module.is_transposed,
            )
    return found
