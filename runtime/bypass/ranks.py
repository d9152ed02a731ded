"""The ranks of a bypass run: which batches and blocks each has, and what one of them decides for all."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self, TypeVar

import torch
from torch import nn

from ...shared.pipelines.pipeline import Pipeline
from ...shared.schema.plan import Plan
from ...shared.schema.workload import Workload
from ..checkpoints.saved_by_ranks import open_checkpoint
from ..distillation.pairs import STUDENT
from ..model.blocks import find_blocks
from ..ranks.agreement import agreed
from ..ranks.world import World, exchanged, join_world

_T = TypeVar("_T")


@dataclass(frozen=True)
class BypassRanks:
    """This process among the ranks of a run."""

    world: World | None = None
    """All of them; None: there is one."""
    plan: Plan | Pipeline | None = None
    """What they carry out, once it is known."""

    @classmethod
    @contextmanager
    def joined(cls, num_ranks: int) -> Iterator[Self]:
        """Within the block so many ranks have met.  Raises PlanError and RanksError as ``join_world``."""
        world = None if num_ranks == 1 else join_world(num_ranks, timeout_s=_PATIENCE_S)
        try:
            yield cls(world)
        finally:
            if world is not None:
                world.leave()

    @property
    def rank(self) -> int:
        """This one's number."""
        return 0 if self.world is None else self.world.rank

    @property
    def num_replicas(self) -> int:
        """Ranks, or pipelines, that train on batches of their own."""
        return num_replicas_of(self.plan)

    @property
    def num_stages(self) -> int:
        """Ranks that have the blocks between them."""
        return self.plan.num_stages if isinstance(self.plan, Pipeline) else 1

    @property
    def replica(self) -> int:
        """The number of this rank, or of its pipeline."""
        return self.rank // self.num_stages

    @property
    def speaks(self) -> bool:
        """Whether it writes what is to be written, and tells how the run goes."""
        return self.rank == 0

    def of_stage(self, workload: Workload) -> tuple[Plan, Workload]:
        """What this rank carries out.  Raises PlanError if the plan is for another workload."""
        if isinstance(self.plan, Pipeline):
            stage = self.plan.stage_of(self.rank)
            return self.plan.stages[stage].plan, self.plan.workloads(workload)[stage]
        assert self.plan is not None
        return self.plan, workload

    # -- together ----------------------------------------------------------------------------------------------------

    def agreed(self, work: Callable[[], _T]) -> _T:
        """What ``work`` gives, once it has succeeded on all ranks; what one raises, all do."""
        return agreed(self.world, work)

    def decided(self, decide: Callable[[], _T]) -> _T:
        """What ``decide`` gives on rank 0, which alone calls it; what it raises is raised on all ranks."""
        if self.world is None:
            return decide()
        own = self.agreed(lambda: decide() if self.speaks else None)
        found: _T = exchanged(self.world, own)[0]
        return found

    def own_batches(self, of_step: Sequence[_T]) -> Sequence[_T]:
        """The micro-batches of a step that are this rank's: replicas take turns."""
        return of_step[self.replica :: self.num_replicas]

    def all_losses(self, own: torch.Tensor) -> torch.Tensor:
        """(micro-batches, blocks) of all ranks as one rank would have them, from the rank's own rows and blocks."""
        if self.world is None:
            return own
        of_ranks, stages = exchanged(self.world, own), self.num_stages
        whole = [torch.cat(of_ranks[first : first + stages], dim=1) for first in range(0, len(of_ranks), stages)]
        return torch.stack(whole[: self.num_replicas], dim=1).flatten(0, 1)

    def own_losses(self, rows: torch.Tensor, first_pair: int, num_pairs: int) -> torch.Tensor:
        """What ``all_losses`` had of this rank."""
        return rows[self.replica :: self.num_replicas, first_pair : first_pair + num_pairs]

    def held(self, own: Counter[str]) -> Counter[str]:
        """In how many steps blocks were held, of those of all stages."""
        of_ranks = [own] if self.world is None else exchanged(self.world, own)
        return sum(of_ranks[: self.num_stages], Counter())

    # -- models ------------------------------------------------------------------------------------------------------

    def let_go(self, teacher: nn.Module, student: nn.Module) -> None:
        """Blocks of other stages go: they are on the meta device from now on.  Rank 0 keeps its student, to save it."""
        if not isinstance(self.plan, Pipeline) or self.num_stages == 1:
            return
        stage = self.plan.stage_of(self.rank)
        first = self.plan.first_pair(stage)
        own = range(first, first + self.plan.stages[stage].num_pairs)
        for model in (teacher,) if self.speaks else (teacher, student):
            for pair, block in enumerate(find_blocks(model)):
                if pair not in own:
                    block.module.to("meta")

    def fill(self, student: nn.Module, checkpoint: Callable[[], Path]) -> None:
        """On rank 0, give ``student`` what other stages have learnt, which a checkpoint of the same step holds."""
        if self.num_stages == 1 or not self.speaks:
            return
        saved = open_checkpoint(checkpoint())
        own = dict(student.named_parameters()) | dict(student.named_buffers())
        with torch.no_grad():
            for name in saved.weights:
                own[name.removeprefix(f"{STUDENT}.")].copy_(saved.weight(name))


def num_replicas_of(plan: Plan | Pipeline | None) -> int:
    """Ranks, or pipelines, that train on batches of their own."""
    if plan is None:
        return 1
    return plan.num_replicas if isinstance(plan, Pipeline) else plan.num_ranks


_PATIENCE_S: Final = 600.0
"""Seconds until a rank that does not come is given up."""
