"""The workload as a plan runs it: shared among ranks, and tile by tile over tokens.

A share of each sequence, and tiles, are other ways to compute what a section computes: its phases are others, and
nothing else of the workload is.  Compiler and verifier see a workload whose phases are those of the plan, and know
nothing of tiles.
"""

from __future__ import annotations

from ..schema.plan import Plan
from ..schema.workload import Workload


def tiled(workload: Workload, plan: Plan) -> Workload:
    """``workload`` with the phases of ``plan``'s share and tiles; of the same identity.  Itself where all is whole.

    Raises PlanError if the workload does not know so many ranks that share a sequence, or so many tiles.
    """
    return workload.shared_among(plan.sequence_ranks).tiled(plan.mlp_tiles, plan.loss_tiles)
