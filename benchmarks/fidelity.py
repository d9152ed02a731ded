"""Fidelity: predictions judged by random plans that nothing was fitted to, as ``protwin validate`` does it.

Models of nine kinds on the CPU as a device, two of them by orthogonal subspace fine-tuning too, and two at a long
sequence, in tiles and with inputs of blocks that travel (``fidelity_models.py``).  Plans with chunks on a disk are
among them: one that reads 1 GB/s and writes 0.5 GB/s, emulated in memory, so that neither the page cache nor the disk's
other users are measured; with --disk-folder the disk of that folder.  Two ranks train a model too, in every mode
(``fidelity_ranks.py``), and students learn from teachers block by block (``fidelity_bypass.py``).
``make bench-fidelity`` runs it; results are kept in benchmarks/results/ with date and machine.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from protwin.calibration.demos.demo import CONFIGURATION
from protwin.calibration.fitting.subject import Subject
from protwin.calibration.validation.fidelity import Fidelity
from protwin.calibration.validation.tables import fidelity_tables
from protwin.calibration.validation.validate import Trial, validate
from protwin.runtime.devices.probe import probe_hardware
from protwin.runtime.devices.process_settings import leave_a_core_for_lanes
from protwin.runtime.tracing.tracing import trace
from protwin.shared.basics.documents import write_atomically
from protwin.shared.basics.progress import progress_bar
from protwin.shared.cli.output import show
from protwin.shared.schema.record import Record

from .fidelity_bypass import PAIRS, fidelity_of_bypass
from .fidelity_models import LONG, MODELS, ORTHOGONAL, judged_model
from .fidelity_ranks import fidelity_of_ranks

RANKS = "two-ranks"
BYPASS = "bypass"
"""All pairs of a teacher and its student."""
_REPEATS = 25
"""Iterations in each activation mode that phases are timed by: on a shared machine few say little."""
_REPEATS_IN_TILES = 8
"""Where each is timed whole, and once more for each kind of tiles."""
MEMORY_FOLDER = Path("/dev/shm")
"""What lies here is in memory, where the system has it; another folder's disk may be slower than the emulated one."""


def main() -> None:
    """Judge all models and print their tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=12, help="times that every plan has its turn at most (12)")
    parser.add_argument("--plans", type=int, default=12, help="random plans of every model (12)")
    parser.add_argument("--seed", type=int, default=0, help="of the plans (0)")
    parser.add_argument("--minutes", type=float, help="of every model at most; fewer plans if need be")
    parser.add_argument("--records", type=Path, help="leave the measured Records in this folder")
    parser.add_argument("--keep", action="store_true", help="keep the result in benchmarks/results/")
    every = [*MODELS, *ORTHOGONAL, *LONG, RANKS, BYPASS]
    parser.add_argument("--only", nargs="+", choices=[*every, *PAIRS], help="these instead of all")
    parser.add_argument("--disk-folder", type=Path, help="measure the disk of this folder, not an emulated one")
    options = parser.parse_args()
    trial = Trial(num_plans=options.plans, most_rounds=options.rounds, seed=options.seed, minutes=options.minutes)
    wanted = options.only or every
    bench = _Bench(options.records, options.keep)
    if RANKS in wanted:
        # Before this process has threads of its own: ranks measure the machine without it.
        bench.take(RANKS, *fidelity_of_ranks("llama", CONFIGURATION, 2, 128, trial))
        bench.keep("fidelity_ranks")
    leave_a_core_for_lanes()
    for names, files in ((MODELS, "fidelity"), (ORTHOGONAL, "fidelity_osft"), (LONG, "fidelity_long")):
        for name in (name for name in names if name in wanted):
            with TemporaryDirectory(dir=options.disk_folder or memory_folder()) as folder:
                subject = prepare(name, Path(folder), has_emulated_disk=options.disk_folder is None)
                with progress_bar(f"judging {name}") as report:
                    bench.take(name, *validate(subject, trial, on_progress=report))
        bench.keep(files)
    for name in (name for name in PAIRS if BYPASS in wanted or name in wanted):
        with progress_bar(f"judging {name}") as report:
            bench.take(name, *fidelity_of_bypass(name, trial, report))
    bench.keep("fidelity_bypass")


class _Bench:
    """Results so far, shown and kept."""

    def __init__(self, records: Path | None, keeps: bool) -> None:
        self._records = records
        self._keeps = keeps
        self._found: list[Fidelity] = []

    def take(self, name: str, found: Fidelity, records: Mapping[str, Record]) -> None:
        """Show what was found, and leave the records if that is asked for."""
        self._found.append(found)
        show(fidelity_tables(found))
        for number, record in enumerate(records.values() if self._records is not None else ()):
            assert self._records is not None
            record.save(self._records / f"{name}-{number:03}.json")

    def keep(self, files: str) -> None:
        """Keep what was taken since the last time, if anything was and results are kept."""
        results: Sequence[Fidelity] = self._found
        self._found = []
        if results and self._keeps:
            path = Path(__file__).parent / "results" / f"{files}-{datetime.date.today().isoformat()}.json"
            write_atomically(path, json.dumps([one.model_dump(mode="json") for one in results], indent=1) + "\n")
            print(f"kept in {path}")


def memory_folder() -> Path | None:
    """Where files lie in memory; None if the system has no such folder."""
    return MEMORY_FOLDER if os.access(MEMORY_FOLDER, os.W_OK) else None


def prepare(name: str, disk_folder: Path, *, has_emulated_disk: bool) -> Subject:
    """Build, trace and probe."""
    judged = judged_model(name, has_emulated_disk=has_emulated_disk)
    tiles = judged.tiles
    workload = trace(
        judged.model,
        judged.batch,
        loss=judged.loss,
        name=name,
        repeats=_REPEATS_IN_TILES if tiles else _REPEATS,
        mlp_tiles=tiles,
        loss_tiles=tiles,
    )
    hardware = probe_hardware(seconds=4.0, device=judged.make_device(), disk_folder=disk_folder)
    return Subject(
        judged.model,
        judged.batch,
        workload,
        hardware,
        judged.make_device,
        partial(torch.optim.AdamW, lr=1e-4, fused=True),
        judged.loss,
        disk_folder=disk_folder,
    )


if __name__ == "__main__":
    main()
