"""Workloads whose sequences several ranks share."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st
from hypothesis.strategies import DrawFn

from protwin.shared.phases.sequence_sharing import SequenceSharing
from protwin.shared.schema.workload import BlockProfile, Phase, Workload


def changed(workload: Workload, **fields: Any) -> Workload:
    """``workload`` with other fields, validated, and nothing that was cached."""
    return Workload(**{name: getattr(workload, name) for name in Workload.model_fields} | fields)


@st.composite
def _exchanging(draw: DrawFn, phase: Phase, exchanges: tuple[int, ...]) -> Phase:
    """``phase``, of any seconds if it was measured, that exchanges so much."""
    seconds = phase.measured_s if phase.measured_s is None else draw(st.integers(0, 2000)) / 1000
    fields = {name: getattr(phase, name) for name in Phase.model_fields}
    return Phase(**fields | {"exchanges": exchanges, "measured_s": seconds})


@st.composite
def sharings(
    draw: DrawFn, workload: Workload, sequence_ranks: int, exchanges: tuple[int, ...] | None = None
) -> SequenceSharing:
    """What one of so many ranks does: blocks as long as may be, that exchange anything; memory as the whole's.

    ``exchanges``: of every phase of a block, in place of any.
    """

    def shared(profile: BlockProfile) -> BlockProfile:
        """In either mode something, or nothing, is exchanged."""
        phases: dict[str, Phase] = {}
        for names in (("forward", "checkpoint_forward"), ("backward", "checkpoint_backward"), ("recompute",)):
            is_any = exchanges is not None or draw(st.booleans())
            for name in names:
                most = 3 if is_any else 0
                is_needed = is_any and name != "recompute"
                drawn = st.lists(st.integers(0, 10**8), min_size=int(is_needed), max_size=most).map(tuple)
                sizes = draw(drawn) if exchanges is None else exchanges
                if name == "recompute" and not phases["backward"].exchanges:
                    sizes = ()
                phases[name] = draw(_exchanging(getattr(profile, name), sizes))
        return profile.model_copy(update=phases)

    return SequenceSharing(
        sequence_ranks=sequence_ranks,
        profiles=tuple(shared(profile) for profile in workload.profiles),
        profile_of=tuple(block.profile for block in workload.blocks),
        prologue_forward=workload.prologue_forward,
        epilogue_forward=draw(_exchanging(workload.epilogue_forward, ())),
        epilogue_backward=workload.epilogue_backward,
        prologue_backward=workload.prologue_backward,
        shared_inputs=workload.shared_inputs,
        resident_bytes=draw(st.integers(0, 1000)),
    )


@st.composite
def shared_workloads(draw: DrawFn, workload: Workload, counts: tuple[int, ...]) -> Workload:
    """``workload``, which so many ranks may share sequences of."""
    return changed(workload, sequence_sharings=tuple(draw(sharings(workload, count)) for count in counts))
