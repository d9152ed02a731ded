"""How weights are packed into few bits."""

from __future__ import annotations

from enum import StrEnum
from typing import Final, Self

from pydantic import PositiveInt, model_validator

from ..basics.documents import FrozenModel

BLOCKSIZE: Final = 64
"""Scalars that share a scale, by default (QLoRA, arXiv 2305.14314, section 3)."""
NESTED_BLOCKSIZE: Final = 256
"""Scales that share one of their own, where they are quantized themselves."""
NUM_CODES: Final = 16
"""Values that four bits can have."""
NUM_NESTED_CODES: Final = 256
BLOCKSIZES: Final = (32, 64, 128, 256, 512, 1024, 2048, 4096)
"""Those that bitsandbytes has kernels for."""


class QuantizedType(StrEnum):
    """Types of packed weights, by the names of bitsandbytes."""

    NF4 = "nf4"
    """Four bits, at the quantiles of a normal distribution."""
    FP4 = "fp4"
    """Four bits, as floating-point numbers."""
    INT8 = "int8"
    """Eight bits, a scale for each output (LLM.int8, arXiv 2208.07339)."""


class Quantization(FrozenModel):
    """How a weight is packed."""

    type: QuantizedType
    double: bool = False
    """Whether the scales of blocks are quantized themselves."""
    blocksize: PositiveInt | None = None
    """Scalars that share a scale; None for a scale for each output."""

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.type is QuantizedType.INT8 and (self.double or self.blocksize is not None):
            raise ValueError("int8 has one scale for each output: neither a block size nor double quantization")
        return self

    @property
    def words(self) -> str:
        """``"nf4, double quantized"``."""
        blocks = f" in blocks of {self.blocksize}" if self.blocksize not in (None, BLOCKSIZE) else ""
        return f"{self.type}{blocks}{', double quantized' if self.double else ''}"
