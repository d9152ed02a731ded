"""The main job on real input: search a plan on the simulator, carry it out, lay the two over each other.

A small Llama learns the Python language reference, byte by byte, within less than half of the device memory that plain
training needs.  Run it with ``make demo``.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import repeat
from pathlib import Path
from typing import Any, Final

import torch
from rich.console import Console
from rich.panel import Panel
from torch import nn

from ...runtime.data.byte_text import byte_batches, python_reference
from ...runtime.devices.cpu_device import CpuDevice
from ...runtime.devices.ledger import CpuOutOfMemoryError, MemoryLedger
from ...runtime.devices.probe import probe_hardware
from ...runtime.devices.process_settings import leave_a_core_for_lanes
from ...runtime.model.configurations import build_model
from ...runtime.timing.plain_loop import train_plainly
from ...runtime.training.carry_out import carry_out
from ...shared.answers.search_result import SearchResult
from ...shared.basics.documents import write_atomically
from ...shared.basics.progress import progress_bar
from ...shared.basics.units import format_bytes, format_seconds
from ...shared.catalogue.machines import hardware_to_toml
from ...shared.compile.compile import compile_schedule
from ...shared.records.chrome_trace import chrome_trace
from ...shared.records.comparison import Comparison, compare_records
from ...shared.report.report import Facts, report
from ...shared.schema.calibration import Calibration
from ...shared.schema.plan import Plan
from ...shared.schema.record import Record
from ...shared.schema.workload import Workload
from ...shared.tables.comparison import comparison_tables
from ...shared.tables.search import search_tables
from ...shared.tables.terminal import Printed
from ...sim.engine.simulator import simulate
from ...sim.searching.request import SearchRequest
from ...sim.searching.search import search
from ..fitting.budgeted import BudgetedSubject
from ..fitting.calibrate import calibrate, run_plan
from ..fitting.subject import Subject

CONFIGURATION: Final[dict[str, Any]] = {
    "model_type": "llama",
    "hidden_size": 320,
    "num_hidden_layers": 10,
    "num_attention_heads": 5,
    "num_key_value_heads": 5,
    "intermediate_size": 864,
    "vocab_size": 256,
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "eos_token_id": None,
}
_BATCH_SIZE: Final = 4
_SEQUENCE_LENGTH: Final = 128
_STEPS: Final = 30
_BUDGET_FRAC: Final = 0.45
_SEED: Final = 0
_METER_EVERY: Final = 10
_REFERENCE_STEPS: Final = 7
"""Three of them warm up."""
_TRACE_REPEATS: Final = 4
_CALIBRATION_STEPS: Final = 5
_SLOWDOWN_SECONDS: Final = 4.0
_MAKE_OPTIMIZER: Final = partial(torch.optim.AdamW, lr=3e-4, weight_decay=0.1, fused=True)


def main() -> None:
    """Run the demo and leave its files in the output folder."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("out/demo"), help="folder for the files (out/demo)")
    console = Console(highlight=False)
    run_demo(parser.parse_args().output, console if console.is_terminal else Console(highlight=False, width=120))


def run_demo(folder: Path, console: Console) -> dict[str, Any]:
    """The whole demo; gives what ``comparison.json`` holds."""
    started = time.perf_counter()
    leave_a_core_for_lanes()
    batches = list(
        byte_batches(
            python_reference(),
            batch_size=_BATCH_SIZE,
            sequence_length=_SEQUENCE_LENGTH,
            num_batches=_STEPS,
            seed=_SEED,
        )
    )
    torch.manual_seed(_SEED)
    model = build_model(CONFIGURATION, "demo-llama", torch.float32, device="cpu")
    num_parameters = sum(p.numel() for p in model.parameters())
    console.print(
        f"A Llama of {num_parameters / 1e6:.1f} M parameters and {CONFIGURATION['num_hidden_layers']} blocks learns "
        f"the Python language reference, {_BATCH_SIZE} x {_SEQUENCE_LENGTH} bytes a step, in float32 on the CPU."
    )
    limits = _plain_limits(model, batches, console)
    subject, calibration = _calibrated(model, batches[0], limits.budget_bytes, console)
    reference = _Reference(subject)
    with stage(console, "measure a reference"):
        reference.measure()
    with stage(console, "search on the simulator"):
        found = _searched(subject, calibration, limits.budget_bytes)
    console.print(Printed(search_tables(found)))
    planned = _carried_out(subject, found.plan, batches, limits.budget_bytes, console)
    with stage(console, "measure the reference again"):
        reference.measure()
    planned = replace(planned, record=with_noise(planned.record, reference.noise_frac(calibration)))
    with stage(console, f"{_STEPS} plain steps without a budget"), progress_bar("training") as on_progress:
        plain = copy.deepcopy(model)
        steps = iter(range(1, _STEPS + 1))
        plain_run = train_plainly(plain, batches, _MAKE_OPTIMIZER, on_step=lambda: on_progress(next(steps), _STEPS))

    differences = zip(planned.model.parameters(), plain.parameters(), strict=True)
    comparison = {
        **predictions_held(found.prediction, planned.record),
        "plain_peak_device_bytes": limits.need_bytes,
        "device_budget_bytes": limits.budget_bytes,
        "losses_identical": planned.losses == plain_run.losses,
        "max_abs_weight_difference": max((a - b).abs().max().item() for a, b in differences),
    }
    comparison |= planned.counts
    subject.workload.save(folder / "workload.json")
    write_atomically(folder / "hardware.toml", hardware_to_toml(subject.hardware))
    calibration.save(folder / "calibration.json")
    write_atomically(folder / "comparison.json", json.dumps(comparison, indent=1) + "\n")
    losses = {"planned": planned.losses, "plain": plain_run.losses}
    laid_over = _write_records(folder, subject.workload, found, planned.record, limits, losses)
    console.print(Printed(comparison_tables(laid_over)))
    _print_summary(console, comparison, statistics.median(plain_run.seconds[3:]))
    console.print(f"{time.perf_counter() - started:.0f} s in all. Files: {folder}/ (open report.html)")
    return comparison


@dataclass(frozen=True)
class _Limits:
    """What plain training needs, what the plan is given, and how plain training ends with as much."""

    need_bytes: int
    budget_bytes: int
    refusal: str


@dataclass(frozen=True)
class _Planned:
    """A training under a plan and a budget."""

    model: nn.Module
    losses: tuple[float, ...]
    record: Record
    counts: dict[str, int]


def _plain_limits(model: nn.Module, batches: list[dict[str, torch.Tensor]], console: Console) -> _Limits:
    with stage(console, "plain training: what it needs"):
        need_bytes = _plain_need(model, batches)
    budget_bytes = int(need_bytes * _BUDGET_FRAC)
    console.print(f"  plain training needs {format_bytes(need_bytes)}; the budget is {format_bytes(budget_bytes)}")
    with stage(console, "plain training under the budget"):
        refusal = _plain_refusal(model, batches, budget_bytes)
    console.print(Panel(refusal, title="plain training under the budget", border_style="red", expand=False))
    return _Limits(need_bytes, budget_bytes, refusal)


def _calibrated(
    model: nn.Module, batch: dict[str, torch.Tensor], budget_bytes: int, console: Console
) -> tuple[BudgetedSubject, Calibration]:
    """This machine measured, with the model itself and within the budget, which the model does not fit."""
    with stage(console, "probe the machine"):
        hardware = probe_hardware(seconds=4.0, device=CpuDevice())
    with stage(console, "trace the model under the budget"), progress_bar("tracing") as on_progress:
        subject = BudgetedSubject.of(
            model,
            batch,
            hardware,
            budget_bytes,
            make_optimizer=_MAKE_OPTIMIZER,
            name="demo-llama",
            repeats=_TRACE_REPEATS,
            on_progress=on_progress,
        )
    with stage(console, "calibrate under the budget"), progress_bar("calibrating") as on_progress:
        return subject, calibrate(
            subject, steps=_CALIBRATION_STEPS, slowdown_seconds=_SLOWDOWN_SECONDS, on_progress=on_progress
        )


def _searched(subject: Subject, calibration: Calibration, budget_bytes: int) -> SearchResult:
    return search(
        SearchRequest(
            workload=subject.workload,
            hardware=subject.hardware,
            calibration=calibration,
            device_budget_bytes=budget_bytes,
        )
    )


def _carried_out(
    subject: Subject, plan: Plan, batches: list[dict[str, torch.Tensor]], budget_bytes: int, console: Console
) -> _Planned:
    """All steps of ``plan`` on a copy of the model, on a device that refuses more than the budget."""
    model = copy.deepcopy(subject.model)
    losses: list[float] = []
    with (
        stage(console, f"{_STEPS} steps under the enforced budget"),
        progress_bar("training") as on_progress,
        carry_out(
            model,
            plan,
            subject.workload,
            optimizer=subject.make_optimizer,
            device=CpuDevice(budget_bytes),
            meter_every=_METER_EVERY,
        ) as training,
    ):
        for batch in batches:
            loss = model(**batch).loss
            loss.backward()
            training.step()
            losses.append(loss.item())
            on_progress(len(losses), _STEPS)
        record = training.record(hardware_name=subject.hardware.name)
    counts = {
        "bytes_host_to_device": training.bytes_host_to_device,
        "bytes_device_to_host": training.bytes_device_to_host,
        "cpu_adam_steps": training.num_cpu_adam_steps,
    }
    return _Planned(model, tuple(losses), record, counts)


def with_noise(record: Record, noise_frac: float) -> Record:
    """The record, once it says how far runs lie apart where that is more than its own iterations do."""
    return record.model_copy(update={"iteration_noise_frac": max(record.iteration_noise_frac, noise_frac)})


def predictions_held(predicted: Record, measured: Record) -> dict[str, Any]:
    """Time and peak, predicted and measured."""
    return {
        "predicted_iteration_s": predicted.iteration_s,
        "measured_iteration_s": measured.iteration_s,
        "iteration_error_frac": predicted.iteration_s / measured.iteration_s - 1,
        "iteration_noise_frac": measured.iteration_noise_frac,
        "predicted_peak_device_bytes": predicted.peak_device_bytes,
        "measured_peak_device_bytes": measured.peak_device_bytes,
        "peak_error_frac": predicted.peak_device_bytes / measured.peak_device_bytes - 1,
    }


def _write_records(
    folder: Path,
    workload: Workload,
    found: SearchResult,
    measured: Record,
    limits: _Limits,
    losses: Mapping[str, Sequence[float]],
) -> Comparison:
    """The plan, both records, and what they look like beside each other."""
    predicted, schedule = found.prediction, compile_schedule(found.plan, workload)
    laid_over = compare_records(predicted, measured)
    records: dict[str, Record] = {"simulated": predicted, "measured": measured}
    found.plan.save(folder / "plan.json")
    predicted.save(folder / "predicted.json")
    measured.save(folder / "measured.json")
    write_atomically(folder / "losses.json", json.dumps(losses, indent=1) + "\n")
    write_atomically(folder / "timeline.json", chrome_trace(records, schedule=schedule))
    facts = Facts(
        predicted=predicted,
        measured=measured,
        budget_bytes=limits.budget_bytes,
        losses={name: losses[name] for name in ("plain", "planned")},
        plain_peak_bytes=limits.need_bytes,
        schedule=schedule,
        search=found,
        notes=(f"Plain training under this budget ends with: {limits.refusal}",),
    )
    write_atomically(folder / "report.html", report("protwin demo: a model that does not fit, trained", facts).html)
    return laid_over


class _Reference:
    """One plan that the calibration was fitted to, measured again: the run-to-run noise of this machine.

    What a run itself can tell is how far its iterations lie apart; a shared machine also changes from minute to minute.
    """

    def __init__(self, subject: BudgetedSubject) -> None:
        self._subject = subject
        self._plan = subject.plans()[0]
        self._measured_s: list[float] = []

    def measure(self) -> None:
        """Run the reference for a few iterations."""
        record = run_plan(
            copy.deepcopy(self._subject.model),
            self._plan,
            self._subject.workload,
            repeat(self._subject.batch, _REFERENCE_STEPS),
            optimizer=self._subject.make_optimizer,
            device=self._subject.make_device(),
            hardware_name=self._subject.hardware.name,
        )
        self._measured_s.append(record.iteration_s)

    def noise_frac(self, calibration: Calibration) -> float:
        """How far a run lies from the median of all at most, the calibration's own included, over that median."""
        predicted = simulate(self._plan, self._subject.workload, self._subject.hardware, calibration)
        return run_noise_frac([predicted.iteration_s, *self._measured_s])


def run_noise_frac(iterations_s: Sequence[float]) -> float:
    """The largest distance of a run from the median of all, over it: the x of "± x"."""
    median_s = statistics.median(iterations_s)
    return max(abs(iteration_s - median_s) for iteration_s in iterations_s) / median_s


def _plain_need(model: nn.Module, batches: list[dict[str, torch.Tensor]]) -> int:
    """Peak device bytes of plain training, over two steps: the second one has the optimizer's state from the start."""
    return train_plainly(copy.deepcopy(model), batches[:2], _MAKE_OPTIMIZER, ledger=MemoryLedger()).peak_bytes


def _plain_refusal(model: nn.Module, batches: list[dict[str, torch.Tensor]], budget_bytes: int) -> str:
    """The error that plain training under the budget ends with."""
    try:
        train_plainly(copy.deepcopy(model), batches[:2], _MAKE_OPTIMIZER, ledger=MemoryLedger(budget_bytes))
    except CpuOutOfMemoryError as error:
        return f"{error}"
    raise AssertionError("plain training fits into a budget that is below its own peak")


@contextmanager
def stage(console: Console, title: str) -> Iterator[None]:
    """Tell ``title`` at the end of the block, and how long it took."""
    start = time.perf_counter()
    yield
    console.print(f"[bold]{title}[/bold] [dim]{time.perf_counter() - start:.1f} s[/dim]")


def _print_summary(console: Console, comparison: dict[str, Any], plain_s: float) -> None:
    c = comparison
    same = "bit for bit those of plain training" if c["losses_identical"] else "NOT those of plain training"
    console.print(
        f"iteration: predicted {format_seconds(c['predicted_iteration_s'])}, measured "
        f"{format_seconds(c['measured_iteration_s'])} ({c['iteration_error_frac']:+.1%}, noise "
        f"± {c['iteration_noise_frac']:.1%}); plain training without the budget {format_seconds(plain_s)}\n"
        f"peak: predicted {format_bytes(c['predicted_peak_device_bytes'])}, measured "
        f"{format_bytes(c['measured_peak_device_bytes'])} ({c['peak_error_frac']:+.2%}) of a budget of "
        f"{format_bytes(c['device_budget_bytes'])}; plain training needs {format_bytes(c['plain_peak_device_bytes'])}\n"
        f"losses and weights: {same} (largest difference of a weight: {c['max_abs_weight_difference']})\n"
        f"offloaded: {format_bytes(c['bytes_host_to_device'])} gathered, {format_bytes(c['bytes_device_to_host'])} of "
        f"gradients sent to the host, {c['cpu_adam_steps']} CPU Adam steps"
    )


if __name__ == "__main__":
    main()
