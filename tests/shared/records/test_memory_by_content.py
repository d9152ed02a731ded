"""Memory by content over time: held against the simulator's own account, and against the curve that it is part of."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protwin.shared.catalogue.machines import load_hardware
from protwin.shared.compile.compile import compile_schedule
from protwin.shared.layout.layout import build_layout
from protwin.shared.records.memory_by_content import Stack, memory_stack
from protwin.shared.report.memory import stack_chart
from protwin.shared.schema.plan import Plan
from protwin.shared.schema.record import Record
from protwin.shared.schema.schedule import Content, Memory, Schedule
from protwin.sim.engine.simulator import simulate
from tests.shared.laid_out import MIB, decoder_workload, laid_out

NUM_BLOCKS = 6


def simulated(plan_changes: dict[str, Any]) -> tuple[Record, Schedule]:
    """A decoder on a slow link, so that copies and CPU Adam reach into the next iteration."""
    workload = decoder_workload(NUM_BLOCKS)
    layout = build_layout(workload.parameters, num_blocks=NUM_BLOCKS, chunk_bytes=8 * MIB)
    n_persist = plan_changes.pop("n_persist", 1)
    plan = Plan(
        workload_id=workload.identity,
        chunk_bytes=8 * MIB,
        n_persist=n_persist,
        n_buffer=layout.min_buffers(n_persist) + plan_changes.pop("more_buffers", 1),
        **({"prefetch_depth": 2, "n_checkpoint": 3} | plan_changes),
    )
    schedule = compile_schedule(plan, workload, layout)
    machine = load_hardware("rtx-3090")
    workload = workload.model_copy(update={"measured_on": machine.name})
    return simulate(plan, workload, machine, schedule=schedule), schedule


def levels_of_curve(record: Record, stack: Stack) -> np.ndarray:
    """The record's own level within every step, looked up one by one."""
    curve = record.curve(Memory.DEVICE)
    assert curve is not None
    ends_s = [*stack.begins_s[1:].tolist(), stack.end_s]
    found = []
    for begin_s, end_s in zip(stack.begins_s.tolist(), ends_s, strict=True):
        middle_s = (begin_s + end_s) / 2
        found.append([level for at, level in zip(curve.times_s, curve.levels_bytes, strict=True) if at <= middle_s][-1])
    return np.array(found)


PLANS = st.fixed_dictionaries(
    {
        "n_persist": st.integers(0, NUM_BLOCKS),
        "more_buffers": st.integers(0, 3),
        "prefetch_depth": st.integers(1, 3),
        "n_checkpoint": st.integers(0, NUM_BLOCKS),
        "micro_batches": st.sampled_from([1, 1, 2]),
    }
)


@settings(max_examples=25, deadline=None)
@given(changes=PLANS)
def test_contents_make_up_the_curve_and_the_peak_is_the_simulators(changes: dict[str, int]) -> None:
    record, schedule = simulated(dict(changes))
    stack = memory_stack(record, schedule)
    assert stack is not None
    assert (stack.total_bytes == levels_of_curve(record, stack)).all()
    assert all((levels >= 0).all() for levels in stack.levels_bytes.values())
    curve = record.curve(Memory.DEVICE)
    assert curve is not None
    peak = int(stack.total_bytes.argmax())
    assert stack.total_bytes[peak] == curve.peak_bytes
    alive = {holding.content: holding.size_bytes for holding in curve.alive_at_peak}
    assert {content: int(levels[peak]) for content, levels in stack.levels_bytes.items() if levels[peak]} == alive


def test_static_contents_never_change_and_the_rest_comes_and_goes() -> None:
    record, schedule = simulated({"n_persist": 2})
    stack = memory_stack(record, schedule)
    assert stack is not None
    resident = sum(b.size_bytes for b in schedule.buffers if b.content is Content.RESIDENT)
    assert set(stack.levels_bytes[Content.RESIDENT].tolist()) == {resident}
    persistent = sum(
        b.size_bytes
        for b in schedule.buffers
        if b.content is Content.PARAMETERS and b.is_static and b.memory is Memory.DEVICE
    )
    parameters = stack.levels_bytes[Content.PARAMETERS]
    assert parameters.min() >= persistent
    assert parameters.max() > parameters.min()
    assert stack.levels_bytes[None].min() == 0


def test_a_stack_without_neighbouring_iterations_would_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    """The wrong variant: stays of this iteration alone.  Chunks gathered ahead for the next one are then missed."""
    import protwin.shared.records.memory_by_content

    record, schedule = simulated({"prefetch_depth": 3, "n_persist": 0, "more_buffers": 3})
    right = memory_stack(record, schedule)
    monkeypatch.setattr(protwin.shared.records.memory_by_content, "_reach", lambda *_: 0)
    wrong = memory_stack(record, schedule)
    assert right is not None
    assert wrong is not None
    assert right.levels_bytes[Content.PARAMETERS].max() > wrong.levels_bytes[Content.PARAMETERS][-1]
    assert int(right.levels_bytes[Content.PARAMETERS][-1]) > int(wrong.levels_bytes[Content.PARAMETERS][-1])


def test_a_record_without_memory_or_tasks_has_no_stack() -> None:
    example = laid_out(4)
    assert memory_stack(example.predicted.model_copy(update={"memory": ()}), example.schedule) is None
    assert memory_stack(example.predicted.model_copy(update={"tasks": ()}), example.schedule) is None


@pytest.mark.parametrize("iteration_s", [5e-324, 1e-9, 1e-3])
def test_a_record_that_is_of_no_steady_state_has_no_stack(iteration_s: float) -> None:
    """Its tasks would reach over hundreds of iterations; to follow them all would never end."""
    example = laid_out(4)
    assert memory_stack(example.predicted.model_copy(update={"iteration_s": iteration_s}), example.schedule) is None


def test_the_drawing_names_every_content() -> None:
    record, schedule = simulated({})
    stack = memory_stack(record, schedule)
    assert stack is not None
    drawn = stack_chart(stack, (0.0, record.iteration_s), ())
    assert drawn.drawing.count("<clipPath") == len(stack.levels_bytes) == len(drawn.legend)
