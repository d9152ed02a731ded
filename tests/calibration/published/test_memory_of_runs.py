"""The memory of published training runs beside predictions of it, and the margin that a search leaves."""

from __future__ import annotations

from typing import Any

import pytest

from protwin.calibration.published.measured_runs import MEASURED_RUNS, MemoryKind
from protwin.calibration.published.memory_margin import (
    MemoryOfRun,
    half_digit_bytes,
    memory_of_runs,
    num_refused,
    quantiles_of_ratio,
    share_covered,
    share_within_device,
)
from protwin.calibration.published.run_predictions import PredictedRun
from protwin.calibration.published.run_tables import memory_by_class
from protwin.shared.basics.units import parse_bytes
from protwin.shared.tables.table import Table
from protwin.sim.searching.confidence import DEFAULT_MARGIN_FRAC
from tests.calibration.published.test_measured_runs import KEPT


def memory(measured: int, predicted: int, *, device: int = 100) -> MemoryOfRun:
    return MemoryOfRun("made up", MemoryKind.RESERVED, measured, predicted, device, None)


def test_margins_by_hand() -> None:
    found = [memory(20, 20), memory(22, 20), memory(50, 40), memory(10, 20)]
    assert [share_covered(found, margin) for margin in (0.0, 0.09, 0.1, 0.2)] == [0.5, 0.5, 0.75, 1.0]
    assert [share_within_device(found, margin) for margin in (0.0, 0.02, 0.05, 0.1)] == [0.5, 0.75, 0.75, 1.0]
    assert quantiles_of_ratio(found, (0.25, 0.5, 1.0)) == [0.5, 1.0, 1.25]


def predicted_run(name: str, needed_bytes: int) -> PredictedRun:
    return PredictedRun(
        id=name,
        iteration_s=1.0,
        tokens_per_s_per_device=1.0,
        samples_per_s=1.0,
        mfu_frac=None,
        guaranteed_peak_bytes=1,
        reserved_bytes=needed_bytes - 10,
        outside_bytes=10,
        device_bytes=100,
    )


@pytest.mark.parametrize(
    ("text", "half"),
    [
        ("7.4GiB", 2**30 / 20),
        ("43.50 GiB", 2**30 / 20),
        ("47.14GiB", 2**30 / 200),
        ("14949MiB", 2**20 / 20),
        ("4095", 0),
    ],
)
def test_a_figure_of_few_digits_stands_for_what_is_rounded_to_it(text: str, half: float) -> None:
    size = parse_bytes(text)
    assert half_digit_bytes(size) == int(half)
    one = memory(size, size)
    assert one.ratio == 1
    assert one.least_ratio == pytest.approx(1 - half / size)


def test_what_leaves_less_than_the_margin_is_refused() -> None:
    runs = MEASURED_RUNS[:3]
    found = {run.id: predicted_run(run.id, size) for run, size in zip(runs, (90, 95, 101), strict=True)}
    assert [num_refused(runs, found, margin) for margin in (0.0, 0.05, 0.06, 0.2)] == [1, 1, 2, 3]


def test_memory_is_held_against_its_own_kind() -> None:
    kinds = {one.run: one for one in memory_of_runs(KEPT.predicted)}
    process, allocated, reserved = (
        kinds[name] for name in ("qwen-7B-lora-512", "litgpt-llama2-7b-b2", "prime-rl-3210")
    )
    predicted = KEPT.predicted
    assert process.predicted_bytes == predicted[process.run].reserved_bytes + predicted[process.run].outside_bytes
    assert allocated.predicted_bytes == predicted[allocated.run].guaranteed_peak_bytes
    assert reserved.predicted_bytes == predicted[reserved.run].reserved_bytes


def test_the_margin_covers_what_was_measured() -> None:
    """Of plain loops: a plan that is carried out here holds what they hold, and nothing of other systems."""
    alike = [one for one in KEPT.memories() if one.is_of_plan]
    assert len(alike) >= 11
    assert share_covered(alike, DEFAULT_MARGIN_FRAC) >= 0.8
    assert share_within_device(alike, DEFAULT_MARGIN_FRAC) == 1
    predicted = KEPT.predicted
    more = num_refused(MEASURED_RUNS, predicted, DEFAULT_MARGIN_FRAC) - num_refused(MEASURED_RUNS, predicted, 0.0)
    assert more <= 0.05 * len(MEASURED_RUNS)


def test_errors_of_memory_are_summed_up_by_class() -> None:
    """Of a prediction that is a tenth too much, and then a tenth too little, in turn."""
    measured = [run for run in MEASURED_RUNS if run.measured.memory is not None]
    predicted = dict(KEPT.predicted)
    errors: dict[Any, list[float]] = {}
    for number, run in enumerate(measured):
        assert run.measured.memory is not None
        _, size_bytes = run.measured.memory
        errors.setdefault(run.run_class, []).append(sign := (0.1, -0.1)[number % 2])
        made = round(size_bytes * (1 + sign))
        update = {"guaranteed_peak_bytes": made, "reserved_bytes": made, "outside_bytes": 0}
        predicted[run.id] = KEPT.predicted[run.id].model_copy(update=update)
    (table,) = memory_by_class(predicted)
    assert isinstance(table, Table)
    assert {row[0]: int(row[1]) for row in table.rows[:-1]} == {name: len(of) for name, of in errors.items()}
    for row in table.rows[:-1]:
        assert float(row[2].rstrip("%")) == pytest.approx(100 * sum(errors[row[0]]) / len(errors[row[0]]), abs=0.06)
    assert all(row[3] == "10.0%" for row in table.rows)
    assert int(table.rows[-1][1]) == len(measured)
