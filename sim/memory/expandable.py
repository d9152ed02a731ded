"""Expandable segments of the modelled allocator: address space first, memory behind it page by page."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final

from .blocks import Addresses, Block, Pool, merge_after, merge_before
from .rules import LARGE_SEGMENT_BYTES, SMALL_SEGMENT_BYTES

_SPACE_BYTES: Final = LARGE_SEGMENT_BYTES * 2**24
"""Address space of one segment.  PyTorch takes 9/8 of the device's memory; neither is ever used up."""


class ExpandableMemory:
    """The expandable segments of one device; ``take`` asks the driver for the bytes of some pages."""

    def __init__(self, addresses: Addresses, take: Callable[[int], bool]) -> None:
        self._addresses = addresses
        self._take = take
        self._spaces: list[Block] = []
        """A block at the beginning of every address space, of no size and never free."""

    def mapped_stretches(self) -> Iterator[Block]:
        """The first block of every stretch of mapped memory."""
        for space in self._spaces:
            before, block = space, space.after
            while block is not None:
                if block.is_mapped and (before is space or not before.is_mapped):
                    yield block
                before, block = block, block.after

    def preferred(self, pool: Pool, place: int, block: Block) -> Block:
        """Of the free blocks from ``place`` on, the first whose successor could not grow to less.

        Best fit counts a block that borders on unmapped address space as large as it could become.
        """
        while block.is_expandable:
            place += 1
            other = pool.at(place)
            if other is None or _could_grow_to(other) >= _could_grow_to(block):
                break
            block = other
        return block

    def allocate(self, pool: Pool, size: int) -> Block | None:
        """A free block of at least ``size`` bytes, taken out of its pool; None if the driver has no more.

        What was mapped until then stays, free.
        """
        block = self._lowest_room(pool, size)
        if not block.is_mapped and not self._map(block, min(block.size_bytes, size)):
            return None
        while block.size_bytes < size:
            beyond = block.after
            assert beyond is not None
            if not self._map(beyond, min(size - block.size_bytes, beyond.size_bytes)):
                return None
            block = beyond
        pool.remove(block)
        return block

    def unmap(self, block: Block) -> int:
        """Give the whole pages of a free block back; their bytes."""
        pool, page = block.pool, _page_bytes(block.pool)
        begin = -(-block.address // page) * page
        end = (block.address + block.size_bytes) // page * page
        if begin >= end:
            return 0
        pool.remove(block)
        if begin > block.address:
            rest = _part(block, block.address, begin - block.address)
            rest.insert_before(block)
            pool.add(rest)
        if end < block.address + block.size_bytes:
            rest = _part(block, end, block.address + block.size_bytes - end)
            rest.insert_after(block)
            pool.add(rest)
        block.address, block.size_bytes = begin, end - begin
        block.is_mapped = False
        for neighbour, merge in ((block.before, merge_before), (block.after, merge_after)):
            if neighbour is not None and not neighbour.is_mapped:
                pool.unmapped.remove(neighbour)
                merge(block, neighbour)
        pool.add_unmapped(block)
        return end - begin

    def _lowest_room(self, pool: Pool, size: int) -> Block:
        """The lowest block from which on ``size`` bytes are free or unmapped; a new address space if there is none."""
        for unmapped in pool.unmapped:
            block = unmapped
            if block.before is not None and block.before.is_free:
                block = block.before
            if _has_room(block, size):
                return block
        page = _page_bytes(pool)
        space = Block(0, 0, pool)
        space.is_allocated = True
        self._spaces.append(space)
        # Pages are counted from the space's beginning: a multiple of the page is as good.
        address = -(-self._addresses.take(_SPACE_BYTES + page) // page) * page
        block = Block(address, _SPACE_BYTES, pool)
        block.is_mapped, block.is_expandable = False, True
        block.insert_after(space)
        pool.add_unmapped(block)
        return block

    def _map(self, block: Block, size: int) -> bool:
        """Map the pages of the first ``size`` bytes of an unmapped block, which is free then; False if they fail."""
        pool, page = block.pool, _page_bytes(block.pool)
        mapped = -(-size // page) * page
        if not self._take(mapped):
            return False
        pool.unmapped.remove(block)
        block.is_mapped = True
        if mapped < block.size_bytes:
            rest = _part(block, block.address + mapped, block.size_bytes - mapped)
            rest.is_mapped = False
            rest.insert_after(block)
            block.size_bytes = mapped
            pool.add_unmapped(rest)
        for neighbour, merge in ((block.before, merge_before), (block.after, merge_after)):
            if neighbour is not None and neighbour.is_free and neighbour.is_mapped:
                pool.remove(neighbour)
                merge(block, neighbour)
        pool.add(block)
        return True


def _part(block: Block, address: int, size_bytes: int) -> Block:
    """A stretch of ``block`` as a block of its own, with no neighbours yet."""
    part = Block(address, size_bytes, block.pool)
    part.is_expandable = True
    return part


def _page_bytes(pool: Pool) -> int:
    return SMALL_SEGMENT_BYTES if pool.is_small else LARGE_SEGMENT_BYTES


def _could_grow_to(block: Block) -> int:
    beyond = block.after
    return block.size_bytes + (beyond.size_bytes if beyond is not None and not beyond.is_mapped else 0)


def _has_room(block: Block | None, size: int) -> bool:
    found = 0
    while found < size and block is not None and block.is_free:
        found += block.size_bytes
        block = block.after
    return found >= size
