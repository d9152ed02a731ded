"""Collectives message by message: who sends which part to whom, when, and whether everybody ends with what it should.

Ranks have one port out and one in, which work side by side.  A message occupies the sender's port out and the
receiver's port in for latency + bytes / bandwidth of the way between them, and starts when both are free and the
messages that it waits for have arrived.  What it carries is looked at when it arrives, so that a part which is passed
on too early, added twice or forgotten shows in the end.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

Contents = dict[int, Counter[int]]
"""By part: which ranks' contributions it holds, and how often."""


@dataclass(frozen=True)
class Message:
    """One send."""

    source: int
    target: int
    parts: tuple[int, ...]
    adds: bool = False
    """Whether the receiver adds it to what it has, instead of taking it in its place."""
    after: tuple[int, ...] = ()
    """Messages, by their number, that must have arrived."""


@dataclass
class World:
    """Ranks, the ways between them and what they hold."""

    num_ranks: int
    message_s: Callable[[int, int, float], float]
    """Seconds of a message from a rank to another, by its bytes."""
    part_bytes: Mapping[int, float]
    holds: list[Contents]
    free_out_s: list[float] = field(default_factory=list)
    free_in_s: list[float] = field(default_factory=list)

    def run(self, messages: Sequence[Message]) -> float:
        """Carry the messages out, each rank its own in the order of the list; the second at which the last arrives."""
        self.free_out_s = [0.0] * self.num_ranks
        self.free_in_s = [0.0] * self.num_ranks
        arrived_s: list[float] = []
        for message in messages:
            start_s = max(
                [self.free_out_s[message.source], self.free_in_s[message.target]]
                + [arrived_s[other] for other in message.after]
            )
            size_bytes = sum(self.part_bytes[part] for part in message.parts)
            end_s = start_s + self.message_s(message.source, message.target, size_bytes)
            self.free_out_s[message.source] = self.free_in_s[message.target] = end_s
            arrived_s.append(end_s)
            self._deliver(message)
        return max(arrived_s, default=0.0)

    def _deliver(self, message: Message) -> None:
        for part in message.parts:
            carried = self.holds[message.source].get(part)
            assert carried, f"rank {message.source} sends part {part}, which it does not have"
            if message.adds:
                self.holds[message.target][part] = self.holds[message.target].get(part, Counter()) + carried
            else:
                self.holds[message.target][part] = carried.copy()


def own_parts(num_ranks: int) -> list[Contents]:
    """Every rank has the part of its number."""
    return [{rank: Counter([rank])} for rank in range(num_ranks)]


def all_parts(num_ranks: int, parts: Iterable[int]) -> list[Contents]:
    """Every rank has its own contribution to all parts."""
    numbers = tuple(parts)
    return [{part: Counter([rank]) for part in numbers} for rank in range(num_ranks)]


def only_root(num_ranks: int, parts: Iterable[int]) -> list[Contents]:
    """Rank 0 has all parts."""
    return [{part: Counter([0]) for part in parts} if rank == 0 else {} for rank in range(num_ranks)]


# -- who sends what --------------------------------------------------------------------------------------------------


def ring_gather(
    num_ranks: int, first_part: int = 0, numbers: int = 0, after: Mapping[int, int] | None = None
) -> list[Message]:
    """Every rank r begins with part r + first_part and passes on what it got last; ``numbers``: messages before."""
    return _around(num_ranks, first_part, numbers, after or {}, adds=False)


def ring_reduce(num_ranks: int) -> list[Message]:
    """Every rank passes part r on first and adds what it gets; rank r ends with the whole of part r + 1."""
    return _around(num_ranks, 0, 0, {}, adds=True)


def _around(num_ranks: int, first_part: int, numbers: int, after: Mapping[int, int], *, adds: bool) -> list[Message]:
    messages: list[Message] = []
    got = dict(after)  # by rank: the message that brought what it passes on next
    for step in range(num_ranks - 1):
        brought = {}
        for rank in range(num_ranks):
            target = (rank + 1) % num_ranks
            part = (rank + first_part - step) % num_ranks
            waits = (got[rank],) if rank in got else ()
            brought[target] = numbers + len(messages)
            messages.append(Message(rank, target, (part,), adds, waits))
        got = brought
    return messages


def ring_all_reduce(num_ranks: int) -> list[Message]:
    """Reduced around, then gathered around."""
    reduced = ring_reduce(num_ranks)
    last = {message.target: number for number, message in enumerate(reduced)}
    return reduced + ring_gather(num_ranks, first_part=1, numbers=len(reduced), after=last)


def ring_all_to_all(num_ranks: int) -> list[Message]:
    """Part source * p + target travels on until it is there; a step carries all that still has to go at once."""
    messages: list[Message] = []
    got: dict[int, int] = {}
    for step in range(1, num_ranks):
        brought = {}
        for rank in range(num_ranks):
            source = (rank - step + 1) % num_ranks
            parts = tuple(source * num_ranks + (source + far) % num_ranks for far in range(step, num_ranks))
            waits = (got[rank],) if rank in got else ()
            brought[(rank + 1) % num_ranks] = len(messages)
            messages.append(Message(rank, (rank + 1) % num_ranks, parts, after=waits))
        got = brought
    return messages
