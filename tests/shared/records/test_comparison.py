"""Comparisons of small records, every expected figure worked out by hand."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protwin.shared.basics.errors import ProtwinError
from protwin.shared.basics.interval import Interval
from protwin.shared.records.comparison import Comparison, Difference, compare_records, signed_error_frac
from protwin.shared.schema.plan import Plan
from protwin.shared.schema.record import LaneUse, MemoryCurve, Origin, Record, TaskTiming
from protwin.shared.schema.schedule import LANE_OF, Lane, Memory, TaskKind
from protwin.shared.tables.comparison import comparison_sentences
from tests.shared.laid_out import laid_out

PLAN = Plan(workload_id="w", chunk_bytes=1024, n_persist=1, n_buffer=2)
NAMES = (
    (TaskKind.FORWARD, "forward 0"),
    (TaskKind.GATHER, "gather chunk 1"),
    (TaskKind.BACKWARD, "backward 0"),
    (TaskKind.CPU_ADAM, "cpu_adam chunk 1"),
)


def timing(task: int, start_s: float, duration_s: float) -> TaskTiming:
    kind, name = NAMES[task]
    return TaskTiming(
        task=task,
        name=name,
        kind=kind,
        lane=LANE_OF[kind],
        start_s=start_s,
        end_s=start_s + duration_s,
        duration_s=duration_s,
    )


def curve(memory: Memory, peak_bytes: int) -> MemoryCurve:
    return MemoryCurve(
        memory=memory, times_s=(0.0,), levels_bytes=(peak_bytes,), peak_bytes=peak_bytes, peak_at="backward 0"
    )


def record(
    origin: Origin,
    tasks: list[TaskTiming],
    *,
    iteration_s: float = 10.0,
    noise_frac: float = 0.0,
    peaks: tuple[int | None, int | None] = (1000, 500),
    plan_id: str = "p",
) -> Record:
    memories = zip((Memory.DEVICE, Memory.PINNED_HOST), peaks, strict=True)
    return Record(
        origin=origin,
        plan=PLAN,
        plan_id=plan_id,
        model_name="m",
        hardware_name="h",
        num_samples=1,
        num_tokens=8,
        iteration_s=iteration_s,
        iteration_noise_frac=noise_frac,
        forward_s=0.4 * iteration_s,
        backward_s=0.6 * iteration_s,
        optimizer_s=0.0,
        tasks=tuple(tasks),
        lanes=tuple(
            LaneUse(
                lane=lane,
                num_tasks=sum(t.lane is lane for t in tasks),
                busy_s=sum(t.duration_s for t in tasks if t.lane is lane),
            )
            for lane in Lane
        ),
        memory=tuple(curve(memory, peak) for memory, peak in memories if peak is not None),
        guaranteed_peak_device_bytes=2000,
        num_gathers=1,
        num_cpu_adam_steps=1,
    )


PREDICTED = record(
    Origin.SIMULATED,
    [timing(0, 0.0, 4.0), timing(1, 1.0, 2.0), timing(2, 4.0, 6.0), timing(3, 7.0, 1.0)],
)


def measured_with(tasks: list[TaskTiming], **changes: float) -> Record:
    return record(Origin.MEASURED, tasks, **changes)  # type: ignore[arg-type]


def test_errors_are_predicted_over_measured_minus_one() -> None:
    """Forward 4 against 5, gather 2 against 2, backward 6 against 4.8, CPU Adam 1 against nothing."""
    measured = record(
        Origin.MEASURED,
        [timing(0, 0.0, 5.0), timing(1, 1.0, 2.0), timing(2, 5.0, 4.8), timing(3, 7.0, 0.0)],
        iteration_s=12.5,
        noise_frac=0.01,
        peaks=(1250, 400),
    )
    found = compare_records(PREDICTED, measured)
    assert found.iteration.error_frac == pytest.approx(-0.2)
    assert (found.forward.predicted_s, found.forward.measured_s) == (4.0, 5.0)
    assert found.forward.error_frac == pytest.approx(-0.2)
    assert found.optimizer.error_frac == 0.0
    assert found.peak_device is not None
    assert found.peak_pinned is not None
    assert (found.peak_device.predicted_bytes, found.peak_device.measured_bytes) == (1000, 1250)
    assert found.peak_device.error_frac == pytest.approx(-0.2)
    assert found.peak_pinned.error_frac == pytest.approx(0.25)
    kinds = {kind.kind: kind for kind in found.kinds}
    assert list(kinds) == [TaskKind.FORWARD, TaskKind.BACKWARD, TaskKind.GATHER, TaskKind.CPU_ADAM]
    assert all(kind.num_predicted == kind.num_measured == 1 for kind in kinds.values())
    assert kinds[TaskKind.FORWARD].duration.error_frac == pytest.approx(-0.2)
    assert kinds[TaskKind.BACKWARD].duration.error_frac == pytest.approx(0.25)
    assert kinds[TaskKind.GATHER].duration.error_frac == 0.0
    assert kinds[TaskKind.CPU_ADAM].duration.error_frac is None
    lanes = {lane.lane: lane.busy for lane in found.lanes}
    assert lanes[Lane.COMPUTE].predicted_s == 10.0
    assert lanes[Lane.COMPUTE].measured_s == pytest.approx(9.8)
    assert lanes[Lane.D2H].error_frac == 0.0
    assert lanes[Lane.CPU_OPTIM].error_frac is None
    assert (found.noise_frac, found.tolerance_frac) == (0.01, 0.10)


def test_the_largest_differences_come_first() -> None:
    """Backward differs by 1.2 s, forward and CPU Adam by 1 s each (in order of predicted start), gather by nothing."""
    measured = measured_with([timing(0, 0.0, 5.0), timing(1, 1.0, 2.0), timing(2, 5.0, 4.8), timing(3, 7.0, 0.0)])
    found = compare_records(PREDICTED, measured)
    assert [task.name for task in found.largest_differences] == ["backward 0", "forward 0", "cpu_adam chunk 1"]


def test_equal_records_do_not_part() -> None:
    found = compare_records(PREDICTED, measured_with(list(PREDICTED.tasks)))
    assert found.first_parting is None
    assert found.largest_differences == ()
    assert found.iteration.error_frac == 0.0


@pytest.mark.parametrize(
    ("gather_s", "noise_frac", "parts"),
    [
        (2.0 / 1.101, 0.0, True),  # 10.1 % too long
        (2.0 / 1.099, 0.0, False),
        (2.0 / 0.899, 0.0, True),  # 10.1 % too short
        (2.0 / 0.901, 0.0, False),
        (2.0 / 1.199, 0.1, False),  # noise of 10 % allows 20 %
        (2.0 / 1.201, 0.1, True),
        (2.0 / 1.101, 0.01, True),  # little noise does not narrow the tolerance
        (2.0 / 1.099, 0.01, False),
    ],
)
def test_a_task_parts_in_duration(gather_s: float, noise_frac: float, parts: bool) -> None:
    tasks = [timing(0, 0.0, 4.0), timing(1, 1.0, gather_s), timing(2, 4.0, 6.0), timing(3, 7.0, 1.0)]
    found = compare_records(PREDICTED, measured_with(tasks, noise_frac=noise_frac)).first_parting
    assert (found is not None) == parts
    if found is not None:
        assert (found.name, found.differs_in) == ("gather chunk 1", (Difference.DURATION,))
        assert (found.duration.predicted_s, found.duration.measured_s) == (2.0, gather_s)


@pytest.mark.parametrize(("start_s", "parts"), [(2.01, True), (1.99, False), (0.01, False), (-0.01, True)])
def test_a_task_parts_in_start_by_a_tenth_of_the_iteration(start_s: float, parts: bool) -> None:
    """Predicted to start at 1 s of an iteration of 10 s."""
    tasks = [timing(0, 0.0, 4.0), timing(1, start_s, 2.0), timing(2, 4.0, 6.0), timing(3, 7.0, 1.0)]
    found = compare_records(PREDICTED, measured_with(tasks)).first_parting
    assert (found is not None) == parts
    if found is not None:
        assert (found.name, found.differs_in) == ("gather chunk 1", (Difference.START,))
        assert (found.predicted_start_s, found.measured_start_s) == (1.0, start_s)


def test_the_first_that_parts_is_the_first_to_start_not_the_first_listed() -> None:
    """Backward (task 2) and gather (task 1) part; listed in reverse, the gather still starts first."""
    tasks = [timing(0, 0.0, 4.0), timing(1, 1.0, 3.0), timing(2, 4.0, 9.0), timing(3, 7.0, 1.0)]
    reverse = PREDICTED.model_copy(update={"tasks": PREDICTED.tasks[::-1]})
    found = compare_records(reverse, measured_with(tasks)).first_parting
    assert found is not None
    assert found.name == "gather chunk 1"

    by_listing = next(t for t in reverse.tasks if t.duration_s != tasks[t.task].duration_s)
    assert by_listing.name == "backward 0", "the order of listing would not show the mistake"


def test_memories_that_one_record_lacks_have_no_peak() -> None:
    measured = record(Origin.MEASURED, list(PREDICTED.tasks), peaks=(1000, None))
    found = compare_records(PREDICTED, measured)
    assert found.peak_device is not None
    assert found.peak_pinned is None


def test_tasks_that_one_record_lacks_are_named() -> None:
    fewer = measured_with(list(PREDICTED.tasks[:2]))
    found = compare_records(PREDICTED, fewer)
    assert found.only_predicted == ("backward 0", "cpu_adam chunk 1")
    assert found.only_measured == ()
    assert found.first_parting is None
    kinds = {kind.kind: (kind.num_predicted, kind.num_measured) for kind in found.kinds}
    assert kinds[TaskKind.BACKWARD] == (1, 0)


def test_records_of_different_plans_are_refused() -> None:
    with pytest.raises(ProtwinError, match="predicted one p, the measured one q"):
        compare_records(PREDICTED, record(Origin.MEASURED, list(PREDICTED.tasks), plan_id="q"))


def test_records_in_the_wrong_order_are_refused() -> None:
    with pytest.raises(ProtwinError, match="Give the prediction first"):
        compare_records(measured_with(list(PREDICTED.tasks)), PREDICTED)


def test_two_measurements_may_be_compared() -> None:
    measured = measured_with(list(PREDICTED.tasks))
    assert compare_records(measured, measured).iteration.error_frac == 0.0


def test_records_that_name_a_task_differently_are_refused() -> None:
    renamed = [t.model_copy(update={"name": "forward 7"}) if t.task == 0 else t for t in PREDICTED.tasks]
    with pytest.raises(ProtwinError, match="'forward 0' in the predicted record and 'forward 7'"):
        compare_records(PREDICTED, measured_with(renamed))


def test_a_comparison_reads_back_equal(tmp_path: Path) -> None:
    example = laid_out(6, noise_frac=0.4)
    found = compare_records(example.predicted, example.measured)
    assert found.first_parting is not None
    assert len(found.largest_differences) == 5
    found.save(tmp_path / "comparison.json")
    assert Comparison.load(tmp_path / "comparison.json") == found


@pytest.mark.parametrize(
    ("predicted", "measured", "expected"),
    [(0, 0, 0.0), (1, 0, None), (0, 4, -1.0), (3, 4, -0.25), (5, 4, 0.25), (1e300, 1e-300, None)],
)
def test_the_signed_error_never_divides_by_zero(predicted: float, measured: float, expected: float | None) -> None:
    assert signed_error_frac(predicted, measured) == expected


@given(factor=st.floats(0.2, 5.0), num_blocks=st.integers(1, 3))
def test_a_prediction_that_is_off_by_a_factor_is_off_by_that_factor_everywhere(factor: float, num_blocks: int) -> None:
    measured = laid_out(num_blocks).measured
    scaled = [
        t.model_copy(
            update={"start_s": t.start_s * factor, "end_s": t.end_s * factor, "duration_s": t.duration_s * factor}
        )
        for t in measured.tasks
    ]
    predicted = measured.model_copy(
        update={"tasks": tuple(scaled), "iteration_s": measured.iteration_s * factor, "origin": Origin.SIMULATED}
    )
    found = compare_records(predicted, measured)
    assert found.iteration.error_frac == pytest.approx(factor - 1)
    for kind in found.kinds:
        assert kind.duration.error_frac == pytest.approx(factor - 1)
    if abs(factor - 1) > 0.11:
        assert found.first_parting is not None
        assert found.first_parting.predicted_start_s == min(t.start_s for t in predicted.tasks)


def test_a_measurement_lies_inside_its_interval_or_outside() -> None:
    tasks = [timing(0, 0.0, 1.0)]
    predicted = record(Origin.SIMULATED, tasks).model_copy(
        update={
            "iteration_interval_s": Interval(low=9.0, high=12.0),
            "peak_interval_bytes": Interval(low=900, high=1_000),
        }
    )
    found = compare_records(predicted, record(Origin.MEASURED, tasks, iteration_s=12.0, peaks=(1_001, 500)))
    assert found.iteration.is_inside is True
    assert found.peak_device is not None
    assert found.peak_device.is_inside is False
    assert (found.forward.is_inside, found.peak_pinned and found.peak_pinned.is_inside) == (None, None)
    assert "time lies inside 9 s to 12 s, the device peak outside 900 B to 1000 B" in comparison_sentences(found)[0]
    silent = compare_records(record(Origin.SIMULATED, tasks), record(Origin.MEASURED, tasks))
    assert "intervals" not in comparison_sentences(silent)[0]
