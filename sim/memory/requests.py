"""What is asked of the allocator, as a list of numbers that can be played to any allocator.

[Note: Requests repeat]
Which tensors are made and freed, and of which sizes, depends on the schedule alone and never on where the allocator
places them.  So the requests of an iteration are noted once, and then played to as many allocators as there are
questions.  A request is one number: the bytes of a tensor that is made, or, negative, how many tensors ago the one was
made that is freed.  Counted like that, iterations soon have the same requests: as soon as what is held when one begins
is what was held when the one before began, all that follow are equal.

[Note: Nests]
Most tensors live within a task: made and freed like brackets, the latest first.  The allocator merges free neighbours
at once, so that a *nest* of such tensors leaves it as it was, unless it asked the driver for memory.  It does not ask
if there is one free block, in the pool of large sizes and in that of small ones, that holds the most bytes that the
nest has at once: wherever its other tensors go, those that are taken from this block lie side by side from its
beginning, and what is left behind them suffices for the next.  (A rest of at most 1 MiB that stays with a large block
would have been too small for any request of that pool.)  Then nothing has to be played, but for the level at the nest's
peak: where it may be the highest ever, the nest is played all the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from .rules import SMALL_BYTES, round_size
from .within_task import TaskRequests


@dataclass(slots=True, eq=False)
class Made:
    """A tensor that was asked for."""

    requested_bytes: int
    number: int


class Recorder:
    """Takes the place of an allocator and notes what it is asked for."""

    def __init__(self) -> None:
        self.requests: list[int] = []
        self.num_made = 0

    def malloc(self, size_bytes: int) -> Made:
        """Note that a tensor is made."""
        made = Made(size_bytes, self.num_made)
        self.num_made += 1
        self.requests.append(size_bytes)
        return made

    def free(self, made: Made) -> None:
        """Note that it is freed."""
        self.requests.append(made.number - self.num_made)

    def play(self, wanted: TaskRequests, held: Sequence[Made]) -> list[list[Made]]:
        """Note what a task asks for that is to free the tensors ``held``; what it leaves of every buffer."""
        begin, num_before = len(self.requests), self.num_made
        self.requests += wanted.requests
        for place, num_made, number in wanted.freed:
            self.requests[begin + place] = held[number].number - num_before - num_made
        self.num_made += wanted.num_made
        first = num_before - len(held)
        return [
            [held[n] if n < len(held) else Made(wanted.sizes_bytes[n], first + n) for n in numbers]
            for numbers in wanted.left
        ]

    def take(self) -> list[int]:
        """The requests since the last call."""
        requests, self.requests = self.requests, []
        return requests


def latest_first(requests: Sequence[int]) -> list[int]:
    """The same requests, of tensors that are freed one after the other the latest first.

    Their order makes no difference: free neighbours are merged whoever comes first.
    """
    ordered: list[int] = []
    begin = 0
    for place, request in enumerate(requests):
        if request > 0:
            if place > begin + 1:
                ordered += sorted(requests[begin:place], reverse=True)
            elif place > begin:
                ordered.append(requests[begin])
            ordered.append(request)
            begin = place + 1
    return [*ordered, *sorted(requests[begin:], reverse=True)]


class Nest(NamedTuple):
    """Requests that leave the allocator as it was; see [Note: Nests]."""

    stop: int
    """The place behind its last request."""
    num_made: int
    large_bytes: int
    """The most that it has at once in the pool of large sizes."""
    small_bytes: int
    highest_bytes: int
    """No less than it can ever add to what is allocated, whatever stays with blocks that are not split."""


_NOTHING: Final = Nest(0, 0, 0, 0, 0)


def nests(requests: Sequence[int]) -> dict[int, tuple[Nest, ...]]:
    """By the place of their first request, the nests that begin there: the longest first.

    ``requests``: as ``latest_first`` orders them.  Nests in a row make a longer one.
    """
    begun: list[int] = []
    """Places of tensors that are made and not freed, as long as they nest."""
    places: list[int] = []
    """By number."""
    closes: dict[int, int] = {}
    for place, request in enumerate(requests):
        if request > 0:
            begun.append(place)
            places.append(place)
        elif begun and len(places) + request >= 0 and begun[-1] == places[request]:
            closes[begun.pop()] = place + 1
        else:
            # Not the latest, or one from before: no tensor that is there has a nest.
            begun.clear()
    found: dict[int, tuple[Nest, ...]] = {}
    for begin in sorted(closes, reverse=True):
        size, stop = round_size(requests[begin]), closes[begin]
        within, after = found.get(begin + 1), found.get(stop)
        _, num_made, large, small, highest = within[0] if within is not None else _NOTHING
        if size <= SMALL_BYTES:
            nest = Nest(stop, num_made + 1, large, small + size, highest + size)
        else:
            nest = Nest(stop, num_made + 1, large + size, small, highest + size + SMALL_BYTES)
        found[begin] = (nest,) if after is None else (_joined(nest, after[0]), nest)
    return found


def _joined(one: Nest, other: Nest) -> Nest:
    """Two nests in a row."""
    return Nest(
        other.stop,
        one.num_made + other.num_made,
        max(one.large_bytes, other.large_bytes),
        max(one.small_bytes, other.small_bytes),
        max(one.highest_bytes, other.highest_bytes),
    )
