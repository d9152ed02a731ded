"""Trainings that are killed at random moments and resumed by the next process, until one ends; run as a program.

``python -m tests.runtime.killed_training FOLDER KILLS SEED`` prints, as JSON, how each process ended.  Every process is
forked from this one, which runs no thread, so none of them has to load torch again; all but those that may end are
killed by SIGKILL, at a moment drawn uniformly over the duration of an undisturbed run.  It fails unless every process
resumes from the last checkpoint whose saving had returned, or from a later one, and unless losses and weights of those
that end are those of plain training.
"""

from __future__ import annotations

import json
import mmap
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any

import torch

from protwin.runtime.checkpoints.checkpoints import has_checkpoint
from protwin.shared.schema.plan import Plan
from protwin.shared.schema.workload import Workload
from tests.runtime.models import SEED, STEPS, Case, cases, differences
from tests.runtime.resuming import kept, mixed, offloaded, on_disk, other_weights, start


class Doing(IntEnum):
    """What a process was doing when it was killed."""

    SETTING_UP = 0
    RESUMING = 1
    TRAINING = 2
    SAVING = 3
    ENDED = 4


@dataclass(frozen=True)
class Subject:
    """A case, with what is the same under all plans that it is resumed under."""

    case: str
    knobs: dict[str, Any]

    def plan(self, workload: Workload, number: int) -> Plan:
        """Other chunks, other residency, other activation modes for every number."""
        base: Callable[[Workload], Plan] = (on_disk, mixed, offloaded, kept)[number % 4]
        plan = base(workload)
        modes = {"n_swap": 1, "n_checkpoint": min(1, plan.n_checkpoint)} if number % 2 else {}
        return plan.model_copy(update=modes | self.knobs)


SUBJECTS = (
    Subject("gpt2 with dropout, tied", {}),
    Subject("llama, groups", {"micro_batches": 2, "max_gradient_norm": 0.5}),
    Subject("llama in bfloat16", {}),
)


class Signals:
    """What a process tells the one that may kill it; both see the same memory, so nothing is lost by a kill."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, 3)

    def reset(self) -> None:
        self._memory[0:3] = bytes([Doing.SETTING_UP, 255, 255])

    @property
    def doing(self) -> Doing:
        return Doing(self._memory[0])

    @doing.setter
    def doing(self, value: Doing) -> None:
        self._memory[0] = value

    @property
    def resumed_from(self) -> int | None:
        """The step that it had resumed from."""
        return None if self._memory[1] == 255 else self._memory[1]

    @resumed_from.setter
    def resumed_from(self, step: int) -> None:
        self._memory[1] = step

    @property
    def saved(self) -> int | None:
        """The last step whose saving has returned."""
        return None if self._memory[2] == 255 else self._memory[2]

    @saved.setter
    def saved(self, step: int) -> None:
        self._memory[2] = step


def train_on(case: Case, plan: Plan, folder: Path, signals: Signals) -> None:
    """Resume if there is a checkpoint, train to the end, save after every step, and compare with plain training."""
    is_resuming = has_checkpoint(folder)
    model = other_weights(case.build()) if is_resuming else case.build()
    # A killed process leaves its file there.
    disk_folder = folder.parent / "disk"
    disk_folder.mkdir(parents=True, exist_ok=True)
    with start(case, model, plan, disk_folder=disk_folder) as training:
        losses: list[float] = []

        def save() -> None:
            signals.doing = Doing.SAVING
            training.save(folder, data_position=losses)
            signals.saved = training.num_steps
            signals.doing = Doing.TRAINING

        if is_resuming:
            signals.doing = Doing.RESUMING
            losses = training.resume(folder).data_position
            signals.resumed_from = training.num_steps
            signals.doing = Doing.TRAINING
        else:
            torch.manual_seed(SEED)
            save()
        steps = case.steps(plan.micro_batches)
        while training.num_steps < STEPS:
            for batch in steps[training.num_steps]:
                loss = case.loss(model, batch)
                loss.backward()
                losses.append(loss.item())
            training.step()
            save()
    plain = case.plain_with(plan.micro_batches, plan.max_gradient_norm)
    assert losses == plain.losses
    assert differences(model, plain.weights[-1]) == []
    signals.doing = Doing.ENDED


def in_a_process(case: Case, plan: Plan, folder: Path, signals: Signals, lifetime_s: float | None) -> dict[str, Any]:
    """Train in a process that is killed after ``lifetime_s``; says how it ended, and when."""
    signals.reset()
    begin = time.perf_counter()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            train_on(case, plan, folder, signals)
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


def attempt(
    subject: Subject, folder: Path, signals: Signals, whole_s: float, number: int, chance: random.Random
) -> list[dict[str, Any]]:
    """One training: killed at a random moment, and again, until a process ends; the fourth one may."""
    case = cases()[subject.case]
    ends: list[dict[str, Any]] = []
    saved = -1
    while not ends or ends[-1]["code"] != 0:
        plan = subject.plan(case.workload, number + len(ends))
        lifetime_s = chance.uniform(0, whole_s) if len(ends) < 3 else None
        end = in_a_process(case, plan, folder, signals, lifetime_s)
        assert end["code"] in (0, -signal.SIGKILL), end
        if end["from"] is not None:
            assert end["from"] >= saved, f"resumed from step {end['from']} after step {saved} had been saved"
        elif end["code"] == 0:
            assert saved < 0, "began anew although a step had been saved"
        saved = max(saved, end["saved"] if end["saved"] is not None else -1)
        ends.append(end | {"subject": subject.case})
    return ends


def main() -> None:
    """Kill, resume, kill again, until so many have been killed."""
    parent, kills, chance = Path(sys.argv[1]), int(sys.argv[2]), random.Random(int(sys.argv[3]))
    torch.set_num_threads(1)
    signals = Signals()
    subjects = SUBJECTS[: max(1, min(len(SUBJECTS), kills // 3))]
    whole_s = []
    for subject in subjects:
        case = cases()[subject.case]
        plan = subject.plan(case.workload, 0)
        _ = case.plain_with(plan.micro_batches, plan.max_gradient_norm)
        whole = in_a_process(case, plan, parent / f"whole {subject.case}" / "saved", signals, None)
        assert whole["code"] == 0
        whole_s.append(whole["seconds"])
    found: list[dict[str, Any]] = []
    number = 0
    while sum(end["code"] == -signal.SIGKILL for end in found) < kills:
        place = number % len(subjects)
        folder = parent / f"attempt {number}" / "saved"
        found += attempt(subjects[place], folder, signals, whole_s[place], number, chance)
        number += 1
        sys.stderr.write(f"{len(found)} processes\n")
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
