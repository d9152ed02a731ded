"""Observations and times put together: phases, and one profile for blocks that do the same."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from ..shared.plan import ActivationMode
from ..shared.schedule import Part, Section, TaskKind
from ..shared.workload import BlockId, BlockProfile, Phase
from .observing import Observation, PhaseKey


class Assembly:
    """Observations and times as phases and profiles."""

    def __init__(
        self,
        num_blocks: int,
        observed: Mapping[ActivationMode, Mapping[PhaseKey, Observation]],
        seconds: Mapping[ActivationMode, Mapping[PhaseKey, float]],
        *,
        is_real: bool,
    ) -> None:
        self.is_real = is_real
        self.is_timed = any(seconds.values())
        self._num_blocks = num_blocks
        self._observed = observed
        self._seconds = seconds

    def phase(self, mode: ActivationMode, kind: TaskKind, section: Section) -> Phase:
        """One section's phase."""
        observation = self._observed[mode][kind, section]
        return Phase(
            operations=observation.tally.operations(),
            net_bytes=observation.end_bytes - observation.start_bytes,
            gradient_bytes=max(0, observation.gradient_bytes),
            curve=observation.curve(),
            adding_curve=observation.adding_curve(),
            measured_s=self._seconds[mode].get((kind, section)),
        )

    def outer_phase(self, kind: TaskKind, section: Part) -> Phase:
        """A phase outside the blocks, for any mixture of activation modes.

        What the blocks were given (masks, positions, the first block's input) ends with the forward if no block saves
        it, and with the backward of the checkpointed blocks otherwise; the phase that frees less holds for all.
        """
        keep, again = (self.phase(mode, kind, section) for mode in (ActivationMode.KEEP, ActivationMode.CHECKPOINT))
        larger = max(keep, again, key=lambda phase: (phase.net_bytes, phase.peak_bytes))
        return larger.model_copy(update={"measured_s": keep.measured_s})

    def profiles(self) -> tuple[tuple[BlockProfile, ...], list[int]]:
        """Distinct profiles and the profile of each block; equal blocks share the median of their times."""
        members: dict[BlockProfile, list[BlockProfile]] = {}
        keys: list[BlockProfile] = []
        for index in range(self._num_blocks):
            profile = self._profile(index)
            key = _map_phases(profile, lambda phase: phase.model_copy(update={"measured_s": None}))
            members.setdefault(key, []).append(profile)
            keys.append(key)
        order = list(members)
        return tuple(_merge(members[key]) for key in order), [order.index(key) for key in keys]

    def _profile(self, index: int) -> BlockProfile:
        keep, again = ActivationMode.KEEP, ActivationMode.CHECKPOINT
        section = BlockId(index)
        return BlockProfile(
            output_bytes=self._observed[keep][TaskKind.FORWARD, section].output_bytes,
            forward=self.phase(keep, TaskKind.FORWARD, section),
            backward=self.phase(keep, TaskKind.BACKWARD, section),
            checkpoint_forward=self.phase(again, TaskKind.FORWARD, section),
            recompute=self.phase(again, TaskKind.RECOMPUTE, section),
            checkpoint_backward=self.phase(again, TaskKind.BACKWARD, section),
            swappable_bytes=self._observed[keep][TaskKind.FORWARD, section].swappable_bytes,
        )


_PHASES: Final = ("forward", "backward", "checkpoint_forward", "recompute", "checkpoint_backward")


def _map_phases(profile: BlockProfile, change: Callable[[Phase], Phase]) -> BlockProfile:
    return profile.model_copy(update={name: change(getattr(profile, name)) for name in _PHASES})


def _merge(profiles: Sequence[BlockProfile]) -> BlockProfile:
    """One profile for equal blocks, with the median of each phase's times."""
    updates = {}
    for name in _PHASES:
        phases = [getattr(profile, name) for profile in profiles]
        times = [phase.measured_s for phase in phases if phase.measured_s is not None]
        updates[name] = phases[0].model_copy(update={"measured_s": statistics.median(times) if times else None})
    return profiles[0].model_copy(update=updates)
