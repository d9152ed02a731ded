"""Training by a plan with shard groups beside plain PyTorch that adds gradients up in the same two levels."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from protwin.runtime import CpuDevice, Training
from protwin.runtime.chunks.sharded_chunk import ShardedChunk
from protwin.runtime.lanes.rank_work import RankWork
from protwin.shared.compile.compile import compile_schedule
from protwin.shared.layout.layout import build_layout
from protwin.shared.layout.residencies import ChunkResidency, residencies
from protwin.shared.schema.plan import Plan
from protwin.shared.verify.guaranteed_peak import guaranteed_device_peak
from tests.runtime.models import SEED, Case, Masters, differences, snapshot, uncached
from tests.runtime.ranks.beside_ddp import (
    STEPS,
    all_cases,
    batches_of,
    has_parts,
    in_default_group,
    limited,
    prepare,
    run,
    share_buffers,
)
from tests.runtime.ranks.saving import start, steps_of
from tests.runtime.resuming import disturb, other_weights
from tests.runtime.saved_models import on_meta


@dataclass(frozen=True)
class Grouped:
    """What a training by a plan gave on one rank."""

    losses: list[float]
    expected_losses: list[float]
    different: list[str]
    different_in_state: list[str]
    """Of what the first rank reads while training is open."""
    peak_bytes: int
    guaranteed_bytes: int


@in_default_group
def train_grouped(rank: int, name: str, plan: Plan, num_batches: int, steps: int = STEPS, variant: str = "") -> Grouped:
    """Train on a device of just the memory that is guaranteed to be enough; ``variant``: one of ``WRONG``."""
    case = all_cases(num_batches)[name]
    expected_losses, expected = by_hand(rank, name, plan, num_batches, steps)
    guaranteed_bytes = guaranteed_device_peak(compile_schedule(plan, case.workload)).size_bytes
    model = prepare(case.build(), rank)
    states: list[dict[str, Any]] = []

    def read(training: Training) -> None:
        states.append(training.state_dict())

    with WRONG[variant]():
        training, losses = run(case, model, plan, rank, CpuDevice(guaranteed_bytes), read, steps=steps)
    (state,) = states
    assert bool(state) == (rank == 0)
    return Grouped(
        losses,
        expected_losses,
        differences(model, expected),
        [key for key in state if key in expected and not torch.equal(state[key], expected[key])],
        training.peak_device_bytes,
        guaranteed_bytes,
    )


def by_hand(
    rank: int, name: str, plan: Plan, num_batches: int, steps: int = STEPS
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses and weights of plain training: the means of [Note: Shard groups] in ``shared/compile/compile.py``."""
    case, micro_batches = all_cases(num_batches)[name], plan.micro_batches
    model = prepare(uncached(case.build()), rank)
    where = _residencies(name, plan, num_batches)
    named = {key: p for key, p in model.named_parameters() if p.requires_grad}
    masters = Masters(model)
    optimizer = case.make_optimizer(masters.groups(case.groups(model)))
    losses = []
    torch.manual_seed(SEED + rank)
    for batches in batches_of(case, rank, plan.num_ranks, micro_batches, steps):
        sums: dict[str, torch.Tensor] = {}
        for batch in batches:
            loss = case.loss(model, batch)
            loss.backward()
            losses.append(loss.item())
            leaving = {key: p for key, p in named.items() if where[key] is not ChunkResidency.PERSISTENT}
            within = _within_groups(leaving, plan)
            offloaded = {key: own for key, own in within.items() if where[key] is ChunkResidency.OFFLOADED}
            for key, own in (within | _over_groups(offloaded, plan)).items():
                sums[key] = sums[key] + own if key in sums else own
            for parameter in leaving.values():
                parameter.grad = None
        staying = {key: p for key, p in named.items() if where[key] is ChunkResidency.PERSISTENT}
        parts = {key: total for key, total in sums.items() if where[key] is not ChunkResidency.OFFLOADED}
        means = sums | _over_groups(_within_groups(staying, plan) | parts, plan)
        for key, parameter in named.items():
            parameter.grad = means.get(key)
        if plan.max_gradient_norm is not None:
            limited(model, plan.max_gradient_norm, is_wide=has_parts(case, plan))
        masters.take_gradients()
        optimizer.step()
        optimizer.zero_grad()
        model.zero_grad()
        masters.give_weights()
        share_buffers(model)
    return losses, snapshot(model)


# -- files and checkpoints -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Stretch:
    """Some steps of a training in groups: how they begin, and what they leave behind."""

    plan: Plan
    values: str
    """Of the model: those of ``files``, or of ``rank 0`` while the other ranks have no memory for any."""
    last_step: int


@dataclass(frozen=True)
class Interrupted:
    """What a training that was stopped and gone on with gave on one rank."""

    losses: list[float]
    expected_losses: list[float]
    different: list[str]
    """Of the weights and buffers that are left on the rank."""
    different_in_state: list[str]
    """Of what the first rank reads while training is open, and all that any other rank reads."""
    peaks_bytes: list[int]
    guaranteed_bytes: list[int]


@in_default_group
def train_interrupted(
    rank: int, name: str, stretches: Sequence[Stretch], num_batches: int, folder: Path
) -> Interrupted:
    """Train by one stretch after the other: each saves, and the next one goes on from there with a model of its own.

    ``folder`` has the files of the first weights in ``base``, and gets checkpoints by the number of their stretch.
    """
    case = all_cases(num_batches)[name]
    expected_losses, expected = by_hand(rank, name, stretches[0].plan, num_batches, stretches[-1].last_step)
    losses: list[float] = []
    peaks_bytes, guaranteed_bytes = [], []
    for number, stretch in enumerate(stretches):
        plan = stretch.plan
        model, options = _begun(case, rank, stretch.values, folder / "base", is_first=number == 0)
        guaranteed_bytes.append(guaranteed_device_peak(compile_schedule(plan, case.workload)).size_bytes)
        with start(case, model, plan, device=CpuDevice(guaranteed_bytes[-1]), **options) as training:
            if number == 0:
                torch.manual_seed(SEED + rank)
            else:
                disturb()
                training.resume(folder / str(number - 1))
            losses += steps_of(case, model, training, rank, stretch.last_step)
            state = training.state_dict()
            training.save(folder / str(number))
        peaks_bytes.append(training.peak_device_bytes)
    # A rank without memory of its own is left without it; buffers are on all.
    left = {key: value for key, value in model.state_dict().items() if not value.is_meta}
    named = expected if rank == 0 else {key: value for key, value in expected.items() if key in left}
    return Interrupted(
        losses,
        expected_losses,
        [key for key, value in named.items() if not torch.equal(left[key], value)],
        [key for key, value in expected.items() if not torch.equal(state[key], value)] if rank == 0 else [*state],
        peaks_bytes,
        guaranteed_bytes,
    )


def _begun(case: Case, rank: int, values: str, files: Path, *, is_first: bool) -> tuple[nn.Module, dict[str, Any]]:
    """A model as ``values`` has it, and options of ``carry_out``; what is not the first has other weights."""
    model = prepare(case.build(), rank)
    if values == "files":
        return on_meta(model), {"weights": files}
    if rank == 0:
        return (model if is_first else other_weights(model)), {}
    return on_meta(model).to("meta"), {}


def scalars_written(folder: Path) -> tuple[dict[str, int], int, int]:
    """Of a checkpoint's tensors, as torch reads its index: how many scalars are written of each beside all it has.

    The bytes that the index knows of, and those of the files.
    """
    metadata = FileSystemReader(folder).read_metadata()
    beside = {
        name: sum(piece.sizes.numel() for piece in found.chunks) - found.size.numel()
        for name, found in metadata.state_dict_metadata.items()
        if isinstance(found, TensorStorageMetadata)
    }
    known_bytes = sum(info.length for info in metadata.storage_data.values())
    return beside, known_bytes, sum(file.stat().st_size for file in folder.glob("*.distcp"))


# -- by hand ---------------------------------------------------------------------------------------------------------


def _residencies(name: str, plan: Plan, num_batches: int) -> dict[str, ChunkResidency]:
    workload = all_cases(num_batches)[name].workload
    layout = build_layout(workload.parameters, num_blocks=workload.num_blocks, chunk_bytes=plan.chunk_bytes)
    found = residencies(plan, layout)
    return {
        workload.parameters[placed.index].name: found[chunk.id]
        for chunk in layout.chunks
        for placed in chunk.parameters
    }


def _of_all(own: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
    """The tensors of every rank, by rank: sent together, as bytes."""
    flat = torch.cat([tensor.contiguous().view(-1).view(torch.uint8) for tensor in own])
    every = [torch.empty_like(flat) for _ in range(dist.get_world_size())]
    dist.all_gather(every, flat)
    pieces = [one.split([tensor.nbytes for tensor in own]) for one in every]
    return [
        [piece.clone().view(tensor.dtype).view(tensor.shape) for piece, tensor in zip(of_rank, own, strict=True)]
        for of_rank in pieces
    ]


def _within_groups(parameters: Mapping[str, nn.Parameter], plan: Plan) -> dict[str, torch.Tensor]:
    """Sums of gradients over the rank's group, in the order of its ranks; without what no rank of any group has."""
    if not parameters:
        return {}
    gradients = [parameter.grad for parameter in parameters.values()]
    is_there = [torch.tensor([gradient is not None for gradient in gradients])]
    found = torch.stack([of_rank for (of_rank,) in _of_all(is_there)]).any(0).tolist()
    pairs = zip(parameters.values(), gradients, strict=True)
    mine = [torch.zeros_like(parameter) if gradient is None else gradient for parameter, gradient in pairs]
    first = dist.get_rank() // plan.num_shards * plan.num_shards
    totals = _added_up(_of_all([tensor.detach() for tensor in mine])[first : first + plan.num_shards])
    return {key: total for key, total, there in zip(parameters, totals, found, strict=True) if there}


def _over_groups(sums: Mapping[str, torch.Tensor], plan: Plan) -> dict[str, torch.Tensor]:
    """The means over all ranks, from the sums of groups in the order of these."""
    totals = _added_up(_of_all([*sums.values()])[:: plan.num_shards]) if sums else []
    return {key: total * (1 / plan.num_ranks) for key, total in zip(sums, totals, strict=True)}


def _added_up(of_ranks: Sequence[Sequence[torch.Tensor]]) -> list[torch.Tensor]:
    first, *others = of_ranks
    totals = [tensor.clone() for tensor in first]
    for other in others:
        totals = [total + tensor for total, tensor in zip(totals, other, strict=True)]
    return totals


# -- wrong variants --------------------------------------------------------------------------------------------------


@contextmanager
def _without_replicas() -> Iterator[None]:
    """Nothing is added up over groups."""

    def alone(self: RankWork, chunk: ShardedChunk, key: tuple[int, int, int]) -> None:
        for part in chunk.kept_parts() if chunk.is_on_device else self._parts.pop(key):
            part.mul_(self._share)

    with mock.patch.object(RankWork, "_replicate", alone):
        yield


@contextmanager
def _mean_of_the_group_alone() -> Iterator[None]:
    """Every group steps with the mean of its own ranks."""

    def alone(self: RankWork, chunk: ShardedChunk, key: tuple[int, int, int]) -> None:
        for part in chunk.kept_parts() if chunk.is_on_device else self._parts.pop(key):
            part.mul_(1 / self._collectives.shard.num_ranks)

    with mock.patch.object(RankWork, "_replicate", alone):
        yield


WRONG: Final[Mapping[str, Callable[[], AbstractContextManager[None]]]] = {
    "": nullcontext,
    "no sum over groups": _without_replicas,
    "the mean of one group": _mean_of_the_group_alone,
}
