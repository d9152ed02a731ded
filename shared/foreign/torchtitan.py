"""A TOML file of torchtitan, in any of its layouts, read without torchtitan."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from ..methods.runtime_profile import Runtime
from ..phases.tiling import LossHead
from ..schema.optimizer import Optimizer
from ..schema.workload import Compiled, DType, Float8, Float8Gather
from .asked_run import Checkpointing, Place, Precision, Reading, Split
from .keys import Walk, one_of, said
from .optimizers import optimizer_of
from .torchtitan_keys import DEGREES, TORCHTITAN_KEYS

_MODELS: Final = {
    ("llama", "7b"): "llama-2-7b",
    ("llama", "13b"): "llama-2-13b",
    ("llama", "70b"): "llama-2-70b",
    ("llama2", "7b"): "llama-2-7b",
    ("llama2", "13b"): "llama-2-13b",
    ("llama2", "70b"): "llama-2-70b",
    ("llama3", "1b"): "llama-3.2-1b",
    ("llama3", "3b"): "llama-3.2-3b",
    ("llama3", "8b"): "llama-3.1-8b",
    ("llama3", "70b"): "llama-3.1-70b",
    ("llama3", "405b"): "llama-3.1-405b",
    **{("qwen3", size): f"qwen3-{size}" for size in ("0.6b", "1.7b", "4b", "8b", "14b", "32b")},
}
"""Models of the catalogue by torchtitan's name and flavor."""
_ATTENTIONS: Final = ("_flex_attn", "_varlen_attn", "_flex", "_varlen", "_flex_flash")
_NAME, _FLAVOR = "llama3", "debugmodel"
_BATCH_SIZE: Final = 8
_LENGTH: Final = 2048
_EVERY: Final = "2"
_DTYPES: Final = {"float32": False, "bfloat16": True}
_MODES: Final = {
    "none": Checkpointing.NONE,
    "full": Checkpointing.FULL,
    "selective": Checkpointing.EVERY_NTH,
    "memory_budget": Checkpointing.BY_COMPILATION,
}


_FLOAT8: Final = ("float8", "quantize.linear.float8")
"""What converters of linear maps to torchao's are called."""
_FLOAT8_BESIDE: Final = (
    ("filter_fqns", "some linear maps multiply in 16 bits; in the answer all of a block multiply in float8"),
    ("emulate", "products in float8 are emulated: they take longer than in the answer"),
    ("force_recompute_fp8_weight_in_bwd", "weights are cast once more in backward"),
)
_COMPONENTS: Final = ("model", "loss")
_RECIPE_KEYS: Final = ("float8.recipe_name", "quantize.linear.float8.recipe_name")
_GATHERS: Final = "enable_fsdp_float8_all_gather"
_AHEAD: Final = "precompute_float8_dynamic_scale_for_fsdp"
_RECIPES: Final = {"tensorwise": Float8.TENSORWISE, "rowwise": Float8.ROWWISE}


def read_torchtitan(content: Mapping[str, Any], *, optimizer: Optimizer | None = None) -> Reading:
    """What a file of torchtitan asks for; ``optimizer``: what somebody else names in the place of the file's.

    Raises PlanError, one message, if it contradicts itself or a plan.
    """
    walk = Walk(TORCHTITAN_KEYS, content)
    ranks = _ranks(walk)
    is_sharded = ranks["split"] is not Split.NOTHING
    found: dict[str, Any] = {
        "model": _model(walk),
        **_batch(walk),
        "sequence_length": walk.number("training.seq_len", _LENGTH),
        "max_gradient_norm": walk.real("training.max_norm", 1.0),
        "optimizer": optimizer_of(walk, "optimizer.name", walk.text("optimizer.name", "AdamW"), optimizer),
        **ranks,
        **_checkpointing(walk),
        "precision": _precision(walk, is_sharded=is_sharded),
        "reduce_dtype": _reduced(walk, is_sharded=is_sharded),
        "runtime": Runtime.FSDP2 if is_sharded else None,
    }
    walk.means("training.seq_len", "tokens of one row", usually=_LENGTH)
    walk.means("training.max_norm", "limit of the norm of all gradients together; 0 for none", usually=1.0)
    if found["optimizer"] is not None:
        walk.means("optimizer.name", f"stepped by {found['optimizer'].words}", usually="AdamW")
    if walk.flag("liger_kernel.enable_fused_linear_cross_entropy"):
        found["loss_head"] = LossHead.CHUNKED
        walk.means("liger_kernel.enable_fused_linear_cross_entropy", "logits are made in tiles, and never exist whole")
    return walk.reading(said(found | _lowering(walk, is_sharded=is_sharded)))


def _model(walk: Walk) -> str:
    name, flavor = walk.text("model.name", _NAME) or _NAME, walk.text("model.flavor", _FLAVOR) or _FLAVOR
    walk.means("model.name", "which model", usually=_NAME)
    walk.means("model.flavor", "which size of it", usually=_FLAVOR)
    size = flavor.lower()
    for ending in _ATTENTIONS:
        if size.endswith(ending):
            size = size.removesuffix(ending)
            walk.leaves_out("model.flavor", "attention leaves out what lies in other documents: it takes less time")
    return _MODELS.get((name.lower(), size), f"{name}/{flavor}")


def _batch(walk: Walk) -> dict[str, Any]:
    key = "training.local_batch_size"
    if not walk.has(key) and walk.has("training.batch_size"):
        key = "training.batch_size"
    size = walk.number(key, _BATCH_SIZE)
    walk.means(key, "samples of a micro-batch on one rank", usually=_BATCH_SIZE)
    of_all = walk.number("training.global_batch_size", -1, least=-1)
    walk.means("training.global_batch_size", "samples per step of all ranks; -1: one micro-batch on each")
    if of_all is None or of_all < 1:
        return {"batch_size": size, "micro_batches": 1}
    return {"batch_size": size, "global_batch_size": of_all}


def _ranks(walk: Walk) -> dict[str, Any]:
    """What ranks have in parts: sharded over some, replicated over others."""
    keys = [f"{section}.data_parallel_shard_degree" for section in DEGREES]
    shard_key = next((key for key in (*keys, "training.data_parallel_degree") if walk.has(key)), keys[0])
    replica_keys = [f"{section}.data_parallel_replicate_degree" for section in DEGREES]
    replica_key = next((key for key in replica_keys if walk.has(key)), replica_keys[0])
    shards, replicas = walk.number(shard_key, -1, least=-1) or 1, walk.number(replica_key, 1) or 1
    walk.means(shard_key, "ranks that have parts of the parameters between them (FSDP); -1: all", usually=-1)
    walk.means(replica_key, "replicas of that, or ranks of DDP where nothing is in parts", usually=1)
    is_offloaded = walk.flag("training.enable_cpu_offload")
    if is_offloaded:
        walk.means("training.enable_cpu_offload", "parameters, gradients and optimizer state lie on the host")
    place = Place.HOST if is_offloaded else Place.DEVICE
    found: dict[str, Any] = {"parameters_on": place, "optimizer_on": place}
    if shards == 1:
        if is_offloaded and replicas > 1:
            walk.contradict(
                f"training.enable_cpu_offload is true, but {shard_key} is 1: FSDP alone offloads. Set it to -1."
            )
        return found | {"split": Split.NOTHING, "num_ranks": replicas}
    policy = walk.text("parallelism.fsdp_reshard_after_forward", "default")
    policies = {"default": Split.PARAMETERS, "always": Split.PARAMETERS, "never": Split.GRADIENTS}
    found["split"] = one_of(walk, "parallelism.fsdp_reshard_after_forward", policies, policy)
    if policy == "never":
        walk.means("parallelism.fsdp_reshard_after_forward", "gathered parameters stay from forward to backward")
    else:
        walk.means("parallelism.fsdp_reshard_after_forward", "gathered parameters go after forward")
    if shards > 1:
        found["num_ranks"] = shards * replicas
        found["shard_ranks"] = shards if replicas > 1 else None
    elif replicas > 1:
        found["replicas"] = replicas
    return found


def _checkpointing(walk: Walk) -> dict[str, Any]:
    mode = walk.text("activation_checkpoint.mode", "selective")
    kind: Checkpointing | None = one_of(walk, "activation_checkpoint.mode", _MODES, mode)
    every = str(walk.value("activation_checkpoint.selective_ac_option", _EVERY))
    words = {
        Checkpointing.NONE: "nothing is recomputed",
        Checkpointing.FULL: "every block is recomputed in backward",
        Checkpointing.EVERY_NTH: "some blocks are recomputed, or some operations of each",
        Checkpointing.BY_COMPILATION: "what is recomputed is chosen by compilation",
    }
    if kind is None:
        return {}
    walk.means("activation_checkpoint.mode", words[kind], usually="selective")
    if kind is not Checkpointing.EVERY_NTH:
        return {"checkpointing": kind}
    key = "activation_checkpoint.selective_ac_option"
    if every == "op":
        walk.means(key, "attention and every second product of each block are kept, the rest is recomputed")
        return {"checkpointing": Checkpointing.SELECTIVE}
    if not every.isdecimal() or int(every) < 1:
        walk.refuse(key, '"op", or a whole number from 1')
        return {}
    walk.means(key, "one of so many blocks is recomputed", usually=_EVERY)
    if int(every) == 1:
        return {"checkpointing": Checkpointing.FULL}
    return {"checkpointing": Checkpointing.EVERY_NTH, "checkpointed_every": int(every)}


def _precision(walk: Walk, *, is_sharded: bool) -> Precision | None:
    of_products = "training.mixed_precision_param"
    weights = one_of(walk, "training.dtype", _DTYPES, walk.text("training.dtype", "float32"))
    products = one_of(walk, of_products, _DTYPES, walk.text(of_products, "bfloat16"))
    if weights is None or products is None:
        return None
    walk.means("training.dtype", "of weights, and of what is stepped", usually="float32")
    walk.means(of_products, "of products", usually="bfloat16")
    if weights:
        return Precision.PURE_BFLOAT16
    if not products:
        return Precision.FLOAT32
    return Precision.MIXED_BFLOAT16 if is_sharded else Precision.AUTOCAST_BFLOAT16


def _reduced(walk: Walk, *, is_sharded: bool) -> DType | None:
    """What FSDP reduces gradients in."""
    key = "training.mixed_precision_reduce"
    is_narrow = one_of(walk, key, _DTYPES, walk.text(key, "float32"))
    if is_narrow is None or not is_sharded:
        return None
    walk.means(key, "what gradients are reduced in", usually="float32")
    return DType.BFLOAT16 if is_narrow else DType.FLOAT32


def _lowering(walk: Walk, *, is_sharded: bool) -> dict[str, Any]:
    """What is compiled, and what multiplies in float8; torchao's casts are fused by compilation alone."""
    found: dict[str, Any] = {}
    if walk.flag("training.compile"):
        walk.means("training.compile", "every block is compiled by torch.compile")
        found["compiled"] = Compiled.BLOCKS
    if walk.flag("compile.enable"):
        found |= _components(walk)
    given = walk.value("model.converters")
    names = given.split(",") if isinstance(given, str) else given if isinstance(given, list) else []
    wanted = [name for name in (str(name).strip() for name in names) if name]
    key = "float8.enable_float8_linear" if walk.flag("float8.enable_float8_linear") else "model.converters"
    if key == "model.converters" and not wanted:
        return found
    recipe_key = next((key for key in _RECIPE_KEYS if walk.has(key)), _RECIPE_KEYS[0])
    scaling = _RECIPES.get(walk.text(recipe_key, "tensorwise") or "tensorwise")
    is_float8 = key != "model.converters" or (len(wanted) == 1 and wanted[0] in _FLOAT8)
    if not is_float8 or scaling is None or not found:
        walk.leaves_out(key, "products in fewer bits take less time than the answer's")
        return found
    walk.means(key, f"linear maps of blocks multiply in float8, scaled {scaling}")
    if walk.has(recipe_key):
        walk.means(recipe_key, f"scaled {scaling}")
    for section in _FLOAT8:
        for name, about in _FLOAT8_BESIDE:
            if walk.value(f"{section}.{name}") not in (None, False, [], "", ["output"], "output"):
                walk.leaves_out(f"{section}.{name}", about)
    return found | {"float8": scaling} | _narrow_gathers(walk, scaling, is_sharded=is_sharded)


def _components(walk: Walk) -> dict[str, Any]:
    """Which parts are compiled: both, unless the file says otherwise (``Compile`` in torchtitan's job_config.py)."""
    key = "compile.components"
    given = walk.value(key)
    names = given.split(",") if isinstance(given, str) else _COMPONENTS if given is None else given
    if not isinstance(names, list | tuple) or any(str(name).strip() not in _COMPONENTS for name in names):
        walk.refuse(key, "a list of model and loss")
        return {}
    parts = {str(name).strip() for name in names}
    if "model" not in parts:
        if parts:
            walk.leaves_out(key, "the loss alone is compiled: its logits are never widened to float32 in memory")
        return {}
    walk.means("compile.enable", "torch.compile is used")
    about = "blocks are compiled one by one" + (", and so is the loss" if "loss" in parts else "")
    walk.means(key, about, usually=_COMPONENTS)
    return {"compiled": Compiled.BLOCKS_AND_LOSS if "loss" in parts else Compiled.BLOCKS}


def _narrow_gathers(walk: Walk, scaling: Float8, *, is_sharded: bool) -> dict[str, Any]:
    """Whether weights are gathered in float8, which only FSDP does, and of one scale each."""
    section = next((name for name in _FLOAT8 if walk.has(f"{name}.{_GATHERS}")), _FLOAT8[0])
    key, ahead = f"{section}.{_GATHERS}", f"{section}.{_AHEAD}"
    if not walk.flag(key):
        return {}
    if scaling is not Float8.TENSORWISE:
        walk.contradict(
            f"{walk.prefix}{key} is true, but products are scaled {scaling}: torchao refuses it. Leave it out."
        )
        return {}
    if not is_sharded:
        walk.means(key, "no weight is in parts, so that none is gathered")
        return {}
    walk.means(key, "weights of float8 products are gathered in float8")
    is_ahead = bool(walk.flag(ahead))
    walk.means(ahead, "their scales are found of all at once, behind each step")
    return {"float8_gather": Float8Gather.PRECOMPUTED if is_ahead else Float8Gather.DYNAMIC}
