"""The device allocations of a schedule, replayed through the model of the allocator."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Final, Self

from ...shared.schema.schedule import AllocationId
from ..kernels.allocator import CompiledAllocator, DeviceFullError
from ..kernels.library import Allocated, is_available
from .allocator import AllocatorFullError, CachingAllocator
from .blocks import Block
from .requests import Made, Nest, Recorder, latest_first, nests
from .requests_of_schedule import Act, AllocationProgram, Step
from .static_tensors import StaticTensors
from .within_task import Inside, task_requests

MAX_ITERATIONS: Final = 8


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


def _is_over(reserved: Sequence[int], stop_above_bytes: int | None) -> bool:
    is_too_much = stop_above_bytes is not None and bool(reserved) and reserved[-1] > stop_above_bytes
    return is_too_much or _is_settled(reserved)


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
        inside: Inside = Inside.BY_SIZE,
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
    stop_above_bytes: int | None = None,
    on_change: OnChange | None = None,
) -> Replayed:
    """Set up, then run iterations until one asks the driver for nothing, or ``max_iterations``.

    The program repeats, but the allocator may place things differently each time; an iteration that needs no new
    segment is taken for the end of that, and so is one that has reserved more than ``stop_above_bytes``.  Where
    ``on_change`` is told of every change, every request is carried out.  Raises AllocatorFullError if the allocator's
    limit is exceeded.
    """
    blocks: list[Block | None] = []
    _play(log.set_up, allocator, blocks, {})
    if on_change is not None:
        on_change(-1)
    reserved: list[int] = []
    while len(reserved) < max_iterations and not _is_over(reserved, stop_above_bytes):
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
    stop_above_bytes: int | None = None,
) -> Replayed:
    """What a new allocator comes to: ``replay``, compiled where that is possible.

    ``limit_bytes``: the most that the driver hands out; None for a device without end.  ``stop_above_bytes``: as of
    ``replay``.  Raises AllocatorFullError.
    """
    if not is_available():
        allocator = CachingAllocator(expandable_segments=expandable_segments, limit_bytes=limit_bytes)
        return replay(log, allocator, max_iterations=max_iterations, stop_above_bytes=stop_above_bytes)
    compiled = CompiledAllocator(limit_bytes, expandable_segments=expandable_segments)
    reserved: list[int] = []
    try:
        compiled.play(log.set_up)
        while len(reserved) < max_iterations and not _is_over(reserved, stop_above_bytes):
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


@dataclass(frozen=True, slots=True)
class _Task:
    """The steps of one compute task, from its begin to its end."""

    frees: tuple[AllocationId, ...]
    levels: tuple[tuple[int, bool], ...]
    """Each with whether the tensor by which it rises stays."""
    steps_weights: bool
    leaves: tuple[AllocationId, ...]
    leaves_bytes: tuple[int, ...]
    keeps: tuple[AllocationId | None, ...]
    """For each of ``leaves`` the one of ``frees`` that holds the same."""


def _grouped(program: AllocationProgram) -> list[Step | _Task]:
    """The steps of the program, those of a task as one."""
    found: list[Step | _Task] = []
    begin = Step(Act.BEGIN)
    levels: list[tuple[int, bool]] = []
    steps_weights = False
    for step in program.steps:
        # Most steps are levels.
        if step.act is Act.LEVEL:
            levels.append((step.level_bytes, step.stays))
        elif step.act is Act.BEGIN:
            begin, levels, steps_weights = step, [], False
        elif step.act is Act.STEP:
            steps_weights = True
        elif step.act is Act.END:
            sizes = tuple(program.sizes_bytes[buffer] for buffer in step.buffers)
            of_content = {program.contents[buffer]: buffer for buffer in begin.buffers}
            keeps = tuple(of_content.get(program.contents[buffer]) for buffer in step.buffers)
            found.append(_Task(begin.buffers, tuple(levels), steps_weights, step.buffers, sizes, keeps))
        else:
            found.append(step)
    return found


class _Run:
    """What is held while a program is carried out."""

    def __init__(self, program: AllocationProgram, static: StaticTensors, allocator: Recorder, inside: Inside) -> None:
        self._program = program
        self._steps = _grouped(program)
        self._static = static
        self._allocator = allocator
        self._inside = inside
        self._held: dict[tuple[int, AllocationId], list[Made]] = {}
        """By iteration of the task that made the buffer."""

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
            self._copy(step, 0)
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
        for step in self._steps:
            if isinstance(step, Step):
                self._copy(step, iteration)
                changes.append(len(self._allocator.requests))
            else:
                self._compute(step, iteration, changes)
        return Requests(self._allocator.take(), changes)

    def _copy(self, step: Step, iteration: int) -> None:
        """Room for a copy, or what a copy has read, of one iteration."""
        of_iteration = iteration + step.iterations_later
        if step.act is Act.MAKE:
            for buffer in step.buffers:
                self._held[of_iteration, buffer] = [self._allocator.malloc(self._program.sizes_bytes[buffer])]
        # What a copy of the iteration before the first would have read was never there.
        elif of_iteration >= 0:
            for buffer in step.buffers:
                for made in self._held.pop((of_iteration, buffer)):
                    self._allocator.free(made)

    def _compute(self, task: _Task, iteration: int, changes: list[int]) -> None:
        """One task; ``changes`` gets the number of requests at its begin, behind each level, and at its end."""
        allocator = self._allocator
        tensors: list[Made] = []
        numbers: dict[AllocationId | None, range] = {}
        for buffer in task.frees:
            held = self._held.pop((iteration, buffer))
            numbers[buffer] = range(len(tensors), len(tensors) + len(held))
            tensors += held
        frees = tuple(made.requested_bytes for made in tensors)
        kept = (numbers.get(buffer, range(0)) for buffer in task.keeps)
        leaves = tuple(zip(task.leaves_bytes, kept, strict=True))
        wanted = task_requests(task.levels, frees, leaves, self._inside)
        if task.steps_weights and iteration == 0:
            # State is made before anything is stepped.
            for size_bytes in self._static.first_step:
                allocator.malloc(size_bytes)
        before = len(allocator.requests)
        changes += [before + number for number in wanted.changes[:-1]]
        if task.steps_weights:
            changes.append(changes[-1])
        left = allocator.play(wanted, tensors)
        changes.append(len(allocator.requests))
        for buffer, made in zip(task.leaves, left, strict=True):
            self._held[iteration, buffer] = made
