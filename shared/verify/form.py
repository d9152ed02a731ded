"""The form that every schedule has, whatever it trains."""

from __future__ import annotations

from math import isfinite

from ..schema.schedule import Task
from .claim import Claim, reject


def check_form(claim: Claim) -> None:
    """Ids are places, names exist, the program lists what is waited for first, buffers come and go once."""
    schedule = claim.schedule
    plan = claim.plan
    for name, found, expected in (
        ("plan_id", schedule.plan_id, plan.identity),
        ("num_slots", schedule.num_slots, plan.n_buffer),
        ("num_blocks", schedule.num_blocks, claim.workload.num_blocks),
        ("prefetch_depth", schedule.prefetch_depth, plan.prefetch_depth),
        ("micro_batches", schedule.micro_batches, plan.micro_batches),
        ("num_ranks", schedule.num_ranks, plan.num_ranks),
        ("parallel", schedule.parallel, plan.parallel),
        ("shard_ranks", schedule.shard_ranks, plan.shard_ranks),
        ("sequence_ranks", schedule.sequence_ranks, plan.sequence_ranks),
        ("optimizer", schedule.optimizer, plan.optimizer),
        ("projects_gradients_on", schedule.projects_gradients_on, plan.projects_gradients_on),
    ):
        if found != expected:
            reject(f"its {name} is {found}, that of the plan is {expected}")
    for place, buffer in enumerate(schedule.buffers):
        if buffer.id != place:
            reject(f"buffer {buffer.id} stands at place {place}")
        if not 0 <= buffer.micro_batch < plan.micro_batches:
            reject(f"buffer {buffer.id} names micro-batch {buffer.micro_batch} of {plan.micro_batches}")
        if buffer.size_bytes < 0:
            reject(f"buffer {buffer.id} has {buffer.size_bytes} bytes")
        if buffer.chunk is not None and not 0 <= buffer.chunk < len(claim.layout.chunks):
            reject(f"buffer {buffer.id} names chunk {buffer.chunk} of {len(claim.layout.chunks)}")
    for place, task in enumerate(schedule.tasks):
        if task.id != place:
            reject(f"task {task.id} stands at place {place}")
        if not 0 <= task.micro_batch < plan.micro_batches:
            reject(f"{task.name} names micro-batch {task.micro_batch} of {plan.micro_batches}")
        if task.stated_s is not None and not (task.kind.is_added and isfinite(task.stated_s) and task.stated_s >= 0):
            reject(f"{task.name} states that it takes {task.stated_s} s")
        _check_names(claim, task)
    _check_coming_and_going(claim)


def _check_names(claim: Claim, task: Task) -> None:
    for buffers in (task.allocates, task.frees, task.reads, task.writes):
        if len(set(buffers)) != len(buffers):
            reject(f"{task.name} names a buffer twice")
        if any(not 0 <= buffer < len(claim.schedule.buffers) for buffer in buffers):
            reject(f"{task.name} names a buffer that does not exist")
    if any(not 0 <= other < task.id for other in task.after):
        reject(f"{task.name} waits for a task that does not stand before it")
    if any(not 0 <= other < len(claim.schedule.tasks) for other in task.after_previous):
        reject(f"{task.name} waits for a task of the previous iteration that does not exist")


def _check_coming_and_going(claim: Claim) -> None:
    """Every buffer that is not static is allocated once and freed once; static ones never."""
    for verb, named in (
        ("allocated", [b for task in claim.schedule.tasks for b in task.allocates]),
        ("freed", [b for task in claim.schedule.tasks for b in task.frees]),
    ):
        counts = dict.fromkeys(range(len(claim.schedule.buffers)), 0)
        for buffer_id in named:
            counts[buffer_id] += 1
        for buffer in claim.schedule.buffers:
            expected = 0 if buffer.is_static else 1
            if counts[buffer.id] != expected:
                reject(f"buffer {buffer.id} ({buffer.content}) is {verb} {counts[buffer.id]} times, not {expected}")


# -- one task --------------------------------------------------------------------------------------------------------
