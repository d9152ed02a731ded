"""The section program: what the compute lane runs, in which order, and the activations that pass along it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import pairwise

from ..schema.plan import ActivationMode
from ..schema.schedule import ChunkId, Content, Lane, OuterSection, Section, Task, TaskKind
from ..schema.workload import BlockId, Phase
from .claim import Claim, check_amounts, check_earlier, reject
from .compute_tasks import (
    Expected,
    Name,
    check_compute_task,
    completing_tables,
    gradients_of,
    looking_up,
    phases_of_prologue,
    with_buckets,
    with_cached_keys,
    with_held_inputs,
)


def check_program(claim: Claim) -> None:
    """The compute lane runs forward through all sections and backward through them, once per micro-batch.

    Recomputations stand before the backwards of checkpointed blocks, device Adam ends the iteration.  Each task runs on
    the buffers that it needs and no others, makes what its section makes, in its size, and drops what nobody needs any
    more.
    """
    expected = list(_Walk(claim).entries())
    found = claim.tasks_of(TaskKind.FORWARD, TaskKind.RECOMPUTE, TaskKind.BACKWARD, TaskKind.DEVICE_ADAM)
    listed = [(task.kind, task.section) for task in found]
    asked: list[tuple[TaskKind, Section | None]] = [(entry.kind, entry.section) for entry in expected]
    asked.append((TaskKind.DEVICE_ADAM, None))
    for place in range(max(len(listed), len(asked))):
        shown = [_shown(entries[place]) if place < len(entries) else "nothing" for entries in (listed, asked)]
        if shown[0] != shown[1]:
            reject(f"compute task {place} is {shown[0]}, the plan asks for {shown[1]}")
    for task, entry in zip(found[:-1], expected, strict=True):
        check_compute_task(claim, task, entry)
        check_amounts(task)


def check_exchanges(claim: Claim) -> None:
    """Ranks that share sequences exchange what each step says, in a task of its own that moves just that."""
    for step, exchange in _exchanges(claim):
        sizes = _exchanged(step)
        check_amounts(exchange, moved_bytes=sum(sizes), num_tensors=len(sizes))
        if exchange.phase is not None or exchange.chunk is not None:
            reject(f"{exchange.name} names a phase or a chunk")
        if exchange.reads or exchange.writes or exchange.allocates or exchange.frees:
            reject(f"{exchange.name} uses buffers; what exchanges take is part of {step[0].name}")


def check_exchange_order(claim: Claim) -> None:
    """Exchanges begin behind the compute task before their step, which begins behind them."""
    before = dict(pairwise(reversed(claim.schedule.lanes[Lane.COMPUTE])))
    for step, exchange in _exchanges(claim):
        check_earlier(claim, before[step[0].id], exchange.id)
        check_earlier(claim, exchange.id, step[0].id)


def _exchanged(step: list[Task]) -> list[int]:
    return [size_bytes for task in step if task.phase is not None for size_bytes in task.phase.exchanges]


def _exchanges(claim: Claim) -> Iterator[tuple[list[Task], Task]]:
    """Steps that exchange something, each with its task.  Raises ScheduleError unless each has one, in order."""
    found: dict[tuple[Section | None, int], list[Task]] = {}
    for task in claim.tasks_of(TaskKind.SEQUENCE_EXCHANGE):
        found.setdefault((task.section, task.micro_batch), []).append(task)
    for numbers in claim.steps:
        step = [claim.schedule.tasks[number] for number in numbers]
        if _exchanged(step):
            own = found.get((step[0].section, step[0].micro_batch))
            if not own:
                reject(f"{step[0].name} lacks its exchanges of the sequence")
            yield step, own.pop(0)
    left = [task for tasks in found.values() for task in tasks]
    if left:
        reject(f"{left[0].name} is of no step that exchanges anything")


def _shown(entry: tuple[TaskKind, Section | None]) -> str:
    kind, section = entry
    return f"{kind} {'' if section is None else section}"


class _Walk:
    """Goes through the compute lane and keeps account of what is alive.

    The level of activations is known from the phases' net bytes.  What a backward leaves behind beyond saved
    activations, outputs and the gradients that it completes must lie in its INCOMING_GRADIENT buffer.  What is swapped
    counts as alive from forward to backward, since phases do not know of it; and so does an input that is offloaded,
    which is a buffer of its own beside the output of the block before.

    What the prologue makes and the epilogue's forward lets go of, shared inputs that no block holds, is an ACTIVATIONS
    buffer of the prologue.  What a block makes and the next section's backward lets go of counts as its output, where
    phases tell how much that is: where no block is checkpointed.
    """

    def __init__(self, claim: Claim) -> None:
        self.claim = claim
        self.blocks = [BlockId(block) for block in range(claim.workload.num_blocks)]
        self.sections = claim.sections
        self.micro_batch = 0
        self.level_bytes = 0
        self.gone_bytes = 0
        self.made: Counter[BlockId] = Counter()
        """What each block makes and the epilogue's forward lets go of, since no block keeps it."""
        self.held, self.kept, self.freed = self._shared_inputs()
        self.passing_bytes = min(self.gone_bytes, max(0, phases_of_prologue(claim)[0].net_bytes))
        self.between_bytes: Counter[BlockId] = Counter()
        self.between_bytes = self._between_blocks()
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
                is_checkpointed = self._mode(block).is_recomputed
                if block in (shared.checkpointed_by if is_checkpointed else shared.kept_by):
                    goes_with = block
                if block in (shared.freed_in_checkpointed if is_checkpointed else shared.freed_in_kept):
                    counted.add(block)
            goes = set() if goes_with is None else {goes_with}
            if not goes and shared.made_by is not None:
                self.made[BlockId(shared.made_by)] += shared.size_bytes
            elif not goes and shared.let_go_by is None:
                self.gone_bytes += shared.size_bytes
            if goes and shared.made_by is None:
                held[OuterSection.EPILOGUE if shared.let_go_by is None else BlockId(shared.let_go_by)] += (
                    shared.size_bytes
                )
            kept.update(dict.fromkeys(counted - goes, shared.size_bytes))
            freed.update(dict.fromkeys(goes - counted, shared.size_bytes))
        return held, kept, freed

    def _between_blocks(self) -> Counter[BlockId]:
        """Of what a block saves, the bytes by which the next section's backward leaves less than all that is saved."""
        found: Counter[BlockId] = Counter()
        if any(self._mode(block).is_recomputed for block in self.blocks):
            return found
        forwards = [self._phase_of_forward(section) for section in self.sections]
        level_bytes = sum(phase.net_bytes for phase in forwards) - sum(self.claim.swapping.values())
        made = [self._made_by_block(block) for block in self.blocks]
        for block in reversed(self.blocks):
            following = self.sections[self.sections.index(block) + 1]
            phase = self._phase_of_backward(following)
            own_bytes = gradients_of(self.claim, following, 0)[1]
            own_bytes = own_bytes if phase.gradient_bytes is None else min(own_bytes, phase.gradient_bytes)
            level_bytes += phase.net_bytes - own_bytes + sum(self._swapped(following).values())
            _, saved_bytes = made.pop()
            others_bytes = max(0, forwards[0].net_bytes) - self.passing_bytes + sum(map(sum, made))
            found[block] = min(saved_bytes, max(0, others_bytes + saved_bytes - level_bytes))
        return found

    def _phase_of_forward(self, section: Section) -> Phase:
        workload = self.claim.workload
        if section is OuterSection.PROLOGUE:
            return phases_of_prologue(self.claim)[0]
        if section is OuterSection.EPILOGUE:
            return workload.epilogue_forward.with_shared(held_bytes=self.held[section], freed_bytes=self.made.total())
        phase = workload.profile_of(section).forward_in(self._mode(section))
        return phase.with_shared(held_bytes=self.held[section])

    def _phase_of_backward(self, section: Section) -> Phase:
        workload = self.claim.workload
        if section is OuterSection.PROLOGUE:
            phase = phases_of_prologue(self.claim)[1]
        elif section is OuterSection.EPILOGUE:
            phase = workload.epilogue_backward
        else:
            phase = workload.profile_of(section).backward_in(self._mode(section))
            phase = phase.with_shared(held_bytes=self.kept[section], freed_bytes=self.freed[section])
        return completing_tables(self.claim, section, phase)

    def _made_by_block(self, block: BlockId) -> tuple[int, int]:
        """Output of a block that is not checkpointed, and what it saves and keeps on the device."""
        left_bytes = max(0, self._phase_of_forward(block).net_bytes - sum(self._swapped(block).values()))
        output_bytes = min(self.claim.workload.profile_of(block).output_bytes, left_bytes)
        output_bytes += self.between_bytes[block]
        return output_bytes, left_bytes - output_bytes

    def entries(self) -> Iterator[Expected]:
        for micro_batch in range(self.claim.plan.micro_batches):
            self.micro_batch = micro_batch
            for section in self.sections:
                yield with_buckets(self.claim, with_cached_keys(self.claim, self._forward(section)))
            for section in reversed(self.sections):
                if self._mode(section).is_recomputed:
                    yield self._recompute(section)
                yield with_buckets(self.claim, with_held_inputs(self.claim, self._backward(section)))

    def _expect(
        self,
        kind: TaskKind,
        section: Section,
        phase: Phase,
        reads: set[Name],
        makes: dict[Name, int],
        drops: set[Name],
    ) -> Expected:
        self.level_bytes += phase.net_bytes
        self.alive |= makes
        for name in drops:
            del self.alive[name]
        return Expected(kind, section, self.micro_batch, phase, reads, makes, drops=drops)

    def _called(self, content: Content, section: Section) -> Name:
        return (content, None, section, self.micro_batch)

    def _mode(self, section: Section) -> ActivationMode:
        return ActivationMode.KEEP if isinstance(section, OuterSection) else self.claim.modes[section]

    def _swapped(self, section: Section) -> dict[Name, int]:
        size_bytes = 0 if isinstance(section, OuterSection) else self.claim.swapping.get(section, 0)
        return {self._called(Content.SWAPPED, section): size_bytes} if size_bytes else {}

    def _parameters(self, used: dict[Section, set[ChunkId]], section: Section) -> set[Name]:
        return {(Content.PARAMETERS, chunk, None, 0) for chunk in used[section]}

    def _input(self, section: Section) -> set[Name]:
        if section is OuterSection.PROLOGUE:
            return set()
        output = self._called(Content.OUTPUT, self.sections[self.sections.index(section) - 1])
        return {output} | self._offloaded(section).keys()

    def _offloaded(self, section: Section) -> dict[Name, int]:
        """The input of a block in mode OFFLOAD_INPUT, which the block before makes."""
        size_bytes = 0 if isinstance(section, OuterSection) else self.claim.offloaded_inputs.get(section, 0)
        return {self._called(Content.SWAPPED, section): size_bytes} if size_bytes else {}

    def _passing_of_blocks(self) -> dict[Name, int]:
        """What recomputed blocks have made that goes with the epilogue's forward."""
        found = {self._called(Content.ACTIVATIONS, b): 0 for b in self.blocks if self._mode(b).is_recomputed}
        return {name: size_bytes for name in found if (size_bytes := self.alive.get(name, 0))}

    def _kept_results(self, block: BlockId, left_bytes: int) -> dict[Name, int]:
        """What a block in mode SELECTIVE keeps of the bytes that its forward leaves."""
        size_bytes = min(self.claim.workload.profile_of(block).kept_bytes, left_bytes)
        return {self._called(Content.KEPT_RESULTS, block): size_bytes} if size_bytes else {}

    def _forward(self, section: Section) -> Expected:
        output, saved = self._called(Content.OUTPUT, section), self._called(Content.ACTIVATIONS, section)
        phase = self._phase_of_forward(section)
        passing = {self._called(Content.ACTIVATIONS, OuterSection.PROLOGUE): self.passing_bytes}
        passing = passing if self.passing_bytes else {}
        drops: set[Name] = set()
        if section is OuterSection.PROLOGUE:
            makes = {output: max(0, phase.net_bytes) - self.passing_bytes} | passing
        elif section is OuterSection.EPILOGUE:
            passing |= self._passing_of_blocks()
            makes = {saved: max(0, phase.net_bytes + sum(passing.values()))}
            drops = set(passing)
        elif self._mode(section).is_recomputed:
            makes = {output: max(0, phase.net_bytes)}
            if kept := self._kept_results(section, makes[output]):
                makes = {output: makes[output] - sum(kept.values())} | kept
            if passing_bytes := min(self.made[section], makes[output]):
                makes = {**makes, output: makes[output] - passing_bytes, saved: passing_bytes}
        else:
            output_bytes, saved_bytes = self._made_by_block(section)
            makes = {output: output_bytes, saved: saved_bytes} | self._swapped(section)
        if section is not OuterSection.EPILOGUE:
            leaving = self._offloaded(self.sections[self.sections.index(section) + 1])
            makes = makes | leaving
            makes[output] = max(0, makes[output] - sum(leaving.values()))
        reads = self._parameters(self.claim.used_forward, section) | self._input(section)
        entry = self._expect(TaskKind.FORWARD, section, phase, reads, makes, drops)
        return looking_up(self.claim, entry) if section is OuterSection.PROLOGUE else entry

    def _recompute(self, section: Section) -> Expected:
        assert not isinstance(section, OuterSection)
        phase = self.claim.workload.profile_of(section).recompute
        makes = {self._called(Content.ACTIVATIONS, section): max(0, phase.net_bytes)}
        reads = self._parameters(self.claim.used_backward, section) | self._input(section)
        reads |= self.alive.keys() & {self._called(Content.KEPT_RESULTS, section)}
        return self._expect(TaskKind.RECOMPUTE, section, phase, reads, makes, set())

    def _backward(self, section: Section) -> Expected:
        output = self._called(Content.OUTPUT, OuterSection.PROLOGUE)
        saved = {self._called(Content.ACTIVATIONS, section)}
        gradients, own_bytes = gradients_of(self.claim, section, self.micro_batch)
        phase = self._phase_of_backward(section)
        if section is OuterSection.PROLOGUE:
            consumed = {output}
            drops = set(consumed)
        elif section is OuterSection.EPILOGUE:
            consumed = saved | self._input(section)
            drops = set(consumed)
        else:
            consumed = saved | self._input(section) | self._swapped(section).keys()
            consumed |= self.alive.keys() & {self._called(Content.KEPT_RESULTS, section)}
            # The first block's input is the prologue's output, which the prologue's own backward drops.
            drops = consumed - {output}
        if section is not OuterSection.EPILOGUE:
            incoming = self._called(Content.INCOMING_GRADIENT, self.sections[self.sections.index(section) + 1])
            consumed = consumed | {incoming}
            drops = drops | {incoming}
        # Of parameters that nothing uses there is room for gradients, but there are none.
        if phase.gradient_bytes is not None:
            own_bytes = min(own_bytes, phase.gradient_bytes)
        carried_out = phase
        if self.micro_batch or self.claim.keeping.keeps_gradients:
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
        reads = self._parameters(self.claim.used_backward, section) | consumed | updates
        return Expected(TaskKind.BACKWARD, section, self.micro_batch, carried_out, reads, makes, updates, drops)

    def _added_to(self, section: Section) -> set[Name]:
        """Gradients that a backward adds to: of the first micro-batch where they stay on the device, or for good."""
        completed = self.claim.completed[section]
        added = [chunk for chunk in completed if self.claim.is_added_to(chunk, self.micro_batch)]
        return {(Content.GRADIENTS, chunk, section, 0) for chunk in added}
