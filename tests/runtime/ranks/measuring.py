"""What ranks hold and how far they are from plain training, measured in the processes of the ranks."""

from __future__ import annotations

import gc
import hashlib
from dataclasses import replace
from functools import partial
from typing import Final
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn

from protwin.runtime import CpuDevice, Training, carry_out
from protwin.runtime.chunks.chunk import DeviceChunk
from protwin.runtime.chunks.placed_model import PlacedModel
from protwin.runtime.chunks.sharded_chunk import ShardedChunk
from protwin.runtime.lanes.rank_work import RankWork
from protwin.runtime.model.nested_tensors import storage_bytes
from protwin.runtime.optimizers.gradient_norms import ClippedNorm
from protwin.runtime.ranks.collectives import Collectives
from protwin.shared.compile.compile import compile_schedule
from protwin.shared.layout.layout import build_layout
from protwin.shared.layout.residencies import ChunkResidency, residencies
from protwin.shared.layout.shards import regions
from protwin.shared.schema.plan import Plan
from protwin.shared.schema.schedule import Content, Memory, TaskId
from tests.runtime.accounts import error_frac
from tests.runtime.eager_lanes import WATCHED, eager_peak, settled_lanes
from tests.runtime.models import SEED, Case, held, one_group, uncached
from tests.runtime.ranks.beside_ddp import STEPS, all_cases, averaged, batches_of, in_default_group, prepare, run

_RATE: Final = 0.5
"""Of plain SGD."""


@in_default_group
def peak_error(rank: int, name: str, plan: Plan, num_batches: int) -> tuple[float, int, int]:
    """How far the peak with settled lanes is outside the schedule's account, as a part of it; what the host holds.

    The latter is bytes of the tensors that chunks have on the host, and what the schedule says of them.
    """
    case = all_cases(num_batches)[name]
    schedule = compile_schedule(plan, case.workload)
    model, device = prepare(case.build(), rank), CpuDevice()
    with carry_out(
        model, plan, case.workload, optimizer=case.make_optimizer, parameter_groups=case.groups(model), device=device
    ) as training:
        with settled_lanes(training):
            for batches in batches_of(case, rank, plan.num_ranks, plan.micro_batches)[:WATCHED]:
                for batch in held(case, batches):
                    case.loss(model, batch).backward()
                training.step()
        peak_bytes = training.peak_device_bytes
        host_bytes = host_bytes_of(training)
    del model, training, batch
    gc.collect()
    assert device.ledger.named_bytes == device.ledger.watched_bytes == 0
    said_bytes = schedule.static_bytes(Memory.HOST) + schedule.static_bytes(Memory.PINNED_HOST)
    said_bytes -= sum(b.size_bytes for b in schedule.buffers if b.is_static and b.content is Content.SWAPPED)
    account = eager_peak(schedule)
    account = replace(account, low_bytes=account.low_bytes - stateless_bytes(case, plan, rank))
    return error_frac(peak_bytes, account), host_bytes, said_bytes


@in_default_group
def held_while_scattering(
    rank: int, name: str, plan: Plan, num_batches: int
) -> list[tuple[str, dict[str, int], dict[str, int]]]:
    """Bytes that every reduction lets go of by content: what is there while ranks exchange, and what is said.

    The former is the level within the collective less what is left when the task has ended.  Lanes are settled: compute
    does nothing beside them.
    """
    case = all_cases(num_batches)[name]
    schedule = compile_schedule(plan, case.workload)
    model, device = prepare(case.build(), rank), CpuDevice()
    contents = (Content.GRADIENTS, Content.FLAT_GRADIENTS)
    within: list[dict[Content | None, int]] = []
    found: list[tuple[str, dict[str, int], dict[str, int]]] = []
    work, exchange = RankWork._scatter, Collectives.scatter

    def noting(self: Collectives, part: torch.Tensor, whole: torch.Tensor) -> None:
        exchange(self, part, whole)
        within.append(dict(device.ledger.alive))

    def laid_beside(self: RankWork, chunk: ShardedChunk, key: tuple[int, int, int], task: TaskId) -> None:
        within.clear()
        work(self, chunk, key, task)
        after = device.ledger.alive
        freed = [schedule.buffers[buffer] for buffer in schedule.tasks[task].frees]
        said = {c.value: sum(b.size_bytes for b in freed if b.content is c) for c in contents}
        let_go = {c.value: min(level.get(c, 0) for level in within) - after.get(c, 0) for c in contents}
        found.append((schedule.tasks[task].name, let_go, said))

    with (
        mock.patch.object(RankWork, "_scatter", laid_beside),
        mock.patch.object(Collectives, "scatter", noting),
        carry_out(
            model,
            plan,
            case.workload,
            optimizer=case.make_optimizer,
            parameter_groups=case.groups(model),
            device=device,
        ) as training,
        settled_lanes(training),
    ):
        for batches in batches_of(case, rank, plan.num_ranks, plan.micro_batches, 2):
            for batch in held(case, batches):
                case.loss(model, batch).backward()
            training.step()
    return found


def stateless_bytes(case: Case, plan: Plan, rank: int) -> int:
    """What AdamW's state would have for scalars of a rank's shards on its device that belong to no parameter.

    The schedule's account says that all scalars of a shard have a state: alignment and padding have none.
    """
    workload, size_bytes = case.workload, 0
    layout = build_layout(workload.parameters, num_blocks=workload.num_blocks, chunk_bytes=plan.chunk_bytes)
    found = residencies(plan, layout)
    for chunk in layout.chunks:
        if found[chunk.id] is not ChunkResidency.SHARDED:
            continue
        begin_bytes = 0
        for region in regions(chunk, workload.parameters):
            count, item_bytes = region.shard_elements(plan.num_shards), region.dtype.item_bytes
            member = rank % plan.num_shards
            shard = range(member * count, (member + 1) * count)
            end_bytes, held_scalars = begin_bytes + region.size_bytes, 0
            for placed in chunk.parameters:
                if begin_bytes <= placed.offset_bytes < end_bytes:
                    first = (placed.offset_bytes - begin_bytes) // item_bytes
                    last = first + workload.parameters[placed.index].num_elements
                    held_scalars += max(0, min(last, shard.stop) - max(first, shard.start))
            moments_bytes = 2 * max(item_bytes, 4) + (4 if item_bytes < 4 else 0)
            size_bytes += region.trainable * (count - held_scalars) * moments_bytes
            begin_bytes = end_bytes
    return size_bytes


def host_bytes_of(training: Training) -> int:
    """Of weights, masters, optimizer state and gradients."""
    placed = training._placed
    found = [tensor for chunk in placed.chunks for tensor in host_tensors(chunk)]
    for optimizer in placed.optimizers.host.values():
        found += [tensor for tensor in optimizer.state_tensors() if tensor.dim()]
        found += optimizer.weights
    return storage_bytes(found)


def host_tensors(chunk: DeviceChunk) -> list[torch.Tensor]:
    """What a chunk holds on the host."""
    if not isinstance(chunk, ShardedChunk):
        return [t for t in (chunk._home, chunk._staging, chunk._arrivals) if t is not None]
    if chunk.is_on_device:
        return []
    return [*(region.home for region in chunk._regions), *chunk._sums, *chunk._arrivals_of_regions]


@in_default_group
def one_step(rank: int, name: str, plan: Plan, num_batches: int) -> float:
    """The worst distance of a weight from plain SGD's with the mean in float64, in units of its rounding.

    The sum of n gradients, its product and the step each round, and so does every later micro-batch's sum: with m
    micro-batches n + m + 1 times half a unit in the last place.
    """
    case = replace(all_cases(num_batches)[name], make_optimizer=partial(torch.optim.SGD, lr=_RATE), groups=one_group)
    plain = prepare(uncached(case.build()), rank)
    torch.manual_seed(SEED + rank)
    batches = batches_of(case, rank, plan.num_ranks, plan.micro_batches, 1)[0]
    means = [torch.zeros_like(parameter, dtype=torch.float64) for parameter in plain.parameters()]
    sizes = [torch.zeros_like(mean) for mean in means]
    for batch in batches:
        case.loss(plain, batch).backward()
        for mean, size, parameter in zip(means, sizes, plain.parameters(), strict=True):
            if parameter.grad is not None:
                mean += parameter.grad.double() / plan.num_ranks
                size += parameter.grad.double().abs() / plan.num_ranks
        plain.zero_grad()
    model = prepare(case.build(), rank)
    with carry_out(
        model, plan, case.workload, optimizer=case.make_optimizer, parameter_groups=case.groups(model)
    ) as training:
        torch.manual_seed(SEED + rank)
        for batch in held(case, batches):
            case.loss(model, batch).backward()
        training.step()
    worst = 0.0
    for own, parameter, mean, size in zip(model.parameters(), plain.parameters(), means, sizes, strict=True):
        dist.all_reduce(mean)
        dist.all_reduce(size)
        if not parameter.requires_grad:
            mean.zero_()
        eps = torch.finfo(parameter.dtype).eps
        bound = (
            _RATE * (plan.num_ranks + plan.micro_batches + 1) * eps * size
            + eps * parameter.detach().double().abs()
            + 1e-30
        )
        gap = (own.detach().double() - (parameter.detach().double() - _RATE * mean)).abs()
        worst = max(worst, float((gap / bound).max()))
    return worst


@in_default_group
def weights_hash(rank: int, name: str, plan: Plan, num_batches: int, steps: int = STEPS) -> str:
    """Of all weights after training."""
    case = all_cases(num_batches)[name]
    model = prepare(case.build(), rank)
    run(case, model, plan, rank, CpuDevice(), steps=steps)
    digest = hashlib.sha256()
    for parameter in model.parameters():
        digest.update(parameter.detach().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


@in_default_group
def norms(rank: int, name: str, plan: Plan, num_batches: int) -> tuple[float, float, int]:
    """The norm of the first step's gradients, as ranks add it up and as torch takes it, and of how many scalars."""
    case = all_cases(num_batches)[name]
    found: list[float] = []
    clip_by = PlacedModel.clip_by

    def noting(self: PlacedModel, squares: torch.Tensor) -> ClippedNorm:
        clipped = clip_by(self, squares)
        found.append(float(clipped.norm))
        return clipped

    with mock.patch.object(PlacedModel, "clip_by", noting):
        run(case, prepare(case.build(), rank), plan, rank, CpuDevice())
    model = prepare(uncached(case.build()), rank)
    torch.manual_seed(SEED + rank)
    (batch,) = batches_of(case, rank, plan.num_ranks, 1)[0]
    case.loss(model, batch).backward()
    for parameter in model.parameters():
        parameter.grad = averaged(parameter)
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    return found[0], float(norm), sum(p.numel() for p in model.parameters())
