"""Parameters of a model, and the parts of the model that use them."""

from __future__ import annotations

from enum import StrEnum
from functools import cached_property
from math import inf, prod
from typing import Self

from pydantic import Field, NonNegativeInt, model_validator

from ..basics.documents import FrozenModel
from .operations import DType
from .quantization import Quantization


class OuterSection(StrEnum):
    """The parts of the model outside its blocks."""

    PROLOGUE = "prologue"
    EPILOGUE = "epilogue"


class Uses(FrozenModel):
    """The sections that use a parameter, in the order of forward.

    A section begins where the model announces it and ends where the next one does: what the model does between two
    blocks belongs to the first of them.
    """

    forward: tuple[NonNegativeInt | OuterSection, ...] = Field(min_length=1)
    """Those whose forward reads it; of a parameter that nobody was seen to read, the one beside which it stands."""
    backward: tuple[NonNegativeInt | OuterSection, ...]
    """Those whose backward reads it, recomputation included.  The lookup of an embedding needs no weights there."""
    gradient: NonNegativeInt | OuterSection
    """The one whose backward is the last that adds to its gradient, or that reads it: from its end on it may be
    stepped."""

    @model_validator(mode="after")
    def _is_stepped_last(self) -> Self:
        first = min((in_forward_order(section) for section in self.backward), default=inf)
        if in_forward_order(self.gradient) > first:
            raise ValueError(f"its gradient is final in {self.gradient}, but a backward after that one reads it")
        return self


def in_forward_order(section: int | OuterSection) -> float:
    """A key that sorts sections in the order of forward."""
    if isinstance(section, OuterSection):
        return -1 if section is OuterSection.PROLOGUE else inf
    return section


class Parameter(FrozenModel):
    """One parameter tensor; tied names are listed once."""

    name: str
    shape: tuple[NonNegativeInt, ...]
    dtype: DType
    trainable: bool = True
    block: NonNegativeInt | None = None
    """Index of the block that alone uses it; None for all others."""
    uses: Uses | None = None
    """Who uses a parameter without a block; None if nobody knows: then both parts outside the blocks are taken to read
    it, in forward and backward, and the first of them to add to its gradient."""
    aliases: tuple[str, ...] = ()
    """Other names of the same tensor."""
    quantized: Quantization | None = None
    """How a weight is packed into the elements; None if it is not."""
    num_scalars: NonNegativeInt | None = None
    """Scalars of the model that the elements stand for: of a packed weight those that it unpacks to, of what unpacks
    one none.  None: one for each element."""
    gathered_dtype: DType | None = None
    """Element type that ranks which share it gather it in; None: its own."""

    @model_validator(mode="after")
    def _is_frozen_if_packed(self) -> Self:
        if self.trainable and self.num_scalars is not None:
            raise ValueError(f"{self.name} is packed, or unpacks another one, and cannot be trained")
        return self

    @cached_property
    def num_elements(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    @cached_property
    def scalars(self) -> int:
        """Scalars of the model that it stands for."""
        return self.num_elements if self.num_scalars is None else self.num_scalars

    @property
    def gathered_item_bytes(self) -> int:
        """Bytes of one gathered element."""
        return (self.gathered_dtype or self.dtype).item_bytes

    @cached_property
    def size_bytes(self) -> int:
        """Bytes of the tensor, without alignment."""
        return self.num_elements * self.dtype.item_bytes
