"""What blocks make and the model holds until its forward ends ([Note: Shared inputs] in ``shared_inputs.py``)."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from ...shared.observed.observed_inputs import ObservedInput, PhaseKey
from ...shared.schema.schedule import OuterSection, TaskKind
from ...shared.schema.workload import BlockId
from ..model.nested_tensors import tensors_in, unwrapped

_END: Final[PhaseKey] = (TaskKind.FORWARD, OuterSection.EPILOGUE)


@dataclass(frozen=True, slots=True)
class MadeStorage:
    """A storage that a block's forward made and no block was given."""

    made_by: BlockId
    size_bytes: int
    blocks: tuple[int, ...]
    """Those whose forward may have saved it: they have read it, or made it."""
    gone: PhaseKey
    """Where it went."""


class MadeStorages:
    """Follows what forwards of blocks make beyond their section, by the addresses of storages."""

    def __init__(self) -> None:
        self.found: list[MadeStorage] = []
        """What a block's backward or the epilogue's forward let go of, in that order."""
        self._readers: dict[int, set[int]] = {}
        """By address, the blocks whose forward has read it."""

    def restart(self) -> None:
        """Forget what was seen: the next iteration counts."""
        self.found = []
        self._readers.clear()

    def note(self, place: PhaseKey | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """An operation at ``place`` has read these."""
        if place is not None and place[0] is TaskKind.FORWARD and isinstance(place[1], int):
            for tensor in tensors_in((args, kwargs)):
                self._readers.setdefault(unwrapped(tensor).untyped_storage()._cdata, set()).add(place[1])

    def forgotten(self, key: int, made_in: Hashable, size_bytes: int, gone: PhaseKey | None, *, is_given: bool) -> None:
        """The storage at an address went at ``gone``; ``is_given``: to a block, or by the model to its caller."""
        readers = self._readers.pop(key, set())
        if is_given or not size_bytes or gone is None or not isinstance(made_in, tuple):
            return
        (kind, maker), (gone_in, section) = made_in, gone
        goes_late = gone == _END or (gone_in is TaskKind.BACKWARD and isinstance(section, int))
        if goes_late and kind is TaskKind.FORWARD and isinstance(maker, int):
            self.found.append(MadeStorage(BlockId(maker), size_bytes, tuple(sorted(readers | {maker})), gone))


def held_to_the_end(
    kept: Sequence[MadeStorage], checkpointed: Sequence[MadeStorage], stands_for: Sequence[int]
) -> tuple[ObservedInput, ...]:
    """What blocks made that goes with the epilogue's forward where no block keeps it, by who may keep it together.

    What several blocks read, a cast that autocast keeps for a module that runs several times, is left to the phases
    where one of them stands for others.
    """
    goes: dict[tuple[BlockId, int, tuple[int, ...]], list[PhaseKey]] = {}
    for one in kept:
        goes.setdefault((one.made_by, one.size_bytes, one.blocks), []).append(one.gone)
    for places in goes.values():
        places.sort(key=lambda place: place != _END)
    found: dict[tuple[BlockId, tuple[int, ...], PhaseKey], int] = {}
    for one in checkpointed:
        places = goes.get((one.made_by, one.size_bytes, one.blocks), [])
        is_shared = len(one.blocks) > 1 and any(stands_for.count(block) > 1 for block in one.blocks)
        if one.gone == _END and places and not is_shared:
            key = one.made_by, one.blocks, places.pop(0)
            found[key] = found.get(key, 0) + one.size_bytes
    return tuple(
        ObservedInput(size_bytes, blocks, gone, _END, made_by)
        for (made_by, blocks, gone), size_bytes in sorted(found.items(), key=lambda item: (item[0][0], str(item[0])))
    )
