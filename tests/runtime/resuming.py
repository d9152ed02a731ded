"""Trainings that are saved under one plan and resumed under another."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from protwin.runtime import Training, carry_out
from protwin.shared.layout.layout import build_layout
from protwin.shared.schema.plan import Plan
from protwin.shared.schema.workload import Workload
from tests.runtime.models import SEED, STEPS, Case, differences


def plan_of(
    workload: Workload, *, chunk_bytes: int, n_persist: int | None, n_host_stepped: int = 0, n_checkpoint: int = 0
) -> Plan:
    """``n_persist`` None keeps every chunk persistent; no more are stepped on the host than there are."""
    layout = build_layout(workload.parameters, num_blocks=workload.num_blocks, chunk_bytes=chunk_bytes)
    persistent = len(layout.chunks) if n_persist is None else n_persist
    on_host = min(n_host_stepped, len(layout.chunks) - persistent)
    spare = 1 if n_persist is not None else 0
    return Plan(
        workload_id=workload.identity,
        chunk_bytes=chunk_bytes,
        n_persist=persistent,
        n_host_stepped=on_host,
        n_buffer=min(layout.min_buffers(persistent + on_host) + spare, len(layout.chunks) - persistent - on_host),
        prefetch_depth=1 + spare,
        n_checkpoint=n_checkpoint,
    )


def kept(workload: Workload) -> Plan:
    """Everything persistent."""
    return plan_of(workload, chunk_bytes=2**20, n_persist=None)


def offloaded(workload: Workload) -> Plan:
    """As much offloaded as can be, in small chunks, blocks checkpointed."""
    return plan_of(workload, chunk_bytes=12_000, n_persist=0, n_checkpoint=2)


def mixed(workload: Workload) -> Plan:
    """Something of everything, in chunks of another size."""
    return plan_of(workload, chunk_bytes=17_000, n_persist=2, n_host_stepped=2, n_checkpoint=1)


def on_disk(workload: Workload) -> Plan:
    """All optimizer state on a disk, and most parameters, behind two chunks that stay."""
    plan = plan_of(workload, chunk_bytes=14_000, n_persist=2)
    num_chunks = len(build_layout(workload.parameters, num_blocks=workload.num_blocks, chunk_bytes=14_000).chunks)
    return plan.model_copy(update={"n_disk_state": num_chunks - 2, "n_disk": num_chunks - 4, "n_staging": 2})


def disturb() -> None:
    """Leave every random generator somewhere else."""
    random.seed(99)
    np.random.seed(99)
    torch.manual_seed(99)


def other_weights(model: nn.Module) -> nn.Module:
    """``model`` with weights that are not to be trusted."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(0.25)
    return model


def start(case: Case, model: nn.Module, plan: Plan, **changes: Any) -> Training:
    chosen: dict[str, Any] = {"optimizer": case.make_optimizer, "parameter_groups": case.groups(model)} | changes
    return carry_out(model, plan, case.workload, **chosen)


def train(case: Case, model: nn.Module, training: Training, first: int, last: int) -> list[float]:
    losses = []
    for batch in case.batches[first:last]:
        loss = case.loss(model, batch)
        loss.backward()
        training.step()
        losses.append(loss.item())
    return losses


def saved_after(case: Case, plan: Plan, steps: int, folder: Path, **changes: Any) -> list[float]:
    """Train and save; gives the losses."""
    model = case.build()
    with start(case, model, plan, **changes) as training:
        torch.manual_seed(SEED)
        losses = train(case, model, training, 0, steps)
        training.save(folder, data_position={"batch": steps})
    return losses


def resumed(case: Case, plan: Plan, folder: Path, **changes: Any) -> tuple[list[float], nn.Module]:
    """Resume and train to the end; gives the losses and the model."""
    model = other_weights(case.build())
    with start(case, model, plan, **changes) as training:
        disturb()
        found = training.resume(folder)
        assert training.num_steps == found.step == found.data_position["batch"]
        losses = train(case, model, training, found.step, STEPS)
        assert training.num_steps == STEPS
    return losses, model


def check_resumption(case: Case, before: Plan, after: Plan, folder: Path, *, steps: int = 2, **changes: Any) -> None:
    losses = saved_after(case, before, steps, folder, **changes)
    more, model = resumed(case, after, folder, **changes)
    assert losses + more == case.plain.losses
    assert differences(model, case.plain.weights[-1]) == []


def sgd(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    return torch.optim.SGD(groups, lr=0.1, momentum=0.9, nesterov=True)


def same_bits(one: Any, other: Any) -> bool:
    """Whether two nests of tables, lists and tensors are equal, bit for bit."""
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same_bits(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(same_bits(a, b) for a, b in zip(one, other, strict=True))
    return bool(one == other)
