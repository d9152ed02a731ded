"""Out of memory at every task of a schedule: an error with its cause, no hang, and weights that are whole."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache, partial

import pytest

from protwin.shared.compile.compile import compile_schedule
from protwin.shared.schema.plan import ActivationMode, Plan
from protwin.shared.schema.schedule import LANE_OF, LANES_ALONE, Lane, Task, TaskKind
from tests.runtime.models import Case, llama, three_groups, token_batches
from tests.runtime.resuming import plan_of
from tests.runtime.running_out import run_out

ITERATION = 1
OF_METHODS = (TaskKind.TEACHER_FORWARD, TaskKind.LOSS, *(kind for kind in TaskKind if "projection" in kind))
KINDS_ALONE = [kind for kind in TaskKind if LANE_OF[kind] in LANES_ALONE and kind not in OF_METHODS]
"""What one rank alone does in full training."""


@lru_cache
def small_case() -> Case:
    return Case(partial(llama, num_layers=2), token_batches(3), groups=three_groups)


def everything(case: Case) -> Plan:
    """Persistent and offloaded chunks, swapped and checkpointed blocks, two micro-batches, a limited norm."""
    modes = (ActivationMode.SWAP, ActivationMode.CHECKPOINT)
    knobs = {"n_swap": 1, "activation_modes": modes, "micro_batches": 2, "max_gradient_norm": 1.0}
    return plan_of(case.workload, chunk_bytes=14_000, n_persist=1, n_checkpoint=1).model_copy(update=knobs)


def tasks_of(plan: Plan, case: Case) -> tuple[Task, ...]:
    return compile_schedule(plan, case.workload).tasks


def ends_of_every_kind(tasks: Sequence[Task]) -> list[Task]:
    """The first and the last task of each kind; ``make prove`` takes all of them."""
    by_kind = {kind: [task for task in tasks if task.kind is kind] for kind in TaskKind}
    chosen = {task.id: task for of_kind in by_kind.values() if of_kind for task in (of_kind[0], of_kind[-1])}
    return list(chosen.values())


@pytest.mark.parametrize("lane", LANES_ALONE)
def test_out_of_memory_at_any_task(lane: Lane) -> None:
    case = small_case()
    plan = everything(case)
    tasks = ends_of_every_kind([task for task in tasks_of(plan, case) if task.lane is lane])
    endings = [run_out(case, plan, task.id, ITERATION) for task in tasks]
    assert {task.lane for task in tasks} == {lane}
    assert [(ending.task, ending.faults) for ending in endings if ending.faults] == []
    assert all(ending.has_raised for ending in endings)


def test_the_plan_has_every_kind_of_task() -> None:
    case = small_case()
    assert {task.kind for task in tasks_of(everything(case), case)} == set(KINDS_ALONE)


def test_out_of_memory_in_the_operations_of_compute_tasks() -> None:
    case = small_case()
    plan = everything(case)
    tasks = ends_of_every_kind([task for task in tasks_of(plan, case) if isinstance(task.section, int)])
    tasks = [task for task in tasks if task.lane is Lane.COMPUTE]
    endings = [run_out(case, plan, task.id, ITERATION, at_allocation=True) for task in tasks]
    assert [(ending.task, ending.faults) for ending in endings if ending.faults] == []
    assert all(ending.has_raised for ending in endings), "forward, recomputation and backward of a block allocate"


def test_the_last_step_is_kept_if_that_is_wanted() -> None:
    """Without, CPU Adam has stepped some chunks by the time that backward ends, and these stay ahead."""
    case = small_case()
    plan = everything(case).model_copy(update={"max_gradient_norm": None})
    task = next(t for t in reversed(tasks_of(plan, case)) if t.kind is TaskKind.DEVICE_ADAM)
    ahead = run_out(case, plan, task.id, ITERATION)
    kept = run_out(case, plan, task.id, ITERATION, keep_last_step=True)
    assert (ahead.faults, kept.faults) == ((), ())
    assert kept.is_one_step
    assert not ahead.is_one_step


@pytest.mark.parametrize("kind", [TaskKind.CPU_ADAM, TaskKind.GRADIENT_OFFLOAD])
def test_what_fails_behind_backward_fails_before_the_device_steps(kind: TaskKind) -> None:
    """What the device has stepped cannot be taken back; a step that waited for nothing would leave several steps."""
    case = small_case()
    plan = everything(case).model_copy(update={"max_gradient_norm": None})
    task = next(t for t in reversed(tasks_of(plan, case)) if t.kind is kind)
    kept = run_out(case, plan, task.id, ITERATION, keep_last_step=True)
    assert kept.faults == ()
    assert kept.is_one_step
