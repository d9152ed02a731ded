"""Workload and layout as they are where the prologue looks rows up on the host (``Plan.looks_up_rows``).

The prologue then uses no table, on the device.  Of a table that nobody else uses neither weights nor gradients come
there.  Of one that others use too, such as a tied head, weights are gathered for these, and their gradient is complete
without the prologue: gradients of rows are added to it on the host.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from ..basics.errors import PlanError
from ..schema.plan import Plan
from ..schema.schedule import ChunkId
from ..schema.workload import BlockProfile, OuterSection, Parameter, Workload
from .layout import Chunk, Layout, RowReads
from .uses import numbered_section, numbered_uses

_PROLOGUE = 0
"""Its number."""


def as_planned(plan: Plan, workload: Workload, layout: Layout) -> tuple[Workload, Layout]:
    """Workload and layout that ``plan`` is compiled from: MLPs and loss in tiles, rows looked up, where it says so.

    Raises PlanError as ``check_looked_up`` and ``Workload.tiled`` do.
    """
    workload = workload.tiled(plan.mlp_tiles, plan.loss_tiles)
    check_looked_up(plan, workload, layout)
    return looking_up(workload, layout) if plan.looks_up_rows else (workload, layout)


def check_looked_up(plan: Plan, workload: Workload, layout: Layout) -> None:
    """Raise PlanError if ``plan`` looks rows up that cannot be, or that are not on the host."""
    if not plan.looks_up_rows:
        return
    if plan.widens_on_host:
        raise PlanError(
            f"looks_up_rows with host_gradients {plan.host_gradients}: gradients of rows are added up in their own "
            f"type alone. Leave one of the two out."
        )
    reason = why_not_looked_up(workload, layout)
    tables = () if reason is not None else table_chunks(workload, layout)
    kept = [chunk for chunk in tables if chunk < plan.num_kept + plan.n_shard]
    if kept:
        reason = f"chunk {kept[0]} holds an embedding and stays on the device. Keep the first {kept[0]} chunks at most"
    on_disk = [chunk for chunk in tables if chunk >= len(layout.chunks) - plan.n_disk_state]
    if on_disk:
        reason = (
            f"chunk {on_disk[-1]} holds an embedding and is stepped from the disk. Lower n_disk_state from "
            f"{plan.n_disk_state} to {len(layout.chunks) - on_disk[-1] - 1} at most"
        )
    if reason is not None:
        raise PlanError(f"looks_up_rows: {reason}, or leave looks_up_rows out.")


def why_not_looked_up(workload: Workload, layout: Layout) -> str | None:
    """Why no plan of these looks rows up, with what to do; None if plans may."""
    if workload.row_lookups is None:
        return (
            f"{workload.model_name} has no embedding of which its first part reads rows alone, or none is known. One "
            f"with max_norm, sparse or scale_grad_by_freq must be whole on the device. Trace the model again"
        )
    looked_up = {table.parameter for table in workload.row_lookups.tables}
    for number in table_chunks(workload, layout):
        others = [p.index for p in layout.chunks[number].parameters if p.index not in looked_up]
        if others:
            return (
                f"chunk {number} holds {workload.parameters[others[0]].name}, of which more than rows is read, beside "
                f"an embedding. Lower chunk_bytes from {layout.chunk_bytes}"
            )
    return None


def table_chunks(workload: Workload, layout: Layout) -> tuple[ChunkId, ...]:
    """The chunks that hold tables of ``Workload.row_lookups``."""
    tables = workload.row_lookups.tables if workload.row_lookups is not None else ()
    looked_up = {table.parameter for table in tables}
    return tuple(c.id for c in layout.chunks if any(placed.index in looked_up for placed in c.parameters))


def looking_up(workload: Workload, layout: Layout) -> tuple[Workload, Layout]:
    """Both, if all rows are looked up; ``why_not_looked_up`` must have no reason against it."""
    assert workload.row_lookups is not None
    num_rows = {table.parameter: table.num_rows for table in workload.row_lookups.tables}
    tables = set(table_chunks(workload, layout))
    chunks = [_looked_up(c, workload.parameters, num_rows) if c.id in tables else c for c in layout.chunks]
    lookups = workload.row_lookups
    found = workload.model_copy(
        update={"prologue_forward": lookups.prologue_forward, "prologue_backward": lookups.prologue_backward}
    )
    for chunk in (chunks[number] for number in tables):
        for section, size_bytes in chunk.gradients:
            found = _completing(found, section, size_bytes)
    return found, replace(layout, chunks=tuple(chunks))


def row_bytes(parameters: Iterable[tuple[Parameter, int]]) -> int:
    """Bytes of so many rows of each table."""
    return sum(table.shape[1] * table.dtype.item_bytes * num_rows for table, num_rows in parameters)


def _looked_up(chunk: Chunk, parameters: Sequence[Parameter], num_rows: dict[int, int]) -> Chunk:
    """All members have the same uses, as members of chunks that several sections use have."""
    members = [(parameters[placed.index], num_rows[placed.index]) for placed in chunk.parameters]
    forward, backward = (tuple(s for s in of if s != _PROLOGUE) for of in (chunk.forward, chunk.backward))
    others = (*forward, *backward)
    gradient_bytes = chunk.gradient_bytes
    return replace(
        chunk,
        forward=forward,
        backward=backward,
        gradients=((min(others), gradient_bytes),) if others and gradient_bytes else (),
        rows=RowReads(
            forward_bytes=row_bytes(members),
            gradient_bytes=row_bytes((table, rows) for table, rows in members if table.trainable),
            table_gradient_bytes=gradient_bytes,
        ),
    )


def _completing(workload: Workload, section: int, size_bytes: int) -> Workload:
    """``workload`` in which the backward of ``section`` completes gradients that the prologue's completed."""
    where = numbered_section(section, workload.num_blocks)
    if where is OuterSection.EPILOGUE:
        return workload.model_copy(
            update={"epilogue_backward": workload.epilogue_backward.with_more_gradients(size_bytes)}
        )
    assert not isinstance(where, OuterSection)
    block, profile = workload.blocks[where], workload.profile_of(where)
    blocks = list(workload.blocks)
    blocks[where] = block.model_copy(update={"profile": len(workload.profiles)})
    return workload.model_copy(
        update={"blocks": tuple(blocks), "profiles": (*workload.profiles, _profile_with_more(profile, size_bytes))}
    )


def _profile_with_more(profile: BlockProfile, size_bytes: int) -> BlockProfile:
    names = ("backward", "checkpoint_backward")
    return profile.model_copy(update={name: getattr(profile, name).with_more_gradients(size_bytes) for name in names})


def room_of_rows(workload: Workload) -> list[tuple[int, int]]:
    """(section, bytes): room for gradients that sections need more, or less, as ``workload`` looks rows up.

    None if it is a workload whose prologue has its tables on the device.
    """
    if workload.row_lookups is None or not workload.prologue_forward.looked_up_bytes:
        return []
    found = []
    for table in workload.row_lookups.tables:
        parameter = workload.parameters[table.parameter]
        if parameter.trainable:
            uses = numbered_uses(parameter, workload.num_blocks)
            others = [section for section in (*uses.forward, *uses.backward) if section != _PROLOGUE]
            found += [(_PROLOGUE, row_bytes([(parameter, table.num_rows)])), (uses.gradient, -parameter.size_bytes)]
            found += [(min(others), parameter.size_bytes)] if others else []
    return found
