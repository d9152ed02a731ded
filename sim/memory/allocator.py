"""A model of PyTorch's caching allocator for CUDA: what it reserves for a sequence of allocations and frees.

[Note: The allocator's rules]
A request is rounded (``sim/memory/rules.py``) and looks for the smallest free block of its stream that holds it, in
the pool of small or of large sizes.  What is left over of the block becomes a free block of its own: in the small pool
if it is at least 512 bytes, in the large one if it is more than 1 MiB (should_split).  Where no block fits, a new
segment is asked of the driver.  A freed block merges with free neighbours in its segment.  Segments stay: only where
the driver has no more are those given back that are free from end to end, and the request is tried again.

With expandable segments, every stream has one stretch of address space per pool; memory is mapped behind it in pages of
2 MiB (small) or 20 MiB (large) as it is needed, at the lowest address that has room, and unmapped page by page.

Not modelled: private pools of CUDA graphs, sharing between processes, settings of ``PYTORCH_CUDA_ALLOC_CONF`` other
than ``expandable_segments``, and the time at which a block that another stream has used becomes free: whoever replays a
sequence frees it when that stream is done with it.

Source: PyTorch, ``c10/cuda/CUDACachingAllocator.cpp``: malloc, get_free_block, alloc_block, alloc_found_block,
free_block, try_merge_blocks, release_cached_blocks, find_expandable_block, map_block, unmap_block.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Self

from ...shared.basics.errors import ProtwinError
from ...shared.basics.units import format_bytes
from .blocks import Addresses, Block, Pool, merge_after, merge_before
from .expandable import ExpandableMemory
from .rules import MIN_BLOCK_BYTES, SMALL_BYTES, round_size, segment_size


class AllocatorFullError(ProtwinError):
    """The modelled device has no room for a request, whatever is given back."""

    @classmethod
    def of(cls, wanted_bytes: int, limit_bytes: int, *, reserved_bytes: int, allocated_bytes: int) -> Self:
        """For want of a segment of so many bytes; what the allocator holds then."""
        return cls(
            f"the allocator needs {format_bytes(wanted_bytes)} more but has "
            f"{format_bytes(reserved_bytes)} of {format_bytes(limit_bytes)}, "
            f"{format_bytes(allocated_bytes)} of it in use. Lower n_persist or n_buffer, checkpoint "
            f"more blocks, or set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True."
        )


@dataclass(frozen=True, slots=True)
class Segment:
    """What was asked of the driver in one piece, or a stretch of mapped pages."""

    address: int
    stream: int
    is_small: bool
    blocks: tuple[tuple[int, int, bool], ...]
    """(address, bytes, whether it is allocated), in order."""

    @property
    def size_bytes(self) -> int:
        """Bytes of all its blocks."""
        return sum(size_bytes for _, size_bytes, _ in self.blocks)


class CachingAllocator:
    """One device's allocator; see [Note: The allocator's rules].  Deterministic."""

    def __init__(self, *, expandable_segments: bool = False, limit_bytes: int | None = None) -> None:
        """``limit_bytes``: the most that the driver hands out; None for a device without end."""
        self.expandable_segments = expandable_segments
        self.limit_bytes = limit_bytes
        self.reserved_bytes = 0
        """Bytes of all segments."""
        self.allocated_bytes = 0
        """Bytes of all blocks in use."""
        self.requested_bytes = 0
        """What was asked for of these."""
        self.peak_reserved_bytes = 0
        self.peak_allocated_bytes = 0
        self.num_retries = 0
        """How often everything free had to be given back."""
        self._pools: dict[tuple[int, bool], Pool] = {}
        self._addresses = Addresses()
        self._expandable = ExpandableMemory(self._addresses, self._take)
        self._heads: dict[int, Block] = {}
        """The first block of every segment that is not expandable, by address."""

    # -- requests ----------------------------------------------------------------------------------------------------

    def malloc(self, size_bytes: int, stream: int = 0) -> Block:
        """A block for a request.  Raises AllocatorFullError if the device has no room for it."""
        assert size_bytes > 0, "the allocator is not asked for empty tensors"
        size = round_size(size_bytes)
        is_small = size <= SMALL_BYTES
        pool = self._pools.get((stream, is_small)) or self._new_pool(stream, is_small=is_small)
        block = self._cached(pool, size) or self._fresh(pool, size)
        rest_bytes = block.size_bytes - size
        if rest_bytes and self._is_worth_splitting(pool, rest_bytes):
            pool.add(block.split_off(size, rest_bytes))
        block.is_allocated = True
        block.requested_bytes = size_bytes
        self.allocated_bytes += block.size_bytes
        self.requested_bytes += size_bytes
        if self.allocated_bytes > self.peak_allocated_bytes:
            self.peak_allocated_bytes = self.allocated_bytes
        return block

    def free(self, block: Block) -> None:
        """Give a block back; it must be in use."""
        assert block.is_allocated, "the block is not in use"
        block.is_allocated = False
        self.allocated_bytes -= block.size_bytes
        self.requested_bytes -= block.requested_bytes
        pool = block.pool
        before, after = block.before, block.after
        if before is not None and not before.is_allocated and before.is_mapped:
            pool.remove(before)
            if before.address in self._heads:
                self._heads[before.address] = block
            merge_before(block, before)
        if after is not None and not after.is_allocated and after.is_mapped:
            pool.remove(after)
            merge_after(block, after)
        pool.add(block)

    def has_cached(self, large_bytes: int, small_bytes: int) -> bool:
        """Whether each pool of the first stream has one free block of so many bytes; 0 for a pool that needs none."""
        for size, is_small in ((large_bytes, False), (small_bytes, True)):
            if size:
                pool = self._pools.get((0, is_small))
                if pool is None or not pool.free or pool.free[-1][0] < size:
                    return False
        return True

    def empty_cache(self) -> None:
        """Give back every segment, and every page, that is free from end to end."""
        for pool in self._pools_in_order():
            for block in pool:
                if block.is_expandable:
                    self.reserved_bytes -= self._expandable.unmap(block)
                elif not block.is_split:
                    self._release(block)

    # -- what it holds -----------------------------------------------------------------------------------------------

    @property
    def segments(self) -> tuple[Segment, ...]:
        """Everything that is reserved, by address."""
        found = [self._segment(head) for head in self._heads.values()]
        found += [self._segment(head) for head in self._expandable.mapped_stretches()]
        return tuple(sorted(found, key=lambda segment: segment.address))

    @staticmethod
    def _segment(head: Block) -> Segment:
        blocks = []
        block: Block | None = head
        while block is not None and block.is_mapped:
            blocks.append((block.address, block.size_bytes, block.is_allocated))
            block = block.after
        return Segment(head.address, head.pool.stream, head.pool.is_small, tuple(blocks))

    # -- finding a block ---------------------------------------------------------------------------------------------

    def _new_pool(self, stream: int, *, is_small: bool) -> Pool:
        pool = self._pools[stream, is_small] = Pool(stream, is_small=is_small)
        return pool

    def _pools_in_order(self) -> Iterator[Pool]:
        """Large ones first, as they are given back."""
        return iter([self._pools[key] for key in sorted(self._pools, key=lambda key: (key[1], key[0]))])

    def _is_worth_splitting(self, pool: Pool, rest_bytes: int) -> bool:
        if pool.is_small or self.expandable_segments:
            return rest_bytes >= MIN_BLOCK_BYTES
        return rest_bytes > SMALL_BYTES

    def _cached(self, pool: Pool, size: int) -> Block | None:
        """The free block that the request gets, taken out of its pool."""
        free = pool.free
        place = bisect_left(free, (size,))
        if place == len(free):
            return None
        block = free[place][2]
        if not block.is_expandable:
            del free[place]
            return block
        block = self._expandable.preferred(pool, place, block)
        pool.remove(block)
        return block

    def _fresh(self, pool: Pool, size: int) -> Block:
        """A block of new memory; cached segments are given back if there is no other way."""
        block = self._new(pool, size)
        if block is None:
            self.empty_cache()
            self.num_retries += 1
            block = self._new(pool, size)
        if block is None:
            assert self.limit_bytes is not None
            raise AllocatorFullError.of(
                segment_size(size),
                self.limit_bytes,
                reserved_bytes=self.reserved_bytes,
                allocated_bytes=self.allocated_bytes,
            )
        return block

    def _new(self, pool: Pool, size: int) -> Block | None:
        """A new segment, or the block at the end of an expandable one; None if the driver has no more."""
        if self.expandable_segments:
            return self._expandable.allocate(pool, size)
        wanted = segment_size(size)
        if not self._take(wanted):
            return None
        block = Block(self._addresses.take(wanted), wanted, pool)
        self._heads[block.address] = block
        return block

    def _take(self, size_bytes: int) -> bool:
        """Ask the driver for memory."""
        if self.limit_bytes is not None and self.reserved_bytes + size_bytes > self.limit_bytes:
            return False
        self.reserved_bytes += size_bytes
        if self.reserved_bytes > self.peak_reserved_bytes:
            self.peak_reserved_bytes = self.reserved_bytes
        return True

    # -- giving back -------------------------------------------------------------------------------------------------

    def _release(self, block: Block) -> None:
        """Give a whole segment back."""
        block.pool.remove(block)
        del self._heads[block.address]
        self.reserved_bytes -= block.size_bytes
