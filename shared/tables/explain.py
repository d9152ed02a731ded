"""What a plan does with every block and chunk, in figures and in words: read off its schedule, before anything runs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from ..basics.units import format_bytes
from ..compile.compile import compile_schedule
from ..factors.words import projection_sentences
from ..layout.layout import Chunk, Layout, layout_of
from ..layout.uses import numbered_section
from ..optimizers.state import master_bytes, summed_dtype
from ..schema.plan import ActivationMode, ParallelMode, Plan, TrainingMethod
from ..schema.schedule import (
    Allocation,
    ChunkId,
    Content,
    Lane,
    Memory,
    Schedule,
    Section,
    TaskKind,
    in_kind_order,
)
from ..schema.workload import Workload
from ..verify.guaranteed_peak import guaranteed_device_peak
from .labels import LANE_NAMES, MEMORY_NAMES, NO_VALUE, format_share, kind_name, knobs
from .memory import stays_sentence
from .table import Heading, Parts, Table
from .terminal import as_text
from .workloads import memory_words


class Stepper(StrEnum):
    """Who steps a chunk, as plans have it."""

    CPU_ADAM = "CPU Adam"
    DEVICE_ADAM = "device Adam"
    NOBODY = "nobody, frozen"

    def named(self, optimizer: str) -> str:
        """In words, where ``optimizer`` steps in the place of Adam: ``"CPU SGD"``."""
        place = {Stepper.CPU_ADAM: "CPU", Stepper.DEVICE_ADAM: "device"}.get(self)
        return f"{place} {optimizer}" if place is not None else str(self)


@dataclass(frozen=True, slots=True)
class SectionAccount:
    """What one iteration does with a block, or with the part before the first or after the last."""

    section: Section
    name: str
    mode: ActivationMode
    chunks: tuple[ChunkId, ...]
    kept_bytes: int
    """On the device from its forward to its backward: its output, and what it saved that stays; of one micro-batch."""
    recomputed_bytes: int
    """Saved activations that recomputation makes again, of all micro-batches."""
    moved_bytes: int
    """Saved activations to the host and back, of all micro-batches."""


@dataclass(frozen=True, slots=True)
class ChunkAccount:
    """What one iteration does with a chunk."""

    chunk: Chunk
    num_scalars: int
    is_sharded: bool
    """Whether it is sharded over the devices: each has a part of it."""
    slots: tuple[int, ...]
    """The buffers that it is gathered into; none if it stays on the device."""
    num_gathers: int
    gathered_bytes: int
    gradient_bytes: int
    """Gradients sent to the host."""
    stepper: Stepper
    parameter_homes: frozenset[Memory]
    """Where parameters lie for good."""
    state_on_disk: bool
    """Whether its optimizer state lies on the host's disk."""

    @property
    def is_on_disk(self) -> bool:
        """Whether its parameters lie on the host's disk."""
        return Memory.DISK in self.parameter_homes

    @property
    def is_looked_up(self) -> bool:
        """Whether the host looks rows of it up, so that nothing is gathered."""
        return not self.slots and Memory.DEVICE not in self.parameter_homes

    @property
    def is_persistent(self) -> bool:
        """Whether it stays on the device for good; what is not is gathered in every iteration."""
        return not self.slots and self.stepper is not Stepper.CPU_ADAM and not self.is_looked_up

    @property
    def is_host_stepped(self) -> bool:
        """Whether it stays on the device, and the host steps it."""
        return not self.slots and self.stepper is Stepper.CPU_ADAM and not self.is_looked_up


@dataclass(frozen=True, slots=True)
class Account:
    """One iteration, block by block and chunk by chunk."""

    sections: tuple[SectionAccount, ...]
    """The prologue, the blocks, the epilogue."""
    chunks: tuple[ChunkAccount, ...]


def account(schedule: Schedule, plan: Plan, workload: Workload, layout: Layout) -> Account:
    """The account of one iteration of ``schedule``, which must be the one of the other three."""
    modes = plan.modes(workload.num_blocks)
    names = ["prologue", *(block.name for block in workload.blocks), "epilogue"]
    modes = (ActivationMode.KEEP, *modes, ActivationMode.KEEP)
    used = [
        tuple(chunk.id for chunk in layout.chunks if number in (*chunk.forward, *chunk.backward))
        for number in range(len(names))
    ]
    return Account(
        sections=tuple(
            _section(schedule, numbered_section(number, workload.num_blocks), name, modes[number], used[number])
            for number, name in enumerate(names)
        ),
        chunks=tuple(_chunk(schedule, chunk, workload) for chunk in layout.chunks),
    )


def _section(
    schedule: Schedule, section: Section, name: str, mode: ActivationMode, chunks: tuple[ChunkId, ...]
) -> SectionAccount:
    kept_bytes = recomputed_bytes = moved_bytes = 0
    for task in schedule.tasks:
        if task.section != section:
            continue
        made = [schedule.buffers[buffer] for buffer in task.allocates]
        if task.kind in (TaskKind.FORWARD, TaskKind.TEACHER_FORWARD, TaskKind.LOSS) and task.micro_batch == 0:
            kept_bytes += _size_bytes(made, Content.OUTPUT, Content.ACTIVATIONS, Content.KEPT_RESULTS, Content.LOSS)
        elif task.kind is TaskKind.RECOMPUTE:
            recomputed_bytes += _size_bytes(made, Content.ACTIVATIONS)
        elif task.kind in (TaskKind.ACTIVATION_OFFLOAD, TaskKind.ACTIVATION_FETCH):
            moved_bytes += task.moved_bytes
    return SectionAccount(section, name, mode, chunks, kept_bytes, recomputed_bytes, moved_bytes)


def _size_bytes(buffers: Iterable[Allocation], *contents: Content) -> int:
    return sum(buffer.size_bytes for buffer in buffers if buffer.content in contents)


def _chunk(schedule: Schedule, chunk: Chunk, workload: Workload) -> ChunkAccount:
    of_chunk = [task for task in schedule.tasks if task.chunk == chunk.id]
    gathers = [t for t in of_chunk if t.kind is TaskKind.GATHER or (t.kind is TaskKind.ALL_GATHER and t.allocates)]
    slots = {schedule.buffers[buffer].slot for task in gathers for buffer in task.allocates}
    stepper = Stepper.DEVICE_ADAM if chunk.is_trainable else Stepper.NOBODY
    if any(task.kind is TaskKind.CPU_ADAM for task in of_chunk):
        stepper = Stepper.CPU_ADAM
    homes = [b for b in schedule.buffers if b.is_static and b.chunk == chunk.id]
    return ChunkAccount(
        chunk=chunk,
        num_scalars=sum(workload.parameters[placed.index].num_elements for placed in chunk.parameters),
        is_sharded=any(task.kind is TaskKind.ALL_GATHER for task in gathers),
        slots=tuple(sorted(slot for slot in slots if slot is not None)),
        num_gathers=len(gathers),
        gathered_bytes=sum(task.moved_bytes for task in gathers),
        gradient_bytes=sum(task.moved_bytes for task in of_chunk if task.kind is TaskKind.GRADIENT_OFFLOAD),
        stepper=stepper,
        parameter_homes=frozenset(b.memory for b in homes if b.content is Content.PARAMETERS),
        state_on_disk=any(b.memory is Memory.DISK for b in homes if b.content is Content.OPTIMIZER_STATE),
    )


# -- words -----------------------------------------------------------------------------------------------------------


def explain_plan(plan: Plan, workload: Workload) -> str:
    """``explain`` of the schedule that carries ``plan`` out.  Raises PlanError if the workload cannot follow it."""
    layout = layout_of(workload, plan.chunk_bytes)
    return explain(compile_schedule(plan, workload, layout), plan, workload, layout)


def explain(schedule: Schedule, plan: Plan, workload: Workload, layout: Layout, *, optimizer: str | None = None) -> str:
    """What one iteration does with every block and every chunk, as text: two tables and a summary.

    ``optimizer`` is the name of what steps; the plan's own unless given.
    """
    optimizer = optimizer or plan.optimizer.words
    found = account(schedule, plan, workload, layout)
    title = f"One iteration of {workload.model_name}: what the plan does with its blocks and chunks"
    summary = "\n".join(f"- {sentence}" for sentence in _summary(found, schedule, plan, workload, optimizer))
    return as_text((title, _section_table(found), _chunk_table(found, optimizer), summary), width=120)


def _section_table(found: Account) -> Table:
    places = {chunk.chunk.id: chunk for chunk in found.chunks}
    rows = [
        (
            section.name,
            str(section.mode),
            _runs(section.chunks),
            _places([places[chunk] for chunk in section.chunks]),
            _bytes(section.kept_bytes),
            _bytes(section.recomputed_bytes),
            _bytes(section.moved_bytes),
        )
        for section in found.sections
    ]
    return Table(columns=("block", "activations", "chunks", "where", ">kept", ">recomputed", ">moved"), rows=rows)


def _chunk_table(found: Account, optimizer: str) -> Table:
    rows = []
    for chunk in found.chunks:
        stepped = chunk.stepper.named(optimizer)
        if 0 < chunk.chunk.num_trainable < chunk.num_scalars:
            stepped += f", {chunk.chunk.num_trainable:,} of them"
        rows.append(
            (
                str(chunk.chunk.id),
                str(len(chunk.chunk.parameters)),
                f"{chunk.num_scalars:,}",
                format_bytes(chunk.chunk.size_bytes),
                _places([chunk]),
                str(chunk.num_gathers) if chunk.num_gathers else NO_VALUE,
                _bytes(chunk.gradient_bytes),
                stepped,
            )
        )
    columns = (">chunk", ">tensors", ">parameters", ">size", "place", ">gathers", ">gradients out", "stepped by")
    return Table(columns=columns, rows=rows)


def _summary(found: Account, schedule: Schedule, plan: Plan, workload: Workload, optimizer: str) -> list[str]:
    values = ", ".join(f"{knob.name} = {knob.value}" for knob in knobs(plan, num_blocks=schedule.num_blocks))
    persistent = [chunk for chunk in found.chunks if chunk.is_persistent]
    peak = guaranteed_device_peak(schedule)
    sentences = [
        f"Plan: {values}.",
        f"Device memory: {len(persistent)} of {_count(len(found.chunks), 'chunk')} persistent "
        f"({_total(c.chunk.size_bytes for c in persistent)}); in all at most {format_bytes(peak.size_bytes)}, in or "
        f"before {schedule.tasks[peak.task].name}. {stays_sentence(schedule, peak)}",
        *_residency_sentences(found, schedule, plan),
    ]
    pinned_bytes, other_bytes = (schedule.static_bytes(memory) for memory in (Memory.PINNED_HOST, Memory.HOST))
    if pinned_bytes or other_bytes:
        sentences.append(f"Host memory: {format_bytes(pinned_bytes)} pinned, {format_bytes(other_bytes)} besides.")
    if disk_bytes := schedule.static_bytes(Memory.DISK):
        moved_bytes = _total(task.moved_bytes for task in schedule.tasks if task.lane is Lane.DISK)
        sentences.append(
            f"Disk: {format_bytes(disk_bytes)}, the optimizer state of the last {_count(plan.n_disk_state, 'chunk')} "
            f"and the parameters of the last {plan.n_disk}; {moved_bytes} are read and written through "
            f"{_count(plan.n_staging, 'place')} of each sort on the host."
        )
    sentences.append(_activation_sentence(found, schedule, plan))
    sentences.append(_stepping_sentence(found, plan, optimizer))
    if (words := memory_words(workload)) is not None:
        sentences.append(f"Memory: {words}. The bound above holds for all of these.")
    sentences += _precision_sentences(plan, workload)
    sentences += _gradient_sentences(found, plan, workload)
    sentences += projection_sentences(schedule, workload)
    return sentences


def _residency_sentences(found: Account, schedule: Schedule, plan: Plan) -> list[str]:
    """What leaves the device, and what ranks share."""
    sharded = [chunk for chunk in found.chunks if chunk.is_sharded]
    host_stepped = [chunk for chunk in found.chunks if chunk.is_host_stepped]
    offloaded = [chunk for chunk in found.chunks if chunk.slots and not chunk.is_sharded]
    sentences = []
    if host_stepped:
        sentences.append(
            f"Stepped on the host: {_count(len(host_stepped), 'chunk')} that stay on the device "
            f"({_total(c.chunk.size_bytes for c in host_stepped)}); "
            f"{_total(c.gradient_bytes for c in host_stepped)} of gradients go to the host, and "
            f"{_total(c.gathered_bytes for c in host_stepped)} of new values come back."
        )
    if sharded:
        num_gathers = sum(chunk.num_gathers for chunk in sharded)
        sentences.append(
            f"Shards: {_count(len(sharded), 'chunk')} sharded over the devices "
            f"({_total(c.chunk.size_bytes for c in sharded)}, 1/{plan.num_shards:,} of it on each, with gradients and "
            f"optimizer state), gathered {_count(num_gathers, 'time')} "
            f"({_total(c.gathered_bytes for c in sharded)}) into {_count(schedule.num_slots, 'buffer')}."
        )
    if offloaded:
        num_gathers = sum(chunk.num_gathers for chunk in offloaded)
        on_disk = [chunk for chunk in offloaded if chunk.is_on_disk]
        of_disk = f", {len(on_disk)} of them on its disk ({_total(c.chunk.size_bytes for c in on_disk)})"
        sentences.append(
            f"Parameters: {_count(len(offloaded), 'chunk')} on the host "
            f"({_total(c.chunk.size_bytes for c in offloaded)}){of_disk if on_disk else ''}, "
            f"gathered {_count(num_gathers, 'time')} ({_total(c.gathered_bytes for c in offloaded)}) into "
            f"{_count(schedule.num_slots, 'buffer')}; {_total(c.gradient_bytes for c in offloaded)} of gradients go to "
            f"the host."
        )
    if plan.num_ranks > 1:
        sent_bytes = _total(task.moved_bytes for task in schedule.tasks if task.lane is Lane.COLLECTIVE)
        places = (("device", "sharded", sharded), ("host", "offloaded", offloaded))
        parts = [
            f"every {place} has 1/{plan.num_shards:,} of the {kind} chunks" for place, kind, some in places if some
        ]
        on_hosts = [kind for kind, some in (("offloaded", offloaded), ("host-stepped", host_stepped)) if some]
        words = {
            ParallelMode.DDP: "every device has all chunks",
            ParallelMode.REPLICATED: f"every host has all of the {' and '.join(on_hosts)} chunks"
            if on_hosts
            else "every device has all chunks",
            ParallelMode.SHARDED: " and ".join(parts) or "every device has all chunks",
        }[plan.parallel]
        groups = f", in {plan.num_replicas:,} groups of {plan.shard_ranks:,}" if plan.shard_ranks else ""
        sentences.append(f"Ranks: {plan.num_ranks:,} train together{groups}; {words}; {sent_bytes} pass between them.")
    return sentences


def _precision_sentences(plan: Plan, workload: Workload) -> list[str]:
    narrow = [
        parameter
        for parameter in workload.parameters
        if parameter.trainable and master_bytes(parameter.dtype, plan.optimizer)
    ]
    if not narrow:
        return []
    dtypes = " and ".join(sorted({parameter.dtype for parameter in narrow}))
    return [
        f"Precision: {sum(parameter.num_elements for parameter in narrow):,} parameters in {dtypes} are stepped as "
        f"float32 masters and rounded after every step; a plain loop that steps them in {dtypes} comes to other "
        f"weights."
    ]


def _gradient_sentences(found: Account, plan: Plan, workload: Workload) -> list[str]:
    if not plan.widens_on_host or all(chunk.stepper is not Stepper.CPU_ADAM for chunk in found.chunks):
        return []
    narrow = {p.dtype for p in workload.parameters if p.trainable and summed_dtype(p.dtype) is not p.dtype}
    dtypes = " and ".join(sorted(narrow))
    return [
        f"Gradients: the host adds those of {dtypes} parameters up in float32; those that stay on the device are added "
        f"up in {dtypes}."
    ]


def _activation_sentence(found: Account, schedule: Schedule, plan: Plan) -> str:
    counts = {mode: sum(s.mode is mode for s in found.sections[1:-1]) for mode in ActivationMode}
    recomputed_flops, total_flops = _flops(schedule)
    words = [f"{count} {_DEED[mode]}" for mode, count in counts.items() if count]
    sentence = f"Activations of {_count(schedule.num_blocks, 'block')}: {', '.join(words)}"
    if recomputed_flops:
        sentence += f"; recomputing is {format_share(recomputed_flops / total_flops)} of all FLOPs"
    moved_bytes = sum(section.moved_bytes for section in found.sections)
    if moved_bytes:
        sentence += f"; {format_bytes(moved_bytes)} travel to the host and back"
    if plan.micro_batches > 1:
        sentence += f"; {plan.micro_batches} micro-batches one after another"
    return f"{sentence}."


_DEED = {
    ActivationMode.KEEP: "kept on the device",
    ActivationMode.CHECKPOINT: "recomputed",
    ActivationMode.SWAP: "swapped",
    ActivationMode.OFFLOAD_INPUT: "recomputed from an input that travels",
    ActivationMode.SELECTIVE: "recomputed from results that are kept",
}


def _stepping_sentence(found: Account, plan: Plan, optimizer: str) -> str:
    def scalars(stepper: Stepper) -> int:
        return sum(c.chunk.num_trainable for c in found.chunks if c.stepper is stepper)

    on_host, on_device = scalars(Stepper.CPU_ADAM), scalars(Stepper.DEVICE_ADAM)
    frozen = sum(chunk.num_scalars - chunk.chunk.num_trainable for chunk in found.chunks)
    words = []
    if on_host:
        when = "beside backward, as gradients arrive"
        if plan.max_gradient_norm is not None:
            of_whom = "their block's" if plan.method is TrainingMethod.BYPASS else "all"
            when = f"after the norm of {of_whom} gradients is known"
        words.append(f"{Stepper.CPU_ADAM.named(optimizer)} steps {on_host:,} parameters {when}")
    if on_device:
        words.append(f"{Stepper.DEVICE_ADAM.named(optimizer)} {on_device:,} at the end")
    if frozen:
        words.append(f"{frozen:,} are frozen")
    return f"Steps: {', '.join(words) or 'nothing is trainable'}."


def _flops(schedule: Schedule) -> tuple[int, int]:
    """FLOPs of recomputations, and of all phases."""
    phases = [(task.kind, task.phase.flops) for task in schedule.tasks if task.phase is not None]
    return sum(flops for kind, flops in phases if kind is TaskKind.RECOMPUTE), sum(flops for _, flops in phases)


# -- cells -----------------------------------------------------------------------------------------------------------


def _places(chunks: Sequence[ChunkAccount]) -> str:
    """Where chunks lie, and where they come to.

    ``"device"``, ``"device, stepped on the host"``, ``"host, buffers 0–1"``, ``"host, state on disk, buffer 0"``,
    ``"disk, buffer 0"`` and the like, or several of them.
    """
    found = ["device"] if any(chunk.is_persistent for chunk in chunks) else []
    if any(chunk.is_host_stepped for chunk in chunks):
        found.append("device, stepped on the host")
    slots: dict[str, set[int]] = {}
    for chunk in chunks:
        if chunk.slots or chunk.is_looked_up:
            slots.setdefault(_home(chunk), set()).update(chunk.slots)
    for home in sorted(slots, key=_HOMES.index):
        buffers = sorted(slots[home])
        found.append(f"{home}, buffer{'s' if len(buffers) > 1 else ''} {_runs(buffers)}" if buffers else home)
    return " and ".join(found) or NO_VALUE


_HOMES = ("host, rows looked up", "sharded", "host", "host, state on disk", "disk")


def _home(chunk: ChunkAccount) -> str:
    if chunk.is_looked_up:
        return "host, rows looked up"
    if chunk.is_sharded:
        return "sharded"
    if chunk.is_on_disk:
        return "disk"
    return "host, state on disk" if chunk.state_on_disk else "host"


def _runs(numbers: Sequence[int]) -> str:
    """``"0–2, 5"`` for ascending 0, 1, 2, 5."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}–{run[-1]}" for run in runs) or NO_VALUE


def _bytes(size_bytes: int) -> str:
    return format_bytes(size_bytes) if size_bytes else NO_VALUE


def _total(sizes_bytes: Iterable[int]) -> str:
    return format_bytes(sum(sizes_bytes))


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def schedule_tables(schedule: Schedule) -> Parts:
    """Tasks and bytes by lane and kind, and allocations by memory."""
    groups = f", shard groups of {schedule.shard_ranks:,}" if schedule.shard_ranks else ""
    ranks = f", rank of {schedule.num_ranks:,} ({schedule.parallel}{groups})" if schedule.num_ranks > 1 else ""
    heading = f"Schedule of plan {schedule.plan_id}: {len(schedule.tasks):,} tasks an iteration{ranks}"
    return Heading(heading), _task_table(schedule), _memory_table(schedule)


def _task_table(schedule: Schedule) -> Table:
    rows = []
    for lane, program in schedule.lanes.items():
        tasks = [schedule.tasks[task] for task in program]
        for kind in in_kind_order(task.kind for task in tasks):
            found = [task for task in tasks if task.kind is kind]
            moved_bytes = sum(task.moved_bytes for task in found)
            moved = format_bytes(moved_bytes) if moved_bytes else ""
            rows.append((LANE_NAMES[lane], kind_name(kind), f"{len(found):,}", moved))
    return Table(title="Tasks", columns=("lane", "kind", ">tasks", ">moved"), rows=rows)


def _memory_table(schedule: Schedule) -> Table:
    rows = []
    for memory in Memory:
        passing = [buffer for buffer in schedule.buffers if buffer.memory is memory and not buffer.is_static]
        static_bytes = schedule.static_bytes(memory)
        if passing or static_bytes:
            passing_bytes = sum(buffer.size_bytes for buffer in passing)
            rows.append(
                (MEMORY_NAMES[memory], format_bytes(static_bytes), f"{len(passing):,}", format_bytes(passing_bytes))
            )
    columns = ("memory", ">there for good", ">allocations", ">allocated in all")
    return Table(title="Memory", columns=columns, rows=rows)
