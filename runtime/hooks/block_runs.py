"""Which block each run of a module is.

[Note: Runs of blocks]
A model may run one module several times in a forward: ALBERT has one layer, looped models run their whole stack again.
Such a module stands among the blocks as often as it runs.  A block is then one run of it: it has a section of its own,
an activation mode of its own and a place in the order of execution, and it shares parameters with the other runs, as
tied parameters are shared.  Runs of a module are told apart by counting them since the model's forward began.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from ..model.blocks import NamedBlock, places_of
from ..model.nested_tensors import tensors_in

OnEnter = Callable[[int, Any], None]
"""Told the place of a block, and its arguments, positional and by name."""
OnLeave = Callable[[int, Any, Any], None]
"""Told the place of a block, its arguments and what it returns."""


class BlockRuns:
    """Tells of every forward of the blocks of one model, until ``remove``."""

    def __init__(
        self,
        model: nn.Module,
        blocks: Sequence[NamedBlock],
        *,
        on_enter: OnEnter | None = None,
        on_leave: OnLeave | None = None,
    ) -> None:
        self._on_enter, self._on_leave = on_enter, on_leave
        self._counts: dict[int, int] = {}
        """By module, how often it has begun to run since the model has."""
        self._handles = [model.register_forward_pre_hook(self._restart, prepend=True)]
        for module, places in places_of(blocks):
            enter, leave = self._entering(places), self._leaving(places)
            self._handles.append(module.register_forward_pre_hook(enter, prepend=True, with_kwargs=True))
            self._handles.append(module.register_forward_hook(leave, with_kwargs=True))

    def remove(self) -> None:
        """Take the hooks off."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _restart(self, module: nn.Module, args: Any) -> None:
        self._counts.clear()

    def _entering(self, places: Sequence[int]) -> Callable[..., None]:
        def enter(module: nn.Module, args: Any, kwargs: Any) -> None:
            count = self._counts.get(id(module), 0)
            self._counts[id(module)] = count + 1
            if self._on_enter is not None:
                self._on_enter(places[count % len(places)], (args, kwargs))

        return enter

    def _leaving(self, places: Sequence[int]) -> Callable[..., None]:
        def leave(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            if self._on_leave is not None:
                self._on_leave(places[(self._counts[id(module)] - 1) % len(places)], (args, kwargs), output)

        return leave


class OutputSizes:
    """Bytes of the tensors that each block hands on, storages it was given itself left out."""

    def __init__(self, model: nn.Module, blocks: Sequence[NamedBlock]) -> None:
        self.sizes = [0] * len(blocks)
        """By block; of its latest forward."""
        self._runs = BlockRuns(model, blocks, on_leave=self._measure)

    def _measure(self, index: int, arguments: Any, output: Any) -> None:
        given = {t.untyped_storage()._cdata for t in tensors_in(arguments)}
        made = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors_in(output)}
        self.sizes[index] = sum(size for key, size in made.items() if key not in given)

    def remove(self) -> None:
        """Take the hooks off."""
        self._runs.remove()
