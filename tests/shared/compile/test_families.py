"""A family of plans in arrays holds every plan that it spans."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from protwin.shared.compile.compile import compile_schedule, drafted
from protwin.shared.compile.family import family_of
from protwin.shared.compile.views import tasks_and_buffers
from protwin.shared.schema.plan import ActivationMode, mode_counts
from protwin.shared.schema.schedule import Schedule, Task
from tests.proof_size import examples
from tests.strategies.plans import PlannedWorkload, parallel_workloads, planned_workloads

DEPTHS = (1, 2, 3, 7, 30)


def bare(tasks: tuple[Task, ...]) -> list[Task]:
    """Without what a family does not know of its plans: what tasks read, write and make, and their phases."""
    nothing: dict[str, Any] = {"allocates": (), "frees": (), "reads": (), "writes": (), "phase": None}
    return [replace(task, **nothing) for task in tasks]


def compiled(case: PlannedWorkload, depth: int, modes: list[ActivationMode]) -> Schedule:
    knobs = {
        "prefetch_depth": depth,
        "activation_modes": tuple(modes),
        **mode_counts(modes),
    }
    return compile_schedule(case.plan.model_copy(update=knobs), case.workload, case.layout)


@given(planned_workloads() | parallel_workloads(), st.data())
@settings(max_examples=examples(300, 12))
def test_every_plan_of_a_family_is_the_one_that_is_compiled_alone(case: PlannedWorkload, data: st.DataObject) -> None:
    alone = family_of(case.plan, case.workload, case.layout)
    bits = st.lists(st.booleans(), min_size=case.workload.num_blocks, max_size=case.workload.num_blocks)
    rows = np.array(data.draw(st.lists(bits, min_size=1, max_size=3))) & ~alone.is_swap | alone.offloads_input
    family = replace(alone, is_checkpoint=rows, depths=np.array(DEPTHS))
    draft = drafted(family)
    for number, depth in enumerate(DEPTHS):
        for row, is_checkpoint in enumerate(rows.tolist()):
            found = (alone.is_swap.tolist(), alone.offloads_input.tolist(), is_checkpoint)
            modes = [
                ActivationMode.SWAP
                if swaps
                else ActivationMode.OFFLOAD_INPUT
                if offloads
                else ActivationMode.CHECKPOINT
                if again
                else ActivationMode.KEEP
                for swaps, offloads, again in zip(*found, strict=True)
            ]
            schedule = compiled(case, depth, modes)
            tasks, _ = tasks_and_buffers(draft, family, depth=number, row=row)
            assert bare(tasks) == bare(schedule.tasks)


@given(planned_workloads() | parallel_workloads())
@settings(max_examples=examples(60, 10))
def test_facts_of_a_layout_are_derived_once(case: PlannedWorkload) -> None:
    one, other = (family_of(case.plan, case.workload, case.layout) for _ in range(2))
    assert one.facts is other.facts
    more = case.plan.model_copy(update={"micro_batches": case.plan.micro_batches + 1})
    assert family_of(more, case.workload, case.layout).facts is not one.facts


@given(planned_workloads() | parallel_workloads())
@settings(max_examples=examples(100, 12))
def test_families_that_differ_in_their_buffers_alone_leave_each_other_as_they_are(case: PlannedWorkload) -> None:
    # They begin with the same draft of what computes and of the updates.
    alone = family_of(case.plan, case.workload, case.layout)
    numbers = [case.plan.n_buffer, *range(case.plan.n_buffer, int(alone.is_gathered.sum()) + 1)]
    families = [replace(alone, n_buffer=number) for number in numbers]
    drafts = [drafted(family) for family in families]
    for number, family, draft in zip(numbers, families, drafts, strict=True):
        plan = case.plan.model_copy(update={"n_buffer": number})
        tasks, _ = tasks_and_buffers(draft, family)
        assert bare(tasks) == bare(compile_schedule(plan, case.workload, case.layout).tasks)
