"""A schedule as tables: what its lanes do in one iteration, and what memory it allocates."""

from __future__ import annotations

from ..basics.units import format_bytes
from ..schema.schedule import Memory, Schedule, TaskKind
from .labels import KIND_NAMES, LANE_NAMES, MEMORY_NAMES
from .table import Heading, Parts, Table


def schedule_tables(schedule: Schedule) -> Parts:
    """Tasks and bytes by lane and kind, and allocations by memory."""
    ranks = f", rank of {schedule.num_ranks:,} ({schedule.parallel})" if schedule.num_ranks > 1 else ""
    heading = f"Schedule of plan {schedule.plan_id}: {len(schedule.tasks):,} tasks an iteration{ranks}"
    return Heading(heading), _task_table(schedule), _memory_table(schedule)


def _task_table(schedule: Schedule) -> Table:
    rows = []
    for lane, program in schedule.lanes.items():
        tasks = [schedule.tasks[task] for task in program]
        for kind in TaskKind:
            if found := [task for task in tasks if task.kind is kind]:
                moved_bytes = sum(task.moved_bytes for task in found)
                moved = format_bytes(moved_bytes) if moved_bytes else ""
                rows.append((LANE_NAMES[lane], KIND_NAMES[kind], f"{len(found):,}", moved))
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
