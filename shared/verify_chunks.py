"""How parameters, gradients and optimizer state lie and move."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from .layout import Chunk, ChunkId
from .schedule import Buffer, BufferId, Content, Lane, Memory, Task, TaskKind
from .verify_case import Case, reject
from .workload import DType

_Home = tuple[Content, Memory, ChunkId | None, int]
"""A static buffer: what it holds, where, of which chunk, in how many bytes."""


def check_chunks(case: Case) -> None:
    """Raise ScheduleError unless every chunk has its homes, its copies and exactly one Adam."""
    _check_static(case)
    for buffer in case.schedule.buffers:
        if not buffer.is_static and buffer.memory is not Memory.DEVICE:
            reject(f"buffer {buffer.id} ({buffer.content}) comes and goes in {buffer.memory} memory")
        if case.is_gathered(buffer.id) != (buffer.slot is not None):
            reject(f"buffer {buffer.id} ({buffer.content}) has slot {buffer.slot}")
        if buffer.slot is not None and not 0 <= buffer.slot < case.plan.n_buffer:
            reject(f"buffer {buffer.id} has slot {buffer.slot} of {case.plan.n_buffer}")
    for task in case.tasks_of(TaskKind.GATHER):
        _check_gather(case, task)
    updated = [chunk.id for chunk in case.layout.chunks if chunk.is_trainable and chunk.id not in case.persistent]
    for kind in (TaskKind.GRADIENT_OFFLOAD, TaskKind.CPU_ADAM):
        found = [task.chunk for task in case.tasks_of(kind)]
        if sorted(found, key=str) != sorted(updated, key=str):
            reject(f"tasks of kind {kind} serve chunks {found}; offloaded and trainable are {updated}")
    for task in case.tasks_of(TaskKind.GRADIENT_OFFLOAD):
        _check_offload(case, task)
    for task in case.tasks_of(TaskKind.CPU_ADAM):
        _check_cpu_adam(case, task)
    for task in case.schedule.tasks:
        if task.kind is TaskKind.DEVICE_ADAM:
            _check_device_adam(case, task)
        elif task.lane is Lane.COMPUTE:
            _check_amounts(task)


# -- homes -----------------------------------------------------------------------------------------------------------


def _check_static(case: Case) -> None:
    """What is there for good is what the layout says, each once, in its memory and with its size."""
    expected: Counter[_Home] = Counter([(Content.RESIDENT, Memory.DEVICE, None, case.workload.resident_bytes)])
    for chunk in case.layout.chunks:
        is_persistent = chunk.id in case.persistent
        place = Memory.DEVICE if is_persistent else Memory.PINNED_HOST
        homes: list[_Home] = [(Content.PARAMETERS, place, chunk.id, chunk.size_bytes)]
        if chunk.is_trainable:
            place = Memory.DEVICE if is_persistent else Memory.HOST
            homes.append((Content.OPTIMIZER_STATE, place, chunk.id, chunk.state_bytes))
            if not is_persistent:
                homes.append((Content.GRADIENTS, Memory.PINNED_HOST, chunk.id, chunk.staging_bytes))
        expected.update(homes)
    static = [buffer for buffer in case.schedule.buffers if buffer.is_static]
    found: Counter[_Home] = Counter((b.content, b.memory, b.chunk, b.size_bytes) for b in static)
    if found != expected:
        missing, extra = list((expected - found).keys()), list((found - expected).keys())
        reject(f"it has the static buffers {_shown(extra)} too much and {_shown(missing)} too little")
    for buffer in static:
        if buffer.section is not None:
            reject(f"static buffer {buffer.id} belongs to section {buffer.section}")


def _shown(entries: Iterable[_Home]) -> str:
    shown = [f"{content} of chunk {chunk} in {memory} ({size} B)" for content, memory, chunk, size in entries]
    return ", ".join(shown) or "nothing"


# -- copies and steps ------------------------------------------------------------------------------------------------


def _check_gather(case: Case, task: Task) -> None:
    """Home to device, into a fresh buffer of the chunk's size, which some block uses."""
    chunk = _chunk(case, task)
    if chunk.id in case.persistent:
        reject(f"{task.name} gathers a persistent chunk")
    _compare(task, task.reads, [case.homes[Content.PARAMETERS, chunk.id]], "reads")
    filled = [case.buffer(b) for b in task.writes]
    if len(filled) != 1 or not case.is_gathered(filled[0].id) or filled[0].chunk != chunk.id:
        reject(f"{task.name} does not fill one buffer for the parameters of chunk {chunk.id}")
    if filled[0].size_bytes != chunk.size_bytes or filled[0].section is not None:
        reject(f"{task.name} fills {filled[0].size_bytes} bytes, the chunk has {chunk.size_bytes}")
    _compare(task, task.allocates, filled, "allocates")
    _compare(task, task.frees, [], "frees")
    if not case.readers[filled[0].id]:
        reject(f"{task.name} is gathered for nobody")
    _check_amounts(task, moved_bytes=chunk.size_bytes)


def _check_offload(case: Case, task: Task) -> None:
    """All gradients of the chunk to its staging buffer; then they go."""
    chunk = _chunk(case, task)
    gradients = case.gradients.get(chunk.id, [])
    _compare(task, task.reads, gradients, "reads")
    _compare(task, task.frees, gradients, "frees")
    _compare(task, task.writes, [case.homes[Content.GRADIENTS, chunk.id]], "writes")
    _compare(task, task.allocates, [], "allocates")
    _check_amounts(task, moved_bytes=sum(chunk.gradient_bytes))


def _check_cpu_adam(case: Case, task: Task) -> None:
    """From the staged gradients to the chunk's parameters and state on the host."""
    chunk = _chunk(case, task)
    stepped = [case.homes[content, chunk.id] for content in (Content.PARAMETERS, Content.OPTIMIZER_STATE)]
    _compare(task, task.reads, [*stepped, case.homes[Content.GRADIENTS, chunk.id]], "reads")
    _compare(task, task.writes, stepped, "writes")
    _compare(task, task.allocates, [], "allocates")
    _compare(task, task.frees, [], "frees")
    _check_amounts(task, num_stepped=chunk.num_trainable, stepped_bytes=_stepped_bytes(case, [chunk]))


def _check_device_adam(case: Case, task: Task) -> None:
    """Its buffers are those of a section (``verify_sections``); here its amounts."""
    chunks = [c for c in case.layout.chunks if c.is_trainable and c.id in case.persistent]
    num_stepped = sum(chunk.num_trainable for chunk in chunks)
    _check_amounts(task, num_stepped=num_stepped, stepped_bytes=_stepped_bytes(case, chunks))


def _chunk(case: Case, task: Task) -> Chunk:
    if task.chunk is None or not 0 <= task.chunk < len(case.layout.chunks):
        reject(f"task {task.id} ({task.kind}) names chunk {task.chunk} of {len(case.layout.chunks)}")
    if task.section is not None or task.phase is not None:
        reject(f"{task.name} has a section or a phase")
    return case.layout.chunks[task.chunk]


def _compare(task: Task, found: Iterable[BufferId], expected: Iterable[Buffer], verb: str) -> None:
    if sorted(found) != sorted(buffer.id for buffer in expected):
        reject(f"{task.name} {verb} buffers {sorted(found)}, not {sorted(buffer.id for buffer in expected)}")


def _check_amounts(task: Task, *, moved_bytes: int = 0, num_stepped: int = 0, stepped_bytes: int = 0) -> None:
    found = (task.moved_bytes, task.num_stepped, task.stepped_bytes)
    if found != (moved_bytes, num_stepped, stepped_bytes):
        reject(
            f"{task.name} moves {found[0]} B and steps {found[1]} scalars over {found[2]} B, "
            f"not {moved_bytes} B, {num_stepped} scalars and {stepped_bytes} B"
        )


def _stepped_bytes(case: Case, chunks: Iterable[Chunk]) -> int:
    """Adam reads and writes two moments and the weights, float32 or wider, reads gradients, writes narrow weights."""
    by_dtype: Counter[DType] = Counter()
    for chunk in chunks:
        for placed in chunk.parameters:
            parameter = case.workload.parameters[placed.index]
            if parameter.trainable:
                by_dtype[parameter.dtype] += parameter.num_elements
    return sum(
        count * (2 * 3 * max(4, dtype.item_bytes) + dtype.item_bytes * (1 if dtype.item_bytes >= 4 else 2))
        for dtype, count in by_dtype.items()
    )
