"""A DeepSpeed configuration, as JSON or within another file, read without DeepSpeed.

``"auto"`` is what the caller of DeepSpeed fills in, as transformers does from its TrainingArguments: not said here, but
for what these have unless they are told otherwise, and for what follows from the model.
Source: ``integrations/deepspeed.py`` of transformers 5 (``fill_match``, ``trainer_config_finalize``); Accelerate fills
in the same sizes (``_prepare_deepspeed``).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from ..methods.runtime_profile import Runtime
from ..schema.optimizer import Optimizer
from ..schema.workload import DType
from .asked_run import Place, Precision, Reading, Split
from .deepspeed_keys import DEEPSPEED_KEYS
from .keys import AUTO, Walk, one_of, said
from .optimizers import optimizer_of

_STAGES: Final = (Split.NOTHING, Split.OPTIMIZER, Split.GRADIENTS, Split.PARAMETERS)
_STAGE_WORDS: Final = (
    "ZeRO is off: every rank has all",
    "ZeRO-1: ranks have optimizer state in parts",
    "ZeRO-2: ranks have optimizer state and gradients in parts",
    "ZeRO-3: ranks have parameters, gradients and optimizer state in parts",
)
_RUNTIMES: Final = (None, Runtime.DEEPSPEED_ZERO1, Runtime.DEEPSPEED_ZERO2, Runtime.DEEPSPEED_ZERO3)
_DEVICES: Final = {"none": Place.DEVICE, "cpu": Place.HOST, "nvme": Place.DISK}
_REDUCED: Final = {
    "fp32": DType.FLOAT32,
    "float32": DType.FLOAT32,
    "bf16": DType.BFLOAT16,
    "bfp16": DType.BFLOAT16,
    "bfloat16": DType.BFLOAT16,
    "fp16": DType.FLOAT16,
    "float16": DType.FLOAT16,
}
_ZERO: Final = "zero_optimization"
_WITHOUT_STAGE: Final = frozenset(
    {
        *("prefetch_bucket_size", "param_persistence_threshold", "model_persistence_threshold", "max_live_parameters"),
        *("max_reuse_distance", "gather_16bit_weights_on_model_save", "module_granularity_threshold"),
        *("use_all_reduce_for_fetch_params", "allgather_sequential", "partition_stream_chunk_size"),
    }
)
"""Names of fields whose aliases begin with ``stage3_``."""
_FOLLOWS: Final = "by transformers with the square of the model's hidden size"
_FOLLOWS_AHEAD: Final = "by transformers with nine tenths of the square of the model's hidden size"
_USUAL_NORM: Final = 1.0
"""``max_grad_norm`` of TrainingArguments."""
MAX_LIVE_PARAMETERS: Final = 10**9
PREFETCHED_PARAMETERS: Final = 5 * 10**7
"""What ZeRO-3 has where a file does not say (DeepSpeed, zero/config.py)."""
_USUAL_THRESHOLD: Final = 10**6
"""Parameters of so many scalars are norms and biases; from here on matrices of small models would stay too."""


def read_deepspeed(
    content: Mapping[str, Any],
    *,
    prefix: str = "",
    by_transformers: bool = False,
    optimizer: Optimizer | None = None,
) -> Reading:
    """What a DeepSpeed configuration asks for.

    ``by_transformers``: whether it lies beside TrainingArguments, whose optimizer and norm count where it is silent;
    ``optimizer``: what somebody else names in the place of the file's.
    Raises PlanError, one message, if it contradicts itself or a plan.
    """
    walk = Walk(DEEPSPEED_KEYS, _with_usual_names(content), prefix)
    found: dict[str, Any] = {
        "batch_size": walk.number("train_micro_batch_size_per_gpu"),
        "micro_batches": walk.number("gradient_accumulation_steps"),
        "global_batch_size": walk.number("train_batch_size"),
        "optimizer": optimizer_of(walk, "optimizer.type", walk.text("optimizer.type"), optimizer),
        "precision": _precision(walk, by_transformers=by_transformers),
        **_zero(walk),
    }
    reduced = one_of(walk, "communication_data_type", _REDUCED, walk.text("communication_data_type"))
    walk.means("communication_data_type", "what gradients are reduced in")
    found["reduce_dtype"] = reduced
    found["max_gradient_norm"] = _norm(walk, by_transformers=by_transformers)
    walk.means("train_micro_batch_size_per_gpu", "samples of a micro-batch on one rank")
    walk.means("gradient_accumulation_steps", "micro-batches per step and rank")
    walk.means("train_batch_size", "samples per step of all ranks")
    if found["optimizer"] is not None:
        walk.means("optimizer.type", f"stepped by {found['optimizer'].words}")
    return walk.reading(said(found))


def _with_usual_names(content: Mapping[str, Any]) -> Mapping[str, Any]:
    """``content`` with the names that keys of ZeRO-3 are documented by; DeepSpeed takes them without ``stage3_`` too.

    Source: ``DeepSpeedZeroConfig``, whose fields have these names as aliases (``populate_by_name``), version 0.19.
    """
    zero = content.get(_ZERO)
    if not isinstance(zero, Mapping):
        return content
    found = {f"stage3_{name}" if name in _WITHOUT_STAGE else name: value for name, value in zero.items()}
    return {**content, _ZERO: found}


def _norm(walk: Walk, *, by_transformers: bool) -> float | None:
    walk.means(
        "gradient_clipping",
        "limit of the norm of all gradients together; 0 for none",
        filled_in="from max_grad_norm of transformers" + ("" if by_transformers else ": 1 unless told otherwise"),
    )
    if walk.value("gradient_clipping") == AUTO:
        return None if by_transformers else _USUAL_NORM
    is_silent = not walk.has("gradient_clipping")
    return None if is_silent and by_transformers else walk.real("gradient_clipping", 0.0)


def _precision(walk: Walk, *, by_transformers: bool) -> Precision | None:
    halves = {name: walk.flag(f"{name}.enabled") for name in ("bf16", "bfloat16", "fp16")}
    sections = [name for name in halves if isinstance(walk.content.get(name), Mapping)]
    on = [name for name in sections if halves[name]]
    for name in sections:
        walk.means(f"{name}.enabled", "computes in 16 bits, with float32 masters")
    if len(on) > 1:
        walk.contradict(f"{walk.prefix}{on[0]} and {on[1]} are both enabled. Choose one.")
    if on:
        if on[0] == "fp16":
            if walk.flag("fp16.auto_cast"):
                walk.leaves_out("fp16.auto_cast", "inputs alone are cast, which takes no time to speak of")
            return Precision.MIXED_FLOAT16
        if walk.flag("bf16.bf16_master_weights_and_grads") and walk.flag("bf16.bf16_optimizer_states"):
            walk.means("bf16.bf16_master_weights_and_grads", "weights are their own masters")
            return Precision.PURE_BFLOAT16
        if walk.flag("bf16.bf16_master_weights_and_grads"):
            walk.leaves_out("bf16.bf16_master_weights_and_grads", "masters take less memory than in the answer")
        return Precision.MIXED_BFLOAT16
    if by_transformers or any(walk.value(f"{name}.enabled") == AUTO for name in sections):
        return None
    return Precision.FLOAT32


def _zero(walk: Walk) -> dict[str, Any]:
    stage = walk.number(f"{_ZERO}.stage", 0, least=0)
    if walk.value(f"{_ZERO}.stage") == AUTO:
        walk.refuse(f"{_ZERO}.stage", "0, 1, 2 or 3, which nobody fills in,")
    if stage is None:
        return {}
    if stage >= len(_STAGES):
        walk.refuse(f"{_ZERO}.stage", "0, 1, 2 or 3")
        return {}
    walk.means(f"{_ZERO}.stage", _STAGE_WORDS[stage])
    optimizer_on = _place(walk, "offload_optimizer", legacy="cpu_offload")
    parameters_on = _place(walk, "offload_param", legacy="cpu_offload_params")
    if walk.flag(f"{_ZERO}.cpu_offload_param"):
        parameters_on = Place.HOST
    if parameters_on is not Place.DEVICE and stage < 3:
        walk.contradict(
            f"{walk.prefix}{_ZERO}.offload_param moves parameters off the device, which ZeRO-3 alone does, but the "
            f"stage is {stage}. Write stage 3, or leave it out."
        )
    if optimizer_on is not Place.DEVICE and stage < 1:
        walk.contradict(
            f"{walk.prefix}{_ZERO}.offload_optimizer needs stage 1, 2 or 3, but the stage is {stage}. Write one of "
            f"them, or leave it out."
        )
    found: dict[str, Any] = {
        "split": _STAGES[stage],
        "optimizer_on": optimizer_on,
        "parameters_on": parameters_on,
    }
    group = walk.number(f"{_ZERO}.mics_shard_size", least=-1)
    if group is not None and group > 0 and stage == 3:
        found["shard_ranks"] = group
        walk.means(f"{_ZERO}.mics_shard_size", "ranks that have parts between them, with replicas across such groups")
    if stage:
        found["runtime"] = _RUNTIMES[stage]
    if Place.DISK in (optimizer_on, parameters_on) and walk.value("aio"):
        walk.leaves_out("aio", "how the disk is read and written; in the answer at the speed that the machine has")
    found |= _buckets(walk, stage, optimizer_on)
    if stage == 3:
        threshold = f"{_ZERO}.stage3_param_persistence_threshold"
        if (walk.number(threshold, least=0) or 0) > _USUAL_THRESHOLD:
            walk.leaves_out(threshold, "smaller parameters stay whole on every device: more memory, fewer gathers")
        if optimizer_on is Place.HOST and parameters_on is Place.DEVICE:
            found["runtime"] = Runtime.DEEPSPEED_OFFLOAD
        live, ahead = f"{_ZERO}.stage3_max_live_parameters", f"{_ZERO}.stage3_prefetch_bucket_size"
        for key, name, usual, about, filled_in in (
            (live, "live_parameters", MAX_LIVE_PARAMETERS, "parameters gathered at a time", "by DeepSpeed itself: 1e9"),
            (ahead, "prefetched_parameters", PREFETCHED_PARAMETERS, "parameters fetched ahead", _FOLLOWS_AHEAD),
        ):
            value = walk.number(key, least=0)
            found[name] = usual if value is None else value
            walk.means(key, f"{about}, at most", filled_in=filled_in)
        if walk.value(ahead) == AUTO:
            found["prefetch_follows_model"] = True
    return found


def _buckets(walk: Walk, stage: int, optimizer_on: Place) -> dict[str, Any]:
    """What gradients are reduced in; with the optimizer on the host, ZeRO-1 and -2 have it whatever the file says."""
    size, flat, overlap = (f"{_ZERO}.{key}" for key in ("reduce_bucket_size", "contiguous_gradients", "overlap_comm"))
    scalars, overlaps = walk.number(size, least=0), walk.flag(overlap, default=stage == 3)
    is_flat = walk.flag(flat, default=True)
    if walk.has(overlap) and overlaps is False:
        walk.leaves_out(overlap, "collectives do not run beside computation: steps take longer")
    if is_flat and stage:
        walk.means(flat, "gradients are copied into one buffer")
    if is_flat is False:
        walk.leaves_out(flat, "gradients are not copied into one buffer: less is copied than in the answer")
        if stage == 3 or optimizer_on is Place.DEVICE:
            return {"bucket_scalars": 0} if stage else {}
    if not stage:
        return {}
    walk.means(size, "scalars of the flat buffer that gradients are reduced in", filled_in=_FOLLOWS)
    found: dict[str, Any] = {} if scalars is None else {"bucket_scalars": scalars}
    if walk.value(size) == AUTO:
        found["bucket_follows_model"] = True
    if overlaps and stage < 3:
        walk.means(overlap, "reductions run beside backward, which fills a second buffer meanwhile")
        found["has_two_buckets"] = True
    return found


def _place(walk: Walk, section: str, *, legacy: str) -> Place:
    key = f"{_ZERO}.{section}.device"
    place: Place | None = one_of(walk, key, _DEVICES, walk.text(key))
    if walk.value(key) == AUTO:
        walk.refuse(key, "none, cpu or nvme, which nobody fills in,")
    what = "optimizer state is stepped" if section == "offload_optimizer" else "parameters lie"
    if place is not None:
        where = {Place.DEVICE: "on the device", Place.HOST: "on the host", Place.DISK: "on the host's disk"}[place]
        walk.means(key, f"{what} {where}" if place is not Place.DISK else f"{what} from the host's disk")
        pinned = f"{_ZERO}.{section}.pin_memory"
        if place is Place.HOST and walk.has(pinned) and walk.flag(pinned) is False:
            walk.leaves_out(pinned, "copies from memory that is not pinned take longer than the answer's")
        return place
    if walk.flag(f"{_ZERO}.{legacy}"):
        walk.means(f"{_ZERO}.{legacy}", f"{what} on the host")
        return Place.HOST
    return Place.DEVICE
