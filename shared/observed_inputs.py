"""Shared inputs as a trace sees them, and the observations of a trace with them counted as a workload counts them.

A trace has all blocks keep their activations, or all of them checkpointed.  Where a tensor goes in these two says where
it goes in any mixture (Note: Shared inputs).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from .observation import Observation
from .plan import ActivationMode
from .schedule import Part, Section, TaskKind
from .shared_inputs import SharedInput

PhaseKey = tuple[TaskKind, Section]


@dataclass(frozen=True, slots=True)
class Gone:
    """Where a tensor went."""

    kind: TaskKind
    section: Section
    after: int
    """Operations of that section before."""

    @property
    def key(self) -> PhaseKey:
        """The section's phase."""
        return self.kind, self.section


@dataclass(frozen=True, slots=True)
class ObservedInput:
    """A tensor that was given to blocks."""

    size_bytes: int
    blocks: tuple[int, ...]
    """The observed blocks that were given it."""
    kept: Gone
    """Where it went with all blocks in mode KEEP."""
    checkpointed: Gone
    """Where it went with all blocks in mode CHECKPOINT."""

    @property
    def let_go_by(self) -> Section | None:
        """Whose forward lets it go where no block holds it; None if there are two answers."""
        found = {gone.section for gone in (self.kept, self.checkpointed) if gone.kind is TaskKind.FORWARD}
        return None if len(found) > 1 else found.pop() if found else Part.EPILOGUE

    def held_by(self, gone: Gone) -> tuple[int, ...]:
        """The observed blocks that hold it for backward if it went so.

        The one whose backward it went with does, and all later ones that were given it may.
        """
        if gone.kind is TaskKind.FORWARD:
            return ()
        assert isinstance(gone.section, int)
        return (gone.section, *(block for block in self.blocks if block > gone.section))

    def depends_on_modes(self, stands_for: Sequence[int]) -> bool:
        """Whether phases alone do not say where it goes; ``stands_for``: see ``TracedModel``.

        What only one block is given, the output of the block before above all, goes as that block's own mode says.
        """
        for gone in (self.kept, self.checkpointed):
            is_followed = gone.section is not Part.PROLOGUE and gone.kind is not TaskKind.RECOMPUTE
            if not is_followed or (gone.kind is TaskKind.BACKWARD and gone.section is Part.EPILOGUE):
                return False
        sections = {self.kept.section, self.checkpointed.section}
        if self.let_go_by is None or (len(self.blocks) == 1 and self._is_own(sections, stands_for)):
            return False
        # The one that is observed frees it, and those that it stands for do not.
        stands_for_others = any(isinstance(section, int) and stands_for.count(section) > 1 for section in sections)
        return self.kept.key != self.checkpointed.key or stands_for_others

    def _is_own(self, sections: set[Section], stands_for: Sequence[int]) -> bool:
        block = self.blocks[0]
        return sections == {block} or stands_for.count(block) > 1

    def shared_input(self, stands_for: Sequence[int]) -> SharedInput:
        """It as a workload has it."""

        def stood_for(observed: Sequence[int]) -> tuple[int, ...]:
            return tuple(block for block, stand_in in enumerate(stands_for) if stand_in in observed)

        by = self.let_go_by
        return SharedInput(
            size_bytes=self.size_bytes,
            let_go_by=max(stood_for((by,))) if isinstance(by, int) else None,
            kept_by=stood_for(self.held_by(self.kept)),
            checkpointed_by=stood_for(self.held_by(self.checkpointed)),
        )


def unshared(
    observed: Mapping[ActivationMode, Mapping[PhaseKey, Observation]], inputs: Sequence[ObservedInput]
) -> dict[ActivationMode, dict[PhaseKey, Observation]]:
    """Observations as if no block held ``inputs`` for its backward: what a workload's phases are made from."""
    found = {mode: dict(sections) for mode, sections in observed.items()}
    for given in inputs:
        for mode, gone in ((ActivationMode.KEEP, given.kept), (ActivationMode.CHECKPOINT, given.checkpointed)):
            sections, by = found[mode], given.let_go_by
            assert by is not None
            let_go: PhaseKey = (TaskKind.FORWARD, by)
            if gone.key != let_go:
                # All of its levels will be raised again where a block holds it, as this one's do.
                is_held = isinstance(by, Part) or by in given.held_by(gone)
                sections[let_go] = _changed(sections[let_go], -given.size_bytes, since=0 if is_held else None)
            if gone.kind is TaskKind.BACKWARD:
                sections[gone.key] = _changed(sections[gone.key], given.size_bytes, since=gone.after)
    return found


def _changed(observation: Observation, more_bytes: int, *, since: int | None) -> Observation:
    """``observation`` with so much more left behind, and alive after its first ``since`` operations."""
    since = len(observation.levels) if since is None else since

    def raised(levels: list[int]) -> list[int]:
        return levels[:since] + [level + more_bytes for level in levels[since:]]

    return replace(
        observation,
        end_bytes=observation.end_bytes + more_bytes,
        levels=raised(observation.levels),
        adding_levels=raised(observation.adding_levels),
    )
