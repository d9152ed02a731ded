"""Tokens per second of orthogonal subspace fine-tuning beside dense training: resident, and under one device budget.

Contestants take turns in short bursts, as in ``peers.py``: the plain PyTorch loop, dense training by a searched plan
without a limit and within a budget, the same of OSFT, the plain loop with our factorised maps, and the public OSFT
system's model class (``rhai-innovation-mini-trainer``) where it is installed.  The budget is what dense training with
every chunk on the host may need; the device enforces it.  ``make bench-peers`` runs it.
"""

from __future__ import annotations

import argparse
import datetime
import json
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

import torch
from peers import Entry, begin, take_turns, turns_options, turns_parser
from peers_budget import RATIO, TOKENS, make_plans
from peers_subject import BATCH_SIZE, MODEL_NAME, SEQUENCE_LENGTH
from rich.console import Console
from rich.table import Table

from protwin.runtime.devices.machine import machine_name, num_cores
from protwin.runtime.model.identity import software_versions
from protwin.shared.basics.documents import write_atomically

PLAIN: Final = "dense, plain PyTorch loop"
_CONTESTANTS: Final = {
    "plain": PLAIN,
    "dense-resident": "dense, protwin, no limit",
    "dense-within": "dense, protwin, budget",
    "plain-osft": "OSFT, plain loop with protwin's maps",
    "mini-trainer": "OSFT, mini_trainer",
    "osft-resident": "OSFT, protwin, no limit",
    "osft-within": "OSFT, protwin, budget",
}


def main() -> None:
    """Run all contestants and print their table."""
    options = turns_options(turns_parser(__doc__, rounds=10, steps=4))
    console = Console(highlight=False, width=150)
    torch.set_num_threads(options.threads)
    entries = [Entry(name, contestant) for contestant, name in _CONTESTANTS.items()]
    with tempfile.TemporaryDirectory() as folder, ExitStack() as undo:
        make_plans(Path(folder) / "plans")
        begin(entries, options.threads, Path(folder), undo)
        take_turns(entries, options.rounds, options.steps)
    content = result_of(entries, options)
    show(content, console)
    if options.keep:
        path = Path(__file__).parent / "results" / f"peers_osft-{content['date']}.json"
        write_atomically(path, json.dumps(content, indent=1) + "\n")
        console.print(f"kept in {path}")


def result_of(entries: list[Entry], options: argparse.Namespace) -> dict[str, Any]:
    """For a file: tokens per second, and step times over the plain loop's."""
    done = {entry.name: entry for entry in entries if not entry.failure}
    plain = done.get(PLAIN)
    return {
        "schema_version": 1,
        "date": datetime.date.today().isoformat(),
        "machine": machine_name(),
        "num_cores": num_cores(),
        "software": software_versions(),
        "model": MODEL_NAME,
        "batch_size": BATCH_SIZE,
        "sequence_length": SEQUENCE_LENGTH,
        "unfreeze_rank_ratio": RATIO,
        "threads_per_process": options.threads,
        "steps_per_burst": options.steps,
        "contestants": [
            {
                "name": entry.name,
                "about": entry.about,
                "failure": entry.failure,
                "tokens_per_s": None if entry.failure else TOKENS / entry.median_step_s,
                "times_plain": None if entry.failure or plain is None else entry.times_slower_than(plain),
                "spread_frac": None if entry.failure else entry.spread_frac,
                "copied_bytes_per_step": entry.copied_bytes,
                "burst_step_s": entry.step_s,
            }
            for entry in entries
        ],
    }


def show(content: dict[str, Any], console: Console) -> None:
    """Print the table."""
    table = Table(
        title=f"{MODEL_NAME}, {BATCH_SIZE} x {SEQUENCE_LENGTH} tokens, ratio {RATIO}, fp32, "
        f"{content['threads_per_process']} thread(s) per process, {machine_name()}",
        title_justify="left",
    )
    for name in ("contestant", "tokens/s", "step / plain", "spread", "how"):
        table.add_column(name, justify="left" if name in ("contestant", "how") else "right")
    for one in content["contestants"]:
        if one["failure"]:
            table.add_row(one["name"], "", "", "", one["failure"])
            continue
        ratio = "" if one["times_plain"] is None else f"{one['times_plain']:.2f}"
        table.add_row(one["name"], f"{one['tokens_per_s']:.0f}", ratio, f"{one['spread_frac']:.1%}", one["about"])
    console.print(table)


if __name__ == "__main__":
    main()
