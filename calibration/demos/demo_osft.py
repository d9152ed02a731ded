"""Fine-tuning without unlearning: one model learns a text, and then another one in three ways under one device budget.

A small Llama learns English documentation.  It then learns sums of numbers whole, by LoRA and by orthogonal subspace
fine-tuning (OSFT), each by a plan of its own that is searched on the calibrated simulator for the same budget, which
the device enforces.  What OSFT made is made dense, factorised anew, and learns a third text.  Shown are the losses on
sequences that no training has seen, before and afterwards, and time and memory, predicted and measured.  Run it with
``make demo-osft``.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
from rich.console import Console

from ...runtime.commands.learning_rates import LearningRates
from ...runtime.devices.cpu_device import CpuDevice
from ...runtime.devices.ledger import MemoryLedger
from ...runtime.devices.probe import probe_hardware
from ...runtime.devices.process_settings import leave_a_core_for_lanes
from ...runtime.osft.orthogonal_model import make_dense
from ...runtime.timing.plain_loop import train_plainly as train_under_ledger
from ...runtime.tracing.tracing import trace
from ...runtime.training.carry_out import carry_out
from ...shared.answers.search_result import SearchResult
from ...shared.basics.documents import write_atomically
from ...shared.basics.progress import progress_bar
from ...shared.basics.units import format_bytes, format_seconds
from ...shared.catalogue.machines import hardware_to_toml
from ...shared.compile.compile import compile_schedule
from ...shared.report.losses import BeforeAndAfter, forgetting_chart
from ...shared.report.page import PageTable, Section
from ...shared.report.report import Facts, report
from ...shared.schema.hardware import Hardware
from ...shared.schema.record import Record
from ...shared.schema.workload import Workload
from ...shared.tables.table import Table
from ...shared.tables.terminal import Printed
from ...sim.searching.request import SearchRequest
from ...sim.searching.search import search
from ..fitting.calibrate import calibrate
from ..fitting.subject import Subject
from .demo import predictions_held, stage
from .forgetting import (
    CONFIGURATION,
    Batch,
    Learned,
    Lesson,
    Text,
    Way,
    best_of,
    documentation,
    held_out_loss,
    learned,
    learned_first,
    prepared,
    rates_of,
    source_code,
    sums_of_numbers,
)

_SEED: Final = 0
_MAKE_OPTIMIZER: Final = partial(torch.optim.AdamW, lr=0.0, weight_decay=0.0, fused=True)


@dataclass(frozen=True, kw_only=True)
class OsftDemo:
    """How large the demo is."""

    lesson: Lesson
    budget_frac: float = 0.4
    """Of what full fine-tuning needs without a plan."""
    probe_seconds: float = 2.0
    repeats: int = 6
    """Timed iterations of every trace."""
    calibration_steps: int = 6
    """Timed iterations of every plan that a calibration is fitted to."""
    slowdown_seconds: float = 2.0
    """To measure how lanes slow each other."""


STANDARD: Final = OsftDemo(lesson=Lesson(configuration=CONFIGURATION, first_steps=600, steps=100))


def main() -> None:
    """Run the demo and leave its files in the output folder."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--output", type=Path, default=Path("out/demo-osft"), help="folder for the files (out/demo-osft)"
    )
    console = Console(highlight=False)
    run_osft_demo(parser.parse_args().output, console if console.is_terminal else Console(highlight=False, width=120))


def run_osft_demo(folder: Path, console: Console, size: OsftDemo = STANDARD) -> dict[str, Any]:
    """The whole demo; gives what ``comparison.json`` holds."""
    started = time.perf_counter()
    leave_a_core_for_lanes()
    lesson = size.lesson
    first, second, third = documentation(lesson), sums_of_numbers(lesson), source_code(lesson)
    with stage(console, f"{lesson.first_steps} steps: the model learns {first.name}, byte by byte"):
        base = learned_first(lesson, first, _SEED)
    with stage(console, f"each way chooses its learning rate, of {', '.join(f'{rate:g}' for rate in lesson.rates)}"):
        chosen = {way: _chosen(base, way, first, second, lesson) for way in Way}
    batch = next(second.batches(lesson, 1, _SEED))
    need_bytes = _plain_need(prepared(base, Way.FULL, lesson, _SEED), batch)
    budget_bytes = int(size.budget_frac * need_bytes)
    console.print(
        f"  full fine-tuning needs {format_bytes(need_bytes)} without a plan; each way has {format_bytes(budget_bytes)}"
    )
    with stage(console, "probe the machine"):
        hardware = probe_hardware(seconds=size.probe_seconds, device=CpuDevice())
    done: dict[Way, _Done] = {}
    for way in Way:
        with stage(console, f"{way}: trace, calibrate, search a plan, {lesson.steps} steps under the enforced budget"):
            planned = _planned(prepared(base, way, lesson, _SEED), batch, way, hardware, budget_bytes, size)
            done[way] = _learned_by_plan(base, chosen[way], planned, (first, second), lesson)
    with stage(console, f"OSFT: made dense, factorised anew, {lesson.steps} steps on {third.name} by the same plan"):
        onwards = _went_on(done[Way.OSFT], (first, second, third), lesson)

    tables = [_losses_table(done, first, second), _plans_table(done), _third_table(onwards, done[Way.OSFT])]
    for table in tables:
        console.print(Printed([table]))
    comparison = {
        "device_budget_bytes": budget_bytes,
        "full_fine_tuning_needs_bytes": need_bytes,
        "ways": {str(way): one.described for way, one in done.items()},
        "third": onwards,
    }
    _write_files(folder, hardware, done, comparison, tables, (first, second))
    _print_summary(console, done)
    console.print(f"{time.perf_counter() - started:.0f} s in all. Files: {folder}/ (open report.html)")
    return comparison


@dataclass(frozen=True)
class _Planned:
    """A way's workload and plan."""

    workload: Workload
    found: SearchResult
    budget_bytes: int


@dataclass(frozen=True)
class _Done:
    """What a way came to under its plan."""

    outcome: Learned
    planned: _Planned
    measured: Record
    is_plain: bool
    """Whether every loss is that of the plain loop, bit for bit."""
    model: Any

    @property
    def described(self) -> dict[str, Any]:
        """For a file."""
        held = predictions_held(self.planned.found.prediction, self.measured)
        return asdict(self.outcome) | held | {"losses_identical": self.is_plain}


def _chosen(base: Any, way: Way, first: Text, second: Text, lesson: Lesson) -> Learned:
    return best_of([learned(base, way, rate, first, second, lesson, _SEED)[0] for rate in lesson.rates])


def _plain_need(model: Any, batch: Batch) -> int:
    """Peak device bytes of two steps of plain training: the second has the optimizer's state from the start."""
    return train_under_ledger(model, [batch, batch], _MAKE_OPTIMIZER, ledger=MemoryLedger()).peak_bytes


def _planned(model: Any, batch: Batch, way: Way, hardware: Hardware, budget_bytes: int, size: OsftDemo) -> _Planned:
    """The fastest plan within the budget, by a simulator that is calibrated for this way.  Raises InfeasibleError."""
    workload = trace(model, batch, name=f"demo-llama, {way}", repeats=size.repeats)
    subject = Subject(model, batch, workload, hardware, make_optimizer=_MAKE_OPTIMIZER)
    with progress_bar("calibrating") as on_progress:
        calibration = calibrate(
            subject, steps=size.calibration_steps, slowdown_seconds=size.slowdown_seconds, on_progress=on_progress
        )
    request = SearchRequest(
        workload=workload, hardware=hardware, calibration=calibration, device_budget_bytes=budget_bytes
    )
    return _Planned(workload, search(request), budget_bytes)


def _train_by_plan(
    model: Any, batches: Iterator[Batch], rates: LearningRates, planned: _Planned, steps: int, records: list[Record]
) -> list[float]:
    """All steps under the enforced budget; gives their losses, and adds the measured Record to ``records``."""
    losses = []
    with carry_out(
        model,
        planned.found.plan,
        planned.workload,
        optimizer=_MAKE_OPTIMIZER,
        device=CpuDevice(planned.budget_bytes),
        meter_every=10,
    ) as training:
        for step, batch in enumerate(batches):
            training.set_learning_rate(rates.at(step, steps))
            loss = model(**batch).loss
            loss.backward()
            training.step()
            losses.append(loss.item())
        records.append(training.record(hardware_name=planned.found.prediction.hardware_name))
    return losses


def _learned_by_plan(base: Any, chosen: Learned, planned: _Planned, texts: tuple[Text, Text], lesson: Lesson) -> _Done:
    records: list[Record] = []
    train = partial(_train_by_plan, planned=planned, steps=lesson.steps, records=records)
    outcome, model = learned(base, chosen.way, chosen.rate, *texts, lesson, _SEED, train)
    return _Done(outcome, planned, records[0], outcome.losses == chosen.losses, model)


def _went_on(osft: _Done, texts: tuple[Text, Text, Text], lesson: Lesson) -> dict[str, dict[str, float]]:
    """Losses on all texts before and after OSFT has learned the third one, with factors of what it had become."""
    make_dense(osft.model)
    before = {text.name: held_out_loss(osft.model, text.tests) for text in texts}
    model = prepared(osft.model, Way.OSFT, lesson, _SEED)
    batches = texts[-1].batches(lesson, lesson.steps, _SEED)
    _train_by_plan(model, batches, rates_of(osft.outcome.rate), osft.planned, lesson.steps, [])
    return {text.name: {"before": before[text.name], "after": held_out_loss(model, text.tests)} for text in texts}


def _losses_table(done: Mapping[Way, _Done], first: Text, second: Text) -> Table:
    rows = []
    for way, one in done.items():
        o = one.outcome
        rows.append(
            (
                str(way),
                f"{o.num_trained:,}",
                f"{o.rate:g}",
                f"{o.first_before:.3f} -> {o.first_after:.3f}",
                f"{o.forgotten:+.3f}",
                f"{o.second_before:.3f} -> {o.second_after:.3f}",
            )
        )
    columns = ("way", ">trained", ">rate", f">{first.name}", ">forgotten", f">{second.name}")
    return Table(title="Loss on sequences held out, nats per byte", columns=columns, rows=tuple(rows))


def _plans_table(done: Mapping[Way, _Done]) -> Table:
    rows = []
    for way, one in done.items():
        held = predictions_held(one.planned.found.prediction, one.measured)
        rows.append(
            (
                str(way),
                *(format_seconds(held[f"{which}_iteration_s"]) for which in ("predicted", "measured")),
                f"{held['iteration_error_frac']:+.1%}",
                *(format_bytes(held[f"{which}_peak_device_bytes"]) for which in ("predicted", "measured")),
                f"{held['peak_error_frac']:+.2%}",
            )
        )
    columns = ("way", ">iteration", ">measured", ">error", ">peak", ">measured", ">error")
    return Table(title="Predicted and measured", columns=columns, rows=tuple(rows))


def _third_table(onwards: Mapping[str, Mapping[str, float]], osft: _Done) -> Table:
    begun = {name: f"{value:.3f}" for name, value in zip(onwards, _starts(osft.outcome), strict=False)}
    rows = tuple(
        (name, begun.get(name, ""), f"{losses['before']:.3f}", f"{losses['after']:.3f}")
        for name, losses in onwards.items()
    )
    columns = ("text", ">at first", ">after the second text", ">after the third")
    return Table(title="OSFT goes on to a third text", columns=columns, rows=rows)


def _starts(outcome: Learned) -> tuple[float, float]:
    return outcome.first_before, outcome.second_before


def _write_files(
    folder: Path,
    hardware: Hardware,
    done: Mapping[Way, _Done],
    comparison: Mapping[str, Any],
    tables: Sequence[Table],
    texts: tuple[Text, Text],
) -> None:
    """Plans and records of every way, the machine, the figures, and the page."""
    write_atomically(folder / "hardware.toml", hardware_to_toml(hardware))
    write_atomically(folder / "comparison.json", json.dumps(comparison, indent=1) + "\n")
    for way, one in done.items():
        within = folder / way.lower()
        one.planned.workload.save(within / "workload.json")
        one.planned.found.plan.save(within / "plan.json")
        one.planned.found.prediction.save(within / "predicted.json")
        one.measured.save(within / "measured.json")
    osft = done[Way.OSFT]
    predicted = osft.planned.found.prediction
    drawn = {str(way): _drawn(one.outcome) for way, one in done.items()}
    chart = forgetting_chart(drawn, (texts[0].name, texts[1].name))
    facts = Facts(
        predicted=predicted,
        measured=osft.measured,
        budget_bytes=osft.planned.budget_bytes,
        plain_peak_bytes=comparison["full_fine_tuning_needs_bytes"],
        schedule=compile_schedule(osft.planned.found.plan, osft.planned.workload),
        search=osft.planned.found,
        further=(Section("Two texts", (chart, *(PageTable(table) for table in tables))),),
        notes=("Plan, search and iteration are those of OSFT.",),
    )
    title = "protwin demo: a second text is learned, and the first one kept"
    write_atomically(folder / "report.html", report(title, facts).html)


def _drawn(outcome: Learned) -> tuple[BeforeAndAfter, BeforeAndAfter]:
    return (
        BeforeAndAfter(outcome.first_before, outcome.first_after),
        BeforeAndAfter(outcome.second_before, outcome.second_after),
    )


def _print_summary(console: Console, done: Mapping[Way, _Done]) -> None:
    full, lora, osft = (done[way].outcome for way in Way)
    exact = (
        "bit for bit those of the plain loop" if all(one.is_plain for one in done.values()) else "NOT the plain loop's"
    )
    console.print(
        f"OSFT forgets {osft.forgotten / full.forgotten:.2f} times what full fine-tuning forgets, LoRA "
        f"{lora.forgotten / full.forgotten:.2f} times; the second text's loss ends at {osft.second_after:.3f} by OSFT "
        f"and at {lora.second_after:.3f} by LoRA\n"
        f"losses of all steps under plans: {exact}"
    )


if __name__ == "__main__":
    main()
