"""What matrix products and attention gave, and whether the model changes it in place later."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from ...shared.observed.observation import Observation, OperatorCall
from ...shared.phases.activation_modes import KeptResults
from ..hooks.selective import written_by
from ..model.nested_tensors import tensors_in


class ExpensiveResults:
    """Notes such changes as ``OperatorCall.is_changed``, wherever in the iteration they happen."""

    def __init__(self) -> None:
        self._chosen = KeptResults(1)
        self._made_by: dict[int, tuple[Observation, int, weakref.ref[Any]]] = {}
        """By the address of a storage that is there: the call that made it."""

    def forget(self) -> None:
        """Another iteration begins."""
        self._made_by.clear()

    def note(
        self,
        seen: Observation,
        call: OperatorCall,
        operator: Any,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        result: Any,
    ) -> None:
        """``call`` is the latest one of ``seen``."""
        if operator._schema.is_mutable:
            self._note_change(operator, args, kwargs)
        elif self._chosen.keeps(call.name, draws=call.draws):
            for tensor in tensors_in(result):
                storage = tensor.untyped_storage()
                self._made_by[storage._cdata] = (seen, len(seen.calls) - 1, self._reference(storage))

    def _reference(self, storage: torch.UntypedStorage) -> weakref.ref[Any]:
        key = storage._cdata
        return weakref.ref(storage, lambda _: self._made_by.pop(key, None))

    def _note_change(self, operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        for tensor in written_by(operator, args, kwargs):
            made = self._made_by.get(tensor.untyped_storage()._cdata)
            if made is not None:
                seen, number, _ = made
                seen.calls[number] = replace(seen.calls[number], is_changed=True)
