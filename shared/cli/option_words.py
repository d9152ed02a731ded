"""Options and values that a command does not have, and which of its own the user may have meant.

A user comes from other tools, whose words for the same thing look nothing like ours: ``--gpu``, ``--lr``, ``--ctx``.
Such words come first, then options that share words with what was typed, then those that are spelt alike.  A number in
another notation is answered with the same number as options have it.
"""

from __future__ import annotations

from collections.abc import Collection
from decimal import Decimal, InvalidOperation
from difflib import SequenceMatcher
from typing import Any, Final

from ..basics.suggestions import nearest_names

_MAX_SHOWN: Final = 3
_SHORTEST_PART: Final = 3
"""Letters from which on the beginning of a word stands for it."""
_LEAST_SHARED: Final = 0.4
"""Part of the words of both names that has to be shared."""
_LEAST_SIMILARITY: Final = 0.75
"""Of spelling, from which on a name may be a slip of another."""
_MUCH_LESS: Final = 0.2
"""How much less alike than the likeliest an option must be to be left out."""
_LONGEST: Final = 100
"""Characters that are compared; no option is as long."""

OTHER_WORDS: Final[dict[str, str]] = {
    "--model": "model-name model-name-or-path base-model llm",
    "--weights": "model-path model-dir base-model model-name-or-path pretrained",
    "--hardware": "gpu device machine accelerator gpu-type instance gpu-name",
    "--ranks": "gpus num-gpus n-gpus gpu-count devices num-devices nproc nproc-per-node world-size num-processes"
    " tensor-parallel",
    "--sequence-length": "seq seqlen seq-len seq-length context context-length context-size context-window ctx"
    " max-length max-len max-seq-len max-seq-length max-tokens max-context block-size cutoff-len length",
    "--batch-size": "bs batch mbs micro-batch micro-batch-size per-device-batch-size per-device-train-batch-size"
    " train-batch-size train-micro-batch-size-per-gpu",
    "--global-batch": "batch-size gbs global-batch-size effective-batch-size total-batch-size train-batch-size",
    "--micro-batches": "ga accum grad-accum accumulation gradient-accumulation gradient-accumulation-steps"
    " accumulation-steps accumulate-grad-batches microbatches",
    "--dtype": "precision torch-dtype data-type type bf16 fp16",
    "--autocast": "amp mixed-precision bf16 fp16",
    "--device-budget": "budget memory vram gpu-memory device-memory max-memory memory-limit memory-budget",
    "--host-memory": "ram memory cpu-memory",
    "--set": "ram cpu-memory bandwidth host-memory override",
    "--learning-rate": "lr",
    "--max-gradient-norm": "max-grad-norm clip grad-clip grad-norm gradient-clipping clip-grad-norm gradient-clip-val",
    "--schedule": "scheduler lr-scheduler lr-scheduler-type lr-schedule",
    "--warmup-steps": "warmup num-warmup-steps warmup-ratio",
    "--lora-rank": "r rank lora lora-r adapter peft",
    "--lora-targets": "target-modules lora-target-modules lora-modules",
    "--lora-alpha": "alpha",
    "--quantize": "quant qlora bits load-in-4bit load-in-8bit 4bit 8bit quantization nf4",
    "--steps": "iterations iters max-steps num-steps n-steps",
    "--epochs": "num-epochs num-train-epochs",
    "--data": "dataset dataset-path dataset-name train-file train-data training-data",
    "--evaluation": "eval eval-data eval-file validation-file validation-data",
    "--evaluate-every": "eval-steps eval-every eval-interval",
    "--checkpoint": "checkpoint-dir ckpt",
    "--checkpoint-every": "save-steps save-interval checkpoint-interval",
    "--resume": "resume-from-checkpoint",
    "--save": "output-dir save-dir save-model out-dir",
    "--output": "out out-file output-file output-dir out-dir",
    "--n-checkpoint": "gradient-checkpointing grad-checkpointing activation-checkpointing checkpointing recompute",
    "--n-swap": "swap offload-activations activation-offloading activation-offload",
    "--parallel": "fsdp ddp hsdp zero zero-stage strategy sharding-strategy distributed",
    "--shard-ranks": "hsdp shard-size fsdp-size",
    "--sequence-ranks": "cp sp ulysses context-parallel sequence-parallel",
    "--optimizer": "optim",
    "--price": "cost rent usd",
    "--goal": "objective minimize maximize optimize",
    "--loss": "liger cut-cross-entropy cross-entropy",
    "--loss-tiles": "logits-chunks loss-chunks",
    "--compile": "torch-compile",
    "--freeze": "frozen freeze-layers",
}
"""What people who know other tools call an option, by the option."""


_NUMBER_MISTAKES: Final[dict[str, str]] = {
    "int_parsing": "no whole number",
    "int_parsing_size": "no whole number",
    "float_parsing": "no number",
    "greater_than_equal": "too small",
    "less_than_equal": "too large",
}
"""What is wrong with a number, by pydantic's name for it."""
_LARGEST: Final = Decimal(10) ** 18
"""Up to which a number is written out."""

OTHER_VALUES: Final[dict[str, str]] = {
    "nf4": "4bit 4-bit bnb-4bit int4 qlora",
    "int8": "8bit 8-bit bnb-8bit llm.int8",
    "sharded": "fsdp fsdp2 zero zero3 zero-3",
    "chunked": "liger",
    "training-arguments": "transformers trainer hf huggingface",
    "trl": "sft sfttrainer",
}
"""The same of what an option may be, by its value."""


def meant_values(typed: str, choices: Collection[str]) -> tuple[str, ...]:
    """Those of ``choices`` that ``typed`` may mean, the likeliest first; empty if it resembles none."""
    name = typed[:_LONGEST].casefold().replace("_", "-")
    other = [value for value, words in OTHER_VALUES.items() if name in words.split() and value in choices]
    return tuple(other) or nearest_names(name, choices)


def meant_options(typed: str, options: Collection[str]) -> tuple[str, ...]:
    """Up to three of ``options`` that ``typed`` may mean, the likeliest first; empty if it resembles none."""
    name = typed[:_LONGEST].casefold().replace("_", "-").lstrip("-")
    names = {option.lstrip("-"): option for option in options if option.startswith("--")}
    if name in names:
        return (names[name],)
    other = [option for option, words in OTHER_WORDS.items() if name in words.split() and option in options]
    if other:
        return tuple(other[:_MAX_SHOWN])
    likeness = {found: max(_shared_words(name, found), _spelling(name, found)) for found in names}
    best = max(likeness.values(), default=0.0)
    near = sorted(
        (found for found in names if likeness[found] and likeness[found] > best - _MUCH_LESS),
        key=lambda found: (-likeness[found], found),
    )
    return tuple(names[found] for found in near[:_MAX_SHOWN])


def number_complaint(mistake: dict[str, Any], lowest: float | None, highest: float | None) -> str:
    """What is wrong with the number of an option, and what to write instead; empty if ``mistake`` is of something else.

    ``mistake`` is one of pydantic's, of an option that goes from ``lowest`` to ``highest``; None is no limit.
    """
    kind, typed = str(mistake["type"]), str(mistake["input"])
    if kind not in _NUMBER_MISTAKES:
        return ""
    number = _as_number(typed)
    has_limits = kind in ("greater_than_equal", "less_than_equal")
    wrong = "no number" if has_limits and number is None else _NUMBER_MISTAKES[kind]
    if not has_limits and number is not None and number == number.to_integral_value():
        floor, ceiling = -_LARGEST if lowest is None else lowest, _LARGEST if highest is None else highest
        if floor <= number <= min(ceiling, _LARGEST):
            return f"{typed!r} is {wrong}. Write {number:.0f}."
    least, most = (None if limit is None else f"{limit:,}".removesuffix(".0") for limit in (lowest, highest))
    if least and most:
        return f"{typed!r} is {wrong}. Write one from {least} to {most}."
    instead = f"{least} or more" if least else f"one such as {0.5 if kind.startswith('float') else 16}"
    return f"{typed!r} is {wrong}. Write {instead}."


def _as_number(typed: str) -> Decimal | None:
    """A finite number in whatever notation people write: ``1e3``, ``1,000``, ``1_000``; None if it is none."""
    try:
        number = Decimal(typed.strip()[:_LONGEST].replace(",", "").replace("_", ""))
    except InvalidOperation:
        return None
    return number if number.is_finite() else None


def _shared_words(typed: str, option: str) -> float:
    """Part of the words of both that are alike; 0 where it is too small."""
    mine, yours = typed.split("-"), option.split("-")
    if not any(_likeness(word, other) for word in mine for other in yours if len(word) >= _SHORTEST_PART):
        return 0.0
    shared = sum(max(_likeness(word, other) for other in yours) for word in mine)
    found = 2 * shared / (len(mine) + len(yours))
    return found if found >= _LEAST_SHARED else 0.0


def _likeness(word: str, other: str) -> float:
    """1 for the same word, above a half where one is the beginning of the other, else 0."""
    shorter, longer = sorted((word, other), key=len)
    if word == other:
        return 1.0
    is_part = len(shorter) >= _SHORTEST_PART and longer.startswith(shorter)
    return (1 + len(shorter) / len(longer)) / 2 if is_part else 0.0


def _spelling(typed: str, option: str) -> float:
    found = SequenceMatcher(None, typed, option).ratio()
    return found if found >= _LEAST_SIMILARITY else 0.0
