"""Which ranks of a world meet in a collective: all of them, the neighbours of a shard group, or replicas."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from ...shared.basics.errors import HardwareError
from ...shared.catalogue.rank_share import probe_advice
from ...shared.schema.hardware import Hardware
from ...shared.schema.schedule import RankAxis


@dataclass(frozen=True, slots=True)
class RankLine:
    """Ranks at equal distances among the devices, which they take in order.

    The world is divided into such lines: all of them meet at the same time, and share what joins their ranks.
    """

    num_ranks: int
    stride: int = 1
    """From each rank of the line to its next one."""
    world_ranks: int = 0
    """Ranks of all lines together; 0: of this one alone."""

    @classmethod
    def of(cls, axis: RankAxis, num_ranks: int, shard_ranks: int | None, num_stages: int = 1) -> Self:
        """The ranks of ``axis`` among ``num_ranks``, with shard groups of ``shard_ranks`` if there are some.

        Of SEQUENCE ``shard_ranks`` are those that share a sequence: neighbours, as those of a shard group are.
        ``num_stages``: of the pipelines that the ranks are one stage of; the ranks of other stages lie between them.
        """
        world = num_ranks * num_stages
        if shard_ranks is None or axis is RankAxis.WORLD:
            return cls(num_ranks) if num_stages == 1 else cls(num_ranks, num_stages, world)
        if axis in (RankAxis.SHARD, RankAxis.SEQUENCE):
            return cls(shard_ranks, num_stages, world)
        return cls(num_ranks // shard_ranks, num_stages * shard_ranks, world)

    @property
    def world(self) -> int:
        """Ranks of all lines together."""
        return self.world_ranks or self.num_ranks

    def on_node(self, hardware: Hardware) -> tuple[int, int]:
        """Ranks of the world on each node, and ranks of this line among them.

        Raises HardwareError if the machine does not have the ranks, if they fill some node only in part, or if some
        shard groups lie across two nodes while others do not.
        """
        per_node = ranks_per_node(hardware, self.world)
        # Ranks that lie between the first of the line and where it ends: of a line of neighbours the line itself.
        group = self.num_ranks if self.stride == 1 else self.stride
        if max(group, per_node) % min(group, per_node):
            sizes = [size for size in range(2, self.world + 1) if self.world % size == 0]
            fitting = [size for size in sizes if max(size, per_node) % min(size, per_node) == 0]
            raise HardwareError(
                f"groups of {group} ranks lie across nodes of {per_node} devices on {hardware.name}. "
                f"Use groups of {' or '.join(map(str, fitting))} (shard_ranks, sequence_ranks)."
            )
        return per_node, max(1, min(self.num_ranks, per_node // self.stride))

    def next_of(self, rank: int, on_node: int, hop: int) -> int:
        """The rank that ``rank`` sends to, ``hop`` places on along its line's ``on_node`` ranks of the node, around."""
        length = on_node * self.stride
        first = rank // length * length
        return first + (rank - first + hop * self.stride) % length


def ranks_per_node(hardware: Hardware, num_ranks: int) -> int:
    """Ranks on each node.  Raises HardwareError if the machine has too few devices, or some node is filled in part."""
    per_node = hardware.devices_per_node
    if num_ranks > hardware.num_devices:
        remedy = probe_advice(hardware, num_ranks) or "Choose a larger node, or set network.num_nodes."
        raise HardwareError(
            f"{num_ranks} ranks need as many devices but {hardware.name} has {hardware.num_devices} "
            f"({per_node} in each of {hardware.num_nodes} nodes). {remedy}"
        )
    if num_ranks > per_node and num_ranks % per_node:
        raise HardwareError(
            f"{num_ranks} ranks do not fill nodes of {per_node} devices on {hardware.name}. "
            f"Use {num_ranks // per_node * per_node} or {-(-num_ranks // per_node) * per_node} ranks."
        )
    return min(num_ranks, per_node)
