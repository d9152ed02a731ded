"""What a search holds fixed about the optimizer's step: its micro-batches, and the limit of its gradients' norm."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import isfinite
from typing import Final

from ...shared.basics.errors import PlanError
from ...shared.compile.chunk_facts import StepKnobs
from ...shared.phases.sequence_sharing import why_not_shared
from ...shared.schema.optimizer import HostGradients, Optimizer
from ...shared.schema.plan import (
    MOST_MICRO_BATCHES,
    MOST_RANKS,
    ParallelMode,
    ProjectionPlace,
    why_not_held,
    why_not_parallel,
    why_not_shard_ranks,
)

__all__ = ["MOST_MICRO_BATCHES", "MOST_RANKS", "SEVERAL", "StepSpec", "check_ranks", "check_shares"]

SEVERAL: Final = (ParallelMode.DDP, ParallelMode.REPLICATED, ParallelMode.SHARDED)
"""What several ranks may do together, simplest first: of equally good plans the one of the simplest mode counts."""


def check_ranks(num_ranks: int, parallel: ParallelMode) -> None:
    """Raise PlanError unless so many ranks can be in this mode."""
    if parallel is ParallelMode.SINGLE and num_ranks > 1:
        raise PlanError(
            f"{num_ranks} ranks are asked for, but parallel is single: one rank alone. Write --parallel ddp, "
            f"replicated or sharded."
        )
    if parallel is not ParallelMode.SINGLE and num_ranks == 1:
        raise PlanError(
            f"--parallel {parallel} is of 2 ranks at least, and one is asked for. Write --ranks 2 or more, on a "
            f"machine with as many devices, or leave --parallel out."
        )


def check_shares(global_batch: int, num_ranks: int) -> None:
    """Raise PlanError unless so many ranks can share a global batch evenly; names the nearest numbers that can."""
    if global_batch % num_ranks == 0:
        return
    below, nearest = global_batch // num_ranks * num_ranks, _nearest_shares(global_batch, num_ranks)
    batches = " or ".join(str(batch) for batch in (below, below + num_ranks) if batch)
    raise PlanError(
        f"{num_ranks} ranks cannot share a global batch of {global_batch} evenly. Choose a global batch of {batches}, "
        f"or {' or '.join(map(str, nearest))} {'rank' if nearest == [1] else 'ranks'}."
    )


def _nearest_shares(global_batch: int, num_ranks: int) -> list[int]:
    """The next smaller and the next larger number of ranks that divide the global batch."""
    found = [next(ranks for ranks in range(num_ranks, 0, -1) if global_batch % ranks == 0)]
    if num_ranks < global_batch:
        found.append(next(ranks for ranks in range(num_ranks, global_batch + 1) if global_batch % ranks == 0))
    return found


@dataclass(frozen=True)
class StepSpec:
    """Knobs of a plan that say what is trained rather than how; the search takes them as they are.

    Raises PlanError if they are out of range.
    """

    micro_batches: int = 1
    """Forwards and backwards per step."""
    max_gradient_norm: float | None = None
    """Limit of the norm of all gradients, or of each student block's (``Plan.max_gradient_norm``); None for none."""
    parallel: ParallelMode = ParallelMode.SINGLE
    """What ranks do together."""
    num_ranks: int = 1
    optimizer: Optimizer = Optimizer.ADAMW
    """What steps the weights."""
    host_gradients: HostGradients = HostGradients.PARAMETERS
    """In which element type the host adds up gradients."""
    shard_ranks: int | None = None
    """Ranks of a shard group; None where all are one."""
    projects_gradients_on: ProjectionPlace = ProjectionPlace.HOST
    """Where gradients of chunks that the host steps are projected, in orthogonal subspace fine-tuning."""
    sequence_ranks: int = 1
    """Neighbouring ranks that share each sequence (``Plan.sequence_ranks``)."""

    def __post_init__(self) -> None:
        if not 1 <= self.micro_batches <= MOST_MICRO_BATCHES:
            raise PlanError(
                f"micro_batches is {self.micro_batches}; it must be at least 1 and at most {MOST_MICRO_BATCHES}."
            )
        if self.max_gradient_norm is not None and not (self.max_gradient_norm > 0 and isfinite(self.max_gradient_norm)):
            raise PlanError(f"max_gradient_norm is {self.max_gradient_norm}; it must be above 0, and finite.")

        check_ranks(self.num_ranks, self.parallel)
        if (reason := why_not_parallel(self.optimizer, self.parallel)) is not None:
            raise PlanError(f"{reason}.")
        if (reason := why_not_shared(self.sequence_ranks, self.num_ranks)) is not None:
            raise PlanError(f"{reason}.")
        if (reason := why_not_shard_ranks(self.shard_ranks, self.num_ranks, self.parallel)) is not None:
            raise PlanError(f"{reason}.")

        is_on_device = self.projects_gradients_on is ProjectionPlace.DEVICE
        if is_on_device and (reason := why_not_held(self.host_gradients, self.micro_batches)) is not None:
            raise PlanError(f"{reason}.")
        if self.shard_ranks == self.num_ranks:
            object.__setattr__(self, "shard_ranks", None)

    @cached_property
    def knobs(self) -> StepKnobs:
        """What the compiler reads of it."""
        return StepKnobs(
            self.micro_batches,
            self.max_gradient_norm is not None,
            self.parallel,
            self.num_ranks,
            self.optimizer,
            self.host_gradients,
            self.shard_ranks,
            self.projects_gradients_on is ProjectionPlace.DEVICE,
        )
