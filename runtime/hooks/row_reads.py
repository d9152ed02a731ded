"""Which embeddings a model's prologue reads by rows alone: so its lookups may be of rows that lie elsewhere."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import torch
from torch import nn

from ...shared.observed.observed_inputs import PhaseKey
from ...shared.schema.schedule import OuterSection, TaskKind
from ..model.nested_tensors import tensors_in, unwrapped

_LOOKUP: Final = torch.ops.aten.embedding.default
_ANNOUNCES: Final = frozenset({nn.functional.embedding, torch.embedding})
"""What calls the operator, with the parameter that the operator is given."""


class RowReads:
    """The lookups of one iteration's prologue, and the parameters that it reads otherwise."""

    def __init__(self, model: nn.Module) -> None:
        self._names = {p.untyped_storage()._cdata: name for name, p in model.named_parameters()}
        self._lookups: list[str] = []
        self._read_whole: set[str] = set()

    @property
    def lookups(self) -> tuple[str, ...]:
        """The embedding of each lookup, in order; none if the prologue needs one of them whole.

        An embedding with a largest norm is written by its lookup; a gradient that is sparse, or scaled by how often a
        row occurs, is no sum of gradients of rows.
        """
        return () if self._read_whole & set(self._lookups) else tuple(self._lookups)

    def restart(self) -> None:
        """Forget the lookups: the next iteration counts.  Whoever was read whole stays so."""
        self._lookups.clear()

    def note(self, place: PhaseKey | None, function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """``function`` of torch, or an operator, is given these where the model is at ``place``."""
        if place is None or place[1] is not OuterSection.PROLOGUE or function in _ANNOUNCES:
            return
        if function is _LOOKUP and place[0] is TaskKind.FORWARD and not any(args[3:]) and not any(kwargs.values()):
            name = self._name_of(args[0])
            # A view of a parameter, or rows of another tensor, are read as they are.
            if name is not None and isinstance(args[0], nn.Parameter):
                self._lookups.append(name)
                return
        self._read_whole.update(name for t in tensors_in((args, kwargs)) if (name := self._name_of(t)) is not None)
        if function is _LOOKUP:
            # Of whatever it is, one lookup must be where it was.
            self._read_whole.update(self._lookups)

    def _name_of(self, tensor: torch.Tensor) -> str | None:
        return self._names.get(unwrapped(tensor).untyped_storage()._cdata)


def agreed(seen: set[tuple[str, ...]]) -> tuple[str, ...]:
    """The lookups that all iterations have had; none if they differ."""
    return next(iter(seen)) if len(seen) == 1 else ()
