"""Which kind of plan a plan is, for the chunks of a layout."""

from __future__ import annotations

from ..answers.plan_kind import PlanKind
from ..schema.plan import ActivationMode, Plan
from ..schema.workload import BlockId, Workload
from .layout import Layout
from .residencies import most_demanding, residencies
from .travelling_inputs import input_bytes


def kind_of(plan: Plan, layout: Layout, workload: Workload) -> PlanKind:
    """The kind of ``plan``.

    Blocks that have nothing to move keep their activations in mode SWAP, or their input in mode OFFLOAD_INPUT, and do
    not count for a kind.  Raises PlanError if the plan counts more chunks than the layout has.
    """
    inputs = input_bytes(workload)
    swaps = any(
        (mode is ActivationMode.SWAP and workload.profile_of(BlockId(block)).swappable_bytes > 0)
        or (mode is ActivationMode.OFFLOAD_INPUT and inputs[block] > 0)
        for block, mode in enumerate(plan.modes(workload.num_blocks))
    )
    kinds = {residency.kind for residency in residencies(plan, layout)}
    kinds |= {PlanKind.CHECKPOINTED} if plan.n_checkpoint else set()
    return most_demanding(kinds | ({PlanKind.SWAPPED} if swaps else set()))
