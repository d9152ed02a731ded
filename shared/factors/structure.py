"""What a model is made of, as far as its hash says: module classes, buffers, and with a family's parameters the hash.

[Note: Hash of a structure]
``runtime/model/identity.py`` hashes the paths and classes of all modules, all parameters and all buffers.  A family of
workloads keeps the first and the last, blocks that are alike once, so that the hash of the same model with factorised
maps is known without making it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any, Protocol

from pydantic import NonNegativeInt

from ..basics.documents import FrozenModel
from .sizes import FACTORISED_CLASS

Facts = list[list[Any]]


class _Tensor(Protocol):
    """What a hash asks of a parameter whose strides are contiguous."""

    @property
    def name(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> str: ...
    @property
    def trainable(self) -> bool: ...


class ModelStructure(FrozenModel):
    """The modules of a model, and its buffers."""

    parts: tuple[tuple[str, NonNegativeInt], ...]
    """(path, index into ``kinds``) of stretches of modules, in the order of the module tree."""
    kinds: tuple[tuple[tuple[str, str], ...], ...]
    """Modules of a stretch: (path behind the stretch's, class)."""
    buffers: tuple[tuple[str, tuple[int, ...], str], ...]
    """(name, shape, element type as torch writes it)."""

    @classmethod
    def of(cls, modules: Sequence[tuple[str, str]], blocks: Collection[str], buffers: Facts) -> ModelStructure:
        """Of all modules (path, class) in order; each block is a stretch of its own."""
        stretches: list[tuple[str, list[tuple[str, str]]]] = []
        for path, module_class in modules:
            block = next((b for b in _with_parents(path) if b in blocks), "")
            if not stretches or stretches[-1][0] != block:
                stretches.append((block, []))
            stretches[-1][1].append((path[len(block) :], module_class))
        kinds = list(dict.fromkeys(tuple(found) for _, found in stretches))
        return cls(
            parts=tuple((block, kinds.index(tuple(found))) for block, found in stretches),
            kinds=tuple(kinds),
            buffers=tuple((name, tuple(shape), dtype) for name, shape, dtype in buffers),
        )

    def modules(self) -> Iterator[tuple[str, str]]:
        """All modules (path, class), in order."""
        return ((path + rest, found) for path, kind in self.parts for rest, found in self.kinds[kind])

    def hash_with(self, parameters: Sequence[_Tensor], factorised: Collection[str] = ()) -> str:
        """The model's hash with these parameters, and with the maps at the paths ``factorised`` in factors."""
        modules = ((path, FACTORISED_CLASS if path in factorised else found) for path, found in self.modules())
        return self.hash_of(modules, parameters)

    def hash_of(self, modules: Iterable[tuple[str, str]], parameters: Sequence[_Tensor]) -> str:
        """The hash of a model with these modules (path, class) in order, these parameters, and the same buffers."""
        listed = [[path, found] for path, found in modules]
        place = {path: number for number, (path, _) in enumerate(listed)}
        ordered = sorted(parameters, key=lambda parameter: place[parameter.name.rpartition(".")[0]])
        return structure_hash(
            listed,
            [[p.name, list(p.shape), f"torch.{p.dtype}", p.trainable] for p in ordered],
            [[name, list(shape), dtype] for name, shape, dtype in self.buffers],
        )


def structure_hash(modules: Facts, parameters: Facts, buffers: Facts) -> str:
    """The hash of modules [path, class], parameters [name, shape, dtype, trainable, ...] and buffers."""
    facts = json.dumps([modules, parameters, buffers], separators=(",", ":"))
    return hashlib.sha256(facts.encode()).hexdigest()[:16]


def _with_parents(path: str) -> Iterator[str]:
    while path:
        yield path
        path = path.rpartition(".")[0]
