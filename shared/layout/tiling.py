"""The workload as a plan runs it: shared among ranks, and tile by tile over tokens.

A share of each sequence, and tiles, are other ways to compute what a section computes: its phases are others, and
nothing else of the workload is.  Compiler and verifier see a workload whose phases are those of the plan, and know
nothing of tiles.
"""

from __future__ import annotations

from ..basics.errors import PlanError
from ..schema.plan import Plan
from ..schema.workload import Workload


def tiled(workload: Workload, plan: Plan) -> Workload:
    """``workload`` with the phases of ``plan``'s share and tiles; of the same identity.  Itself where all is whole.

    Raises PlanError if the workload does not know so many ranks that share a sequence, or so many tiles.
    """
    workload = workload.shared_among(plan.sequence_ranks).tiled(plan.mlp_tiles)
    if plan.loss_tiles == 1:
        return workload
    found = next((tiling for tiling in workload.loss_tilings if tiling.loss_tiles == plan.loss_tiles), None)
    if found is None:
        known = ", ".join(str(tiling.loss_tiles) for tiling in workload.loss_tilings)
        raise PlanError(
            f"loss_tiles: {plan.loss_tiles}, and the workload ({workload.model_name}) was traced with "
            f"{known or 'none but 1'}. Trace it with these (trace --loss-tiles {plan.loss_tiles}), or choose among the "
            f"others."
        )
    phases = {"epilogue_forward": found.epilogue_forward, "epilogue_backward": found.epilogue_backward}
    if all(getattr(workload, name) is phase for name, phase in phases.items()):
        return workload
    # Made anew: a copy would take along what is cached here.
    return Workload(**{name: getattr(workload, name) for name in Workload.model_fields} | phases)
