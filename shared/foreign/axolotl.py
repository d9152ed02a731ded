"""An axolotl configuration, read without axolotl."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from ..phases.quantization import GROUP_SIZE, LATEST_RELEASE, PackedProducts, Quantization, QuantizedType
from ..phases.tiling import LossHead
from ..schema.hardware import AttentionKernel
from ..schema.training_options import LoraOptions, QuantizationOptions
from ..schema.workload import Compiled
from .asked_run import Checkpointing, Precision, Reading, Split
from .axolotl_keys import AXOLOTL_KEYS
from .deepspeed import read_deepspeed
from .fsdp import fsdp_options, read_fsdp
from .keys import AUTO, Walk, attention_of, lora_targets, one_of, recomputes_whole, said
from .named_files import section
from .optimizers import optimizer_of

_OPTIMIZER: Final = "adamw_torch_fused"
_LENGTH: Final = 512
_LOSS_TILES: Final = 8
_MLP_TILES: Final = 4
_ADAPTERS: Final = {"lora": False, "qlora": True}
"""Whether the base is packed in 4 bits unless a file says otherwise."""
_TILED: Final = "logits are made in tiles, and never exist whole"


def read_axolotl(content: Mapping[str, Any], *, folder: Path | None = None) -> Reading:
    """What an axolotl configuration asks for; files that it names are looked for in ``folder``.

    Raises PlanError, one message, if it contradicts itself or a plan, FileError if a file that it names cannot be read.
    """
    walk = Walk(AXOLOTL_KEYS, content)
    lora, quantized = _adapter(walk)
    others = _shared(walk, folder)
    found: dict[str, Any] = {
        "model": walk.text("base_model_config") or walk.text("base_model"),
        **_step(walk),
        "sequence_length": walk.number("sequence_len", _LENGTH),
        "optimizer": optimizer_of(walk, "optimizer", walk.text("optimizer", _OPTIMIZER)),
        "max_gradient_norm": walk.real("max_grad_norm", 1.0),
        "is_packed": walk.flag("sample_packing") or None,
        "lora": lora,
        "quantized": quantized,
        "split": Split.NOTHING,
        "num_ranks": _world(walk),
        **_memory(walk),
        "attention_kernel": _attention(walk),
        "precision": _precision(walk, is_adapted=lora is not None, is_shared=bool(others)),
    }
    walk.means("base_model", "which model")
    walk.means("base_model_config", "which model, as its configuration has it")
    walk.means("sequence_len", "tokens of one row", usually=_LENGTH)
    walk.means("max_grad_norm", "limit of the norm of all gradients together; 0 for none", usually=1.0)
    if found["optimizer"] is not None:
        walk.means("optimizer", f"stepped by {found['optimizer'].words}", usually=_OPTIMIZER)
    if found["is_packed"]:
        walk.means("sample_packing", "rows are several samples, end to end")
    for other in others:
        fields = {name: getattr(other.run, name) for name in other.run.model_fields_set}
        found |= {name: value for name, value in fields.items() if value is not None and name != "optimizer"}
    found |= _degrees(walk, is_sharded=bool(others))
    return walk.reading(said(found), other=tuple(others))


def _degrees(walk: Walk, *, is_sharded: bool) -> dict[str, Any]:
    """Ranks that have parts between them, and replicas of such groups; together they are all ranks."""
    shards, replicas = walk.number("dp_shard_size"), walk.number("dp_replicate_size")
    if not is_sharded and shards is not None and shards > 1:
        walk.contradict(
            f"dp_shard_size is {shards}, and nothing says how ranks have parts between them. Write fsdp_config, or "
            f"leave it out."
        )
    if not is_sharded:
        walk.means("dp_replicate_size", "ranks that have all (DDP)")
        return {"num_ranks": replicas} if replicas is not None and replicas > 1 and not walk.has("world_size") else {}
    walk.means("dp_shard_size", "ranks that have parts between them")
    walk.means("dp_replicate_size", "replicas of such groups")
    if shards is None:
        return {} if replicas is None else {"replicas": replicas}
    return {"shard_ranks": shards, "replicas": replicas or 1}


def _world(walk: Walk) -> int | None:
    walk.means("world_size", "ranks that train together")
    return walk.number("world_size")


def _step(walk: Walk) -> dict[str, Any]:
    size, number = walk.number("micro_batch_size", 1), walk.number("gradient_accumulation_steps", 1)
    walk.means("micro_batch_size", "samples of a micro-batch on one rank", usually=1)
    of_step = walk.number("batch_size")
    if of_step is not None and size is not None and not walk.has("gradient_accumulation_steps"):
        walk.means("batch_size", "samples per step and rank")
        number, rest = divmod(of_step, size)
        if rest or not number:
            walk.contradict(f"batch_size is {of_step}, which micro_batch_size {size} does not divide. Change one.")
            number = None
    else:
        walk.means("gradient_accumulation_steps", "micro-batches per step and rank", usually=1)
    return {"batch_size": size, "micro_batches": number}


def _adapter(walk: Walk) -> tuple[LoraOptions | None, QuantizationOptions | None]:
    name = walk.text("adapter")
    is_4bit, is_8bit, is_gptq = walk.flag("load_in_4bit"), walk.flag("load_in_8bit"), walk.flag("gptq")
    if not name:
        if is_4bit or is_8bit or is_gptq:
            walk.contradict(
                "the base is packed (load_in_4bit, load_in_8bit, gptq), so that nothing is trained without an adapter. "
                "Write adapter: qlora, or adapter: lora with gptq."
            )
        return None, None
    if is_gptq and (is_4bit or is_8bit or name == "qlora"):
        walk.contradict(
            "gptq says that the base is packed already, and load_in_4bit, load_in_8bit and adapter: qlora pack it. "
            "Write gptq with adapter: lora alone."
        )
    is_packed: bool | None = one_of(walk, "adapter", _ADAPTERS, name)
    rank = walk.number("lora_r")
    if is_packed is None:
        return None, None
    if rank is None:
        walk.contradict(f"adapter is {name}, and has no rank. Write lora_r: 16.")
        return None, None
    walk.means("adapter", "low-rank matrices are trained beside linear maps")
    walk.means("lora_r", "their rank")
    dropout = walk.real("lora_dropout", 0.0) or 0.0
    if dropout > 1:
        walk.refuse("lora_dropout", "a part from 0 to 1")
    if walk.has("peft_autocast_adapter_dtype") and walk.flag("peft_autocast_adapter_dtype") is False:
        walk.leaves_out("peft_autocast_adapter_dtype", "adapters are stepped in 16 bits, without float32 masters")
    walk.means("lora_dropout", "part that is dropped of what they read")
    walk.means("peft_use_dora", "whether magnitudes are trained too")
    uses_dora = bool(walk.flag("peft_use_dora"))
    targets = () if _adapts_all(walk) else lora_targets(walk)
    lora = LoraOptions(rank=rank, targets=targets, dropout=min(dropout, 0.999), use_dora=uses_dora)
    how = None
    if is_gptq:
        how = Quantization(type=QuantizedType.GPTQ, blocksize=GROUP_SIZE)
        walk.means("gptq", f"the base is packed by GPTQ: in 4 bits and groups of {GROUP_SIZE} here")
    elif is_4bit or (is_packed and not is_8bit):
        how = Quantization(type=QuantizedType.NF4, double=True)
        walk.means("load_in_4bit", "the base is packed as NF4, its scales again", usually=True)
    elif is_8bit:
        how = Quantization(type=QuantizedType.INT8)
        walk.means("load_in_8bit", "the base is packed in 8 bits, whose maps keep their inputs until backward")
        return lora, QuantizationOptions(how=how, products=PackedProducts(release=LATEST_RELEASE))
    return lora, None if how is None else QuantizationOptions(how=how)


def _adapts_all(walk: Walk) -> bool:
    is_linear = bool(walk.flag("lora_target_linear"))
    if is_linear:
        walk.means("lora_target_linear", "all linear maps of a block are adapted")
    return is_linear


def _attention(walk: Walk) -> AttentionKernel | None:
    """``flash_attention``, which older files have, is FlashAttention-2."""
    if walk.has("attn_implementation"):
        return attention_of(walk, "attn_implementation", walk.value("attn_implementation"))
    return attention_of(walk, "flash_attention", "flash_attention_2" if walk.flag("flash_attention") else None)


def _memory(walk: Walk) -> dict[str, Any]:
    """Recomputation, offloaded inputs, and what runs in tiles."""
    given = walk.value("gradient_checkpointing")
    offloads = given in ("offload", "offload_disk") or walk.flag("activation_offloading")
    is_recomputed = given in ("offload", "offload_disk") or walk.flag("gradient_checkpointing")
    found: dict[str, Any] = {"checkpointing": Checkpointing.FULL if is_recomputed else Checkpointing.NONE}
    if walk.value("torch_compile") == AUTO or walk.flag("torch_compile"):
        walk.means("torch_compile", "the whole model is compiled by torch.compile")
        found["compiled"] = Compiled.MODEL
    if is_recomputed:
        walk.means("gradient_checkpointing", "every block is recomputed in backward")
        found["recomputes_whole"] = recomputes_whole(walk)
    if offloads and is_recomputed:
        found["offloads_inputs"] = True
        walk.means("activation_offloading", "inputs of recomputed blocks go to the host")
    elif offloads:
        walk.leaves_out("activation_offloading", "saved activations go to the host: less memory, longer steps")
    for key in ("chunked_cross_entropy", "cut_cross_entropy", "liger_fused_linear_cross_entropy"):
        if walk.flag(key):
            found["loss_head"] = LossHead.CHUNKED
            walk.means(key, _TILED)
    for key in ("liger_cross_entropy", "flash_attn_cross_entropy"):
        if walk.flag(key) and "loss_head" not in found:
            found["loss_head"] = LossHead.FUSED
            walk.means(key, "the gradient of the logits takes their place")
    tiles = walk.number("chunked_cross_entropy_num_chunks", _LOSS_TILES)
    if found.get("loss_head") is LossHead.CHUNKED and tiles is not None:
        found["loss_tiles"] = tiles
    if walk.flag("tiled_mlp"):
        found["mlp_tiles"] = walk.number("tiled_mlp_num_shards", _MLP_TILES)
        walk.means("tiled_mlp", "MLPs run in tiles of tokens")
    return found


def _shared(walk: Walk, folder: Path | None) -> list[Reading]:
    """What FSDP or DeepSpeed is asked to do."""
    others: list[Reading] = []
    options = fsdp_options(walk)
    config = walk.value("fsdp_config")
    if options is not None or config:
        settings = section(walk, "fsdp_config", folder)
        walk.means("fsdp", "ranks have parameters in parts (FSDP)")
        walk.means("fsdp_version", "of FSDP")
        version = {} if walk.value("fsdp_version") is None else {"fsdp_version": walk.value("fsdp_version")}
        others.append(read_fsdp(options or [], version | dict(settings)))
    if walk.value("deepspeed"):
        if others:
            walk.contradict("fsdp and deepspeed are both asked for. Leave one of the two out.")
        settings = section(walk, "deepspeed", folder)
        others.append(read_deepspeed(settings, prefix="deepspeed.", by_transformers=True))
    return others


def _precision(walk: Walk, *, is_adapted: bool, is_shared: bool) -> Precision:
    """Weights are loaded in the type that products compute in; FSDP and DeepSpeed step float32 masters of them."""
    brain = walk.value("bf16", AUTO)
    is_brain = brain in (AUTO, "full") or walk.flag("bf16") or walk.flag("bfloat16")
    is_half = walk.flag("fp16") or walk.flag("float16")
    if is_half and (brain not in (AUTO, False, None)):
        walk.contradict("bf16 and fp16 are both asked for. Leave one of the two out.")
    if is_half:
        for key in ("fp16", "float16"):
            walk.means(key, "products compute in float16")
        return (
            Precision.MIXED_FLOAT16 if is_shared or is_adapted or walk.flag("float16") else Precision.AUTOCAST_FLOAT16
        )
    if not is_brain:
        return Precision.FLOAT32
    if is_shared or is_adapted:
        about = "products compute in bfloat16, of which what is trained has float32 masters"
        walk.means("bf16", about, usually=AUTO)
        return Precision.MIXED_BFLOAT16
    walk.means("bf16", "weights are loaded in bfloat16 and stepped themselves, without masters", usually=AUTO)
    return Precision.PURE_BFLOAT16
