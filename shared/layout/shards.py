"""What one rank holds of a chunk that is gathered: the whole of it, or one of several equal parts.

An offloaded chunk lies on the hosts, a sharded one on the devices; the parts are the same.

[Note: Shards]
A *region* is a run of neighbouring parameters of a chunk with one element type and one trainability, the alignment
between them included.  Each region is cut into as many equal shards as a shard group has ranks, of whole cache lines,
and the last ones are padded.  So every rank steps equally many scalars, a collective moves equal parts, which lie in
the chunk's buffer in the order of the ranks, and a chunk of fewer cache lines than ranks has shards of one.
Parameters begin at multiples of 256 bytes: with 2 and 4 ranks there is nothing to pad.

Of a weight that is gathered in another element type the parts keep their own, and what moves has as many elements.

A rank steps the stretch of each parameter that lies in its shard by itself, so that an optimizer that counts steps has
a count for each of these *pieces*.  Ranks have different numbers of them; the account has those of the rank with most.

Lines are whole because of the optimizer: torch's fused AdamW steps as many scalars at once as a vector register holds,
at most a cache line's, and the rest of a tensor one by one, which rounds otherwise.  A stretch of a parameter that ends
with a shard has no such rest: its scalars get the bits that they get as a part of the whole parameter.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, groupby
from math import prod
from typing import Final

from ..optimizers.state import Stepped, paged_bytes, state_bytes, stepped_of, summed_dtype
from ..optimizers.work import host_step_bytes, traffic_bytes
from ..schema.optimizer import Optimizer
from ..schema.plan import ParallelMode
from ..schema.workload import DType, Parameter
from .layout import Chunk, aligned

_LINE_BYTES: Final = 64
"""Of a cache line; the widest vector registers hold as much."""


@dataclass(frozen=True, slots=True)
class Region:
    """Neighbouring parameters of one chunk that are treated alike; see [Note: Shards]."""

    dtype: DType
    trainable: bool
    size_bytes: int
    """With the alignment after each parameter."""

    def shard_elements(self, num_shards: int) -> int:
        """Elements of one of so many shards, padding included."""
        lines = -(-self.size_bytes // _LINE_BYTES)
        return -(-lines // num_shards) * (_LINE_BYTES // self.dtype.item_bytes)


@dataclass(frozen=True, slots=True)
class RankPart:
    """What one rank holds of an offloaded or sharded chunk, and what its optimizer does with it."""

    parameter_bytes: int
    """What a gather begins with: copies to the device, or finds there."""
    gathered_bytes: int
    """The buffer on the device, with the parts of all ranks."""
    gradient_bytes: int
    """What is left of the gradients when ranks have added them up; an offload copies it to the host."""
    arrival_bytes: int
    """Where that arrives on the host, if it is not added up there at once."""
    summed_bytes: int
    """The same gradients in the element type in which the host adds them up."""
    staging_bytes: int
    """Where that is done."""
    reduced_bytes: int
    """The gradients that ranks add up: all of the chunk's, with what pads the shards."""
    state_bytes: int
    paged_bytes: int
    """Of these, what a paged optimizer has in unified memory where the part is stepped on the device."""
    num_stepped: int
    """Scalars that the optimizer steps."""
    num_tensors: int
    """Tensors that these are: parameters, or parts of regions; none without scalars."""
    stepped_bytes: int
    """Memory traffic of that on the device."""
    host_stepped_bytes: int
    """And on the host, with the gradients that are added up there."""
    host_step_bytes: int
    """The most that a step on the host makes on the way."""


def stepped_members(chunk: Chunk, parameters: Sequence[Parameter]) -> tuple[Stepped, ...]:
    """The trainable parameters of a chunk as the optimizer sees them."""
    return stepped_of(parameters[placed.index] for placed in chunk.parameters)


def chunk_state_bytes(chunk: Chunk, parameters: Sequence[Parameter], optimizer: Optimizer) -> int:
    """Optimizer state of all of a chunk, float32 masters included."""
    return state_bytes(stepped_members(chunk, parameters), optimizer)


def chunk_paged_bytes(chunk: Chunk, parameters: Sequence[Parameter], optimizer: Optimizer) -> int:
    """Of these, what lies in unified memory where the chunk is stepped on the device."""
    return paged_bytes(stepped_members(chunk, parameters), optimizer)


def stepped_bytes(chunk: Chunk, parameters: Sequence[Parameter], optimizer: Optimizer) -> int:
    """Memory traffic of the optimizer on all of a chunk."""
    return sum(traffic_bytes(stepped, optimizer) for stepped in stepped_members(chunk, parameters))


def host_stepped_bytes(together: Iterable[Stepped], optimizer: Optimizer, *, widens: bool) -> int:
    """Memory traffic of stepping these with the gradients that the host has added up."""
    return sum(traffic_bytes(one, optimizer, summed_dtype(one[0]) if widens else None) for one in together)


def staging_bytes(chunk: Chunk, parameters: Sequence[Parameter], *, widens: bool) -> int:
    """Where the host adds all gradients of a chunk up."""
    if not widens:
        return chunk.staging_bytes
    return sum(aligned(count * summed_dtype(dtype).item_bytes) for dtype, count in _trained_sizes(chunk, parameters))


def _trained_sizes(chunk: Chunk, parameters: Sequence[Parameter]) -> list[tuple[DType, int]]:
    """Element type and scalars of the trainable parameters."""
    return [(dtype, prod(shape)) for dtype, shape in stepped_members(chunk, parameters)]


def num_tensors(chunk: Chunk, parameters: Sequence[Parameter]) -> int:
    """Parameters of a chunk that the optimizer has anything to do for."""
    return sum(count > 0 for _, count in _trained_sizes(chunk, parameters))


def regions(chunk: Chunk, parameters: Sequence[Parameter]) -> list[Region]:
    """The regions of a chunk, in order."""
    members = (parameters[placed.index] for placed in chunk.parameters)
    runs = groupby(members, key=lambda parameter: (parameter.dtype, parameter.trainable))
    return [Region(*alike, sum(aligned(parameter.size_bytes) for parameter in run)) for alike, run in runs]


def _gathered_bytes(chunk: Chunk, parameters: Sequence[Parameter], num_shards: int) -> int:
    """What one of so many shards adds to a gather; its own bytes, unless weights are gathered in another type."""
    members = (parameters[placed.index] for placed in chunk.parameters)
    runs = groupby(members, key=lambda p: (p.dtype, p.trainable, p.gathered_item_bytes))
    return sum(
        Region(dtype, trainable, sum(aligned(p.size_bytes) for p in run)).shard_elements(num_shards) * item_bytes
        for (dtype, trainable, item_bytes), run in runs
    )


def stepped_parts(chunk: Chunk, parameters: Sequence[Parameter], num_shards: int) -> Sequence[Stepped]:
    """What is stepped one by one of a chunk: its parameters, or one of ``num_shards`` parts of its regions.

    Of a part the first of its pieces ([Note: Shards]) stands for all scalars, and the others have none.
    """
    if num_shards > 1:
        return _part_pieces(chunk, parameters, num_shards)
    return stepped_members(chunk, parameters)


def _part_pieces(chunk: Chunk, parameters: Sequence[Parameter], num_shards: int) -> list[Stepped]:
    """Of every trained region one tensor of a shard's scalars, and one of none for each further piece."""
    members = (parameters[placed.index] for placed in chunk.parameters)
    found: list[Stepped] = []
    for (dtype, trainable), run in groupby(members, key=lambda parameter: (parameter.dtype, parameter.trainable)):
        if trainable:
            sizes = tuple(parameter.size_bytes for parameter in run)
            count = Region(dtype, trainable, sum(map(aligned, sizes))).shard_elements(num_shards)
            more = _most_pieces(sizes, count * dtype.item_bytes) - 1
            found += [(dtype, (count,)), *[(dtype, (0,))] * more]
    return found


@lru_cache(maxsize=2**14)
def _most_pieces(sizes_bytes: tuple[int, ...], shard_bytes: int) -> int:
    """Of the parameters of a region, the most that any one shard has a stretch of; at least 1.  Blocks repeat."""
    begins = accumulate(map(aligned, sizes_bytes), initial=0)
    shards = [
        (begin // shard_bytes, (begin + size - 1) // shard_bytes)
        for begin, size in zip(begins, sizes_bytes, strict=False)
        if size
    ]
    if not shards:
        return 1
    # A parameter that neither begins nor ends in a shard is the only one there.
    ends = Counter(shard for first_and_last in shards for shard in set(first_and_last))
    return max(ends.values())


def rank_part(
    chunk: Chunk,
    parameters: Sequence[Parameter],
    parallel: ParallelMode,
    num_shards: int,
    optimizer: Optimizer,
    *,
    widens: bool = False,
) -> RankPart:
    """What each rank holds of ``chunk``, if it is offloaded or sharded over the devices.

    ``num_shards``: equal parts that it is cut into in mode SHARDED (``Plan.num_shards``).  ``widens``: the host adds
    gradients up in float32 (``widens_on_host`` in ``shared/schema/plan.py``).
    """
    if parallel is not ParallelMode.SHARDED:
        return RankPart(
            parameter_bytes=chunk.size_bytes,
            gathered_bytes=chunk.size_bytes,
            gradient_bytes=chunk.gradient_bytes,
            arrival_bytes=chunk.staging_bytes,
            summed_bytes=_summed_bytes(_trained_sizes(chunk, parameters), widens=widens),
            staging_bytes=staging_bytes(chunk, parameters, widens=widens),
            reduced_bytes=chunk.gradient_bytes,
            state_bytes=chunk_state_bytes(chunk, parameters, optimizer),
            paged_bytes=chunk_paged_bytes(chunk, parameters, optimizer),
            num_stepped=chunk.num_trainable,
            num_tensors=num_tensors(chunk, parameters),
            stepped_bytes=stepped_bytes(chunk, parameters, optimizer),
            host_stepped_bytes=host_stepped_bytes(stepped_members(chunk, parameters), optimizer, widens=widens),
            host_step_bytes=host_step_bytes(stepped_members(chunk, parameters), optimizer, widens=widens),
        )
    shards = [(region, region.shard_elements(num_shards)) for region in regions(chunk, parameters)]
    parameter_bytes = sum(count * region.dtype.item_bytes for region, count in shards)
    trained = [(region.dtype, count) for region, count in shards if region.trainable]
    stepped = [(dtype, (count,)) for dtype, count in trained]
    gradient_bytes = sum(count * dtype.item_bytes for dtype, count in trained)
    summed_bytes = _summed_bytes(trained, widens=widens)
    return RankPart(
        parameter_bytes=parameter_bytes,
        gathered_bytes=num_shards * _gathered_bytes(chunk, parameters, num_shards),
        gradient_bytes=gradient_bytes,
        arrival_bytes=gradient_bytes,
        summed_bytes=summed_bytes,
        staging_bytes=summed_bytes,
        reduced_bytes=num_shards * gradient_bytes,
        state_bytes=state_bytes(_part_pieces(chunk, parameters, num_shards), optimizer),
        paged_bytes=paged_bytes(stepped, optimizer),
        num_stepped=sum(count for _, count in trained),
        num_tensors=sum(count > 0 for _, count in trained),
        stepped_bytes=sum(traffic_bytes(one, optimizer) for one in stepped),
        host_stepped_bytes=host_stepped_bytes(stepped, optimizer, widens=widens),
        host_step_bytes=host_step_bytes(stepped, optimizer, widens=widens),
    )


def _summed_bytes(trained: Iterable[tuple[DType, int]], *, widens: bool) -> int:
    """Bytes of the gradients of so many scalars of each type, in the type in which the host adds them up."""
    return sum(count * (summed_dtype(dtype) if widens else dtype).item_bytes for dtype, count in trained)
