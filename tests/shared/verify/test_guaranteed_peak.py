"""The guaranteed peak: no run of the abstract machine exceeds it, and some run reaches it."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protwin.shared.compile.compile import compile_schedule
from protwin.shared.layout.layout import build_layout
from protwin.shared.schema.plan import Plan
from protwin.shared.schema.schedule import Lane, Memory, Schedule, TaskKind
from protwin.shared.schema.workload import Workload
from protwin.shared.verify.guaranteed_peak import guaranteed_device_peak
from tests.proof_size import examples
from tests.shared.abstract_machine import AbstractMachine, Adversary
from tests.shared.adversaries import at_random, holding, preferring
from tests.shared.small_models import OUTPUT_BYTES, SAVED_BYTES, chain, parameter, plan, workload
from tests.shared.symbolic_values import Violation
from tests.strategies.plans import PlannedWorkload, planned_workloads


def adversaries(schedule: Schedule) -> Iterator[Adversary]:
    """Those that fill the device: chunks come early, gradients leave late, or one task takes for ever."""
    yield preferring(Lane.H2D)
    yield preferring(Lane.H2D, Lane.COMPUTE)
    yield preferring(Lane.H2D, Lane.COMPUTE, Lane.CPU_OPTIM)
    for task in schedule.tasks:
        if task.kind in (TaskKind.GRADIENT_OFFLOAD, TaskKind.BACKWARD):
            yield holding(task.id, iteration=1)


def highest(schedule: Schedule, plan: Plan, workload: Workload) -> int:
    layout = build_layout(workload.parameters, num_blocks=workload.num_blocks, chunk_bytes=plan.chunk_bytes)
    return max(
        AbstractMachine(schedule, plan, workload, layout).run(adversary).peak_bytes
        for adversary in adversaries(schedule)
    )


@pytest.mark.slow
@settings(max_examples=examples(60, 10))
@given(planned_workloads(has_disk=True), st.integers(0, 2**32 - 1))
def test_no_timing_exceeds_it(case: PlannedWorkload, seed: int) -> None:
    schedule = compile_schedule(case.plan, case.workload, case.layout)
    bound_bytes = guaranteed_device_peak(schedule).size_bytes
    assert highest(schedule, case.plan, case.workload) <= bound_bytes
    generator = random.Random(seed)
    for _ in range(3):
        machine = AbstractMachine(schedule, case.plan, case.workload, case.layout, num_iterations=4)
        assert machine.run(at_random(generator.randrange(2**32))).peak_bytes <= bound_bytes


@settings(max_examples=examples(60, 10))
@given(planned_workloads(has_disk=True))
def test_some_timing_reaches_it_if_no_gradients_leave(case: PlannedWorkload) -> None:
    """Otherwise a chunk's gradients and its next gather are counted side by side, though the one awaits the other."""
    schedule = compile_schedule(case.plan, case.workload, case.layout)
    if any(task.kind is TaskKind.GRADIENT_OFFLOAD for task in schedule.tasks):
        return
    # Swapped activations leave late in the one run; in the other they leave early, so that they come back early.
    peaks_bytes = [
        AbstractMachine(schedule, case.plan, case.workload, case.layout).run(preferring(*lanes)).peak_bytes
        for lanes in ((Lane.H2D,), (Lane.H2D, Lane.D2H))
    ]
    assert max(peaks_bytes) == guaranteed_device_peak(schedule).size_bytes


@pytest.mark.parametrize("num_blocks", [2, 3, 6])
@pytest.mark.parametrize("n_buffer", [1, 2, 6])
@pytest.mark.parametrize("prefetch_depth", [1, 2])
@pytest.mark.parametrize("checkpointed", [False, True])
def test_some_timing_reaches_it_in_chains(
    num_blocks: int, n_buffer: int, prefetch_depth: int, checkpointed: bool
) -> None:
    model = chain(num_blocks)
    knobs = plan(
        model, n_buffer=n_buffer, prefetch_depth=prefetch_depth, n_checkpoint=num_blocks if checkpointed else 0
    )
    schedule = compile_schedule(knobs, model)
    assert highest(schedule, knobs, model) == guaranteed_device_peak(schedule).size_bytes


@given(planned_workloads(has_disk=True))
def test_what_is_alive_adds_up_to_it(case: PlannedWorkload) -> None:
    schedule = compile_schedule(case.plan, case.workload, case.layout)
    peak = guaranteed_device_peak(schedule)
    alive = [schedule.buffers[buffer] for buffer in peak.alive]
    assert all(buffer.memory is Memory.DEVICE for buffer in alive)
    assert sum(buffer.size_bytes for buffer in alive) + peak.transient_bytes == peak.size_bytes


# -- by hand ---------------------------------------------------------------------------------------------------------


def test_everything_persistent_and_kept() -> None:
    """At the last forward: all parameters and optimizer state, what three forwards left, what the epilogue makes."""
    model = chain(3)
    knobs = plan(model, n_persist=3, n_buffer=0)
    peak = guaranteed_device_peak(compile_schedule(knobs, model))
    parameters_bytes = 3 * 4_096
    state_bytes = 3 * 8_004
    saved_bytes = 3 * (OUTPUT_BYTES + SAVED_BYTES) + OUTPUT_BYTES
    # The epilogue's backward starts with what its forward left, and peaks 1 000 bytes above it.
    assert peak.size_bytes == 64 + parameters_bytes + state_bytes + saved_bytes + 3_000 + 1_000
    assert peak.transient_bytes == 1_000


def test_everything_offloaded_and_checkpointed() -> None:
    """At the middle block's backward: the chunks of this block and the next, the gradients of the one before."""
    model = chain(3)
    knobs = plan(model, n_buffer=2, n_checkpoint=3)
    schedule = compile_schedule(knobs, model)
    peak = guaranteed_device_peak(schedule)
    # Outputs of the prologue and of block 0, and the incoming gradient in place of block 1's.
    outputs_bytes = 3 * OUTPUT_BYTES
    # 9 500 are recomputed; the backward proper peaks 2 000 above that.
    assert peak.size_bytes == 64 + outputs_bytes + 9_500 + 2_000 + 2 * 4_096 + 4_000
    assert schedule.tasks[peak.task].name == "backward 1"


def pausing() -> tuple[Workload, Plan]:
    """Backward 1 waits for the gradients of block 3 while the large chunk of block 0 has come already."""
    sizes = (10_000, 10, 10, 1_000)
    model = workload(
        [parameter(f"layers.{b}.weight", size, b, trainable=b != 0) for b, size in enumerate(sizes)], num_blocks=4
    )
    return model, plan(model, chunk_bytes=256, n_buffer=2)


def test_the_pause_before_a_task_counts() -> None:
    model, knobs = pausing()
    schedule = compile_schedule(knobs, model)
    peak = guaranteed_device_peak(schedule)
    kept_bytes = 2 * (OUTPUT_BYTES + SAVED_BYTES) + OUTPUT_BYTES
    chunks_bytes = 40_192 + 256
    gradients_bytes = 4_000 + 40
    assert peak.size_bytes == 64 + kept_bytes + chunks_bytes + gradients_bytes
    assert peak.transient_bytes == 0
    assert schedule.tasks[peak.task].name == "backward 1"
    assert highest(schedule, knobs, model) == peak.size_bytes
    # The wrong variant: only what may be there while a task runs, when the gradients of block 3 have left.
    while_running_bytes = peak.size_bytes - 4_000 + 2_000
    assert highest(schedule, knobs, model) > while_running_bytes


def test_gradients_that_nobody_waits_for_pile_up() -> None:
    """What the waits for gradient offloads are for: without them, as many gradients as blocks may be there at once."""
    model = chain(6, elements=10_000)
    knobs = plan(model, chunk_bytes=40_192, n_buffer=2, n_checkpoint=6)
    schedule = compile_schedule(knobs, model)
    bound_bytes = guaranteed_device_peak(schedule).size_bytes
    assert highest(schedule, knobs, model) == bound_bytes
    offloads = {task.id for task in schedule.tasks if task.kind is TaskKind.GRADIENT_OFFLOAD}
    hasty = replace(
        schedule,
        tasks=tuple(
            replace(task, after=tuple(other for other in task.after if other not in offloads))
            if task.lane is Lane.COMPUTE
            else task
            for task in schedule.tasks
        ),
    )
    assert guaranteed_device_peak(hasty).size_bytes >= bound_bytes + 2 * 40_000
    with pytest.raises(Violation, match="gradients of chunk 5 lag 2 steps behind"):
        highest(hasty, knobs, model)
