"""Tables: their figures, what they mark, that names are no markup, and that equal input gives equal text."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protwin.shared.records.comparison import compare_records
from protwin.shared.schema.plan import ActivationMode, Plan
from protwin.shared.schema.record import (
    Holding,
    IterationPhase,
    LaneUse,
    MemoryCurve,
    Origin,
    PhaseWait,
    Record,
    Remedy,
    RemedyKind,
)
from protwin.shared.schema.schedule import Content, Lane, Memory, TaskKind
from protwin.shared.tables.comparison import comparison_tables
from protwin.shared.tables.labels import phase_parts, task_name
from protwin.shared.tables.record import iteration_table, lane_table, plan_table, record_tables
from protwin.shared.tables.terminal import as_text
from tests.shared.laid_out import LaidOut, laid_out
from tests.shared.report_pages import html_report, parse
from tests.strategies.records import records

MIB = 2**20
PLAN = Plan(workload_id="w", chunk_bytes=8 * MIB, n_persist=3, n_buffer=4, prefetch_depth=2, n_checkpoint=6)


@pytest.fixture(scope="module")
def example() -> LaidOut:
    return laid_out(6, noise_frac=0.3)


def record(**changes: object) -> Record:
    fields: dict[str, object] = {
        "origin": Origin.SIMULATED,
        "plan": PLAN,
        "plan_id": "p",
        "model_name": "small",
        "hardware_name": "h",
        "num_samples": 2,
        "num_tokens": 4096,
        "iteration_s": 2.0,
        "forward_s": 0.5,
        "backward_s": 1.25,
        "optimizer_s": 0.25,
        "tasks": (),
        "lanes": (
            LaneUse(lane=Lane.COMPUTE, num_tasks=5, busy_s=1.5),
            LaneUse(lane=Lane.H2D, num_tasks=7, busy_s=1.9, moved_bytes=56 * MIB),
            LaneUse(lane=Lane.CPU_OPTIM, num_tasks=3, busy_s=0.3),
        ),
        "memory": (
            MemoryCurve(
                memory=Memory.DEVICE,
                times_s=(0.0, 1.0),
                levels_bytes=(10 * MIB, 100 * MIB),
                peak_bytes=100 * MIB,
                peak_at="backward 3",
                alive_at_peak=(
                    Holding(content=Content.PARAMETERS, size_bytes=25 * MIB),
                    Holding(content=Content.ACTIVATIONS, size_bytes=60 * MIB),
                    Holding(content=None, size_bytes=5 * MIB),
                ),
            ),
            MemoryCurve(
                memory=Memory.PINNED_HOST, times_s=(0.0,), levels_bytes=(48 * MIB,), peak_bytes=48 * MIB, peak_at="x"
            ),
        ),
        "guaranteed_peak_device_bytes": 110 * MIB,
        "num_gathers": 7,
        "num_cpu_adam_steps": 3,
    }
    return Record.model_validate(fields | changes)


def rows(text: str) -> dict[str, list[str]]:
    """The cells of every row by its first cell; cells are two or more spaces apart."""
    found: dict[str, list[str]] = {}
    for line in text.splitlines():
        name, *cells = re.split(r"\s{2,}", line.strip())
        found.setdefault(name, cells)
    return found


def test_the_plan_shows_every_knob() -> None:
    shown = rows(as_text([plan_table(PLAN, num_blocks=12)]))
    assert {name: cells[0] for name, cells in shown.items() if "_" in name} == {
        "chunk_bytes": "8 MiB",
        "n_persist": "3",
        "n_buffer": "4",
        "prefetch_depth": "2",
        "n_checkpoint": "6 of 12",
    }


def test_modes_named_one_by_one_are_shown_in_runs() -> None:
    modes = [ActivationMode.KEEP] * 2 + [ActivationMode.CHECKPOINT] * 3 + [ActivationMode.KEEP]
    plan = PLAN.model_copy(update={"activation_modes": tuple(modes), "n_checkpoint": 3})
    assert "keep × 2, checkpoint × 3, keep × 1" in as_text([plan_table(plan)])


def test_a_record_shows_its_figures() -> None:
    """Shares: 0.5 / 2, 1.25 / 2 and 0.25 / 2 of the iteration; 60, 25, 5 and the remaining 10 of 100 MiB."""
    shown = rows(as_text(record_tables(record())))
    assert shown["forward"] == ["500 ms", "25.0 %"]
    assert shown["backward"] == ["1.25 s", "62.5 %"]
    assert shown["optimizer"] == ["250 ms", "12.5 %"]
    assert shown["iteration"] == ["2 s"]
    assert shown["tokens per second"] == ["2,048"]
    assert shown["device memory"] == ["100 MiB", "backward 3"]
    assert shown["pinned host memory"][0] == "48 MiB"
    assert shown["guaranteed device peak"][0] == "110 MiB"
    assert shown["saved activations"] == ["60 MiB", "60.0 %"]
    assert shown["parameters"] == ["25 MiB", "25.0 %"]
    assert shown["transient, running task"] == ["5 MiB", "5.0 %"]
    assert shown["not itemized"] == ["10 MiB", "10.0 %"]
    assert shown["compute"] == ["5", "1.5 s", "75.0 %"]
    assert shown["device to host"] == ["0", "0 s", "0.0 %"]


@pytest.mark.parametrize("kind", TaskKind)
def test_the_peak_is_during_a_task_as_all_tables_call_it(kind: TaskKind) -> None:
    """As the list of tasks and the timeline do; names of files have ``_`` and words that are short for others."""
    shown = record()
    curves = tuple(curve.model_copy(update={"peak_at": f"{kind} chunk 7"}) for curve in shown.memory)
    text = as_text(record_tables(shown.model_copy(update={"memory": curves})))
    assert rows(text)["device memory"][1] == task_name(f"{kind} chunk 7", kind)
    assert f"Alive at the device memory peak ({task_name(f'{kind} chunk 7', kind)})" in text
    assert "_adam" not in text


def test_the_busiest_lane_alone_is_the_bottleneck() -> None:
    text = as_text(record_tables(record()))
    assert rows(text)["host to device"] == ["7", "56 MiB", "1.9 s", "95.0 %", "◀ bottleneck"]
    assert text.count("bottleneck") == 1


def test_a_record_without_work_has_no_bottleneck() -> None:
    assert "bottleneck" not in as_text(record_tables(record(lanes=())))


def waiting(*waits: tuple[IterationPhase, TaskKind | None, float], **changes: object) -> Record:
    told = [PhaseWait(phase=phase, cause=cause, seconds=seconds) for phase, cause, seconds in waits]
    return record(waits=tuple(told), **changes)


def test_phases_say_what_compute_waits_for() -> None:
    """Of 2 s: a forward of 500 ms of which 420 wait, a backward of 1.25 s of which 10 ms wait, less than a percent."""
    forward, backward, _ = IterationPhase
    example = waiting(
        (forward, TaskKind.CPU_ADAM, 0.3),
        (forward, TaskKind.GATHER, 0.1),
        (forward, TaskKind.GRADIENT_OFFLOAD, 0.015),
        (forward, TaskKind.GRADIENT_NORM, 0.005),
        (backward, TaskKind.GATHER, 0.01),
    )
    lines = [line.strip() for line in as_text([iteration_table(example)]).splitlines()]
    assert [re.split(r"\s{2,}", line) for line in lines[3:9]] == [
        ["forward", "500 ms", "25.0 %"],
        ["computing", "80 ms", "4.0 %"],
        ["waiting for CPU Adam", "300 ms", "15.0 %"],
        ["waiting for gather", "100 ms", "5.0 %"],
        ["waiting for other tasks", "20 ms", "1.0 %"],
        ["backward", "1.25 s", "62.5 %"],
    ]
    assert lines[9].startswith("optimizer")


@given(record=records())
def test_an_optimizer_that_takes_no_time_beyond_backward_has_no_row(record: Record) -> None:
    hidden, seen = (record.model_copy(update={"optimizer_s": seconds, "waits": ()}) for seconds in (0.0, 1e-6))
    phases = [[row[0] for row in iteration_table(one).rows] for one in (hidden, seen)]
    assert phases[1] == [*phases[0][:2], "optimizer", *phases[0][2:]]


@given(record=records(), phase=st.sampled_from(IterationPhase))
def test_the_parts_of_a_phase_are_the_phase(record: Record, phase: IterationPhase) -> None:
    parts = phase_parts(record, phase)
    waits_s = sum(wait.seconds for wait in record.waits_in(phase))
    if parts and waits_s <= record.phase_s(phase):
        assert sum(part.seconds for part in parts) == pytest.approx(record.phase_s(phase))
    assert sum(part.seconds for part in parts if part.is_waiting) == pytest.approx(waits_s if parts else 0.0)


def test_waits_without_a_cause_are_called_by_where_they_come_from() -> None:
    forward = IterationPhase.FORWARD
    predicted, measured = (
        as_text([iteration_table(waiting((forward, None, 0.2), origin=origin))]) for origin in Origin
    )
    assert "waiting for slower ranks" in predicted
    assert "waiting for tasks to be started" in measured


def test_remedies_stand_below_the_lanes() -> None:
    remedy = {"num_samples": 2, "plan": PLAN, "iteration_s": 1.0}
    leaner = PLAN.model_copy(update={"n_persist": 0, "workload_id": "larger"})
    told = (
        Remedy.model_validate(remedy | {"kind": RemedyKind.HOST, "speedup": 1.94}),
        Remedy.model_validate(remedy | {"kind": RemedyKind.BATCH, "speedup": 1.5, "num_samples": 4, "plan": leaner}),
    )
    text = as_text([lane_table(record(remedies=told))], width=200)
    assert text.rstrip().endswith(
        "\nTwice the cores and host memory bandwidth: 1.94 times the tokens per second; batch 4 with n_persist 0: "
        "1.50 times."
    )


def test_what_was_emulated_is_said() -> None:
    assert "emulated: throttled links" in as_text(record_tables(record(emulated=("throttled links",))))


def test_noise_is_shown_where_it_is_known() -> None:
    assert rows(as_text(record_tables(record(iteration_noise_frac=0.012))))["iteration"] == ["2 s", "± 1.2 %"]


@pytest.mark.parametrize("num_iterations", [1, 2])
def test_a_single_iteration_has_no_noise(example: LaidOut, num_iterations: int) -> None:
    """It was said to have one of ± 0.0 %."""
    changed = {"num_iterations": num_iterations, "iteration_noise_frac": 0.0 if num_iterations == 1 else 0.03}
    measured = example.measured.model_copy(update=changed)
    shown = as_text(comparison_tables(compare_records(example.predicted, measured)))
    assert ("noise" in shown) is (num_iterations == 2)
    words = parse(html_report(title="a run", predicted=example.predicted, measured=measured)).words
    if num_iterations == 1:
        assert "1 iteration was timed" in words
        assert "noise" not in words
    else:
        assert "noise ± 3.0 %; 2 iterations were timed" in words


def test_a_comparison_shows_both_sides_and_signed_errors(example: LaidOut) -> None:
    comparison = compare_records(example.predicted, example.measured)
    text = as_text(comparison_tables(comparison), width=120)
    error = comparison.iteration.error_frac
    assert error is not None
    shown = rows(text)["iteration"]
    assert shown[-1].replace("−", "-") == f"{error * 100:+.1f} %"
    assert comparison.first_parting is not None
    assert f"parts by more than 10.0 % is {comparison.first_parting.name}: " in text
    for task in comparison.largest_differences:
        name = task.name.replace("cpu_adam", "CPU Adam").replace("gradient_offload", "gradient offload")
        assert f"\n{name}" in text


def test_a_comparison_of_equals_says_so(example: LaidOut) -> None:
    text = as_text(comparison_tables(compare_records(example.predicted, example.predicted)))
    assert "No task parts by more than 10.0 %." in text
    assert re.search(r"  0\.0 %$", text, re.MULTILINE)
    assert "+0.0" not in text


def test_errors_without_a_value_are_a_dash(example: LaidOut) -> None:
    idle = example.measured.model_copy(update={"lanes": ()})
    comparison = compare_records(example.predicted, idle)
    table = as_text(comparison_tables(comparison)).partition("Lanes, busy")[2]
    assert rows(table)["compute"][-1] == "–"


@pytest.mark.parametrize("width", [66, 80, 100, 200])
def test_no_line_is_wider_than_asked_where_figures_have_room(example: LaidOut, width: int) -> None:
    comparison = compare_records(example.predicted, example.measured)
    for tables in ([plan_table(PLAN)], record_tables(example.predicted), comparison_tables(comparison)):
        assert max(map(len, as_text(tables, width=width).splitlines())) <= width


def test_names_are_no_markup() -> None:
    name = "[bold red]model[/] :smile: [link=x]y[/link]"
    text = as_text(record_tables(record(model_name=name)))
    assert name in text
    from rich.console import Console

    with_markup = Console(width=100, file=None).render_str(name, markup=True, emoji=False)
    assert name not in with_markup.plain, "the name would not show the mistake"


def test_text_is_the_same_in_every_terminal() -> None:
    """Run with colours forced, as a dumb terminal, and with another width in the environment."""
    code = (
        "from tests.shared.tables.test_record import record;"
        "from protwin.shared.tables.record import record_tables;"
        "from protwin.shared.tables.terminal import as_text;"
        "print(as_text(record_tables(record())))"
    )
    here = {"PATH": "/usr/bin:/bin", "PYTHONIOENCODING": "utf-8"}
    outputs = {
        subprocess.run([sys.executable, "-c", code], env=here | extra, capture_output=True, check=True).stdout
        for extra in (
            {},
            {"FORCE_COLOR": "1", "COLORTERM": "truecolor", "LINES": "3", "PYTHONHASHSEED": "7"},
            {"TERM": "dumb", "COLUMNS": "33", "NO_COLOR": "1", "TTY_COMPATIBLE": "1"},
        )
    }
    assert len(outputs) == 1
    assert outputs.pop().decode() == as_text(record_tables(record())) + "\n"


def test_equal_input_gives_equal_text(example: LaidOut) -> None:
    again = laid_out(6, noise_frac=0.3)
    assert as_text(record_tables(example.measured)) == as_text(record_tables(again.measured))


@pytest.mark.parametrize(("hardware_flops", "is_explained"), [(199, False), (200, False), (201, True)])
def test_a_device_that_seems_to_compute_more_than_it_can_is_explained(hardware_flops: int, is_explained: bool) -> None:
    """200 FLOPs in 2 s are all of 100 FLOP/s."""
    found = record(model_flops=150, hardware_flops=hardware_flops, peak_flop_per_s=100.0)
    text = as_text((iteration_table(found),))
    assert ("whole squares of scores count, of which kernels leave half out" in text) is is_explained
