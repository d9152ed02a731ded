"""Updates: what happens to a gradient until its parameter is new.

Ranks add gradients up (``collectives.py``), they leave the device, micro-batches are added up, their norm is taken, and
one Adam steps every chunk, once per step.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from math import prod

from ..layout.adam_memory import WIDENED_SCALARS
from ..schema.plan import ParallelMode
from ..schema.schedule import ChunkId, Content, OuterSection, Task, TaskKind
from ..schema.workload import Phase
from .claim import Claim, check_amounts, check_earlier, chunk_of, compare_buffers, reject
from .collectives import left_of, made_in
from .compute_tasks import (
    Expected,
    Name,
    bytes_of_rows,
    check_compute_task,
    gradients_of,
    name_of_part,
    trained_rows,
)
from .steps import (
    Stepped,
    bytes_like_weights,
    extra_bytes,
    fullest_regions,
    goes_alone,
    has_master,
    moved_bytes,
    stepped_of,
)

# -- on their way ----------------------------------------------------------------------------------------------------


def check_gradient_offloads(claim: Claim) -> None:
    """The gradients of every chunk that CPU Adam steps leave the device once per micro-batch, all of them.

    Those that are added up on the device leave once, in the last one.
    """
    kind, tasks = TaskKind.GRADIENT_OFFLOAD, claim.tasks_of(TaskKind.GRADIENT_OFFLOAD)
    on_device = {chunk for completed in claim.completed.values() for chunk in completed}
    whole = [chunk for chunk in claim.updated if chunk in on_device or chunk not in claim.looked_up]
    served = ((chunk, micro_batch) for chunk in whole for micro_batch in claim.leaving_in(chunk))
    _compare_served(kind, [t for t in tasks if not _is_of_rows(t)], served)
    _check_rows_served(claim, TaskKind.GRADIENT_OFFLOAD, [t for t in tasks if _is_of_rows(t)])
    for task in tasks:
        (_check_row_offload if _is_of_rows(task) else _check_offload)(claim, task)


def check_accumulations(claim: Claim) -> None:
    """Gradients of every micro-batch but the first are added to those that are staged: two reads, one write.

    Where the host adds them up in float32, the first ones are written there as well: one read, one write.
    Of embeddings whose rows are looked up, gradients of rows are added in every micro-batch.
    """
    first = 0 if claim.plan.widens_on_host else 1
    kind, later = TaskKind.GRADIENT_ACCUMULATE, range(first, claim.plan.micro_batches)
    tasks = claim.tasks_of(kind)
    alone = [chunk for chunk in claim.updated if chunk not in claim.looked_up and chunk not in claim.leave_once]
    _check_served(kind, [t for t in tasks if not _is_of_rows(t)], alone, later)
    _check_rows_served(claim, kind, [t for t in tasks if _is_of_rows(t)])
    for task in tasks:
        if _is_of_rows(task):
            _check_row_sum(claim, task)
            continue
        chunk = chunk_of(claim, task)
        staged = claim.homes[Content.GRADIENTS, chunk.id]
        added = [staged] if task.micro_batch else []
        compare_buffers(task, task.reads, [*added, claim.homes[Content.ARRIVING_GRADIENTS, chunk.id]], "reads")
        compare_buffers(task, task.writes, [staged], "writes")
        compare_buffers(task, task.allocates, [], "allocates")
        compare_buffers(task, task.frees, [], "frees")
        part = claim.held[chunk.id]
        check_amounts(task, stepped_bytes=part.gradient_bytes + (1 + len(added)) * part.summed_bytes)


def _check_rows_served(claim: Claim, kind: TaskKind, tasks: Sequence[Task]) -> None:
    """Every embedding that is trained has one of ``tasks`` per micro-batch for the rows that the prologue looks up."""
    if any(task.section is not OuterSection.PROLOGUE for task in tasks):
        reject(f"a task of kind {kind} names another section than the prologue")
    _check_served(kind, tasks, trained_rows(claim), range(claim.plan.micro_batches))


def _check_served(
    kind: TaskKind, tasks: Sequence[Task], chunks: Sequence[ChunkId], micro_batches: Sequence[int]
) -> None:
    """Each of ``chunks`` has one of ``tasks``, of ``kind``, per micro-batch, and nobody else has any."""
    _compare_served(kind, tasks, ((chunk, micro_batch) for chunk in chunks for micro_batch in micro_batches))


def _compare_served(kind: TaskKind, tasks: Sequence[Task], served: Iterable[tuple[ChunkId, int]]) -> None:
    """``tasks``, of ``kind``, are one for each of these chunks and micro-batches."""
    found = sorted((str(task.chunk), task.micro_batch) for task in tasks)
    expected = sorted((str(chunk), micro_batch) for chunk, micro_batch in served)
    if found != expected:
        reject(f"tasks of kind {kind} serve (chunk, micro-batch) {found}, not {expected}")


def _check_offload(claim: Claim, task: Task) -> None:
    """All gradients of the chunk to its staging buffer, or beside it where they are added or widened; then they go.

    Sharded, what leaves is the shard that was left of them.  Those of all micro-batches together go to the former.
    """
    chunk = chunk_of(claim, task)
    gradients = claim.gradients.get((chunk.id, made_in(claim, task)), [])
    if chunk.id in claim.looked_up:
        gradients = [b for b in gradients if b.section is not OuterSection.PROLOGUE]
    if claim.plan.parallel is ParallelMode.SHARDED:
        gradients = left_of(claim, task, chunk.id)
    is_beside = made_in(claim, task) > 0 or claim.plan.widens_on_host
    content = Content.ARRIVING_GRADIENTS if is_beside else Content.GRADIENTS
    compare_buffers(task, task.reads, gradients, "reads")
    compare_buffers(task, task.frees, gradients, "frees")
    arrives = claim.homes[content, chunk.id] if is_beside else claim.stepped_in(content, chunk.id)
    compare_buffers(task, task.writes, [arrives], "writes")
    compare_buffers(task, task.allocates, [] if arrives.is_static else [arrives], "allocates")
    check_amounts(task, moved_bytes=claim.held[chunk.id].gradient_bytes)


# -- gradients of rows -----------------------------------------------------------------------------------------------


def _is_of_rows(task: Task) -> bool:
    """Whether a task serves gradients of rows, not those of whole parameters."""
    return task.section is not None


def _check_row_offload(claim: Claim, task: Task) -> None:
    """Gradients of rows go to where they arrive, all of the chunk's, behind the prologue's backward."""
    chunk = chunk_of(claim, task, section=OuterSection.PROLOGUE)
    made = [b for b in claim.gradients.get((chunk.id, task.micro_batch), []) if b.section is OuterSection.PROLOGUE]
    compare_buffers(task, task.reads, made, "reads")
    compare_buffers(task, task.frees, made, "frees")
    compare_buffers(task, task.writes, [claim.homes[Content.ROW_GRADIENTS, chunk.id]], "writes")
    compare_buffers(task, task.allocates, [], "allocates")
    check_amounts(task, moved_bytes=bytes_of_rows(claim, chunk.id, trained=True))


def _check_row_sum(claim: Claim, task: Task) -> None:
    """Gradients of rows are added to what is there of the embeddings' gradients.

    In the first micro-batch to what others have left, or to zeros; in later ones to what others have left of that
    micro-batch, which is then added to the earlier ones.  Five passes over rows, one over the zeros, three over what
    others have left of a later micro-batch.
    """
    chunk = chunk_of(claim, task, section=OuterSection.PROLOGUE)
    staged, arrived = claim.homes[Content.GRADIENTS, chunk.id], claim.homes.get((Content.ARRIVING_GRADIENTS, chunk.id))
    is_shared = any(chunk.id in completed for completed in claim.completed.values())
    others = [arrived] if is_shared and task.micro_batch and arrived is not None else []
    before = [staged] if is_shared or task.micro_batch else []
    compare_buffers(task, task.reads, [claim.homes[Content.ROW_GRADIENTS, chunk.id], *before, *others], "reads")
    compare_buffers(task, task.writes, [staged, *others], "writes")
    compare_buffers(task, task.allocates, [], "allocates")
    compare_buffers(task, task.frees, [], "frees")
    passes = 3 * len(others) if before else 1
    table_bytes = passes * claim.held[chunk.id].gradient_bytes
    check_amounts(task, stepped_bytes=5 * bytes_of_rows(claim, chunk.id, trained=True) + table_bytes)


# -- steps -----------------------------------------------------------------------------------------------------------


def check_norm(claim: Claim) -> None:
    """Under a limit, the norm of all gradients is taken once, wherever they are; without one, never."""
    norms = claim.tasks_of(TaskKind.GRADIENT_NORM)
    if len(norms) != (0 if claim.plan.max_gradient_norm is None else 1):
        reject(f"it takes the norm of the gradients {len(norms)} times")
    for task in norms:
        if task.section is not None:
            reject(f"{task.name} names a section")
        check_one_norm(claim, task, [chunk.id for chunk in claim.layout.chunks])


def check_one_norm(claim: Claim, task: Task, chunks: Collection[ChunkId]) -> None:
    """It reads every gradient of ``chunks``: staged, or waiting on the device whole or in part."""
    if task.chunk is not None or task.phase is not None or task.micro_batch:
        reject(f"{task.name} names a chunk, a phase or a micro-batch")
    left = [b for b in claim.left_to_step if b.chunk in chunks]
    updated = [chunk for chunk in claim.updated if chunk in chunks]
    staged = [claim.homes[Content.GRADIENTS, chunk] for chunk in updated]
    parts = [claim.parts[chunk] for chunk in claim.scattered if chunk in chunks]
    compare_buffers(task, task.reads, [*staged, *parts, *left], "reads")
    compare_buffers(task, task.writes, [], "writes")
    compare_buffers(task, task.allocates, [], "allocates")
    compare_buffers(task, task.frees, [], "frees")
    # However much of them is kept, the norm is of what a rank steps.
    part_bytes = sum(claim.held[part.chunk].gradient_bytes for part in parts if part.chunk is not None)
    on_device = part_bytes + sum(buffer.size_bytes for buffer in left)
    on_host = sum(claim.held[chunk].summed_bytes for chunk in updated)
    check_amounts(task, moved_bytes=on_device, stepped_bytes=on_host)


def check_cpu_adam(claim: Claim) -> None:
    """One CPU Adam steps every trainable chunk whose home is on a host, from its staged gradients."""
    # It belongs to the micro-batch whose gradients it waited for last; after the norm of all of them, to none.
    last = claim.plan.micro_batches - 1 if claim.plan.max_gradient_norm is None else 0
    _check_served(TaskKind.CPU_ADAM, claim.tasks_of(TaskKind.CPU_ADAM), claim.updated, (last,))
    for task in claim.tasks_of(TaskKind.CPU_ADAM):
        chunk = chunk_of(claim, task)
        stepped = [claim.stepped_in(content, chunk.id) for content in (Content.PARAMETERS, Content.OPTIMIZER_STATE)]
        gradients = claim.stepped_in(Content.GRADIENTS, chunk.id)
        compare_buffers(task, task.reads, [*stepped, gradients], "reads")
        compare_buffers(task, task.writes, stepped, "writes")
        compare_buffers(task, task.allocates, [], "allocates")
        compare_buffers(task, task.frees, [] if gradients.is_static else [gradients], "frees")
        _check_stepped(claim, task, claim.held[chunk.id].stepped, is_wide=claim.plan.widens_on_host)


def check_device_adam(claim: Claim) -> None:
    """One device Adam steps every trainable chunk that stays on the device, whole or in part, and drops its gradients.

    It ends the iteration, and is there even where nothing is left for it to step.
    """
    left: set[Name] = {
        (Content.INCOMING_GRADIENT, None, OuterSection.PROLOGUE, micro_batch)
        for micro_batch in range(claim.plan.micro_batches)
    }
    check_one_device_adam(claim, left)


def check_one_device_adam(claim: Claim, left: set[Name]) -> None:
    """Raise ScheduleError unless device Adam is what it must be; ``left``: what it drops beside gradients."""
    tasks = claim.tasks_of(TaskKind.DEVICE_ADAM)
    if len(tasks) != 1:
        reject(f"device Adam runs {len(tasks)} times, not once")
    (task,) = tasks
    check_compute_task(claim, task, _device_adam(claim, left))
    stepped = stepped_of((c for c in claim.layout.chunks if c.id in claim.persistent), claim.workload.parameters)
    for chunk in claim.scattered:
        stepped += claim.held[chunk].stepped
    _check_stepped(claim, task, stepped)


def _device_adam(claim: Claim, left: set[Name]) -> Expected:
    trainable = {chunk.id for chunk in claim.layout.chunks if chunk.is_trainable and chunk.id in claim.persistent}
    updates: set[Name] = {(Content.PARAMETERS, chunk, None, 0) for chunk in trainable}
    updates |= {(Content.OPTIMIZER_STATE, chunk, None, 0) for chunk in trainable}
    drops, kept = set(left), {(b.content, b.chunk, b.section, 0) for b in claim.left_to_step if b.is_static}
    for section in claim.sections:
        made, _ = gradients_of(claim, section, 0)
        drops |= {name for name in made if name[1] in trainable}
    updates |= {
        name_of_part(content, chunk) if chunk in claim.sharded else (content, chunk, None, 0)
        for content, chunk in claim.homes
        if content is Content.PAGED_STATE and chunk is not None
    }
    parts: set[Name] = {name_of_part(Content.REDUCED_GRADIENTS, chunk) for chunk in claim.scattered}
    if claim.keeping.parts_go:
        parts = {(Content.REDUCED_GRADIENTS, chunk, None, 0) for chunk in claim.scattered}
        drops |= parts
    for content in (Content.PARAMETERS, Content.OPTIMIZER_STATE):
        updates |= {name_of_part(content, chunk) for chunk in claim.scattered}
    phase = _widening(claim, trainable)
    return Expected(TaskKind.DEVICE_ADAM, None, 0, phase, updates | drops | parts | kept, updates=updates, drops=drops)


def _widening(claim: Claim, stepped: set[ChunkId]) -> Phase | None:
    """Device Adam's curve: what is stepped together first, then neighbours of one chunk, widened if they are narrow.

    Gradients of those that are stepped in one call go together.  Last come those of parts, run by run, which stay.
    Moments that visit the device are there meanwhile.
    """
    optimizer = claim.plan.optimizer
    found = [
        [p for p in (claim.workload.parameters[placed.index] for placed in chunk.parameters) if p.trainable]
        for chunk in claim.layout.chunks
        if chunk.id in stepped
    ]
    freed = 0 if (keeping := claim.keeping).keeps_gradients or keeping.temporary_lists else 1
    level = -freed * sum(p.size_bytes for chunk in found for p in chunk if not goes_alone(p.dtype, optimizer))
    highest = 0
    for chunk in found:
        widened = scalars = dropped = 0
        for parameter in (p for p in chunk if goes_alone(p.dtype, optimizer)):
            if not optimizer.is_elementwise or scalars + parameter.num_elements > WIDENED_SCALARS:
                level, widened, scalars, dropped = level - dropped, 0, 0, 0
            widened += extra_bytes((parameter.dtype, parameter.shape), optimizer, WIDENED_SCALARS)
            highest = max(highest, level + widened)
            scalars, dropped = scalars + parameter.num_elements, dropped + freed * parameter.size_bytes
        level -= dropped
    for chunk_id in claim.scattered:
        num_parts = claim.held[chunk_id].num_parts
        runs = fullest_regions(claim.layout.chunks[chunk_id], claim.workload.parameters, num_parts)
        for dtype, scalars in runs:
            highest = max(highest, level + extra_bytes((dtype, (scalars,)), optimizer, WIDENED_SCALARS))
    together = [s for c in found for s in ((p.dtype, p.shape) for p in c)]
    together += [s for chunk in claim.scattered for s in claim.held[chunk].stepped]
    highest += keeping.temporary_lists * bytes_like_weights(together, optimizer)
    if claim.keeping.moments_visit:
        return _visits(claim, highest)
    scalars = sum(prod(shape) for dtype, shape in together if has_master(dtype, optimizer))
    if keeping.num_widened and scalars:
        return _flat_copies(scalars, keeping.num_widened, min(scalars, _most_normed(claim, stepped)), highest)
    return Phase(curve=((1.0, highest),)) if highest else None


def _flat_copies(scalars: int, most: int, most_normed: int, others_bytes: int) -> Phase:
    """Gradients of so many scalars at a time are laid flat in 16 bits and copied to float32, which goes last.

    Norms come first, of copies in float64.
    """
    groups = [min(most, scalars - first) for first in range(0, scalars, most)]
    steps = [(2 * group, 4 * group, -2 * group, others_bytes, -others_bytes, -4 * group) for group in groups]
    changes = [8 * most_normed, -8 * most_normed, *(change for step in steps for change in step if change)]
    highest = max(8 * most_normed, max(2 * groups[0], others_bytes) + 4 * groups[0])
    return Phase(curve=((1.0, highest),), changes=tuple(changes))


def _most_normed(claim: Claim, whole: set[ChunkId]) -> int:
    """Scalars of the largest gradient: of a rank's part of it, unless parts are views of what the device keeps."""
    found = [0]
    for chunk in claim.layout.chunks:
        if chunk.id not in whole and chunk.id not in claim.scattered:
            continue
        sizes = [
            prod(claim.workload.parameters[placed.index].shape)
            for placed in chunk.parameters
            if claim.workload.parameters[placed.index].trainable
            and has_master(claim.workload.parameters[placed.index].dtype, claim.plan.optimizer)
        ]
        is_whole = chunk.id in whole or claim.keeping.parts_are_within
        found += sizes if is_whole else [-(-size // claim.held[chunk.id].num_parts) for size in sizes]
    return max(found)


def _visits(claim: Claim, widened: int) -> Phase | None:
    """Device Adam's curve where moments come for it, chunk by chunk."""
    homes = [claim.homes.get((Content.PAGED_STATE, chunk.id)) for chunk in claim.layout.chunks]
    sizes = [home.size_bytes for home in homes if home is not None]
    levels = [widened + sum(sizes[: number + 1]) for number in range(len(sizes))]
    return Phase(curve=tuple(((n + 1) / len(sizes), level) for n, level in enumerate(levels))) if sizes else None


def _check_stepped(claim: Claim, task: Task, stepped: list[Stepped], *, is_wide: bool = False) -> None:
    """The step is of all these scalars, and moves what the plan's optimizer does of them.

    ``is_wide``: gradients are float32 at least.
    """
    is_scaled = claim.plan.max_gradient_norm is not None
    moved = moved_bytes(stepped, claim.plan.optimizer, is_scaled=is_scaled, is_wide=is_wide)
    scalars, tensors = sum(prod(shape) for _, shape in stepped), sum(0 not in shape for _, shape in stepped)
    check_amounts(task, num_stepped=scalars, stepped_bytes=moved, num_tensors=tensors)


# -- order -----------------------------------------------------------------------------------------------------------


def check_gradient_window(claim: Claim) -> None:
    """Gradients on their way are gone ``prefetch_depth + 1`` steps after their chunk's last backward.

    To the host, or into the part that stays on the device.
    """
    steps = claim.steps
    num_steps = len(steps)
    alone = [task for task in claim.tasks_of(TaskKind.REDUCE_SCATTER) if task.chunk in claim.sharded]
    for offload in (*claim.tasks_of(TaskKind.GRADIENT_OFFLOAD), *alone):
        assert offload.chunk is not None
        places = (placed.index for placed in claim.layout.chunks[offload.chunk].parameters)
        completing = [claim.completing(place) for place in places if claim.workload.parameters[place].trainable]
        if _is_of_rows(offload):
            completing = [OuterSection.PROLOGUE]
        sections = (section for section in completing if section is not None)
        last_step = max(claim.backward_steps[offload.micro_batch, section] for section in sections)
        distance, step = divmod(last_step + claim.plan.prefetch_depth + 1, num_steps)
        # Beyond the next iteration the chunk's own next gather, which waits for its Adam, is the tighter bound.
        if distance <= 1 and not claim.before(offload.id, steps[step][0], distance):
            reject(f"the gradients of chunk {offload.chunk} may wait too long for {offload.name}")


def check_norm_order(claim: Claim) -> None:
    """Under a limit, every Adam comes after the norm of all ranks."""
    shared = [t for t in claim.tasks_of(TaskKind.ALL_REDUCE) if t.chunk is None]
    for norm in claim.tasks_of(TaskKind.GRADIENT_NORM):
        for task in shared:
            check_earlier(claim, norm.id, task.id)
        for adam in (*claim.tasks_of(TaskKind.CPU_ADAM), *claim.tasks_of(TaskKind.DEVICE_ADAM)):
            check_earlier(claim, shared[0].id if shared else norm.id, adam.id)
