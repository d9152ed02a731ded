"""Bypass runs that are killed at random moments and gone on with, until one ends; run as a program.

``python -m tests.runtime.bypass.killed_runs FOLDER KILLS SEED`` prints, as JSON, how each process ended.  Every process
is forked from this one, which runs no thread, and all but those that may end are killed by SIGKILL, at a moment drawn
uniformly over the duration of an undisturbed run.  It fails unless every process goes on from the last checkpoint
whose saving had returned, or from a later one, and unless weights, losses and validations of those that end are those
of a run that nothing disturbed.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from protwin.runtime.bypass.loop import HISTORY
from protwin.runtime.distillation.distil import Distilling
from tests.runtime.bypass.small_runs import carry_out, run_of, save_teacher
from tests.runtime.killed_training import Doing, Signals

KILLS_PER_RUN = 3


def tell(signals: Signals) -> None:
    """Have the trainings of this process say what they do."""
    save, resume = Distilling.save, Distilling.resume

    def saved(self: Distilling, *args: Any, **options: Any) -> None:
        signals.doing = Doing.SAVING
        save(self, *args, **options)
        signals.saved = self.num_steps
        signals.doing = Doing.TRAINING

    def resumed(self: Distilling, *args: Any, **options: Any) -> Any:
        signals.doing = Doing.RESUMING
        found = resume(self, *args, **options)
        if signals.resumed_from is None:
            signals.resumed_from = self.num_steps
        signals.doing = Doing.TRAINING
        return found

    Distilling.save, Distilling.resume = saved, resumed  # type: ignore[assignment, method-assign]


def in_a_process(do: Callable[[], None], signals: Signals, lifetime_s: float | None) -> dict[str, Any]:
    """Have a process ``do`` it, which is killed after ``lifetime_s``; says how it ended, and when."""
    signals.reset()
    begin = time.perf_counter()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            tell(signals)
            do()
            code = 0
        finally:
            sys.stderr.flush()
            os._exit(code)
    if lifetime_s is not None:
        time.sleep(lifetime_s)
        os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    return {
        "code": os.waitstatus_to_exitcode(status),
        "from": signals.resumed_from,
        "saved": signals.saved,
        "doing": signals.doing.name.lower(),
        "seconds": time.perf_counter() - begin,
    }


def attempt(parent: Path, number: int, signals: Signals, whole_s: float, chance: random.Random) -> list[dict[str, Any]]:
    """One run: killed at a random moment, and again, until a process ends; the fourth one may."""
    folder, ends, saved = parent / f"run {number}", list[dict[str, Any]](), 0
    while not ends or ends[-1]["code"] != 0:
        lifetime_s = chance.uniform(0, whole_s) if len(ends) < KILLS_PER_RUN else None
        end = in_a_process(lambda: _run(folder, parent), signals, lifetime_s)
        assert end["code"] in (0, -signal.SIGKILL), end
        # A process that died before it went on says nothing.
        if end["from"] is not None or end["code"] == 0:
            assert (end["from"] or 0) >= saved, f"went on from step {end['from']} after step {saved} had been saved"
        saved = max(saved, end["saved"] or 0)
        ends.append(end)
    assert _outcome(folder) == _outcome(parent / "whole"), f"run {number} ended otherwise"
    return ends


def _run(folder: Path, parent: Path) -> None:
    carry_out(run_of(folder, parent / "teacher"))


def _outcome(folder: Path) -> tuple[dict[str, list[float]], str]:
    """Weights and history."""
    (model,) = folder.glob("model-*")
    weights = {name: tensor.flatten().tolist() for name, tensor in load_file(model / "model.safetensors").items()}
    return weights, (folder / HISTORY).read_text()


def main() -> None:
    """Kill, go on, kill again, until so many have been killed."""
    parent, kills, chance = Path(sys.argv[1]), int(sys.argv[2]), random.Random(int(sys.argv[3]))
    torch.set_num_threads(1)
    save_teacher(parent / "teacher")
    signals = Signals()
    _ = run_of(parent / "whole", parent / "teacher").workload  # traced once, before any process is forked
    whole = in_a_process(lambda: _run(parent / "whole", parent), signals, None)
    assert whole["code"] == 0
    ends: list[dict[str, Any]] = []
    number = 0
    while sum(end["code"] == -signal.SIGKILL for end in ends) < kills:
        ends += attempt(parent, number, signals, whole["seconds"], chance)
        number += 1
        sys.stderr.write(f"{len(ends)} processes\n")
    sys.stdout.write(json.dumps(ends))


if __name__ == "__main__":
    main()
