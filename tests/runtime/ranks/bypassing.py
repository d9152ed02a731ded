"""Bypass runs on several ranks: what each rank does."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any
from unittest import mock

from protwin.runtime.bypass.run import BypassRun
from protwin.runtime.distillation.distil import Distilling
from protwin.shared.pipelines.pipeline import Pipeline, Stage
from protwin.shared.schema.plan import ParallelMode, Plan
from protwin.shared.schema.workload import Workload
from protwin.shared.workloads.stages import stage_workloads
from tests.runtime.bypass import small_runs
from tests.runtime.bypass.small_runs import LENGTH, SAMPLES, carry_out, plan_of, run_of, settings_of, workload_of
from tests.runtime.ranks.processes import without_a_word

STEPS = 6


def save_teacher(folder: Path) -> None:
    """One whose blocks drop nothing: ranks would draw other numbers than one rank."""
    with mock.patch.dict(small_runs.SHAPE, attention_dropout=0.0):
        small_runs.save_teacher(folder)


def run_on(path: Path, teacher: Path, how: str) -> BypassRun:
    """Six steps of two micro-batches: by one rank, by stages, or by replicas."""
    settings = settings_of(teacher, micro_batches=2, num_tokens=STEPS * 2 * SAMPLES * LENGTH)
    workload = workload_of(settings.student.to_json(), teacher)
    found = plan_by(how, workload, plan_of(workload, settings))
    return run_of(path, teacher, settings, plan=lambda: found, num_ranks=found.num_ranks)


def plan_by(how: str, workload: Workload, plan: Plan) -> Plan | Pipeline:
    if how == "one rank":
        return plan
    if how == "replicas":
        return plan.model_copy(update={"micro_batches": 1, "parallel": ParallelMode.REPLICATED, "num_ranks": 2})
    plans = [plan.model_copy(update={"workload_id": own.identity}) for own in stage_workloads(workload, (1, 1))]
    if how == "pipelines":
        of_ranks = {"micro_batches": 1, "parallel": ParallelMode.REPLICATED, "num_ranks": 2}
        plans = [own.model_copy(update=of_ranks) for own in plans]
    stages = tuple(Stage(num_pairs=1, plan=own) for own in plans)
    return Pipeline(workload_id=workload.identity, num_replicas=2 if how == "pipelines" else 1, stages=stages)


def bypass(rank: int, path: Path, teacher: Path, how: str, killed: tuple[int, int] | None = None) -> list[str]:
    """Carry the run out, or go on with it; what is told.  ``killed``: a rank that ends behind so many steps."""
    said: list[str] = []
    with dying(rank, killed), without_a_word():
        carry_out(run_on(path, teacher, how), said.append)
    return said


@contextmanager
def dying(rank: int, killed: tuple[int, int] | None) -> Iterator[None]:
    step, steps = Distilling.step, count(1)

    def stepped(self: Distilling, *args: Any) -> None:
        step(self, *args)
        if killed is not None and killed[0] == rank and next(steps) == killed[1]:
            os.kill(os.getpid(), signal.SIGKILL)

    with mock.patch.object(Distilling, "step", stepped):
        yield
