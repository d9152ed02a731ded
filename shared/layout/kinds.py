"""Which kind of plan a plan is, for the chunks of a layout."""

from __future__ import annotations

from ..schema.plan import ActivationMode, Plan
from ..schema.plan_kind import PlanKind, kind_by_counts
from ..schema.workload import BlockId, Workload
from .layout import Layout


def kind_of(plan: Plan, layout: Layout, workload: Workload) -> PlanKind:
    """The kind of ``plan``.

    Blocks that have nothing to move keep their activations in mode SWAP, and do not count for a kind.
    """
    num_gathered = max(0, len(layout.chunks) - plan.num_kept)
    num_sharded = min(plan.n_shard, num_gathered)
    return kind_by_counts(
        num_offloaded=num_gathered - num_sharded,
        num_host_stepped=len(layout.host_stepped(plan.n_persist, plan.n_host_stepped)),
        num_sharded=num_sharded,
        n_swap=sum(
            mode is ActivationMode.SWAP and workload.profile_of(BlockId(block)).swappable_bytes > 0
            for block, mode in enumerate(plan.modes(workload.num_blocks))
        ),
        n_checkpoint=plan.n_checkpoint,
    )
