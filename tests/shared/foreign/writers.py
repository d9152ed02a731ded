"""Runs as each tool writes them: what readers read back, written without their tables."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

from protwin.shared.foreign.asked_run import AskedRun, Checkpointing, Place, Precision, Split
from protwin.shared.schema.optimizer import Optimizer

STAGES = {Split.NOTHING: 0, Split.OPTIMIZER: 1, Split.GRADIENTS: 2, Split.PARAMETERS: 3}
DEVICES = {Place.DEVICE: "none", Place.HOST: "cpu", Place.DISK: "nvme"}


def known(fields: Mapping[str, Any]) -> AskedRun:
    return AskedRun.model_validate({name: value for name, value in fields.items() if value is not None})


def deepspeed_run(rng: random.Random) -> AskedRun:
    """Something that a DeepSpeed configuration can ask for."""
    split = rng.choice(list(STAGES))
    fields: dict[str, Any] = {
        "batch_size": rng.choice([None, rng.randint(1, 64)]),
        "micro_batches": rng.choice([None, rng.randint(1, 32)]),
        "global_batch_size": rng.choice([None, rng.randint(1, 4096)]),
        "max_gradient_norm": rng.choice([0.0, 0.5, 1.0, 3.0]),
        "optimizer": rng.choice([None, Optimizer.ADAM, Optimizer.ADAMW, Optimizer.LION]),
        "precision": rng.choice(
            [Precision.FLOAT32, Precision.MIXED_BFLOAT16, Precision.MIXED_FLOAT16, Precision.PURE_BFLOAT16, None]
        ),
        "split": split,
        "optimizer_on": Place.DEVICE if split is Split.NOTHING else rng.choice(list(Place)),
        "parameters_on": rng.choice(list(Place)) if split is Split.PARAMETERS else Place.DEVICE,
    }
    if split is Split.PARAMETERS:
        fields["live_parameters"] = rng.choice([10**9, rng.randint(0, 10**10)])
        fields["prefetched_parameters"] = rng.choice([5 * 10**7, rng.randint(0, 10**9)])
        fields["shard_ranks"] = rng.choice([None, 2, 8])
    return known(fields)


def deepspeed(run: AskedRun, rng: random.Random) -> dict[str, Any]:
    """``run`` as a DeepSpeed configuration; what it leaves open is ``auto`` or not there."""

    def or_auto(value: Any) -> dict[str, Any]:
        return value if value is not None else rng.choice(["auto", None])

    assert run.split is not None
    zero: dict[str, Any] = {"stage": STAGES[run.split]}
    for name, place in (("offload_optimizer", run.optimizer_on), ("offload_param", run.parameters_on)):
        if place is not Place.DEVICE or rng.random() < 0.3:
            zero[name] = {"device": DEVICES[place], "pin_memory": rng.random() < 0.5}
    if run.split is Split.PARAMETERS:
        for key, value, usual in (
            ("stage3_max_live_parameters", run.live_parameters, 10**9),
            ("stage3_prefetch_bucket_size", run.prefetched_parameters, 5 * 10**7),
        ):
            assert value is not None
            if value != usual or rng.random() < 0.5:
                zero[key] = float(value) if rng.random() < 0.5 else value
        if run.shard_ranks is not None:
            zero["mics_shard_size"] = run.shard_ranks
    content: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": or_auto(run.batch_size),
        "gradient_accumulation_steps": or_auto(run.micro_batches),
        "train_batch_size": or_auto(run.global_batch_size),
        "zero_optimization": zero,
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 10}},
    }
    if run.max_gradient_norm or rng.random() < 0.5:
        content["gradient_clipping"] = run.max_gradient_norm
    match run.precision:
        case Precision.MIXED_BFLOAT16:
            content[rng.choice(["bf16", "bfloat16"])] = {"enabled": True}
        case Precision.PURE_BFLOAT16:
            content["bf16"] = {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}
        case Precision.MIXED_FLOAT16:
            content["fp16"] = {"enabled": True, "loss_scale": 0}
        case Precision.FLOAT32:
            content |= rng.choice([{}, {"fp16": {"enabled": False}}])
        case _:
            content["bf16"] = {"enabled": "auto"}
    if run.optimizer is not None:
        names = {Optimizer.ADAM: ["Adam", "FusedAdam"], Optimizer.ADAMW: ["AdamW"], Optimizer.LION: ["Lion"]}
        content["optimizer"] = {"type": rng.choice(names[run.optimizer]), "params": {"lr": "auto"}}
    return content


def training_run(rng: random.Random) -> AskedRun:
    """Something that TrainingArguments with FSDP, or without anything, can ask for."""
    split = rng.choice([Split.NOTHING, Split.GRADIENTS, Split.PARAMETERS])
    is_shared = split is not Split.NOTHING
    place = rng.choice([Place.DEVICE, Place.HOST]) if is_shared else Place.DEVICE
    half = rng.choice(["bfloat16", "float16", None])
    kind = "mixed" if is_shared else "autocast"
    return known(
        {
            "batch_size": rng.randint(1, 64),
            "micro_batches": rng.randint(1, 32),
            "max_gradient_norm": rng.choice([0.0, 0.3, 1.0]),
            "optimizer": rng.choice([Optimizer.ADAMW, Optimizer.SGD, Optimizer.ADAFACTOR, Optimizer.ADAMW_8BIT]),
            "precision": Precision.FLOAT32 if half is None else Precision(f"{kind} {half}"),
            "checkpointing": rng.choice([Checkpointing.NONE, Checkpointing.FULL]),
            "split": split,
            "parameters_on": place,
            "optimizer_on": place,
        }
    )


def training_arguments(run: AskedRun) -> dict[str, Any]:
    """``run`` as arguments of TrainingArguments."""
    names = {
        Optimizer.ADAMW: "adamw_torch",
        Optimizer.SGD: "sgd",
        Optimizer.ADAFACTOR: "adafactor",
        Optimizer.ADAMW_8BIT: "adamw_bnb_8bit",
    }
    assert run.optimizer is not None
    assert run.precision is not None
    given: dict[str, Any] = {
        "per_device_train_batch_size": run.batch_size,
        "gradient_accumulation_steps": run.micro_batches,
        "max_grad_norm": run.max_gradient_norm,
        "optim": names[run.optimizer],
        "bf16": run.precision.endswith("bfloat16"),
        "fp16": run.precision.endswith(" float16"),
        "gradient_checkpointing": run.checkpointing is Checkpointing.FULL,
    }
    if run.split is not Split.NOTHING:
        given["fsdp"] = True
        given["fsdp_config"] = {
            "reshard_after_forward": run.split is Split.PARAMETERS,
            "cpu_offload": run.parameters_on is Place.HOST,
        }
    return given
