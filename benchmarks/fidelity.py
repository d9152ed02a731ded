"""Fidelity: predicted against measured iteration time and peak device memory, over plans that nothing was fitted to.

Models of different families on the CPU as a device: two whose blocks hold nearly all parameters, and one whose
embedding and head hold more than its blocks.  Two have links throttled to 2 GB/s and 1 GB/s, so that transfers matter.
Plans that keep half of the chunks have the embedding on the device, and those that keep none have it on the host.
Plans with chunks on a disk are among them: one that reads 1 GB/s and writes 0.5 GB/s, emulated in memory, so that
neither the page cache nor the disk's other users are measured; with --disk-folder the disk of that folder.
Two ranks train a model too, in every mode (``fidelity_ranks.py``), and students learn from teachers block by block
(``fidelity_bypass.py``).
``make bench-fidelity`` runs it; results are kept in benchmarks/results/ with date and machine.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import statistics
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from protwin.calibration.commands.demo import CONFIGURATION
from protwin.calibration.fitting.fidelity import Fidelity, measure_fidelity
from protwin.calibration.fitting.subject import Subject
from protwin.runtime.data.byte_text import byte_batches, python_reference
from protwin.runtime.devices.cpu_device import CpuDevice
from protwin.runtime.devices.probe import probe_hardware
from protwin.runtime.devices.process_settings import leave_a_core_for_lanes
from protwin.runtime.model.configurations import build_model
from protwin.runtime.tracing.tracing import trace
from protwin.shared.basics.documents import write_atomically
from protwin.shared.basics.progress import progress_bar
from protwin.shared.basics.units import format_bytes, format_seconds
from protwin.shared.schema.record import Record

from .fidelity_bypass import PAIRS, fidelity_of_bypass
from .fidelity_ranks import fidelity_of_ranks

GPT2 = {
    "model_type": "gpt2",
    "n_embd": 256,
    "n_layer": 8,
    "n_head": 4,
    "n_positions": 256,
    "vocab_size": 256,
    "attn_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "resid_pdrop": 0.0,
    "bos_token_id": None,
    "eos_token_id": None,
}
WIDE_ENDS = CONFIGURATION | {"num_hidden_layers": 4, "vocab_size": 12_000}
"""Of 12.6 million parameters, 7.7 million are outside the blocks."""
SLOW_LINKS = {"host_to_device_bytes_per_s": 2e9, "device_to_host_bytes_per_s": 1e9}
MODELS = ("llama", "gpt2", "llama-wide-ends")
RANKS = "two-ranks"
BYPASS = "bypass"
"""All pairs of a teacher and its student."""
DISK = {"disk_read_bytes_per_s": 1e9, "disk_write_bytes_per_s": 0.5e9}
MEMORY_FOLDER = Path("/dev/shm")
"""What lies here is in memory, where the system has it; another folder's disk may be slower than the emulated one."""


def main() -> None:
    """Run all models and print their tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10, help="times that every plan has its turn (10)")
    parser.add_argument("--records", type=Path, help="leave the measured Records in this folder")
    parser.add_argument("--keep", action="store_true", help="keep the result in benchmarks/results/")
    parser.add_argument("--only", choices=[*MODELS, RANKS, BYPASS, *PAIRS], help="one model instead of all")
    parser.add_argument("--disk-folder", type=Path, help="measure the disk of this folder, not an emulated one")
    options = parser.parse_args()
    console = Console(highlight=False, width=170)
    if options.only in (None, RANKS):
        # Before this process has threads of its own: ranks measure the machine without it.
        found, records = fidelity_of_ranks("llama", CONFIGURATION, 2, 128, options.rounds)
        show(found, console)
        _save(records, options.records, RANKS)
        if options.keep:
            _keep([found], "fidelity_ranks", console)
    if options.only == RANKS:
        return
    leave_a_core_for_lanes()
    results = []
    disk = DISK if options.disk_folder is None else {}
    subjects: dict[str, tuple[dict[str, Any], int, int, Callable[[], CpuDevice]]] = {
        "llama": (CONFIGURATION, 2, 128, partial(CpuDevice, **disk)),
        "gpt2": (GPT2, 2, 128, partial(CpuDevice, **SLOW_LINKS, **disk)),
        "llama-wide-ends": (WIDE_ENDS, 1, 128, partial(CpuDevice, **SLOW_LINKS, **disk)),
    }
    for name, (configuration, batch_size, sequence_length, make_device) in subjects.items():
        if options.only in (None, name):
            with TemporaryDirectory(dir=options.disk_folder or memory_folder()) as folder:
                subject = prepare(name, configuration, batch_size, sequence_length, make_device, Path(folder))
                with progress_bar(f"measuring {name}") as report:
                    result, records = measure_fidelity(subject, rounds=options.rounds, on_progress=report)
            results.append(result)
            show(result, console)
            _save(records, options.records, name)
    if options.keep and results:
        _keep(results, "fidelity", console)
    distilled = []
    for name in PAIRS:
        if options.only in (None, BYPASS, name):
            with progress_bar(f"measuring {name}") as report:
                result, records = fidelity_of_bypass(name, options.rounds, report)
            distilled.append(result)
            show(result, console)
            _save(records, options.records, name)
    if options.keep and distilled:
        _keep(distilled, "fidelity_bypass", console)


def _save(records: Sequence[Record], folder: Path | None, name: str) -> None:
    for number, record in enumerate(records if folder is not None else ()):
        assert folder is not None
        record.save(folder / f"{name}-{number:03}.json")


def _keep(results: Sequence[Fidelity], files: str, console: Console) -> None:
    path = Path(__file__).parent / "results" / f"{files}-{datetime.date.today().isoformat()}.json"
    write_atomically(path, json.dumps([r.model_dump(mode="json") for r in results], indent=1) + "\n")
    console.print(f"kept in {path}")


def memory_folder() -> Path | None:
    """Where files lie in memory; None if the system has no such folder."""
    return MEMORY_FOLDER if os.access(MEMORY_FOLDER, os.W_OK) else None


def prepare(
    name: str,
    configuration: dict[str, Any],
    batch_size: int,
    sequence_length: int,
    make_device: Callable[[], CpuDevice],
    disk_folder: Path,
) -> Subject:
    """Build, trace and probe."""
    torch.manual_seed(0)
    model = build_model(configuration, name, torch.float32, device="cpu")
    batch = next(
        byte_batches(python_reference(), batch_size=batch_size, sequence_length=sequence_length, num_batches=1)
    )
    make_optimizer = partial(torch.optim.AdamW, lr=1e-4, fused=True)
    workload = trace(model, batch, name=name)
    hardware = probe_hardware(seconds=4.0, device=make_device(), disk_folder=disk_folder)
    return Subject(model, batch, workload, hardware, make_device, make_optimizer, disk_folder=disk_folder)


def show(result: Fidelity, console: Console) -> None:
    """Print one model's table and summary."""
    table = Table(title=f"{result.model} on {result.machine}", title_justify="left")
    table.add_column("plan")
    headings: tuple[str, ...] = (
        "predicted",
        "measured",
        "error",
        "noise",
        "predicted peak",
        "measured peak",
        "error",
        "never above",
    )
    if result.num_ranks > 1:
        headings = (*headings, "collectives, error")
    for heading in headings:
        table.add_column(heading, justify="right")
    for plan in result.plans:
        collectives = plan.collectives_error_frac
        table.add_row(
            plan.name,
            format_seconds(plan.predicted_iteration_s),
            format_seconds(plan.measured_iteration_s),
            f"{plan.iteration_error_frac:+.1%}",
            f"{plan.iteration_noise_frac:.1%}",
            format_bytes(plan.predicted_peak_bytes),
            format_bytes(plan.measured_peak_bytes),
            f"{plan.peak_error_frac:+.2%}",
            format_bytes(plan.guaranteed_peak_bytes),
            *([] if collectives is None else [f"{collectives:+.1%}"]),
        )
    console.print(table)
    noise = statistics.median(plan.iteration_noise_frac for plan in result.plans)
    console.print(
        f"peak error: mean {result.mean_peak_error_frac:.2%}, worst {result.worst_peak_error_frac:.2%}; iteration "
        f"error: mean {result.mean_iteration_error_frac:.1%}, worst {result.worst_iteration_error_frac:.1%} "
        f"(median noise {noise:.1%}); rank correlation {result.rank_correlation:.3f}; the search's pick is "
        f"{result.search_regret_frac:+.1%} of the best measured plan within {format_bytes(result.budget_bytes)}"
    )
    if result.num_ranks > 1:
        assert result.mean_collectives_error_frac is not None
        console.print(
            f"collectives of an iteration: error: mean {result.mean_collectives_error_frac:.1%}, worst "
            f"{result.worst_collectives_error_frac:.1%}; the mode that the search finds fastest is "
            f"{result.mode_regret_frac:+.1%} of the fastest measured one"
        )
        return
    if result.plain_ratio is not None:
        assert result.plain_iteration_s is not None
        console.print(
            f"both models whole on the device, in a plain loop: {format_seconds(result.plain_iteration_s)}; the "
            f"search's pick takes {result.plain_ratio:.2f} times that without a budget, and "
            f"{result.plain_ratio_in_budget:.2f} times within {format_bytes(result.budget_bytes)}"
        )
        return
    on_disk = [plan for plan in result.plans if plan.plan.n_disk_state]
    times = [abs(plan.iteration_error_frac) for plan in on_disk]
    peaks = [abs(plan.peak_error_frac) for plan in on_disk]
    noise = statistics.median(plan.iteration_noise_frac for plan in on_disk)
    console.print(
        f"plans with chunks on the disk ({len(on_disk)}): iteration error: mean {statistics.fmean(times):.1%}, worst "
        f"{max(times):.1%} (median noise {noise:.1%}); peak error: worst {max(peaks):.2%}"
    )


if __name__ == "__main__":
    main()
