"""Time and memory of every command line in README and docs, as a reader would type it.

Each document's ``$ protwin ...`` lines run in order in a temporary folder, since later ones read what earlier ones
wrote.  The folder begins with a small configuration and with one file of each kind made from it (``config.json``,
``machine.toml``, ``workload.json``, ``plan.json``, ``predicted.json``), which stand for the reader's own.  Traces are
not cached from earlier runs, and nothing is downloaded.  A line that writes no file runs once, however often it stands.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Final

from protwin.runtime.devices.machine import machine_name
from protwin.shared.basics.documents import write_atomically
from protwin.shared.basics.units import format_bytes, format_seconds
from tests.docs.documents import DOCUMENTS, ROOT, Command, blocks_of, commands_of

RESULTS: Final = ROOT / "benchmarks" / "results"
_CONFIGURATION: Final = {
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 256,
    "max_position_embeddings": 2048,
}
"""What stands for the reader's model: small, so that commands that train it end."""
_SEEDS: Final = (
    "hardware show rtx-3090 --output machine.toml",
    "trace --model config.json --batch-size 4 --sequence-length 128 --output workload.json",
    "search --model workload.json --hardware machine.toml --output plan.json",
    "simulate --plan plan.json --model workload.json --hardware machine.toml --output predicted.json",
)
_WRITING: Final = ("--output", "-o", "--report", "--timeline", "--state", "--workload-output", "--checkpoint")
_RSS_UNIT_BYTES: Final = 1 if sys.platform == "darwin" else 1024
_LONGEST_MESSAGE: Final = 200


@dataclass(frozen=True, slots=True)
class Cost:
    """What one command took, with all processes that it started and waited for."""

    wall_s: float
    cpu_s: float
    peak_rss_bytes: int
    """Of the largest of its processes."""
    exit_code: int
    """-9 for a command that was ended at the limit."""
    message: str = ""
    """The last line on standard error of a command that failed."""


@dataclass(frozen=True, slots=True)
class Row:
    """One line of a document."""

    place: str
    command: str
    cost: Cost


def lines_of_documents() -> list[Command]:
    """Every command line of protwin in README and docs, document by document, in order."""
    return [
        command
        for document in DOCUMENTS
        if document.parent != ROOT or document.name == "README.md"
        for block in blocks_of(document)
        if block.language in {"bash", "console"}
        for command in commands_of(block)
        if command.text.split()[0] == "protwin"
    ]


_LAUNCHER: Final = """
import json, os, signal, sys, time
began_s = time.perf_counter()
child = os.posix_spawnp(sys.argv[3], sys.argv[3:], os.environ, setpgroup=0)
signal.signal(signal.SIGALRM, lambda *_: os.killpg(child, signal.SIGKILL))
signal.setitimer(signal.ITIMER_REAL, float(sys.argv[2]))
_, status, usage = os.wait4(child, 0)
told = (time.perf_counter() - began_s, usage.ru_utime + usage.ru_stime, usage.ru_maxrss, status)
os.write(int(sys.argv[1]), json.dumps(told).encode())
"""
"""A small process that starts the command: the system counts the memory of whoever starts it as its first peak."""


def cost_of(arguments: Sequence[str | Path], folder: Path, environment: Mapping[str, str], limit_s: float) -> Cost:
    """Run a command to its end, or to the limit."""
    reading, writing = os.pipe()
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", _LAUNCHER, str(writing), str(limit_s), *arguments],
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        pass_fds=(writing,),
        check=True,
    )
    os.close(writing)
    with os.fdopen(reading, "rb") as answer:
        wall_s, cpu_s, peak_rss, status = json.loads(answer.read())
    exit_code = os.waitstatus_to_exitcode(status)
    told = done.stderr.decode(errors="replace").strip().splitlines()
    message = told[-1][:_LONGEST_MESSAGE] if exit_code and told else ""
    return Cost(wall_s, cpu_s, peak_rss * _RSS_UNIT_BYTES, exit_code, message)


def measured(lines: Sequence[Command], limit_s: float) -> Iterator[Row]:
    """The rows, as they come."""
    protwin = Path(sys.executable).with_name("protwin")
    known: dict[str, Cost] = {}
    with tempfile.TemporaryDirectory() as place:
        environment = os.environ | {
            "HF_HUB_OFFLINE": "1",
            "XDG_CACHE_HOME": f"{place}/cache",
            "COLUMNS": "100",
            "NO_COLOR": "1",
        }
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
        seeds = Path(place) / "seeds"
        seeds.mkdir()
        for name in ("config.json", "model.json"):
            (seeds / name).write_text(json.dumps(_CONFIGURATION), encoding="utf-8")
        for seed in _SEEDS:
            cost = cost_of([protwin, *shlex.split(seed)], seeds, environment, limit_s)
            assert cost.exit_code == 0, f"protwin {seed}: {cost.message}"
        for command in lines:
            document = command.block.document.relative_to(ROOT)
            folder = Path(place) / str(document).replace("/", "_")
            if not folder.exists():
                subprocess.run(["cp", "-r", seeds, folder], check=True)
            arguments = shlex.split(command.text, comments=True)[1:]
            writes = any(argument.split("=")[0] in _WRITING for argument in arguments)
            if writes or command.text not in known:
                known[command.text] = cost_of([protwin, *arguments], folder, environment, limit_s)
            yield Row(f"{document}:{command.block.line}", command.text, known[command.text])


def main() -> None:
    """Print every line's row, and keep them if asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--limit", type=float, default=600.0, help="seconds after which a command is ended")
    parser.add_argument("--only", default="", help="lines that hold this text")
    parser.add_argument("--keep", action="store_true", help="keep the result in benchmarks/results/")
    arguments = parser.parse_args()
    rows = []
    print(f"{'wall':>9}{'CPU':>10}{'peak RSS':>12}  command")
    for row in measured([one for one in lines_of_documents() if arguments.only in one.text], arguments.limit):
        cost = row.cost
        figures = (
            f"{format_seconds(cost.wall_s):>9}{format_seconds(cost.cpu_s):>10}{format_bytes(cost.peak_rss_bytes):>12}"
        )
        failed = f"  (exit code {cost.exit_code}: {cost.message})" if cost.exit_code else ""
        print(f"{figures}  {row.command}  [{row.place}]{failed}", flush=True)
        rows.append(asdict(row))
    if arguments.keep:
        today = datetime.date.today().isoformat()
        software = {name: version(name) for name in ("numpy", "torch", "transformers")}
        load = os.getloadavg()[0]
        content = {"machine": machine_name(), "software": software, "load_average": load, "rows": rows}
        write_atomically(RESULTS / f"commands-{today}.json", json.dumps(content, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
