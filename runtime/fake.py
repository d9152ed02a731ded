"""A model without weights: fake tensors in place of parameters, and few blocks in place of many equal ones.

[Note: Attention masks of fake models]
transformers leaves the attention mask out, and takes the fused causal kernel, once it has looked at the mask's values
and found no padding.  Fake tensors have no values to look at, so it would build a full mask and trace another kernel
than the one that trains.  Attention functions registered without a mask function of their own are given no mask; the
copy that is traced uses one such, which is transformers' own scaled-dot-product attention.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from .batches import Batch
from .blocks import NamedBlock, find_blocks

_UNMASKED_ATTENTION: Final = "protwin_unmasked_sdpa"
_REPRESENTATIVES: Final = 3
"""Blocks traced for a row of equal ones: the first, one from within, and the last, whose neighbours differ."""


def fake_model(model: nn.Module, mode: FakeTensorMode) -> nn.Module:
    """A copy of a model on the meta device whose parameters and buffers are fake tensors on the CPU."""
    twin = copy.deepcopy(model)
    _use_unmasked_attention(twin)
    made: dict[int, Any] = {}
    with mode:
        # By hand, since nn.Module's own way of replacing tensors would untie tied parameters.
        for module in twin.modules():
            for tensors in (module._parameters, module._buffers):
                for name, tensor in tensors.items():
                    if tensor is not None:
                        tensors[name] = made.setdefault(id(tensor), _faked(tensor))
    return twin


def _faked(tensor: torch.Tensor) -> torch.Tensor:
    empty = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
    return nn.Parameter(empty, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty


def fake_batch(batch: Batch, mode: FakeTensorMode) -> Batch:
    """A batch of fake tensors with the shapes and dtypes of ``batch``."""

    def fake(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        with mode:
            return torch.empty(value.shape, dtype=value.dtype, device="cpu")

    if isinstance(batch, torch.Tensor):
        return fake(batch)  # type: ignore[no-any-return]
    if isinstance(batch, Mapping):
        return {key: fake(value) for key, value in batch.items()}
    return [fake(value) for value in batch]


def _use_unmasked_attention(model: nn.Module) -> None:
    if getattr(getattr(model, "config", None), "_attn_implementation", None) != "sdpa":
        return
    from transformers import AttentionInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    AttentionInterface.register(_UNMASKED_ATTENTION, sdpa_attention_forward)
    configs = {id(c): c for c in (getattr(module, "config", None) for module in model.modules()) if c is not None}
    for config in configs.values():
        if getattr(config, "_attn_implementation", None) == "sdpa":
            config._attn_implementation = _UNMASKED_ATTENTION


def keep_representatives(model: nn.Module, blocks: Sequence[NamedBlock]) -> list[int] | None:
    """Shorten a row of equal blocks in place to its representatives.

    Gives, for every original block, the index of the remaining block that stands for it; None, with the model
    unchanged, if the blocks are not one row of equal ones that is long enough.
    """
    parents = {block.name.rpartition(".")[0] for block in blocks}
    if len(parents) != 1 or len(blocks) <= _REPRESENTATIVES + 1:
        return None
    path = parents.pop()
    if len({_signature(block.module) for block in blocks}) != 1 or not path:
        return None
    parent_path, _, name = path.rpartition(".")
    parent = model.get_submodule(parent_path)
    row = getattr(parent, name)
    if len(row) != len(blocks):
        return None
    setattr(parent, name, type(row)(*[list(row)[:_REPRESENTATIVES]]))
    remaining = find_blocks(model, path)
    assert len(remaining) == _REPRESENTATIVES
    last = _REPRESENTATIVES - 1
    return [0] + [1] * (len(blocks) - 2) + [last]


def _signature(module: nn.Module) -> tuple[Any, ...]:
    """What decides a block's operations: classes, parameters and plain settings, its place in the row left out."""
    facts: list[Any] = []
    for path, part in module.named_modules():
        settings = {
            key: value
            for key, value in vars(part).items()
            if isinstance(value, int | float | str | bool | None) and key not in ("layer_idx", "training")
        }
        facts.append((path, type(part), tuple(sorted(settings.items(), key=lambda item: item[0]))))
    facts += [(name, tuple(p.shape), p.dtype, p.requires_grad) for name, p in module.named_parameters()]
    return tuple(facts)
