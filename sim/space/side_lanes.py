"""The plans of one residency and one number of swapped blocks, as the search asks for them: the compiler's families."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ...shared.compile.family import Family
from .compute_table import ComputeTable, Positions
from .gather_plan import GatherPlan
from .plan_family import CPU_OPTIM, D2H, H2D, PlanFamily
from .prices import FloatArray
from .space import IntArray


@dataclass(frozen=True, eq=False)
class SideLanes:
    """Plans that differ in prefetch depth and in which of the other blocks are checkpointed."""

    residency: GatherPlan
    compute: ComputeTable
    n_swap: int

    @property
    def positions(self) -> Positions:
        """The program of the compute lane."""
        return self.residency.positions

    @cached_property
    def _families(self) -> dict[tuple[int, ...], PlanFamily]:
        return {}

    def family(self, depths: IntArray) -> PlanFamily:
        """The plans at these prefetch depths, under all choices of modes of the compute table."""
        key = tuple(depths.tolist())
        if key not in self._families:
            self._families[key] = self._made(depths)
        return self._families[key]

    def family_with(self, depth: int) -> tuple[PlanFamily, int]:
        """A family with this prefetch depth, and the depth's number."""
        known = next((depths for depths in self._families if depth in depths), (depth,))
        return self.family(np.array(known)), known.index(depth)

    def _made(self, depths: IntArray) -> PlanFamily:
        table, workload = self.residency.table, self.compute.workload
        family = Family(
            workload=workload,
            facts=table.facts,
            is_gathered=table.is_gathered(self.residency.prefix),
            is_offloaded=table.is_offloaded(self.residency.prefix),
            n_buffer=self.residency.n_buffer,
            is_swap=np.arange(workload.num_blocks) < self.n_swap,
            is_checkpoint=self.compute.modes.is_checkpoint,
            depths=depths,
        )
        return PlanFamily(family, self.compute.levels, self.compute.prices)

    # -- seconds: the same tasks at every depth, in another order ----------------------------------------------------

    def lane_s(self, lane: int) -> FloatArray:
        """(T,) seconds of the tasks of a lane beside compute, in the order of some prefetch depth."""
        family = next(iter(self._families.values()), None) or self.family(np.ones(1, dtype=np.int64))
        return family.seconds(lane, 0)

    @property
    def h2d_s(self) -> FloatArray:
        """(T,) of H2D."""
        return self.lane_s(H2D)

    @property
    def d2h_s(self) -> FloatArray:
        """(T,) of D2H."""
        return self.lane_s(D2H)

    @property
    def cpu_s(self) -> FloatArray:
        """(T,) of CPU_OPTIM."""
        return self.lane_s(CPU_OPTIM)
