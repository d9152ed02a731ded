"""Training on a GPU by a plan, and the plain loop that it must equal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from protwin.runtime import CudaDevice, Training, TrainingDevice, carry_out
from protwin.shared.layout.layout import build_layout
from protwin.shared.schema.plan import ActivationMode, Plan, mode_counts
from tests.runtime.models import SEED, Batch, Case, snapshot, uncached

DEVICE = torch.device("cuda", 0)
KEEP, CHECKPOINT, SWAP = ActivationMode.KEEP, ActivationMode.CHECKPOINT, ActivationMode.SWAP
SELECTIVE = ActivationMode.SELECTIVE


def make_device(budget_bytes: int | None = None) -> TrainingDevice:
    """The device under test."""
    return CudaDevice(budget_bytes=budget_bytes)


def on_device(batch: Batch) -> dict[str, torch.Tensor]:
    """The batch where the model runs."""
    return {name: tensor.to(DEVICE) for name, tensor in batch.items()}


def plan_of(
    case: Case, modes: Sequence[ActivationMode], *, persistent: float = 0.0, chunk_bytes: int = 9_000, **changes: Any
) -> Plan:
    """A plan with ``modes``, over and over, and a share of the chunks on the device for good."""
    blocks = case.workload.num_blocks
    layout = build_layout(case.workload.parameters, num_blocks=blocks, chunk_bytes=chunk_bytes)
    n_persist = round(persistent * len(layout.chunks))
    fewest = layout.min_buffers(n_persist)
    chosen = tuple(modes[block % len(modes)] for block in range(blocks))
    counts: dict[str, Any] = mode_counts(chosen)
    return Plan(
        workload_id=case.workload.identity,
        chunk_bytes=chunk_bytes,
        n_persist=n_persist,
        n_buffer=fewest + 1 if fewest else 0,
        prefetch_depth=changes.pop("prefetch_depth", 2),
        activation_modes=chosen,
        **counts,
        **changes,
    )


def offloaded_names(case: Case, plan: Plan) -> set[str]:
    """The parameters whose home is the host."""
    workload = case.workload
    layout = build_layout(workload.parameters, num_blocks=workload.num_blocks, chunk_bytes=plan.chunk_bytes)
    persistent = layout.persistent(plan.n_persist)
    chunks = [chunk for chunk in layout.chunks if chunk.id not in persistent]
    return {workload.parameters[placed.index].name for chunk in chunks for placed in chunk.parameters}


@dataclass
class Run:
    """What a training gave."""

    losses: list[float] = field(default_factory=list)
    weights: list[dict[str, torch.Tensor]] = field(default_factory=list)
    """On the host, before the first step and, of the plain loop, after every one."""


def train_plainly(case: Case, *, on_host: set[str], micro_batches: int = 1, max_norm: float | None = None) -> Run:
    """The loop that everybody writes, with the weights ``on_host`` stepped by the CPU's AdamW.

    AdamW of the CPU and of the GPU round differently, so that only where both loops step alike bits can be equal.
    """
    model = uncached(case.build()).to(DEVICE)
    masters = _masters(model, on_host)
    groups = case.groups(model)
    optimizers = []
    for is_host in (True, False):
        of_place = [
            group | {"params": [masters[p] for p in group["params"] if (masters[p].device.type == "cpu") is is_host]}
            for group in groups
        ]
        optimizers += (
            [case.make_optimizer([g for g in of_place if g["params"]])] if any(g["params"] for g in of_place) else []
        )
    run = Run(weights=[host_snapshot(model)])
    torch.manual_seed(SEED)
    for batches in case.steps(micro_batches):
        for batch in batches:
            loss = case.loss(model, on_device(batch))
            loss.backward()
            run.losses.append(loss.item())
        if max_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        _step(masters, optimizers)
        run.weights.append(host_snapshot(model))
    return run


def _masters(model: nn.Module, on_host: set[str]) -> dict[nn.Parameter, torch.Tensor]:
    """What is stepped in the place of each trainable parameter; itself where it is float32 and stays."""
    found: dict[nn.Parameter, torch.Tensor] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            stays = name not in on_host
            master = parameter.detach().to(DEVICE if stays else "cpu", torch.float32, copy=True)
            found[parameter] = parameter if stays and parameter.dtype == torch.float32 else master
    return found


def _step(masters: dict[nn.Parameter, torch.Tensor], optimizers: list[torch.optim.Optimizer]) -> None:
    for parameter, master in masters.items():
        if master is not parameter:
            master.grad = None if parameter.grad is None else parameter.grad.to(master.device, torch.float32)
    for optimizer in optimizers:
        optimizer.step()
    with torch.no_grad():
        for parameter, master in masters.items():
            if master is not parameter and master.grad is not None:
                parameter.copy_(master)
            parameter.grad = master.grad = None


def host_snapshot(model: nn.Module) -> dict[str, torch.Tensor]:
    """Copies of all parameters and buffers on the host."""
    return {name: tensor.cpu() for name, tensor in snapshot(model).items()}


def train(case: Case, plan: Plan, training: Training, model: nn.Module) -> Run:
    """All steps of ``case`` by ``plan``; the weights when the training is closed are the caller's to take."""
    run = Run()
    torch.manual_seed(SEED)
    for batches in case.steps(plan.micro_batches):
        for batch in batches:
            loss = case.loss(model, on_device(batch))
            loss.backward()
            run.losses.append(loss.item())
        training.step()
    return run


def carried_out(case: Case, plan: Plan) -> tuple[Run, Training]:
    """A whole training by ``plan``; closed."""
    model = case.build()
    training = carry_out(
        model,
        plan,
        case.workload,
        optimizer=case.make_optimizer,
        parameter_groups=case.groups(model),
        device=make_device(),
    )
    with training:
        run = train(case, plan, training, model)
    run.weights = [host_snapshot(model)]
    return run, training


def differing(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> list[str]:
    """Names of what is not bit for bit as expected."""
    assert found.keys() == expected.keys()
    return [name for name, tensor in found.items() if not torch.equal(tensor, expected[name])]
