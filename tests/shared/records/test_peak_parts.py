"""What cannot leave the device at a peak: held against the peaks of all other residencies, and counted by hand."""

from __future__ import annotations

import pytest
from hypothesis import assume, given, settings

from protwin.shared.compile.compile import compile_schedule
from protwin.shared.layout.layout import build_layout
from protwin.shared.records import peak_parts as module
from protwin.shared.records.peak_parts import PeakPart, peak_parts
from protwin.shared.schema.plan import Plan
from protwin.shared.schema.schedule import Content, TaskKind
from protwin.shared.schema.workload import Workload
from protwin.shared.tables.explain import explain_plan
from protwin.shared.verify.guaranteed_peak import guaranteed_device_peak
from tests.shared.small_models import chain, parameter, plan, workload
from tests.strategies.plans import PlannedWorkload, planned_workloads


def parts_of(plan: Plan, workload: Workload) -> tuple[int, tuple[PeakPart, ...]]:
    """The guaranteed peak, and its parts."""
    schedule = compile_schedule(plan, workload)
    peak = guaranteed_device_peak(schedule)
    return peak.size_bytes, peak_parts(schedule, peak.task, peak.alive, peak.transient_bytes)


def check(case: PlannedWorkload) -> None:
    """The parts are the peak; what stays is in the peak of every residency of the same chunks and modes."""
    size_bytes, parts = parts_of(case.plan, case.workload)
    assert sum(part.size_bytes for part in parts) == size_bytes
    assert all(part.size_bytes > 0 for part in parts)
    stays_bytes = sum(part.size_bytes for part in parts if not part.can_leave)
    num_chunks = len(case.layout.chunks)
    for n_persist in {0, num_chunks // 2, num_chunks}:
        knobs = {
            "n_persist": n_persist,
            "n_host_stepped": 0,
            "n_buffer": case.layout.min_buffers(n_persist),
            "prefetch_depth": 1,
        }
        least = guaranteed_device_peak(compile_schedule(case.plan.model_copy(update=knobs), case.workload))
        assert stays_bytes <= least.size_bytes


@given(planned_workloads(max_blocks=3))
@settings(max_examples=20)
def test_no_residency_has_less_than_what_cannot_leave(case: PlannedWorkload) -> None:
    assume(len(case.layout.chunks) <= 12)
    check(case)


def test_what_a_step_on_the_device_reads_can_leave() -> None:
    """The next iteration's first gathers come while the step runs; other plans have it on the host."""
    model = workload([parameter(f"layers.{n}.weight", 50_000, n) for n in range(3)], 3)
    kept = plan(model, chunk_bytes=200_000, n_persist=2, n_buffer=1, prefetch_depth=3)
    schedule = compile_schedule(kept, model)
    assert schedule.tasks[guaranteed_device_peak(schedule).task].kind is TaskKind.DEVICE_ADAM
    _, parts = parts_of(kept, model)
    assert {part.content for part in parts if not part.can_leave} <= {Content.RESIDENT}
    assert Content.PARAMETERS in {part.content for part in parts if part.can_leave}


@pytest.mark.parametrize("content", [Content.GRADIENTS, Content.OPTIMIZER_STATE, Content.PARAMETERS])
def test_the_check_notices_what_can_leave(monkeypatch: pytest.MonkeyPatch, content: Content) -> None:
    """The wrong variants: gradients, optimizer state or the weights of any section, counted as what stays."""
    model = chain(4, elements=50_000)
    layout = build_layout(model.parameters, num_blocks=4, chunk_bytes=200_000)
    kept = plan(model, chunk_bytes=200_000, n_persist=4, n_buffer=0, micro_batches=2)
    case = PlannedWorkload(model, kept, layout)
    check(case)
    monkeypatch.setattr(module, "_NEVER_LEAVES", (*module._NEVER_LEAVES, content))
    with pytest.raises(AssertionError):
        check(case)


def test_an_explanation_names_them() -> None:
    model = chain(4)
    text = " ".join(explain_plan(plan(model, n_persist=1, n_buffer=2, n_checkpoint=4), model).split())
    assert "Cannot leave the device during" in text
    assert "of outputs that backward begins with" in text
    assert "of optimizer state" in text.partition("Beside that: ")[2]
