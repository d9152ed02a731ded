"""Runs as each tool writes them: what readers read back, written without their tables."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

from protwin.shared.foreign.asked_run import AskedRun, Checkpointing, Place, Precision, Split
from protwin.shared.methods.runtime_profile import Runtime
from protwin.shared.phases.quantization import LATEST_RELEASE, PackedProducts, Quantization, QuantizedType
from protwin.shared.phases.tiling import LossHead
from protwin.shared.schema.hardware import AttentionKernel
from protwin.shared.schema.optimizer import Optimizer
from protwin.shared.schema.training_options import LoraOptions, QuantizationOptions
from protwin.shared.schema.workload import DType

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
    if rng.random() < 0.3:
        fields["reduce_dtype"] = rng.choice([DType.FLOAT32, DType.BFLOAT16])
    if split is not Split.NOTHING:
        fields["runtime"] = {
            Split.OPTIMIZER: Runtime.DEEPSPEED_ZERO1,
            Split.GRADIENTS: Runtime.DEEPSPEED_ZERO2,
            Split.PARAMETERS: Runtime.DEEPSPEED_ZERO3,
        }[split]
    if split is Split.PARAMETERS:
        if (fields["optimizer_on"], fields["parameters_on"]) == (Place.HOST, Place.DEVICE):
            fields["runtime"] = Runtime.DEEPSPEED_OFFLOAD
        fields["live_parameters"] = rng.choice([10**9, rng.randint(0, 10**10)])
        fields["prefetched_parameters"] = rng.choice([5 * 10**7, rng.randint(0, 10**9)])
        fields["prefetch_follows_model"] = True if fields["prefetched_parameters"] == 5 * 10**7 else None
        fields["shard_ranks"] = rng.choice([None, 2, 8])
    if split is not Split.NOTHING:
        fields |= rng.choice([{"bucket_scalars": rng.randint(1, 10**9)}, {"bucket_follows_model": True}, {}])
    if split in (Split.OPTIMIZER, Split.GRADIENTS):
        fields["has_two_buckets"] = rng.choice([True, None])
    return known(fields)


def deepspeed(run: AskedRun, rng: random.Random) -> dict[str, Any]:
    """``run`` as a DeepSpeed configuration; what it leaves open is ``auto`` or not there."""

    def or_auto(value: Any) -> Any:
        return value if value is not None else rng.choice(["auto", None])

    assert run.split is not None
    zero: dict[str, Any] = {"stage": STAGES[run.split]}
    for name, place in (("offload_optimizer", run.optimizer_on), ("offload_param", run.parameters_on)):
        if place is not Place.DEVICE or rng.random() < 0.3:
            zero[name] = {"device": DEVICES[place]} | ({"pin_memory": True} if rng.random() < 0.5 else {})
    if run.split is Split.PARAMETERS:
        for key, value, usual in (
            ("stage3_max_live_parameters", run.live_parameters, 10**9),
            ("stage3_prefetch_bucket_size", run.prefetched_parameters, 5 * 10**7),
        ):
            assert value is not None
            if value != usual or rng.random() < 0.5:
                zero[key] = float(value) if rng.random() < 0.5 else value
        if run.prefetch_follows_model:
            zero["stage3_prefetch_bucket_size"] = "auto"
        if run.shard_ranks is not None:
            zero["mics_shard_size"] = run.shard_ranks
    if run.bucket_follows_model:
        zero["reduce_bucket_size"] = "auto"
    elif run.bucket_scalars is not None:
        zero["reduce_bucket_size"] = rng.choice([float, int])(run.bucket_scalars)
    if run.has_two_buckets or (run.split is Split.PARAMETERS and rng.random() < 0.5):
        zero["overlap_comm"] = True
    content: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": or_auto(run.batch_size),
        "gradient_accumulation_steps": or_auto(run.micro_batches),
        "train_batch_size": or_auto(run.global_batch_size),
        "zero_optimization": zero,
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 10}},
    }
    if run.max_gradient_norm or rng.random() < 0.5:
        content["gradient_clipping"] = run.max_gradient_norm
    if run.reduce_dtype is not None:
        content["communication_data_type"] = {"float32": "fp32", "bfloat16": "bf16"}[run.reduce_dtype]
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
    checkpointing = rng.choice([Checkpointing.NONE, Checkpointing.FULL])
    return known(
        {
            "batch_size": rng.randint(1, 64),
            "micro_batches": rng.randint(1, 32),
            "max_gradient_norm": rng.choice([0.0, 0.3, 1.0]),
            "optimizer": rng.choice([Optimizer.ADAMW, Optimizer.SGD, Optimizer.ADAFACTOR, Optimizer.ADAMW_8BIT]),
            "precision": Precision.FLOAT32 if half is None else Precision(f"{kind} {half}"),
            "checkpointing": checkpointing,
            "recomputes_whole": checkpointing is Checkpointing.FULL and rng.random() < 0.5,
            "split": split,
            "parameters_on": place,
            "optimizer_on": place,
            "runtime": Runtime.FSDP2 if is_shared else None,
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
    if run.checkpointing is Checkpointing.FULL:
        given["gradient_checkpointing_kwargs"] = {"use_reentrant": run.recomputes_whole}
    if run.split is not Split.NOTHING:
        given["fsdp"] = True
        given["fsdp_config"] = {
            "reshard_after_forward": run.split is Split.PARAMETERS,
            "cpu_offload": run.parameters_on is Place.HOST,
        }
    return given


def torchtitan_run(rng: random.Random) -> AskedRun:
    """Something that a file of torchtitan can ask for."""
    split = rng.choice([Split.NOTHING, Split.GRADIENTS, Split.PARAMETERS])
    is_sharded = split is not Split.NOTHING
    place = rng.choice([Place.DEVICE, Place.HOST]) if is_sharded else Place.DEVICE
    mixed = Precision.MIXED_BFLOAT16 if is_sharded else Precision.AUTOCAST_BFLOAT16
    checkpointing = rng.choice(list(Checkpointing))
    fields: dict[str, Any] = {
        "model": rng.choice(["llama-3.1-8b", "llama-3.1-70b", "qwen3-4b"]),
        "batch_size": rng.randint(1, 16),
        "sequence_length": rng.choice([2048, 8192]),
        "max_gradient_norm": rng.choice([1.0, 0.5, 0.0]),
        "optimizer": rng.choice([Optimizer.ADAM, Optimizer.ADAMW]),
        "precision": rng.choice([Precision.FLOAT32, Precision.PURE_BFLOAT16, mixed]),
        "checkpointing": checkpointing,
        "split": split,
        "parameters_on": place,
        "optimizer_on": place,
    }
    fields |= rng.choice([{"micro_batches": 1}, {"global_batch_size": rng.randint(1, 2048)}])
    if checkpointing is Checkpointing.EVERY_NTH:
        fields["checkpointed_every"] = rng.randint(2, 5)
    if is_sharded:
        fields |= {"runtime": Runtime.FSDP2, "reduce_dtype": rng.choice([DType.FLOAT32, DType.BFLOAT16])}
    replicas, shards = rng.choice([1, 2, 4]), rng.choice([-1, 2, 8])
    if not is_sharded:
        fields["num_ranks"] = replicas
    elif shards > 1:
        fields |= {"num_ranks": shards * replicas, "shard_ranks": shards if replicas > 1 else None}
    elif replicas > 1:
        fields["replicas"] = replicas
    return known(fields)


def torchtitan(run: AskedRun, *, is_old: bool) -> dict[str, Any]:
    """``run`` in the layout of 2024 (``is_old``), or in that of 2025."""
    assert run.model is not None
    name, _, size = run.model.rpartition("-")
    degrees: dict[str, Any] = {"data_parallel_shard_degree": 1 if run.split is Split.NOTHING else -1}
    if run.split is Split.NOTHING:
        degrees["data_parallel_replicate_degree"] = run.num_ranks
    elif run.num_ranks is not None:
        degrees["data_parallel_shard_degree"] = run.shard_ranks or run.num_ranks
        degrees["data_parallel_replicate_degree"] = run.num_ranks // (run.shard_ranks or run.num_ranks)
    else:
        degrees["data_parallel_replicate_degree"] = run.replicas or 1
    training: dict[str, Any] = {
        "batch_size" if is_old else "local_batch_size": run.batch_size,
        "seq_len": run.sequence_length,
        "max_norm": run.max_gradient_norm,
        "enable_cpu_offload": run.parameters_on is Place.HOST,
        "mixed_precision_reduce": str(run.reduce_dtype or DType.FLOAT32),
        "dtype": "bfloat16" if run.precision is Precision.PURE_BFLOAT16 else "float32",
        "mixed_precision_param": "float32" if run.precision is Precision.FLOAT32 else "bfloat16",
    }
    if run.global_batch_size is not None:
        training["global_batch_size"] = run.global_batch_size
    content: dict[str, Any] = {
        "job": {"description": "a run"},
        "model": {"name": "llama3" if name.startswith("llama") else "qwen3", "flavor": size.upper()},
        "optimizer": {"name": "Adam" if run.optimizer is Optimizer.ADAM else "AdamW", "lr": 1e-4},
        "training": training | (degrees if is_old else {}),
        "activation_checkpoint": {
            Checkpointing.NONE: {"mode": "none"},
            Checkpointing.FULL: {"mode": "full"},
            Checkpointing.BY_COMPILATION: {"mode": "memory_budget"},
            Checkpointing.SELECTIVE: {"mode": "selective", "selective_ac_option": "op"},
            Checkpointing.EVERY_NTH: {"mode": "selective", "selective_ac_option": str(run.checkpointed_every)},
        }[run.checkpointing or Checkpointing.NONE],
        "parallelism": {} if is_old else degrees,
    }
    if run.split is Split.GRADIENTS:
        content["parallelism"]["fsdp_reshard_after_forward"] = "never"
    return content


def axolotl_run(rng: random.Random) -> AskedRun:
    """Something that an axolotl configuration can ask for."""
    is_adapted = rng.random() < 0.5
    split = Split.NOTHING if rng.random() < 0.5 else rng.choice([Split.GRADIENTS, Split.PARAMETERS])
    place = Place.DEVICE if split is Split.NOTHING else rng.choice([Place.DEVICE, Place.HOST])
    is_kept = split is Split.NOTHING and not is_adapted
    half = Precision.PURE_BFLOAT16 if is_kept else Precision.MIXED_BFLOAT16
    fields: dict[str, Any] = {
        "model": "acme/some-model",
        "batch_size": rng.randint(1, 8),
        "micro_batches": rng.randint(1, 8),
        "sequence_length": rng.choice([512, 4096]),
        "is_packed": rng.choice([True, None]),
        "precision": rng.choice([Precision.FLOAT32, half]),
        "optimizer": rng.choice([Optimizer.ADAMW, Optimizer.LION, Optimizer.ADAMW_8BIT]),
        "max_gradient_norm": rng.choice([1.0, 0.0, 0.3]),
        "checkpointing": rng.choice([Checkpointing.NONE, Checkpointing.FULL]),
        "attention_kernel": rng.choice([None, AttentionKernel.FLASH_2, AttentionKernel.FLASH_3]),
        "loss_head": rng.choice([None, LossHead.FUSED, LossHead.CHUNKED]),
        "split": split,
        "parameters_on": None if split is Split.NOTHING or place is Place.DEVICE else place,
        "optimizer_on": None if split is Split.NOTHING or place is Place.DEVICE else place,
    }
    if split is not Split.NOTHING:
        fields["runtime"] = rng.choice([Runtime.FSDP, Runtime.FSDP_BACKWARD_POST, Runtime.FSDP2])
    if fields["checkpointing"] is Checkpointing.FULL:
        fields["offloads_inputs"] = rng.choice([True, None])
        # axolotl recomputes to the end unless it is told otherwise, or the inputs go to the host.
        fields["recomputes_whole"] = not fields["offloads_inputs"] and rng.random() < 0.5
    if fields["precision"] is Precision.PURE_BFLOAT16:
        # Without an attention in 16 bits the ends of the model are widened, which the answer leaves out.
        fields["attention_kernel"] = rng.choice([AttentionKernel.FLASH_2, AttentionKernel.FLASH_3])
    if fields["precision"] is not Precision.FLOAT32:
        fields["follows_device"] = rng.choice([True, None])
    if fields["loss_head"] is LossHead.CHUNKED:
        fields["loss_tiles"] = rng.choice([8, 4])
    if is_adapted:
        fields["lora"] = LoraOptions(
            rank=rng.choice([8, 64]),
            targets=rng.choice([(), ("q_proj", "v_proj"), ("k_proj",), ("self_attn.o_proj", "mlp.up_proj")]),
            dropout=rng.choice([0.0, 0.05]),
            use_dora=rng.random() < 0.2,
        )
        packed = rng.choice([None, INT8, NF4, GPTQ])
        fields["quantized"] = None if packed is None else QuantizationOptions(how=packed, products=KEEPING.get(packed))
    return known(fields)


NF4 = Quantization(type=QuantizedType.NF4, double=True)
INT8 = Quantization(type=QuantizedType.INT8)
KEEPING = {INT8: PackedProducts(release=LATEST_RELEASE)}
"""Maps of eight bits keep their inputs with every release of bitsandbytes."""
GPTQ = Quantization(type=QuantizedType.GPTQ, blocksize=128)


def axolotl(run: AskedRun, rng: random.Random) -> dict[str, Any]:
    """``run`` as an axolotl configuration."""
    content: dict[str, Any] = {
        "base_model": run.model,
        "micro_batch_size": run.batch_size,
        "sequence_len": run.sequence_length,
        "sample_packing": run.is_packed,
        "bf16": "auto" if run.follows_device else run.precision is not Precision.FLOAT32,
        "optimizer": {"adamw": "adamw_torch", "lion": "lion_32bit", "adamw-8bit": "adamw_8bit"}[str(run.optimizer)],
        "max_grad_norm": run.max_gradient_norm,
        "gradient_checkpointing": run.checkpointing is Checkpointing.FULL,
        "pad_to_sequence_len": True,
        "datasets": [{"path": "a", "type": "alpaca"}],
        "plugins": ["axolotl.integrations.kernels.KernelsPlugin"],
    }
    if rng.random() < 0.5:
        content["gradient_accumulation_steps"] = run.micro_batches
    else:
        content["batch_size"] = (run.micro_batches or 1) * (run.batch_size or 1)
    if run.attention_kernel is AttentionKernel.FLASH_2 and rng.random() < 0.5:
        content["flash_attention"] = True
    elif run.attention_kernel is not None or rng.random() < 0.3:
        names = {AttentionKernel.FLASH_2: "flash_attention_2", AttentionKernel.FLASH_3: "flash_attention_3"}
        content["attn_implementation"] = "sdpa" if run.attention_kernel is None else names[run.attention_kernel]
    if run.offloads_inputs:
        ways_off: list[dict[str, Any]] = [{"gradient_checkpointing": "offload"}, {"activation_offloading": True}]
        # With adapters those recompute nothing, which the answer leaves out.
        content |= rng.choice(ways_off) if run.lora is None else {"activation_offloading": "hidden_states"}
    elif run.checkpointing is Checkpointing.FULL and (not run.recomputes_whole or rng.random() < 0.5):
        content["gradient_checkpointing_kwargs"] = {"use_reentrant": run.recomputes_whole}
    liger, cut = (
        "axolotl.integrations.liger.LigerPlugin",
        "axolotl.integrations.cut_cross_entropy.CutCrossEntropyPlugin",
    )
    if run.loss_head is LossHead.FUSED:
        content |= rng.choice([{"liger_cross_entropy": True}, {"flash_attn_cross_entropy": True}])
        content["plugins"] += [liger] * ("liger_cross_entropy" in content)
    elif run.loss_head is LossHead.CHUNKED:
        content["chunked_cross_entropy_num_chunks"] = run.loss_tiles
        key, plugins = rng.choice(
            [("chunked_cross_entropy", []), ("cut_cross_entropy", [cut]), ("liger_fused_linear_cross_entropy", [liger])]
        )
        content["plugins"] += plugins
        if plugins != [cut] or rng.random() < 0.5:
            content[key] = True
    elif rng.random() < 0.5:
        # Without its plugin nobody reads a key of it; and what a plugin turns on may be turned off.
        content |= rng.choice(
            [
                {"cut_cross_entropy": True},
                {"liger_rms_norm": True, "liger_cross_entropy": True},
                {"plugins": [*content["plugins"], cut], "cut_cross_entropy": False},
            ]
        )
    if run.lora is not None:
        content["lora_mlp_kernel"] = False
        content |= {"adapter": "lora", "lora_r": run.lora.rank, "lora_alpha": 16, "lora_dropout": run.lora.dropout}
        content["peft_use_dora"] = run.lora.use_dora
        if not run.lora.targets:
            content |= rng.choice([{"lora_target_linear": True}, {"lora_target_modules": "all-linear"}])
        elif run.lora.targets == ("q_proj", "v_proj") and rng.random() < 0.5:
            content["lora_target_modules"] = r"model.layers.[\d]+.(self_attn|cross_attn).(q|v)_proj"
        else:
            content["lora_target_modules"] = list(run.lora.targets)
        if run.quantized is not None:
            ways: dict[QuantizedType, list[dict[str, Any]]] = {
                QuantizedType.INT8: [{"load_in_8bit": True}],
                QuantizedType.NF4: [{"adapter": "qlora"}, {"load_in_4bit": True}],
                QuantizedType.GPTQ: [{"gptq": True}],
            }
            content |= rng.choice(ways[run.quantized.how.type])
    if run.split is not Split.NOTHING:
        strategies = {Split.GRADIENTS: "SHARD_GRAD_OP", Split.PARAMETERS: "FULL_SHARD"}
        assert run.split is not None
        offloads = run.parameters_on is Place.HOST
        if run.runtime is Runtime.FSDP2:
            reshards = {"reshard_after_forward": run.split is Split.PARAMETERS, "offload_params": offloads}
            ways_on: list[dict[str, Any]] = [
                {"fsdp": ["full_shard"], "fsdp_config": reshards, "fsdp_version": 2},
                {"fsdp_config": reshards | {rng.choice(["fsdp_version", "version"]): 2}},
            ]
            content |= rng.choice(ways_on)
        else:
            post = run.runtime is Runtime.FSDP_BACKWARD_POST
            # axolotl pins the first FSDP where a file names no version.
            content |= rng.choice([{"fsdp": ["full_shard", "auto_wrap"]}, {"fsdp_version": 1}, {}])
            content["fsdp_config"] = {
                "fsdp_sharding_strategy": strategies[run.split],
                "fsdp_offload_params": offloads,
                "fsdp_backward_prefetch": "BACKWARD_POST" if post else "BACKWARD_PRE",
            }
    return content
