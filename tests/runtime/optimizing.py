"""A model by hand under every optimizer and scheduler, and plans that offload half of it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from hypothesis import strategies as st
from torch import nn
from torch.optim import lr_scheduler

from protwin.shared.layout.layout import build_layout
from protwin.shared.schema.plan import Plan
from protwin.shared.schema.workload import Workload
from tests.runtime.models import Case, hand_written, point_batches

STEPS = 6
MakeOptimizer = Callable[[list[dict[str, Any]]], torch.optim.Optimizer]
MakeScheduler = Callable[[torch.optim.Optimizer], Any]

OPTIMIZERS: dict[str, MakeOptimizer] = {
    "AdamW": partial(torch.optim.AdamW, lr=1e-2, fused=True),
    "Adam": partial(torch.optim.Adam, lr=1e-2, weight_decay=0.01, fused=True),
    "SGD": partial(torch.optim.SGD, lr=1e-2, momentum=0.9, nesterov=True, fused=True),
}
SCHEDULERS: dict[str, MakeScheduler] = {
    "lambda": partial(lr_scheduler.LambdaLR, lr_lambda=[lambda n: 1 / (n + 1), lambda n: 0.5**n]),
    "cosine": partial(lr_scheduler.CosineAnnealingLR, T_max=4),
    "one cycle": partial(lr_scheduler.OneCycleLR, max_lr=[3e-2, 1e-2], total_steps=STEPS + 1),
    "plateau": partial(lr_scheduler.ReduceLROnPlateau, factor=0.3, patience=0, threshold=0.5),
    "warm up, then cosine": lambda optimizer: lr_scheduler.SequentialLR(
        optimizer,
        [
            lr_scheduler.LinearLR(optimizer, start_factor=0.1, total_iters=3),
            lr_scheduler.CosineAnnealingLR(optimizer, T_max=3),
        ],
        milestones=[3],
    ),
}


def two_groups(model: nn.Module) -> list[dict[str, Any]]:
    """Matrices decay, at a rate of their own."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    return [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": 0.3, "lr": 2e-2},
        {"params": [p for p in parameters if p.dim() <= 1], "weight_decay": 0.0},
    ]


CASE = Case(hand_written, point_batches(STEPS), groups=two_groups, has_loss=False)


def half_offloaded(workload: Workload) -> Plan:
    """The first chunk and those outside the blocks persistent, the others in two buffers more than they need."""
    layout = build_layout(workload.parameters, num_blocks=workload.num_blocks, chunk_bytes=10_000)
    return Plan(
        workload_id=workload.identity,
        chunk_bytes=10_000,
        n_persist=2,
        n_buffer=layout.min_buffers(2) + 1,
        prefetch_depth=2,
        n_checkpoint=1,
    )


def persistent(workload: Workload) -> Plan:
    layout = build_layout(workload.parameters, num_blocks=workload.num_blocks, chunk_bytes=2**20)
    return Plan(workload_id=workload.identity, chunk_bytes=2**20, n_persist=len(layout.chunks), n_buffer=0)


@st.composite
def single_plans(draw: st.DrawFn, workload: Workload) -> Plan:
    """Any residency and any activation modes."""
    chunk_bytes = draw(st.sampled_from((2**20, 20_000, 10_000, 4_000, 1)))
    layout = build_layout(workload.parameters, num_blocks=workload.num_blocks, chunk_bytes=chunk_bytes)
    n_persist = draw(st.integers(0, len(layout.chunks) - 1))
    n_checkpoint = draw(st.integers(0, workload.num_blocks))
    return Plan(
        workload_id=workload.identity,
        chunk_bytes=chunk_bytes,
        n_persist=n_persist,
        n_buffer=layout.min_buffers(n_persist) + draw(st.integers(0, 3)),
        prefetch_depth=draw(st.integers(1, 3)),
        n_checkpoint=n_checkpoint,
        n_swap=draw(st.integers(0, workload.num_blocks - n_checkpoint)),
    )
