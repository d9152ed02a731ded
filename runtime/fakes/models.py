"""A model without weights: fake tensors in place of parameters, and few blocks in place of many equal ones.

[Note: Attention masks of fake models]
transformers leaves the attention mask out, and takes the fused causal kernel, once it has looked at the mask's values
and found no padding.  Fake tensors have no values to look at, so it would build a full mask and trace another kernel
than the one that trains.  While a fake model runs, transformers' masks for scaled-dot-product attention are made as
if no mask of padding had been given: where values would not spare them, beyond a sliding window say, they still are.
Nor is it left to take a row of the batch for several sequences packed together, as it does where it cannot look, unless
somebody has looked who can.  The name of the attention stays "sdpa", which many models compare literally.

[Note: Kernels that are told lengths]
Flash attention takes the lengths of packed samples, and no mask.  It keeps what the fused kernel over the whole row
keeps (queries, keys, values, the output, a number for each head of a token), so that is run in its place, without any
mask.

[Note: Representatives]
What a block does depends on what it is, on whether anything before it is trained, and on its neighbours, which keep or
drop what lies between.  So blocks can be taken out of a row as long as every remaining one keeps its neighbours' kind,
and every kind of place remains; a block that was taken out does what the one in the same kind of place does.
"""

from __future__ import annotations

import copy
import re
import sys
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from typing import Any, Final

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn.modules.batchnorm import _BatchNorm

from ...shared.phases.packing import Packing
from ..data.packed_batches import FIND_PACKED
from ..model.batches import Batch, with_tensors
from ..model.blocks import NamedBlock
from ..model.kept_tensors import kept_tensors, replace_kept_tensors
from ..model.strides import contiguous_strides, is_dense
from ..quantized.states import relink
from .known_values import KnownValues, known

_FUSED_ATTENTION: Final = "sdpa"
_LAYER_NUMBERS: Final = re.compile("ind(ex|ic)|_layers$")
"""Fields that may list layers by their numbers, such as ``fullatt_block_indexes``."""
_IMAGE_DIMS: Final = 4
_LONGEST_PERIOD: Final = 8
"""Blocks after which a pattern of unequal ones may repeat."""


def fake_model(model: nn.Module, mode: FakeTensorMode) -> nn.Module:
    """A copy of a model on the meta device whose parameters, buffers and kept tensors are fake ones on the CPU."""
    # What an iteration left in attributes may hang on a graph, and torch copies no such tensor.
    left = {id(tensor): tensor.detach() for tensor in kept_tensors(model.modules()) if not tensor.is_leaf}
    twin = copy.deepcopy(model, left)
    made: dict[int, Any] = {}
    for module in twin.modules():
        if isinstance(module, _BatchNorm) and module.momentum is None:
            # The mean of all batches: read off their count, which no fake tensor has, for nothing but a factor.
            module.momentum = 1.0
    with mode:
        # By hand, since nn.Module's own way of replacing tensors would untie tied parameters.
        for module in twin.modules():
            for tensors in (module._parameters, module._buffers):
                for name, tensor in tensors.items():
                    if tensor is not None:
                        tensors[name] = made.setdefault(id(tensor), _faked(tensor))
        for module in twin.modules():
            replace_kept_tensors(module, lambda tensor: made.setdefault(id(tensor), _faked(tensor)))
    relink(twin)
    return twin


def _faked(tensor: torch.Tensor) -> torch.Tensor:
    if isinstance(tensor, FakeTensor):
        return tensor
    empty = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")
    return nn.Parameter(empty, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty


def fake_batch(batch: Batch, mode: FakeTensorMode, *, with_values: bool = False) -> Batch:
    """A batch of fake tensors with the shapes, strides and dtypes of ``batch``.

    With ``with_values``, real integers and small real images carry their values along (``known_values.py``).
    """

    def fake(_: str, value: torch.Tensor) -> torch.Tensor:
        if with_values and _is_known(value):
            return known(value, mode)
        with mode:
            strides = value.stride() if is_dense(value.shape, value.stride()) else contiguous_strides(value.shape)
            return torch.empty_strided(value.shape, strides, dtype=value.dtype, device="cpu")

    return with_tensors(batch, fake)


def _is_known(value: torch.Tensor) -> bool:
    """Whether what a model decides by may be in it: which images are padding is read off their pixels."""
    is_image = value.is_floating_point() and value.dim() >= _IMAGE_DIMS and value.numel() <= KnownValues.MOST
    return not value.is_meta and (is_image or not (value.is_floating_point() or value.is_complex()))


@contextmanager
def plain_batches(packing: Packing | None = None) -> Iterator[None]:
    """Let transformers find no padding in a batch whose values it cannot look at, and ``packing`` in its rows.

    [Note: Attention masks of fake models]; [Note: Kernels that are told lengths]
    """
    masking = sys.modules.get("transformers.masking_utils")
    if masking is None:
        yield
        return
    is_masked = packing is not None and packing.is_masked
    with (
        _unpadded(masking, has_masks=packing is None or is_masked),
        nullcontext() if is_masked else _unpacked(masking),
    ):
        yield


@contextmanager
def _unpadded(masking: Any, *, has_masks: bool) -> Iterator[None]:
    interface = masking.AttentionMaskInterface
    make = interface()[_FUSED_ATTENTION]

    def make_unpadded(*args: Any, attention_mask: torch.Tensor | None = None, **kwargs: Any) -> Any:
        if not has_masks:
            return None
        return make(*args, attention_mask=None if isinstance(attention_mask, FakeTensor) else attention_mask, **kwargs)

    interface.register(_FUSED_ATTENTION, make_unpadded)
    try:
        yield
    finally:
        interface.register(_FUSED_ATTENTION, make)


@contextmanager
def _unpacked(masking: Any) -> Iterator[None]:
    find = getattr(masking, FIND_PACKED, None)
    if find is None:
        yield
        return

    def find_none(position_ids: torch.Tensor) -> None:
        find(position_ids)  # for what it computes

    setattr(masking, FIND_PACKED, find_none)
    try:
        yield
    finally:
        setattr(masking, FIND_PACKED, find)


def keep_representatives(model: nn.Module, blocks: Sequence[NamedBlock]) -> tuple[list[int], list[str]] | None:
    """Shorten every row of blocks in place to representatives (Note: Representatives).

    Gives, for every original block, the index of the remaining block that stands for it, and the remaining blocks'
    names; None, with the model unchanged, if the blocks do not begin whole lists or none can be spared.
    """
    return keep_alike([(model, blocks)])


def keep_alike(subjects: Sequence[tuple[nn.Module, Sequence[NamedBlock]]]) -> tuple[list[int], list[str]] | None:
    """``keep_representatives`` of models that have their blocks at the same paths, and run them in turn.

    A place remains in all of them or in none.
    """
    names = [block.name for block in subjects[0][1]]
    rows: dict[str, list[int]] = {}
    for index, name in enumerate(names):
        rows.setdefault(name.rpartition(".")[0], []).append(index)
    for model, _ in subjects:
        if any(not _is_row(model, path, [names[index] for index in row]) for path, row in rows.items()):
            return None
    if [index for row in rows.values() for index in row] != list(range(len(names))):
        return None
    kinds: list[Hashable] = list(zip(*(_kinds(blocks) for _, blocks in subjects), strict=True))
    stands_for: list[int] = []
    kept: dict[str, list[int]] = {}
    for path, row in rows.items():
        kept[path], stand_ins = representatives([kinds[index] for index in row])
        stands_for += [_before(kept, path) + place for place in stand_ins]
    if all(len(kept[path]) == len(row) for path, row in rows.items()):
        return None
    for model, _ in subjects:
        for path, places in kept.items():
            num_members = len(list(model.get_submodule(path).children()))
            _shorten(model, path, [*places, *range(len(rows[path]), num_members)])
    return stands_for, [f"{path}.{place}" for path, places in kept.items() for place in range(len(places))]


def _is_row(model: nn.Module, path: str, names: Sequence[str]) -> bool:
    """Whether the blocks called ``names`` are what the list at ``path`` begins with, and nobody numbers them."""
    row = model.get_submodule(path) if path else None
    if not isinstance(row, nn.ModuleList | nn.Sequential):
        return False
    parent = model.get_submodule(path.rpartition(".")[0])
    if any(_numbers_layers(owner) for owner in (parent, getattr(parent, "config", None))):
        return False
    return [f"{path}.{key}" for key, _ in row.named_children()][: len(names)] == list(names)


def _numbers_layers(owner: Any) -> bool:
    """Whether a module or a configuration lists layers by their numbers, which would be others' in a shorter row."""
    return any(
        _LAYER_NUMBERS.search(name) and isinstance(value, list | tuple) and value and all(type(n) is int for n in value)
        for name, value in getattr(owner, "__dict__", {}).items()
    )


def _before(kept: Mapping[str, Sequence[int]], path: str) -> int:
    """How many blocks remain in the rows before that of ``path``."""
    return sum(len(places) for other, places in kept.items() if other != path)


def representatives(kinds: Sequence[Hashable]) -> tuple[list[int], list[int]]:
    """The places that remain of a row of blocks of these kinds, and for every place the remaining one's new place."""
    kept = list(range(len(kinds)))
    shortened = True
    while shortened:
        shortened = False
        for period in range(1, _LONGEST_PERIOD + 1):
            start = next((s for s in range(1, len(kept) - period) if _can_spare(kinds, kept, s, period)), None)
            if start is not None:
                del kept[start : start + period]
                shortened = True
                break
    places = _places([kinds[index] for index in kept])
    first_in: dict[Hashable, int] = {}
    for new, place in enumerate(places):
        first_in.setdefault(place, new)
    return kept, [first_in[place] for place in _places(kinds)]


def _can_spare(kinds: Sequence[Hashable], kept: Sequence[int], start: int, period: int) -> bool:
    """Whether the neighbours of what remains keep their kinds, and every kind of place remains."""
    stop = start + period
    if kinds[kept[start - 1]] != kinds[kept[stop - 1]] or kinds[kept[start]] != kinds[kept[stop]]:
        return False
    rest = [kinds[index] for index in (*kept[:start], *kept[stop:])]
    return set(_places(rest)) == set(_places(kinds))


def _places(kinds: Sequence[Hashable]) -> list[Hashable]:
    """The kind of every block with those of its neighbours; None beyond the ends."""
    padded = [None, *kinds, None]
    return list(zip(padded, padded[1:], padded[2:], strict=False))


def _kinds(blocks: Sequence[NamedBlock]) -> list[Hashable]:
    """What decides each block's operations, and whether anything before it is trained."""
    kinds: list[Hashable] = []
    is_after_trained = False
    for block in blocks:
        kinds.append((_signature(block.module), is_after_trained))
        is_after_trained |= any(parameter.requires_grad for parameter in block.module.parameters())
    return kinds


def _shorten(model: nn.Module, path: str, places: Sequence[int]) -> None:
    """Leave only the blocks at ``places`` in the row at ``path``, and in what the configuration lists by block."""
    parent_path, _, name = path.rpartition(".")
    parent = model.get_submodule(parent_path)
    row = list(getattr(parent, name))
    kept = [row[place] for place in places]
    setattr(
        parent, name, nn.Sequential(*kept) if isinstance(getattr(parent, name), nn.Sequential) else nn.ModuleList(kept)
    )
    config: Any = getattr(parent, "config", None)
    listed = getattr(config, "layer_types", None)
    if listed is None and getattr(config, "num_hidden_layers", None) == len(row):
        # Features of an inner layer are counted from the end by it.
        config.num_hidden_layers = len(places)
    if isinstance(listed, list) and len(listed) == len(row):
        # Of some families the list follows from other fields, and is not looked at again.
        with suppress(AttributeError):
            config.layer_types = [listed[place] for place in places]


def _signature(module: nn.Module) -> tuple[Any, ...]:
    """What decides a block's operations: classes, parameters, kept tensors and plain settings, not its place."""
    facts: list[Any] = []
    for path, part in module.named_modules():
        settings = {
            key: value
            for key, value in vars(part).items()
            if isinstance(value, int | float | str | bool | None) and key not in ("layer_idx", "training")
        }
        facts.append((path, type(part), tuple(sorted(settings.items(), key=lambda item: item[0]))))
    facts += [(name, tuple(p.shape), p.stride(), p.dtype, p.requires_grad) for name, p in module.named_parameters()]
    facts += [(tuple(tensor.shape), tensor.dtype) for tensor in kept_tensors(module.modules())]
    return tuple(facts)
