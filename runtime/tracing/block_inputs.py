"""What blocks are given, and where each tensor goes ([Note: Shared inputs] in ``shared/phases/shared_inputs.py``)."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ...shared.layout.travelling_inputs import handed_bytes
from ...shared.observed.observed_inputs import ObservedInput, PhaseKey
from ...shared.schema.schedule import TaskKind
from ..devices.ledger import MemoryLedger
from ..hooks.block_runs import BlockRuns
from ..model.blocks import NamedBlock
from ..model.nested_tensors import tensors_in, unwrapped


@dataclass(slots=True)
class GivenTensor:
    """A storage that a block was given, or has returned."""

    size_bytes: int
    blocks: list[int] = field(default_factory=list)
    """Those that were given it."""
    made_by: int | None = None
    """The block that returned it and was not given it."""
    is_used_outside: bool = False
    """Whether anything but its block and those that were given it has read it in forward, or the model returned it."""
    gone: PhaseKey | None = None
    """Where it went; None for what outlives the iteration."""
    let_go: PhaseKey | None = None
    """Where the model let go of the last tensor of it that a block returned; None if it never did.  Autograd may hold
    the storage beyond that."""


class GivenTensors:
    """Follows what the blocks of a running model are given and return, by the storages that ``ledger`` counts.

    ``place`` says where the model is.  Parameters, module buffers and the batch outlive everything.
    """

    def __init__(
        self,
        model: nn.Module,
        blocks: Sequence[NamedBlock],
        ledger: MemoryLedger,
        lasting: Sequence[torch.Tensor],
        place: Callable[[], PhaseKey | None],
    ) -> None:
        self.found: list[GivenTensor] = []
        """Of the latest iteration, in the order in which they were given or returned first."""
        self._ledger = ledger
        self._lasting = {tensor.untyped_storage()._cdata for tensor in lasting}
        self._place = place
        self._alive: dict[int, tuple[GivenTensor, weakref.ref[Any]]] = {}
        self._returned: dict[int, weakref.ref[torch.Tensor]] = {}
        """By identity, the tensors that blocks have returned."""
        self._keys: set[int] = set()
        """Addresses of living storages that blocks were given, or that the last block or the model has returned."""
        self._last = len(blocks) - 1
        self._within: int | None = None
        """The block whose forward runs."""
        self._runs = BlockRuns(model, blocks, on_enter=self._see, on_leave=self._see_returned)
        self._end = model.register_forward_hook(self._see_end)

    def restart(self) -> None:
        """Forget what was seen: the next iteration counts."""
        self.found = []
        self._alive.clear()
        self._returned.clear()
        self._keys.clear()
        self._within = None

    def was_given(self, key: int) -> bool:
        """Whether blocks were given the storage at an address, which is going, or the last one or the model gave it."""
        was_given = key in self._keys
        self._keys.discard(key)
        return was_given

    def note(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """An operation has read these."""
        place = self._place()
        if place is None or place[0] is not TaskKind.FORWARD:
            return
        for tensor in tensors_in((args, kwargs)):
            known = self._alive.get(unwrapped(tensor).untyped_storage()._cdata)
            if known is not None and (self._within is None or self._within not in known[0].blocks):
                known[0].is_used_outside = True

    def remove(self) -> None:
        """Take the hooks off."""
        self._runs.remove()
        self._end.remove()
        self._alive.clear()
        self._returned.clear()

    def _see(self, block: int, arguments: Any) -> None:
        # Recomputation calls the forward of a block and not the block, so it does not come by here.
        self._within = block
        for tensor, given in self._counted(arguments):
            self._keys.add(tensor.untyped_storage()._cdata)
            if block not in given.blocks:
                given.blocks.append(block)

    def _see_returned(self, block: int, arguments: Any, output: Any) -> None:
        self._within = None
        for tensor, given in self._counted(output):
            if block == self._last:
                # Shipped families count it as an output until the epilogue's backward, an upper bound.
                self._keys.add(tensor.untyped_storage()._cdata)
            if given.made_by is None and not given.blocks:
                given.made_by = block
            self._follow(tensor, given)

    def _follow(self, tensor: torch.Tensor, given: GivenTensor) -> None:
        """Note where the model lets go of a tensor; of several of one storage, the last one that it lets go of counts.

        In mode KEEP autograd holds others in place of what blocks save (``SwappableTally``).
        """
        key = id(tensor)
        self._returned[key] = weakref.ref(tensor, lambda _: self._let_go(key, given))

    def _let_go(self, key: int, given: GivenTensor) -> None:
        del self._returned[key]
        given.let_go = self._place()

    def _counted(self, value: Any) -> Iterator[tuple[torch.Tensor, GivenTensor]]:
        """The tensors in ``value`` whose storages the ledger counts and that do not outlive everything."""
        for tensor in tensors_in(value):
            storage = tensor.untyped_storage()
            size_bytes = self._ledger.counted_bytes(storage)
            if storage._cdata not in self._lasting and size_bytes:
                yield tensor, self._given(storage, size_bytes)

    def _see_end(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        for tensor in tensors_in(output):
            # A loop may hold the output while backward runs.
            self._keys.add(tensor.untyped_storage()._cdata)
            known = self._alive.get(tensor.untyped_storage()._cdata)
            if known is not None:
                known[0].is_used_outside = True

    def _given(self, storage: torch.UntypedStorage, size_bytes: int) -> GivenTensor:
        key = storage._cdata
        known = self._alive.get(key)
        if known is not None:
            return known[0]
        given = GivenTensor(size_bytes)
        self.found.append(given)
        self._alive[key] = given, weakref.ref(storage, lambda _: self._gone(key, given))
        return given

    def _gone(self, key: int, given: GivenTensor) -> None:
        self._alive.pop(key, None)
        given.gone = self._place()


def staying_inputs(
    kept: Sequence[GivenTensor],
    checkpointed: Sequence[GivenTensor],
    output_bytes: Sequence[int],
    shared: Sequence[ObservedInput],
    stands_for: Sequence[int],
) -> tuple[int, ...]:
    """The observed blocks that the block before hands less than sizes of outputs tell, in either way of tracing.

    What it hands to this one alone travels, unless somebody else may hold it: the model between blocks or beyond this
    one, in a list or as the input of a stage of several blocks, or the block before for its own backward, as for that
    of tanh.
    ``output_bytes``: of every observed block.
    """
    seen = _handed([given for given in kept if _is_let_go(given)], output_bytes), _handed(checkpointed, output_bytes)
    handed = [min(sizes) for sizes in zip(*seen, strict=True)]
    told = handed_bytes(
        [output_bytes[seen] for seen in stands_for],
        [one for given in shared for one in given.shared_inputs(stands_for)],
    )
    return tuple(sorted({seen for block, seen in enumerate(stands_for) if told[block] > handed[seen]}))


def _handed(found: Sequence[GivenTensor], output_bytes: Sequence[int]) -> list[int]:
    """By block, what the block before hands to it and nobody else holds."""
    handed = [0] * len(output_bytes)
    for given in found:
        if given.made_by is not None and given.blocks == [given.made_by + 1] and not _is_held_besides(given):
            handed[given.made_by + 1] += given.size_bytes
    return handed


def _is_held_besides(given: GivenTensor) -> bool:
    """By anybody but the one block that is given it."""
    if given.gone is None or given.is_used_outside:
        return True
    kind, section = given.gone
    return kind is not TaskKind.FORWARD and section != given.blocks[0]


def _is_let_go(given: GivenTensor) -> bool:
    """Whether the model lets go of what one block is given when that block returns, if blocks keep what they save."""
    return bool(given.blocks) and given.let_go == (TaskKind.FORWARD, given.blocks[0])


def shared_inputs(
    kept: Sequence[GivenTensor], checkpointed: Sequence[GivenTensor], stands_for: Sequence[int]
) -> tuple[ObservedInput, ...]:
    """The tensors whose life depends on the modes of blocks, from the two ways in which a model was traced.

    Empty if the blocks were not given the same in both: then phases outside the blocks are the larger of the two.
    """
    facts = [[(given.size_bytes, given.blocks) for given in found] for found in (kept, checkpointed)]
    if facts[0] != facts[1]:
        return ()
    observed = (
        ObservedInput(one.size_bytes, tuple(one.blocks), one.gone, other.gone)
        for one, other in zip(kept, checkpointed, strict=True)
        if one.gone is not None and other.gone is not None
    )
    return tuple(given for given in observed if given.depends_on_modes(stands_for))
