"""Loops that hold what the model gives: in the guarantee where a trace was told so, and warned of where it was not."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from transformers import (
    BertConfig,
    BertForMaskedLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

from protwin.runtime import CpuDevice, CpuOutOfMemoryError, carry_out, trace
from protwin.runtime.hooks.held_outputs import HeldOutputs
from protwin.shared.compile.compile import compile_schedule
from protwin.shared.schema.plan import Plan
from protwin.shared.schema.workload import Workload
from protwin.shared.verify.guaranteed_peak import guaranteed_device_peak

WORDS, SAMPLES, TOKENS = 2048, 2, 32
SMALL: dict[str, Any] = {
    "vocab_size": WORDS,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
}
IDS = torch.arange(SAMPLES * TOKENS).view(SAMPLES, TOKENS)


class Own(nn.Module):
    """Gives logits; the loss is the loop's."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, 32)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32)) for _ in range(3))
        self.head = nn.Linear(32, WORDS)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """(samples, tokens) to (samples, tokens, words)."""
        hidden = self.embed(ids)
        for layer in self.layers:
            hidden = hidden + layer(hidden)
        return self.head(hidden)


def own_loss(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(logits.flatten(0, 1), ids.flatten())


MODELS: dict[str, Callable[[], nn.Module]] = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SMALL)),
    "gemma2": lambda: Gemma2ForCausalLM(Gemma2Config(**SMALL, num_key_value_heads=1, head_dim=16)),
    "bert": lambda: BertForMaskedLM(BertConfig(**SMALL, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)),
    "t5": lambda: T5ForConditionalGeneration(
        T5Config(
            vocab_size=WORDS,
            d_model=32,
            d_ff=64,
            num_layers=2,
            num_heads=2,
            d_kv=16,
            dropout_rate=0.0,
            decoder_start_token_id=0,
        )
    ),
    "own": Own,
}


def batch_of(name: str) -> Any:
    return IDS if name == "own" else {"input_ids": IDS, "labels": IDS}


def traced(model: nn.Module, name: str, *, keeps_outputs: bool) -> Workload:
    loss = own_loss if name == "own" else None
    return trace(model, batch_of(name), loss=loss, repeats=0, keeps_outputs=keeps_outputs)


def plan_for(workload: Workload, *, is_checkpointed: bool, micro_batches: int = 1) -> Plan:
    return Plan(
        workload_id=workload.identity,
        chunk_bytes=2**20,
        n_persist=1,
        n_buffer=2,
        n_checkpoint=workload.num_blocks if is_checkpointed else 0,
        micro_batches=micro_batches,
    )


def peak_of(plan: Plan, workload: Workload) -> int:
    return guaranteed_device_peak(compile_schedule(plan, workload)).size_bytes


def train(model: nn.Module, name: str, plan: Plan, workload: Workload, budget: int, *, holds: bool) -> int:
    """Three steps in a loop that holds all that the model gives, or the loss alone; gives the measured peak."""
    batch, number = batch_of(name), 0
    with carry_out(model, plan, workload, device=CpuDevice(budget_bytes=budget)) as training:
        for _ in range(3 * plan.micro_batches):
            if name == "own":
                outputs = model(batch)
                loss = own_loss(outputs, batch)
            else:
                outputs = model(**batch)
                loss = outputs.loss
            if not holds:
                del outputs
            (loss / plan.micro_batches).backward()
            number += 1
            if number % plan.micro_batches == 0:
                training.step()
        return training.peak_device_bytes


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(
    ("dtype", "is_checkpointed", "micro_batches"), [(torch.float32, True, 1), (torch.bfloat16, False, 2)]
)
def test_a_loop_that_holds_outputs_takes_what_its_trace_says(
    name: str, dtype: torch.dtype, is_checkpointed: bool, micro_batches: int
) -> None:
    model = MODELS[name]().to(dtype)
    workload = traced(model, name, keeps_outputs=True)
    plan = plan_for(workload, is_checkpointed=is_checkpointed, micro_batches=micro_batches)
    budget = peak_of(plan, workload)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        peak_bytes = train(model, name, plan, workload, budget, holds=True)
    assert 0.995 * budget <= peak_bytes <= budget
    apart = traced(model, name, keeps_outputs=False)
    logits_bytes = SAMPLES * TOKENS * WORDS * dtype.itemsize
    assert 0.995 * logits_bytes <= budget - peak_of(plan, apart) <= 1.1 * logits_bytes
    assert apart.identity == workload.identity, "plans are for either"


@pytest.mark.parametrize("name", ["llama", "own"])
def test_a_loop_that_holds_outputs_unsaid_is_warned_of_where_they_have_no_room(name: str) -> None:
    model = MODELS[name]()
    workload = traced(model, name, keeps_outputs=False)
    plan = plan_for(workload, is_checkpointed=True)
    budget = peak_of(plan, workload)
    train(model, name, plan, workload, budget, holds=False)
    logits_bytes = SAMPLES * TOKENS * WORDS * 4
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(model, name, plan, workload, budget + 2 * logits_bytes, holds=True)
    told = r"512 KiB of what the model gave .*the loop holds them .*keeps_outputs=True"
    with pytest.raises(CpuOutOfMemoryError, match=told):
        train_warned_of(model, name, plan, workload, budget)


@dataclass
class Given:
    """What ``Squares`` gives."""

    loss: torch.Tensor
    logits: torch.Tensor


class Squares(nn.Module):
    """Autograd saves its logits."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 64)

    def forward(self, x: torch.Tensor) -> Given:
        """Loss and logits."""
        logits = self.head(x)
        return Given(logits.square().mean(), logits)


def test_logits_that_autograd_alone_holds_are_nothing_that_the_loop_does() -> None:
    model = Squares()
    watch = HeldOutputs(model, peak_bytes=1, limit_bytes=2)
    outputs = model(torch.ones(8, 4))
    assert watch.held_bytes == 8 * 64 * 4
    assert watch.hint is not None
    with pytest.warns(UserWarning, match="the loop holds 2 KiB"):
        outputs.loss.backward()
    watch = HeldOutputs(model, peak_bytes=1, limit_bytes=2)
    loss = model(torch.ones(8, 4)).loss
    assert watch.held_bytes == 8 * 64 * 4
    assert watch.hint is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loss.backward()
        watch.check()


def train_warned_of(model: nn.Module, name: str, plan: Plan, workload: Workload, budget: int) -> None:
    with pytest.warns(UserWarning, match=r"the loop holds 512 KiB .*keeps_outputs=True"):
        train(model, name, plan, workload, budget, holds=True)
