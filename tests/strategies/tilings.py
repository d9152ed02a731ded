"""Workloads that know tiles: other phases of the same blocks and of the same part after the last one."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st
from hypothesis.strategies import DrawFn

from protwin.shared.phases.phase import Phase
from protwin.shared.phases.tiling import LossTiling
from protwin.shared.schema.workload import BlockProfile, Tiling, Workload
from tests.strategies.workloads import phases


@st.composite
def _like(draw: DrawFn, phase: Phase, more_bytes: int = 0) -> Phase:
    """A phase that leaves ``more_bytes`` more, and is another one else."""
    is_measured = phase.measured_s is not None
    return draw(phases(phase.net_bytes + more_bytes, is_measured, phase.gradient_bytes))


@st.composite
def _profiles(draw: DrawFn, profile: BlockProfile) -> BlockProfile:
    """Of a block that saves less, or as much, and does other things for it."""
    saved_bytes = profile.forward.net_bytes - profile.output_bytes - profile.swappable_bytes
    less_swapped_bytes = draw(st.integers(0, profile.swappable_bytes))
    less_bytes = less_swapped_bytes + draw(st.integers(0, saved_bytes))
    less_again_bytes = draw(st.integers(0, profile.recompute.net_bytes))
    return BlockProfile(
        output_bytes=profile.output_bytes,
        forward=draw(_like(profile.forward, -less_bytes)),
        backward=draw(_like(profile.backward, less_bytes)),
        checkpoint_forward=draw(_like(profile.checkpoint_forward)),
        recompute=draw(_like(profile.recompute, -less_again_bytes)),
        checkpoint_backward=draw(_like(profile.checkpoint_backward, less_again_bytes)),
        swappable_bytes=profile.swappable_bytes - less_swapped_bytes,
    )


@st.composite
def with_tilings(draw: DrawFn, model: Workload, counts: tuple[int, ...] = (2, 5)) -> Workload:
    """``model`` with other phases in each of the numbers of tiles, of its MLPs and of its loss; some or none."""
    mlp, loss = (sorted(draw(st.sets(st.sampled_from(counts), max_size=2))) for _ in range(2))
    found: dict[str, Any] = {name: getattr(model, name) for name in Workload.model_fields}
    found["tilings"] = tuple(
        Tiling(
            mlp_tiles=number,
            modules=("mlp",),
            profiles=tuple(draw(_profiles(profile)) for profile in model.profiles),
            profile_of=tuple(block.profile for block in model.blocks),
        )
        for number in mlp
    )
    found["loss_tilings"] = tuple(
        LossTiling(
            loss_tiles=number,
            epilogue_forward=draw(_like(model.epilogue_forward)),
            epilogue_backward=draw(_like(model.epilogue_backward)),
        )
        for number in loss
    )
    return Workload(**found)
