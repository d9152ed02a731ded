"""How weights are packed into few bits."""

from __future__ import annotations

import re
from enum import StrEnum
from typing import Final, Self

from pydantic import PositiveInt, field_validator, model_validator

from ..basics.documents import FrozenModel
from ..basics.errors import WorkloadError
from .operations import DType

BLOCKSIZE: Final = 64
"""Scalars that share a scale, by default (QLoRA, arXiv 2305.14314, section 3)."""
NESTED_BLOCKSIZE: Final = 256
"""Scales that share one of their own, where they are quantized themselves."""
NUM_CODES: Final = 16
"""Values that four bits can have."""
NUM_NESTED_CODES: Final = 256
BLOCKSIZES: Final = (32, 64, 128, 256, 512, 1024, 2048, 4096)
"""Those that bitsandbytes has kernels for."""
GROUP_SIZE: Final = 128
"""Inputs of an output that share a scale and a zero, by default (GPTQ, arXiv 2210.17323, section 4)."""
GROUP_SIZES: Final = (32, 64, 128, 256, 512, 1024)
WORD_BITS: Final = 32
"""Of the whole numbers that GPTQ's layout packs weights and zeros into."""


class QuantizedType(StrEnum):
    """Types of packed weights: by the names of bitsandbytes, and the layout of GPTQ."""

    NF4 = "nf4"
    """Four bits, at the quantiles of a normal distribution."""
    FP4 = "fp4"
    """Four bits, as floating-point numbers."""
    INT8 = "int8"
    """Eight bits, a scale for each output (LLM.int8, arXiv 2208.07339)."""
    GPTQ = "gptq"
    """Four bits in whole numbers of 32, a scale and a zero for each group of inputs of each output; unpacked by torch's
    own operations, one after the other."""
    GPTQ_8BIT = "gptq-8bit"
    """The same in eight bits."""

    @property
    def is_grouped(self) -> bool:
        """Whether it is the layout of GPTQ."""
        return self in (QuantizedType.GPTQ, QuantizedType.GPTQ_8BIT)

    @property
    def bits(self) -> int:
        """Of one weight."""
        return 8 if self in (QuantizedType.INT8, QuantizedType.GPTQ_8BIT) else 4

    @property
    def blocksizes(self) -> tuple[int, ...]:
        """Scalars that may share a scale; none where it is all of an output."""
        if self.is_grouped:
            return GROUP_SIZES
        return () if self is QuantizedType.INT8 else BLOCKSIZES

    @property
    def usual_blocksize(self) -> int | None:
        """How many do unless it is said; None where it is all of an output."""
        if self.is_grouped:
            return GROUP_SIZE
        return None if self is QuantizedType.INT8 else BLOCKSIZE


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
        if self.type.is_grouped and self.double:
            raise ValueError(f"{self.type} has scales in 16 bits: no double quantization")
        if self.type.is_grouped and self.blocksize is None:
            raise ValueError(f"{self.type} has a scale for each group of inputs: a block size is missing")
        return self

    @property
    def words(self) -> str:
        """``"nf4, double quantized"``."""
        together = "groups" if self.type.is_grouped else "blocks"
        is_usual = self.blocksize in (None, self.type.usual_blocksize)
        blocks = "" if is_usual else f" in {together} of {self.blocksize}"
        return f"{self.type}{blocks}{', double quantized' if self.double else ''}"

    def check_sizes(self, path: str, num_in: int, num_out: int) -> None:
        """Raise WorkloadError if the linear map at ``path``, of such sizes, cannot be packed so."""
        if not self.type.is_grouped or self.blocksize is None:
            return
        for number, what, divisor in (
            (num_in, "inputs", self.blocksize),
            (num_in, "inputs", WORD_BITS),
            (num_out, "outputs", WORD_BITS),
        ):
            if number % divisor:
                raise WorkloadError(
                    f"{path} cannot be packed to {self.words}: it has {number:,} {what}, which is no multiple of "
                    f"{divisor}. Take groups that divide its inputs, or pack to nf4."
                )


FIRST_RELEASE: Final = (0, 39, 0)
"""The first one of bitsandbytes with weights of four bits."""
FORGETTING_RELEASE: Final = (0, 43, 2)
"""The first one whose products with four bits keep nothing of their input."""
DIRECT_RELEASE: Final = (0, 50, 0)
"""The first one whose forward unpacks four bits to the type that it computes in."""
LATEST_RELEASE: Final = "0.50.2"
"""The latest one that was read."""
UNPACKED_TO: Final = (DType.FLOAT16, DType.BFLOAT16, DType.FLOAT32)
_RELEASE: Final = re.compile(r"(\d+)\.(\d+)(?:\.(\d+))?")


class PackedProducts(FrozenModel):
    """Products with packed weights as a release of bitsandbytes makes them, for predictions of what others run.

    Read in the wheels of 0.39.0, 0.41.0 to 0.50.2 (``autograd/_functions.py``; docs/decisions/0040).
    """

    release: str
    """``"0.41.1"``."""
    packed_from: DType | None = None
    """Element type that weights of four bits had when they were packed, and are unpacked to; None: that of the map."""

    @field_validator("release")
    @classmethod
    def _is_known(cls, release: str) -> str:
        found = _RELEASE.fullmatch(release)
        if found is None or tuple(int(part or 0) for part in found.groups()) < FIRST_RELEASE:
            first = ".".join(map(str, FIRST_RELEASE))
            raise ValueError(f"{release!r} is no release of bitsandbytes that is known; write one from {first} on")
        return release

    @field_validator("packed_from")
    @classmethod
    def _is_unpacked_to(cls, dtype: DType | None) -> DType | None:
        if dtype not in (None, *UNPACKED_TO):
            raise ValueError(f"weights are unpacked to {', '.join(UNPACKED_TO)} (got {dtype})")
        return dtype

    @property
    def words(self) -> str:
        """``"products of bitsandbytes 0.41.1, with weights that were packed from float16"``."""
        packed = "" if self.packed_from is None else f", with weights that were packed from {self.packed_from}"
        return f"products of bitsandbytes {self.release}{packed}"

    @property
    def version(self) -> tuple[int, int, int]:
        """``(0, 41, 1)``."""
        found = _RELEASE.fullmatch(self.release)
        assert found is not None
        major, minor, patch = (int(part or 0) for part in found.groups())
        return major, minor, patch

    @property
    def casts_ahead(self) -> bool:
        """Whether forward unpacks four bits to the type that they were packed from, and casts then."""
        return self.version < DIRECT_RELEASE

    def keeps_inputs(self, to: QuantizedType) -> bool:
        """Whether a map keeps what it reads until backward, for the gradient of a weight that has none."""
        return to is QuantizedType.INT8 or self.version < FORGETTING_RELEASE

    def reason_against(self, to: QuantizedType) -> str | None:
        """Why weights of this type have no such products; None if they have."""
        if to.is_grouped:
            return f"{to} is not bitsandbytes'"
        if to is QuantizedType.INT8 and self.packed_from is not None:
            return "int8 is unpacked to the type of the map's input, whatever it was packed from"
        return None
