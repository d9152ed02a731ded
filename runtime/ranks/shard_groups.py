"""Collectives of ranks in shard groups: within a group, over the groups, and over all ranks by way of both.

See [Note: Shard groups] in ``shared/compile/compile.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from . import ordered_sums
from .collectives import Collectives
from .world import World


class GroupedCollectives(Collectives):
    """Those of all ranks, which form shard groups.

    A sum over all ranks is added up within the groups first, in the order of their ranks, and then over the groups in
    theirs: to the bits that a part gets which groups scatter and then add up.
    """

    def __init__(
        self,
        world: World,
        group: dist.ProcessGroup,
        shard_group: dist.ProcessGroup,
        replica_group: dist.ProcessGroup | None = None,
        pace: Callable[[float, int], None] | None = None,
    ) -> None:
        """``replica_group``: None where nothing is added up.  ``pace``: as of ``Collectives``."""
        super().__init__(world, group, pace)
        self._shard = Collectives(world, shard_group, pace)
        self._replica = None if replica_group is None else Collectives(world, replica_group, pace)

    @property
    def shard(self) -> Collectives:
        """Of this rank's shard group."""
        return self._shard

    @property
    def replica(self) -> Collectives | None:
        """Of the ranks that have the same parts."""
        return self._replica

    def add_up(self, tensors: Sequence[torch.Tensor]) -> None:
        """The sum over all ranks takes the place of each of ``tensors``, which are contiguous, (n,) or of no axis."""
        if self._replica is None or not all(ordered_sums.is_ordered_here(tensor) for tensor in tensors):
            super().add_up(tensors)
            return
        ordered_sums.in_buckets([tensor.view(-1) for tensor in tensors], self._add_up)

    def _add_up(self, flat: torch.Tensor) -> None:
        assert self._replica is not None
        length = -(-flat.numel() // self._shard.num_ranks)
        whole = flat
        if length * self._shard.num_ranks > flat.numel():
            whole = flat.new_zeros(length * self._shard.num_ranks)
            whole[: flat.numel()] = flat
        part = flat.new_empty(length)
        self._shard.scatter(part, whole)
        self._replica.add_up([part])
        self._shard.gather(whole, part)
        if whole is not flat:
            flat.copy_(whole[: flat.numel()])

    def close(self) -> None:
        """Let go of all groups.  Idempotent."""
        super().close()
        self._shard.close()
        if self._replica is not None:
            self._replica.close()


def of_lane(world: World, pace: Callable[[float, int], None] | None = None) -> Collectives:
    """What the collective lane's thread uses; ``pace``: as of ``Collectives``."""
    shard_group, replica_group = world.lane_shard_group, world.lane_replica_group
    if shard_group is None:
        return Collectives(world, world.lane_group, pace)
    return GroupedCollectives(world, world.lane_group, shard_group, replica_group, pace)


def between_steps(world: World) -> Collectives:
    """What the compute thread uses while no lane runs."""
    shard_group = world.between_steps_shard_group
    if shard_group is None:
        return Collectives(world, world.between_steps_group)
    return GroupedCollectives(world, world.between_steps_group, shard_group)
