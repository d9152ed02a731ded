"""An axolotl configuration, read without axolotl."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from ..methods.runtime_profile import OF_FLAT_PARAMETERS
from ..phases.quantization import GROUP_SIZE, LATEST_RELEASE, PackedProducts, Quantization, QuantizedType
from ..phases.tiling import LossHead
from ..schema.hardware import AttentionKernel
from ..schema.optimizer import Optimizer
from ..schema.training_options import LoraOptions, QuantizationOptions
from ..schema.workload import Compiled
from .asked_run import Checkpointing, Precision, Reading, Split
from .axolotl_keys import (
    AXOLOTL_KEYS,
    CUT_PLUGIN,
    FUSED,
    LEFT_OUT_PLUGINS,
    LORA_KERNELS,
    OF_PLUGINS,
    OTHER_PLUGINS,
    WITHOUT_EFFECT_PLUGINS,
)
from .deepspeed import read_deepspeed
from .fsdp import fsdp_options, read_fsdp
from .keys import AUTO, TF32, Walk, attention_of, one_of, recomputes_whole, said, section
from .optimizers import optimizer_of
from .targets import lora_targets

_OPTIMIZER: Final = "adamw_torch_fused"
_LENGTH: Final = 512
_LOSS_TILES: Final = 8
_MLP_TILES: Final = 4
_ADAPTERS: Final = {"lora": False, "qlora": True}
"""Whether the base is packed in 4 bits unless a file says otherwise."""
_TILED: Final = "logits are made in tiles, and never exist whole"
_CHUNKED: Final = ("chunked_cross_entropy", "cut_cross_entropy", "liger_fused_linear_cross_entropy")
_FUSED_LOSSES: Final = ("liger_cross_entropy", "flash_attn_cross_entropy")
_LOSSES: Final = (*_CHUNKED, *_FUSED_LOSSES)
_OFFLOADINGS: Final = ("legacy", "disk", "hidden_states")
"""Values of ``activation_offloading`` beside true and false."""
_NARROW_ATTENTIONS: Final = ("flash_attention", "flex_attention", "sage_attention", "xformers_attention")
"""Older flags of attentions that take 16 bits alone."""
_FSDP: Final = 1
"""The version of FSDP where a file names none."""


def read_axolotl(
    content: Mapping[str, Any], *, folder: Path | None = None, optimizer: Optimizer | None = None
) -> Reading:
    """What an axolotl configuration asks for; files that it names are looked for in ``folder``.

    ``optimizer``: what somebody else names in the place of the file's.

    Raises PlanError, one message, if it contradicts itself or a plan, FileError if a file that it names cannot be read.
    """
    walk = Walk(AXOLOTL_KEYS, content)
    plugins = _plugins(walk)
    lora, quantized = _adapter(walk)
    others = _shared(walk, folder, optimizer)
    precision = _precision(walk, is_adapted=lora is not None, is_shared=bool(others))
    found: dict[str, Any] = {
        "model": walk.text("base_model_config") or walk.text("base_model"),
        **_step(walk),
        "sequence_length": walk.number("sequence_len", _LENGTH),
        "optimizer": optimizer_of(walk, "optimizer", walk.text("optimizer", _OPTIMIZER), optimizer),
        "max_gradient_norm": walk.real("max_grad_norm", 1.0),
        "is_packed": walk.flag("sample_packing") or None,
        "lora": lora,
        "quantized": quantized,
        "split": Split.NOTHING,
        "num_ranks": _world(walk),
        **_memory(walk, is_adapted=lora is not None),
        **_loss(walk, plugins),
        "attention_kernel": _attention(walk),
        **precision,
    }
    _tell(walk, found)
    _fused(walk, plugins)
    if lora is not None:
        _lora_kernels(walk, is_of_fsdp1=any(other.run.runtime in OF_FLAT_PARAMETERS for other in others))
    elif found["split"] is Split.NOTHING and not others:
        _wide_ends(walk, found, is_cut=_is_cut(walk, plugins))
    for other in others:
        fields = {name: getattr(other.run, name) for name in other.run.model_fields_set}
        found |= {name: value for name, value in fields.items() if value is not None and name != "optimizer"}
    found |= _degrees(walk, is_sharded=bool(others))
    return walk.reading(said(found), other=tuple(others))


def _tell(walk: Walk, found: Mapping[str, Any]) -> None:
    """Note what keys of the step mean."""
    walk.means("base_model", "which model")
    walk.means("base_model_config", "which model, as its configuration has it")
    walk.means("sequence_len", "tokens of one row", usually=_LENGTH)
    walk.means("max_grad_norm", "limit of the norm of all gradients together; 0 for none", usually=1.0)
    if found["optimizer"] is not None:
        walk.means("optimizer", f"stepped by {found['optimizer'].words}", usually=_OPTIMIZER)
    if found["is_packed"]:
        walk.means("sample_packing", "rows are several samples, end to end")
    elif not walk.flag("pad_to_sequence_len"):
        _rows_end_early(walk)


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


def _plugins(walk: Walk) -> Sequence[str]:
    """The classes of all plugins that are listed, which may have keys of their own, or train otherwise."""
    given = walk.value("plugins") or []
    if not isinstance(given, list) or not all(isinstance(path, str) for path in given):
        walk.refuse("plugins", "a list of classes by their paths")
        return ()
    names = [path.rpartition(".")[2] for path in given]
    known = {*WITHOUT_EFFECT_PLUGINS, *LEFT_OUT_PLUGINS, *OTHER_PLUGINS}
    for name in names:
        if name in OTHER_PLUGINS:
            walk.contradict(f"plugins lists {name}: {OTHER_PLUGINS[name]}. Leave it out.")
        elif name in LEFT_OUT_PLUGINS:
            walk.leaves_out("plugins", f"{name}: {LEFT_OUT_PLUGINS[name]}")
    others = [path for path, name in zip(given, names, strict=True) if name not in known and not _is_ours(path)]
    if others:
        walk.leaves_out("plugins", f"{', '.join(others)} may change time and memory; not in the answer")
    for key in OF_PLUGINS:
        if walk.has(key) and not _is_read(key, names):
            walk.means(key, f"nothing, as plugins does not list {OF_PLUGINS[key]}, which alone reads it")
    return names


def _is_ours(path: str) -> bool:
    return path.partition(".")[0] == "protwin"


def _is_read(key: str, plugins: Sequence[str]) -> bool:
    return key not in OF_PLUGINS or OF_PLUGINS[key] in plugins


def _fused(walk: Walk, plugins: Sequence[str]) -> None:
    """Name kernels of plugins that are on, none of which a plan has."""
    for key in OF_PLUGINS:
        if key not in _LOSSES and _is_read(key, plugins) and walk.flag(key):
            walk.leaves_out(key, FUSED)


def _lora_kernels(walk: Walk, *, is_of_fsdp1: bool) -> None:
    """Name fused kernels of adapters, which axolotl takes unless it is told not to, or cannot."""
    stated = [key for key in LORA_KERNELS if walk.has(key)]
    for key in stated:
        if walk.flag(key):
            walk.leaves_out(key, FUSED)
    is_8bit = walk.text("adapter") == "lora" and walk.flag("load_in_8bit")
    if not stated and not is_8bit and not walk.flag("trust_remote_code") and not is_of_fsdp1:
        about = f"{FUSED}: axolotl turns all of {', '.join(LORA_KERNELS)} on where a file is silent"
        walk.leaves_out(LORA_KERNELS[0], about, usually=True)


def _rows_end_early(walk: Walk) -> None:
    walk.leaves_out(
        "pad_to_sequence_len",
        "rows are as long as the longest sample of their batch; in the answer as long as sequence_len",
        usually=False,
    )


def _wide_ends(walk: Walk, found: Mapping[str, Any], *, is_cut: bool) -> None:
    """Name what axolotl widens to float32 for a training of all weights, unless a kernel needs 16 bits."""
    attention = walk.value("attn_implementation")
    is_cast = attention not in (None, "eager", "sdpa") or any(walk.content.get(key) for key in _NARROW_ATTENTIONS)
    is_narrow = found["precision"] is not Precision.FLOAT32
    if is_narrow and not is_cast and not is_cut:
        about = "embeddings, head and norms are stepped in float32 beside it: more memory than in the answer"
        walk.leaves_out("attn_implementation", about, usually="sdpa")


def _memory(walk: Walk, *, is_adapted: bool) -> dict[str, Any]:
    """Recomputation, offloaded inputs, and what runs in tiles."""
    given, offloading = walk.value("gradient_checkpointing"), walk.value("activation_offloading")
    deprecated = {"offload": True, "offload_disk": "disk"}.get(given) if isinstance(given, str) else None
    is_named = isinstance(offloading, str) and offloading in _OFFLOADINGS
    offloads = deprecated is not None or is_named or walk.flag("activation_offloading")
    is_recomputed = deprecated is not None or walk.flag("gradient_checkpointing")
    found: dict[str, Any] = {"checkpointing": Checkpointing.FULL if is_recomputed else Checkpointing.NONE}
    if walk.value("torch_compile") == AUTO or walk.flag("torch_compile"):
        walk.means("torch_compile", "the whole model is compiled by torch.compile")
        found["compiled"] = Compiled.MODEL
    if is_recomputed:
        walk.means("gradient_checkpointing", "every block is recomputed in backward")
        found["recomputes_whole"] = recomputes_whole(walk, usually=not offloads or offloading == "legacy")
    if offloads and is_recomputed:
        found["offloads_inputs"] = True
        _offloaded(walk, deprecated or offloading, is_adapted=is_adapted)
    elif offloads:
        walk.contradict(
            "activation_offloading moves inputs of recomputed blocks, but gradient_checkpointing is off, which axolotl "
            "refuses. Write gradient_checkpointing: true."
        )
    if walk.flag("tiled_mlp"):
        found["mlp_tiles"] = walk.number("tiled_mlp_num_shards", _MLP_TILES)
        walk.means("tiled_mlp", "MLPs run in tiles of tokens")
    return found


def _offloaded(walk: Walk, how: object, *, is_adapted: bool) -> None:
    """What goes where: axolotl recomputes nothing of adapters whose activations go to the host."""
    key = "activation_offloading" if walk.has("activation_offloading") else "gradient_checkpointing"
    if key == "activation_offloading":
        walk.means(key, "inputs of recomputed blocks go to the host")
    if how == "disk":
        walk.leaves_out(key, "they go to a file; in the answer to the host's memory")
    if is_adapted and how in (True, "disk"):
        walk.leaves_out(key, "all that is saved goes to the host, and nothing is recomputed; in the answer blocks are")


def _is_cut(walk: Walk, plugins: Sequence[str]) -> bool:
    return CUT_PLUGIN in plugins and ("cut_cross_entropy" not in walk.content or bool(walk.flag("cut_cross_entropy")))


def _loss(walk: Walk, plugins: Sequence[str]) -> dict[str, Any]:
    """How the loss is made of hidden states; listing a plugin is enough to turn its loss on."""
    found: dict[str, Any] = {}
    if _is_cut(walk, plugins) and "cut_cross_entropy" not in walk.content:
        found["loss_head"] = LossHead.CHUNKED
        walk.means("cut_cross_entropy", f"{_TILED}; {CUT_PLUGIN} turns it on", usually=True)
    for key in _CHUNKED:
        if _is_read(key, plugins) and walk.flag(key):
            found["loss_head"] = LossHead.CHUNKED
            walk.means(key, _TILED)
    for key in _FUSED_LOSSES:
        if _is_read(key, plugins) and walk.flag(key) and "loss_head" not in found:
            found["loss_head"] = LossHead.FUSED
            walk.means(key, "the gradient of the logits takes their place")
    tiles = walk.number("chunked_cross_entropy_num_chunks", _LOSS_TILES)
    if found.get("loss_head") is LossHead.CHUNKED and tiles is not None:
        found["loss_tiles"] = tiles
    return found


def _shared(walk: Walk, folder: Path | None, optimizer: Optimizer | None) -> list[Reading]:
    """What FSDP or DeepSpeed is asked to do."""
    others: list[Reading] = []
    options = fsdp_options(walk)
    config = walk.value("fsdp_config")
    if options is not None or config:
        settings = section(walk, "fsdp_config", folder)
        walk.means("fsdp", "ranks have parameters in parts (FSDP)")
        walk.means("fsdp_version", "of FSDP")
        version = walk.number("fsdp_version")
        if version is None and not {"version", "fsdp_version"} & settings.keys():
            walk.means("fsdp_version", "the first FSDP", usually=_FSDP)
        others.append(read_fsdp(options or [], settings, version=version or _FSDP))
    if walk.value("deepspeed"):
        if others:
            walk.contradict("fsdp and deepspeed are both asked for. Leave one of the two out.")
        settings = section(walk, "deepspeed", folder)
        others.append(read_deepspeed(settings, prefix="deepspeed.", by_transformers=True, optimizer=optimizer))
    return others


def _precision(walk: Walk, *, is_adapted: bool, is_shared: bool) -> dict[str, Any]:
    """Element types, and whether these are for the device to choose."""
    precision = _stated_precision(walk, is_adapted=is_adapted, is_shared=is_shared)
    if precision is Precision.FLOAT32 and walk.flag("tf32"):
        walk.leaves_out("tf32", TF32)
    stated = any(walk.has(key) for key in ("fp16", "float16", "bfloat16"))
    is_open = precision is not Precision.FLOAT32 and walk.value("bf16", AUTO) == AUTO and not stated
    return {"precision": precision, "follows_device": is_open or None}


def _stated_precision(walk: Walk, *, is_adapted: bool, is_shared: bool) -> Precision:
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
