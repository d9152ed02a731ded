"""Trainings that are killed at random moments and resumed by the next process, until one ends; run as a program.

``python -m tests.runtime.killed_training FOLDER KILLS SEED`` prints, as JSON, how each process ended: the signal, and
the step that it had resumed from.  It fails unless the last one's losses and weights are those of plain training.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch

from protwin.runtime.checkpoints import has_checkpoint
from tests.runtime.models import SEED, STEPS, Case, cases, differences
from tests.runtime.resuming import kept, mixed, offloaded, other_weights, start

PLANS = (mixed, offloaded, kept)
CASE = "gpt2 with dropout, tied"


def train_on(case: Case, folder: Path, number: int, report: Any) -> None:
    """Resume if there is a checkpoint, train to the end, save after every step, and compare with plain training."""
    is_resuming = has_checkpoint(folder)
    model = other_weights(case.build()) if is_resuming else case.build()
    plan = PLANS[number % len(PLANS)](case.workload)
    with start(case, model, plan) as training:
        losses: list[float] = []
        if is_resuming:
            losses = training.resume(folder).data_position
        else:
            torch.manual_seed(SEED)
            training.save(folder, data_position=losses)
        report(training.num_steps)
        while training.num_steps < STEPS:
            loss = case.loss(model, case.batches[training.num_steps])
            loss.backward()
            training.step()
            losses.append(loss.item())
            training.save(folder, data_position=losses)
    assert losses == case.plain.losses
    assert differences(model, case.plain.weights[-1]) == []


def in_a_process(case: Case, folder: Path, number: int, lifetime_s: float | None) -> dict[str, Any]:
    """Train in a process that is killed after ``lifetime_s``; says how it ended, and when."""
    readable, writable = os.pipe()
    begin = time.perf_counter()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            train_on(case, folder, number, lambda step: os.write(writable, bytes([step])))
            code = 0
        finally:
            sys.stderr.flush()
            os._exit(code)
    os.close(writable)
    if lifetime_s is not None:
        time.sleep(lifetime_s)
        os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    step = os.read(readable, 1)
    os.close(readable)
    seconds = time.perf_counter() - begin
    return {"code": os.waitstatus_to_exitcode(status), "from": step[0] if step else None, "seconds": seconds}


def main() -> None:
    """Kill, resume, kill again."""
    parent, kills, chance = Path(sys.argv[1]), int(sys.argv[2]), random.Random(int(sys.argv[3]))
    torch.set_num_threads(1)
    case = cases()[CASE]
    _ = case.workload, case.plain
    whole = in_a_process(case, parent / "whole", 0, None)
    assert whole["code"] == 0
    found: list[dict[str, Any]] = []
    attempt, num_killed = 0, 0
    while num_killed < kills:
        attempt += 1
        folder = parent / f"attempt {attempt}" / "saved"
        for number in range(50):
            is_last = num_killed >= kills
            lifetime_s = None if is_last else chance.uniform(0.02, 0.7) * whole["seconds"]
            end = in_a_process(case, folder, number + attempt, lifetime_s) | {"attempt": attempt}
            found.append(end)
            num_killed += end["code"] == -signal.SIGKILL
            assert end["code"] in (0, -signal.SIGKILL), end
            if end["code"] == 0:
                break
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
