"""Train a model that does not fit its device, by a plan that was searched for it, with a scheduler of PyTorch.

Run with ``python examples/train.py``; it takes a few seconds on a CPU, where host memory stands in for a device whose
budget is enforced.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import nn
from torch.optim.lr_scheduler import OneCycleLR

import protwin.runtime
import protwin.sim

STEPS = 25
NUM_TOKENS = 64
BUDGET_BYTES = 4 * 2**20


class Decoder(nn.Module):
    """A small decoder: any module with blocks that follow each other will do."""

    def __init__(self, width: int = 96, num_layers: int = 6) -> None:
        super().__init__()
        self.embed = nn.Embedding(NUM_TOKENS, width)
        make_layer = partial(nn.TransformerEncoderLayer, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.ModuleList(make_layer(width, nhead=4, dim_feedforward=3 * width) for _ in range(num_layers))
        self.head = nn.Linear(width, NUM_TOKENS)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """(batch, length) to (batch, length, NUM_TOKENS)."""
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        hidden = self.embed(tokens)
        for layer in self.layers:
            hidden = layer(hidden, src_mask=mask, is_causal=True)
        return self.head(hidden)


def loss_of(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Each token is to be told from those before it."""
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


# Rows of tokens that count upwards, each from a start and with a stride of its own.
torch.manual_seed(0)
model = Decoder()
starts, strides = torch.randint(0, NUM_TOKENS, (8, 1)), torch.randint(1, 4, (8, 1))
tokens = (starts + strides * torch.arange(32)) % NUM_TOKENS

# What the model does, what this machine can, and the fastest plan within the budget.
workload = protwin.runtime.trace(model, tokens, loss=loss_of)
hardware = protwin.runtime.probe_hardware(seconds=0.5)
request = protwin.sim.SearchRequest(workload=workload, hardware=hardware, device_budget_bytes=BUDGET_BYTES)
plan = protwin.sim.search(request).plan

# Matrices decay, the rest does not; the rates of both follow one cycle.
groups = [
    {"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": 0.1},
    {"params": [p for p in model.parameters() if p.dim() <= 1], "weight_decay": 0.0},
]
adamw = partial(torch.optim.AdamW, lr=1e-3, fused=True)
device = protwin.runtime.CpuDevice(budget_bytes=BUDGET_BYTES)

with protwin.runtime.carry_out(
    model, plan, workload, optimizer=adamw, parameter_groups=groups, device=device
) as training:
    print(training.explain())
    scheduler = OneCycleLR(training.optimizer, max_lr=3e-3, total_steps=STEPS)
    for step in range(STEPS):
        loss = loss_of(model(tokens), tokens)
        loss.backward()
        training.step()
        scheduler.step()
        if step % 5 == 4:
            rate = training.optimizer.param_groups[0]["lr"]
            print(f"step {step + 1:2}: loss {loss.item():.3f}, next learning rate {rate:.2e}")

gathered, stepped, peak = training.bytes_host_to_device, training.num_cpu_adam_steps, training.peak_device_bytes
print(f"{gathered / 2**20:.1f} MiB gathered, {stepped} chunks stepped by CPU Adam, peak {peak / 2**20:.1f} MiB.")
