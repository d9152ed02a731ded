"""A student: how its blocks differ from its teacher's, how they are initialised, what of them is learnt by which loss.

People write it as TOML:

    kind = "student"
    schema_version = 1
    keys_to_learn = ["subblock_attention", "subblock_ffn"]
    loss = "normalized_mse"

    [initialization]
    ffn = "prune"

    [all]
    num_key_value_heads = 4

    [block.3]
    intermediate_size = 1024

    [block.8-11]
    ffn = "absent"
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from enum import StrEnum
from itertools import pairwise
from typing import Annotated, Any, ClassVar, Final, Self

from pydantic import BeforeValidator, Field, PositiveInt, field_validator, model_validator

from ..basics.documents import Document, FrozenModel
from ..basics.suggestions import did_you_mean
from ..phases.distillation import KeyToLearn

_BLOCKS: Final = re.compile(r"(0|[1-9]\d{0,5})(?:-(0|[1-9]\d{0,5}))?")
_NUMBERS_OF_BLOCKS: Final = ("num_hidden_layers", "n_layer", "num_layers", "num_blocks")
"""What configurations call it."""
SIZES_OF: Final = {
    "ffn": ("intermediate_size", "num_local_experts", "num_experts_per_tok"),
    "attention": ("num_key_value_heads",),
}
"""Fields that say how large a part is."""


class BlockLoss(StrEnum):
    """How a student block's output is compared with the output of the teacher's block."""

    NORMALIZED_MSE = "normalized_mse"
    """Squared error over the target's squares, both summed over the whole batch."""
    BATCHED_NORMALIZED_MSE = "batched_normalized_mse"
    """The same for every sample by itself; the mean over samples."""
    VECTORWISE_NORMALIZED_MSE = "vectorwise_normalized_mse"
    """The same for every token by itself; the mean over tokens."""
    COSINE = "cosine"
    """1 minus the cosine of the angle between the vectors of a token; the mean over tokens."""
    MSE = "mse"
    """Mean squared error."""


class Subblock(StrEnum):
    """What stands in the place of a block's attention, or of its FFN."""

    FULL = "full"
    """A module as the teacher's, perhaps smaller."""
    LINEAR = "linear"
    """One linear map."""
    ABSENT = "absent"
    """Nothing: the block's input passes by."""


class FfnInitialization(StrEnum):
    """Which channels of the teacher's FFN a student's begins with."""

    COPY = "copy"
    """All; a width of its own is refused."""
    TRUNCATE = "truncate"
    """The first ones."""
    PRUNE = "prune"
    """Those with the largest mean absolute activation."""


class KeyValueHeadInitialization(StrEnum):
    """What fewer key-value heads begin with; each stands for a group of neighbours of the teacher's."""

    AVERAGE = "average"
    """The mean of its group."""
    FIRST = "first"
    """The first of its group."""


class ExpertInitialization(StrEnum):
    """Which experts stay where a student has fewer."""

    ROUTER = "router"
    """Those that the router gives the most weight."""
    FIRST = "first"
    """The first ones."""


class LinearInitialization(StrEnum):
    """What a linear map begins with that stands for attention or for an FFN."""

    FROM_TEACHER = "from_teacher"
    """The product of the teacher's maps on the way from input to output, without what is not linear between them."""
    RANDOM = "random"
    """As transformers initialises linear maps."""


class Initialization(FrozenModel):
    """What a student's parameters begin with.  What has the teacher's shape is copied."""

    ffn: FfnInitialization = FfnInitialization.TRUNCATE
    """Of narrower FFNs."""
    key_value_heads: KeyValueHeadInitialization = KeyValueHeadInitialization.AVERAGE
    """Of fewer key-value heads."""
    experts: ExpertInitialization = ExpertInitialization.ROUTER
    """Of fewer experts."""
    linear: LinearInitialization = LinearInitialization.FROM_TEACHER
    """Of linear maps in the place of attention or of an FFN."""


class BlockOverrides(FrozenModel):
    """What differs from the teacher's block.  What is left out does not."""

    intermediate_size: PositiveInt | None = None
    """Channels of the FFN, or of each expert."""
    num_key_value_heads: PositiveInt | None = None
    """Key-value heads of attention."""
    num_local_experts: PositiveInt | None = None
    """Experts."""
    num_experts_per_tok: PositiveInt | None = None
    """Experts that each token goes through."""
    ffn: Subblock | None = None
    """What stands in the place of the FFN, or of the experts."""
    attention: Subblock | None = None
    """What stands in the place of attention."""

    @model_validator(mode="before")
    @classmethod
    def _keeps_the_number_of_blocks(cls, content: Any) -> Any:
        named = [name for name in _NUMBERS_OF_BLOCKS if isinstance(content, Mapping) and name in content]
        if named:
            raise ValueError(
                f"{named[0]} cannot differ: a student has as many blocks as its teacher, each learning from the "
                f"teacher's block of its number. Leave blocks out with ffn = 'absent' and attention = 'absent'"
            )
        return content

    @model_validator(mode="after")
    def _has_no_sizes_of_what_is_not_there(self) -> Self:
        for part, sizes in SIZES_OF.items():
            kind, stated = getattr(self, part), [size for size in sizes if getattr(self, size) is not None]
            if stated and kind in (Subblock.LINEAR, Subblock.ABSENT):
                raise ValueError(f"{stated[0]} is stated beside {part} = '{kind}', which has none. State one of them")
        return self

    @property
    def stated(self) -> dict[str, Any]:
        """The fields that are given, with their values."""
        return {name: value for name in type(self).model_fields if (value := getattr(self, name)) is not None}


def _canonical_keys(value: Any) -> Any:
    """Keys to learn, each once and in order.  Raises ValueError."""
    keys = [value] if isinstance(value, str) else value
    if not isinstance(keys, list | tuple) or not all(isinstance(key, str) for key in keys):
        raise ValueError("name one key to learn, or a list of them, in quotes")
    if not keys:
        raise ValueError(f"nothing is to be learnt. Name keys of {', '.join(KeyToLearn)}")
    for key in keys:
        if key not in set(KeyToLearn):
            raise ValueError(f"there is no key to learn {key!r:.60}. {did_you_mean(key, KeyToLearn)}")
    if KeyToLearn.ENTIRE_BLOCK in keys and len(set(keys)) > 1:
        others = sorted(set(keys) - {KeyToLearn.ENTIRE_BLOCK})
        raise ValueError(f"entire_block holds {', '.join(others)} already. Name it alone, or the others without it")
    return tuple(sorted(set(keys)))


class Student(Document):
    """A student in terms of its teacher."""

    KIND: ClassVar[str] = "student"

    keys_to_learn: Annotated[tuple[KeyToLearn, ...], BeforeValidator(_canonical_keys)] = (KeyToLearn.ENTIRE_BLOCK,)
    """What of every block is learnt, one key or several; all else stays as it was initialised."""
    loss: BlockLoss = BlockLoss.NORMALIZED_MSE
    """The loss of every block."""
    initialization: Initialization = Field(default_factory=Initialization)
    """What the student begins with."""
    all: BlockOverrides = Field(default_factory=BlockOverrides)
    """What differs in all blocks that have it."""
    block: dict[str, BlockOverrides] = Field(default_factory=dict)
    """What differs in one block (``3``) or in several (``8-11``), counted from 0; it comes before ``all``."""

    @field_validator("loss", mode="before")
    @classmethod
    def _known_loss(cls, value: Any) -> Any:
        if isinstance(value, str) and value not in set(BlockLoss):
            raise ValueError(f"there is no loss {value!r:.60}. {did_you_mean(value, BlockLoss)}")
        return value

    @field_validator("block")
    @classmethod
    def _each_block_once(cls, value: dict[str, BlockOverrides]) -> dict[str, BlockOverrides]:
        stretches = sorted((block_range(key), key) for key in value)
        for ((_, last), key), ((first, _), other) in pairwise(stretches):
            if first <= last:
                raise ValueError(f"block {first} is in [block.{key}] and in [block.{other}]. State it once")
        return value

    @property
    def named_blocks(self) -> Iterator[tuple[int, BlockOverrides]]:
        """Every block that is named, by its number, with what differs there alone."""
        for key, overrides in self.block.items():
            first, last = block_range(key)
            for number in range(first, last + 1):
                yield number, overrides


def block_range(key: str) -> tuple[int, int]:
    """First and last block of ``"3"`` or ``"8-11"``.  Raises ValueError."""
    found = _BLOCKS.fullmatch(key)
    if found is None:
        raise ValueError(f"{key!r:.60} names no blocks. Write [block.3], or [block.8-11] for blocks 8 to 11")
    first, last = int(found[1]), int(found[2] or found[1])
    if last < first:
        raise ValueError(f"[block.{key}] ends before it begins. Write [block.{last}-{first}]")
    return first, last
