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
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import repeat
from pathlib import Path
from typing import Any, Final

import torch
from rich.console import Console
from rich.panel import Panel
from torch import nn

from ...runtime.devices.device import CpuDevice
from ...runtime.devices.ledger import CpuOutOfMemoryError, MemoryLedger
from ...runtime.devices.probe import probe_hardware
from ...runtime.devices.process_settings import leave_a_core_for_lanes
from ...runtime.model.byte_text import byte_batches, python_reference
from ...runtime.model.configurations import build_model
from ...runtime.tracing.tracing import trace
from ...runtime.training.carry_out import carry_out
from ...runtime.training.plain_loop import train_plainly
from ...shared.basics.documents import write_atomically
from ...shared.basics.progress import progress_bar
from ...shared.basics.units import format_bytes, format_seconds
from ...shared.catalogue.machines import hardware_to_toml
from ...shared.compile.compile import compile_schedule
from ...shared.records.chrome_trace import chrome_trace
from ...shared.records.comparison import compare_records
from ...shared.report.report import html_report
from ...shared.schema.calibration import Calibration
from ...shared.schema.hardware import Hardware
from ...shared.schema.record import Record
from ...shared.schema.workload import Workload
from ...shared.tables.record import comparison_tables
from ...shared.tables.search import search_tables
from ...sim.engine.simulator import simulate
from ...sim.searching.request import SearchRequest
from ...sim.searching.search import search
from ..fitting.calibrate import calibrate, run_plan
from ..fitting.measurement_plans import bootstrap_plans

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
_REFERENCE_STEPS: Final = 10


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
    text = python_reference()
    batches = list(
        byte_batches(text, batch_size=_BATCH_SIZE, sequence_length=_SEQUENCE_LENGTH, num_batches=_STEPS, seed=_SEED)
    )
    torch.manual_seed(_SEED)
    model = build_model(CONFIGURATION, "demo-llama", torch.float32, device="cpu")
    make_optimizer = partial(torch.optim.AdamW, lr=3e-4, weight_decay=0.1, fused=True)
    num_parameters = sum(p.numel() for p in model.parameters())
    console.print(
        f"A Llama of {num_parameters / 1e6:.1f} M parameters and {CONFIGURATION['num_hidden_layers']} blocks learns "
        f"the Python language reference, {_BATCH_SIZE} x {_SEQUENCE_LENGTH} bytes a step, in float32 on the CPU."
    )

    with _stage(console, "plain training: what it needs"):
        need = _plain_need(model, batches, make_optimizer)
    budget_bytes = int(need * _BUDGET_FRAC)
    console.print(f"  plain training needs {format_bytes(need)}; the budget is {format_bytes(budget_bytes)}")
    with _stage(console, "plain training under the budget"):
        refusal = _plain_refusal(model, batches, make_optimizer, budget_bytes)
    console.print(Panel(refusal, title="plain training under the budget", border_style="red", expand=False))

    with _stage(console, "trace the model"), progress_bar("tracing") as report:
        workload = trace(model, batches[0], name="demo-llama", on_progress=report)
    with _stage(console, "measure the machine and calibrate"), progress_bar("calibrating") as report:
        hardware = probe_hardware(seconds=4.0, device=CpuDevice())
        calibration = calibrate(
            model, batches[0], workload, hardware, optimizer=make_optimizer, slowdown_seconds=6.0, on_progress=report
        )
    reference = _Reference(model, batches[0], workload, hardware, make_optimizer)
    with _stage(console, "measure a reference"):
        reference.measure()
    with _stage(console, "search on the simulator"):
        result = search(
            SearchRequest(
                workload=workload, hardware=hardware, calibration=calibration, device_budget_bytes=budget_bytes
            )
        )
    console.print(search_tables(result))

    planned = copy.deepcopy(model)
    with _stage(console, f"{_STEPS} steps under the enforced budget"), progress_bar("training") as report:
        device = CpuDevice(budget_bytes)
        losses: list[float] = []
        with carry_out(
            planned, result.plan, workload, optimizer=make_optimizer, device=device, meter_every=_METER_EVERY
        ) as training:
            for batch in batches:
                loss = planned(**batch).loss
                loss.backward()
                training.step()
                losses.append(loss.item())
                report(len(losses), _STEPS)
            measured = training.record(hardware_name=hardware.name)
    with _stage(console, "measure the reference again"):
        reference.measure()
    with _stage(console, f"{_STEPS} plain steps without a budget"), progress_bar("training") as report:
        plain = copy.deepcopy(model)
        steps = iter(range(1, _STEPS + 1))
        plain_run = train_plainly(plain, batches, make_optimizer, on_step=lambda: report(next(steps), _STEPS))

    predicted = result.prediction
    difference = max((a - b).abs().max().item() for a, b in zip(planned.parameters(), plain.parameters(), strict=True))
    comparison = {
        "predicted_iteration_s": predicted.iteration_s,
        "measured_iteration_s": measured.iteration_s,
        "iteration_error_frac": predicted.iteration_s / measured.iteration_s - 1,
        "iteration_noise_frac": max(measured.iteration_noise_frac, reference.spread_frac(calibration)),
        "predicted_peak_device_bytes": predicted.peak_device_bytes,
        "measured_peak_device_bytes": training.peak_device_bytes,
        "peak_error_frac": predicted.peak_device_bytes / training.peak_device_bytes - 1,
        "plain_peak_device_bytes": need,
        "device_budget_bytes": budget_bytes,
        "losses_identical": tuple(losses) == plain_run.losses,
        "max_abs_weight_difference": difference,
        "bytes_host_to_device": training.bytes_host_to_device,
        "bytes_device_to_host": training.bytes_device_to_host,
        "cpu_adam_steps": training.num_cpu_adam_steps,
    }
    schedule = compile_schedule(result.plan, workload)
    laid_over = compare_records(predicted, measured)
    records: dict[str, Record] = {"simulated": predicted, "measured": measured}
    workload.save(folder / "workload.json")
    write_atomically(folder / "hardware.toml", hardware_to_toml(hardware))
    calibration.save(folder / "calibration.json")
    result.plan.save(folder / "plan.json")
    predicted.save(folder / "predicted.json")
    measured.save(folder / "measured.json")
    both = {"planned": losses, "plain": plain_run.losses}
    write_atomically(folder / "losses.json", json.dumps(both, indent=1) + "\n")
    write_atomically(folder / "timeline.json", chrome_trace(records, schedule=schedule))
    write_atomically(folder / "comparison.json", json.dumps(comparison, indent=1) + "\n")
    write_atomically(
        folder / "report.html",
        html_report(
            title="protwin demo: a model that does not fit, trained",
            predicted=predicted,
            measured=measured,
            budget_bytes=budget_bytes,
            losses={"plain": plain_run.losses, "planned": losses},
            plain_peak_bytes=need,
            comparison=laid_over,
            schedule=schedule,
            search=result,
            notes=(f"Plain training under this budget ends with: {refusal}",),
        ),
    )
    console.print(comparison_tables(laid_over))
    _print_summary(console, comparison, statistics.median(plain_run.seconds[3:]))
    console.print(f"{time.perf_counter() - started:.0f} s in all. Files: {folder}/ (open report.html)")
    return comparison


class _Reference:
    """One plan that the calibration was fitted to, measured again: the run-to-run noise of this machine.

    What a Record calls noise is the spread within one run; a shared machine also changes from minute to minute.
    """

    def __init__(
        self,
        model: nn.Module,
        batch: dict[str, torch.Tensor],
        workload: Workload,
        hardware: Hardware,
        make_optimizer: Callable[..., Any],
    ) -> None:
        self._model = model
        self._batch = batch
        self._workload = workload
        self._hardware = hardware
        self._make_optimizer = make_optimizer
        self._plan = bootstrap_plans(workload)[0]
        self._measured_s: list[float] = []

    def measure(self) -> None:
        """Run the reference for a few iterations."""
        record = run_plan(
            copy.deepcopy(self._model),
            self._plan,
            self._workload,
            repeat(self._batch, _REFERENCE_STEPS),
            optimizer=self._make_optimizer,
            device=CpuDevice(),
            hardware_name=self._hardware.name,
        )
        self._measured_s.append(record.iteration_s)

    def spread_frac(self, calibration: Calibration) -> float:
        """Largest difference between its runs, the calibration's own included, over their median."""
        calibrated_s = simulate(self._plan, self._workload, self._hardware, calibration).iteration_s
        runs = [calibrated_s, *self._measured_s]
        return (max(runs) - min(runs)) / statistics.median(runs)


def _plain_need(model: nn.Module, batches: list[dict[str, torch.Tensor]], make_optimizer: Callable[..., Any]) -> int:
    """Peak device bytes of plain training, over two steps: the second one has the optimizer's state from the start."""
    return train_plainly(copy.deepcopy(model), batches[:2], make_optimizer, ledger=MemoryLedger()).peak_bytes


def _plain_refusal(
    model: nn.Module, batches: list[dict[str, torch.Tensor]], make_optimizer: Callable[..., Any], budget_bytes: int
) -> str:
    """The error that plain training under the budget ends with."""
    try:
        train_plainly(copy.deepcopy(model), batches[:2], make_optimizer, ledger=MemoryLedger(budget_bytes))
    except CpuOutOfMemoryError as error:
        return f"{error}"
    raise AssertionError("plain training fits into a budget that is below its own peak")


@contextmanager
def _stage(console: Console, title: str) -> Iterator[None]:
    start = time.perf_counter()
    yield
    console.print(f"[bold]{title}[/bold] [dim]{time.perf_counter() - start:.1f} s[/dim]")


def _print_summary(console: Console, comparison: dict[str, Any], plain_s: float) -> None:
    c = comparison
    same = "bit for bit those of plain training" if c["losses_identical"] else "NOT those of plain training"
    console.print(
        f"iteration: predicted {format_seconds(c['predicted_iteration_s'])}, measured "
        f"{format_seconds(c['measured_iteration_s'])} ({c['iteration_error_frac']:+.1%}, run-to-run noise "
        f"{c['iteration_noise_frac']:.1%}); plain training without the budget {format_seconds(plain_s)}\n"
        f"peak: predicted {format_bytes(c['predicted_peak_device_bytes'])}, measured "
        f"{format_bytes(c['measured_peak_device_bytes'])} ({c['peak_error_frac']:+.2%}) of a budget of "
        f"{format_bytes(c['device_budget_bytes'])}; plain training needs {format_bytes(c['plain_peak_device_bytes'])}\n"
        f"losses and weights: {same} (largest difference of a weight: {c['max_abs_weight_difference']})\n"
        f"offloaded: {format_bytes(c['bytes_host_to_device'])} gathered, {format_bytes(c['bytes_device_to_host'])} of "
        f"gradients sent to the host, {c['cpu_adam_steps']} CPU Adam steps"
    )


if __name__ == "__main__":
    main()
