"""The workload whose blocks take as much memory as in the worst of several runs ([Note: Envelope]).

Guarantees read the phases of a workload: so these hold the worst, and what the traced batch took stands beside them
(``BlockProfile.seen``).
"""

from __future__ import annotations

from collections.abc import Sequence

from ...shared.phases.envelope import envelope
from ...shared.phases.seen_memory import PhaseMemory, SeenMemory
from ...shared.schema.workload import Block, BlockProfile, Phase, Workload

_Profiled = tuple[BlockProfile, Phase | None]
"""A block's profile, and of a student's block its loss."""


def with_worst_memory(runs: Sequence[Workload], of_values: set[int], forced: set[int]) -> Workload:
    """The first of ``runs``, the traced batch's, with the highest memory of all.

    ``of_values``: the blocks whose memory may depend on values; ``forced``: those of them whose choices were forced.
    """
    seen = runs[0]
    found: dict[tuple[object, ...], int] = {}
    profiled: list[_Profiled] = []
    blocks: list[Block] = []
    for number, block in enumerate(seen.blocks):
        ways = [_of_block(one, number) for one in (runs if number in of_values else runs[:1])]
        key = (block.profile, number in forced, len(ways), *ways[1:])
        if key not in found:
            found[key] = len(profiled)
            profiled.append(_worst(ways, is_forced=number in forced))
        blocks.append(block.model_copy(update={"profile": found[key]}))
    prologue = envelope([(one.prologue_forward, one.prologue_backward) for one in runs])
    epilogue = envelope([(one.epilogue_forward, one.epilogue_backward) for one in runs])
    fields = {name: getattr(seen, name) for name in Workload.model_fields} | {
        "blocks": tuple(blocks),
        "profiles": tuple(profile for profile, _ in profiled),
        "prologue_forward": prologue[0],
        "prologue_backward": prologue[1],
        "epilogue_forward": epilogue[0],
        "epilogue_backward": epilogue[1],
        "resident_bytes": max(one.resident_bytes for one in runs),
    }
    if seen.distillation is not None:
        losses = tuple(loss for _, loss in profiled)
        fields["distillation"] = seen.distillation.model_copy(update={"losses": losses})
    return Workload(**fields)


def _of_block(workload: Workload, block: int) -> _Profiled:
    distillation, profile = workload.distillation, workload.blocks[block].profile
    return workload.profiles[profile], None if distillation is None else distillation.losses[profile]


def _worst(ways: Sequence[_Profiled], *, is_forced: bool) -> _Profiled:
    """The highest memory of ``ways``, of which the first was seen."""
    profiles = [profile for profile, _ in ways]
    seen, loss = ways[0]
    if len(ways) == 1:
        return ways[0]
    swappable_bytes = max(one.swappable_bytes for one in profiles)
    # What does not travel stays on the device beside it, whichever of the runs it is.
    staying_bytes = max(
        one.forward.net_bytes - one.forward.stated_gradient_bytes - one.swappable_bytes for one in profiles
    )
    again = envelope([(one.checkpoint_forward, one.recompute, one.checkpoint_backward) for one in profiles])
    if loss is None:
        forward, backward = envelope(
            [(one.forward, one.backward) for one in profiles], least_after_first=swappable_bytes + staying_bytes
        )
    else:
        losses = [of_block or Phase() for _, of_block in ways]
        chains = [(one.forward, of_block, one.backward) for one, of_block in zip(profiles, losses, strict=True)]
        forward, loss, backward = envelope(chains)
    worst = BlockProfile(
        output_bytes=max(one.output_bytes for one in profiles),
        forward=forward,
        backward=backward,
        checkpoint_forward=again[0],
        recompute=again[1],
        checkpoint_backward=again[2],
        swappable_bytes=swappable_bytes,
    )
    names = ("forward", "backward", "checkpoint_forward", "recompute", "checkpoint_backward")
    memory = SeenMemory(
        **{name: PhaseMemory.of(getattr(seen, name), getattr(worst, name)) for name in names},
        loss=None if loss is None or ways[0][1] is None else PhaseMemory.of(ways[0][1], loss),
        swappable_bytes=seen.swappable_bytes,
        is_forced=is_forced,
        num_tried=len(ways),
    )
    if is_forced and all(_is_like(way, (worst, loss)) for way in ways):
        return ways[0]
    return worst.model_copy(update={"seen": memory}), loss


def _is_like(one: _Profiled, other: _Profiled) -> bool:
    """Whether both take the same memory."""

    def memory(profiled: _Profiled) -> list[object]:
        profile, loss = profiled
        phases = [*profile.phases, loss or Phase()]
        figures = [
            (phase.net_bytes, phase.gradient_bytes, phase.peak_bytes, phase.adding.peak_bytes) for phase in phases
        ]
        return [profile.output_bytes, profile.swappable_bytes, *figures]

    return memory(one) == memory(other)
