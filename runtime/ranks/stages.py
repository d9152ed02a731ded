"""Ranks as pipelines: who has which stage, and how neighbours send activations to each other."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist

from ...shared.pipelines.pipeline import Pipeline
from .collectives import Collectives
from .ordered_sums import BUCKET_BYTES, is_ordered_here
from .world import World, team_world


@dataclass(frozen=True, kw_only=True, eq=False)
class StageRanks:
    """This process among the ranks of a pipeline."""

    pipeline: Pipeline
    world: World
    """All of them."""
    peers: World | None
    """Those of the same stage, one of each replica; None if this is the only one."""

    @property
    def stage(self) -> int:
        """This rank's."""
        return self.pipeline.stage_of(self.world.rank)

    @property
    def own_pairs(self) -> range:
        """The pairs of this rank's stage."""
        first = self.pipeline.first_pair(self.stage)
        return range(first, first + self.pipeline.stages[self.stage].num_pairs)

    @property
    def of_replica(self) -> range:
        """The ranks of this one's pipeline, by stage."""
        first = self.pipeline.rank_of(0, self.pipeline.replica_of(self.world.rank))
        return range(first, first + self.pipeline.num_stages)

    def leave(self) -> None:
        """As ``World.leave``, of both."""
        if self.peers is not None:
            self.peers.forget_groups()
        self.world.leave()

    def forget_groups(self) -> None:
        """As ``World.forget_groups``, of both."""
        if self.peers is not None:
            self.peers.forget_groups()
        self.world.forget_groups()


def stage_ranks(pipeline: Pipeline, world: World) -> StageRanks:
    """Of ``world``, whose ranks are those of ``pipeline``; to be called on all.  Raises RanksError."""
    peers = None
    if pipeline.num_replicas > 1:
        replicas = range(pipeline.num_replicas)
        teams = [tuple(pipeline.rank_of(s, r) for r in replicas) for s in range(pipeline.num_stages)]
        peers = team_world(world, teams)
    return StageRanks(pipeline=pipeline, world=world, peers=peers)


class Neighbours(Collectives):
    """Sends tensors to the stage behind, and receives some of the stage before, or of others of the pipeline.

    The collective lane uses it, and while no lane runs the compute thread has one of its own.
    """

    def __init__(
        self,
        ranks: StageRanks,
        pace: Callable[[float, int], None] | None = None,
        *,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        """``pace``: as of ``Collectives``; ``group``: one of all ranks, by default the collective lane's."""
        super().__init__(ranks.world, group or ranks.world.lane_group, pace)

    def send(self, activation: torch.Tensor, *, to: int | None = None) -> None:
        """To the stage behind, or to rank ``to``, which receives as many bytes.  Contiguous."""
        to = self.rank + 1 if to is None else to
        for piece in _pieces(activation):
            # A thread of gloo's may hold what it has sent ([Note: Late threads] in ``ordered_sums``).
            sent = piece.clone() if is_ordered_here(piece) else piece
            self._together(_sending(sent, to), sent.nbytes)

    def receive(self, activation: torch.Tensor, *, of: int | None = None) -> None:
        """What the stage before, or rank ``of``, sends takes the place of ``activation``, which is contiguous."""
        of = self.rank - 1 if of is None else of
        for piece in _pieces(activation):
            received = torch.empty_like(piece) if is_ordered_here(piece) else piece
            self._together(_receiving(received, of))
            if received is not piece:
                piece.copy_(received)


def _pieces(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """As bytes: gloo does not send every element type."""
    flat = tensor.detach().view(-1).view(torch.uint8)
    for begin in range(0, flat.numel(), BUCKET_BYTES):
        yield flat[begin : begin + BUCKET_BYTES]


def _sending(piece: torch.Tensor, rank: int) -> Callable[[dist.ProcessGroup], object]:
    return lambda group: dist.send(piece, group=group, group_dst=rank)


def _receiving(piece: torch.Tensor, rank: int) -> Callable[[dist.ProcessGroup], object]:
    return lambda group: dist.recv(piece, group=group, group_src=rank)
