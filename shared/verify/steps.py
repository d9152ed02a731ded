"""What optimizers must keep and move, and what one rank must hold of a gathered chunk, stated a second time.

The first by words per scalar, not by the tensors of a library; the second by dealing the chunk out line by line.
Nothing here is read off ``shared/optimizers``, which the compiler reads.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from math import ceil, prod
from typing import Final

from ..layout.layout import Chunk
from ..schema.optimizer import Optimizer
from ..schema.plan import ParallelMode, Plan
from ..schema.workload import DType, Parameter

Stepped = tuple[DType, tuple[int, ...]]
"""Element type and shape of what is stepped as one tensor."""

_ALIGNMENT_BYTES: Final = 256
"""Where parameters begin, and so their gradients: at multiples of it."""
_LINE_BYTES: Final = 64
"""Shards are of whole cache lines."""
_NUM_MOMENTS: Final = {Optimizer.SGD: 1, Optimizer.LION: 1}
_COUNTS_STEPS: Final = (Optimizer.ADAMW, Optimizer.ADAM, Optimizer.ADAMW_BF16, Optimizer.ADAFACTOR)
"""In a float32 tensor for each parameter; the others count in Python."""
_IN_BYTES: Final = (Optimizer.ADAMW_8BIT, Optimizer.PAGED_ADAMW_8BIT)
_WHOLE: Final = (Optimizer.ADAFACTOR, Optimizer.LION, *_IN_BYTES)
"""These step no piece of a tensor."""


def stepped_of(chunks: Iterable[Chunk], parameters: Sequence[Parameter]) -> list[Stepped]:
    """What is trained of whole chunks, in order."""
    members = (parameters[placed.index] for chunk in chunks for placed in chunk.parameters)
    return [(member.dtype, member.shape) for member in members if member.trainable]


def has_master(dtype: DType, optimizer: Optimizer) -> bool:
    """Whether a float32 copy is stepped in the place of the parameter."""
    return dtype.item_bytes < 4 and not (optimizer is Optimizer.ADAMW_BF16 and dtype is DType.BFLOAT16)


def bytes_like_weights(together: Iterable[Stepped], optimizer: Optimizer) -> int:
    """What torch's Adam and AdamW need for one more number beside every scalar that they step."""
    if optimizer not in (Optimizer.ADAMW, Optimizer.ADAM, Optimizer.ADAMW_BF16):
        return 0
    return sum((4 if has_master(dtype, optimizer) else dtype.item_bytes) * prod(shape) for dtype, shape in together)


def goes_alone(dtype: DType, optimizer: Optimizer) -> bool:
    """Whether a parameter that stays on the device has a step of its own."""
    return optimizer in _WHOLE or has_master(dtype, optimizer)


def state_bytes(together: Sequence[Stepped], optimizer: Optimizer) -> int:
    """Masters, moments, counts of steps and maps of what shares a chunk."""
    total = 0
    for dtype, shape in together:
        count = prod(shape)
        total += 4 * count if has_master(dtype, optimizer) else 0
        total += _moments_bytes(dtype, shape, optimizer)
        total += 4 if optimizer in _COUNTS_STEPS else 0
    # Two maps of 256 float32 values serve all tensors that are not small.
    if optimizer in _IN_BYTES and max((prod(shape) for _, shape in together), default=0) >= 4096:
        total += 2 * 256 * 4
    return total


def paged_bytes(together: Iterable[Stepped], optimizer: Optimizer) -> int:
    """What leaves the device's own memory: moments of one byte, of tensors of 100,000 scalars and more."""
    if optimizer is not Optimizer.PAGED_ADAMW_8BIT:
        return 0
    return sum(2 * prod(shape) for _, shape in together if prod(shape) >= 100_000)


def moments_bytes(together: Iterable[Stepped], optimizer: Optimizer) -> int:
    """What steps of these read and write beside weights and gradients."""
    return sum(_moments_bytes(dtype, shape, optimizer) for dtype, shape in together)


def _moments_bytes(dtype: DType, shape: tuple[int, ...], optimizer: Optimizer) -> int:
    count, wide = prod(shape), 4 if has_master(dtype, optimizer) else dtype.item_bytes
    if optimizer in _IN_BYTES:
        return 2 * (4 * count if count < 4096 else count + 4 * ceil(count / 256))
    if optimizer is Optimizer.LION:
        return 4 * count
    if optimizer is Optimizer.ADAFACTOR and len(shape) >= 2:
        *_, rows, columns = shape
        return wide * (count // columns + count // rows) if count else wide * _empty_factors(shape)
    if optimizer is Optimizer.ADAFACTOR:
        return wide * count
    return wide * count * _NUM_MOMENTS.get(optimizer, 2)


def _empty_factors(shape: tuple[int, ...]) -> int:
    """Scalars of the factors of a matrix without any."""
    return prod(shape[:-2]) * (shape[-2] + shape[-1])


def moved_bytes(stepped: Iterable[Stepped], optimizer: Optimizer, *, is_scaled: bool, is_wide: bool = False) -> int:
    """Memory that a step reads and writes; gradients once more in and out if their norm is limited.

    ``is_wide``: gradients are float32 at least, whatever the parameter is.
    """
    total = 0
    for dtype, shape in stepped:
        count, own = prod(shape), dtype.item_bytes
        wide = 4 if has_master(dtype, optimizer) else own
        gradient = max(4, own) if is_wide else own
        if optimizer is Optimizer.ADAFACTOR:
            total += wide * count * (17 if len(shape) >= 2 else 19) + (gradient * count if wide != gradient else 0)
        else:
            total += 2 * (_moments_bytes(dtype, shape, optimizer) + wide * count) + gradient * count
            # Rounded to the type of a narrower weight, and read again.
            total += 2 * wide * count if gradient > wide else 0
        total += own * count if wide != own else 0
        total += 2 * gradient * count if is_scaled else 0
    return total


def extra_bytes(stepped: Stepped, optimizer: Optimizer, piece: int) -> int:
    """What a step on the device makes beside what lies there: a widened gradient, and Adafactor's own tensors."""
    dtype, shape = stepped
    count, wide = prod(shape), 4 if has_master(dtype, optimizer) else dtype.item_bytes
    found = 0
    if has_master(dtype, optimizer):
        found += 4 * (count if optimizer in _WHOLE else min(count, piece))
    if optimizer is Optimizer.ADAFACTOR:
        own = 2 * count + 1 if len(shape) < 2 else count + prod(shape[:-2]) * (shape[-2] + shape[-1] + 1)
        found += wide * own
    return found


# -- parts of ranks --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Held:
    """A rank's part of a chunk on its host or its device; the whole chunk unless ranks have shards."""

    parameter_bytes: int
    gradient_bytes: int
    arrival_bytes: int
    """Where gradients arrive on a host beside those that they are added to."""
    summed_bytes: int
    """The gradients as the host adds them up."""
    staging_bytes: int
    """Where it does."""
    state_bytes: int
    stepped: list[Stepped]
    """What the optimizer steps: parameters, or the fullest shards of runs of them, and for every further parameter that
    the busiest rank has a stretch of, a tensor without scalars, whose steps are counted too."""
    num_parts: int
    """Ranks that have such a part each, and together the chunk."""
    gathered_bytes: int
    """The parameters of all parts together, each in the type that it is gathered in."""


def held(chunk: Chunk, parameters: Sequence[Parameter], plan: Plan) -> Held:
    """What each rank has of ``chunk``.

    Sharded, every run of neighbouring parameters that are treated alike is dealt out in equal parts, rank by rank: the
    first rank has the fullest.
    """
    if plan.parallel is not ParallelMode.SHARDED:
        stepped = stepped_of([chunk], parameters)
        return Held(
            chunk.size_bytes,
            chunk.gradient_bytes,
            chunk.staging_bytes,
            sum(_summed_item_bytes(dtype, plan) * prod(shape) for dtype, shape in stepped),
            sum(_in_units(_summed_item_bytes(dtype, plan) * prod(shape)) for dtype, shape in stepped),
            state_bytes(stepped, plan.optimizer),
            stepped,
            1,
            chunk.size_bytes,
        )
    extents = _extents(chunk, parameters)
    parameter_bytes = gradient_bytes = gathered_bytes = 0
    stepped = []
    for (dtype, trainable), run in groupby(extents, key=lambda extent: (extent[0].dtype, extent[0].trainable)):
        alike = list(run)
        fullest = _fullest(sum(size for _, size in alike), ranks_of_group(plan)) // dtype.item_bytes
        parameter_bytes += fullest * dtype.item_bytes
        if trainable:
            gradient_bytes += fullest * dtype.item_bytes
            num_more = _most_stretches(alike, fullest * dtype.item_bytes) - 1
            stepped += [(dtype, (fullest,)), *[(dtype, (0,))] * num_more]
    for (dtype, _, gathered), run in groupby(
        extents, key=lambda extent: (extent[0].dtype, extent[0].trainable, extent[0].gathered_dtype)
    ):
        fullest = _fullest(sum(size for _, size in run), ranks_of_group(plan)) // dtype.item_bytes
        gathered_bytes += fullest * (dtype if gathered is None else gathered).item_bytes
    kept_bytes = state_bytes(stepped, plan.optimizer)
    summed_bytes = sum(_summed_item_bytes(dtype, plan) * count for dtype, (count,) in stepped)
    return Held(
        parameter_bytes,
        gradient_bytes,
        gradient_bytes,
        summed_bytes,
        summed_bytes,
        kept_bytes,
        stepped,
        ranks_of_group(plan),
        ranks_of_group(plan) * gathered_bytes,
    )


def ranks_of_group(plan: Plan) -> int:
    """Ranks that have a chunk in parts between them, where ranks have parts: those of one shard group, or all."""
    return plan.num_ranks if plan.shard_ranks is None else plan.shard_ranks


def groups_of(plan: Plan) -> int:
    """Groups of such ranks, each with all parts of every chunk."""
    return plan.num_ranks // ranks_of_group(plan)


def _summed_item_bytes(dtype: DType, plan: Plan) -> int:
    """Bytes of one gradient where the host adds it to others."""
    return max(4, dtype.item_bytes) if plan.widens_on_host else dtype.item_bytes


def _in_units(size_bytes: int) -> int:
    """Parameters begin at multiples of 256 bytes, and so do their gradients."""
    return -(-size_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES


def fullest_regions(chunk: Chunk, parameters: Sequence[Parameter], num_parts: int) -> list[tuple[DType, int]]:
    """Element type and scalars of the fullest shard of every run of neighbouring trained parameters of one type."""
    sizes = _extents(chunk, parameters)
    runs = groupby(sizes, key=lambda extent: (extent[0].dtype, extent[0].trainable))
    return [
        (dtype, _fullest(sum(size for _, size in run), num_parts) // dtype.item_bytes)
        for (dtype, trainable), run in runs
        if trainable
    ]


def _most_stretches(run: Iterable[tuple[Parameter, int]], share_bytes: int) -> int:
    """The most parameters of a run that one rank has scalars of, where ranks have shares of so many bytes."""
    num_of_rank = Counter[int]()
    begin = 0
    for parameter, extent_bytes in run:
        if parameter.size_bytes:
            num_of_rank.update(range(begin // share_bytes, (begin + parameter.size_bytes - 1) // share_bytes + 1))
        begin += extent_bytes
    return max(num_of_rank.values(), default=1)


def _fullest(size_bytes: int, num_ranks: int) -> int:
    """Bytes of the fullest share if a run is dealt out line by line."""
    lines, rest = divmod(size_bytes, _LINE_BYTES)
    assert rest == 0, "alignment keeps lines whole"
    each, left = divmod(lines, num_ranks)
    return (each + (left > 0)) * _LINE_BYTES


def _extents(chunk: Chunk, parameters: Sequence[Parameter]) -> list[tuple[Parameter, int]]:
    """Every parameter of a chunk, with the bytes to where the next one begins."""
    ends = [*(placed.offset_bytes for placed in chunk.parameters[1:]), chunk.size_bytes]
    return [
        (parameters[placed.index], end - placed.offset_bytes)
        for placed, end in zip(chunk.parameters, ends, strict=True)
    ]
