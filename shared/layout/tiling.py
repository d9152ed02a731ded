"""The workload as a plan runs it tile by tile over tokens.

Tiles are another way to compute what a section computes: its phases are others, and nothing else of the workload is.
Compiler and verifier see a workload whose phases are those of the plan's tiles, and know nothing of tiles.
"""

from __future__ import annotations

from ..schema.plan import Plan
from ..schema.workload import Workload


def tiled(workload: Workload, plan: Plan) -> Workload:
    """``workload`` with the phases of ``plan``'s tiles; of the same identity.

    Raises PlanError if the workload does not know so many tiles.
    """
    return workload.tiled(plan.mlp_tiles, plan.loss_tiles)
