"""Optimizers by name: what steps the weights of a plan, and the gradients that it steps with on the host."""

from __future__ import annotations

from enum import StrEnum
from typing import Final


class Optimizer(StrEnum):
    """An optimizer, in the one implementation that the runtime carries out and predictions account for."""

    ADAMW = "adamw"
    """``torch.optim.AdamW``, fused: two moments as wide as the stepped weight, float32 at least."""
    ADAM = "adam"
    """``torch.optim.Adam``, fused; it keeps the same."""
    SGD = "sgd"
    """``torch.optim.SGD`` with momentum, fused: one tensor as wide as the stepped weight."""
    ADAFACTOR = "adafactor"
    """``torch.optim.Adafactor``, tensor by tensor: of a matrix one row and one column of second moments."""
    LION = "lion"
    """``bitsandbytes.optim.Lion``: one float32 moment."""
    ADAMW_8BIT = "adamw-8bit"
    """``bitsandbytes.optim.AdamW8bit``: two moments of one byte, with a float32 scale for every 256 scalars."""
    PAGED_ADAMW_8BIT = "paged-adamw-8bit"
    """``bitsandbytes.optim.PagedAdamW8bit``: the same, whose large tensors lie in CUDA's unified memory."""
    ADAMW_BF16 = "adamw-bf16"
    """``torch.optim.AdamW``, fused, over bfloat16 weights themselves: bfloat16 moments and no float32 master."""

    @classmethod
    def _missing_(cls, value: object) -> Optimizer | None:
        """The optimizer that people call so: ``AdamW``, ``adamw_8bit``, ``PagedAdamW8bit``, in any case."""
        if not isinstance(value, str):
            return None
        name = value.strip().casefold()
        name = name.rpartition(".")[2].replace("_", "-")
        return cls._value2member_map_.get(_USUAL_NAMES.get(name, name))  # type: ignore[return-value]

    @property
    def words(self) -> str:
        """The name in prose."""
        return _WORDS[self]

    @property
    def is_elementwise(self) -> bool:
        """Whether a tensor may be stepped in pieces of any length with the same result."""
        return self in _ELEMENTWISE

    @property
    def is_of_bitsandbytes(self) -> bool:
        """Whether the library bitsandbytes steps it; torch steps the others."""
        return self in _OF_BITSANDBYTES

    @property
    def is_quantized(self) -> bool:
        """Whether moments have one byte and a scale per block."""
        return self in _QUANTIZED


class HostGradients(StrEnum):
    """The element type in which the host adds up the gradients that arrive there, and steps with them."""

    PARAMETERS = "parameters"
    """The parameters' own: gradients are added where they arrive."""
    FLOAT32 = "float32"
    """float32 of narrower parameters: gradients arrive in the parameters' type and are added to float32 sums."""


_USUAL_NAMES: Final = {
    "adamw-bnb-8bit": "adamw-8bit",
    "adamw8bit": "adamw-8bit",
    "bf16-adamw": "adamw-bf16",
    "momentum": "sgd",
    "paged-adamw8bit": "paged-adamw-8bit",
    "pagedadamw8bit": "paged-adamw-8bit",
}
_WORDS: Final[dict[Optimizer, str]] = {
    Optimizer.ADAMW: "AdamW",
    Optimizer.ADAM: "Adam",
    Optimizer.SGD: "SGD with momentum",
    Optimizer.ADAFACTOR: "Adafactor",
    Optimizer.LION: "Lion",
    Optimizer.ADAMW_8BIT: "8-bit AdamW",
    Optimizer.PAGED_ADAMW_8BIT: "paged 8-bit AdamW",
    Optimizer.ADAMW_BF16: "bfloat16 AdamW",
}
_ELEMENTWISE: Final = frozenset({Optimizer.ADAMW, Optimizer.ADAM, Optimizer.SGD, Optimizer.ADAMW_BF16})
_QUANTIZED: Final = frozenset({Optimizer.ADAMW_8BIT, Optimizer.PAGED_ADAMW_8BIT})
_OF_BITSANDBYTES: Final = _QUANTIZED | {Optimizer.LION}
