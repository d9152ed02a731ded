"""TrainingArguments of transformers as JSON, whole or a few fields of them, read without transformers.

``TrainingArguments.to_json_string`` writes them so.  A file may also hold them as ``training_args``, with the sections
``fsdp_config`` and ``deepspeed`` in them or beside them.  Fields of TRL's SFTConfig and ModelConfig, which its scripts
take in one file with them, are read too.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from ..phases.quantization import LATEST_RELEASE, PackedProducts, Quantization, QuantizedType
from ..phases.tiling import LossHead
from ..schema.training_options import LoraOptions, QuantizationOptions
from ..schema.workload import Compiled
from .asked_run import AskedRun, Checkpointing, Precision, Reading, Split
from .deepspeed import read_deepspeed
from .fsdp import fsdp_options, read_fsdp
from .keys import Walk, attention_of, lora_targets, one_of, recomputes_whole, said, shown
from .named_files import section
from .optimizers import optimizer_of
from .training_arguments_keys import TRAINING_ARGUMENTS_KEYS

_BATCH_SIZE: Final = 8
"""``per_device_train_batch_size`` where nobody says."""
_OPTIMIZER: Final = "adamw_torch_fused"
_SFT_FIELDS: Final = frozenset(
    {
        *("max_length", "max_seq_length", "packing", "padding_free", "dataset_text_field"),
        *("use_peft", "lora_r", "load_in_4bit", "load_in_8bit", "use_bnb_nested_quant"),
    }
)
"""Keys that SFTConfig of TRL has, or the ModelConfig beside it, and TrainingArguments have not."""
_SFT_LENGTH: Final = 1024
NESTED: Final = "training_args"
"""The key of a file that holds TrainingArguments beside other things."""


def read_training_arguments(content: Mapping[str, Any], *, folder: Path | None = None) -> Reading:
    """What TrainingArguments ask for; files that they name are looked for in ``folder``.

    Raises PlanError, one message, if they contradict themselves or a plan, FileError if a file that they name cannot be
    read.
    """
    nested = content.get(NESTED)
    if isinstance(nested, Mapping):
        beside = {name: value for name, value in content.items() if name in ("fsdp_config", "deepspeed")}
        content = {**nested, **beside}
    walk = Walk(TRAINING_ARGUMENTS_KEYS, content)
    is_sft = bool(_SFT_FIELDS & content.keys())
    found: dict[str, Any] = {
        "batch_size": walk.number("per_device_train_batch_size", _BATCH_SIZE),
        "micro_batches": walk.number("gradient_accumulation_steps", 1),
        "max_gradient_norm": walk.real("max_grad_norm", 1.0),
        "optimizer": optimizer_of(walk, "optim", walk.text("optim", _OPTIMIZER)),
        "split": Split.NOTHING,
        **_memory(walk, is_sft=is_sft),
        **_rows(walk, is_sft=is_sft),
        **_of_model(walk),
    }
    if walk.has("per_gpu_train_batch_size"):
        found["batch_size"] = walk.number("per_gpu_train_batch_size")
    usual = None if walk.has("per_gpu_train_batch_size") else _BATCH_SIZE
    walk.means("per_device_train_batch_size", "samples of a micro-batch on one rank", usually=usual)
    walk.means("gradient_accumulation_steps", "micro-batches per step and rank", usually=1)
    walk.means("max_grad_norm", "limit of the norm of all gradients together; 0 for none", usually=1.0)
    if found["optimizer"] is not None:
        walk.means("optim", f"stepped by {found['optimizer'].words}", usually=_OPTIMIZER)
    others: list[Reading] = []
    if (options := fsdp_options(walk)) is not None:
        config = section(walk, "fsdp_config", folder)
        walk.means("fsdp", "ranks have parameters in parts (FSDP)")
        others.append(read_fsdp(options, config))
    if walk.value("deepspeed"):
        if others:
            walk.contradict("fsdp and deepspeed are both asked for. Leave one of the two out.")
        others.append(read_deepspeed(section(walk, "deepspeed", folder), prefix="deepspeed.", by_transformers=True))
    precision = _precision(walk, others, is_sft=is_sft)
    if found.get("quantized") is not None or (found.get("lora") is not None and _loaded_in(walk) in _NARROW):
        precision = _beside_adapters(precision, _loaded_in(walk))
    run = said(found | {"precision": precision})
    for other in others:
        _agree(walk, run, other)
        beside = {name: getattr(other.run, name) for name in other.run.model_fields_set if name != "precision"}
        run = said({name: getattr(run, name) for name in run.model_fields_set} | _not_none(beside))
    return walk.reading(run, other=tuple(others))


def _not_none(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}


def _precision(walk: Walk, others: list[Reading], *, is_sft: bool) -> Precision:
    """Of the Trainer's own autocast, or of what FSDP and DeepSpeed make of it."""
    is_half, is_brain = walk.flag("fp16"), walk.flag("bf16")
    if is_sft and not walk.has("bf16"):
        is_brain = not is_half
    if is_half and is_brain:
        walk.contradict("bf16 and fp16 are both true. Choose one.")
    for key, usual in (("bf16", True if is_sft and is_brain else None), ("fp16", None)):
        if walk.flag(key) or (usual and not walk.has(key)):
            walk.means(key, "products compute in 16 bits, weights are stepped in float32", usually=usual)
    own = next((one.run.precision for one in others if one.run.precision is not None), None)
    if own is not None and not (is_brain or is_half):
        return own
    if others:
        return Precision.MIXED_BFLOAT16 if is_brain else Precision.MIXED_FLOAT16 if is_half else Precision.FLOAT32
    if is_brain:
        return Precision.AUTOCAST_BFLOAT16
    return Precision.AUTOCAST_FLOAT16 if is_half else Precision.FLOAT32


def _memory(walk: Walk, *, is_sft: bool) -> dict[str, Any]:
    """Recomputation, offloaded inputs, and the head."""
    is_recomputed = walk.flag("gradient_checkpointing", is_sft) or walk.flag("activation_checkpointing")
    for key, usual in (("gradient_checkpointing", is_sft), ("activation_checkpointing", False)):
        if walk.flag(key, usual):
            walk.means(key, "every block is recomputed in backward", usually=usual or None)
    found: dict[str, Any] = {"checkpointing": Checkpointing.FULL if is_recomputed else Checkpointing.NONE}
    if _is_compiled(walk):
        found["compiled"] = Compiled.MODEL
    if is_recomputed:
        found["recomputes_whole"] = recomputes_whole(walk)
    if walk.flag("activation_offloading"):
        if is_recomputed:
            walk.means("activation_offloading", "inputs of recomputed blocks go to the host")
            found["offloads_inputs"] = True
        else:
            walk.leaves_out("activation_offloading", "saved activations go to the host: less memory, longer steps")
    tiled = "logits are made in tiles, and never exist whole"
    if walk.flag("use_liger_kernel"):
        walk.leaves_out(
            "use_liger_kernel", "norms, rotations and activations are fused: less memory and time than in the answer"
        )
        if _liger(walk, "fused_linear_cross_entropy", usually=True):
            walk.means("use_liger_kernel", tiled)
            found["loss_head"] = LossHead.CHUNKED
        elif _liger(walk, "cross_entropy", usually=False):
            walk.means("liger_kernel_config", "the gradient of the logits takes their place")
            found["loss_head"] = LossHead.FUSED
    kind = walk.text("loss_type") or "nll"
    if kind.startswith("chunked"):
        walk.means("loss_type", tiled)
        found["loss_head"] = LossHead.CHUNKED
    elif kind not in _SFT_LOSSES:
        walk.contradict(
            f"loss_type is {shown(kind)}, which SFTTrainer does not have. Other Trainers of TRL run more than one "
            f"forward per sample, and no plan does. Choose from {', '.join(_SFT_LOSSES)}, chunked_nll."
        )
    elif kind != "nll":
        walk.leaves_out("loss_type", "the loss reads logits once more")
    return found | _loaded(walk)


_SFT_LOSSES: Final = ("nll", "dft")

_LOADED: Final = ("dtype", "torch_dtype", "attn_implementation", "use_cache", "trust_remote_code", "revision")
"""What ``from_pretrained`` is told that is answered, or takes neither time nor memory in a step."""


def _loaded(walk: Walk) -> dict[str, Any]:
    """How the model is loaded: its element type, and what computes attention."""
    key = "model_init_kwargs"
    init = walk.value(key)
    if not init:
        return {}
    if not isinstance(init, Mapping):
        walk.refuse(key, "a section of keys")
        return {}
    dtype = init.get("dtype", init.get("torch_dtype"))
    if dtype not in (None, "auto", "float32"):
        walk.leaves_out(key, f"weights are loaded in {dtype}; in the answer masters are float32")
    if others := [name for name in init if name not in _LOADED]:
        walk.leaves_out(key, f"{', '.join(map(str, others))} may change time and memory; not in the answer")
    kernel = attention_of(walk, key, init.get("attn_implementation"))
    return {} if kernel is None else {"attention_kernel": kernel}


_RANK: Final = 16
_DROPOUT: Final = 0.05
_OF_ADAPTERS: Final = ("lora_r", "lora_dropout", "lora_target_modules", "lora_modules_to_save", "use_dora")


_BESIDE_ADAPTERS: Final = {
    Precision.AUTOCAST_BFLOAT16: Precision.MIXED_BFLOAT16,
    Precision.AUTOCAST_FLOAT16: Precision.MIXED_FLOAT16,
}
"""Of a frozen base that is loaded in 16 bits, so that nothing is cast where products read it."""


_NARROW: Final = {"bfloat16": Precision.MIXED_BFLOAT16, "float16": Precision.MIXED_FLOAT16}
_TYPES: Final = ("auto", "float32", *_NARROW)
_LOADED_IN: Final = ("dtype", "torch_dtype")


def _loaded_in(walk: Walk) -> str:
    """The element type that weights are loaded in; "" where nobody says."""
    return next((walk.value(key) for key in _LOADED_IN if walk.has(key) and walk.value(key) in _TYPES), "")


def _beside_adapters(precision: Precision, loaded: str) -> Precision:
    """Of a run whose frozen base is narrow: products compute in the base's type where nothing is cast to another."""
    if precision is Precision.FLOAT32:
        return _NARROW.get(loaded, precision)
    return _BESIDE_ADAPTERS.get(precision, precision)


def _of_model(walk: Walk) -> dict[str, Any]:
    """TRL's ModelConfig: which model, how it is loaded, and its adapters."""
    found: dict[str, Any] = {}
    if walk.has("model_name_or_path"):
        found["model"] = walk.text("model_name_or_path")
        walk.means("model_name_or_path", "which model")
    if walk.has("attn_implementation"):
        key = "attn_implementation"
        found["attention_kernel"] = attention_of(walk, key, walk.value(key))
    is_4bit, is_8bit = walk.flag("load_in_4bit"), walk.flag("load_in_8bit")
    for key in _LOADED_IN:
        if walk.has(key) and walk.value(key) not in _TYPES:
            walk.contradict(f"{key} is {shown(walk.value(key))}. Choose from {', '.join(_TYPES)}.")
        elif walk.value(key) == "auto" and not (is_4bit or is_8bit):
            walk.leaves_out(key, "weights are loaded in the type that they are published in; in the answer in float32")
        elif walk.value(key) in _NARROW and not walk.flag("use_peft"):
            walk.leaves_out(key, f"weights are loaded in {walk.value(key)}; in the answer masters are float32")
        else:
            walk.means(key, "the element type that weights are loaded in")
    if not walk.flag("use_peft"):
        if is_4bit or is_8bit:
            walk.contradict(
                "the base is packed (load_in_4bit, load_in_8bit), so that nothing is trained without an adapter. Write "
                "use_peft: true."
            )
        for key in _OF_ADAPTERS:
            walk.means(key, "nothing, as use_peft is not true")
        return found
    walk.means("use_peft", "low-rank matrices are trained beside linear maps")
    rank, dropout = walk.number("lora_r", _RANK), walk.real("lora_dropout", _DROPOUT) or 0.0
    if dropout > 1:
        walk.refuse("lora_dropout", "a part from 0 to 1")
    walk.means("lora_r", "their rank", usually=_RANK)
    walk.means("lora_dropout", "part that is dropped of what they read", usually=_DROPOUT)
    walk.means("use_dora", "whether magnitudes are trained too")
    if walk.value("lora_modules_to_save"):
        walk.leaves_out("lora_modules_to_save", "modules are trained whole beside adapters: more memory and time")
    targets, uses_dora = lora_targets(walk), bool(walk.flag("use_dora"))
    if rank is not None:
        found["lora"] = LoraOptions(rank=rank, targets=targets, dropout=min(dropout, 0.999), use_dora=uses_dora)
    return found | _packed(walk, is_4bit=bool(is_4bit), is_8bit=bool(is_8bit))


def _packed(walk: Walk, *, is_4bit: bool, is_8bit: bool) -> dict[str, Any]:
    """How the base is packed."""
    if is_4bit and is_8bit:
        walk.contradict("load_in_4bit and load_in_8bit are both true. Choose one.")
    if is_8bit:
        walk.means("load_in_8bit", "the base is packed in 8 bits, whose maps keep their inputs until backward")
        how = Quantization(type=QuantizedType.INT8)
        return {"quantized": QuantizationOptions(how=how, products=PackedProducts(release=LATEST_RELEASE))}
    if not is_4bit:
        return {}
    packed: QuantizedType | None = one_of(
        walk, "bnb_4bit_quant_type", _FOUR_BITS, walk.text("bnb_4bit_quant_type", "nf4")
    )
    walk.means("load_in_4bit", "the base is packed in 4 bits")
    walk.means("bnb_4bit_quant_type", "which ones", usually="nf4")
    walk.means("use_bnb_nested_quant", "whether its scales are packed too")
    if packed is None:
        return {}
    return {
        "quantized": QuantizationOptions(how=Quantization(type=packed, double=bool(walk.flag("use_bnb_nested_quant"))))
    }


_FOUR_BITS: Final = {"nf4": QuantizedType.NF4, "fp4": QuantizedType.FP4}


def _is_compiled(walk: Walk) -> bool:
    """A mode or a backend turns compilation on too (``TrainingArguments.__post_init__``)."""
    named = [key for key in ("torch_compile_mode", "torch_compile_backend") if walk.has(key)]
    if not named and not walk.flag("torch_compile"):
        return False
    walk.means("torch_compile", "the whole model is compiled by torch.compile")
    for key, usual in (("torch_compile_mode", "default"), ("torch_compile_backend", "inductor")):
        if key in named and walk.value(key) != usual:
            walk.leaves_out(key, "compilation is told more than in the answer: other kernels, other time")
        else:
            walk.means(key, "the whole model is compiled by torch.compile")
    return True


def _liger(walk: Walk, kernel: str, *, usually: bool) -> bool:
    config = walk.value("liger_kernel_config")
    return bool(config.get(kernel, usually)) if isinstance(config, Mapping) else usually


def _rows(walk: Walk, *, is_sft: bool) -> dict[str, Any]:
    """Tokens of a row, where the file says: SFTConfig does."""
    if not is_sft:
        return {}
    key = "max_length" if walk.has("max_length") or not walk.has("max_seq_length") else "max_seq_length"
    walk.means(key, "tokens of one row, at most", usually=_SFT_LENGTH)
    found: dict[str, Any] = {"sequence_length": walk.number(key, _SFT_LENGTH)}
    if walk.flag("packing") or walk.flag("padding_free"):
        found["is_packed"] = True
        for name in ("packing", "padding_free"):
            if walk.flag(name):
                walk.means(name, "rows are several samples, end to end")
    return found


def _agree(walk: Walk, run: AskedRun, other: Reading) -> None:
    """Note what DeepSpeed's configuration says otherwise, as transformers does, which then ends."""
    names = {
        "batch_size": ("per_device_train_batch_size", "train_micro_batch_size_per_gpu"),
        "micro_batches": ("gradient_accumulation_steps", "gradient_accumulation_steps"),
        "max_gradient_norm": ("max_grad_norm", "gradient_clipping"),
    }
    for field, (mine, theirs) in names.items():
        here, there = getattr(run, field), getattr(other.run, field)
        if there is not None and there != here:
            walk.contradict(
                f"{mine} is {here:g}, but deepspeed.{theirs} is {there:g}: transformers refuses that. Write "
                f'"auto" in the configuration of DeepSpeed.'
            )
    there_is = other.run.precision
    if there_is is Precision.MIXED_BFLOAT16 and not walk.flag("bf16"):
        walk.contradict("deepspeed.bf16 is enabled, but bf16 is not: transformers refuses that. Set bf16 to true.")
    if there_is is Precision.MIXED_FLOAT16 and not walk.flag("fp16"):
        walk.contradict("deepspeed.fp16 is enabled, but fp16 is not: transformers refuses that. Set fp16 to true.")
