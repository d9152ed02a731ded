"""What a plan was made for, in words that its file has: so that a mismatch can name what differs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

_BETWEEN: Final = "; "
_OF_SIZES: Final = "--lora-rank, --lora-targets, --use-dora, --unfreeze-rank-ratio, --freeze"
_OF_TYPES: Final = "--dtype, --lora-dtype, --quantize"
_OPTIONS: Final = {
    "model": "--model",
    "batch": "--batch-size, --sequence-length",
    "computes": "--dtype",
    "loss": "--loss",
    "modules": "the model's own code or configuration",
}
"""Aspects of a workload that decide its identity, by the first word, with options that change them."""


def words_of(
    model_name: str,
    model_hash: str,
    batch_shapes: Mapping[str, Sequence[int]],
    compute_dtype: str,
    parameters: Iterable[tuple[bool, str, int]],
    loss_head: str,
) -> str:
    """All that tells a workload from others that a plan may be for: ``"model gpt2; batch ...; loss eager"``.

    ``parameters``: of each whether it is trained, its element type, and its scalars.
    """
    sizes = {is_trained: Counter[str]() for is_trained in (True, False)}
    for is_trained, dtype, scalars in parameters:
        sizes[is_trained][dtype] += scalars
    shapes = (f"{name} {list(shape)}" for name, shape in sorted(batch_shapes.items()))
    return _BETWEEN.join(
        (
            f"model {model_name}",
            f"batch {', '.join(shapes)}",
            f"computes in {compute_dtype}",
            f"trains {_in_types(sizes[True])}",
            f"keeps {_in_types(sizes[False])} frozen",
            f"loss {loss_head}",
            f"modules {model_hash[:12]}",
        )
    )


def differences(planned: str, asked: str) -> str | None:
    """In what two such words differ, with options that decide it; None if in nothing.

    Modules are named where nothing else differs: they do whenever sizes or types do.
    """
    there = {words.partition(" ")[0]: words for words in planned.split(_BETWEEN)}
    found: list[str] = []
    for words in asked.split(_BETWEEN):
        aspect = words.partition(" ")[0]
        other = there.get(aspect)
        if other is None or other == words or (aspect == "modules" and found):
            continue
        options = _OPTIONS.get(aspect) or _of_weights(other, words)
        found.append(f"{other} there, {words} here ({options})")
    return ", and ".join(found) or None


def mismatch(planned: str, made_for: str | None, identity: str, asked: str) -> str:
    """That the plan for workload ``planned`` belongs to another one than ``identity``, and in what that differs.

    As far as its file says (``made_for``); where it does not, all that may differ is named.
    """
    found = None if made_for is None else differences(made_for, asked)
    told = (
        "Search a plan for this one, or ask as the plan was made: the same shape, element type (--dtype), "
        "trained and packed parts (--lora-rank, --lora-targets, --lora-dtype, --use-dora, --quantize, "
        "--freeze, --unfreeze-rank-ratio) and loss (--loss)."
        if found is None
        else f"They differ: {found}. Search a plan for this one, or ask as the plan was made."
    )
    which = ", ".join(asked.split(_BETWEEN)[:3])
    return f"the plan belongs to workload {planned}, not to {identity} ({which}). {told}"


def _of_weights(one: str, other: str) -> str:
    """Options that tell numbers of scalars apart, or their types, whichever differ."""
    numbers, types = (
        [[word for word in words.split() if word[0].isdigit() == is_number] for words in (one, other)]
        for is_number in (True, False)
    )
    if numbers[0] == numbers[1]:
        return _OF_TYPES
    return _OF_SIZES if types[0] == types[1] else f"{_OF_SIZES}, {_OF_TYPES}"


def _in_types(sizes: Counter[str]) -> str:
    return " and ".join(f"{size:,} in {dtype}" for dtype, size in sorted(sizes.items())) or "none"
