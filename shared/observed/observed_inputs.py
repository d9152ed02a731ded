"""Shared inputs as a trace sees them, and the observations of a trace with them counted as a workload counts them.

A trace has all blocks keep their activations, or all of them checkpointed.  Where a tensor goes in these two says where
it goes in any mixture (Note: Shared inputs).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from ..phases.shared_inputs import SharedInput
from ..schema.plan import ActivationMode
from ..schema.schedule import OuterSection, Section, TaskKind
from ..schema.workload import BlockId
from .observation import Observation

PhaseKey = tuple[TaskKind, Section]


@dataclass(frozen=True, slots=True)
class ObservedInput:
    """A tensor that was given to blocks, or that one has made and none was given."""

    size_bytes: int
    blocks: tuple[int, ...]
    """The observed blocks that were given it; none of what a block's caller alone holds."""
    kept: PhaseKey
    """Where it went with all blocks in mode KEEP."""
    checkpointed: PhaseKey
    """Where it went with all blocks in mode CHECKPOINT."""
    made_by: BlockId | None = None
    """The observed block that made it, if it goes with the epilogue's forward unless one of ``blocks``, which have read
    it and were not given it, keeps it."""

    @property
    def let_go_by(self) -> Section | None:
        """Whose forward lets it go where no block holds it; None if there are two answers."""
        found = {section for kind, section in (self.kept, self.checkpointed) if kind is TaskKind.FORWARD}
        return None if len(found) > 1 else found.pop() if found else OuterSection.EPILOGUE

    def held_by(self, gone: PhaseKey) -> tuple[int, ...]:
        """The observed blocks that hold it for backward if it went so.

        The one whose backward it went with does, and all later ones that were given it may.
        """
        kind, section = gone
        if kind is TaskKind.FORWARD:
            return ()
        assert isinstance(section, int)
        return (section, *(block for block in self.blocks if block > section))

    def depends_on_modes(self, stands_for: Sequence[int]) -> bool:
        """Whether phases alone do not say where it goes; ``stands_for``: see ``TracedModel``.

        What only one block is given, the output of the block before above all, goes as that block's own mode says.
        """
        for kind, section in (self.kept, self.checkpointed):
            is_followed = section is not OuterSection.PROLOGUE and kind is not TaskKind.RECOMPUTE
            if not is_followed or (kind is TaskKind.BACKWARD and section is OuterSection.EPILOGUE):
                return False
        if not self.blocks:
            return self._is_held_by_a_caller
        sections = {self.kept[1], self.checkpointed[1]}
        if self.let_go_by is None or (len(self.blocks) == 1 and self._is_own(sections, stands_for)):
            return False
        # The one that is observed frees it, and those that it stands for do not.
        stands_for_others = any(isinstance(section, int) and stands_for.count(section) > 1 for section in sections)
        return self.kept != self.checkpointed or stands_for_others

    @property
    def _is_held_by_a_caller(self) -> bool:
        """Whether the next block's forward lets it go, unless the block that made it keeps it for its backward.

        Attention weights, for one, that a block returns beside its output: its caller holds them until it has the next
        block's.
        """
        (kept_until, maker), (let_go, by) = self.kept, self.checkpointed
        is_kept = kept_until is TaskKind.BACKWARD and let_go is TaskKind.FORWARD
        return is_kept and isinstance(maker, int) and isinstance(by, int) and by == maker + 1

    def _is_own(self, sections: set[Section], stands_for: Sequence[int]) -> bool:
        block = self.blocks[0]
        return sections == {block} or stands_for.count(block) > 1

    def shared_inputs(self, stands_for: Sequence[int]) -> Iterator[SharedInput]:
        """It as a workload has it; of what blocks return to their caller alone, that of each of them."""
        if self.made_by is not None:
            for block, observed in enumerate(stands_for):
                if observed == self.made_by:
                    yield self._made_in(block, stands_for)
            return
        if self.blocks:
            yield self.shared_input(stands_for)
            return
        for block, observed in enumerate(stands_for):
            if observed == self.let_go_by:
                made_by = (block - 1,)
                yield SharedInput(size_bytes=self.size_bytes, let_go_by=block, kept_by=made_by, freed_in_kept=made_by)

    def _made_in(self, block: int, stands_for: Sequence[int]) -> SharedInput:
        """What ``block`` makes and others may read; only blocks that stand for none but themselves share it."""
        kind, gone_with = self.kept
        if kind is TaskKind.FORWARD:
            return SharedInput(size_bytes=self.size_bytes, made_by=block)
        alone = self.blocks == (self.made_by,)
        return SharedInput(
            size_bytes=self.size_bytes,
            made_by=block,
            kept_by=(block,) if alone else tuple(b for b, seen in enumerate(stands_for) if seen in self.blocks),
            freed_in_kept=(block,) if alone else tuple(b for b, seen in enumerate(stands_for) if seen == gone_with),
        )

    def shared_input(self, stands_for: Sequence[int]) -> SharedInput:
        """It as a workload has it, if blocks are given it."""

        def stood_for(observed: Sequence[int]) -> tuple[int, ...]:
            return tuple(block for block, stand_in in enumerate(stands_for) if stand_in in observed)

        by = self.let_go_by
        return SharedInput(
            size_bytes=self.size_bytes,
            let_go_by=max(stood_for((by,))) if isinstance(by, int) else None,
            kept_by=stood_for(self.held_by(self.kept)),
            checkpointed_by=stood_for(self.held_by(self.checkpointed)),
            freed_in_kept=stood_for(self.held_by(self.kept)[:1]),
            freed_in_checkpointed=stood_for(self.held_by(self.checkpointed)[:1]),
        )


def while_frames_return(
    observed: Mapping[ActivationMode, Mapping[PhaseKey, Observation]],
) -> dict[ActivationMode, dict[PhaseKey, Observation]]:
    """Observations that begin when they are announced, with what goes before their first operation.

    The caller of the last block holds the block's input until the block has returned, and the frames of a recomputation
    hold what they made: the epilogue's forward and the block's backward wait for their chunks meanwhile.  Sections
    outside the blocks have one phase for all mixtures: as much as in the mode in which more is held.  What has gone
    counts no second time.
    """
    most: dict[PhaseKey, int] = {}
    for sections in observed.values():
        for key, seen in sections.items():
            most[key] = max(most.get(key, 0), seen.lingering_bytes)
    return {
        mode: {
            key: seen.lingering(seen.lingering_bytes if isinstance(key[1], int) else most[key])
            for key, seen in sections.items()
        }
        for mode, sections in observed.items()
    }


def unshared(
    observed: Mapping[ActivationMode, Mapping[PhaseKey, Observation]], inputs: Sequence[ObservedInput]
) -> dict[ActivationMode, dict[PhaseKey, Observation]]:
    """Observations as if no block held ``inputs`` for its backward: what a workload's phases are made from."""
    found = {mode: dict(sections) for mode, sections in observed.items()}
    for given in inputs:
        for mode, gone in ((ActivationMode.KEEP, given.kept), (ActivationMode.CHECKPOINT, given.checkpointed)):
            sections, by = found[mode], given.let_go_by
            assert by is not None
            if given.made_by is not None:
                if gone[0] is TaskKind.FORWARD:
                    sections[gone] = _without(sections[gone], -given.size_bytes, within=False)
                continue
            let_go: PhaseKey = (TaskKind.FORWARD, by)
            if gone != let_go:
                # Where a block holds it, all levels are raised again: this one, or for the epilogue any.
                is_held = isinstance(by, OuterSection) or by in given.held_by(gone)
                sections[let_go] = _without(sections[let_go], given.size_bytes, within=is_held)
    return found


def _without(observation: Observation, size_bytes: int, *, within: bool) -> Observation:
    """``observation`` with so much less left behind, and if ``within`` alive."""
    less_bytes = size_bytes if within else 0
    return replace(
        observation,
        end_bytes=observation.end_bytes - size_bytes,
        levels=[level - less_bytes for level in observation.levels],
        adding_levels=[level - less_bytes for level in observation.adding_levels],
    )
