"""Packing: several samples laid end to end in one row of a batch, and what their lengths decide.

[Note: Lengths' squares]
Each sample attends to itself alone.  A kernel that knows where samples end (flash attention with lengths) so does a
sample's arithmetic for each, and of a row it matters nothing but the sum of the squares of lengths.  Rows that are
filled with samples of any distribution have tokens / E[l] of them, and the sum of squares tokens * E[l^2] / E[l].
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import Final, Self

from pydantic import PositiveFloat, PositiveInt, model_validator

from ..basics.documents import FrozenModel, read_mapping
from ..basics.errors import WorkloadError

_FORMS: Final = (
    "Give the lengths of one row (512,1024,2560), a JSON file with the lengths of samples, or uniform:LEAST:MOST"
)
_LONGEST: Final = 2**40


class Packing(FrozenModel):
    """Lengths of the samples in each row of a batch, as far as they matter."""

    row_tokens: PositiveInt
    """Tokens of a row, of all of its samples together."""
    squares: PositiveInt
    """Sum of the squares of the lengths of a row's samples; see [Note: Lengths' squares]."""
    longest: PositiveInt
    """Tokens of the longest sample."""
    samples_per_row: PositiveFloat
    """How many samples a row has; on average, where lengths are a distribution."""
    is_masked: bool = False
    """Whether a mask of a row's length squared keeps samples apart; else the attention kernel knows where they end."""

    @model_validator(mode="after")
    def _is_possible(self) -> Self:
        if self.longest > self.row_tokens:
            raise ValueError(f"a sample of {self.longest} tokens is longer than its row of {self.row_tokens}")
        if not self.row_tokens <= self.squares <= self.row_tokens * self.longest:
            raise ValueError(
                f"squares is {self.squares}; of samples of at most {self.longest} tokens in a row of "
                f"{self.row_tokens} they are {self.row_tokens} to {self.row_tokens * self.longest}"
            )
        return self

    @property
    def equal_length(self) -> int:
        """Tokens of samples of one length that attend as much: the mean of lengths, each counted once per token."""
        return max(1, round(self.squares / self.row_tokens))

    def packed_flops(self, flops: int) -> int:
        """Of attention within samples, where it takes ``flops`` over whole rows, the causal half or all of it."""
        return int(Fraction(flops * self.squares, self.row_tokens**2))


def packing_of(lengths: Sequence[int], row_tokens: int, *, is_masked: bool = False) -> Packing:
    """Rows of so many tokens, filled with samples of ``lengths``, all alike likely.

    Where the lengths make up one row, they are that row's.  Raises WorkloadError if one is no length, or too long.
    """
    if not lengths:
        raise WorkloadError(f"packed lengths: there are none. {_FORMS}.")
    for length in lengths:
        if isinstance(length, bool) or not isinstance(length, int) or not 1 <= length <= _LONGEST:
            raise WorkloadError(f"packed lengths: {length!r} is no number of tokens from 1 on. {_FORMS}.")
    total = sum(lengths)
    squares = Fraction(row_tokens * sum(length * length for length in lengths), total)
    return _packing(row_tokens, squares, max(lengths), Fraction(row_tokens * len(lengths), total), is_masked=is_masked)


def parse_packed_lengths(text: str, row_tokens: int) -> Packing:
    """What ``--packed-lengths`` says of rows of so many tokens.

    ``512,1024,2560`` are the samples of a row; a JSON file, ``{"lengths": [...]}``, has those of samples that rows are
    filled with; ``uniform:256:4096`` draws lengths from 256 to 4,096, both included.  Raises FileError and
    WorkloadError.
    """
    asked = text.strip()
    if asked.casefold().startswith("uniform:"):
        return _uniform(asked, row_tokens)
    if asked.casefold().endswith(".json"):
        found = read_mapping(asked)
        if found.keys() != {"lengths"} or not isinstance(found["lengths"], list):
            raise WorkloadError(f'{asked} lists no lengths of samples. It looks so: {{"lengths": [512, 1024, 2560]}}.')
        return packing_of(found["lengths"], row_tokens)
    parts = [part.strip() for part in asked.split(",")]
    if not all(part.isascii() and part.isdigit() for part in parts):
        raise WorkloadError(f"packed lengths: {asked!r} is no lengths. {_FORMS}.")
    lengths = [int(part) for part in parts]
    if sum(lengths) != row_tokens:
        raise WorkloadError(
            f"packed lengths: {asked} make {sum(lengths):,} tokens, but a row has {row_tokens:,} (sequence_length). "
            f"Make both equal, or give a distribution: uniform:LEAST:MOST, or a JSON file."
        )
    return packing_of(lengths, row_tokens)


def _uniform(asked: str, row_tokens: int) -> Packing:
    bounds = asked.split(":")[1:]
    if len(bounds) != 2 or not all(bound.isascii() and bound.isdigit() for bound in bounds):
        raise WorkloadError(f"packed lengths: {asked!r} is no distribution. {_FORMS}.")
    least, most = int(bounds[0]), int(bounds[1])
    if not 1 <= least <= most <= _LONGEST:
        raise WorkloadError(f"packed lengths: {asked} needs 1 <= LEAST <= MOST. {_FORMS}.")
    number = most - least + 1
    total, squares = (_sum_to(most, power) - _sum_to(least - 1, power) for power in (1, 2))
    return _packing(row_tokens, Fraction(row_tokens * squares, total), most, Fraction(row_tokens * number, total))


def _sum_to(last: int, power: int) -> int:
    """1**power + ... + last**power."""
    return last * (last + 1) // 2 if power == 1 else last * (last + 1) * (2 * last + 1) // 6


def _packing(
    row_tokens: int, squares: Fraction, longest: int, samples: Fraction, *, is_masked: bool = False
) -> Packing:
    if longest > row_tokens:
        raise WorkloadError(
            f"packed lengths: a sample of {longest:,} tokens does not fit into a row of {row_tokens:,} "
            f"(sequence_length). Lengthen the row, or leave out what is longer."
        )
    return Packing(
        row_tokens=row_tokens,
        squares=round(squares),
        longest=longest,
        samples_per_row=float(samples),
        is_masked=is_masked,
    )
