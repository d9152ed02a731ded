"""The modules between a model's last block and its head that treat each token by itself, such as its final norm."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from torch import nn

from ..model.blocks import NamedBlock
from .mlp_token_wise import why_not_token_wise

_MOST_PARTS: Final = 12
"""A module of more parts is no norm and no transform: it is not tried."""
_NO_PART: Final = (nn.Embedding, nn.EmbeddingBag, nn.ModuleList, nn.ModuleDict)
"""What such a module has nowhere within it."""
_FREE: Final = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


@dataclass(frozen=True, slots=True)
class FinalModules:
    """Token-wise modules outside of blocks and head; those of them that are called behind the last block matter."""

    last_block: nn.Module
    modules: tuple[nn.Module, ...]


def final_modules(model: nn.Module, blocks: Sequence[NamedBlock], head: nn.Module) -> FinalModules | None:
    """Modules of ``model`` that may run tile by tile over tokens between the last of ``blocks`` and ``head``.

    They are found by where they stand.  Each is tried on made-up values (``why_not_token_wise``), and draws no random
    numbers in training.  None if there is none.
    """
    if not blocks:
        return None
    apart = {id(part) for block in blocks for part in block.module.modules()} | {id(part) for part in head.modules()}
    width = getattr(head, "in_features", None)
    found = tuple(_token_wise(model, "", apart, (width,) if isinstance(width, int) else ()))
    return FinalModules(blocks[-1].module, found) if found else None


def _token_wise(module: nn.Module, path: str, apart: set[int], widths: Sequence[int]) -> Iterator[nn.Module]:
    """The outermost such modules within ``module``, or itself."""
    if id(module) in apart:
        return
    parts = list(module.modules())
    is_tried = path and len(parts) <= _MOST_PARTS and not any(isinstance(part, _NO_PART) for part in parts)
    if is_tried and not any(id(part) in apart for part in parts) and not _reason(module, path, widths):
        yield module
        return
    for name, child in module.named_children():
        yield from _token_wise(child, f"{path}.{name}" if path else name, apart, widths)


def _reason(module: nn.Module, path: str, widths: Sequence[int]) -> str | None:
    """Why a module does not run by tiles; None if it does."""
    given = inspect.signature(module.forward).parameters.values()
    needed = [value for value in given if value.default is value.empty and value.kind not in _FREE]
    if len(needed) != 1 or needed[0].kind is inspect.Parameter.KEYWORD_ONLY:
        return "it takes something else than hidden states alone"
    return why_not_token_wise(module, path, widths=widths, may_draw=False)
