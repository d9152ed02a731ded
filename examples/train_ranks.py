"""Train on several ranks with the loop of one: ``torchrun --nproc-per-node 2 examples/train_ranks.py``.

It takes a few seconds on CPUs, where host memory stands in for devices whose budgets are enforced.
"""

from __future__ import annotations

import os

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import protwin.runtime
import protwin.sim
from protwin.shared import load_hardware

EPOCHS = 4
BATCH_SIZE = 8
BUDGET_BYTES = 2**20
RANK, NUM_RANKS = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


class Layer(nn.Module):
    """A residual block."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """(batch, width) in and out."""
        return hidden + self.down(torch.relu(self.up(self.norm(hidden))))


# Points and their distances from the origin.  Data are the same on all ranks; the sampler gives each its part.
generator = torch.Generator().manual_seed(0)
points = torch.randn(128, 4, generator=generator)
distances = points.norm(dim=1, keepdim=True)
data = TensorDataset(points, distances)
sampler = DistributedSampler(data, num_replicas=NUM_RANKS, rank=RANK, seed=0)
loader = DataLoader(data, batch_size=BATCH_SIZE, sampler=sampler)

# Ranks may begin with weights of their own: all take those of rank 0.
torch.manual_seed(RANK)
model = nn.Sequential(nn.Linear(4, 64), nn.Sequential(*(Layer(64) for _ in range(4))), nn.Linear(64, 1))

# Every rank needs the same plan.  Without measured times (repeats=0) a trace gives the same workload on all of them,
# and for one machine file a search gives the same plan; else search once, save plan and workload, and load both here.
workload = protwin.runtime.trace(
    model, points[:BATCH_SIZE], loss=lambda output, _: nn.functional.mse_loss(output, distances[:BATCH_SIZE]), repeats=0
)
request = protwin.sim.SearchRequest(
    workload=workload,
    hardware=load_hardware("rtx-3090-x4"),
    step=protwin.sim.Step(num_ranks=NUM_RANKS),
    device_budget_bytes=BUDGET_BYTES,
)
plan = protwin.sim.search(request).plan
device = protwin.runtime.CpuDevice(budget_bytes=BUDGET_BYTES)

with protwin.runtime.carry_out(model, plan, workload, device=device) as training:
    training.set_learning_rate(5e-3)
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        for batch, targets in loader:
            loss = nn.functional.mse_loss(model(batch), targets)
            loss.backward()
            training.step()
        if RANK == 0:
            print(f"epoch {epoch + 1}: loss {loss.item():.4f} on rank 0")

if RANK == 0:
    moved, stepped = training.bytes_host_to_device, training.num_cpu_adam_steps
    print(f"{plan.parallel} on {plan.num_ranks} ranks: {moved / 2**20:.1f} MiB gathered, {stepped} steps of CPU Adam")
