"""The main job on two ranks: search a plan for both, train by it in two processes, lay prediction and reality beside.

A small Llama learns the Python language reference, byte by byte, on two processes that share this machine.  Each has
less than half of the device memory that plain training needs.  Run it with ``make demo-ranks``, or start the ranks
yourself: ``torchrun --nproc-per-node 2 -m protwin.calibration.demos.demo_ranks``.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from rich.console import Console
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ...runtime.data.byte_text import byte_batches, python_reference
from ...runtime.devices.cpu_device import CpuDevice
from ...runtime.devices.ledger import MemoryLedger
from ...runtime.model.configurations import build_model
from ...runtime.ranks.rank_probe import probe_ranks
from ...runtime.ranks.world import World, exchanged, join_world
from ...runtime.timing.plain_loop import train_plainly
from ...runtime.tracing.tracing import trace
from ...runtime.training.carry_out import carry_out
from ...shared.answers.search_result import SearchResult
from ...shared.basics.documents import write_atomically
from ...shared.basics.progress import no_progress, progress_bar
from ...shared.basics.units import format_bytes, format_seconds
from ...shared.catalogue.machines import hardware_to_toml
from ...shared.compile.compile import compile_schedule
from ...shared.records.chrome_trace import chrome_trace
from ...shared.records.comparison import Comparison, compare_records
from ...shared.records.ranks import rank_name
from ...shared.report.report import Facts, report
from ...shared.schema.calibration import Calibration
from ...shared.schema.hardware import Hardware
from ...shared.schema.plan import Plan
from ...shared.schema.record import Record
from ...shared.tables.labels import NO_VALUE, format_error, format_share, num_blocks
from ...shared.tables.record import plan_table
from ...shared.tables.table import Table
from ...shared.tables.terminal import Printed
from ...sim.searching.request import SearchRequest, Step
from ...sim.searching.search import search
from ..fitting.calibrate import calibrate
from ..fitting.subject import Subject
from .demo import CONFIGURATION, stage

_Batch = dict[str, torch.Tensor]
NUM_RANKS: Final = 2
_BUDGET_FRAC: Final = 0.45
_SEED: Final = 0
_TIMEOUT_S: Final = 600.0
"""A rank that keeps the other waiting for longer ends the demo."""
_MAKE_OPTIMIZER: Final = partial(torch.optim.AdamW, lr=3e-4, weight_decay=0.1, fused=True)


@dataclass(frozen=True, kw_only=True)
class RanksDemo:
    """How large the demo is."""

    configuration: Mapping[str, Any]
    batch_size: int = 2
    """Of one rank."""
    sequence_length: int = 128
    steps: int = 16
    probe_seconds: float = 8.0
    repeats: int = 3
    """Timed iterations of the trace, in each activation mode."""
    calibration_steps: int = 4
    slowdown_seconds: float = 4.0


STANDARD: Final = RanksDemo(configuration={**CONFIGURATION, "num_hidden_layers": 6})


def main() -> None:
    """Run the demo as one of its ranks, and leave its files in the output folder.  Started without ranks, say so."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--output", type=Path, default=Path("out/demo-ranks"), help="folder for the files (out/demo-ranks)"
    )
    folder = parser.parse_args().output
    if os.environ.get("WORLD_SIZE") != str(NUM_RANKS):
        parser.error(f"{NUM_RANKS} ranks are needed: make demo-ranks starts them.")
    dist.init_process_group("gloo")
    try:
        console = Console(highlight=False)
        run_ranks_demo(folder, console if console.is_terminal else Console(highlight=False, width=120))
    finally:
        dist.destroy_process_group()


def run_ranks_demo(folder: Path, console: Console, size: RanksDemo = STANDARD) -> dict[str, Any]:
    """The whole demo, to be called on both ranks of torch.distributed's default group; rank 0 writes and prints.

    Gives what ``comparison.json`` holds.
    """
    started, rank = time.perf_counter(), dist.get_rank()
    if rank:
        console = Console(quiet=True)
    num_threads, world = torch.get_num_threads(), join_world(NUM_RANKS, timeout_s=_TIMEOUT_S)
    assert world is not None, "two ranks have a world"
    try:
        world.open_lane(torch.device("cpu"))
        model, batches = _subject(size)
        num_parameters = sum(p.numel() for p in model.parameters())
        console.print(
            f"A Llama of {num_parameters / 1e6:.1f} M parameters and {size.configuration['num_hidden_layers']} blocks "
            f"learns the Python language reference on {NUM_RANKS} processes, each with {size.batch_size} x "
            f"{size.sequence_length} bytes a step, in float32 on the CPU."
        )
        with stage(console, f"measure the machine as {NUM_RANKS} processes reach it, and their collectives"):
            hardware = probe_ranks(NUM_RANKS, seconds=size.probe_seconds, device=CpuDevice(), leaves_a_core=True)
        with stage(console, "trace the model on both at once, and plain training: what it needs"):
            subject, need_bytes = _traced(world, model, batches, hardware, size.repeats)
        with stage(console, "calibrate: short runs of both in every mode"):
            calibration = calibrate(subject, steps=size.calibration_steps, slowdown_seconds=size.slowdown_seconds)
        budget_bytes = int(need_bytes * _BUDGET_FRAC)
        console.print(
            f"  plain training needs {format_bytes(need_bytes)} on every rank; each has {format_bytes(budget_bytes)}"
        )
        with stage(console, f"search over {NUM_RANKS} ranks, in every mode"):
            found = subject.of_first(lambda: _searched(subject, calibration, budget_bytes))
        console.print(Printed([plan_table(found.plan, num_blocks=num_blocks(found.prediction))]))
        measured, losses, weights = _carried_out(subject, found.plan, batches, budget_bytes, console)
        with stage(console, f"{size.steps} steps of DistributedDataParallel without a budget"):
            ddp_losses, ddp_weights = _with_ddp(model, batches)
        same = losses == ddp_losses, all(map(torch.equal, weights, ddp_weights))
        of_ranks = subject.of_all((losses, ddp_losses, same))
    finally:
        torch.set_num_threads(num_threads)
        world.leave()
    compared = compare_records(found.prediction, measured)
    comparison = {
        "parallel": str(found.plan.parallel),
        "predicted_iteration_s": compared.iteration.predicted_s,
        "measured_iteration_s": compared.iteration.measured_s,
        "iteration_error_frac": compared.iteration.error_frac,
        "plain_peak_device_bytes": need_bytes,
        "device_budget_bytes": budget_bytes,
        "predicted_peak_device_bytes": found.prediction.peak_device_bytes,
        "measured_peak_device_bytes": measured.highest_peak_device_bytes,
        "losses_identical": all(has_same_losses for _, _, (has_same_losses, _) in of_ranks),
        "weights_identical": all(has_same_weights for _, _, (_, has_same_weights) in of_ranks),
    }
    if rank == 0:
        all_losses = {"DDP": [ddp for _, ddp, _ in of_ranks], "planned": [own for own, _, _ in of_ranks]}
        _write(folder, subject, calibration, found, measured, comparison, all_losses)
        console.print(Printed([_closing_table(compared, comparison)]))
        console.print(f"{time.perf_counter() - started:.0f} s in all. Files: {folder}/ (open report.html)")
    return comparison


def _subject(size: RanksDemo) -> tuple[nn.Module, list[_Batch]]:
    """The same model on all ranks, and this one's batches: every second one."""
    torch.manual_seed(_SEED)
    model = build_model(dict(size.configuration), "demo-llama", torch.float32, device="cpu")
    batches = byte_batches(
        python_reference(),
        batch_size=size.batch_size,
        sequence_length=size.sequence_length,
        num_batches=NUM_RANKS * size.steps,
        seed=_SEED,
    )
    return model, list(batches)[dist.get_rank() :: NUM_RANKS]


def _traced(
    world: World, model: nn.Module, batches: Sequence[_Batch], hardware: Hardware, repeats: int
) -> tuple[Subject, int]:
    """What is measured, with times that rank 0 took while all did the same; and the peak of plain training on one."""
    exchanged(world, None)
    workload = trace(model, batches[0], name="demo-llama", repeats=repeats)
    subject = Subject(model, batches[0], workload, hardware, make_optimizer=_MAKE_OPTIMIZER, world=world)
    # Over two steps: the second one has the optimizer's state from the start.
    plain = train_plainly(copy.deepcopy(model), batches[:2], _MAKE_OPTIMIZER, ledger=MemoryLedger())
    return subject.on_workload_of_first(), subject.of_first(lambda: plain.peak_bytes)


def _searched(subject: Subject, calibration: Calibration, budget_bytes: int) -> SearchResult:
    return search(
        SearchRequest(
            workload=subject.workload,
            hardware=subject.hardware,
            calibration=calibration,
            step=Step(num_ranks=NUM_RANKS),
            device_budget_bytes=budget_bytes,
        )
    )


def _carried_out(
    subject: Subject, plan: Plan, batches: Sequence[_Batch], budget_bytes: int, console: Console
) -> tuple[Record, tuple[float, ...], list[torch.Tensor]]:
    """The record of both ranks, and this one's losses and weights; its device refuses more than the budget."""
    model, losses = copy.deepcopy(subject.model), list[float]()
    is_silent = dist.get_rank() > 0
    with (
        stage(console, f"{len(batches)} steps on {NUM_RANKS} ranks under the enforced budget"),
        nullcontext(no_progress) if is_silent else progress_bar("training") as on_progress,
        carry_out(model, plan, subject.workload, optimizer=_MAKE_OPTIMIZER, device=CpuDevice(budget_bytes)) as training,
    ):
        for batch in batches:
            loss = model(**batch).loss
            loss.backward()
            training.step()
            losses.append(loss.item())
            on_progress(len(losses), len(batches))
        record = training.record(hardware_name=subject.hardware.name)
    return record, tuple(losses), [parameter.detach() for parameter in model.parameters()]


def _with_ddp(model: nn.Module, batches: Sequence[_Batch]) -> tuple[tuple[float, ...], list[torch.Tensor]]:
    """The losses of this rank, and the weights, by PyTorch's own data parallelism."""
    wrapped = DistributedDataParallel(copy.deepcopy(model))
    losses = train_plainly(wrapped, batches, _MAKE_OPTIMIZER, loss=lambda output, _: output.loss).losses
    return losses, [parameter.detach() for parameter in wrapped.module.parameters()]


def _write(
    folder: Path,
    subject: Subject,
    calibration: Calibration,
    found: SearchResult,
    measured: Record,
    comparison: Mapping[str, Any],
    losses: Mapping[str, Sequence[Sequence[float]]],
) -> None:
    """The inputs of the plan, the plan, both records, and what they look like beside each other.

    ``losses`` are those of every rank and step, by run.
    """
    predicted, schedule = found.prediction, compile_schedule(found.plan, subject.workload)
    subject.workload.save(folder / "workload.json")
    write_atomically(folder / "machine.toml", hardware_to_toml(subject.hardware))
    calibration.save(folder / "calibration.json")
    found.plan.save(folder / "plan.json")
    predicted.save(folder / "predicted.json")
    measured.save(folder / "measured.json")
    write_atomically(folder / "comparison.json", json.dumps(comparison, indent=1) + "\n")
    write_atomically(folder / "losses.json", json.dumps(losses, indent=1) + "\n")
    records = {"simulated": predicted, "measured": measured}
    write_atomically(folder / "timeline.json", chrome_trace(records, schedule=schedule))
    facts = Facts(
        predicted=predicted,
        measured=measured,
        budget_bytes=comparison["device_budget_bytes"],
        losses={run: _means(of_ranks) for run, of_ranks in losses.items()},
        plain_peak_bytes=comparison["plain_peak_device_bytes"],
        schedule=schedule,
        search=found,
    )
    write_atomically(folder / "report.html", report("protwin demo: two ranks and one plan", facts).html)


def _means(losses: Sequence[Sequence[float]]) -> list[float]:
    """Over ranks, of every step."""
    return [sum(of_step) / len(of_step) for of_step in zip(*losses, strict=True)]


def _closing_table(compared: Comparison, comparison: Mapping[str, Any]) -> Table:
    """Prediction beside measurement, of all ranks, and whether they learned what DDP learns."""
    rows = []
    for one in compared.ranks:
        pairs = [("computing", one.computing), ("waiting for the other", one.waiting)]
        rows += [
            (
                f"{rank_name(one.rank)}: {words}",
                *map(format_seconds, (pair.predicted_s, pair.measured_s)),
                # Ranks are predicted to be alike, so that none waits.
                format_error(pair.error_frac) if pair.predicted_s else NO_VALUE,
            )
            for words, pair in pairs
        ]
        if (peak := one.peak_device) is not None:
            sizes = map(format_bytes, (peak.predicted_bytes, peak.measured_bytes))
            rows.append((f"{rank_name(one.rank)}: peak device memory", *sizes, format_error(peak.error_frac)))
    whole = compared.iteration
    times = map(format_seconds, (whole.predicted_s, whole.measured_s))
    rows.append(("iteration", *times, format_error(whole.error_frac)))
    for words in ("losses", "weights"):
        said = "bit for bit DDP's" if comparison[f"{words}_identical"] else "NOT those of DDP"
        rows.append((f"{words} of all ranks", "DDP's", said, ""))
    return Table(
        title=f"Predicted beside measured; the measurement's noise is ± {format_share(compared.noise_frac)}",
        columns=("quantity", ">predicted", ">measured", ">error"),
        rows=rows,
        ruled=frozenset({len(rows) - 3, len(rows) - 2}),
        styles={len(rows) - 3: "bold"},
    )


if __name__ == "__main__":
    main()
