"""Buffers that forward reads and changes are rank 0's in every step on all ranks, as DistributedDataParallel has it."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from protwin.runtime import CpuDevice, carry_out
from protwin.runtime.training.module_buffers import SharedBuffers
from protwin.shared import ParallelMode, Plan, RanksError, ScheduleError
from tests.runtime.models import SEED, Case, HandWritten, adamw, differences, point_batches, snapshot
from tests.runtime.ranks.beside_ddp import batches_of, in_default_group, run, share_buffers
from tests.runtime.ranks.processes import Ranks

NUM_BATCHES = 12


class Centred(HandWritten):
    """Takes the mean of what it has seen off its input; counts, and has buffers of many kinds beside."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(5))
        self.register_buffer("count", torch.tensor(0))
        self.register_buffer("odd", torch.ones(3, dtype=torch.bool), persistent=False)
        self.register_buffer("turned", torch.randn(3, 2, dtype=torch.float64).t())

    def forward(self, points: torch.Tensor) -> torch.Tensor:
        self.count += len(points)
        self.mean.lerp_(points.detach().mean(0), 0.3)
        self.turned.add_(self.mean.sum())
        return super().forward(points - self.mean)


def centred() -> Centred:
    torch.manual_seed(SEED)
    return Centred()


def case() -> Case:
    return Case(centred, point_batches(NUM_BATCHES), has_loss=False)


def plan_of(**knobs: object) -> Plan:
    given: dict[str, Any] = {"n_persist": 2, "n_buffer": 4, "parallel": ParallelMode.REPLICATED, "num_ranks": 2} | knobs
    return Plan(workload_id=case().workload.identity, chunk_bytes=9_000, **given)


def losses_of_ddp(rank: int, model: nn.Module) -> list[float]:
    used, losses = case(), []
    wrapped = DistributedDataParallel(model, find_unused_parameters=True)
    optimizer = adamw([{"params": list(model.parameters())}])
    torch.manual_seed(SEED + rank)
    for (batch,) in batches_of(used, rank, 2, 1):
        loss = used.loss(wrapped, batch)
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    # DDP does so before the next forward.
    share_buffers(model)
    return losses


@in_default_group
def trained(rank: int, plan: Plan, *, shares: bool) -> tuple[bool, list[str]]:
    expected, model = centred(), centred()
    losses = losses_of_ddp(rank, expected)
    settle = SharedBuffers.settle if shares else lambda self: None
    with mock.patch.object(SharedBuffers, "settle", settle):
        _, found = run(case(), model, plan, rank, CpuDevice())
    return found == losses, differences(model, snapshot(expected))


def test_losses_and_buffers_are_ddps(two_ranks: Ranks) -> None:
    for parallel in (ParallelMode.REPLICATED, ParallelMode.SHARDED):
        assert two_ranks.run(shared, plan_of(parallel=parallel)) == [(True, [])] * 2
    assert any(not same_losses for same_losses, _ in two_ranks.run(apart, plan_of()))


def shared(rank: int, plan: Plan) -> tuple[bool, list[str]]:
    return trained(rank, plan, shares=True)


def apart(rank: int, plan: Plan) -> tuple[bool, list[str]]:
    return trained(rank, plan, shares=False)


@in_default_group
def exchanged(rank: int, plan: Plan) -> str:
    """Rank 1's forward exchanges a buffer for a larger one."""
    model, used = centred(), case()
    ((batch,), *_) = batches_of(used, rank, 2, 1)
    with carry_out(model, plan, used.workload, device=CpuDevice(), rank_timeout_s=20) as training:
        used.loss(model, batch).backward()
        if rank == 1:
            model.odd = torch.ones(4, dtype=torch.bool)
        with pytest.raises((ScheduleError, RanksError)) as caught:
            training.step()
    return str(caught.value)


def test_a_buffer_of_another_shape_ends_the_training_of_all(two_ranks: Ranks) -> None:
    first, second = two_ranks.run(exchanged, plan_of())
    assert second.startswith("buffer odd was added, removed, or is of another shape")
    assert first == f"training was ended by rank 1: ScheduleError: {second}"
