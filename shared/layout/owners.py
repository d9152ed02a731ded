"""Who projects what of chunks that lie in parts on the devices of several ranks.

[Note: Owners]
A part of a chunk ends anywhere within a matrix, and a projection needs both matrices of a subspace whole.  So every
subspace of sharded chunks has an *owner*, one rank of the shard group.  When gradients are complete, all ranks send
their stretches of frozen matrices and of gradients to the owners; these project whole matrices, by the same function as
a plain loop, and send every rank its stretches of the gradients back.  Behind device Adam the same happens to the
parameters, or to their float32 masters.  The frozen matrices that an owner was sent stay until then, and go: they take
no memory while activations do, and none of them can be of an older checkpoint.

Subspaces are given away in the order of their FLOPs, the most first, each to the rank that has the fewest so far: one
rank has at most 4/3 of what the best distribution leaves the busiest one (Graham, "Bounds on multiprocessing timing
anomalies", SIAM Journal on Applied Mathematics 17, 1969).  Workload, chunks and the number of ranks decide, and nothing
else, so that all ranks agree without asking.

All ranks account for equal memory and equal work: what the rank with the most has.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from ..optimizers.state import master_bytes
from ..schema.optimizer import Optimizer
from ..schema.schedule import ChunkId
from ..schema.workload import Parameter, Subspace
from .layout import Chunk, aligned
from .projections import ProjectionWork, projection
from .shards import regions


@dataclass(frozen=True, slots=True)
class SentMatrix:
    """One matrix of a subspace that ranks have in parts, as it is sent."""

    index: int
    """Of the parameter in ``Workload.parameters``."""
    chunk: ChunkId
    owner: int
    """The rank of the shard group that gets all of it."""
    item_bytes: int
    """Of a scalar as it is sent."""
    ends: tuple[int, ...]
    """Rank r of the shard group has the scalars from the r-th to before the next one, as they lie in memory."""

    @property
    def size_bytes(self) -> int:
        """Of the whole matrix."""
        return sum(self.bytes_of(rank) for rank in range(len(self.ends) - 1))

    def bytes_of(self, rank: int) -> int:
        """Of the stretch that ``rank`` has."""
        first, last = self.ends[rank : rank + 2]
        return (last - first) * self.item_bytes


@dataclass(frozen=True)
class Ownership:
    """Owners of all subspaces of ``chunks``; see [Note: Owners]."""

    chunks: tuple[Chunk, ...]
    """Those that lie in parts."""
    parameters: Sequence[Parameter]
    num_shards: int
    """Ranks of the shard group."""
    optimizer: Optimizer

    @cached_property
    def subspaces(self) -> tuple[Subspace, ...]:
        """All of them, chunk by chunk."""
        return tuple(subspace for chunk in self.chunks for subspace in chunk.subspaces)

    @cached_property
    def owners(self) -> tuple[int, ...]:
        """The owner of each of ``subspaces``, as a rank of the shard group."""
        work = [one.flops for one in self._gradient_projections]
        owners, load = [0] * len(work), [0] * self.num_shards
        for number in sorted(range(len(work)), key=lambda number: -work[number]):
            owners[number] = min(range(self.num_shards), key=lambda rank: (load[rank], rank))
            load[owners[number]] += work[number]
        return tuple(owners)

    # -- what is sent ------------------------------------------------------------------------------------------------

    @cached_property
    def frozen(self) -> tuple[SentMatrix, ...]:
        """The frozen matrix of each of ``subspaces``."""
        return self._sent(lambda subspace: subspace.frozen, lambda of: of.dtype.item_bytes)

    @cached_property
    def gradients(self) -> tuple[SentMatrix, ...]:
        """The gradient of the trained one."""
        return self._sent(lambda subspace: subspace.trained, lambda of: of.dtype.item_bytes)

    @cached_property
    def stepped(self) -> tuple[SentMatrix, ...]:
        """The trained one, or its float32 master."""
        return self._sent(
            lambda subspace: subspace.trained, lambda of: master_bytes(of.dtype, self.optimizer) or of.dtype.item_bytes
        )

    def _sent(
        self, index_of: Callable[[Subspace], int], item_bytes_of: Callable[[Parameter], int]
    ) -> tuple[SentMatrix, ...]:
        owner, found = iter(self.owners), []
        for chunk in self.chunks:
            if not chunk.subspaces:
                continue
            ends = _ends(chunk, self.parameters, self.num_shards)
            for subspace in chunk.subspaces:
                index = index_of(subspace)
                item_bytes = item_bytes_of(self.parameters[index])
                found.append(SentMatrix(index, chunk.id, next(owner), item_bytes, ends[index]))
        return tuple(found)

    # -- what that takes ---------------------------------------------------------------------------------------------

    def whole_bytes(self, sent: Iterable[SentMatrix]) -> int:
        """Memory of the whole matrices of the owner that has the most of them, alignment included."""
        return max(self._by_owner(sent, lambda one: aligned(one.size_bytes)))

    def moved_bytes(self, sent: Sequence[SentMatrix]) -> int:
        """What the rank with the most has for all others or gets from them, its own included."""
        return max(self._sides(sent))

    def passing_bytes(self, sent: Sequence[SentMatrix]) -> int:
        """Memory of matrices on their way, as they are sent and as they arrive, of the rank with the most of each."""
        return sum(self._sides(sent))

    def _sides(self, sent: Sequence[SentMatrix]) -> tuple[int, int]:
        """Bytes of the stretches that a rank has, and of the matrices that it owns, of the rank with the most."""
        return self.held_bytes(sent), self.owned_bytes(sent)

    def held_bytes(self, sent: Iterable[SentMatrix]) -> int:
        """Of the stretches that one rank has, the rank with the most."""
        sent = tuple(sent)
        return max(sum(one.bytes_of(rank) for one in sent) for rank in range(self.num_shards))

    def owned_bytes(self, sent: Iterable[SentMatrix]) -> int:
        """Of the matrices that one rank owns, the rank with the most, one right behind the other."""
        return max(self._by_owner(sent, lambda one: one.size_bytes))

    def _by_owner(self, sent: Iterable[SentMatrix], size_of: Callable[[SentMatrix], int]) -> list[int]:
        found = [0] * self.num_shards
        for one in sent:
            found[one.owner] += size_of(one)
        return found

    # -- projections -------------------------------------------------------------------------------------------------

    @cached_property
    def gradient_work(self) -> ProjectionWork:
        """What an owner projects of gradients: of everything as much as the one with the most."""
        return self._most(self._gradient_projections)

    @cached_property
    def parameter_work(self) -> ProjectionWork:
        """The same of parameters."""
        parameters = self.parameters
        found = []
        for subspace in self.subspaces:
            dtype = parameters[subspace.trained].dtype
            found.append(projection(subspace, parameters, dtype, has_master=master_bytes(dtype, self.optimizer) > 0))
        return self._most(found)

    @cached_property
    def _gradient_projections(self) -> list[ProjectionWork]:
        return [
            projection(subspace, self.parameters, self.parameters[subspace.trained].dtype)
            for subspace in self.subspaces
        ]

    def _most(self, works: Sequence[ProjectionWork]) -> ProjectionWork:
        totals = [[0] * self.num_shards for _ in range(4)]
        for owner, work in zip(self.owners, works, strict=True):
            for total, amount in zip(
                totals, (work.flops, work.touched_bytes, work.num_projected, work.num_tensors), strict=True
            ):
                total[owner] += amount
        flops, touched_bytes, num_projected, num_tensors = map(max, totals)
        peak_bytes = max((work.peak_bytes for work in works), default=0)
        return ProjectionWork(flops, touched_bytes, num_projected, num_tensors, peak_bytes)


def _ends(chunk: Chunk, parameters: Sequence[Parameter], num_shards: int) -> dict[int, tuple[int, ...]]:
    """By parameter of ``chunk``, where each rank's scalars of it begin ([Note: Shards] in ``shards.py``)."""
    found: dict[int, tuple[int, ...]] = {}
    following = iter(regions(chunk, parameters))
    kind, begin, count = None, 0, 0
    for placed in chunk.parameters:
        of = parameters[placed.index]
        if kind != (of.dtype, of.trainable):
            kind, begin = (of.dtype, of.trainable), placed.offset_bytes
            count = next(following).shard_elements(num_shards)
        first = (placed.offset_bytes - begin) // of.dtype.item_bytes
        found[placed.index] = tuple(
            min(max(rank * count - first, 0), of.num_elements) for rank in range(num_shards + 1)
        )
    return found
