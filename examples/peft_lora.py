"""Train a LoRA of PEFT within a budget that the model exceeds, save it, merge it, and go on from what was saved.

Run with ``python examples/peft_lora.py`` where torch, transformers and peft are installed; it takes a few seconds on a
CPU, where host memory stands in for a device whose budget is enforced.
"""

from __future__ import annotations

import tempfile
from functools import partial

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

import protwin.runtime
import protwin.sim

STEPS = 12
BUDGET_BYTES = 3 * 2**20


def base_model() -> LlamaForCausalLM:
    """In place of ``LlamaForCausalLM.from_pretrained(...)``: a small model, the same one every time."""
    torch.manual_seed(0)
    shape = {"hidden_size": 96, "intermediate_size": 256, "num_hidden_layers": 6, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=128, **shape))


def train(model: PeftModel, batch: dict[str, torch.Tensor], folder: str) -> None:
    """Search a plan within the budget, carry it out, and save the adapter in the middle and at the end."""
    workload = protwin.runtime.trace(model, batch)
    hardware = protwin.runtime.probe_hardware(seconds=0.5)
    plan = protwin.sim.search(workload, hardware, device_budget_bytes=BUDGET_BYTES).plan
    device = protwin.runtime.CpuDevice(budget_bytes=BUDGET_BYTES)
    adamw = partial(torch.optim.AdamW, lr=3e-3, fused=True)
    with protwin.runtime.carry_out(model, plan, workload, optimizer=adamw, device=device) as training:
        for step in range(STEPS):
            loss = model(**batch).loss
            loss.backward()
            training.step()
            if step == STEPS // 2:
                # Weights are not all on the device: the training has them.
                model.save_pretrained(folder, state_dict=training.state_dict())
            if step % 4 == 3:
                print(f"step {step + 1:2}: loss {loss.item():.3f}")
        with training.evaluation(), model.disable_adapter():
            print(f"without the adapter: loss {model(**batch).loss.item():.3f}")
        print(f"peak {training.peak_device_bytes / 2**20:.2f} MiB of {BUDGET_BYTES / 2**20:.2f} MiB")
    model.save_pretrained(folder)


tokens = (torch.arange(6)[:, None] + 3 * torch.arange(32)) % 128
batch = {"input_ids": tokens, "labels": tokens}
configuration = LoraConfig(r=8, lora_alpha=16, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")

with tempfile.TemporaryDirectory() as folder:
    model = get_peft_model(base_model(), configuration)
    train(model, batch, folder)

    # Another day: the adapter beside the same base, trained further.
    train(PeftModel.from_pretrained(base_model(), folder, is_trainable=True), batch, folder)

    merged = PeftModel.from_pretrained(base_model(), folder).merge_and_unload()
    with torch.no_grad():
        print(f"merged: loss {merged(**batch).loss.item():.3f}, a {type(merged).__name__}")
