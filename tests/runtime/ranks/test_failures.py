"""One rank fails, anywhere in a step and by any cause: all end in time, with its words, and nothing is left."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from itertools import count
from pathlib import Path
from random import Random
from typing import Any
from unittest import mock

import pytest

from protwin.runtime import CpuDevice, CpuOutOfMemoryError
from protwin.runtime.lanes import rank_work
from protwin.runtime.lanes.compute_lane import ComputeLane
from protwin.runtime.lanes.lane_work import LaneWork
from protwin.shared.compile.compile import compile_schedule
from protwin.shared.schema.plan import ParallelMode, Plan
from protwin.shared.schema.schedule import Section, Task, TaskKind
from tests.interrupting import AGAIN_S, interruption
from tests.proof_size import some_quick
from tests.runtime.ranks.beside_ddp import STEPS, all_cases, in_default_group, prepare, run
from tests.runtime.ranks.processes import Ranks, without_a_word
from tests.runtime.ranks.test_beside_ddp import MODES, plan_for

NAME = "gated"
NUM_BATCHES = 12
NUM_RANKS = 3
BOUND_S = 30.0
CAUSES = ("error", "memory", "interrupt")
BEHIND_THE_LAST = ("memory", 118)
"""The cause and seed of a failure in what lanes do ahead of a step that never comes, which all ranks wait for."""


class Trouble(ValueError):
    """Of one rank."""


def cause(how: str, begun: Path, interrupt: Callable[[float], None]) -> None:
    """Fail on this rank now, and note when."""
    begun.write_text(str(time.monotonic()))
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "interrupt":
        # As a terminal does it, whichever thread this is: Python raises it on the main one, the compute thread, which
        # may be about to wait: [Note: Signals that nobody hears].
        interrupt(AGAIN_S)
        os.kill(os.getpid(), signal.SIGINT)
        return
    raise Trouble("trouble") if how == "error" else CpuOutOfMemoryError("no room")


@in_default_group
def fail(rank: int, plan: Plan, victim: int, how: str, moment: int, begun: Path) -> tuple[str, float, list[str]]:
    """One rank fails when it begins its ``moment``-th task: what this one is told, when, and which threads are left."""
    case = all_cases(NUM_BATCHES)[NAME]
    model, number = prepare(case.build(), rank), count()
    of, run_on = LaneWork.of, ComputeLane._run_on

    def look() -> None:
        if next(number) == moment and rank == victim:
            cause(how, begun, interrupt)

    def looking(self: LaneWork, task: Task, iteration: int) -> Callable[[], None]:
        work = of(self, task, iteration)

        def watched() -> None:
            look()
            work()

        return watched

    def looking_on(self: ComputeLane, kind: TaskKind, section: Section | None) -> None:
        run_on(self, kind, section)
        look()

    def press_again(ignored: sys.UnraisableHookArgs) -> None:
        # Python drops what is raised in the callback of a weak reference, Ctrl-C too, and what is raised in here.
        assert ignored.exc_type is KeyboardInterrupt
        threading.Timer(0.02, os.kill, (os.getpid(), signal.SIGINT)).start()

    told = "nothing"
    with (
        interruption() as interrupt,
        mock.patch.object(LaneWork, "of", looking),
        mock.patch.object(ComputeLane, "_run_on", looking_on),
        mock.patch.object(sys, "unraisablehook", press_again),
    ):
        try:
            run(case, model, plan, rank, CpuDevice())
        except (Exception, KeyboardInterrupt) as error:
            told = f"{type(error).__name__}: {error}"
    ended = time.monotonic()
    return told, ended, [thread.name for thread in threading.enumerate() if thread.name.startswith("protwin-")]


def drawn(seed: int) -> tuple[Plan, int, int]:
    """A plan, who fails, and at which task."""
    random = Random(seed)
    workload = all_cases(NUM_BATCHES)[NAME].workload
    plan = plan_for(workload, MODES[seed % len(MODES)], seed, NUM_RANKS)
    num_tasks = STEPS * len(compile_schedule(plan, workload).tasks)
    return plan, random.randrange(NUM_RANKS), random.randrange(num_tasks)


@some_quick(("how", "seed"), [*((how, seed) for how in CAUSES for seed in range(3)), BEHIND_THE_LAST], quick=4)
def test_a_failure_anywhere_ends_all_with_its_words(how: str, seed: int, three_ranks: Ranks, tmp_path: Path) -> None:
    plan, victim, moment = drawn(1000 * CAUSES.index(how) + seed)
    found = three_ranks.run(fail, plan, victim, how, moment, tmp_path / "begun")
    begun = float((tmp_path / "begun").read_text())
    own = {"error": "Trouble: trouble", "memory": "CpuOutOfMemoryError: no room", "interrupt": "KeyboardInterrupt: "}
    assert found[victim][0].startswith(own[how])
    for rank, (told, ended, left) in enumerate(found):
        assert ended - begun < BOUND_S
        assert left == []
        if rank != victim:
            # A signal may come to the main thread while all still begin.
            begins = [f"RanksError: {said}rank {victim}: {own[how]}" for said in ("training was ended by ", "")]
            assert told.startswith(tuple(begins)), told


def fail_silently(rank: int, *arguments: Any) -> tuple[str, float, list[str]]:
    """The wrong variant: who fails leaves, and tells nobody why."""
    with without_a_word(), mock.patch.object(rank_work, "tell_failure", return_value=None):
        return fail(rank, *arguments)


def test_a_failure_that_is_not_told_is_without_words(three_ranks: Ranks, tmp_path: Path) -> None:
    plan, victim, moment = drawn(0)
    found = three_ranks.run(fail_silently, plan, victim, "error", moment, tmp_path / "begun")
    assert plan.parallel is ParallelMode.DDP
    for rank, (told, *_) in enumerate(found):
        assert rank == victim or told.startswith("RanksError: another rank has ended without a word"), told


def die(rank: int, *arguments: Any) -> tuple[str, float, list[str]]:
    with without_a_word():
        return fail(rank, *arguments)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [5])
def test_a_death_anywhere_ends_all(seed: int, three_ranks: Ranks, tmp_path: Path) -> None:
    plan, victim, moment = drawn(seed)
    found = three_ranks.outcomes(die, plan, victim, "kill", moment, tmp_path / "begun")
    begun = float((tmp_path / "begun").read_text())
    for rank, outcome in enumerate(found):
        if rank != victim:
            told, ended, left = outcome.get()
            assert ended - begun < BOUND_S
            assert left == []
            assert told.startswith("RanksError: another rank has ended without a word"), told
    three_ranks.kill()
