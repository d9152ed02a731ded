"""The rules of bypass distillation: what the compute lane runs, what stages exchange, and that blocks are independent.

What lies where, and what becomes of gradients, is as in full training.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Final

from ..schema.schedule import Allocation, AllocationId, ChunkId, Content, OuterSection, Section, Task, TaskKind
from ..schema.workload import BlockId, Phase
from .claim import Claim, check_amounts, check_earlier, compare_buffers, reject
from .compute_tasks import Expected, Name, check_compute_task, gradients_of
from .full_training import FULL_TRAINING
from .rules import Meeting, Rule, Stage, compare_meetings
from .updates import check_device_adam, check_norm, check_norm_order, check_one_device_adam, check_one_norm


def check_pairs(claim: Claim) -> None:
    """Compute runs the teacher's prologue, then pair by pair both forwards, loss and backward, once per micro-batch.

    Each task runs on the buffers that it needs and no others, makes what its section makes, in its size, and drops what
    nobody needs any more.  Device Adam ends the iteration.
    """
    expected = list(_Walk(claim).entries())
    kinds = (TaskKind.TEACHER_FORWARD, TaskKind.FORWARD, TaskKind.LOSS, TaskKind.BACKWARD, TaskKind.DEVICE_ADAM)
    found = claim.tasks_of(*kinds)
    listed: list[tuple[TaskKind, Section | None]] = [(task.kind, task.section) for task in found]
    asked = [*((entry.kind, entry.section) for entry in expected), (TaskKind.DEVICE_ADAM, None)]
    for place in range(max(len(listed), len(asked))):
        shown = ["nothing" if place >= len(of) else " ".join(map(str, of[place])) for of in (listed, asked)]
        if shown[0] != shown[1]:
            reject(f"compute task {place} is {shown[0]}, the plan asks for {shown[1]}")
    for task, entry in zip(found[:-1], expected, strict=True):
        check_compute_task(claim, task, entry)
        check_amounts(task)


def check_independence(claim: Claim) -> None:
    """A student block's tasks see nothing of another student block, and the teacher is read and never written.

    They read the teacher's outputs before and of their pair, their block's parameters, and what they themselves made.
    Nothing of the teacher's reads or writes anything of the student's.
    """
    for task in claim.schedule.tasks:
        if task.kind in (TaskKind.TEACHER_FORWARD, TaskKind.FORWARD, TaskKind.LOSS, TaskKind.BACKWARD):
            seen = _sections_seen_by(task)
            for buffer_id in (*task.reads, *task.writes):
                if not (met := _sections_of(claim, buffer_id)) <= seen:
                    reject(f"{task.name} sees buffer {buffer_id}, which is of {_shown(met - seen)}")
        for buffer_id in task.writes if task.kind in (TaskKind.CPU_ADAM, TaskKind.DEVICE_ADAM) else ():
            if any(not _is_students(section) for section in _sections_of(claim, buffer_id)):
                reject(f"{task.name} writes buffer {buffer_id}, which is the teacher's")


def _sections_seen_by(task: Task) -> set[Section]:
    """The sections whose buffers a compute task may use."""
    if task.section is None or isinstance(task.section, OuterSection):
        return {OuterSection.PROLOGUE}
    before: Section = BlockId(task.section - 2) if task.section >= 2 else OuterSection.PROLOGUE
    if not _is_students(task.section):
        return {before, task.section}
    before = BlockId(task.section - 3) if task.section >= 3 else OuterSection.PROLOGUE
    return {before, BlockId(task.section - 1), task.section}


def _sections_of(claim: Claim, buffer: AllocationId) -> set[Section]:
    """The section that a buffer belongs to, or those that alone use parameters of its chunk.

    Parameters that stand outside the blocks are frozen, and anybody of the teacher may use them: they count as none's.
    """
    found = claim.buffer(buffer)
    if found.section is not None:
        return {found.section}
    if found.chunk is None:
        return set()
    members = (claim.workload.parameters[placed.index] for placed in claim.layout.chunks[found.chunk].parameters)
    return {BlockId(member.block) for member in members if member.block is not None}


def _is_students(section: Section) -> bool:
    return not isinstance(section, OuterSection) and section % 2 == 1


def _shown(sections: set[Section]) -> str:
    return ", ".join(sorted(map(str, sections)))


# -- stages of a pipeline --------------------------------------------------------------------------------------------


def check_exchanges(claim: Claim) -> None:
    """A stage receives the teacher's activation into the prologue's output, and sends that of its last teacher's block.

    Once per micro-batch each.  The first stage receives nothing, the last one sends nothing, a whole does neither.
    """
    expected: list[Meeting] = []
    stage, last_teacher = claim.workload.stage, BlockId(claim.workload.num_blocks - 2)
    for micro_batch in range(claim.plan.micro_batches):
        if stage is not None and stage.receives_bytes:
            expected.append((TaskKind.RECEIVE, None, OuterSection.PROLOGUE, micro_batch))
        if stage is not None and stage.sends_bytes:
            expected.append((TaskKind.SEND, None, last_teacher, micro_batch))
    compare_meetings(claim, (TaskKind.RECEIVE, TaskKind.SEND), expected)
    for task in claim.tasks_of(TaskKind.RECEIVE, TaskKind.SEND):
        assert stage is not None, "who is no stage exchanges nothing"
        is_received = task.kind is TaskKind.RECEIVE
        activation = _outputs_of(claim, task)
        compare_buffers(task, task.reads, [] if is_received else activation, "reads")
        compare_buffers(task, task.writes, activation if is_received else [], "writes")
        compare_buffers(task, task.allocates, [], "allocates")
        compare_buffers(task, task.frees, [], "frees")
        if task.phase is not None:
            reject(f"{task.name} has a phase")
        check_amounts(task, moved_bytes=stage.receives_bytes if is_received else stage.sends_bytes)


def _outputs_of(claim: Claim, task: Task) -> list[Allocation]:
    """The output of the task's section in its micro-batch."""
    named = (Content.OUTPUT, task.section, task.micro_batch)
    return [b for b in claim.schedule.buffers if (b.content, b.section, b.micro_batch) == named]


def check_exchange_order(claim: Claim) -> None:
    """Whoever reads the prologue's output reads what was received: the prologue has ended before, nobody has begun."""
    for task in claim.tasks_of(TaskKind.RECEIVE):
        for buffer in task.writes:
            check_earlier(claim, claim.allocating[buffer], task.id)
            for user in (*claim.readers[buffer], claim.freeing[buffer]):
                check_earlier(claim, task.id, user)


def check_device_adam_of_pairs(claim: Claim) -> None:
    """Device Adam ends the iteration: it steps what stays on the device, and drops its gradients.

    Beside these it drops what students' backwards have left.
    """
    made = (name for entry in _Walk(claim).entries() for name in entry.makes)
    check_one_device_adam(claim, {name for name in made if name[0] is Content.INCOMING_GRADIENT})


def check_norms_of_blocks(claim: Claim) -> None:
    """Under a limit, the norm of each student block's gradients is taken once, and of no others; without one, never.

    It is taken of all gradients of that block, wherever they are.
    """
    norms = claim.tasks_of(TaskKind.GRADIENT_NORM)
    trained = {} if claim.plan.max_gradient_norm is None else _chunks_of_blocks(claim)
    found, expected = sorted(str(task.section) for task in norms), sorted(map(str, trained))
    if found != expected:
        reject(f"it takes the norms of the gradients of blocks {found}, not of {expected}")
    for task in norms:
        assert task.section is not None
        check_one_norm(claim, task, trained[task.section])


def check_norm_order_of_blocks(claim: Claim) -> None:
    """Under a limit, CPU Adam of a chunk comes after the norm of its block, and device Adam after all norms."""
    norms = {task.section: task for task in claim.tasks_of(TaskKind.GRADIENT_NORM)}
    if not norms:
        return
    block_of = {chunk: block for block, chunks in _chunks_of_blocks(claim).items() for chunk in chunks}
    for adam in claim.tasks_of(TaskKind.CPU_ADAM):
        assert adam.chunk is not None
        check_earlier(claim, norms[block_of[adam.chunk]].id, adam.id)
    for adam in claim.tasks_of(TaskKind.DEVICE_ADAM):
        for norm in norms.values():
            check_earlier(claim, norm.id, adam.id)


def _chunks_of_blocks(claim: Claim) -> dict[Section, set[ChunkId]]:
    """The trainable chunks of every student block that has any.  Raises ScheduleError if two blocks share one."""
    found: dict[Section, set[ChunkId]] = {}
    for chunk in claim.layout.chunks:
        members = (claim.workload.parameters[placed.index] for placed in chunk.parameters)
        blocks = {member.block for member in members if member.trainable}
        if len(blocks) > 1:
            reject(f"chunk {chunk.id} has trained parameters of blocks {_shown({BlockId(b) for b in blocks if b})}")
        if chunk.is_trainable:
            (block,) = blocks
            assert block is not None
            found.setdefault(BlockId(block), set()).add(chunk.id)
    return found


class _Walk:
    """Goes through the compute lane and keeps account of what is alive.

    What the tasks of a pair leave by their net bytes beyond all that is alive by name, gradients that a backward
    completes aside, stays until device Adam.  The last backward lets go of its target too, and of what passes by all
    blocks: its phase does not count these off.
    """

    def __init__(self, claim: Claim) -> None:
        self.claim = claim
        workload = claim.workload
        assert workload.distillation is not None
        self.losses = workload.distillation.losses
        self.first = workload.prologue_forward
        self.passing_bytes = min(workload.distillation.passing_bytes, max(0, self.first.net_bytes))
        self.students = [BlockId(block) for block in range(1, workload.num_blocks, 2)]
        self.micro_batch = 0
        self.alive: dict[Name, int] = {}

    def entries(self) -> Iterator[Expected]:
        for micro_batch in range(self.claim.plan.micro_batches):
            self.micro_batch = micro_batch
            yield self._prologue()
            before: Section = OuterSection.PROLOGUE
            for student in self.students:
                teacher = BlockId(student - 1)
                yield self._teacher(teacher, before)
                yield from self._student(student, teacher, before)
                before = teacher

    def _called(self, content: Content, section: Section) -> Name:
        return (content, None, section, self.micro_batch)

    def _parameters(self, section: Section) -> set[Name]:
        used = self.claim.used_forward[section] | self.claim.used_backward[section]
        return {(Content.PARAMETERS, chunk, None, 0) for chunk in used}

    def _passing(self) -> dict[Name, int]:
        name = self._called(Content.ACTIVATIONS, OuterSection.PROLOGUE)
        return {name: self.passing_bytes} if self.passing_bytes else {}

    def _expect(
        self, kind: TaskKind, section: Section, phase: Phase, reads: set[Name], makes: dict[Name, int]
    ) -> Expected:
        self.alive |= makes
        return Expected(kind, section, self.micro_batch, phase, reads, makes)

    def _prologue(self) -> Expected:
        output = self._called(Content.OUTPUT, OuterSection.PROLOGUE)
        makes = {output: max(0, self.first.net_bytes) - self.passing_bytes} | self._passing()
        reads = self._parameters(OuterSection.PROLOGUE)
        return self._expect(TaskKind.TEACHER_FORWARD, OuterSection.PROLOGUE, self.first, reads, makes)

    def _teacher(self, block: BlockId, before: Section) -> Expected:
        phase = self.claim.workload.profile_of(block).checkpoint_forward
        reads = self._parameters(block) | {self._called(Content.OUTPUT, before)}
        makes = {self._called(Content.OUTPUT, block): max(0, phase.net_bytes)}
        return self._expect(TaskKind.TEACHER_FORWARD, block, phase, reads, makes)

    def _student(self, block: BlockId, teacher: BlockId, before: Section) -> Iterator[Expected]:
        profile = self.claim.workload.profile_of(block)
        loss = self.losses[self.claim.workload.blocks[block].profile]
        given, target = self._called(Content.OUTPUT, before), self._called(Content.OUTPUT, teacher)
        output, saved = self._called(Content.OUTPUT, block), self._called(Content.ACTIVATIONS, block)
        level_bytes = sum(self.alive.values()) + profile.forward.net_bytes + loss.net_bytes
        forward_bytes = max(0, profile.forward.net_bytes)
        makes = {output: min(profile.output_bytes, forward_bytes)}
        makes[saved] = forward_bytes - makes[output]
        parameters = self._parameters(block)
        yield self._expect(TaskKind.FORWARD, block, profile.forward, parameters | {given}, makes)
        scalar = {self._called(Content.LOSS, block): max(0, loss.net_bytes)}
        yield self._expect(TaskKind.LOSS, block, loss, {output, target}, scalar)
        reads = parameters | {given, target, output, saved} | scalar.keys()
        yield self._backward(block, profile.backward, reads, {given, output, saved} | scalar.keys(), level_bytes)

    def _backward(self, block: BlockId, phase: Phase, reads: set[Name], drops: set[Name], level_bytes: int) -> Expected:
        """``drops``: what goes with any backward; ``level_bytes``: that is alive before it, by net bytes."""
        gradients, own_bytes = gradients_of(self.claim, block, self.micro_batch)
        carried_out = phase
        if phase.gradient_bytes is not None:
            own_bytes = phase.gradient_bytes if self.micro_batch else min(own_bytes, phase.gradient_bytes)
        if self.micro_batch and not gradients:
            carried_out = phase.adding
        for name in drops:
            del self.alive[name]
        left_bytes = level_bytes + phase.net_bytes - own_bytes - sum(self.alive.values())
        left = {self._called(Content.INCOMING_GRADIENT, block): left_bytes} if left_bytes > 0 else {}
        if block == self.students[-1]:
            also = {self._called(Content.OUTPUT, BlockId(block - 1)), *self._passing()}
            drops = drops | also
            for name in also:
                del self.alive[name]
        self.alive |= left
        kept = self.claim.completed[block].keys() & self.claim.persistent if self.micro_batch else set()
        updates: set[Name] = {(Content.GRADIENTS, chunk, block, 0) for chunk in kept}
        return Expected(
            TaskKind.BACKWARD,
            block,
            self.micro_batch,
            carried_out,
            reads | updates,
            left | gradients,
            updates,
            drops,
        )


_OF_PAIRS: Final[dict[Callable[[Claim], None], Callable[[Claim], None]]] = {
    check_device_adam: check_device_adam_of_pairs,
    check_norm: check_norms_of_blocks,
    check_norm_order: check_norm_order_of_blocks,
}
BYPASS: Final = replace(
    FULL_TRAINING,
    sections=(
        Rule(
            Stage.PROGRAM,
            check_pairs,
            (TaskKind.TEACHER_FORWARD, TaskKind.FORWARD, TaskKind.LOSS, TaskKind.BACKWARD),
        ),
        Rule(Stage.CHUNKS, check_independence),
        Rule(Stage.RANKS, check_exchanges, (TaskKind.RECEIVE, TaskKind.SEND)),
        Rule(Stage.RANK_ORDER, check_exchange_order),
    ),
    updates=tuple(replace(rule, check=_OF_PAIRS.get(rule.check, rule.check)) for rule in FULL_TRAINING.updates),
)
"""What every schedule of bypass distillation must be.  Each rule states itself in its docstring."""
