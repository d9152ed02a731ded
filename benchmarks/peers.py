"""Peers: the same model, data, threads and optimizer, trained by us and by others with their parameters on the host.

On one rank: the plain PyTorch loop, ours by a fixed plan and by a searched one, FSDP2 with CPU offload, and DeepSpeed
ZeRO-3 with parameters and optimizer offloaded.  On two: DistributedDataParallel, FSDP2 with and without CPU offload,
DeepSpeed, and ours in every mode and by a searched plan.  gloo, no clipping, fp32.  Every contestant is a process of
its own (two for two ranks), and all take turns in short bursts, in random order; the first three steps of each are
thrown away.  A burst ends when nothing runs beside the loop any more, so that work which overlaps with the next step is
never left out.  Step times are medians over bursts, ratios medians over the rounds in which both had a turn.
``make bench-peers`` runs
it; results are kept in benchmarks/results/ with date and machine.

One thread per process by default, where the machine has two cores: ours then uses the other core for its lanes, and so
do two ranks of a peer.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import random
import statistics
import tempfile
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from peers_processes import BUILD_S, ContestantError, Processes, break_stale_locks
from peers_subject import BATCH_SIZE, MODEL_NAME, OURS_TOGETHER, SEQUENCE_LENGTH
from rich.console import Console
from rich.table import Table

from protwin.runtime.devices.machine import machine_name, num_cores
from protwin.runtime.model.identity import software_versions
from protwin.shared.basics.documents import write_atomically
from protwin.shared.basics.progress import progress_bar
from protwin.shared.basics.units import format_bytes, format_seconds

_WARM_UP: Final = 3
"""Steps thrown away; in the last of them copies are counted."""
_REFERENCES: Final = {1: "plain", 2: "ddp"}
"""Whose losses all others of as many ranks are to have."""
_COMPARED: Final = {
    1: {"plain": "plain", "fixed": "ours, fixed", "searched": "ours, searched"},
    2: {"ddp": "DDP", "fsdp2-on-devices": "FSDP2", "fsdp2": "FSDP2, offload"},
}
"""To whom step times are put in proportion, with the heading of each."""
_OURS_TOGETHER: Final = {
    "ddp": "ddp",
    "replicated": "replicated",
    "sharded-on-hosts": "sharded on hosts",
    "sharded-on-devices": "sharded on devices",
    "searched": "searched plan",
}
_LEFT_OUT: Final = ("fixed", "searched", "ddp", "fsdp2", "deepspeed", "one-rank", "two-ranks")


@dataclass
class Entry:
    """One row: a contestant with a number of ranks, and what it did."""

    name: str
    contestant: str
    num_ranks: int = 1
    processes: Processes | None = None
    about: str = ""
    failure: str = ""
    """Why it did not run, or did not run to its end."""
    copied_bytes: int = 0
    peak_bytes: int = 0
    """Of the step that was watched, where the contestant says so."""
    step_s: list[float] = field(default_factory=list)
    """Mean of each burst, round by round."""
    processor_s: list[float] = field(default_factory=list)
    """Of all threads and ranks, over the steps of each burst: what others do meanwhile on the machine counts little."""
    losses: list[float] = field(default_factory=list)
    """Of every step, those thrown away included."""

    @property
    def median_step_s(self) -> float:
        """Median over bursts."""
        return statistics.median(self.step_s)

    @property
    def spread_frac(self) -> float:
        """Median absolute deviation of bursts, over their median."""
        middle = self.median_step_s
        return statistics.median(abs(seconds - middle) for seconds in self.step_s) / middle

    def times_slower_than(self, other: Entry) -> float:
        """Median ratio over the rounds."""
        return statistics.median(a / b for a, b in zip(self.step_s, other.step_s, strict=True))

    def loss_difference(self, other: Entry) -> float:
        """Largest difference of the losses of any step."""
        return max(abs(a - b) for a, b in zip(self.losses, other.losses, strict=True))


def turns_parser(description: str | None, *, rounds: int, steps: int) -> argparse.ArgumentParser:
    """Options of contestants that take turns, with their usual numbers of rounds and of steps of a burst."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=rounds, help=f"bursts of every contestant ({rounds})")
    parser.add_argument("--steps", type=int, default=steps, help=f"steps of a burst ({steps})")
    parser.add_argument("--threads", type=int, default=max(1, num_cores() - 1), help="of each process (cores - 1)")
    parser.add_argument("--keep", action="store_true", help="keep the result in benchmarks/results/")
    return parser


def turns_options(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """What the command line says.  Exits with 2 if there is nothing to do."""
    options = parser.parse_args()
    if min(options.rounds, options.steps, options.threads) < 1:
        parser.error("--rounds, --steps and --threads must be at least 1.")
    return options


def main() -> None:
    """Run all contestants and print their table."""
    parser = turns_parser(__doc__, rounds=10, steps=4)
    parser.add_argument("--without", nargs="*", default=[], choices=_LEFT_OUT, help="leave these out")
    parser.add_argument("--build", action="store_true", help="compile what a peer compiles on first use, and end")
    options = turns_options(parser)
    console = Console(highlight=False, width=150)
    break_stale_locks()
    if options.build:
        build(console)
        return
    entries = all_entries()
    for entry in entries:
        of_ranks = {1: "one-rank", 2: "two-ranks"}[entry.num_ranks]
        if not {entry.contestant.split("-")[0], of_ranks}.isdisjoint(options.without):
            entry.failure = "left out by --without"
    with tempfile.TemporaryDirectory() as folder, ExitStack() as undo:
        begin(entries, options.threads, Path(folder), undo)
        take_turns(entries, options.rounds, options.steps)
    show(entries, options.threads, console)
    if options.keep:
        console.print(f"kept in {keep(entries, options)}")


def all_entries() -> list[Entry]:
    """Every contestant."""
    return [
        Entry("plain PyTorch loop", "plain"),
        Entry("protwin, fixed plan", "fixed"),
        Entry("protwin, searched plan", "searched"),
        Entry("FSDP2", "fsdp2"),
        Entry("DeepSpeed ZeRO-3", "deepspeed"),
        Entry("DDP, two ranks", "ddp", num_ranks=2),
        Entry("FSDP2 without offload, two ranks", "fsdp2-on-devices", num_ranks=2),
        Entry("FSDP2, two ranks", "fsdp2", num_ranks=2),
        Entry("DeepSpeed ZeRO-3, two ranks", "deepspeed", num_ranks=2),
        *(
            Entry(f"protwin, {mode}, two ranks", f"{OURS_TOGETHER}{name}", num_ranks=2)
            for name, mode in _OURS_TOGETHER.items()
        ),
    ]


def build(console: Console) -> None:
    """Let DeepSpeed compile its extensions, so that no bench waits for it."""
    console.print("compiling DeepSpeed's CPU Adam; this takes minutes, once")
    with tempfile.TemporaryDirectory() as folder:
        try:
            Processes("deepspeed", 1, 1, Path(folder) / "build", start_s=BUILD_S).close()
        except ContestantError as error:
            console.print(f"DeepSpeed {error}; the bench will say so again")


def begin(entries: list[Entry], threads: int, folder: Path, undo: ExitStack) -> None:
    """Start every contestant, one after the other, and let it warm up."""
    with progress_bar("starting") as report:
        for number, entry in enumerate(entries):
            if not entry.failure:
                with ended_by_failure(entry):
                    entry.processes = Processes(entry.contestant, entry.num_ranks, threads, folder / str(number))
                    undo.callback(entry.processes.close)
                    entry.about = entry.processes.about
                    train(entry, steps=_WARM_UP - 1)
                    entry.step_s.clear()
                    entry.processor_s.clear()
                    watched = entry.processes.ask({"watch": True})
                    entry.copied_bytes = sum(answer["copied_bytes"] for answer in watched)
                    entry.peak_bytes = max(answer.get("peak_bytes", 0) for answer in watched)
                    entry.losses += mean_losses(watched)
            report(number + 1, len(entries))


def take_turns(entries: list[Entry], rounds: int, steps: int) -> None:
    """Let every contestant that still runs train a burst in each round."""
    with progress_bar("training in turns") as report:
        for turn in range(rounds):
            running = [entry for entry in entries if entry.processes is not None and not entry.failure]
            random.Random(turn).shuffle(running)
            for entry in running:
                with ended_by_failure(entry):
                    train(entry, steps)
            report(turn + 1, rounds)


class ended_by_failure:
    """A contestant that fails says so in its row; the others go on."""

    def __init__(self, entry: Entry) -> None:
        self._entry = entry

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> bool:
        if isinstance(error, ContestantError):
            self._entry.failure = str(error)
            return True
        return False


def train(entry: Entry, steps: int) -> None:
    """One burst; ranks run side by side, and the slowest counts."""
    assert entry.processes is not None
    answers = entry.processes.ask({"watch": False, "steps": steps})
    entry.step_s.append(max(answer["seconds"] for answer in answers) / steps)
    entry.processor_s.append(sum(answer["processor_seconds"] for answer in answers) / steps)
    entry.losses += mean_losses(answers)


def mean_losses(answers: list[dict[str, Any]]) -> list[float]:
    """The loss of the whole batch: ranks have equal shares of it."""
    return [statistics.fmean(losses) for losses in zip(*(answer["losses"] for answer in answers), strict=True)]


def show(entries: list[Entry], threads: int, console: Console) -> None:
    """Print a table for each number of ranks."""
    for num_ranks, compared in _COMPARED.items():
        of_ranks = [entry for entry in entries if entry.num_ranks == num_ranks]
        console.print(table_of(of_ranks, compared, _REFERENCES[num_ranks], threads))
    for entry in entries:
        if entry.about:
            console.print(f"{entry.name}: {entry.about}")
    console.print(
        "losses: largest difference from those of the plain loop, or of DDP, of any step. DeepSpeed's gradients differ "
        "in their last bits from the first backward on, so its losses cannot be equal."
    )


def table_of(entries: list[Entry], compared: dict[str, str], reference: str, threads: int) -> Table:
    """Of contestants with the same number of ranks, in proportion to those that are ``compared``."""
    ranks = f", {entries[0].num_ranks} ranks" if entries[0].num_ranks > 1 else ""
    table = Table(
        title=f"{MODEL_NAME}, {BATCH_SIZE} x {SEQUENCE_LENGTH} tokens{ranks}, fp32, {threads} thread(s) per process, "
        f"{machine_name()}",
        title_justify="left",
    )
    table.add_column("contestant")
    for heading in ("step", "spread", *(f"/ {name}" for name in compared.values()), "copied per step", "losses"):
        table.add_column(heading, justify="right")
    done = {entry.contestant: entry for entry in entries if not entry.failure}
    for entry in entries:
        if entry.failure:
            table.add_row(entry.name, entry.failure)
            continue
        ratios = [f"{entry.times_slower_than(done[name]):.2f}" if name in done else "" for name in compared]
        table.add_row(
            entry.name,
            format_seconds(entry.median_step_s),
            f"{entry.spread_frac:.1%}",
            *ratios,
            format_bytes(entry.copied_bytes),
            describe_losses(entry, done.get(reference)),
        )
    return table


def describe_losses(entry: Entry, reference: Entry | None) -> str:
    """How far the losses are from the plain loop's."""
    if reference is None:
        return "no reference"
    difference = entry.loss_difference(reference)
    return f"differ by {difference:.1e}" if difference else "equal, bit for bit"


def keep(entries: list[Entry], options: argparse.Namespace) -> Path:
    """Write the result, with date and machine; gives its path."""
    today = datetime.date.today().isoformat()
    path = Path(__file__).parent / "results" / f"peers-{today}.json"
    references = {
        entry.num_ranks: entry
        for entry in entries
        if entry.contestant == _REFERENCES[entry.num_ranks] and not entry.failure
    }
    content = {
        "schema_version": 1,
        "date": today,
        "machine": machine_name(),
        "num_cores": num_cores(),
        "software": software_versions(),
        "model": MODEL_NAME,
        "batch_size": BATCH_SIZE,
        "sequence_length": SEQUENCE_LENGTH,
        "threads_per_process": options.threads,
        "steps_per_burst": options.steps,
        "steps_thrown_away": _WARM_UP,
        "load_average_1min": os.getloadavg()[0],
        "contestants": [
            {
                "name": entry.name,
                "num_ranks": entry.num_ranks,
                "about": entry.about,
                "failure": entry.failure,
                "median_step_s": entry.median_step_s if entry.step_s else None,
                "spread_frac": entry.spread_frac if entry.step_s else None,
                "largest_loss_difference": (
                    entry.loss_difference(references[entry.num_ranks])
                    if entry.num_ranks in references and not entry.failure
                    else None
                ),
                "copied_bytes_per_step": entry.copied_bytes,
                "burst_step_s": entry.step_s,
                "losses": entry.losses,
            }
            for entry in entries
        ],
    }
    write_atomically(path, json.dumps(content, indent=1) + "\n")
    return path


if __name__ == "__main__":
    main()
