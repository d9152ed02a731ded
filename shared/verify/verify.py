"""Proof that a schedule is safe, before anything runs.

The verifier shares no code with the compiler beyond the data types: it derives what must hold from plan, workload and
layout.  Its rules stand by policy: ``sections`` (what computes, in which order), ``residency`` (what lies where, when)
and ``updates`` (what happens to a gradient until its parameter is new); ``full_training``, ``bypass`` and ``osft``
list them.
Rules of order read the happens-before relation of the unrolled program, so that they hold for every timing.
"""

from __future__ import annotations

from math import isfinite
from typing import Final

from ..basics.errors import ScheduleError
from ..basics.units import format_bytes
from ..layout.layout import Layout, check_layout, layout_of
from ..layout.looked_up import check_looked_up
from ..layout.tiling import tiled
from ..order.happens_before import HappensBefore
from ..schema.plan import Plan, TrainingMethod
from ..schema.plan_check import check_plan
from ..schema.schedule import Memory, Schedule, Task
from ..schema.workload import Workload
from .bypass import BYPASS
from .claim import Claim, reject
from .compute_tasks import check_arrivals
from .data_flow import check_no_deadlock
from .full_training import FULL_TRAINING
from .guaranteed_peak import guaranteed_device_peak
from .osft import OSFT
from .rules import Rule, Rules, Stage

RULES: Final = {TrainingMethod.FULL: FULL_TRAINING, TrainingMethod.BYPASS: BYPASS, TrainingMethod.OSFT: OSFT}


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


COMMON: Final = (
    Rule(Stage.FORM, check_form),
    Rule(Stage.DATA_FLOW, check_no_deadlock),
    Rule(Stage.RANK_ORDER, check_arrivals),
)
"""Rules of every method."""


def verify_schedule(
    schedule: Schedule,
    plan: Plan,
    workload: Workload,
    layout: Layout | None = None,
    *,
    rules: Rules | None = None,
    device_limit_bytes: int | None = None,
    pinned_limit_bytes: int | None = None,
    host_limit_bytes: int | None = None,
) -> None:
    """Raise ScheduleError unless ``schedule`` carries out ``plan`` safely for every timing.

    Checked: the compute lane runs the model's sections in order, each on the buffers that it needs and no others;
    lanes cannot deadlock; every buffer has its size and place, is allocated before it is used and freed after its
    last use, once; every read sees the write that it is meant to see; compute has its chunks resident and current;
    every trainable chunk, or the rank's part of it, is stepped once by one Adam, after all of its gradients (under a
    limit of their norm, after all gradients); of several ranks, chunks are gathered whole and gradients added up before
    anybody needs them, in one order on all ranks; buffers of one slot never overlap; gathers and gradients keep to the
    prefetch window; the memory that no timing can exceed stays under the limits.
    ``rules``: of the training method, where it is another than the plan names; a task of a kind for which none of them
    answers is refused.
    ``host_limit_bytes`` bounds pinned and pageable host memory together; ``layout`` spares building it again.

    Raises PlanError if plan, workload and layout do not belong together.
    """
    check_plan(plan, workload)
    if layout is None:
        layout = layout_of(workload, plan.chunk_bytes)
    check_layout(layout, plan, workload)
    check_looked_up(plan, workload, layout)
    rules = rules or RULES[plan.method]
    claim = Claim(schedule, plan, tiled(workload, plan), layout, rules.keeping)
    for rule in rules.in_order(*COMMON, Rule(Stage.FORM, rules.check_kinds)):
        rule.check(claim)
    if device_limit_bytes is not None:
        _check_device(schedule, claim.order, device_limit_bytes)
    pinned_bytes = schedule.static_bytes(Memory.PINNED_HOST)
    _check_host("pinned host memory", pinned_bytes, pinned_limit_bytes)
    _check_host("host memory", pinned_bytes + schedule.static_bytes(Memory.HOST), host_limit_bytes)


def _check_device(schedule: Schedule, order: HappensBefore, limit_bytes: int) -> None:
    peak = guaranteed_device_peak(schedule, order)
    if peak.size_bytes > limit_bytes:
        raise ScheduleError(
            f"device memory may reach {format_bytes(peak.size_bytes)} during {schedule.tasks[peak.task].name} but the "
            f"limit is {format_bytes(limit_bytes)}. Keep fewer chunks persistent, or checkpoint more."
        )


def _check_host(what: str, size_bytes: int, limit_bytes: int | None) -> None:
    if limit_bytes is not None and size_bytes > limit_bytes:
        raise ScheduleError(
            f"{what} reaches {format_bytes(size_bytes)} but the limit is {format_bytes(limit_bytes)}. "
            f"Keep more chunks persistent."
        )
