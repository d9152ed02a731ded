"""Training by a plan for several ranks beside DistributedDataParallel, in the processes of the ranks."""

from __future__ import annotations

import gc
import hashlib
import os
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial, wraps
from typing import Any, ParamSpec, TypeVar
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from protwin.runtime import CpuDevice, Training, carry_out
from protwin.runtime.chunks.chunk import DeviceChunk
from protwin.runtime.chunks.placed_model import PlacedModel
from protwin.runtime.chunks.sharded_chunk import ShardedChunk
from protwin.runtime.model.nested_tensors import storage_bytes
from protwin.runtime.optimizers.gradient_norms import ClippedNorm
from protwin.runtime.ranks.launch import launch_of
from protwin.runtime.ranks.world import _make_default
from protwin.shared.compile.compile import compile_schedule
from protwin.shared.layout.layout import build_layout
from protwin.shared.layout.residencies import ChunkResidency, residencies
from protwin.shared.layout.shards import regions
from protwin.shared.schema.plan import ParallelMode, Plan
from protwin.shared.schema.schedule import Content, Memory
from protwin.shared.verify.guaranteed_peak import guaranteed_device_peak
from tests.runtime.accounts import error_frac
from tests.runtime.eager_lanes import WATCHED, eager_peak, settled_lanes
from tests.runtime.families import family_cases
from tests.runtime.models import (
    SEED,
    Batch,
    Case,
    HandWritten,
    Masters,
    cases,
    differences,
    held,
    llama,
    one_group,
    point_batches,
    snapshot,
    three_groups,
    token_batches,
    uncached,
)

STEPS = 3
_Parameters = ParamSpec("_Parameters")
_Result = TypeVar("_Result")


class Gated(HandWritten):
    """Some of its blocks may leave their gate out: then the parameter has no gradient on this rank."""

    def __init__(self) -> None:
        super().__init__()
        for layer in self.stack:
            layer.gate = nn.Parameter(torch.randn(24))
            layer.uses_gate = True
            layer.register_forward_hook(_gated)


def _gated(layer: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
    return output * layer.gate if layer.uses_gate else output


def _gates(model: nn.Module, rank: int) -> None:
    """On each rank other gates are open; the last block's on none but rank 0, the first one's on none."""
    for number, layer in enumerate(model.stack):
        layer.uses_gate = number > 0 and (rank == 0 or number % 2 == 1) and number < len(model.stack)


def _gated_model() -> nn.Module:
    torch.manual_seed(SEED)
    return Gated()


def in_default_group(function: Callable[_Parameters, _Result]) -> Callable[_Parameters, _Result]:
    """``function`` on every rank within a default group, which goes with it: other tests begin without one."""

    @wraps(function)
    def within(*args: _Parameters.args, **kwargs: _Parameters.kwargs) -> _Result:
        launch = launch_of(os.environ)
        assert launch is not None
        _make_default(launch, 60.0)
        try:
            return function(*args, **kwargs)
        finally:
            dist.destroy_process_group()

    return within


@lru_cache
def all_cases(num_batches: int) -> dict[str, Case]:
    """Those of one rank, those of the families, and one whose ranks use other parameters."""
    gated = Case(_gated_model, point_batches(num_batches), has_loss=False)
    # No parameter of it leaves room behind itself in a chunk: a rank's part has no padding.
    wide = Case(
        lambda: llama(hidden_size=64, intermediate_size=128, num_layers=3), token_batches(num_batches), three_groups
    )
    return {**cases(num_batches), **family_cases(num_batches), "gated": gated, "llama, 64 wide": wide}


def prepare(model: nn.Module, rank: int) -> nn.Module:
    if isinstance(model, Gated):
        _gates(model, rank)
    return model


def batches_of(case: Case, rank: int, num_ranks: int, micro_batches: int, steps: int = STEPS) -> list[Sequence[Batch]]:
    """The rank's batches of every step, others than any other rank's."""
    own = [*case.batches][rank::num_ranks]
    return [[own[(step * micro_batches + m) % len(own)] for m in range(micro_batches)] for step in range(steps)]


@dataclass(frozen=True)
class Reference:
    losses: list[float]
    weights: dict[str, torch.Tensor]
    norms: list[float]


class ByHand(nn.Module):
    """What ranks do with gradients, without DDP: those that leave are averaged in every micro-batch."""

    def __init__(self, model: nn.Module, leaving: frozenset[str]) -> None:
        super().__init__()
        named = dict(model.named_parameters())
        self._sums: dict[str, torch.Tensor] = {}
        self._named = {name: p for name, p in named.items() if p.requires_grad}
        self._leaving = leaving

    def end_micro_batch(self, *, is_last: bool) -> None:
        for name, parameter in self._named.items():
            if name in self._leaving or is_last:
                parameter.grad = averaged(parameter)
            if name in self._leaving and parameter.grad is not None:
                before = self._sums.get(name)
                self._sums[name] = parameter.grad if before is None else before + parameter.grad
                parameter.grad = None
        if is_last:
            for name, total in self._sums.items():
                self._named[name].grad = total
            self._sums = {}


def limited(model: nn.Module, max_norm: float, *, is_wide: bool) -> float:
    """Limit the norm of all gradients, as torch does; ``is_wide``: taken in float64, as ranks with parts add it up."""
    parameters = [p for p in model.parameters() if p.grad is not None]
    if not is_wide:
        return float(nn.utils.clip_grad_norm_(parameters, max_norm))
    norm = torch.cat([p.grad.double().flatten() for p in parameters]).norm().float()
    for parameter in parameters:
        parameter.grad.mul_(torch.clamp(max_norm / (norm + 1e-6), max=1.0))
    return float(norm)


def averaged(parameter: nn.Parameter) -> torch.Tensor | None:
    gradient = parameter.grad
    is_there = torch.tensor(float(gradient is not None))
    dist.all_reduce(is_there)
    if not is_there:
        return None
    mine = torch.zeros_like(parameter) if gradient is None else gradient.detach().clone()
    mine = mine / dist.get_world_size()
    dist.all_reduce(mine)
    return mine


_references: dict[Any, Reference] = {}


def reference(name: str, rank: int, plan: Plan, num_batches: int, steps: int = STEPS) -> Reference:
    """With one micro-batch DDP itself; else ``ByHand``."""
    case = all_cases(num_batches)[name]
    leaving = leaving_names(case, plan) if plan.micro_batches > 1 else frozenset()
    is_wide = plan.parallel is ParallelMode.SHARDED and has_parts(case, plan)
    key = (name, num_batches, steps, plan.micro_batches, plan.max_gradient_norm, leaving, is_wide)
    if key not in _references:
        _references[key] = _trained(case, rank, plan, leaving, steps, is_wide=is_wide)
    return _references[key]


def _trained(case: Case, rank: int, plan: Plan, leaving: frozenset[str], steps: int, *, is_wide: bool) -> Reference:
    micro_batches, max_norm = plan.micro_batches, plan.max_gradient_norm
    model = prepare(uncached(case.build()), rank)
    masters = Masters(model)
    optimizer = case.make_optimizer(masters.groups(case.groups(model)))
    called: nn.Module = model
    by_hand = None
    if micro_batches == 1:
        with warnings.catch_warnings():
            # Newer torch has another name for the option, which older torch does not know.
            warnings.simplefilter("ignore", FutureWarning)
            called = DistributedDataParallel(model, broadcast_buffers=False, find_unused_parameters=True)
    else:
        by_hand = ByHand(model, leaving)
    losses, norms = [], []
    torch.manual_seed(SEED + rank)
    for batches in batches_of(case, rank, dist.get_world_size(), micro_batches, steps):
        for number, batch in enumerate(batches):
            loss = case.loss(called, batch)
            loss.backward()
            losses.append(loss.item())
            if by_hand is not None:
                by_hand.end_micro_batch(is_last=number == micro_batches - 1)
        if max_norm is not None:
            norms.append(limited(model, max_norm, is_wide=is_wide))
        masters.take_gradients()
        optimizer.step()
        optimizer.zero_grad()
        model.zero_grad()
        masters.give_weights()
    return Reference(losses, snapshot(model), norms)


def leaving_names(case: Case, plan: Plan) -> frozenset[str]:
    """The parameters whose gradients leave the device."""
    workload = case.workload
    layout = build_layout(workload.parameters, num_blocks=workload.num_blocks, chunk_bytes=plan.chunk_bytes)
    found = residencies(plan, layout)
    return frozenset(
        workload.parameters[placed.index].name
        for chunk in layout.chunks
        if found[chunk.id] is not ChunkResidency.PERSISTENT
        for placed in chunk.parameters
    )


def has_parts(case: Case, plan: Plan) -> bool:
    """Whether ranks have parts of gradients."""
    names = leaving_names(case, plan)
    return any(parameter.trainable and parameter.name in names for parameter in case.workload.parameters)


@dataclass(frozen=True)
class Found:
    """What a training by a plan gave on one rank."""

    losses: list[float]
    expected_losses: list[float]
    different: list[str]
    worst: float
    """The largest difference of a weight, as a part of the largest weight."""
    peak_bytes: int
    guaranteed_bytes: int
    num_cpu_adam_steps: int
    to_host_bytes: int
    has_bound: bool
    """Whether the limit of the norm changed a step."""


@in_default_group
def train(rank: int, name: str, plan: Plan, num_batches: int, steps: int = STEPS) -> Found:
    """Train on a device of just the memory that is guaranteed to be enough, beside the reference."""
    case = all_cases(num_batches)[name]
    expected = reference(name, rank, plan, num_batches, steps)
    guaranteed_bytes = guaranteed_device_peak(compile_schedule(plan, case.workload)).size_bytes
    model = prepare(case.build(), rank)
    training, losses = run(case, model, plan, rank, CpuDevice(guaranteed_bytes), steps=steps)
    state = snapshot(model)
    scale = max(float(value.abs().max()) for value in expected.weights.values() if value.numel())
    gaps = [(state[n].double() - value.double()).abs().max().item() for n, value in expected.weights.items()]
    return Found(
        losses,
        expected.losses,
        differences(model, expected.weights),
        max(gaps) / scale,
        training.peak_device_bytes,
        guaranteed_bytes,
        training.num_cpu_adam_steps,
        training.bytes_device_to_host,
        any(norm > plan.max_gradient_norm for norm in expected.norms if plan.max_gradient_norm is not None),
    )


def run(
    case: Case,
    model: nn.Module,
    plan: Plan,
    rank: int,
    device: CpuDevice,
    within: Callable[[Training], Any] | None = None,
    *,
    steps: int = STEPS,
    **options: Any,
) -> tuple[Training, list[float]]:
    losses = []
    with carry_out(
        model,
        plan,
        case.workload,
        optimizer=case.make_optimizer,
        parameter_groups=case.groups(model),
        device=device,
        **options,
    ) as training:
        torch.manual_seed(SEED + rank)
        for batches in batches_of(case, rank, plan.num_ranks, plan.micro_batches, steps):
            for batch in held(case, batches):
                loss = case.loss(model, batch)
                loss.backward()
                losses.append(loss.item())
            training.step()
        if within is not None:
            within(training)
    return training, losses


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
            count, item_bytes = region.shard_elements(plan.num_ranks), region.dtype.item_bytes
            shard = range(rank * count, (rank + 1) * count)
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
    for optimizer in placed._host_optimizers.values():
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


_RATE = 0.5


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
