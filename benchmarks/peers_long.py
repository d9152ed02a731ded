"""Tiles of MLPs and of the loss beside DeepSpeed's: step time and peak memory at a long sequence, everything resident.

Contestants take turns in short bursts, as in ``peers.py``: the plain loop, DeepSpeed's ``TiledMLP`` and
``TiledFusedLogitsLoss`` in it, and ours, with the same numbers of tiles; both tiles together also with blocks that are
recomputed.  Two ranks share a sequence by DeepSpeed's ``UlyssesSPAttentionHF`` (gloo, DDP) and by ours.  One ledger
tells the memory of all: every operation of a step is watched, in a step that is not timed.  Beside seconds by the clock
are those of the processor, which others on the machine change little.  ``make bench-peers`` runs it.
"""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

from peers import Entry, begin, take_turns, turns_options, turns_parser
from peers_long_models import BATCH_SIZE, MODEL_NAME, NUM_TILES, SEQUENCE_LENGTH
from rich.console import Console
from rich.table import Table

from protwin.runtime.devices.machine import machine_name, num_cores
from protwin.runtime.model.identity import software_versions
from protwin.shared.basics.documents import write_atomically
from protwin.shared.basics.units import format_bytes, format_seconds

_GROUPS: Final = {
    "whole": ("plain", "ours"),
    "mlp": ("deepspeed", "ours"),
    "loss": ("deepspeed", "ours"),
    "all": ("deepspeed", "ours"),
    "all-checkpointed": ("deepspeed", "ours"),
}
"""What runs in tiles, with the peer and ours."""
_WORDS: Final = {
    "whole": "whole",
    "mlp": "MLPs in tiles",
    "loss": "loss in tiles",
    "all": "MLPs and loss in tiles",
    "checkpointed": "blocks recomputed",
}
_WHO: Final = {"plain": "plain PyTorch loop", "deepspeed": "DeepSpeed", "ours": "protwin"}


def main() -> None:
    """Run all contestants and print their table."""
    options = turns_options(turns_parser(__doc__, rounds=8, steps=1))
    console = Console(highlight=False, width=150)
    entries = [
        Entry(f"{_WHO[who]}, {_told(variant)}", f"long-{who}-{variant}")
        for variant, pair in _GROUPS.items()
        for who in pair
    ]
    entries += [
        Entry(f"{_WHO[who]}, a sequence shared by two ranks", f"long-{who}-ranks", num_ranks=2)
        for who in ("deepspeed", "ours")
    ]
    with tempfile.TemporaryDirectory() as folder, ExitStack() as undo:
        begin(entries, options.threads, Path(folder), undo)
        take_turns(entries, options.rounds, options.steps)
    content = described(entries, options)
    show(content, console)
    if options.keep:
        path = Path(__file__).parent / "results" / f"peers_long-{content['date']}.json"
        write_atomically(path, json.dumps(content, indent=1) + "\n")
        console.print(f"kept in {path}")


def _told(variant: str) -> str:
    return ", ".join(_WORDS[part] for part in variant.split("-"))


def described(entries: list[Entry], options: argparse.Namespace) -> dict[str, Any]:
    """Everything that a file keeps; ratios are those of ours over its peer, who is the entry before it."""
    rows = []
    reference = entries[0]
    for place, entry in enumerate(entries):
        done = not entry.failure
        peer = entries[place - 1] if place % 2 and done and not entries[place - 1].failure else None
        rows.append(
            {
                "name": entry.name,
                "about": entry.about,
                "failure": entry.failure,
                "median_step_s": entry.median_step_s if done else None,
                "spread_frac": entry.spread_frac if done else None,
                "peak_bytes": entry.peak_bytes if done else None,
                "median_processor_s": statistics.median(entry.processor_s) if done else None,
                "times_peer": entry.times_slower_than(peer) if peer is not None else None,
                "processor_times_peer": (
                    statistics.median(a / b for a, b in zip(entry.processor_s, peer.processor_s, strict=True))
                    if peer is not None
                    else None
                ),
                "peak_times_peer": entry.peak_bytes / peer.peak_bytes if peer is not None else None,
                "largest_loss_difference": (
                    entry.loss_difference(reference) if done and not reference.failure else None
                ),
                "burst_step_s": entry.step_s,
                "burst_processor_s": entry.processor_s,
            }
        )
    return {
        "schema_version": 1,
        "date": datetime.date.today().isoformat(),
        "machine": machine_name(),
        "num_cores": num_cores(),
        "software": software_versions(),
        "model": MODEL_NAME,
        "batch_size": BATCH_SIZE,
        "sequence_length": SEQUENCE_LENGTH,
        "num_tiles": NUM_TILES,
        "threads_per_process": options.threads,
        "steps_per_burst": options.steps,
        "contestants": rows,
    }


def show(content: dict[str, Any], console: Console) -> None:
    """Print the table."""
    table = Table(
        title=f"{MODEL_NAME}, {BATCH_SIZE} x {SEQUENCE_LENGTH} tokens, {NUM_TILES} tiles, fp32, "
        f"{content['threads_per_process']} thread(s) per process, {machine_name()}",
        title_justify="left",
    )
    for name in (
        "contestant",
        "step",
        "spread",
        "/ peer",
        "of the processor",
        "/ peer",
        "peak",
        "/ peer",
        "losses differ by",
    ):
        table.add_column(name, justify="left" if name == "contestant" else "right")
    for one in content["contestants"]:
        if one["failure"]:
            table.add_row(one["name"], one["failure"])
            continue
        table.add_row(
            one["name"],
            format_seconds(one["median_step_s"]),
            f"{one['spread_frac']:.1%}",
            "" if one["times_peer"] is None else f"{one['times_peer']:.2f}",
            format_seconds(one["median_processor_s"]),
            "" if one["processor_times_peer"] is None else f"{one['processor_times_peer']:.2f}",
            format_bytes(one["peak_bytes"]),
            "" if one["peak_times_peer"] is None else f"{one['peak_times_peer']:.2f}",
            "" if one["largest_loss_difference"] is None else f"{one['largest_loss_difference']:.1e}",
        )
    console.print(table)


if __name__ == "__main__":
    main()
