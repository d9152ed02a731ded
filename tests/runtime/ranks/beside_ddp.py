"""Training by a plan for several ranks beside DistributedDataParallel, in the processes of the ranks."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial, wraps
from typing import Any, ParamSpec, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from protwin.runtime import CpuDevice, Training, add_lora, carry_out, make_orthogonal, project_gradients
from protwin.runtime.ranks.launch import launch_of
from protwin.runtime.ranks.world import _make_default
from protwin.shared.compile.compile import compile_schedule
from protwin.shared.layout.layout import layout_of
from protwin.shared.layout.residencies import STEPPED_BY_HOST, ChunkResidency, residencies
from protwin.shared.schema.plan import ParallelMode, Plan, ProjectionPlace
from protwin.shared.schema.workload import Workload
from protwin.shared.verify.guaranteed_peak import guaranteed_device_peak
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
from tests.runtime.quantized.models import quantized_cases

STEPS = 3
OF_PEFT = ("DoRA", "head and embedding saved")
STEADY = "gated, without dropout"
_Parameters = ParamSpec("_Parameters")
_Result = TypeVar("_Result")


class Gated(HandWritten):
    """Some of its blocks may leave their gate out: then the parameter has no gradient on this rank."""

    def __init__(self) -> None:
        super().__init__()
        layer: Any
        for layer in self.stack:
            layer.gate = nn.Parameter(torch.randn(24))
            layer.uses_gate = True
            layer.register_forward_hook(_gated)


def _gated(layer: Any, args: Any, output: torch.Tensor) -> torch.Tensor:
    return output * layer.gate if layer.uses_gate else output


def _gates(model: Any, rank: int) -> None:
    """On each rank other gates are open; the last block's on none but rank 0, the first one's on none."""
    for number, layer in enumerate(model.stack):
        layer.uses_gate = number > 0 and (rank == 0 or number % 2 == 1) and number < len(model.stack)


def _gated_model() -> nn.Module:
    torch.manual_seed(SEED)
    return Gated()


def _gated_model_without_dropout() -> nn.Module:
    model: Any = _gated_model()
    for layer in model.stack:
        layer.dropout.p = 0.0
    return model


def _factorised_model() -> nn.Module:
    model = _gated_model()
    make_orthogonal(model, unfreeze_rank_ratio=0.4, targets=["stack.*.up", "stack.*.down"])
    return model


def _of_peft(kind: str) -> nn.Module:
    from tests.runtime.adapters.peft_kinds import KINDS, adapted  # PEFT takes seconds to import

    return adapted(partial(llama, num_layers=3), KINDS[kind])


def _factorised(build: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(SEED)
    model = build()
    make_orthogonal(model, unfreeze_rank_ratio=0.4)
    return model


def _adapted(build: Callable[[], nn.Module]) -> nn.Module:
    model = build()
    add_lora(model, rank=4)
    return model


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


_made: dict[int, dict[str, Case]] = {}


def all_cases(num_batches: int) -> dict[str, Case]:
    """Those of one rank, those of the families, and one whose ranks use other parameters."""
    if num_batches not in _made:
        _made[num_batches] = _all_cases(num_batches)
    return _made[num_batches]


def traced_workloads() -> dict[tuple[int, str], Workload]:
    """Of all cases that this process has traced, by number of batches and name."""
    return {
        (num_batches, name): case.workload
        for num_batches, made in _made.items()
        for name, case in made.items()
        if "workload" in vars(case)
    }


def take_workloads(workloads: Mapping[tuple[int, str], Workload]) -> None:
    """Those that another process has traced, so that this one need not."""
    for (num_batches, name), workload in workloads.items():
        vars(all_cases(num_batches)[name]).setdefault("workload", workload)


def _all_cases(num_batches: int) -> dict[str, Case]:
    gated = Case(_gated_model, point_batches(num_batches), has_loss=False)
    # Random numbers would be drawn when a stand-in for a device comes to it.
    steady = replace(gated, build=_gated_model_without_dropout)
    # No parameter of it leaves room behind itself in a chunk: a rank's part has no padding.
    wide = Case(
        lambda: llama(hidden_size=64, intermediate_size=128, num_layers=3), token_batches(num_batches), three_groups
    )
    return {
        "packed": quantized_cases(num_batches)["nf4, double"],
        **cases(num_batches),
        **family_cases(num_batches),
        "gated": gated,
        "gated, without dropout": steady,
        "gated, factorised": replace(gated, build=_factorised_model),
        "llama in bfloat16, factorised": Case(
            partial(_factorised, lambda: llama().to(torch.bfloat16)), token_batches(num_batches)
        ),
        "llama, 64 wide, factorised": replace(wide, build=partial(_factorised, wide.build)),
        "llama, 64 wide": wide,
        "llama, 64 wide, adapted": replace(wide, build=partial(_adapted, wide.build), groups=one_group),
        **{f"PEFT, {kind}": Case(partial(_of_peft, kind), token_batches(num_batches)) for kind in OF_PEFT},
    }


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

    def __init__(self, model: nn.Module, leaving: frozenset[str], widened: frozenset[str] = frozenset()) -> None:
        super().__init__()
        named = dict(model.named_parameters())
        self._sums: dict[str, torch.Tensor] = {}
        self._named = {name: p for name, p in named.items() if p.requires_grad}
        self._leaving, self._widened = leaving, widened
        self.wide: dict[nn.Parameter, torch.Tensor] = {}
        """Sums in float32 of the latest step, which no narrow parameter has for its gradient."""

    def end_micro_batch(self, *, is_last: bool) -> None:
        for name, parameter in self._named.items():
            if name in self._leaving or is_last:
                parameter.grad = averaged(parameter)
            if name in self._leaving and parameter.grad is not None:
                before = self._sums.get(name)
                own = parameter.grad.float() if name in self._widened else parameter.grad
                self._sums[name] = own if before is None else before + own
                parameter.grad = None
        if is_last:
            self.wide = {self._named[name]: total for name, total in self._sums.items() if name in self._widened}
            for name, total in self._sums.items():
                if name not in self._widened:
                    self._named[name].grad = total
            self._sums = {}


def limited(model: nn.Module, max_norm: float, *, is_wide: bool) -> float:
    """Limit the norm of all gradients, as torch does; ``is_wide``: taken in float64, as ranks with parts add it up."""
    parameters = [p for p in model.parameters() if p.grad is not None]
    gradients = [p.grad for p in parameters if p.grad is not None]
    if not is_wide:
        return float(nn.utils.clip_grad_norm_(parameters, max_norm))
    norm = torch.cat([gradient.double().flatten() for gradient in gradients]).norm().float()
    for gradient in gradients:
        gradient.mul_(torch.clamp(max_norm / (norm + 1e-6), max=1.0))
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
    key = (
        name,
        num_batches,
        steps,
        plan.micro_batches,
        plan.max_gradient_norm,
        leaving,
        widened_names(case, plan),
        is_wide,
    )
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
            called = DistributedDataParallel(model, find_unused_parameters=True)
    else:
        by_hand = ByHand(model, leaving, widened_names(case, plan))
    losses, norms = [], []
    torch.manual_seed(SEED + rank)
    for batches in batches_of(case, rank, dist.get_world_size(), micro_batches, steps):
        for number, batch in enumerate(batches):
            loss = case.loss(called, batch)
            loss.backward()
            losses.append(loss.item())
            if by_hand is not None:
                by_hand.end_micro_batch(is_last=number == micro_batches - 1)
        project_gradients(model)
        if max_norm is not None:
            norms.append(limited(model, max_norm, is_wide=is_wide))
        masters.take_gradients(by_hand.wide if by_hand is not None else None)
        optimizer.step()
        optimizer.zero_grad()
        model.zero_grad()
        masters.project(model)
        masters.give_weights()
        if by_hand is not None:
            share_buffers(model)
    # DDP does so before the next forward.
    share_buffers(model)
    return Reference(losses, snapshot(model), norms)


def share_buffers(model: nn.Module) -> None:
    """Those of rank 0, for all."""
    for buffer in model.buffers():
        sent = buffer.contiguous()
        dist.broadcast(sent, 0)
        buffer.copy_(sent)


def leaving_names(case: Case, plan: Plan) -> frozenset[str]:
    """The parameters whose gradients leave the device in every micro-batch."""
    workload = case.workload
    layout = layout_of(workload, plan.chunk_bytes)
    found = residencies(plan, layout)
    stay = plan.projects_gradients_on is ProjectionPlace.DEVICE
    return frozenset(
        workload.parameters[placed.index].name
        for chunk in layout.chunks
        if found[chunk.id] is not ChunkResidency.PERSISTENT and not (stay and chunk.subspaces)
        for placed in chunk.parameters
    )


def widened_names(case: Case, plan: Plan) -> frozenset[str]:
    """Narrow parameters whose gradients hosts add up in float32."""
    if not plan.widens_on_host:
        return frozenset()
    assert plan.max_gradient_norm is None, "the norm of what no parameter has is not taken here"
    workload = case.workload
    layout = layout_of(workload, plan.chunk_bytes)
    found = residencies(plan, layout)
    return frozenset(
        workload.parameters[placed.index].name
        for chunk in layout.chunks
        if found[chunk.id] in STEPPED_BY_HOST
        for placed in chunk.parameters
        if workload.parameters[placed.index].dtype.item_bytes < 4
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
