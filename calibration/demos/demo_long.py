"""A sequence whose plain training needs more than six times the device's memory, trained there by tiles.

A small Llama learns the Python language reference in one long sequence a step.  MLPs and the loss run in tiles, inputs
of blocks and parameters may live on the host: which of it, and how much, is searched on the calibrated simulator for
the budget, which the device enforces.  Training by the plan equals training in the same tiles with everything on the
device, bit for bit, and plain training up to the order of sums: no further from it than plain training is from itself
once every initial weight is moved to a neighbouring number.  Run it with ``make demo-long``.
"""

from __future__ import annotations

import argparse
import copy
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
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
from ...runtime.tracing.tracing import trace
from ...runtime.training.carry_out import carry_out
from ...shared.answers.search_result import SearchResult
from ...shared.basics.documents import write_atomically
from ...shared.basics.progress import progress_bar
from ...shared.basics.units import format_bytes, format_seconds
from ...shared.catalogue.machines import hardware_to_toml
from ...shared.compile.compile import compile_schedule
from ...shared.layout.layout import layout_of
from ...shared.records.comparison import compare_records
from ...shared.report.losses import LossTolerance
from ...shared.report.page import PageTable, Section
from ...shared.report.report import Facts, report
from ...shared.schema.calibration import Calibration
from ...shared.schema.plan import Plan
from ...shared.schema.record import Record
from ...shared.tables.comparison import comparison_tables
from ...shared.tables.search import search_tables
from ...shared.tables.table import Table
from ...shared.tables.terminal import Printed
from ...sim.engine.simulator import simulate
from ...sim.searching.request import SearchRequest
from ...sim.searching.search import search
from ..fitting.calibrate import calibrate
from ..fitting.subject import Subject
from .demo import predictions_held, stage

CONFIGURATION: Final[dict[str, Any]] = {
    "model_type": "llama",
    "hidden_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 640,
    "vocab_size": 3072,
    "max_position_embeddings": 8192,
    "bos_token_id": None,
    "eos_token_id": None,
}
_SEED: Final = 0
_METER_EVERY: Final = 5
_TIMES_ITSELF: Final = 4.0
"""A plan's distance from plain training at most, over that of plain training from itself with moved weights.

Both are what roundings of float32 do to a training.  Moving weights rounds once for each weight.  Another order of sums
rounds once for each sum over a tile: for the gradients of all weights, one more time for each tile after the first.
Roundings of opposite signs cancel, so that eight tiles scatter less than sqrt(8) times as far, and the larger of a
few losses may be further out by chance."""
_MAKE_OPTIMIZER: Final = partial(torch.optim.AdamW, lr=3e-4, weight_decay=0.1, fused=True)
_ROUNDING: Final = 2.0**-23
"""From one number of float32 to the next, over it: losses that differ by less are not known to."""
Batch = dict[str, torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class LongDemo:
    """How large the demo is."""

    configuration: Mapping[str, Any]
    sequence_length: int = 1536
    num_tiles: int = 8
    """Of MLPs and of the loss, where they run in tiles."""
    steps: int = 10
    times_budget: float = 6.25
    """What plain training needs, over the budget."""
    probe_seconds: float = 2.0
    repeats: int = 2
    """Timed iterations of the trace in each activation mode."""
    calibration_steps: int = 3
    """Timed iterations of every plan that the calibration is fitted to."""
    slowdown_seconds: float = 2.0
    """To measure how lanes slow each other."""


STANDARD: Final = LongDemo(configuration=CONFIGURATION)


def main() -> None:
    """Run the demo and leave its files in the output folder."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--output", type=Path, default=Path("out/demo-long"), help="folder for the files (out/demo-long)"
    )
    console = Console(highlight=False)
    run_long_demo(parser.parse_args().output, console if console.is_terminal else Console(highlight=False, width=120))


def run_long_demo(folder: Path, console: Console, size: LongDemo = STANDARD) -> dict[str, Any]:
    """The whole demo; gives what ``comparison.json`` holds."""
    started = time.perf_counter()
    leave_a_core_for_lanes()
    batches = _batches(size)
    torch.manual_seed(_SEED)
    model = build_model(dict(size.configuration), "demo-long", torch.float32, device="cpu")
    console.print(
        f"A Llama of {sum(p.numel() for p in model.parameters()) / 1e6:.1f} M parameters learns the Python language "
        f"reference, one sequence of {size.sequence_length:,} bytes a step, in float32 on the CPU."
    )
    need_bytes, budget_bytes, refusal = _limits(model, batches, size, console)
    subject, calibration = _calibrated(model, batches[0], size, console)
    with stage(console, "search on the simulator"):
        found = search(
            SearchRequest(
                workload=subject.workload,
                hardware=subject.hardware,
                calibration=calibration,
                device_budget_bytes=budget_bytes,
            )
        )
    console.print(Printed(search_tables(found)))
    knobs = _knobs_table(found.plan, subject, calibration)
    console.print(Printed([knobs]))
    with stage(console, f"{size.steps} steps under the enforced budget"):
        planned = _carried_out(subject, found.plan, batches, budget_bytes)
    with stage(console, f"{size.steps} steps in the same tiles with everything on the device, without a budget"):
        resident = _carried_out(subject, _resident(found.plan, subject), batches, None)
    with stage(
        console, f"{2 * size.steps} plain steps without a budget, half of them from weights moved by a rounding"
    ):
        plain = _plainly(model, batches)
        moved = _plainly(_moved(model), batches)

    comparison = {
        "plain_peak_device_bytes": need_bytes,
        "device_budget_bytes": budget_bytes,
        **_compared(found, planned, resident, plain, moved),
    }
    _write_subject(folder, subject, calibration)
    write_atomically(folder / "comparison.json", json.dumps(comparison, indent=1) + "\n")
    facts = Facts(
        predicted=found.prediction,
        measured=planned.record,
        budget_bytes=budget_bytes,
        losses={"plain": plain.losses, "planned": planned.losses},
        loss_tolerance=_loss_tolerance(comparison),
        plain_peak_bytes=need_bytes,
        schedule=compile_schedule(found.plan, subject.workload),
        search=found,
        further=(Section("What knobs of long sequences take off", (PageTable(knobs),)),),
        notes=_notes(refusal, comparison),
    )
    _write_records(folder, found, planned.record, facts)
    console.print(Printed(comparison_tables(compare_records(found.prediction, planned.record))))
    _print_summary(console, comparison)
    console.print(f"{time.perf_counter() - started:.0f} s in all. Files: {folder}/ (open report.html)")
    return comparison


@dataclass(frozen=True)
class _Trained:
    """A training that has ended."""

    model: nn.Module
    losses: tuple[float, ...]


@dataclass(frozen=True)
class _Planned(_Trained):
    """A training under a plan."""

    record: Record


@dataclass(frozen=True)
class _Distance:
    """How far two trainings ended apart: the largest difference of a loss, and the norm of that of all weights."""

    loss: float
    weight: float
    largest_loss: float

    @property
    def described(self) -> dict[str, float]:
        """For a file."""
        return {"loss": self.loss, "weights": self.weight}

    @property
    def loss_tolerance(self) -> float:
        """The most by which a loss may differ, this being what roundings do to plain training."""
        return _TIMES_ITSELF * max(self.loss, _ROUNDING * self.largest_loss)

    def is_within(self, other: _Distance) -> bool:
        """Whether it is what roundings do, ``other`` being what they do to plain training."""
        return self.loss <= other.loss_tolerance and self.weight <= _TIMES_ITSELF * other.weight


def _distance(one: _Trained, other: _Trained) -> _Distance:
    pairs = zip(one.model.parameters(), other.model.parameters(), strict=True)
    weights = torch.stack([(a.detach().double() - b.detach().double()).norm() for a, b in pairs])
    loss = max(abs(a - b) for a, b in zip(one.losses, other.losses, strict=True))
    return _Distance(loss, weights.norm().item(), max(other.losses))


def _batches(size: LongDemo) -> list[Batch]:
    length, text = size.sequence_length, python_reference()
    return list(byte_batches(text, batch_size=1, sequence_length=length, num_batches=size.steps, seed=_SEED))


def _compared(
    found: SearchResult, planned: _Planned, resident: _Trained, plain: _Trained, moved: _Trained
) -> dict[str, Any]:
    """Predicted beside measured, and how far trainings ended apart."""
    from_resident, from_plain, itself = (
        _distance(one, other) for one, other in ((planned, resident), (planned, plain), (moved, plain))
    )
    knobs = ("mlp_tiles", "loss_tiles", "n_checkpoint", "n_offload_input")
    return {
        **predictions_held(found.prediction, planned.record),
        "same_tiles_identical": from_resident.loss == from_resident.weight == 0,
        "from_plain": from_plain.described,
        "plain_from_itself": itself.described,
        "loss_tolerance": itself.loss_tolerance,
        "is_within_tolerance": from_plain.is_within(itself),
        **{knob: getattr(found.plan, knob) for knob in knobs},
    }


def _limits(model: nn.Module, batches: Sequence[Batch], size: LongDemo, console: Console) -> tuple[int, int, str]:
    """What plain training needs, the budget, and how plain training ends with as much."""
    with stage(console, "plain training: what it needs"):
        need_bytes = train_plainly(copy.deepcopy(model), batches[:2], _MAKE_OPTIMIZER, ledger=MemoryLedger()).peak_bytes
    budget_bytes = int(need_bytes / size.times_budget)
    console.print(
        f"  plain training needs {format_bytes(need_bytes)}, {size.times_budget:g} times the budget of "
        f"{format_bytes(budget_bytes)}"
    )
    try:
        train_plainly(copy.deepcopy(model), batches[:2], _MAKE_OPTIMIZER, ledger=MemoryLedger(budget_bytes))
    except CpuOutOfMemoryError as error:
        refusal = f"{error}"
    else:
        raise AssertionError("plain training fits into a budget that is below its own peak")
    console.print(Panel(refusal, title="plain training under the budget", border_style="red", expand=False))
    return need_bytes, budget_bytes, refusal


def _calibrated(model: nn.Module, batch: Batch, size: LongDemo, console: Console) -> tuple[Subject, Calibration]:
    """This machine measured, with the model itself."""
    with stage(console, "probe the machine"):
        hardware = probe_hardware(seconds=size.probe_seconds, device=CpuDevice())
    tiles = [size.num_tiles]
    with stage(console, "trace the model, whole and in tiles"):
        workload = trace(model, batch, name="demo-long", repeats=size.repeats, mlp_tiles=tiles, loss_tiles=tiles)
    subject = Subject(model, batch, workload, hardware, make_optimizer=_MAKE_OPTIMIZER)
    with stage(console, "calibrate"), progress_bar("calibrating") as on_progress:
        calibration = calibrate(
            subject, steps=size.calibration_steps, slowdown_seconds=size.slowdown_seconds, on_progress=on_progress
        )
    return subject, calibration


def _carried_out(subject: Subject, plan: Plan, batches: Sequence[Batch], budget_bytes: int | None) -> _Planned:
    """All steps of ``plan`` on a copy of the model, on a device that refuses more than the budget."""
    model = copy.deepcopy(subject.model)
    losses: list[float] = []
    with carry_out(
        model,
        plan,
        subject.workload,
        optimizer=_MAKE_OPTIMIZER,
        device=CpuDevice(budget_bytes),
        meter_every=_METER_EVERY,
    ) as training:
        for batch in batches:
            loss = model(**batch).loss
            loss.backward()
            training.step()
            losses.append(loss.item())
        record = training.record(hardware_name=subject.hardware.name)
    return _Planned(model, tuple(losses), record)


def _resident(plan: Plan, subject: Subject) -> Plan:
    """A plan in the same tiles that has everything on the device and recomputes nothing."""
    return Plan(
        workload_id=plan.workload_id,
        chunk_bytes=plan.chunk_bytes,
        n_persist=len(layout_of(subject.workload, plan.chunk_bytes).chunks),
        n_buffer=0,
        mlp_tiles=plan.mlp_tiles,
        loss_tiles=plan.loss_tiles,
    )


def _plainly(model: nn.Module, batches: Sequence[Batch]) -> _Trained:
    trained = copy.deepcopy(model)
    return _Trained(trained, train_plainly(trained, batches, _MAKE_OPTIMIZER).losses)


def _moved(model: nn.Module) -> nn.Module:
    """A copy of the model, each weight of which is the next larger or the next smaller number, by chance."""
    moved = copy.deepcopy(model)
    chance = torch.Generator().manual_seed(_SEED)
    with torch.no_grad():
        for parameter in moved.parameters():
            towards = torch.rand(parameter.shape, generator=chance) - 0.5
            parameter.copy_(torch.nextafter(parameter, towards.sign() * torch.inf))
    return moved


def _knobs_table(plan: Plan, subject: Subject, calibration: Calibration) -> Table:
    """Time and peak of the plan, and of the plan without each of its knobs of long sequences."""
    without: dict[str, dict[str, int]] = {
        "the plan": {},
        "MLPs whole": {"mlp_tiles": 1},
        "loss whole": {"loss_tiles": 1},
        "inputs of blocks on the device": {"n_offload_input": 0},
    }
    rows = []
    for name, knobs in without.items():
        if name == "the plan" or any(getattr(plan, knob) != value for knob, value in knobs.items()):
            other = Plan.model_validate(plan.model_dump() | knobs)
            record = simulate(other, subject.workload, subject.hardware, calibration)
            rows.append((name, format_seconds(record.iteration_s), format_bytes(record.peak_device_bytes)))
    columns = ("what runs", ">iteration", ">peak")
    return Table(title="Predicted, with one knob of the plan undone", columns=columns, rows=tuple(rows))


def _write_subject(folder: Path, subject: Subject, calibration: Calibration) -> None:
    subject.workload.save(folder / "workload.json")
    write_atomically(folder / "hardware.toml", hardware_to_toml(subject.hardware))
    calibration.save(folder / "calibration.json")


def _write_records(folder: Path, found: SearchResult, measured: Record, facts: Facts) -> None:
    found.plan.save(folder / "plan.json")
    found.prediction.save(folder / "predicted.json")
    measured.save(folder / "measured.json")
    write_atomically(folder / "losses.json", json.dumps(dict(facts.losses or {}), indent=1) + "\n")
    write_atomically(folder / "report.html", report("protwin demo: a long sequence, trained in tiles", facts).html)


def _print_summary(console: Console, comparison: dict[str, Any]) -> None:
    c = comparison
    console.print(
        f"iteration: predicted {format_seconds(c['predicted_iteration_s'])}, measured "
        f"{format_seconds(c['measured_iteration_s'])} ({c['iteration_error_frac']:+.1%}, noise "
        f"± {c['iteration_noise_frac']:.1%})\n"
        f"peak: predicted {format_bytes(c['predicted_peak_device_bytes'])}, measured "
        f"{format_bytes(c['measured_peak_device_bytes'])} ({c['peak_error_frac']:+.2%}) of a budget of "
        f"{format_bytes(c['device_budget_bytes'])}; plain training needs {format_bytes(c['plain_peak_device_bytes'])}, "
        f"{c['plain_peak_device_bytes'] / c['measured_peak_device_bytes']:.1f} times as much\n"
        f"losses and weights: {_told_equality(c)}"
    )


def _loss_tolerance(comparison: Mapping[str, Any]) -> LossTolerance:
    return LossTolerance(
        comparison["loss_tolerance"],
        f"{_TIMES_ITSELF:g} times what plain training's losses differ by once its first weights are moved by a "
        f"rounding, or {_TIMES_ITSELF:g} roundings of a loss",
    )


def _notes(refusal: str, comparison: Mapping[str, Any]) -> tuple[str, str]:
    """For the page."""
    return (
        f"Plain training under this budget ends with: {refusal}",
        f"Losses and weights are {_told_equality(comparison)}.",
    )


def _told_equality(comparison: Mapping[str, Any]) -> str:
    c = comparison
    same = "bit for bit" if c["same_tiles_identical"] else "NOT"
    within = "within" if c["is_within_tolerance"] else "NOT within"
    return (
        f"{same} those of the same tiles with everything on the device; from plain training's "
        f"losses differ by {c['from_plain']['loss']:.1e} and weights by {c['from_plain']['weights']:.1e}, {within} "
        f"{_TIMES_ITSELF:g} times what plain training does to itself once its first weights are moved by a rounding "
        f"({c['plain_from_itself']['loss']:.1e} and {c['plain_from_itself']['weights']:.1e})"
    )


if __name__ == "__main__":
    main()
