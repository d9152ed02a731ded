"""The device allocations of a schedule, replayed through the model of the allocator.

[Note: What a replay knows]
The schedule says which buffers come and go with which task; a chunk, a block's output and the batch are one tensor
each, optimizer state is known parameter by parameter.  What a compute task makes while it runs is known as a level over
time, its phase's curve.  The replay takes every rise of the curve for one tensor, of the size of the rise, and lets
every fall free the latest ones, the last of which goes on with what is left of it; where the level falls below that at
the task's start, the buffers go that the task is to free.  At its end, what is left of these tensors is what the task
leaves behind, the oldest first: saved activations are made by the way, not at the end.  The other reading of ``Inside``
tells how much depends on this one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from itertools import pairwise
from typing import Final, Self

from ...shared.schema.schedule import AllocationId
from ..kernels.allocator import CompiledAllocator, DeviceFullError
from ..kernels.library import Allocated, is_available
from .allocator import AllocatorFullError, CachingAllocator
from .blocks import Block
from .freed import freed_by
from .requests import Made, Nest, Recorder, latest_first, nests
from .requests_of_schedule import Act, AllocationProgram, StaticTensors, Step

MAX_ITERATIONS: Final = 8


class Inside(StrEnum):
    """How the level within a compute task is read as tensors; see [Note: What a replay knows]."""

    LATEST_FIRST = "latest_first"
    """Falls free the latest tensors, as the end of a function does."""
    AT_ONCE = "at_once"
    """All is one tensor, made anew whenever the level changes; what the task leaves behind is made at its end."""


@dataclass(frozen=True, slots=True)
class Replayed:
    """What a replay came to."""

    peak_reserved_bytes: int
    peak_allocated_bytes: int
    """Blocks in use, rounding included."""
    num_iterations: int
    is_settled: bool
    """Whether the last iteration asked the driver for nothing, with all optimizer state there."""
    num_retries: int

    @classmethod
    def of(cls, allocator: CachingAllocator | Allocated, reserved: Sequence[int]) -> Self:
        """``reserved``: by iteration, the peak so far."""
        return cls(
            peak_reserved_bytes=allocator.peak_reserved_bytes,
            peak_allocated_bytes=allocator.peak_allocated_bytes,
            num_iterations=len(reserved),
            is_settled=_is_settled(reserved),
            num_retries=allocator.num_retries,
        )


def _is_settled(reserved: Sequence[int]) -> bool:
    return len(reserved) >= 2 and reserved[-1] == reserved[-2]


OnChange = Callable[[int], None]
"""Told the iteration after every change; -1 for the set-up."""


class RequestLog:
    """What a program asks of an allocator, noted once for as many replays as there are; [Note: Requests repeat]."""

    def __init__(
        self,
        program: AllocationProgram,
        static: StaticTensors,
        *,
        workspaces: Sequence[int] = (),
        inside: Inside = Inside.LATEST_FIRST,
    ) -> None:
        """``workspaces``: bytes of what libraries allocate once."""
        self._recorder = Recorder()
        self._run = _Run(program, static, self._recorder, inside)
        self.set_up = self._run.set_up(workspaces)
        self._iterations: list[Requests] = []
        self._held_before: list[Held] = []
        """What was held when each of them began."""
        self._repeats = False
        self._nests: dict[int, dict[int, tuple[Nest, ...]]] = {}

    def iteration(self, number: int) -> Requests:
        """The requests of one iteration."""
        while len(self._iterations) <= number and not self._repeats:
            self._held_before.append(self._run.held(len(self._iterations)))
            # The first iteration and the one after it differ from the others in more than in what they find.
            self._repeats = len(self._held_before) > 2 and self._held_before[-1] == self._held_before[-2]
            if not self._repeats:
                self._iterations.append(self._run.iterate(len(self._iterations)))
        return self._iterations[min(number, len(self._iterations) - 1)]

    def nests(self, number: int) -> dict[int, tuple[Nest, ...]]:
        """The nests of one iteration."""
        requests = self.iteration(number)
        known = min(number, len(self._iterations) - 1)
        if known not in self._nests:
            self._nests[known] = nests(requests.ordered)
        return self._nests[known]


def replay(
    log: RequestLog,
    allocator: CachingAllocator,
    *,
    max_iterations: int = MAX_ITERATIONS,
    on_change: OnChange | None = None,
) -> Replayed:
    """Set up, then run iterations until one asks the driver for nothing, or ``max_iterations``.

    The program repeats, but the allocator may place things differently each time; an iteration that needs no new
    segment is taken for the end of that.  Where ``on_change`` is told of every change, every request is carried out.
    Raises AllocatorFullError if the allocator's limit is exceeded.
    """
    blocks: list[Block | None] = []
    _play(log.set_up, allocator, blocks, {})
    if on_change is not None:
        on_change(-1)
    reserved: list[int] = []
    while len(reserved) < max_iterations and not _is_settled(reserved):
        number = len(reserved)
        requests = log.iteration(number)
        if on_change is None:
            _play(requests.ordered, allocator, blocks, log.nests(number))
        else:
            for begin, end in pairwise((0, *requests.changes)):
                _play(requests.numbers[begin:end], allocator, blocks, {})
                on_change(number)
        reserved.append(allocator.peak_reserved_bytes)
    return Replayed.of(allocator, reserved)


def reserved_by(
    log: RequestLog,
    *,
    expandable_segments: bool = False,
    limit_bytes: int | None = None,
    max_iterations: int = MAX_ITERATIONS,
) -> Replayed:
    """What a new allocator comes to: ``replay``, compiled where that is possible.

    ``limit_bytes``: the most that the driver hands out; None for a device without end.  Raises AllocatorFullError.
    """
    if expandable_segments or not is_available():
        allocator = CachingAllocator(expandable_segments=expandable_segments, limit_bytes=limit_bytes)
        return replay(log, allocator, max_iterations=max_iterations)
    compiled = CompiledAllocator(limit_bytes)
    reserved: list[int] = []
    try:
        compiled.play(log.set_up)
        while len(reserved) < max_iterations and not _is_settled(reserved):
            reserved.append(compiled.play(log.iteration(len(reserved)).numbers).peak_reserved_bytes)
    except DeviceFullError as error:
        level = compiled.level
        assert limit_bytes is not None
        raise AllocatorFullError.of(
            level.wanted_bytes,
            limit_bytes,
            reserved_bytes=level.reserved_bytes,
            allocated_bytes=level.allocated_bytes,
        ) from error
    return Replayed.of(compiled.level, reserved)


def _play(
    requests: Sequence[int],
    allocator: CachingAllocator,
    blocks: list[Block | None],
    nests_at: dict[int, tuple[Nest, ...]],
) -> None:
    """Carry ``requests`` out, but for nests that leave the allocator as it is; ``blocks``: of all tensors so far."""
    place, stop = 0, len(requests)
    malloc, free = allocator.malloc, allocator.free
    while place < stop:
        request = requests[place]
        if request < 0:
            block = blocks[request]
            assert block is not None, "what a nest makes it frees itself"
            free(block)
            place += 1
            continue
        for nest in nests_at.get(place, ()):
            is_below_peak = allocator.allocated_bytes + nest.highest_bytes <= allocator.peak_allocated_bytes
            if is_below_peak and allocator.has_cached(nest.large_bytes, nest.small_bytes):
                blocks += [None] * nest.num_made
                place = nest.stop
                break
        else:
            blocks.append(malloc(request))
            place += 1


@dataclass(frozen=True)
class Requests:
    """The requests of one iteration; see [Note: Requests repeat]."""

    numbers: list[int]
    changes: list[int]
    """How many of them have been made after every step of the program."""

    @cached_property
    def ordered(self) -> list[int]:
        """As ``latest_first`` orders them."""
        return latest_first(self.numbers)


Held = dict[tuple[int, AllocationId], list[tuple[int, int]]]
"""By iteration, counted from the present one, and buffer: how long ago its tensors were made, and their bytes."""


class _Run:
    """What is held while a program is carried out."""

    def __init__(self, program: AllocationProgram, static: StaticTensors, allocator: Recorder, inside: Inside) -> None:
        self._program = program
        self._static = static
        self._allocator = allocator
        self._is_at_once = inside is Inside.AT_ONCE
        self._held: dict[tuple[int, AllocationId], list[Made]] = {}
        """By iteration of the task that made the buffer."""
        self._tensors: list[Made] = []
        """Made by the running compute task, in order."""
        self._leaving: list[Made] = []
        """Of the buffers that it is to free, in the order in which they came."""
        self._level_bytes = 0

    def set_up(self, workspaces: Sequence[int]) -> list[int]:
        """The requests of everything before the first iteration."""
        malloc = self._allocator.malloc
        for tensor in self._static.set_up:
            block = malloc(tensor.size_bytes)
            if not tensor.stays:
                self._allocator.free(block)
        for size_bytes in workspaces:
            malloc(size_bytes)
        for step in self._program.before:
            self.carry_out(step, 0)
        return self._allocator.take()

    def held(self, iteration: int) -> Held:
        """What is held when ``iteration`` begins."""
        num_made = self._allocator.num_made
        return {
            (of_iteration - iteration, buffer): [(num_made - one.number, one.requested_bytes) for one in made]
            for (of_iteration, buffer), made in self._held.items()
        }

    def iterate(self, iteration: int) -> Requests:
        """The requests of one iteration."""
        changes: list[int] = []
        for step in self._program.steps:
            # Most steps are levels.
            if step.act is Act.LEVEL:
                self._change(step.level_bytes)
            else:
                self.carry_out(step, iteration)
            changes.append(len(self._allocator.requests))
        return Requests(self._allocator.take(), changes)

    def carry_out(self, step: Step, iteration: int) -> None:
        """One step of the program in one iteration, other than a level."""
        act = step.act
        if act is Act.BEGIN:
            self._leaving = self._take_held(step, iteration)
            self._level_bytes = 0
        elif act is Act.END:
            self._end(step, iteration)
        elif act is Act.MAKE:
            for buffer in step.buffers:
                made = self._allocator.malloc(self._program.sizes_bytes[buffer])
                self._held[iteration + step.iterations_later, buffer] = [made]
        elif act is Act.FREE:
            # What a copy of the iteration before the first would have read was never there.
            if iteration + step.iterations_later >= 0:
                self._free_all(self._take_held(step, iteration + step.iterations_later))
        elif iteration == 0:
            for size_bytes in self._static.first_step:
                self._allocator.malloc(size_bytes)

    def _take_held(self, step: Step, iteration: int) -> list[Made]:
        """The blocks of the step's buffers, which are theirs no more."""
        return [block for buffer in step.buffers for block in self._held.pop((iteration, buffer))]

    def _end(self, step: Step, iteration: int) -> None:
        missing: list[tuple[list[Made], int]] = []
        for buffer in step.buffers:
            taken, left_bytes = self._take_tensors(self._program.sizes_bytes[buffer])
            if left_bytes and not self._is_at_once:
                left_bytes = self._hand_on(taken, left_bytes)
            self._held[iteration, buffer] = taken
            if left_bytes:
                missing.append((taken, left_bytes))
        self._free_all(self._tensors)
        self._free_all(self._leaving)
        self._tensors, self._leaving = [], []
        for blocks, size_bytes in missing:
            blocks.append(self._allocator.malloc(size_bytes))

    def _hand_on(self, taken: list[Made], left_bytes: int) -> int:
        """What was there before and did not go, as a gradient to which every block adds, stays where it is."""
        for place in reversed(range(len(self._leaving))):
            if self._leaving[place].requested_bytes <= left_bytes:
                taken.append(self._leaving.pop(place))
                left_bytes -= taken[-1].requested_bytes
        return left_bytes

    def _take_tensors(self, size_bytes: int) -> tuple[list[Made], int]:
        """The oldest tensors that fit into so many bytes, taken from the task, and the bytes that they leave."""
        taken: list[Made] = []
        if not self._is_at_once:
            while self._tensors and self._tensors[0].requested_bytes <= size_bytes:
                taken.append(self._tensors.pop(0))
                size_bytes -= taken[-1].requested_bytes
        return taken, size_bytes

    def _change(self, level_bytes: int) -> None:
        """The level within the running task becomes ``level_bytes``."""
        change_bytes = level_bytes - self._level_bytes
        self._level_bytes = level_bytes
        if self._is_at_once and self._tensors:
            change_bytes += self._tensors[0].requested_bytes
            self._free_all(self._tensors)
            self._tensors = []
        if change_bytes > 0:
            self._tensors.append(self._allocator.malloc(change_bytes))
        elif change_bytes < 0:
            self._fall(-change_bytes)

    def _fall(self, size_bytes: int) -> None:
        """Free tensors of so many bytes, those of the task itself and those that it is to free."""
        there = [*self._leaving, *self._tensors]
        freed = freed_by(tuple(block.requested_bytes for block in there), size_bytes)
        for place in sorted(freed.places, reverse=True):
            self._allocator.free(there[place])
            size_bytes -= there[place].requested_bytes
        gone = set(freed.places)
        if freed.cut is not None:
            block = there[freed.cut]
            self._allocator.free(block)
            there[freed.cut] = self._allocator.malloc(block.requested_bytes - size_bytes)
        num_leaving = len(self._leaving)
        self._leaving = [block for place, block in enumerate(there[:num_leaving]) if place not in gone]
        self._tensors = [block for place, block in enumerate(there[num_leaving:], num_leaving) if place not in gone]

    def _free_all(self, blocks: Sequence[Made]) -> None:
        for block in blocks:
            self._allocator.free(block)
