"""Distillation by pipelines: what every rank does with its stage, beside the reference of each block alone."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import count
from random import Random
from typing import Any
from unittest import mock

import torch
import transformers
from torch import nn

from protwin.runtime import CpuDevice
from protwin.runtime.distillation.distil import distil
from protwin.runtime.distillation.tracing import trace_distillation
from protwin.runtime.lanes.stage_work import StageWork
from protwin.runtime.model.blocks import find_blocks
from protwin.shared.basics.errors import ScheduleError
from protwin.shared.compile.compile import compile_schedule
from protwin.shared.layout.layout import layout_of
from protwin.shared.pipelines.pipeline import Pipeline, Stage
from protwin.shared.schema.plan import ParallelMode, Plan, TrainingMethod
from protwin.shared.schema.workload import Workload
from protwin.shared.verify.guaranteed_peak import guaranteed_device_peak
from protwin.shared.workloads.stages import stage_workloads
from tests.runtime.distillation.cases import (
    Expected,
    adamw,
    mse,
    quiet,
    snapshot,
    steps_of,
    unlike,
    unlike_moments,
)
from tests.runtime.distillation.distilling import state_by_name
from tests.runtime.distillation.families import COMMON, DictBlock, DictModel, Family, causal, families
from tests.runtime.distillation.reference import learn_alone, seen_by_teacher
from tests.runtime.ranks.beside_ddp import in_default_group
from tests.runtime.ranks.processes import without_a_word

STEPS = 3
DEEP = "llama of five"
COUNTING = "dicts that count"
TIMEOUT_S = 4.0
CHUNK_BYTES = (3_000, 9_000, 20_000)


class CountingBlock(DictBlock):
    """What it gives depends on every call before: by a mean that is kept, by a buffer that is not, by extra state."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__(width, inner)
        self.mean: torch.Tensor
        self.calls: torch.Tensor
        self.register_buffer("mean", torch.zeros(width))
        self.register_buffer("calls", torch.zeros(()), persistent=False)
        self.num_calls = 0

    def get_extra_state(self) -> torch.Tensor:
        return torch.tensor(self.num_calls)

    def set_extra_state(self, state: torch.Tensor) -> None:
        self.num_calls = int(state)

    def forward(self, hidden: torch.Tensor, *, scale: torch.Tensor) -> dict[str, torch.Tensor]:
        self.calls += 1
        self.num_calls += 1
        self.mean.mul_(0.75).add_(hidden.detach().mean(dim=0), alpha=0.25)
        given = hidden + self.mean * self.calls
        found = super().forward(given, scale=scale)
        return {"hidden": found["hidden"] * (1 + 0.125 * self.num_calls), "inner": found["inner"]}


def counting(seed: int = 1) -> nn.Module:
    torch.manual_seed(seed)
    model = DictModel(16)
    model.stack = nn.ModuleList(CountingBlock(24, 16) for _ in model.stack)
    return model


def subject(name: str) -> Family:
    """A family; or a deeper model, of five blocks; or one whose student's blocks count their calls."""
    if name == COUNTING:
        return replace(families()["dicts"], student=counting)
    if name != DEEP:
        return families()[name]
    deep = causal(transformers.LlamaForCausalLM, transformers.LlamaConfig, teacher=COMMON | {"num_hidden_layers": 5})
    return replace(deep, blocks=tuple(f"model.layers.{layer}" for layer in range(5)))


@lru_cache
def workload_of(name: str) -> Workload:
    """Of the whole, without times."""
    family = subject(name)
    with quiet():
        return trace_distillation(family.teacher(), family.student(), family.batches(1)[0], mse, repeats=0)


@lru_cache
def expected(name: str, micro_batches: int, steps: int = STEPS, max_norm: float | None = None) -> Expected:
    """Every block alone, by the definition."""
    family = subject(name)
    batches = steps_of(family, micro_batches, steps)
    with quiet():
        teacher, student = family.teacher(), family.student()
        seen = [[seen_by_teacher(teacher, family.blocks, batch) for batch in step] for step in batches]
        return Expected(family, batches, learn_alone(student, family.blocks, seen, mse, adamw, max_norm=max_norm))


def pipeline_of(
    workload: Workload,
    num_pairs: Sequence[int],
    seed: int,
    *,
    micro_batches: int = 1,
    parallel: ParallelMode = ParallelMode.SINGLE,
    num_replicas: int = 1,
) -> Pipeline:
    """A pipeline whose stages have these pairs, each with a random plan."""
    random, stages = Random(seed), []
    for own, pairs in zip(stage_workloads(workload, num_pairs), num_pairs, strict=True):
        plan = random_plan(own, random, micro_batches=micro_batches, parallel=parallel, num_ranks=num_replicas)
        stages.append(Stage(num_pairs=pairs, plan=plan))
    return Pipeline(workload_id=workload.identity, num_replicas=num_replicas, stages=tuple(stages))


def random_plan(
    workload: Workload,
    random: Random,
    *,
    micro_batches: int = 1,
    parallel: ParallelMode = ParallelMode.SINGLE,
    num_ranks: int = 1,
) -> Plan:
    """One that the workload can follow; some of its chunks are away."""
    chunk_bytes = random.choice(CHUNK_BYTES)
    layout = layout_of(workload, chunk_bytes)
    num_chunks = len(layout.chunks)
    n_persist = num_chunks if parallel is ParallelMode.DDP else random.randint(0, num_chunks // 2)
    n_host_stepped = random.randint(0, (num_chunks - n_persist) // 2) if parallel is ParallelMode.SINGLE else 0
    return Plan(
        workload_id=workload.identity,
        method=TrainingMethod.BYPASS,
        chunk_bytes=chunk_bytes,
        n_persist=n_persist,
        n_host_stepped=n_host_stepped,
        n_buffer=layout.min_buffers(n_persist + n_host_stepped) + random.randint(0, 3),
        prefetch_depth=random.randint(1, 3),
        micro_batches=micro_batches,
        parallel=parallel,
        num_ranks=num_ranks,
    )


# -- wrong variants --------------------------------------------------------------------------------------------------


def _of_another_micro_batch() -> Any:
    """A stage sends the activation of the micro-batch before, where there is one."""
    send, sent = StageWork._send, list[torch.Tensor]()

    def send_old(self: StageWork, key: Any) -> None:
        sent.append(self._lent[key].clone())
        self._lent[key] = sent[max(0, len(sent) - 2)]
        send(self, key)

    return mock.patch.object(StageWork, "_send", send_old)


def _without_writing() -> Any:
    """A stage receives an activation, and goes on with the prologue's hidden state."""
    receive = StageWork._receive

    def forget(self: StageWork, key: Any) -> None:
        self._lent[key] = self._lent[key].clone()
        receive(self, key)

    return mock.patch.object(StageWork, "_receive", forget)


WRONG: dict[str | None, Callable[[], AbstractContextManager[Any]]] = {
    None: nullcontext,
    "another micro-batch": _of_another_micro_batch,
    "nothing is written": _without_writing,
}


@dataclass(frozen=True)
class OfStage:
    """What one rank has come to."""

    wrong: list[str]
    first_pair: int
    num_pairs: int
    losses: list[list[list[float]]]
    """Of all pairs, of every step and micro-batch."""
    moved_bytes: int
    num_cpu_adam_steps: int


def own_device(pipeline: Pipeline, workload: Workload, rank: int) -> CpuDevice:
    """Of just the memory that is guaranteed to be enough for the rank's stage."""
    stage = pipeline.stage_of(rank)
    own = stage_workloads(workload, [stage.num_pairs for stage in pipeline.stages])[stage]
    return CpuDevice(guaranteed_device_peak(compile_schedule(pipeline.stages[stage].plan, own)).size_bytes)


@in_default_group
def distil_stage(
    rank: int, name: str, pipeline: Pipeline, workload: Workload, reference: Expected, patch: str | None = None
) -> OfStage:
    """Train this rank's stage, with a wrong variant in place where one is named, and compare with the reference.

    Of replicas each has its own micro-batches of the reference's: their mean is what a step minimises.
    """
    family = subject(name)
    teacher, student = family.teacher(), family.student()
    stage, replica = pipeline.stage_of(rank), pipeline.replica_of(rank)
    first, num_pairs = pipeline.first_pair(stage), pipeline.stages[stage].num_pairs
    own = family.blocks[first : first + num_pairs]
    for model in (teacher, student):
        for block in find_blocks(model):
            if block.name not in own:
                # Blocks of other stages need no memory.
                block.module.to("meta")
    before = snapshot(teacher)
    losses: list[list[list[float]]] = []
    with (
        WRONG[patch](),
        quiet(),
        distil(
            teacher,
            student,
            pipeline,
            workload,
            mse,
            optimizer=adamw,
            device=own_device(pipeline, workload, rank),
            rank_timeout_s=60.0,
        ) as training,
    ):
        assert training.first_pair == first
        for batches in reference.steps:
            of_step = []
            for batch in batches[replica :: pipeline.num_replicas]:
                found = training(**batch)
                assert len(found) == num_pairs
                of_step.append(training.all_losses(found).tolist())
            losses.append(of_step)
            training.step()
        is_whole = pipeline.stages[stage].plan.parallel is not ParallelMode.SHARDED
        state = state_by_name(training) if is_whole else None
    after = teacher.state_dict()
    wrong = [f"teacher.{n} has memory" for n, tensor in before.items() if tensor.is_meta != after[n].is_meta]
    wrong += [
        f"teacher.{n}" for n, tensor in before.items() if not tensor.is_meta and not torch.equal(tensor, after[n])
    ]
    for pair, (path, alone) in enumerate(zip(family.blocks, reference.learnt, strict=True)):
        of_replica = [step[replica :: pipeline.num_replicas] for step in alone.losses]
        if [[of_pairs[pair] for of_pairs in step] for step in losses] != of_replica:
            wrong.append(f"losses of {path}")
        if path in own:
            wrong += [f"student.{path}.{n}" for n in unlike(alone, student.get_submodule(path))]
        if path in own and state is not None:
            prefix = f"student.{path}."
            moments = {n.removeprefix(prefix): s for n, s in state.items() if n.startswith(prefix)}
            wrong += unlike_moments(alone, moments)
    return OfStage(
        wrong,
        first,
        num_pairs,
        losses,
        training.bytes_host_to_device + training.bytes_device_to_host,
        training.num_cpu_adam_steps,
    )


@in_default_group
def distil_until_one_fails(rank: int, name: str, pipeline: Pipeline, workload: Workload, victim: int, how: str) -> None:
    """The ``victim`` fails in the middle of its second step; the others train until somebody ends them."""
    family, send, calls = subject(name), StageWork._send, count()

    def die(self: StageWork, key: Any) -> None:
        if rank == victim and next(calls):
            if how == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if how == "error":
                raise ValueError("trouble")
            time.sleep(3 * TIMEOUT_S)
        send(self, key)

    with (
        without_a_word(),
        mock.patch.object(StageWork, "_send", die),
        quiet(),
        distil(
            family.teacher(),
            family.student(),
            pipeline,
            workload,
            mse,
            optimizer=adamw,
            rank_timeout_s=TIMEOUT_S if how == "sleep" else 60.0,
        ) as training,
    ):
        for batch in family.batches(1) * 100:
            training(**batch)
            training.step()


@in_default_group
def refused(rank: int, name: str, pipeline: Pipeline, workload: Workload) -> None:
    """A pipeline that is not for this model, or these ranks."""
    family = subject(name)
    with quiet():
        distil(family.teacher(), family.student(), pipeline, workload, mse, rank_timeout_s=60.0).close()


@in_default_group
def not_of_stages(rank: int, name: str, pipeline: Pipeline, workload: Workload) -> list[str]:
    """What a training of one stage refuses."""
    family = subject(name)
    with (
        quiet(),
        distil(family.teacher(), family.student(), pipeline, workload, mse, rank_timeout_s=60.0) as training,
    ):
        found = []
        try:
            training.skip_step()
        except ScheduleError as error:
            found.append(str(error))
    return found
