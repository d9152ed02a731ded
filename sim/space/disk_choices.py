"""What of a placement's offloaded chunks lies on the host's disk: the choices of a space, and the least that is enough.

[Note: Chunks on the disk]
A choice is how many of the last chunks have their optimizer state on the disk, how many of the last of these their
parameters too, and how many places of host memory they share (``Plan.n_disk_state``, ``n_disk``, ``n_staging``).
Numbers that are named go with every placement that offloads as many chunks.  Where none is named, a placement has
choices by the host's budget: nothing on the disk if the host holds it all; otherwise, for each number of places, the
fewest chunks with which the host holds the rest, once with their state alone on the disk and once with their
parameters too; and if the state of all is not enough, all of it with the fewest parameters.  Reads and writes take the
longer the more lies on the disk, so that fewer chunks are faster.  Where nothing is enough, the placement has the
choice that asks the least of the host, so that a search can say what is missing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, Self

import numpy as np
import numpy.typing as npt

from ...shared.compile.chunk_facts import ChunkFacts
from ...shared.layout.layout import Layout

_Integers = npt.NDArray[np.int64]
_Booleans = npt.NDArray[np.bool_]


class DiskChoice(NamedTuple):
    """The knobs of a plan that speak of the disk."""

    n_disk_state: int = 0
    n_disk: int = 0
    n_staging: int = 0


ON_HOST: Final = DiskChoice()
"""Nothing lies on the disk."""

OnDisk = Callable[[Layout, Sequence[tuple[int, ...]]], Sequence[Sequence[DiskChoice]]]
"""The choices of each placement of a layout, which is given by its numbers of chunks of the residencies ``COUNTED``."""


def named(n_disk_state: Iterable[int], n_disk: Iterable[int], n_staging: Iterable[int]) -> OnDisk:
    """Every combination that agrees, of the numbers that a space names."""
    choices = [
        DiskChoice(of_state, of_parameters, places)
        for of_state in sorted(set(n_disk_state))
        for of_parameters in (sorted(set(n_disk)) if of_state else (0,))
        for places in (sorted(set(n_staging)) if of_state else (0,))
        if of_parameters <= of_state
    ]

    def of(layout: Layout, counted: Sequence[tuple[int, ...]]) -> list[list[DiskChoice]]:
        num_offloaded = [len(layout.chunks) - sum(counts) for counts in counted]
        return [[choice for choice in choices if choice.n_disk_state <= most] for most in num_offloaded]

    return of


def distinct_choices(choices: Iterable[DiskChoice], is_trainable: Sequence[bool]) -> list[DiskChoice]:
    """Of choices that put the same on the disk, the first.  ``is_trainable``: (C,) whether a chunk is stepped."""
    trained = np.append(0, np.cumsum(np.array(is_trainable, dtype=np.int64)[::-1])).tolist()
    distinct: dict[tuple[int, ...], DiskChoice] = {}
    for choice in choices:
        stepped = trained[choice.n_disk_state]
        is_used = stepped > 0 or choice.n_disk > 0
        distinct.setdefault((stepped, choice.n_disk, choice.n_staging) if is_used else ON_HOST, choice)
    return list(distinct.values())


@dataclass(frozen=True, eq=False)
class StagedBytes:
    """What the last chunks of a layout have on the disk, and what passes through the host, by their number.

    Shapes: (C + 1,) each, by the number of last chunks, from none to all C.
    """

    parameters: _Integers
    state: _Integers
    gradients: _Integers
    """Of chunks whose gradients arrive in places that chunks share."""
    largest_parameters: _Integers
    largest_stepped: _Integers
    """Parameters of the largest trainable chunk."""
    largest_state: _Integers
    largest_gradients: _Integers

    @classmethod
    def of(cls, facts: ChunkFacts) -> Self:
        """The bytes of a layout, as [Note: Disk] in ``shared/compile/compile.py`` places them."""
        parameters = facts.part("parameter_bytes")
        state = np.where(facts.is_trainable, facts.part("state_bytes"), 0)
        are_shared = facts.is_trainable & (facts.step.micro_batches == 1 and not facts.step.limits_norm)
        gradients = np.where(are_shared, facts.part("staging_bytes"), 0)
        return cls(
            *map(_sums_of_last, (parameters, state, gradients)),
            *map(_most_of_last, (parameters, np.where(facts.is_trainable, parameters, 0), state, gradients)),
        )

    def on_disk(self, choice: _Integers) -> _Integers:
        """(...) bytes on the disk; ``choice``: (..., 3) as ``DiskChoice``."""
        of_state, of_parameters, _ = np.moveaxis(choice, -1, 0)
        found: _Integers = self.state[of_state] + self.parameters[of_parameters]
        return found

    def more_pinned(self, choice: _Integers) -> _Integers:
        """(...) pinned host memory beyond what the plan has without a disk, often less than 0."""
        of_state, of_parameters, places = np.moveaxis(choice, -1, 0)
        spared = self.parameters[of_parameters] + self.gradients[of_state]
        one_place = self.largest_parameters[of_parameters] + self.largest_gradients[of_state]
        found: _Integers = places * one_place - spared
        return found

    def more_pageable(self, choice: _Integers) -> _Integers:
        """(...) other host memory beyond what the plan has without a disk, often less than 0."""
        of_state, of_parameters, places = np.moveaxis(choice, -1, 0)
        one_place = self.largest_state[of_state] + self.largest_stepped[of_parameters]
        found: _Integers = places * one_place - self.state[of_state]
        return found

    def more_host(self, choice: _Integers) -> _Integers:
        """(...) host memory of both sorts beyond what the plan has without a disk."""
        return self.more_pinned(choice) + self.more_pageable(choice)


def _sums_of_last(values: _Integers) -> _Integers:
    return np.append(0, values[::-1].cumsum())


def _most_of_last(values: _Integers) -> _Integers:
    return np.append(0, np.maximum.accumulate(values[::-1]))
