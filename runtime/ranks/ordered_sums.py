"""Sums over ranks whose bits depend on the ranks' numbers alone.

[Note: The order of a sum]
A ring begins to add a number up at a rank that depends on where the number lies among those that are sent with it.
Two ranks add two numbers, which commutes.  With three and more, another layout of chunks would give other bits.  So
every sum here is ((r0 + r1) + r2) + ..., element by element, in the element type: whatever a plan sends together, adds
up whole or scatters.  Each rank gets its part of the tensors of all ranks, adds these up in the order of the ranks, and
an all-reduce then gathers the sums.  The bytes on the wire are those of a ring.  Small tensors are gathered whole and
added up by every rank: one exchange in the place of two.

NCCL orders its sums itself, by its rings and trees, and its own collectives are used there: bits may depend on sizes.

[Note: Working memory of sums]
Numbers of other ranks arrive in memory of this module, together with copies of what is sent less than four times
``BUCKET_BYTES`` at once, however large a chunk is.  It counts as the library's: gloo itself clones all that it reduces.
A plan's account does not have it.

[Note: Late threads]
A thread of gloo's wakes whoever waits for a collective, and lets go of its tensors afterwards.  Where the machine is
busy, that may be many operations later.  Gradients that it held would be on the device for as long, beside all that the
schedule accounts for.  So gloo is given copies of them, bucket by bucket.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Final

import torch
import torch.distributed as dist

BUCKET_BYTES: Final = 16 * 2**20
"""Bytes that are added up at once: enough that latency hardly matters (gloo takes milliseconds for an exchange)."""
_GATHERED_BYTES: Final = 2**20
"""Tensors are gathered whole where those of all ranks have at most so many bytes."""
# Newer torch has other names for them, and warns of these.
_ALL_GATHER: Final = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_REDUCE_SCATTER: Final = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

_Stretch = tuple[torch.Tensor, slice]
"""A flat tensor, and where in it."""


def gather(whole: torch.Tensor, part: torch.Tensor, group: dist.ProcessGroup) -> None:
    """The parts of all ranks, in their order, fill ``whole`` (n,); this one's may lie at its place there."""
    _ALL_GATHER(whole, part, group=group)


def add_up(tensors: Sequence[torch.Tensor], group: dist.ProcessGroup) -> None:
    """The sum over all ranks takes the place of each of ``tensors``, which are contiguous, (n,) each."""
    present = [tensor for tensor in tensors if tensor.numel()]
    if all(is_ordered_here(tensor) for tensor in present):
        in_buckets(present, lambda flat: _add_up(flat, group))
        return
    # In place, without memory beside a plan's account.
    for work in [dist.all_reduce(tensor, group=group, async_op=True) for tensor in present]:
        work.wait()


def in_buckets(tensors: Sequence[torch.Tensor], add_up_one: Callable[[torch.Tensor], None]) -> None:
    """Let ``add_up_one`` change ``tensors``, contiguous and (n,) each, many small ones at once and large ones by parts.

    What it is given has at most ``BUCKET_BYTES``, is contiguous, and has memory of its own: see [Note: Late threads].
    """
    by_type: dict[torch.dtype, list[torch.Tensor]] = {}
    for tensor in tensors:
        if tensor.numel():
            by_type.setdefault(tensor.dtype, []).append(tensor)
    for dtype, alike in by_type.items():
        for bucket in _buckets(alike, BUCKET_BYTES // dtype.itemsize):
            flat = torch.cat([tensor[where] for tensor, where in bucket])
            add_up_one(flat)
            sizes = [where.stop - where.start for _, where in bucket]
            for (tensor, where), summed in zip(bucket, torch.split(flat, sizes), strict=True):
                tensor[where] = summed


def scatter(part: torch.Tensor, whole: torch.Tensor, group: dist.ProcessGroup) -> None:
    """The sum of ``whole`` (n,) over all ranks; each has its ``part`` of it, in the order of the ranks."""
    if not is_ordered_here(whole):
        _REDUCE_SCATTER(part, whole, group=group)
        return
    shards = whole.view(group.size(), part.numel())
    width = max(1, BUCKET_BYTES // (group.size() * whole.element_size()))
    for begin in range(0, part.numel(), width):
        stripe = slice(begin, min(begin + width, part.numel()))
        _scatter(part[stripe], shards[:, stripe].contiguous(), group)


def _buckets(tensors: Sequence[torch.Tensor], size: int) -> Iterator[list[_Stretch]]:
    """Stretches of ``tensors``, in order, ``size`` scalars at a time."""
    bucket: list[_Stretch] = []
    room = size
    for tensor in tensors:
        begin = 0
        while begin < tensor.numel():
            count = min(room, tensor.numel() - begin)
            bucket.append((tensor, slice(begin, begin + count)))
            begin += count
            room -= count
            if not room:
                yield bucket
                bucket, room = [], size
    if bucket:
        yield bucket


def is_ordered_here(tensor: torch.Tensor) -> bool:
    """Whether this module sees to the order, as of what gloo carries; see [Note: The order of a sum]."""
    return tensor.device.type == "cpu"


def _add_up(flat: torch.Tensor, group: dist.ProcessGroup) -> None:
    num_ranks, count = group.size(), flat.numel()
    if num_ranks * count * flat.element_size() <= _GATHERED_BYTES:
        every = flat.new_empty(num_ranks * count)
        gather(every, flat, group)
        _add_rows(flat, every.view(num_ranks, count))
    elif num_ranks == 2:
        # Of two ranks the library's own has the same bits, and takes half the time from 4 MiB on.
        dist.all_reduce(flat, group=group)
    else:
        length = -(-count // num_ranks)
        sent = flat
        if length * num_ranks > count:
            sent = flat.new_zeros(length * num_ranks)
            sent[:count] = flat
        part = flat.new_empty(length)
        _scatter(part, sent.view(num_ranks, length), group)
        gather(sent, part, group)
        if sent is not flat:
            flat.copy_(sent[:count])


def _scatter(part: torch.Tensor, shards: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Of contiguous ``shards`` (ranks, n): every rank gets its own from all ranks, and adds them up."""
    received = torch.empty_like(shards)
    # As bytes: gloo does not send every element type.
    dist.all_to_all_single(received.view(-1).view(torch.uint8), shards.view(-1).view(torch.uint8), group=group)
    _add_rows(part, received)


def _add_rows(total: torch.Tensor, rows: torch.Tensor) -> None:
    """``total`` (n,) is the sum of ``rows`` (ranks, n), in their order."""
    total.copy_(rows[0])
    for row in rows[1:]:
        total.add_(row)
