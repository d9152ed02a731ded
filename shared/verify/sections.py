"""What every compute task runs on, makes and drops.

Buffers are named here by what they hold: content, chunk, section and micro-batch.  Within one iteration such a name is
unique, save for gathered parameters and swapped activations, of which ``verify_order`` shows that the one that is read
is there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from ..layout.adam_memory import WIDENED_SCALARS
from ..schema.plan import ActivationMode
from ..schema.schedule import (
    Allocation,
    AllocationId,
    ChunkId,
    Content,
    Lane,
    Memory,
    OuterSection,
    Section,
    Task,
    TaskKind,
)
from ..schema.workload import BlockId, Phase
from .claim import Claim, reject
from .shards import fullest_regions

Name = tuple[Content, ChunkId | None, Section | None, int]
"""The micro-batch is -1 for what a device has for good of a chunk that is sharded over all of them."""


@dataclass(frozen=True)
class _Expected:
    """One entry of the compute lane."""

    kind: TaskKind
    section: Section | None
    micro_batch: int
    phase: Phase | None
    reads: set[Name]
    makes: dict[Name, int] = field(default_factory=dict)
    """What it allocates and writes, with sizes."""
    updates: set[Name] = field(default_factory=set)
    """What it writes that was there before."""
    drops: set[Name] = field(default_factory=set)
    """What it frees, gathered parameters aside."""


def check_sections(claim: Claim) -> None:
    """Raise ScheduleError unless the compute lane is forward through all sections and backward through them."""
    expected = list(_Walk(claim).entries())
    found = [task for task in claim.schedule.tasks if task.lane is Lane.COMPUTE]
    for place in range(max(len(found), len(expected))):
        shown = [
            f"{entries[place].kind} {_shown(entries[place].section)}" if place < len(entries) else "nothing"
            for entries in (found, expected)
        ]
        if shown[0] != shown[1]:
            reject(f"compute task {place} is {shown[0]}, the plan asks for {shown[1]}")
    for task, entry in zip(found, expected, strict=True):
        _check_entry(claim, task, entry)


def _shown(section: Section | None) -> str:
    return "" if section is None else str(section)


def _check_entry(claim: Claim, task: Task, entry: _Expected) -> None:
    if task.chunk is not None:
        reject(f"{task.name} is a compute task and names a chunk")
    if task.micro_batch != entry.micro_batch:
        reject(f"{task.name} is of micro-batch {task.micro_batch}, not {entry.micro_batch}")
    if task.phase is not entry.phase and task.phase != entry.phase:
        reject(f"{task.name} has another phase than the workload gives it")
    for buffer_id in (*task.reads, *task.writes, *task.allocates, *task.frees):
        if claim.buffer(buffer_id).memory is not Memory.DEVICE:
            reject(f"{task.name} touches buffer {buffer_id} in {claim.buffer(buffer_id).memory} memory")
    _compare(task, "reads", _names(claim, task.reads), entry.reads)
    _compare(task, "writes", _names(claim, task.writes), entry.updates | entry.makes.keys())
    _compare(task, "allocates", _names(claim, task.allocates), set(entry.makes))
    released = [buffer for buffer in task.frees if claim.is_gathered(buffer)]
    _compare(task, "frees", _names(claim, (b for b in task.frees if b not in released)), entry.drops)
    if not set(released) <= set(task.reads):
        reject(f"{task.name} frees a gathered chunk that it does not use")
    for buffer_id in task.allocates:
        buffer = claim.buffer(buffer_id)
        size_bytes = entry.makes[_name(claim, buffer)]
        if buffer.size_bytes != size_bytes:
            reject(f"{task.name} allocates {buffer.size_bytes} bytes of {buffer.content}, not {size_bytes}")


def _names(claim: Claim, buffers: Iterable[AllocationId]) -> list[Name]:
    return [_name(claim, claim.buffer(buffer)) for buffer in buffers]


def _name(claim: Claim, buffer: Allocation) -> Name:
    if buffer.is_static and buffer.chunk in claim.sharded:
        return _part(buffer.content, buffer.chunk)
    # A chunk may be gathered for one micro-batch and still be there for the next.
    micro_batch = 0 if buffer.content is Content.PARAMETERS else buffer.micro_batch
    return (buffer.content, buffer.chunk, buffer.section, micro_batch)


def _part(content: Content, chunk: ChunkId) -> Name:
    return (content, chunk, None, -1)


def _compare(task: Task, verb: str, found: list[Name], expected: set[Name]) -> None:
    if len(found) != len(expected) or set(found) != expected:
        missing = sorted(map(_describe, expected - set(found)))
        extra = sorted(map(_describe, (name for name in found if name not in expected or found.count(name) > 1)))
        reject(f"{task.name} {verb} {extra or 'nothing'} too much and {missing or 'nothing'} too little")


def _describe(name: Name) -> str:
    content, chunk, section, micro_batch = name
    where = [f"{'part of ' if micro_batch < 0 else ''}chunk {chunk}"] if chunk is not None else []
    where += [f"section {section}"] if section is not None else []
    return " ".join([content, *where, *([f"of micro-batch {micro_batch}"] if micro_batch > 0 else [])])


class _Walk:
    """Goes through the compute lane and keeps account of what is alive.

    The level of activations is known from the phases' net bytes.  What a backward leaves behind beyond saved
    activations, outputs and the gradients of its block must lie in its INCOMING_GRADIENT buffer.  What is swapped
    counts as alive from forward to backward, since phases do not know of it.
    """

    def __init__(self, claim: Claim) -> None:
        self.claim = claim
        self.blocks = [BlockId(block) for block in range(claim.workload.num_blocks)]
        self.sections: list[Section] = [OuterSection.PROLOGUE, *self.blocks, OuterSection.EPILOGUE]
        self.micro_batch = 0
        self.level_bytes = 0
        self.held, self.kept, self.freed = self._shared_inputs()
        self.alive: dict[Name, int] = {}

    def _shared_inputs(self) -> tuple[Counter[Section], Counter[Section], Counter[Section]]:
        """Shared bytes: that a section's forward does not let go of, that its backward does not, and that it does.

        Found from behind, as backward goes: what a later block holds stays as long as an earlier one holds it too.
        """
        held: Counter[Section] = Counter()
        kept: Counter[Section] = Counter()
        freed: Counter[Section] = Counter()
        for shared in self.claim.workload.shared_inputs:
            goes_with: Section | None = None
            counted: set[Section] = set()
            for block in reversed(self.blocks):
                is_checkpointed = self._mode(block) is ActivationMode.CHECKPOINT
                if block in (shared.checkpointed_by if is_checkpointed else shared.kept_by):
                    goes_with = block
                if block in (shared.freed_in_checkpointed if is_checkpointed else shared.freed_in_kept):
                    counted.add(block)
            goes = set() if goes_with is None else {goes_with}
            if goes:
                held[OuterSection.EPILOGUE if shared.let_go_by is None else BlockId(shared.let_go_by)] += (
                    shared.size_bytes
                )
            kept.update(dict.fromkeys(counted - goes, shared.size_bytes))
            freed.update(dict.fromkeys(goes - counted, shared.size_bytes))
        return held, kept, freed

    def entries(self) -> Iterator[_Expected]:
        for micro_batch in range(self.claim.plan.micro_batches):
            self.micro_batch = micro_batch
            yield from (self._forward(section) for section in self.sections)
            for section in reversed(self.sections):
                if self._mode(section) is ActivationMode.CHECKPOINT:
                    yield self._recompute(section)
                yield self._backward(section)
        self.micro_batch = 0
        yield self._device_adam()

    def _expect(
        self, kind: TaskKind, section: Section, phase: Phase, reads: set[Name], makes: dict[Name, int]
    ) -> _Expected:
        self.level_bytes += phase.net_bytes
        self.alive |= makes
        return _Expected(kind, section, self.micro_batch, phase, reads, makes)

    def _called(self, content: Content, section: Section) -> Name:
        return (content, None, section, self.micro_batch)

    def _mode(self, section: Section) -> ActivationMode:
        return ActivationMode.KEEP if isinstance(section, OuterSection) else self.claim.modes[section]

    def _swapped(self, section: Section) -> dict[Name, int]:
        size_bytes = 0 if isinstance(section, OuterSection) else self.claim.swapping.get(section, 0)
        return {self._called(Content.SWAPPED, section): size_bytes} if size_bytes else {}

    def _parameters(self, section: Section) -> set[Name]:
        layout = self.claim.layout
        chunks = layout.unowned if isinstance(section, OuterSection) else layout.chunks_of_block[section]
        return {(Content.PARAMETERS, chunk, None, 0) for chunk in chunks}

    def _input(self, section: Section) -> set[Name]:
        if section is OuterSection.PROLOGUE:
            return set()
        return {self._called(Content.OUTPUT, self.sections[self.sections.index(section) - 1])}

    def _forward(self, section: Section) -> _Expected:
        workload = self.claim.workload
        output, saved = self._called(Content.OUTPUT, section), self._called(Content.ACTIVATIONS, section)
        if section is OuterSection.PROLOGUE:
            phase = workload.prologue_forward
            makes = {output: max(0, phase.net_bytes)}
        elif section is OuterSection.EPILOGUE:
            phase = workload.epilogue_forward.with_shared(held_bytes=self.held[section])
            makes = {saved: max(0, phase.net_bytes)}
        else:
            profile = workload.profile_of(section)
            phase = profile.forward_in(self._mode(section)).with_shared(held_bytes=self.held[section])
            if self._mode(section) is ActivationMode.CHECKPOINT:
                makes = {output: max(0, phase.net_bytes)}
            else:
                swapped = self._swapped(section)
                left_bytes = max(0, phase.net_bytes - sum(swapped.values()))
                output_bytes = min(profile.output_bytes, left_bytes)
                makes = {output: output_bytes, saved: left_bytes - output_bytes} | swapped
        return self._expect(TaskKind.FORWARD, section, phase, self._parameters(section) | self._input(section), makes)

    def _recompute(self, section: Section) -> _Expected:
        assert not isinstance(section, OuterSection)
        phase = self.claim.workload.profile_of(section).recompute
        makes = {self._called(Content.ACTIVATIONS, section): max(0, phase.net_bytes)}
        return self._expect(TaskKind.RECOMPUTE, section, phase, self._parameters(section) | self._input(section), makes)

    def _backward(self, section: Section) -> _Expected:
        workload = self.claim.workload
        output = self._called(Content.OUTPUT, OuterSection.PROLOGUE)
        saved = {self._called(Content.ACTIVATIONS, section)}
        gradients: dict[Name, int] = {}
        own_bytes = 0
        if section is OuterSection.PROLOGUE:
            phase = workload.prologue_backward
            consumed = {output}
            drops = set(consumed)
        elif section is OuterSection.EPILOGUE:
            phase = workload.epilogue_backward
            consumed = saved | self._input(section)
            drops = set(consumed)
        else:
            phase = workload.profile_of(section).backward_in(self._mode(section))
            phase = phase.with_shared(held_bytes=self.kept[section], freed_bytes=self.freed[section])
            gradients, own_bytes = self._gradients(section)
            # Of parameters that nothing uses there is room for gradients, but there are none.
            if phase.gradient_bytes is not None:
                own_bytes = min(own_bytes, phase.gradient_bytes)
            consumed = saved | self._input(section) | self._swapped(section).keys()
            # The first block's input is the prologue's output, which the prologue's own backward drops.
            drops = consumed - {output}
        if section is not OuterSection.EPILOGUE:
            incoming = self._called(Content.INCOMING_GRADIENT, self.sections[self.sections.index(section) + 1])
            consumed = consumed | {incoming}
            drops = drops | {incoming}
        carried_out = phase
        if self.micro_batch:
            # Gradients are there already: what the phase would leave of them is added to these.
            own_bytes = own_bytes if phase.gradient_bytes is None else phase.gradient_bytes
            carried_out = phase if gradients else phase.adding
        self.level_bytes += phase.net_bytes - own_bytes
        for name in drops:
            del self.alive[name]
        handed = self._called(Content.INCOMING_GRADIENT, section)
        size_bytes = max(0, self.level_bytes - sum(self.alive.values()))
        self.alive[handed] = size_bytes
        makes = {handed: size_bytes} | gradients
        updates = self._added_to(section)
        reads = self._parameters(section) | consumed | updates
        return _Expected(TaskKind.BACKWARD, section, self.micro_batch, carried_out, reads, makes, updates, drops)

    def _added_to(self, section: Section) -> set[Name]:
        """Gradients of the first micro-batch that a later one's backward adds to, where they stay on the device."""
        if not self.micro_batch or section is OuterSection.EPILOGUE:
            return set()
        if section is OuterSection.PROLOGUE:
            return {(Content.INCOMING_GRADIENT, None, section, 0)}
        chunks = [self.claim.layout.chunks[chunk] for chunk in self.claim.layout.chunks_of_block[section]]
        return {
            (Content.GRADIENTS, chunk.id, section, 0)
            for chunk in chunks
            if chunk.id in self.claim.persistent and chunk.gradient_bytes[chunk.blocks.index(section)]
        }

    def _gradients(self, block: BlockId) -> tuple[dict[Name, int], int]:
        """What the block's backward makes anew, and the bytes of all its gradients."""
        chunks = [self.claim.layout.chunks[chunk] for chunk in self.claim.layout.chunks_of_block[block]]
        sizes = {chunk.id: chunk.gradient_bytes[chunk.blocks.index(block)] for chunk in chunks}
        made: dict[Name, int] = {
            (Content.GRADIENTS, chunk, block, self.micro_batch): size
            for chunk, size in sizes.items()
            if size and not (self.micro_batch and chunk in self.claim.persistent)
        }
        return made, sum(sizes.values())

    def _device_adam(self) -> _Expected:
        trainable = {
            chunk.id for chunk in self.claim.layout.chunks if chunk.is_trainable and chunk.id in self.claim.persistent
        }
        updates: set[Name] = {(Content.PARAMETERS, chunk, None, 0) for chunk in trainable}
        updates |= {(Content.OPTIMIZER_STATE, chunk, None, 0) for chunk in trainable}
        drops: set[Name] = {
            (Content.INCOMING_GRADIENT, None, OuterSection.PROLOGUE, micro_batch)
            for micro_batch in range(self.claim.plan.micro_batches)
        }
        for block in self.blocks:
            drops |= {name for name in self._gradients(block)[0] if name[1] in trainable}
        parts: set[Name] = {_part(Content.REDUCED_GRADIENTS, chunk) for chunk in self.claim.scattered}
        for content in (Content.PARAMETERS, Content.OPTIMIZER_STATE):
            updates |= {_part(content, chunk) for chunk in self.claim.scattered}
        phase = self._widening(trainable)
        return _Expected(TaskKind.DEVICE_ADAM, None, 0, phase, updates | drops | parts, updates=updates, drops=drops)

    def _widening(self, stepped: set[ChunkId]) -> Phase | None:
        """Device Adam's curve: one narrow gradient after another in float32, when the wide ones have gone.

        Last come those of parts, run by run, which stay.
        """
        chunks = (chunk for chunk in self.claim.layout.chunks if chunk.id in stepped)
        places = (placed.index for chunk in chunks for placed in chunk.parameters)
        found = [p for p in (self.claim.workload.parameters[place] for place in places) if p.trainable]
        level = -sum(p.size_bytes for p in found if p.dtype.item_bytes >= 4)
        highest = 0
        for parameter in found:
            if parameter.dtype.item_bytes < 4:
                highest = max(highest, level + 4 * min(parameter.num_elements, WIDENED_SCALARS))
                level -= parameter.size_bytes
        for chunk_id in self.claim.scattered:
            runs = fullest_regions(
                self.claim.layout.chunks[chunk_id], self.claim.workload.parameters, self.claim.plan.num_ranks
            )
            for dtype, scalars in runs:
                if dtype.item_bytes < 4:
                    highest = max(highest, level + 4 * min(scalars, WIDENED_SCALARS))
        return Phase(curve=((1.0, highest),)) if highest else None
