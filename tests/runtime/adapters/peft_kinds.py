"""Small models with adapters of PEFT, of every kind, and the loop that is trained with and without a plan."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import peft
import torch
from torch import nn

from protwin.runtime import CpuDevice, Training, carry_out
from protwin.shared.compile.compile import compile_schedule
from protwin.shared.schema.plan import Plan
from protwin.shared.verify.guaranteed_peak import guaranteed_device_peak
from tests.runtime.families import families, family_cases
from tests.runtime.models import SEED, Batch, Case, adamw, llama, snapshot, token_batches, uncached

QV = ("q_proj", "v_proj")
LORA = partial(peft.LoraConfig, r=4, target_modules=[*QV])
NUM_STEPS = 10

KINDS: dict[str, Callable[[], Any]] = {
    "LoRA": partial(LORA, lora_dropout=0.1, lora_alpha=3),
    "LoRA on all linear maps": partial(LORA, target_modules="all-linear"),
    "rsLoRA": partial(LORA, use_rslora=True),
    "DoRA": partial(LORA, use_dora=True, lora_dropout=0.1),
    "PiSSA": partial(LORA, init_lora_weights="pissa"),
    "OLoRA": partial(LORA, init_lora_weights="olora"),
    "biases beside": partial(LORA, bias="lora_only", lora_bias=True),
    "head and embedding saved": partial(LORA, modules_to_save=["lm_head", "embed_tokens"]),
    "adapted head and embedding": partial(LORA, target_modules=[*QV, "embed_tokens", "lm_head"]),
    "rows of tokens": partial(LORA, trainable_token_indices=[1, 5, 9]),
    "some layers": partial(LORA, layers_to_transform=[1, 2]),
    "ranks by pattern": partial(LORA, rank_pattern={"layers.0.self_attn.q_proj": 2}, alpha_pattern={"v_proj": 16}),
    "parameters": partial(LORA, target_modules=[], target_parameters=["self_attn.q_proj.weight"]),
    "replicated layers": partial(LORA, layer_replication=[(0, 2), (1, 4)]),
    "AdaLoRA": partial(peft.AdaLoraConfig, r=4, target_modules=[*QV], total_step=100),
    "BOFT": partial(peft.BOFTConfig, boft_block_size=4, target_modules=[*QV]),
    "DeLoRA": partial(peft.DeloraConfig, r=4, target_modules=[*QV]),
    "FourierFT": partial(peft.FourierFTConfig, n_frequency=10, target_modules=[*QV]),
    "HRA": partial(peft.HRAConfig, r=4, target_modules=[*QV]),
    "IA3": partial(peft.IA3Config, target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"]),
    "LayerNorm": partial(peft.LNTuningConfig, target_modules=["input_layernorm"]),
    "LoHa": partial(peft.LoHaConfig, r=4, target_modules=[*QV]),
    "LoKr": partial(peft.LoKrConfig, r=4, target_modules=[*QV]),
    "MiSS": partial(peft.MissConfig, r=4, target_modules=[*QV]),
    "OFT": partial(peft.OFTConfig, oft_block_size=4, r=0, target_modules=[*QV]),
    "RandLoRA": partial(peft.RandLoraConfig, r=4, target_modules=["q_proj"]),
    "RoAd": partial(peft.RoadConfig, group_size=8, target_modules=[*QV]),
    "VB-LoRA": partial(peft.VBLoRAConfig, r=4, target_modules=[*QV], vector_length=8, num_vectors=16),
    "VeRA": partial(peft.VeraConfig, r=4, target_modules=["q_proj"]),
    "trained tokens": partial(peft.TrainableTokensConfig, token_indices=[1, 4], target_modules=["embed_tokens"]),
    "prompt": partial(peft.PromptTuningConfig, num_virtual_tokens=4, task_type="CAUSAL_LM"),
    "P-tuning": partial(peft.PromptEncoderConfig, num_virtual_tokens=4, task_type="CAUSAL_LM", encoder_hidden_size=16),
    "LLaMA-Adapter": partial(peft.AdaptionPromptConfig, adapter_len=3, adapter_layers=2, task_type="CAUSAL_LM"),
}
"""By name, for a Llama of four blocks."""

FAMILY_TARGETS = {
    "bart": ["q_proj", "fc1"],
    "bert": ["query", "value"],
    "gemma2": ["q_proj", "down_proj"],
    "mistral": ["v_proj", "o_proj"],
    "mixtral": ["q_proj"],
    "qwen2": ["v_proj", "up_proj"],
    "t5": ["q", "v", "wi"],
    "vit": ["q_proj", "v_proj"],
}
FAMILY_KINDS: dict[str, Callable[..., Any]] = {
    "LoRA": partial(peft.LoraConfig, r=3, lora_dropout=0.1),
    "DoRA": partial(peft.LoraConfig, r=3, use_dora=True),
    "LoHa": partial(peft.LoHaConfig, r=3),
    "LoKr": partial(peft.LoKrConfig, r=3),
    "IA3": partial(peft.IA3Config, feedforward_modules=[]),
}


def adapted(build: Callable[[], nn.Module], configuration: Callable[[], Any]) -> peft.PeftModel:
    """The same model at every call, all of whose trained matrices have values, so that every gradient shows."""
    model = build()
    torch.manual_seed(SEED + 5)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PEFT's advice about tied weights and layers beside
        found = peft.get_peft_model(model, configuration())
    return filled(found)


def filled(model: peft.PeftModel) -> peft.PeftModel:
    """``model`` with random values where trained matrices begin with zeros."""
    torch.manual_seed(SEED + 6)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad and not parameter.any():
                parameter.normal_(std=0.1)
    return model


def two_adapters() -> peft.PeftModel:
    """One is trained; the other, of other maps, is there and inactive."""
    model = adapted(llama, KINDS["LoRA"])
    model.add_adapter("other", LORA(r=2, target_modules=["k_proj", "v_proj"]))
    torch.manual_seed(SEED + 7)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("lora_B.other.weight"):
                parameter.normal_(std=0.1)
    return model


def experts_adapted() -> peft.PeftModel:
    """Both parameters of a mixture's experts, which are no linear maps."""
    parameters = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    configuration = partial(peft.LoraConfig, r=2, target_modules=["q_proj"], target_parameters=parameters)
    return adapted(family_cases()["mixtral"].build, configuration)


def peft_cases(steps: int) -> dict[str, Case]:
    """Every kind on a Llama, some on every family, and more than one adapter."""
    tokens = token_batches(steps)
    found = {name: Case(partial(adapted, llama, made), tokens) for name, made in KINDS.items()}
    found["two adapters"] = Case(two_adapters, tokens)
    for family, targets in FAMILY_TARGETS.items():
        case = family_cases(steps)[family]
        for kind, made in FAMILY_KINDS.items():
            build = partial(adapted, case.build, partial(made, target_modules=targets))
            found[f"{family}, {kind}"] = Case(build, case.batches)
    found["mixtral, experts"] = Case(experts_adapted, family_cases(steps)["mixtral"].batches)
    assert families().keys() == FAMILY_TARGETS.keys()
    return found


@dataclass
class Course:
    """What ten steps gave."""

    losses: list[float]
    """Of every micro-batch, and of the evaluations between steps."""
    weights: dict[str, torch.Tensor]
    to_host_bytes: int = 0
    num_cpu_adam_steps: int = 0
    peak_over_guaranteed_bytes: int = 0


def plain_course(case: Case, micro_batches: int, max_norm: float | None) -> Course:
    """The loop of PEFT's documentation, with accumulation, clipping, a scheduler and evaluations."""
    model = uncached(case.build())
    optimizer = adamw([{"params": [p for p in model.parameters() if p.requires_grad]}])
    scheduler = halving(optimizer)
    losses: list[float] = []
    torch.manual_seed(SEED)
    for number, batches in enumerate(case.steps(micro_batches)):
        for batch in batches:
            loss = case.loss(model, batch)
            loss.backward()
            losses.append(loss.item())
        if max_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        if is_evaluated(number):
            with torch.no_grad():
                losses.append(evaluated(case, model))
    return Course(losses, snapshot(model))


def planned_course(case: Case, before: Plan, after: Plan, folder: Path) -> Course:
    """The same under one plan, and from the middle on under another one, resumed by another model."""
    steps = case.steps(before.micro_batches)
    half = len(steps) // 2
    first = _part(case, before, range(half), folder, is_first=True)
    second = _part(case, after, range(half, len(steps)), folder, is_first=False)
    return Course(
        first.losses + second.losses,
        second.weights,
        first.to_host_bytes + second.to_host_bytes,
        first.num_cpu_adam_steps + second.num_cpu_adam_steps,
        max(first.peak_over_guaranteed_bytes, second.peak_over_guaranteed_bytes),
    )


def _part(case: Case, plan: Plan, steps: range, folder: Path, *, is_first: bool) -> Course:
    model = case.build()
    limit_bytes = guaranteed_device_peak(compile_schedule(plan, case.workload)).size_bytes
    with carry_out(
        model,
        plan,
        case.workload,
        optimizer=adamw,
        device=CpuDevice(limit_bytes),
        disk_folder=folder if plan.n_disk_state else None,
    ) as training:
        scheduler = halving(training.optimizer)
        torch.manual_seed(SEED if is_first else SEED + 77)
        if not is_first:
            training.resume(folder / "saved", scheduler=scheduler)
        losses = _trained(case, model, training, scheduler, [case.steps(plan.micro_batches)[i] for i in steps], steps)
        if is_first:
            training.save(folder / "saved", scheduler=scheduler)
    moved, adam = training.bytes_device_to_host, training.num_cpu_adam_steps
    return Course(losses, snapshot(model), moved, adam, training.peak_device_bytes - limit_bytes)


def _trained(
    case: Case, model: nn.Module, training: Training, scheduler: Any, steps: Sequence[Sequence[Batch]], numbers: range
) -> list[float]:
    losses: list[float] = []
    for number, batches in zip(numbers, steps, strict=True):
        for batch in batches:
            loss = case.loss(model, batch)
            loss.backward()
            losses.append(loss.item())
            del loss  # one more tensor of the loop's, which no plan counts
        training.step()
        scheduler.step()
        if is_evaluated(number):
            with training.evaluation():
                losses.append(evaluated(case, model))
    return losses


def evaluated(case: Case, model: nn.Module) -> float:
    """The loss of a batch without dropout."""
    model.eval()
    loss = case.loss(model, case.batches[0]).item()
    model.train()
    return loss


def is_evaluated(step: int) -> bool:
    return step in (2, 6)


def halving(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.8**step)


def with_steps_of(plan: Plan, other: Plan) -> Plan:
    """``plan`` whose steps compute what those of ``other`` do, so that it can go on for that."""
    return plan.model_copy(update={"micro_batches": other.micro_batches, "max_gradient_norm": other.max_gradient_norm})
