"""Ranks on GPUs of their own, as many as there are and 4 at most, beside a loop that averages gradients by NCCL."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from functools import partial

import pytest
import torch
import torch.distributed as dist

from protwin.runtime import carry_out
from protwin.shared.layout.layout import build_layout
from protwin.shared.layout.residencies import ChunkResidency, residencies
from protwin.shared.schema.plan import ParallelMode, Plan
from tests.gpu.subject import _masters, _step, differing, host_snapshot
from tests.runtime.models import SEED, Case, llama, token_batches, uncached
from tests.runtime.ranks.beside_ddp import batches_of, in_default_group
from tests.runtime.ranks.processes import Ranks

pytestmark = pytest.mark.gpu
NUM_RANKS = min(torch.cuda.device_count(), 4)
NUM_STEPS = 3


def case_of(num_ranks: int) -> Case:
    return Case(partial(llama, num_layers=3), token_batches(num_ranks * NUM_STEPS))


def plan_of(case: Case, parallel: ParallelMode, *, n_shard: int = 0) -> Plan:
    layout = build_layout(case.workload.parameters, num_blocks=case.workload.num_blocks, chunk_bytes=9_000)
    is_whole = parallel is ParallelMode.DDP
    return Plan(
        workload_id=case.workload.identity,
        chunk_bytes=9_000,
        n_persist=len(layout.chunks) if is_whole else 2,
        n_shard=n_shard,
        n_buffer=0 if is_whole else layout.min_buffers(2) + 1,
        prefetch_depth=2,
        n_checkpoint=1,
        parallel=parallel,
        num_ranks=NUM_RANKS,
    )


def stepped_on_host(case: Case, plan: Plan) -> set[str]:
    """AdamW of the CPU and of a GPU round differently: both loops step each parameter in the same place."""
    workload = case.workload
    layout = build_layout(workload.parameters, num_blocks=workload.num_blocks, chunk_bytes=plan.chunk_bytes)
    found = residencies(plan, layout)
    offloaded = [chunk for chunk in layout.chunks if found[chunk.id].name == ChunkResidency.OFFLOADED.name]
    return {workload.parameters[placed.index].name for chunk in offloaded for placed in chunk.parameters}


@in_default_group
def train(rank: int, plan: Plan) -> tuple[list[str], list[str]]:
    """What differs from the loop by hand: losses, weights."""
    case = case_of(plan.num_ranks)
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    warnings.filterwarnings("ignore", ".*determinis.*")
    torch.use_deterministic_algorithms(True, warn_only=True)
    steps = batches_of(case, rank, plan.num_ranks, 1, NUM_STEPS)
    batches = [{name: tensor.to(device) for name, tensor in batch.items()} for (batch,) in steps]
    group = dist.new_group(backend="nccl")
    plain = uncached(case.build()).to(device)
    masters = _masters(plain, stepped_on_host(case, plan))
    optimizers = [
        case.make_optimizer([{"params": [m for m in masters.values() if m.device.type == kind]}])
        for kind in ("cpu", "cuda")
        if any(m.device.type == kind for m in masters.values())
    ]
    torch.manual_seed(SEED + rank)
    expected = []
    for batch in batches:
        loss = case.loss(plain, batch)
        loss.backward()
        expected.append(loss.item())
        for parameter in plain.parameters():
            if parameter.grad is not None:
                dist.all_reduce(parameter.grad, group=group)
                parameter.grad.mul_(1 / plan.num_ranks)
        _step(masters, optimizers)
    model, losses = case.build(), []
    with carry_out(model, plan, case.workload, optimizer=case.make_optimizer, device="cuda") as training:
        torch.manual_seed(SEED + rank)
        for batch in batches:
            loss = case.loss(model, batch)
            loss.backward()
            training.step()
            losses.append(loss.item())
    wrong = [f"loss {i}" for i, pair in enumerate(zip(losses, expected, strict=True)) if pair[0] != pair[1]]
    return wrong, differing(host_snapshot(model), host_snapshot(plain))


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    if NUM_RANKS < 2:
        pytest.skip(f"{NUM_RANKS} CUDA devices are no ranks")
    with Ranks(NUM_RANKS) as started:
        yield started


@pytest.mark.parametrize(
    ("parallel", "n_shard"),
    [(ParallelMode.DDP, 0), (ParallelMode.REPLICATED, 0), (ParallelMode.SHARDED, 0), (ParallelMode.SHARDED, 3)],
)
def test_ranks_on_gpus_give_the_bits_of_a_loop_that_averages_by_nccl(
    parallel: ParallelMode, n_shard: int, ranks: Ranks
) -> None:
    """Bits where two add up; three and more add up in the order of the library, which may differ from size to size."""
    plan = plan_of(case_of(NUM_RANKS), parallel, n_shard=n_shard)
    for losses, weights in ranks.run(train, plan):
        if NUM_RANKS == 2:
            assert losses == []
            assert weights == []
        else:
            assert "loss 0" not in losses
