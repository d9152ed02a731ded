"""Factorisations on the disk: a decomposition that was made once is read, not made again."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Final

import safetensors
import torch
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors

from ...shared.basics.documents import write_atomically
from ...shared.factors.sizes import FACTOR_NAMES
from .factorisation import Factors

_VERSION: Final = "1"
"""Of how factors are made: another one is another key."""
_DIGEST_BYTES: Final = hashlib.sha256().digest_size
"""Before the tensors in every file: that of all that follows."""


class FactorCache:
    """A folder of factorised weights, by what these and the rank are."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.num_hits = 0
        """Factorisations that were read."""
        self.num_made = 0
        """Factorisations that were missing, and are there now."""

    def factors(self, weight: torch.Tensor, frozen: int, decompose: Callable[[], Factors]) -> Factors:
        """The factors of ``weight`` (n, m) with ``frozen`` directions apart, where it lies; else of ``decompose``.

        What is damaged, of another weight or unreadable counts as missing.  Raises FileError if new factors cannot be
        written.
        """
        key = _key(weight, frozen)
        path = self._folder / f"{key}.safetensors"
        found = _read(path, weight, frozen)
        if found is not None:
            self.num_hits += 1
            return found
        made = decompose()
        content = save_tensors({name: factor.detach().cpu() for name, factor in made.named().items()})
        write_atomically(path, hashlib.sha256(content).digest() + content)
        self.num_made += 1
        return made

    def __str__(self) -> str:
        """What came of it, in words."""
        return (
            f"factors of {self.num_hits + self.num_made} weights: {self.num_hits} read from {self._folder}, "
            f"{self.num_made} decomposed and kept there"
        )


def _key(weight: torch.Tensor, frozen: int) -> str:
    """A hash of every value, of shape and element type, of how many directions are frozen, and of the version."""
    values = weight.detach().cpu().contiguous()
    digest = hashlib.sha256(repr((_VERSION, frozen, tuple(values.shape), str(values.dtype))).encode())
    digest.update(values.view(torch.uint8).numpy().data if values.dim() else b"")
    return digest.hexdigest()


def _read(path: Path, weight: torch.Tensor, frozen: int) -> Factors | None:
    try:
        read = path.read_bytes()
        digest, content = read[:_DIGEST_BYTES], read[_DIGEST_BYTES:]
        found = load_tensors(content) if hashlib.sha256(content).digest() == digest else {}
    except (OSError, safetensors.SafetensorError):
        return None
    num_out, num_in = weight.shape
    trained = min(num_out, num_in) - frozen
    shapes = ((num_out, frozen), (frozen,), (frozen, num_in), (num_out, trained), (trained,), (trained, num_in))
    fits = set(found) == set(FACTOR_NAMES) and all(
        tuple(found[name].shape) == shape and found[name].dtype == weight.dtype
        for name, shape in zip(FACTOR_NAMES, shapes, strict=True)
    )
    if not fits:
        return None
    return Factors(**{name: found[name].to(weight.device) for name in FACTOR_NAMES})
