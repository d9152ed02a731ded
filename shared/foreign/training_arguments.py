"""TrainingArguments of transformers as JSON, whole or a few fields of them, read without transformers.

``TrainingArguments.to_json_string`` writes them so.  A file may also hold them as ``training_args``, with the sections
``fsdp_config`` and ``deepspeed`` in them or beside them.  Fields of TRL's SFTConfig and ModelConfig, which its scripts
take in one file with them, are read too, and those of transformers' example scripts (``run_clm.py``).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from ..phases.tiling import LossHead
from ..schema.optimizer import Optimizer
from ..schema.workload import Compiled
from .asked_run import AskedRun, Checkpointing, Precision, Reading, Split, Tool
from .deepspeed import read_deepspeed
from .fsdp import fsdp_options, read_fsdp
from .keys import TF32, Walk, recomputes_whole, said, section, shown
from .model_config import read_model_config, read_weights
from .optimizers import optimizer_of
from .training_arguments_keys import BLOCK_SIZE, SCRIPT_KEYS, TRAINING_ARGUMENTS_KEYS, TRL_KEYS

_BATCH_SIZE: Final = 8
"""``per_device_train_batch_size`` where nobody says."""
_OPTIMIZER: Final = "adamw_torch_fused"
_SFT_FIELDS: Final = frozenset(
    {
        *("max_length", "max_seq_length", "packing", "padding_free", "dataset_text_field"),
        *("use_peft", "lora_r", "load_in_4bit", "load_in_8bit", "use_bnb_nested_quant"),
        *("model_init_kwargs", "activation_offloading", "assistant_only_loss", "completion_only_loss", "loss_type"),
        *("chat_template_path", "dataset_num_proc", "dataset_kwargs", "eos_token", "pad_token", "packing_strategy"),
        *("eval_packing", "shuffle_dataset", "truncation_mode"),
        *("dataset_config", "dataset_train_split", "dataset_test_split", "dataset_streaming"),
    }
)
"""Keys of TRL's SFTConfig, or of ModelConfig and ScriptArguments beside it, that no script of transformers has."""
_SFT_LENGTH: Final = 1024
_SCRIPT_LENGTH: Final = "max_seq_length"
"""Of SFTConfig, as it was once called there, and of scripts of transformers (``run_mlm.py``)."""
_OF_BOTH: Final = "model_name_or_path"
"""A key of files of scripts: of TRL, and of transformers (``run_clm.py``)."""
_SFT_LOSSES: Final = ("nll", "dft")
NESTED: Final = "training_args"
"""The key of a file that holds TrainingArguments beside other things."""


def read_training_arguments(
    content: Mapping[str, Any],
    *,
    folder: Path | None = None,
    tool: Tool | None = None,
    optimizer: Optimizer | None = None,
) -> Reading:
    """What TrainingArguments ask for; files that they name are looked for in ``folder``.

    ``tool``: whose they are, None to go by their keys; ``optimizer``: what somebody else names in the place of theirs.

    Raises PlanError, one message, if they contradict themselves or a plan, FileError if a file that they name cannot be
    read.
    """
    nested = content.get(NESTED)
    if isinstance(nested, Mapping):
        beside = {name: value for name, value in content.items() if name in ("fsdp_config", "deepspeed")}
        content = {**nested, **beside}
    is_script = bool(SCRIPT_KEYS & content.keys())
    is_sft = tool is Tool.TRL or bool(_SFT_FIELDS - ({_SCRIPT_LENGTH} if is_script else set()) & content.keys())
    walk = Walk(TRL_KEYS if is_sft else TRAINING_ARGUMENTS_KEYS, content)
    found: dict[str, Any] = {
        "batch_size": walk.number("per_device_train_batch_size", _BATCH_SIZE),
        "micro_batches": walk.number("gradient_accumulation_steps", 1),
        "max_gradient_norm": walk.real("max_grad_norm", 1.0),
        "optimizer": optimizer_of(walk, "optim", walk.text("optim", _OPTIMIZER), optimizer),
        "split": Split.NOTHING,
        **_memory(walk, is_sft=is_sft),
        **_rows(walk, is_sft=is_sft),
        **read_model_config(walk),
    }
    if walk.has("per_gpu_train_batch_size"):
        found["batch_size"] = walk.number("per_gpu_train_batch_size")
    usual = None if walk.has("per_gpu_train_batch_size") else _BATCH_SIZE
    walk.means("per_device_train_batch_size", "samples of a micro-batch on one rank", usually=usual)
    walk.means("gradient_accumulation_steps", "micro-batches per step and rank", usually=1)
    walk.means("max_grad_norm", "limit of the norm of all gradients together; 0 for none", usually=1.0)
    if found["optimizer"] is not None:
        walk.means("optim", f"stepped by {found['optimizer'].words}", usually=_OPTIMIZER)
    others = _shared(walk, folder, optimizer)
    precision = _precision(walk, others, is_sft=is_sft)
    if precision is Precision.FLOAT32 and walk.flag("tf32"):
        walk.leaves_out("tf32", TF32)
    found |= read_weights(
        walk,
        precision,
        is_adapted=found.get("lora") is not None,
        is_packed=found.get("quantized") is not None,
        has_masters=any(other.tool is Tool.DEEPSPEED for other in others),
    )
    run = said(found)
    for other in others:
        _agree(walk, run, other)
        beside = {name: getattr(other.run, name) for name in other.run.model_fields_set if name != "precision"}
        run = said({name: getattr(run, name) for name in run.model_fields_set} | _not_none(beside))
    is_open = tool is None and not is_sft and walk.has(_OF_BOTH) and not is_script
    return walk.reading(run, other=tuple(others), could_be=Tool.TRL if is_open else None)


def _shared(walk: Walk, folder: Path | None, optimizer: Optimizer | None) -> list[Reading]:
    """What FSDP or DeepSpeed is asked to do."""
    others: list[Reading] = []
    if (options := fsdp_options(walk)) is not None:
        config = section(walk, "fsdp_config", folder)
        walk.means("fsdp", "ranks have parameters in parts (FSDP)")
        others.append(read_fsdp(options, config))
    if walk.value("deepspeed"):
        if others:
            walk.contradict("fsdp and deepspeed are both asked for. Leave one of the two out.")
        settings = section(walk, "deepspeed", folder)
        others.append(read_deepspeed(settings, prefix="deepspeed.", by_transformers=True, optimizer=optimizer))
    return others


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
    return found


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
    """Tokens of a row, where the file says: SFTConfig does, and data arguments of transformers' scripts may."""
    if not is_sft:
        said = next((key for key in (BLOCK_SIZE, _SCRIPT_LENGTH) if walk.has(key)), None)
        if said is None:
            return {}
        walk.means(said, "tokens of one row")
        return {"sequence_length": walk.number(said)}
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
