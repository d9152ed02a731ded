"""Faults: trainings that are killed at random moments of training and saving resume and end equal."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from protwin.shared.basics.progress import OnProgress

from .prove_claims import Claim, Settings

_ROOT: Final = Path(__file__).parents[1]
_PROGRAM: Final = "tests.runtime.killed_training"
_PROGRAM_OF_RANKS: Final = "tests.runtime.killed_ranks"
_PROGRAM_OF_RUNS: Final = "tests.runtime.bypass.killed_runs"
_KILLED: Final = -9


def prove(settings: Settings, report: OnProgress) -> list[Claim]:
    """Let the programs run, which check every process, and sum up what they did."""
    alone = Claim("faults", "three models", "killed at a random moment, resumed, ended with the bits of the plain loop")
    ranks = Claim(
        "faults",
        "three models, two ranks",
        "one rank killed at a random moment: the other ended by itself, both resumed in another mode, ended with the "
        "bits of DistributedDataParallel",
    )
    runs = Claim(
        "faults",
        "bypass runs, 3 micro-batches per step",
        "killed at a random moment, gone on with, ended with the bits of a run that nothing disturbed",
    )
    programs = ((alone, _PROGRAM), (ranks, _PROGRAM_OF_RANKS), (runs, _PROGRAM_OF_RUNS))
    for number, (claim, program) in enumerate(programs):
        own = replace(settings, kills=-(-settings.kills // 2)) if claim is runs else settings
        ends = _ends(claim, program, own, lambda done, of: report(number * of + done, 3 * of))  # noqa: B023
        if ends is not None:
            _sum_up(claim, ends, own)
    return [alone, ranks, runs]


def _ends(claim: Claim, program: str, settings: Settings, report: OnProgress) -> list[dict[str, Any]] | None:
    """How the processes of a program ended; None, with the claim failed, if the program failed."""
    command = [sys.executable, "-m", program]
    # Its output goes to a file: nobody reads it before it is complete.
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile("w+") as output:
        said = []
        with subprocess.Popen(
            [*command, folder, str(settings.kills), str(settings.seed)],
            cwd=_ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=output,
            stderr=subprocess.PIPE,
            text=True,
        ) as process:
            assert process.stderr is not None
            for line in process.stderr:
                said.append(line)
                if line.endswith(" processes\n"):
                    # Every third process or so is one that ends.
                    report(min(int(line.split()[0]), 1.5 * settings.kills), 1.5 * settings.kills)
            code = process.wait()
        output.seek(0)
        printed = output.read()
    if code == 0:
        found: list[dict[str, Any]] = json.loads(printed)
        return found
    claim.num_cases = 1
    claim.failures.append("".join(said[-15:]).strip() or f"ended with {code}")
    return None


def _sum_up(claim: Claim, ends: list[dict[str, Any]], settings: Settings) -> None:
    codes = [end.get("codes", [end.get("code")]) for end in ends]
    killed = [end for end, of_end in zip(ends, codes, strict=True) if _KILLED in of_end]
    moments = Counter(end["doing"] for end in killed)
    claim.num_cases = len(killed)
    claim.figures = {
        "killed": len(killed),
        **{f"while {moment.replace('_', ' ')}": number for moment, number in sorted(moments.items())},
        "ended equal": sum(set(of_end) == {0} for of_end in codes),
        "resumed on their way": sum(end["from"] not in (None, 0) for end in ends),
        "a process lived": f"{statistics.median(end['seconds'] for end in killed):.2f} s" if killed else "",
    }
    if len(killed) < settings.kills:
        claim.failures.append(f"{len(killed)} processes were killed, {settings.kills} were wanted")
    for moment in ("training", "saving"):
        if settings.kills >= 50 and not moments[moment]:
            claim.failures.append(f"none was killed while {moment}: that shows nothing")
