"""An abstract machine that runs a schedule in any order that its dependencies allow, and watches.

The oracle of the verifier's and the memory bound's tests.  It knows nothing of happens-before relations: it carries
tasks out one event at a time, fills buffers with symbolic values (``symbolic_values.py``), and reports the first thing
that training would not survive.  Every order of starts and ends that a set of durations could
produce is open to it; an *adversary* chooses among the events that are possible.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from protwin.shared.layout.layout import Layout
from protwin.shared.schema.plan import Plan
from protwin.shared.schema.schedule import (
    AllocationId,
    ChunkId,
    Content,
    Lane,
    Memory,
    OuterSection,
    Schedule,
    Task,
    TaskId,
    TaskKind,
)
from protwin.shared.schema.workload import Workload
from tests.shared.symbolic_values import TORN, SymbolicValues, Value, Violation


@dataclass(frozen=True)
class Event:
    """The start or the end of a task of one iteration."""

    is_start: bool
    iteration: int
    task: Task


Adversary = Callable[[Sequence[Event]], Event]
"""Chooses which of the possible events happens next."""


@dataclass
class _Place:
    """A buffer at run time."""

    is_alive: bool
    value: Value | None = None
    num_writes: int = 0
    num_readers: int = 0
    has_writer: bool = False


class AbstractMachine:
    """One run of ``num_iterations`` iterations.  ``run`` raises Violation; ``peak_bytes`` is the device's peak."""

    def __init__(
        self, schedule: Schedule, plan: Plan, workload: Workload, layout: Layout, *, num_iterations: int = 3
    ) -> None:
        self.schedule = schedule
        self.plan = plan
        self.layout = layout
        self.num_iterations = num_iterations
        self.values = SymbolicValues(schedule, plan, workload, layout)
        self.programs = {lane: [t for t in schedule.tasks if t.lane is lane] for lane in Lane}
        self.places = [_Place(buffer.is_static, self.values.initial(buffer)) for buffer in schedule.buffers]
        self.ended: set[tuple[int, TaskId]] = set()
        self.num_started = dict.fromkeys(Lane, 0)
        self.running: dict[Lane, Event] = {}
        self.seen: dict[tuple[Lane, AllocationId], int] = {}
        """Number of writes that a buffer had had when the running task of a lane began to read it."""
        self.steps_of: dict[ChunkId, int] = {}
        self.num_steps = 0
        """Steps that have ended, since the first iteration: forwards and backwards, those of the epilogue as one."""
        self.gathered_after: dict[AllocationId, int] = {}
        """``num_steps`` when the gather of a buffer started, until its first use."""
        self.normed: set[int] = set()
        """Iterations whose norm of all gradients is known."""
        self.normed_alone: set[int] = set()
        """Iterations whose norm of the rank's own shards is known."""
        self.making = {b: task for task in schedule.tasks for b in task.allocates}
        self.level_bytes = schedule.static_bytes(Memory.DEVICE)
        self.peak_bytes = self.level_bytes

    # -- running -----------------------------------------------------------------------------------------------------

    def run(self, adversary: Adversary) -> AbstractMachine:
        """Carry out all iterations.  Raises Violation."""
        total = self.num_iterations * len(self.schedule.tasks)
        while len(self.ended) < total:
            events = self.possible_events()
            if not events:
                raise Violation("deadlock")
            event = adversary(events)
            (self._start if event.is_start else self._end)(event)
        for chunk in self.layout.chunks:
            expected = self.num_iterations if chunk.is_trainable else 0
            if self.steps_of.get(chunk.id, 0) != expected:
                raise Violation(f"chunk {chunk.id} was stepped {self.steps_of.get(chunk.id, 0)} times, not {expected}")
        for buffer, place in zip(self.schedule.buffers, self.places, strict=True):
            if place.is_alive and not buffer.is_static:
                raise Violation(f"buffer {buffer.id} is never freed")
        return self

    def possible_events(self) -> list[Event]:
        """What may happen next."""
        events = []
        for lane, program in self.programs.items():
            if lane in self.running:
                event = self.running[lane]
                events.append(Event(False, event.iteration, event.task))
            elif program and self.num_started[lane] < self.num_iterations * len(program):
                iteration, place = divmod(self.num_started[lane], len(program))
                task = program[place]
                if self._may_start(task, iteration):
                    events.append(Event(True, iteration, task))
        return events

    def _may_start(self, task: Task, iteration: int) -> bool:
        return all((iteration, other) in self.ended for other in task.after) and (
            iteration == 0 or all((iteration - 1, other) in self.ended for other in task.after_previous)
        )

    def _start(self, event: Event) -> None:
        task = event.task
        self.num_started[task.lane] += 1
        self.running[task.lane] = event
        for buffer_id in task.allocates:
            self._allocate(task, buffer_id)
        for buffer_id in task.reads:
            place = self.places[buffer_id]
            if not place.is_alive:
                raise Violation(f"{task.name} reads buffer {buffer_id}, which is not there")
            if place.has_writer:
                raise Violation(f"{task.name} reads buffer {buffer_id} while it is written")
            place.num_readers += 1
            self.seen[task.lane, buffer_id] = place.num_writes
        for buffer_id in task.writes:
            place = self.places[buffer_id]
            own = task.reads.count(buffer_id)
            if not place.is_alive:
                raise Violation(f"{task.name} writes buffer {buffer_id}, which is not there")
            if place.has_writer or place.num_readers > own:
                raise Violation(f"{task.name} writes buffer {buffer_id} while it is used")
            place.has_writer = True
            place.num_writes += 1
        self._check_window(task)
        self._note_level()

    def _allocate(self, task: Task, buffer_id: AllocationId) -> None:
        buffer, place = self.schedule.buffers[buffer_id], self.places[buffer_id]
        if place.is_alive:
            raise Violation(f"{task.name} allocates buffer {buffer_id}, which is there")
        if buffer.slot is not None:
            is_on_device = buffer.memory is Memory.DEVICE
            if not 0 <= buffer.slot < (self.plan.n_buffer if is_on_device else self.plan.n_staging):
                raise Violation(f"{task.name} uses slot {buffer.slot}, which does not exist")
            for other, other_place in zip(self.schedule.buffers, self.places, strict=True):
                if not other_place.is_alive or other.is_static or other.slot is None:
                    continue
                if (other.content, other.memory) != (buffer.content, buffer.memory):
                    continue
                if other.slot == buffer.slot:
                    raise Violation(f"slot {buffer.slot} holds chunks {buffer.chunk} and {other.chunk}")
                if is_on_device and other.chunk == buffer.chunk:
                    raise Violation(f"chunk {buffer.chunk} is in slots {buffer.slot} and {other.slot}")
        place.is_alive, place.value = True, None
        if task.lane is not Lane.COMPUTE and buffer.memory is Memory.DEVICE:
            self.level_bytes += buffer.size_bytes

    def _end(self, event: Event) -> None:
        task = event.task
        made = self._carry_out(task, event.iteration)
        for buffer_id in task.reads:
            place = self.places[buffer_id]
            place.num_readers -= 1
            own = task.writes.count(buffer_id)
            if not place.is_alive or place.num_writes != self.seen[task.lane, buffer_id] + own:
                raise Violation(f"buffer {buffer_id} changes or goes while {task.name} reads it")
        for buffer_id in task.writes:
            place = self.places[buffer_id]
            if not place.is_alive:
                raise Violation(f"buffer {buffer_id} goes while {task.name} writes it")
            place.has_writer = False
            place.value = made[buffer_id]
        del self.running[task.lane]
        if task.lane is Lane.COMPUTE:
            self.level_bytes += sum(
                self.schedule.buffers[b].size_bytes
                for b in task.allocates
                if self.schedule.buffers[b].memory is Memory.DEVICE
            )
        for buffer_id in task.frees:
            place, buffer = self.places[buffer_id], self.schedule.buffers[buffer_id]
            if not place.is_alive or buffer.is_static:
                raise Violation(f"{task.name} frees buffer {buffer_id}, which is not there or there for good")
            if place.num_readers or place.has_writer:
                raise Violation(f"{task.name} frees buffer {buffer_id} while it is used")
            place.is_alive, place.value = False, None
            if buffer.memory is Memory.DEVICE:
                self.level_bytes -= buffer.size_bytes
        self.ended.add((event.iteration, task.id))
        is_at_turn = task.kind is TaskKind.FORWARD and task.section is OuterSection.EPILOGUE
        if task.kind in (TaskKind.FORWARD, TaskKind.BACKWARD) and not is_at_turn:
            self.num_steps += 1
        self._note_level()

    def _note_level(self) -> None:
        level = self.level_bytes
        if Lane.COMPUTE in self.running:
            phase = self.running[Lane.COMPUTE].task.phase
            level += max([0, *(high for _, high in phase.curve)]) if phase is not None else 0
        self.peak_bytes = max(self.peak_bytes, level)

    # -- meaning -----------------------------------------------------------------------------------------------------

    def _carry_out(self, task: Task, iteration: int) -> dict[AllocationId, Value]:
        """The values that the task leaves in what it writes.  Raises Violation if its inputs are not what it needs."""
        held = {self.places[b].value: b for b in task.reads}
        is_limited = self.plan.max_gradient_norm is not None
        if task.kind in (TaskKind.CPU_ADAM, TaskKind.DEVICE_ADAM) and is_limited and iteration not in self.normed:
            raise Violation(f"{task.name} of iteration {iteration} runs before the norm of all gradients is known")
        for value in self.values.needed(task, iteration):
            if value not in held:
                raise Violation(f"{task.name} of iteration {iteration} runs without {value}")
        if task.lane is Lane.COMPUTE:
            for buffer_id in task.reads:
                if self.schedule.buffers[buffer_id].memory is not Memory.DEVICE:
                    raise Violation(f"{task.name} computes on host memory")
        if task.kind is TaskKind.GRADIENT_NORM:
            (self.normed_alone if self.values.norm_is_shared() else self.normed).add(iteration)
        if task.kind is TaskKind.ALL_REDUCE and task.chunk is None and task.section is None:
            if iteration not in self.normed_alone:
                raise Violation(f"{task.name} of iteration {iteration} runs before any norm is known")
            self.normed.add(iteration)
        if task.lane is Lane.DISK:
            values = {self.schedule.buffers[b].content: self.places[b].value or TORN for b in task.reads}
            return {b: values.get(self.schedule.buffers[b].content, TORN) for b in task.writes}
        if task.kind in (TaskKind.GATHER, TaskKind.ALL_GATHER):
            copied = self.places[task.reads[0]].value if task.reads else None
            return dict.fromkeys(task.writes, self.values.gathered(task, copied))
        buffers = self.schedule.buffers
        made = {b: self.values.made(task, buffers[b], iteration, self.places[b].value) for b in task.writes}
        if task.kind in (TaskKind.CPU_ADAM, TaskKind.DEVICE_ADAM):
            for chunk in {self.schedule.buffers[b].chunk for b in task.writes}:
                assert chunk is not None
                written = {buffers[b].content for b in task.writes if buffers[b].chunk == chunk}
                if written != {Content.PARAMETERS, Content.OPTIMIZER_STATE}:
                    raise Violation(f"{task.name} does not write parameters and state of chunk {chunk}")
                self.steps_of[chunk] = self.steps_of.get(chunk, 0) + 1
        return made

    def _check_window(self, task: Task) -> None:
        """Gathers run at most ``prefetch_depth`` steps ahead of their first use, gradients lag at most that behind."""
        depth = self.plan.prefetch_depth
        is_gather = task.kind is TaskKind.GATHER or (
            task.kind is TaskKind.ALL_GATHER and task.chunk in self.values.sharded
        )
        # New values that take no room may come at any time at which nobody uses the old ones.
        if (is_gather and task.chunk not in self.values.host_stepped) or task.kind is TaskKind.ACTIVATION_FETCH:
            for buffer_id in task.writes:
                self.gathered_after[buffer_id] = self.num_steps
        if task.lane is not Lane.COMPUTE or task.section is None:
            return
        for buffer_id in task.reads:
            started = self.gathered_after.pop(buffer_id, self.num_steps)
            if self.num_steps - started > depth:
                raise Violation(f"buffer {buffer_id} was gathered {self.num_steps - started} steps ahead")
        for buffer, place in zip(self.schedule.buffers, self.places, strict=True):
            if buffer.is_static or buffer.memory is not Memory.DEVICE or not place.is_alive or place.value is None:
                continue
            # As many forwards, the epilogue, and as many backwards again.
            num_steps, micro_batches = 2 * len(self.values.sections) - 1, self.plan.micro_batches
            if buffer.content is Content.SWAPPED and self.making[buffer.id].kind is TaskKind.FORWARD:
                _, section, iteration, micro = place.value
                assert isinstance(iteration, int)
                assert isinstance(section, int)
                assert isinstance(micro, int)
                ended = num_steps * (iteration * micro_batches + micro) + 1 + section
                if self.num_steps - ended > depth:
                    raise Violation(f"what block {section} swaps lags {self.num_steps - ended} steps behind")
            if buffer.content not in (Content.GRADIENTS, Content.REDUCED_GRADIENTS):
                continue
            assert buffer.chunk is not None
            if buffer.chunk in self.values.persistent:
                continue
            *_, iteration, micro = place.value
            assert isinstance(iteration, int)
            assert isinstance(micro, int)
            first_step = num_steps * (iteration * micro_batches + micro)
            completing = [self.values.sections.index(section) for section in self.values.completing(buffer.chunk)]
            last_step = first_step + num_steps - 1 - min(completing)
            if self.num_steps - last_step > depth:
                raise Violation(f"gradients of chunk {buffer.chunk} lag {self.num_steps - last_step} steps behind")
