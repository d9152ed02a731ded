"""Whether a plan goes with a workload."""

from __future__ import annotations

from ..basics.errors import PlanError
from ..basics.made_for import mismatch
from ..phases.sequence_sharing import why_no_sequence_ranks, why_not_shared
from ..phases.tiling import why_no_loss_tiles, why_no_mlp_tiles
from .plan import Plan
from .workload import Workload


def check_plan(plan: Plan, workload: Workload) -> None:
    """Raise PlanError if ``plan`` was made for another workload, or for another method of training.

    A plan of a composed distillation goes with a trace of the same (``Workload.composed_identity``).
    """
    if plan.method is not workload.method:
        raise PlanError(
            f"the plan is one of method {plan.method}, the workload ({workload.model_name}) one of method "
            f"{workload.method}. Name the other method, or another workload."
        )
    if plan.workload_id not in (workload.identity, workload.composed_identity):
        raise PlanError(mismatch(plan.workload_id, plan.made_for, workload.identity, workload.words))
    reason = why_not_shared(plan.sequence_ranks, plan.num_ranks)
    reason = reason or why_no_sequence_ranks(plan.sequence_ranks, workload.sequence_sharings, workload.model_name)
    if reason is not None:
        raise PlanError(f"{reason}.")
    workload = workload.shared_among(plan.sequence_ranks)
    if (reason := why_no_mlp_tiles(plan.mlp_tiles, workload.tilings, workload.model_name)) is not None:
        raise PlanError(f"{reason}.")
    if (reason := why_no_loss_tiles(plan.loss_tiles, workload.loss_tilings, workload.model_name)) is not None:
        raise PlanError(f"{reason}.")
    if plan.n_disk_state and workload.num_stages > 1:
        raise PlanError(
            f"n_disk_state: {plan.n_disk_state} in a stage of a pipeline; one rank alone knows chunks on a disk. Set "
            f"it to 0."
        )
