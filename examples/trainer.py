"""Train with the Trainer of transformers within a budget of device memory that plain training does not fit.

Run with ``python examples/trainer.py``; it takes seconds on a CPU, where host memory stands in for a device whose
budget is enforced.  Accelerate has to be installed, as the Trainer needs it.
"""

from __future__ import annotations

import tempfile

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from protwin.runtime import planned_trainer

# Rows of tokens that count upwards.
torch.manual_seed(0)
shape = {"hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 4, "num_attention_heads": 4}
model = LlamaForCausalLM(LlamaConfig(vocab_size=64, **shape))
rows = [(torch.arange(32) + start) % 64 for start in range(40)]
data = [{"input_ids": row, "labels": row} for row in rows]

with tempfile.TemporaryDirectory() as folder:
    arguments = TrainingArguments(
        folder,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        max_steps=20,
        learning_rate=1e-2,
        lr_scheduler_type="cosine",
        logging_steps=5,
        eval_strategy="steps",
        eval_steps=10,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
    )
    # The line that changes: Trainer(...) without a plan.
    trainer = planned_trainer(Trainer, budget_bytes="2MiB")(
        model, arguments, train_dataset=data[:36], eval_dataset=data[36:]
    )
    trainer.train()

print(trainer.protwin.plan)
counts = trainer.protwin.counts
print(f"{counts.bytes_host_to_device / 2**20:.1f} MiB gathered, {counts.num_cpu_adam_steps} chunks stepped on the host")
print(f"peak {trainer.protwin.peak_device_bytes / 2**20:.2f} MiB of 2 MiB")
