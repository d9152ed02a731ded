"""Batches of another shape on one rank alone: smaller ones train as under DDP, larger ones end all ranks' training."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import lru_cache
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from protwin.runtime import CpuDevice, CpuOutOfMemoryError, carry_out
from protwin.runtime.ranks import ordered_sums
from protwin.shared import ParallelMode, Plan, RanksError
from protwin.shared.compile.compile import compile_schedule
from protwin.shared.layout.layout import build_layout
from protwin.shared.verify.guaranteed_peak import guaranteed_device_peak
from tests.proof_size import some_quick
from tests.runtime.models import Batch, Case, adamw, differences, llama, snapshot, token_batches, uncached
from tests.runtime.ranks.beside_ddp import in_default_group
from tests.runtime.ranks.processes import Ranks
from tests.runtime.ranks.test_beside_ddp import MODES
from tests.runtime.watchdog import lanes_alive

NUM_USUAL = 4
"""Steps, so that later ones are not watched for their first micro-batch's sake."""


@lru_cache
def case() -> Case:
    return Case(lambda: llama(num_layers=3), token_batches(2))


def plan_of(parallel: ParallelMode, micro_batches: int) -> Plan:
    workload = case().workload
    layout = build_layout(workload.parameters, num_blocks=workload.num_blocks, chunk_bytes=9_000)
    n_persist = len(layout.chunks) if parallel is ParallelMode.DDP else 2
    return Plan(
        workload_id=workload.identity,
        chunk_bytes=9_000,
        n_persist=n_persist,
        n_buffer=layout.min_buffers(n_persist) + 1,
        parallel=parallel,
        num_ranks=2,
        micro_batches=micro_batches,
    )


def batches_of(rank: int, last_of_rank_1: int, micro_batches: int) -> list[Sequence[Batch]]:
    """Usual ones, and in the last step of rank 1 one of ``last_of_rank_1`` rows in the last place."""
    usual, (other,) = token_batches(2), token_batches(1, batch=last_of_rank_1)
    steps = [[usual[rank]] * micro_batches for _ in range(NUM_USUAL + 1)]
    if rank == 1:
        steps[-1][-1] = other
    return steps


@in_default_group
def smaller(rank: int, plan: Plan) -> tuple[bool, list[str], bool]:
    """Whether losses are DDP's, which weights are not, and whether the device holds no more than is guaranteed."""
    steps = batches_of(rank, 1, plan.micro_batches)
    expected = uncached(case().build())
    wrapped: nn.Module = DistributedDataParallel(expected)
    optimizer = adamw([{"params": list(expected.parameters())}])
    losses_of_ddp, losses = [], []
    for (batch,) in steps:
        loss = case().loss(wrapped, batch)
        loss.backward()
        losses_of_ddp.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    most_bytes = guaranteed_device_peak(compile_schedule(plan, case().workload)).size_bytes
    model = case().build()
    with carry_out(model, plan, case().workload, optimizer=adamw, device=CpuDevice(most_bytes)) as training:
        for (batch,) in steps:
            loss = case().loss(model, batch)
            loss.backward()
            losses.append(loss.item())
            training.step()
    return losses == losses_of_ddp, differences(model, snapshot(expected)), training.peak_device_bytes <= most_bytes


@in_default_group
def larger(rank: int, plan: Plan) -> tuple[str, str, int]:
    """The error's class and message, and how many steps were done."""
    most_bytes = guaranteed_device_peak(compile_schedule(plan, case().workload)).size_bytes
    model, num_steps = case().build(), 0
    try:
        with carry_out(
            model, plan, case().workload, optimizer=adamw, device=CpuDevice(most_bytes), rank_timeout_s=20
        ) as training:
            for batches in batches_of(rank, 16, plan.micro_batches):
                for batch in batches:
                    case().loss(model, batch).backward()
                training.step()
                num_steps += 1
    except (CpuOutOfMemoryError, RanksError) as error:
        assert lanes_alive() == []
        return type(error).__name__, str(error), num_steps
    return "", "", num_steps


@some_quick("parallel", MODES, quick=1)
def test_a_smaller_batch_of_one_rank_trains_as_under_ddp(parallel: ParallelMode, two_ranks: Ranks) -> None:
    assert two_ranks.run(smaller, plan_of(parallel, 1)) == [(True, [], True)] * 2


@some_quick("micro_batches", [1, 2], quick=1)
def test_a_larger_batch_of_one_rank_ends_the_training_of_all(micro_batches: int, two_ranks: Ranks) -> None:
    """At once, with its message, above the budget never."""
    first, second = two_ranks.run(larger, plan_of(ParallelMode.SHARDED, micro_batches))
    assert second[0] == "CpuOutOfMemoryError"
    assert second[1].startswith("out of memory on the CPU device: ")
    assert first[0] == "RanksError"
    assert first[1].startswith(f"training was ended by rank 1: CpuOutOfMemoryError: {second[1]}")
    assert [num_steps for _, _, num_steps in (first, second)] == [NUM_USUAL] * 2


# -- a library that is late ------------------------------------------------------------------------------------------


@contextmanager
def late_library() -> Iterator[None]:
    """Who exchanges tensors holds on to them after he is done, as gloo's threads do for moments that can be long."""
    held: list[object] = []

    def holding(collective: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*tensors: Any, **options: Any) -> Any:
            held.extend(tensors)
            return collective(*tensors, **options)

        return wrapped

    with ExitStack() as patches:
        for owner, name in (
            (ordered_sums, "_ALL_GATHER"),
            (ordered_sums, "_REDUCE_SCATTER"),
            (dist, "all_reduce"),
            (dist, "all_to_all_single"),
        ):
            patches.enter_context(mock.patch.object(owner, name, holding(getattr(owner, name))))
        yield
    assert held


@in_default_group
def smaller_beside_a_late_library(rank: int, plan: Plan, gathered_bytes: int) -> tuple[bool, list[str], bool]:
    with late_library(), mock.patch.object(ordered_sums, "_GATHERED_BYTES", gathered_bytes):
        return smaller.__wrapped__(rank, plan)  # type: ignore[attr-defined, no-any-return]


@pytest.mark.parametrize("gathered_bytes", [0, 2**20])
@some_quick("parallel", MODES, quick=1)
def test_a_library_that_is_late_holds_none_of_what_the_schedule_accounts_for(
    parallel: ParallelMode, gathered_bytes: int, two_ranks: Ranks
) -> None:
    """Gradients that were exchanged by themselves, without a copy, fail here in mode ddp."""
    assert two_ranks.run(smaller_beside_a_late_library, plan_of(parallel, 1), gathered_bytes) == [(True, [], True)] * 2
