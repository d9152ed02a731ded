"""Train with a loop of Accelerate within a budget of device memory, and save its state after every epoch.

Run with ``python examples/accelerate_loop.py`` or ``accelerate launch --cpu examples/accelerate_loop.py``.
"""

from __future__ import annotations

import tempfile

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM, get_scheduler

from protwin.runtime import planned_accelerator

# Rows of tokens that count upwards.
torch.manual_seed(0)
shape = {"hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 4, "num_attention_heads": 4}
model = LlamaForCausalLM(LlamaConfig(vocab_size=64, **shape))
rows = [(torch.arange(32) + start) % 64 for start in range(40)]

# The line that changes: Accelerator(...) without a plan.
kind = planned_accelerator(Accelerator, budget_bytes="2MiB", max_gradient_norm=1.0)
accelerator = kind(cpu=True, gradient_accumulation_steps=2)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
scheduler = get_scheduler("cosine", optimizer, num_warmup_steps=2, num_training_steps=30)
loader = DataLoader([{"input_ids": row, "labels": row} for row in rows], batch_size=2, shuffle=True)
model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)

with tempfile.TemporaryDirectory() as folder:
    for epoch in range(3):
        for batch in loader:
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
        accelerator.print(f"epoch {epoch}: loss {accelerator.gather(loss.detach()).mean().item():.4f}")
        accelerator.save_state(folder)

counts = accelerator.protwin.counts
accelerator.print(f"{counts.bytes_host_to_device / 2**20:.1f} MiB gathered")
accelerator.end_training()
