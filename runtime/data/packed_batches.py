"""Packed batches: rows in which samples lie end to end, told by positions that begin anew or by cumulative lengths.

[Note: What keeps samples apart]
transformers finds the samples of a row in ``position_ids``, where one is not the last one plus 1, and only where no
``attention_mask`` is given: scaled-dot-product and eager attention then get a mask of a row's length squared, flash
attention lengths.  ``cu_seq_lens_q`` and the like tell flash attention the lengths; other kinds of attention pass them
over.  Wherever both do not say the same, samples see each other without a word, so such batches are refused.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes

from ...shared.basics.errors import WorkloadError
from ...shared.phases.packing import Packing, packing_of

POSITIONS: Final = "position_ids"
FIND_PACKED: Final = "find_packed_sequence_indices"
"""In ``transformers.masking_utils``."""
_MASK: Final = "attention_mask"
_ENDS: Final = ("cu_seq_lens_q", "cu_seq_lens_k")
_LONGEST: Final = ("max_length_q", "max_length_k")
_LENGTHS: Final = (*_ENDS, *_LONGEST)
_MASKED: Final = ("sdpa", "eager")
"""Kinds of attention that read masks, and no lengths."""
Integers = NDArray[np.int64]


def packing_of_batch(model: nn.Module, batch: Any) -> Packing | None:
    """How samples lie in the rows of ``batch``; None where each row is one sample, or values are not known.

    Raises WorkloadError if what the batch says of its samples contradicts itself, or if the model's attention passes it
    over ([Note: What keeps samples apart]).
    """
    if not isinstance(batch, Mapping) or not any(name in batch for name in (POSITIONS, *_LENGTHS)):
        return None
    tokens = batch.get("input_ids", batch.get("inputs_embeds"))
    if not isinstance(tokens, torch.Tensor) or tokens.dim() < 2:
        return None
    with _disable_current_modes():
        rows, length = int(tokens.shape[0]), int(tokens.shape[1])
        positions = _values(batch.get(POSITIONS))
        by_positions = None
        if positions is not None and positions.ndim == 2 and positions.shape[1] == length:
            mask = batch.get(_MASK)
            by_positions = [_lengths(row) for row in _without_padding(positions, mask)]
            if any(len(row) > 1 for row in by_positions):
                _check_mask(mask, by_positions, length)
        by_ends = _lengths_by_ends(batch, rows * length)
    if by_ends is not None:
        return _by_ends(model, by_ends, by_positions, rows, length)
    if by_positions is None or all(len(row) < 2 for row in by_positions):
        return None
    is_masked = _attention_of(model) in (None, *_MASKED)
    return packing_of([n for row in by_positions for n in row], length, is_masked=is_masked)


def _by_ends(
    model: nn.Module, by_ends: list[int], by_positions: list[list[int]] | None, rows: int, length: int
) -> Packing | None:
    attention = _attention_of(model)
    is_told = by_positions is not None and any(len(row) > 1 for row in by_positions)
    if by_positions is not None and (is_told or len(by_ends) > rows):
        told = [n for row in by_positions * (rows // len(by_positions)) for n in row]
        if told != by_ends:
            raise WorkloadError(
                f"{_ENDS[0]} tells samples of {_shown(by_ends)} tokens, but {POSITIONS} begin anew after "
                f"{_shown(told)}. Make both from the same samples."
            )
    is_meta = any(parameter.is_meta for parameter in model.parameters())
    if attention in _MASKED and not is_told and len(by_ends) > rows and not is_meta:
        raise WorkloadError(
            f"{_ENDS[0]} tells where {len(by_ends)} samples end, but {attention} attention passes it over and would "
            f"let them see each other. Put {POSITIONS} that begin at 0 with each sample into the batch, or load the "
            f'model with attn_implementation="flash_attention_2".'
        )
    if len(by_ends) <= rows:
        return None
    return packing_of(by_ends, length, is_masked=attention in (None, *_MASKED) and not is_meta)


def with_positions(model: nn.Module, batch: Mapping[str, Any]) -> dict[str, Any]:
    """``batch`` with positions in each row, without values, as a packed one has them.

    Raises WorkloadError if the model takes none, or reads no rows of tokens.
    """
    tokens = batch.get("input_ids")
    if tokens is None or tokens.dim() != 2 or POSITIONS not in inspect.signature(type(model).forward).parameters:
        raise WorkloadError(
            f"packed lengths: {type(model).__name__} takes no {POSITIONS} beside rows of tokens, so that samples "
            f"cannot lie end to end. Leave them out."
        )
    return {**batch, POSITIONS: torch.empty(tokens.shape, dtype=torch.long, device="meta")}


@contextmanager
def samples_apart(model: nn.Module, batch: Any, packing: Packing | None) -> Iterator[None]:
    """Within the block the model runs on ``batch``, and must look for samples where a mask is to keep them apart.

    Raises WorkloadError if transformers makes no mask of ``position_ids`` in it.
    """
    masking = sys.modules.get("transformers.masking_utils")
    find = getattr(masking, FIND_PACKED, None)
    is_given = isinstance(batch, Mapping) and batch.get(_MASK) is not None
    if packing is None or not packing.is_masked or find is None or is_given or _attention_of(model) is None:
        yield
        return
    calls: list[torch.Tensor] = []

    def noted(position_ids: torch.Tensor) -> Any:
        calls.append(position_ids)
        return find(position_ids)

    setattr(masking, FIND_PACKED, noted)
    try:
        yield
    finally:
        setattr(masking, FIND_PACKED, find)
    if not calls:
        raise WorkloadError(
            f"{type(model).__name__} makes no mask of {POSITIONS}, so that the samples of a row would see each other. "
            f"Give each sample a row of its own, or an {_MASK} of (rows, 1, {packing.row_tokens}, "
            f"{packing.row_tokens})."
        )


def is_told_ends(model: nn.Module, batch: Any) -> bool:
    """Whether the model's attention takes cumulative lengths, which are in the batch."""
    return (
        isinstance(batch, Mapping) and batch.get(_ENDS[0]) is not None and _attention_of(model) not in (None, *_MASKED)
    )


def _attention_of(model: nn.Module) -> str | None:
    found = getattr(getattr(model, "config", None), "_attn_implementation", None)
    return found if isinstance(found, str) else None


def _values(tensor: Any) -> NDArray[Any] | None:
    """The values of a tensor on the host; None where there are none, or where reading them would wait for a device."""
    if not isinstance(tensor, torch.Tensor) or isinstance(tensor, FakeTensor) or tensor.device.type != "cpu":
        return None
    found = tensor.detach()
    return (found.float() if found.is_floating_point() else found).numpy()


def _lengths(positions: Integers) -> list[int]:
    """Of the samples in one row, as transformers finds them."""
    begins = np.flatnonzero(np.diff(positions) != 1) + 1
    return [int(n) for n in np.diff(np.concatenate(([0], begins, [len(positions)])))]


def _without_padding(positions: Integers, mask: Any) -> list[Integers]:
    """The positions of each row, without those of padding, whose positions mean nothing."""
    known = _values(mask)
    if known is None or known.ndim != 2 or known.shape[1] != positions.shape[1]:
        return list(positions)
    rows = [positions[number % len(positions)][known[number] != 0] for number in range(len(known))]
    return [row for row in rows if len(row)]


def _check_mask(mask: Any, lengths: list[list[int]], row_tokens: int) -> None:
    """Raise WorkloadError if a mask lets samples of one row see each other."""
    if not isinstance(mask, torch.Tensor):
        return
    if mask.dim() == 2:
        raise WorkloadError(
            f"{POSITIONS} begin anew within a row (samples of {_shown(next(row for row in lengths if len(row) > 1))} "
            f"tokens), but {_MASK} {list(mask.shape)} takes each row for one sample, so that samples would see each "
            f"other. Leave {_MASK} out, or give one of (rows, 1, {row_tokens}, {row_tokens})."
        )
    known = _values(mask)
    if known is None or known.ndim != 4 or known.shape[-2:] != (row_tokens, row_tokens):
        return
    seen = (
        known
        if known.dtype == np.bool_
        else known > np.finfo(np.float32).min / 2
        if known.dtype.kind == "f"
        else known != 0
    )
    for number, row in enumerate(lengths):
        sample = np.repeat(np.arange(len(row)), row)
        allowed = seen[number % len(seen)].any(axis=0)
        if len(sample) != row_tokens:
            continue
        mixed = allowed & (sample[:, None] != sample[None, :])
        if mixed.any():
            query, key = (int(place) for place in np.argwhere(mixed)[0])
            raise WorkloadError(
                f"{POSITIONS} begin anew within row {number}, but {_MASK} lets token {query} of sample "
                f"{int(sample[query])} see token {key} of sample {int(sample[key])}. Mask samples from each other, or "
                f"leave {_MASK} out."
            )


def _lengths_by_ends(batch: Mapping[str, Any], num_tokens: int) -> list[int] | None:
    """Of all samples, as cumulative lengths tell them; None where there are none, or values are not known."""
    given = [name for name in _LENGTHS if batch.get(name) is not None]
    if not given:
        return None
    if len(given) < len(_LENGTHS):
        missing = ", ".join(name for name in _LENGTHS if name not in given)
        raise WorkloadError(
            f"the batch has {', '.join(given)} but not {missing}, and attention passes them over unless all are there. "
            f"Put {missing} into it."
        )
    ends = [values for name in _ENDS if (values := _values(batch[name])) is not None]
    if len(ends) < len(_ENDS):
        return None
    for name, values in zip(_ENDS, ends, strict=True):
        told = [int(value) for value in values.reshape(-1)]
        if told[:1] != [0] or any(end <= begin for begin, end in pairwise(told)):
            raise WorkloadError(
                f"{name} is {_shown(told)}; it must begin with 0 and ascend, each sample ending after the one before."
            )
        if told[-1] != num_tokens:
            raise WorkloadError(
                f"{name} ends at {told[-1]:,}, but the batch has {num_tokens:,} tokens. Every token must belong to a "
                f"sample: end it at {num_tokens:,}."
            )
    if not np.array_equal(ends[0], ends[1]):
        raise WorkloadError(f"{_ENDS[0]} and {_ENDS[1]} differ. Samples attend to themselves: make them equal.")
    lengths = [int(n) for n in np.diff(ends[0].reshape(-1))]
    for name in _LONGEST:
        value = batch[name]
        longest = int(value) if not isinstance(value, torch.Tensor) or value.device.type == "cpu" else max(lengths)
        if longest < max(lengths):
            raise WorkloadError(f"{name} is {longest:,}, but a sample has {max(lengths):,} tokens. Set it to that.")
    return lengths


def _shown(numbers: list[int]) -> str:
    head = ", ".join(f"{number}" for number in numbers[:6])
    return head if len(numbers) <= 6 else f"{head} ... ({len(numbers)} in all)"
