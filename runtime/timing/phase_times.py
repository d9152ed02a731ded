"""Measured seconds, and the phases of a workload that they are of."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Final

from ...shared.observed.observed_inputs import PhaseKey
from ...shared.schema.plan import ActivationMode
from ...shared.schema.schedule import OuterSection, TaskKind
from ...shared.schema.workload import BlockId, BlockProfile, Phase, Workload

Times = Sequence[tuple[Sequence[ActivationMode], Mapping[PhaseKey, float]]]
"""Of every iteration: the mode of each block, and the seconds of every section."""
_OF_BLOCKS: Final = {
    "forward": (ActivationMode.KEEP, TaskKind.FORWARD),
    "backward": (ActivationMode.KEEP, TaskKind.BACKWARD),
    "checkpoint_forward": (ActivationMode.CHECKPOINT, TaskKind.FORWARD),
    "recompute": (ActivationMode.CHECKPOINT, TaskKind.RECOMPUTE),
    "checkpoint_backward": (ActivationMode.CHECKPOINT, TaskKind.BACKWARD),
}
"""The mode and the task of each phase of a block's profile."""
_INSTEAD: Final = {"forward": ("checkpoint_forward", "recompute"), "backward": ("checkpoint_backward",)}
"""What the phases of a block that was never kept take: the same operations did, and a recomputation may end early."""
_OUTER: Final = {
    "prologue_forward": (TaskKind.FORWARD, OuterSection.PROLOGUE),
    "epilogue_forward": (TaskKind.FORWARD, OuterSection.EPILOGUE),
    "epilogue_backward": (TaskKind.BACKWARD, OuterSection.EPILOGUE),
    "prologue_backward": (TaskKind.BACKWARD, OuterSection.PROLOGUE),
}


def with_seconds(workload: Workload, times: Times, *, measured_on: str) -> Workload:
    """``workload`` with the medians of ``times`` for its phases; blocks of one profile share theirs.

    Every block is checkpointed in some iteration.  Without iterations, the workload as it is.
    """
    if not times:
        return workload
    outer = {field: _median([found[key] for _, found in times]) for field, key in _OUTER.items()}
    changes: dict[str, object] = {field: _timed(getattr(workload, field), seconds) for field, seconds in outer.items()}
    changes["profiles"] = tuple(
        _timed_profile(workload, place, profile, times) for place, profile in enumerate(workload.profiles)
    )
    if workload.row_lookups is not None:
        of_rows = ("prologue_forward", "prologue_backward")
        changes["row_lookups"] = workload.row_lookups.model_copy(
            update={field: _timed(getattr(workload.row_lookups, field), outer[field]) for field in of_rows}
        )
    # Made anew: what a workload has derived from its fields is kept with it.
    fields = {field: getattr(workload, field) for field in Workload.model_fields}
    return Workload(**{**fields, **changes, "measured_on": measured_on})


def _timed_profile(workload: Workload, place: int, profile: BlockProfile, times: Times) -> BlockProfile:
    members = [BlockId(block) for block, described in enumerate(workload.blocks) if described.profile == place]
    seconds: dict[str, float] = {}
    for field, (mode, kind) in _OF_BLOCKS.items():
        found = [of[kind, block] for modes, of in times for block in members if modes[block] is mode]
        if found:
            seconds[field] = _median(found)
    for field, instead in _INSTEAD.items():
        seconds.setdefault(field, max(seconds[other] for other in instead))
    return profile.model_copy(update={f: _timed(getattr(profile, f), seconds[f]) for f in _OF_BLOCKS})


def _timed(phase: Phase, seconds: float) -> Phase:
    return phase.model_copy(update={"measured_s": seconds})


def _median(seconds: Sequence[float]) -> float:
    return statistics.median(seconds)
