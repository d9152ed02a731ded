"""The proof of the runtime on one device, on the CPU: what a person who trusts it with a month of training relies on.

- equality: for every model and for random plans, losses and weights are those of the plain loop, bit for bit, on a
  device of just the memory that is guaranteed to be enough.
- optimizers: the same with every optimizer that can step the model here.
- orthogonal: the same of orthogonal subspace fine-tuning, and its peaks beside the schedule's own account.
- memory: the measured peak is the schedule's own account, nothing is left, a thousand steps grow nothing.
- tiles: plans with tiles of MLPs and losses train as the plain loop but for the order of sums, in the accounted memory.
- faults: trainings that are killed at random moments resume from a complete checkpoint and end equal.
- exhaustion: out of memory at every task of a schedule ends in one error with its cause, and loses nothing.
- ranks: processes that train together give the bits of DistributedDataParallel, in the guaranteed memory.
- properties: the property tests of compiler, verifier, simulator and search with all of their examples.

Small models, so that there are many cases; everything is checked against plain PyTorch.  ``make prove`` runs it and
ends with code 1 unless everything was shown; ``ARGS="--only memory --models llama"`` runs a part.  Results are kept in
benchmarks/results/ with date and machine, section by section: what is run later on the same day joins them.
"""

from __future__ import annotations

import argparse
import datetime
import json
import logging
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

import torch
from rich.console import Console

from protwin.runtime.devices.machine import machine_name, num_cores
from protwin.runtime.model.identity import software_versions
from protwin.shared.basics.documents import write_atomically
from protwin.shared.basics.progress import OnProgress, progress_bar
from protwin.shared.basics.units import format_seconds

from . import (
    prove_equality,
    prove_exhaustion,
    prove_faults,
    prove_memory,
    prove_optimizers,
    prove_orthogonal,
    prove_properties,
    prove_ranks,
    prove_tiles,
)
from .prove_claims import Claim, Settings, show

_SECTIONS: Final[dict[str, Callable[[Settings, OnProgress], list[Claim]]]] = {
    "equality": prove_equality.prove,
    "optimizers": prove_optimizers.prove,
    "orthogonal": prove_orthogonal.prove,
    "memory": prove_memory.prove,
    "tiles": prove_tiles.prove,
    "faults": prove_faults.prove,
    "exhaustion": prove_exhaustion.prove,
    "ranks": prove_ranks.prove,
    "properties": prove_properties.prove,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Prove, print the table, and give the exit code."""
    options = _parsed(arguments)
    settings = Settings(
        plans=options.plans,
        steps=options.steps,
        kills=options.kills,
        growth_steps=options.growth_steps,
        seed=options.seed,
        models=tuple(options.models),
    )
    console = Console(highlight=False, width=200)
    torch.set_num_threads(1)
    logging.getLogger("transformers").setLevel(logging.ERROR)
    found_by: dict[str, list[Claim]] = {}
    for name in options.only:
        begin_s = time.perf_counter()
        with progress_bar(name) as report:
            found = _SECTIONS[name](settings, report)
        seconds = time.perf_counter() - begin_s
        if not found:
            found = [Claim(name, "no model of these names", "")]
        show(found, f"{name}, {format_seconds(seconds)}, on {machine_name()}", console)
        found_by[name] = found
        if options.keep:
            console.print(f"kept in {_keep(found, name, settings, seconds)}")
    claims = [claim for found in found_by.values() for claim in found]
    missed = [claim for claim in claims if not claim.is_shown]
    num_cases = sum(claim.num_cases for claim in claims)
    console.print(f"{len(claims) - len(missed)} of {len(claims)} claims shown, {num_cases} cases")
    return 1 if missed else 0


def _parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=list(_SECTIONS), default=list(_SECTIONS), help="these sections")
    parser.add_argument(
        "--models", nargs="+", default=[], metavar="PART", help="models with one of these in their name"
    )
    parser.add_argument("--plans", type=int, default=40, help="random plans of every model (40)")
    parser.add_argument("--steps", type=int, default=10, help="steps that are compared (10)")
    parser.add_argument("--kills", type=int, default=200, help="processes that are killed (200)")
    parser.add_argument("--growth-steps", type=int, default=1000, help="steps that must grow nothing (1000)")
    parser.add_argument("--seed", type=int, default=0, help="of plans and of moments (0)")
    parser.add_argument("--keep", action="store_true", help="keep the result in benchmarks/results/")
    options = parser.parse_args(arguments)
    if min(options.plans, options.steps, options.kills) < 1:
        parser.error("--plans, --steps and --kills must be at least 1.")
    if options.growth_steps < 10:
        parser.error("--growth-steps must be at least 10: growth is told from tenths of a run.")
    return options


def _keep(found: list[Claim], name: str, settings: Settings, seconds: float) -> Path:
    """Write the result of a section, with date and machine, beside those of others of that day; one may take hours."""
    today = datetime.date.today().isoformat()
    path = Path(__file__).parent / "results" / f"proof-{today}.json"
    here = {
        "schema_version": 2,
        "date": today,
        "machine": machine_name(),
        "num_cores": num_cores(),
        "software": software_versions(),
    }
    sections = _kept_sections(path, here)
    sections[name] = {
        "seconds": seconds,
        "load_average_1min": os.getloadavg()[0],
        "settings": asdict(settings),
        "is_shown": all(claim.is_shown for claim in found),
        "claims": [claim.as_mapping() for claim in found],
    }
    content = {**here, "sections": {name: sections[name] for name in _SECTIONS if name in sections}}
    write_atomically(path, json.dumps(content, indent=1) + "\n")
    return path


def _kept_sections(path: Path, here: dict[str, Any]) -> dict[str, Any]:
    """What earlier runs of the same day, machine and software have kept."""
    if not path.exists():
        return {}
    kept = json.loads(path.read_text())
    same = all(kept.get(name) == value for name, value in here.items())
    return dict(kept["sections"]) if same else {}


if __name__ == "__main__":
    sys.exit(main())
