"""What a trace sees of one section of an iteration, and the phase that follows from it.

Tracing records calls and levels; a family of workloads (``shared/families/family.py``) computes the same calls and
levels for another shape.  Everything that is derived from them lies here, so that both derive it alike.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Final

from ..schema.workload import SMALLEST_SWAPPED_BYTES, DType, Operation, OperationClass


@dataclass(frozen=True, slots=True)
class OperatorCall:
    """One call of an ATen operator: the figures that its cost follows from."""

    name: str
    operation_class: OperationClass
    dtype: DType
    flops: int
    reads: tuple[tuple[int, int], ...]
    """(storage, bytes) of every tensor that it is given; storages are numbered within the call."""
    writes_bytes: tuple[int, ...]
    """Of every tensor that it gives."""
    shape: tuple[int, ...] = ()
    """``Operation.shape``."""
    draws: bool = False
    """Whether it draws random numbers beside what it computes: attention with dropout."""
    is_changed: bool = field(default=False, repr=False)
    """Whether what it gives is changed in place later: no later call can be handed it as it was.  Fingerprints of
    shipped files are of what is shown, and older than this."""

    def operation(self) -> Operation:
        """The call as a workload counts it."""
        return Operation(
            name=self.name,
            operation_class=self.operation_class,
            dtype=self.dtype,
            flops=self.flops,
            bytes_moved=moved_bytes(self.name, self.operation_class, self.reads, self.writes_bytes),
            shape=self.shape,
        )


_CURVE_STRETCHES: Final = 24
_SAVED_RESULTS: Final = frozenset(("_log_softmax",))
"""Operators whose derivative reads their result, whatever reads it besides (torch's ``derivatives.yaml``).  Others have
it in common with them; this one's is the largest tensor of a language model, of the size of what it was made of."""
_LATEST: Final = 8
"""Tensors among which gradients are that became final together: a weight's and a bias's, with what came between."""
_FILLS: Final = frozenset(
    ("fill_", "zero_", "zeros", "ones", "full", "zeros_like", "ones_like", "full_like", "new_zeros")
)


def moved_bytes(
    name: str, operation_class: OperationClass, reads: Sequence[tuple[int, int]], writes_bytes: Sequence[int]
) -> int:
    """Bytes that one call reads and writes, each tensor once.  A lookup reads as much of its table as it writes."""
    written = sum(writes_bytes)
    if operation_class is OperationClass.EMBEDDING:
        read = [size for _, size in reads]
        largest = max(read, default=0)
        return written + sum(read) - largest + min(largest, written)
    if name in _FILLS:
        return written
    seen: dict[int, int] = {}
    for storage, size in reads:
        seen[storage] = max(seen.get(storage, 0), size)
    return written + sum(seen.values())


@dataclass(frozen=True, slots=True)
class Repeated:
    """Operations that are listed once and happen several times in a row: equal passes of a loop over tiles."""

    begin: int
    """Index of the first one of a pass."""
    end: int
    """Index behind the last one."""
    count: int
    """Passes."""
    net_bytes: int
    """Level of each pass minus that of the one before."""


@dataclass(slots=True)
class Observation:
    """One section of one iteration."""

    start_bytes: int
    """Level when it begins."""
    end_bytes: int = 0
    operations: list[Operation] = field(default_factory=list)
    """In order, every call on its own."""
    calls: list[OperatorCall] = field(default_factory=list)
    """What ``operations`` were made from."""
    levels: list[int] = field(default_factory=list)
    """After each operation, relative to the start."""
    adding_levels: list[int] = field(default_factory=list)
    """``levels``, had every gradient been added to one that was there before."""
    final_bytes: int = 0
    """Gradients that became final in this section so far, of parameters that had none when it began."""
    gradient_bytes: int = 0
    """Of parameters that had none when it began."""
    lingering_bytes: int = 0
    """Above the start when it was announced: what frames held that had not returned yet."""
    square_bytes: int = 0
    """Of what it leaves behind, less what it found: tensors of the sequence's length squared."""
    square_peak_bytes: int = 0
    """Highest level of such tensors after any operation, relative to the start."""
    output_bytes: int = 0
    saved_bytes: list[int] = field(default_factory=list)
    """Of a block's forward: the storages that it made, saved and did not hand on."""
    exchanges: list[int] = field(default_factory=list)
    """``Phase.exchanges``."""
    passes: list[tuple[int, int | None]] = field(default_factory=list)
    """Where passes of loops over tiles begin: how many operations came before, and the pass's tokens; None: the loop
    has ended."""
    num_graphs: int | None = None
    """``Phase.num_graphs``."""
    repeated: tuple[Repeated, ...] = ()
    """In order; operations outside of them happen once.  Levels listed behind one are those behind its last pass."""

    @property
    def net_bytes(self) -> int:
        """Level at the end minus that at the start."""
        return self.end_bytes - self.start_bytes

    @property
    def swappable_bytes(self) -> int:
        """Of what a block's forward saves, the bytes that mode SWAP moves."""
        return sum(size for size in self.saved_bytes if size >= SMALLEST_SWAPPED_BYTES)

    def lingering(self, size_bytes: int) -> Observation:
        """With so much there when it is announced, which goes with its first operation.

        Chunks are gathered meanwhile.  Only what exceeds all levels counts: they are highest levels, in order.
        """
        more_bytes = size_bytes - max(self.levels, default=size_bytes)
        if more_bytes <= 0:
            return replace(self, lingering_bytes=0)
        first, adding = self.levels[0], self.adding_levels[0]
        return replace(
            self,
            lingering_bytes=0,
            levels=[size_bytes, *self.levels[1:]],
            adding_levels=[adding + size_bytes - first, *self.adding_levels[1:]],
        )

    def counted(self) -> tuple[Operation, ...]:
        """Each distinct operation with its number of calls, in order of first occurrence."""
        counts: Counter[Operation] = Counter()
        for begin, end, count, _ in self._runs():
            for operation in self.operations[begin:end]:
                counts[operation] += count
        return tuple(op if count == 1 else op.model_copy(update={"count": count}) for op, count in counts.items())

    def curve(self) -> tuple[tuple[float, int], ...]:
        """The section's levels as at most ``_CURVE_STRETCHES`` stretches, each with its highest level."""
        return self._stretches(self.levels, self.net_bytes)

    def adding_curve(self) -> tuple[tuple[float, int], ...]:
        """``curve``, had every gradient been added to one that was there before; empty if none became final."""
        if self.gradient_bytes <= 0:
            return ()
        return self._stretches(self.adding_levels, self.net_bytes - self.gradient_bytes)

    def changes(self) -> tuple[int, ...]:
        """``Phase.changes``; empty where there are loops over tiles, whose passes a family does not list one by one."""
        return self._changes(self.levels)

    def staying_tensors(self) -> tuple[int, ...]:
        """``Phase.staying_tensors``.

        Gradients are the latest tensors that have the bytes by which the gradients grew that are final.
        """
        if not self.changes():
            return ()
        found: set[int] = set()
        made: list[int] = []
        final_bytes = [level - adding for level, adding in zip(self.levels, self.adding_levels, strict=True)]
        final_bytes.append(max(0, self.gradient_bytes))
        for call, (now, later) in zip(self.calls, pairwise(final_bytes), strict=True):
            if call.name in _SAVED_RESULTS:
                found.add(len(made))
            made += _made_by(call)
            if later > now:
                found.update(_latest_of(made, later - now, found))
        return tuple(sorted(found))

    def adding_changes(self) -> tuple[int, ...]:
        """``Phase.adding_changes``; empty if no gradient became final."""
        return self._changes(self.adding_levels) if self.gradient_bytes > 0 else ()

    def _changes(self, levels: Sequence[int]) -> tuple[int, ...]:
        if self.passes or self.repeated or len(self.calls) != len(levels):
            return ()
        found: list[int] = []
        before_bytes = 0
        for call, level_bytes in zip(self.calls, levels, strict=True):
            made = _made_by(call)
            gone_bytes = sum(made) - (level_bytes - before_bytes)
            before_bytes = level_bytes
            if gone_bytes > 0:
                found.append(-gone_bytes)
            elif gone_bytes < 0:
                made.append(-gone_bytes)
            found += made
        return tuple(found)

    def _stretches(self, levels: Sequence[int], net_bytes: int) -> tuple[tuple[float, int], ...]:
        if not levels:
            return ((1.0, net_bytes),) if net_bytes > 0 else ()
        # In whole numbers, so that equal passes are equal.
        weights = [operation.weight for operation in self.operations]
        runs = list(self._runs())
        stretches = _Stretches(sum(count * sum(weights[begin:end]) for begin, end, count, _ in runs))
        for begin, end, count, net in runs:
            stretches.add(weights[begin:end], levels[begin:end], count, net)
        return stretches.finished()

    def _runs(self) -> Iterator[tuple[int, int, int, int]]:
        """All operations, as (begin, end, passes, net bytes of a pass)."""
        done = 0
        for one in self.repeated:
            yield done, one.begin, 1, 0
            yield one.begin, one.end, one.count, one.net_bytes
            done = one.end
        yield done, len(self.operations), 1, 0


def _made_by(call: OperatorCall) -> list[int]:
    """Bytes of the tensors that a call makes; one in place makes none."""
    return [] if call.name.endswith("_") else [size for size in call.writes_bytes if size]


def _latest_of(made: Sequence[int], size_bytes: int, taken: Set[int]) -> list[int]:
    """Of tensors the latest that have so many bytes: one alone, or the latest together; none if these have not."""
    places = [place for place in reversed(range(len(made))) if place not in taken and made[place] <= size_bytes]
    for place in places:
        if made[place] == size_bytes:
            return [place]
    found: list[int] = []
    for place in places[:_LATEST]:
        if made[place] <= size_bytes:
            found.append(place)
            size_bytes -= made[place]
    return [] if size_bytes else found


class _Stretches:
    """Stretches of a phase, as operations add to them."""

    def __init__(self, total: int) -> None:
        self._total = total
        self._done = 0
        self._found: list[tuple[int, int]] = []
        """(end in parts of ``_CURVE_STRETCHES``, highest level)"""

    def add(self, weights: Sequence[int], levels: Sequence[int], count: int, net_bytes: int) -> None:
        """``count`` passes of operations, each pass's levels higher than those before by ``net_bytes``."""
        weight = sum(weights)
        number = 0
        while weights and number < count:
            within = self._passes_within(weights, weight) if number and self._found else 0
            if within > 1:
                # They lie within the last stretch, which takes their highest level.
                last = min(count, number + within) - 1
                highest = max(levels) + max(number * net_bytes, last * net_bytes)
                self._found[-1] = (self._found[-1][0], max(self._found[-1][1], highest))
                self._done += (last + 1 - number) * weight
                number = last + 1
                continue
            for each, level in zip(weights, levels, strict=True):
                self._add(each, level + number * net_bytes)
            number += 1

    def _passes_within(self, weights: Sequence[int], weight: int) -> int:
        """How many passes that begin now end in the last stretch."""
        # The middle of the last operation of pass i lies at done + (i + 1) weight - w / 2; it has to come before the
        # stretch's end, except that the very last stretch takes all.
        end = self._found[-1][0]
        if end == _CURVE_STRETCHES:
            return (self._total - self._done) // weight
        room = 2 * self._total * end - _CURVE_STRETCHES * (2 * self._done - weights[-1])
        return max(0, (room - 1) // (2 * _CURVE_STRETCHES * weight))

    def _add(self, weight: int, level: int) -> None:
        self._done += weight
        middle = _CURVE_STRETCHES * (2 * self._done - weight)
        end = min(_CURVE_STRETCHES, middle // (2 * self._total) + 1)
        found = self._found
        if found and (found[-1][0] >= end or found[-1][1] == level):
            found[-1] = (max(found[-1][0], end), max(found[-1][1], level))
        else:
            found.append((end, level))

    def finished(self) -> tuple[tuple[float, int], ...]:
        """Ends as shares of the phase, the last one 1."""
        ends = [end / _CURVE_STRETCHES for end, _ in self._found]
        ends[-1] = 1.0
        return tuple((end, level) for end, (_, level) in zip(ends, self._found, strict=True))
