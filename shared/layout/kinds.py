"""Which kind of plan a plan is, for the chunks of a layout."""

from __future__ import annotations

from ..schema.plan import ActivationMode, Plan
from ..schema.plan_kind import PlanKind, kind_by_counts
from ..schema.workload import BlockId, Workload
from .layout import Layout


def kind_of(plan: Plan, layout: Layout, workload: Workload) -> PlanKind:
    """The kind of ``plan``.

    Chunks that no block owns stay on the device in every plan, and blocks that have nothing to move keep their
    activations in mode SWAP: neither counts for a kind.
    """
    first_offloaded = plan.n_persist + plan.n_shard
    owned = [chunk.id for chunk in layout.chunks if chunk.blocks]
    return kind_by_counts(
        num_offloaded=sum(chunk >= first_offloaded for chunk in owned),
        num_sharded=sum(plan.n_persist <= chunk < first_offloaded for chunk in owned),
        n_swap=sum(
            mode is ActivationMode.SWAP and workload.profile_of(BlockId(block)).swappable_bytes > 0
            for block, mode in enumerate(plan.modes(workload.num_blocks))
        ),
        n_checkpoint=plan.n_checkpoint,
    )
