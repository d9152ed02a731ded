"""Trainings of two ranks one of which is killed at a random moment, and resumed by the next two; run as a program.

``python -m tests.runtime.killed_ranks FOLDER KILLS SEED`` prints, as JSON, how each pair of processes ended.  Every
process is forked from this one, which runs no thread, so none of them has to load torch again.  One rank of a pair,
drawn by chance, is killed by SIGKILL at a moment drawn uniformly over the duration of an undisturbed run, saving
included; the next pair goes on in another mode.  It fails unless the other rank ends by itself within half a minute,
every pair resumes from the last checkpoint whose saving had returned on a rank, or from a later one, and losses and
weights of those that end are those of DistributedDataParallel that nothing interrupted.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from protwin.runtime.checkpoints.checkpoints import has_checkpoint
from protwin.shared.basics.errors import RanksError
from protwin.shared.schema.plan import ParallelMode, Plan
from tests.runtime.killed_training import Doing, Signals
from tests.runtime.models import SEED, snapshot
from tests.runtime.ranks.beside_ddp import all_cases, in_default_group, prepare, reference
from tests.runtime.ranks.processes import without_a_word
from tests.runtime.ranks.saving import NUM_BATCHES, STEPS, start, steps_of
from tests.runtime.ranks.test_beside_ddp import plan_for
from tests.runtime.resuming import other_weights

NUM_RANKS = 2
SUBJECTS = ("gpt2 with dropout, tied", "llama in bfloat16", "hand-written, batch statistics")
MODES = (ParallelMode.SHARDED, ParallelMode.REPLICATED, ParallelMode.DDP)
MOST_S = 30.0
"""Until the rank that was left behind has ended."""
ENDED_BY_OTHER = 3
"""The exit code of a rank that another one has left."""


def plan_of(name: str, number: int) -> Plan:
    """Another mode, other chunks for every number."""
    plan = plan_for(all_cases(NUM_BATCHES)[name].workload, MODES[number % len(MODES)], number)
    return plan.model_copy(update={"micro_batches": 1, "max_gradient_norm": None})


@in_default_group
def undisturbed(rank: int, name: str, folder: Path) -> None:
    """Write what DistributedDataParallel gives."""
    found = reference(name, rank, plan_of(name, 0), NUM_BATCHES, STEPS)
    torch.save((found.losses, found.weights), folder / f"expected-{rank}.pt")


def train_on(rank: int, name: str, number: int, folder: Path, signals: Signals) -> None:
    """Resume if there is a checkpoint, train to the end, save after every step, and compare."""
    case = all_cases(NUM_BATCHES)[name]
    is_resuming = has_checkpoint(folder)
    model = prepare(case.build(), rank)
    model = other_weights(model) if is_resuming else model
    with start(case, model, plan_of(name, number), rank_timeout_s=60.0) as training:
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
            torch.manual_seed(SEED + rank)
            save()
        while training.num_steps < STEPS:
            losses += steps_of(case, model, training, rank, training.num_steps + 1)
            save()
    expected_losses, weights = torch.load(folder.parent.parent / f"{name} {NUM_RANKS}" / f"expected-{rank}.pt")
    assert losses == expected_losses
    assert all(torch.equal(value, weights[key]) for key, value in snapshot(model).items())
    signals.doing = Doing.ENDED


def forked(work: Callable[[], None]) -> int:
    """A process that does ``work``."""
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        work()
        code = 0
    except RanksError:
        code = ENDED_BY_OTHER
    finally:
        sys.stderr.flush()
        os._exit(code)


class Store:
    """What torchrun's agent serves, in a process of its own."""

    def __enter__(self) -> Store:
        readable, writable = os.pipe()
        self._process = forked(lambda: _serve(writable))
        self.port = int(os.read(readable, 10).decode())
        os.close(readable)
        os.close(writable)
        return self

    def __exit__(self, *_: object) -> None:
        os.kill(self._process, signal.SIGKILL)
        os.waitpid(self._process, 0)

    def environment(self, rank: int) -> dict[str, str]:
        return {
            "RANK": str(rank),
            "WORLD_SIZE": str(NUM_RANKS),
            "LOCAL_RANK": str(rank),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(self.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
        }


def _serve(writable: int) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))  # type: ignore[attr-defined]
    os.write(writable, str(store.port).encode())
    time.sleep(3600)


def pair(
    work: Callable[[int], None], kill: tuple[int, float] | None = None, has_begun: Callable[[int], bool] = bool
) -> tuple[list[int], float]:
    """Two ranks do ``work``; ``kill`` is whom to kill, and after how many seconds.  Gives exit codes, and the time.

    If that one has not begun to train by then, the other may wait for it: it is killed too, as torchrun does.
    """
    begin = time.perf_counter()
    with Store() as store:

        def on(rank: int) -> None:
            os.environ.update(store.environment(rank))
            work(rank)

        children = [forked(lambda rank=rank: on(rank)) for rank in range(NUM_RANKS)]  # type: ignore[misc]
        if kill is not None:
            time.sleep(kill[1])
            os.kill(children[kill[0]], signal.SIGKILL)
            if not has_begun(kill[0]):
                os.kill(children[1 - kill[0]], signal.SIGKILL)
        end = time.monotonic() + MOST_S
        codes: dict[int, int] = {}
        while len(codes) < NUM_RANKS:
            for child in set(children) - codes.keys():
                found, status = os.waitpid(child, os.WNOHANG)
                if found:
                    codes[child] = os.waitstatus_to_exitcode(status)
            if time.monotonic() > end and kill is not None:
                for child in set(children) - codes.keys():
                    os.kill(child, signal.SIGKILL)
                raise AssertionError(f"a rank that another one had left did not end within {MOST_S} s")
            time.sleep(0.002)
    return [codes[child] for child in children], time.perf_counter() - begin


def attempt(
    name: str, folder: Path, signals: list[Signals], whole_s: float, number: int, chance: random.Random
) -> list[dict[str, Any]]:
    """One training: a rank killed at a random moment, and again, until a pair ends; the fourth one may."""
    ends: list[dict[str, Any]] = []
    saved = -1
    while not ends or ends[-1]["codes"] != [0] * NUM_RANKS:
        for one in signals:
            one.reset()
        kill = (chance.randrange(NUM_RANKS), chance.uniform(0, whole_s)) if len(ends) < 3 else None
        now = number + len(ends)
        codes, seconds = pair(
            lambda rank: train_on(rank, name, now, folder, signals[rank]),  # noqa: B023
            kill,
            lambda rank: signals[rank].doing is not Doing.SETTING_UP,
        )
        assert set(codes) <= {0, -signal.SIGKILL, ENDED_BY_OTHER}, codes
        resumed = {one.resumed_from for one in signals if one.resumed_from is not None}
        assert len(resumed) < 2, "ranks have resumed from different steps"
        assert all(step >= saved for step in resumed), f"resumed from {resumed} after step {saved} had been saved"
        assert resumed or saved < 0 or codes != [0] * NUM_RANKS, "began anew although a step had been saved"
        saved = max([saved, *(one.saved for one in signals if one.saved is not None)])
        doing = signals[kill[0]].doing.name.lower() if kill is not None else "ended"
        ends.append(
            {"codes": codes, "doing": doing, "seconds": seconds, "from": next(iter(resumed), None), "subject": name}
        )
    return ends


@without_a_word()
def main() -> None:
    """Kill, resume, kill again, until so many have been killed."""
    parent, kills, chance = Path(sys.argv[1]), int(sys.argv[2]), random.Random(int(sys.argv[3]))
    torch.set_num_threads(1)
    signals = [Signals() for _ in range(NUM_RANKS)]
    subjects = SUBJECTS[: max(1, min(len(SUBJECTS), kills // 3))]
    whole_s = []
    for name in subjects:
        for number in range(len(MODES)):
            _ = plan_of(name, number)
        folder = parent / f"{name} {NUM_RANKS}"
        folder.mkdir(parents=True)
        codes, _ = pair(lambda rank: undisturbed(rank, name, folder))  # noqa: B023
        assert codes == [0, 0], codes
        codes, seconds = pair(lambda rank: train_on(rank, name, 0, parent / "whole" / name, signals[rank]))  # noqa: B023
        assert codes == [0, 0], codes
        whole_s.append(seconds)
    found: list[dict[str, Any]] = []
    number = 0
    while sum(-signal.SIGKILL in end["codes"] for end in found) < kills:
        place = number % len(subjects)
        folder = parent / f"attempt {number}" / "saved"
        ends = attempt(subjects[place], folder, signals, whole_s[place], number, chance)
        # A busy machine makes one run slow; who is killed too late was not killed.
        whole_s[place] = min([whole_s[place], *(end["seconds"] for end in ends if end["doing"] == "ended")])
        found += ends
        number += 1
        sys.stderr.write(f"{len(found)} processes\n")
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
