"""Blocks of the modelled allocator, and the free ones in the order in which a request looks through them."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator

from .rules import SMALL_SEGMENT_BYTES


class Block:
    """A stretch of one segment.  ``before`` and ``after`` are its neighbours there; one without any is a segment."""

    __slots__ = (
        "address",
        "after",
        "before",
        "is_allocated",
        "is_expandable",
        "is_mapped",
        "pool",
        "requested_bytes",
        "size_bytes",
    )

    def __init__(self, address: int, size_bytes: int, pool: Pool) -> None:
        self.address = address
        self.size_bytes = size_bytes
        self.pool = pool
        self.requested_bytes = 0
        self.is_allocated = False
        self.is_mapped = True
        """False for address space of an expandable segment that no memory lies behind."""
        self.is_expandable = False
        self.before: Block | None = None
        self.after: Block | None = None

    @property
    def is_split(self) -> bool:
        """Whether it shares its segment."""
        return self.before is not None or self.after is not None

    @property
    def is_free(self) -> bool:
        """Whether a request could have it, or the address space that it stands for."""
        return not self.is_allocated

    def split_off(self, size_bytes: int, rest_bytes: int) -> Block:
        """Keep ``size_bytes``; a free block of the rest, behind it."""
        rest = Block(self.address + size_bytes, rest_bytes, self.pool)
        rest.is_expandable = self.is_expandable
        after = rest.after = self.after
        if after is not None:
            after.before = rest
        rest.before = self
        self.after = rest
        self.size_bytes = size_bytes
        return rest

    def insert_after(self, other: Block) -> None:
        """Take the place between ``other`` and its neighbour."""
        self.before, self.after = other, other.after
        if other.after is not None:
            other.after.before = self
        other.after = self

    def insert_before(self, other: Block) -> None:
        """Take the place between ``other`` and the neighbour before it."""
        self.after, self.before = other, other.before
        if other.before is not None:
            other.before.after = self
        other.before = self


def merge_before(block: Block, before: Block) -> None:
    """``block`` swallows the neighbour before it."""
    block.address = before.address
    block.size_bytes += before.size_bytes
    block.before = before.before
    if block.before is not None:
        block.before.after = block


def merge_after(block: Block, after: Block) -> None:
    """``block`` swallows the neighbour after it."""
    block.size_bytes += after.size_bytes
    block.after = after.after
    if block.after is not None:
        block.after.before = block


class Pool:
    """The free blocks of one stream, either small or large ones: smallest first, of equal ones the lowest address.

    Blocks of another stream are never looked at, which is why every stream has pools of its own.
    """

    def __init__(self, stream: int, *, is_small: bool) -> None:
        self.stream = stream
        self.is_small = is_small
        self.unmapped: list[Block] = []
        """Address space of expandable segments, by address."""
        self.free: list[tuple[int, int, Block]] = []
        """(bytes, address, block), ascending."""

    def __iter__(self) -> Iterator[Block]:
        """A copy: the pool may change meanwhile."""
        return iter([block for _, _, block in self.free])

    def add(self, block: Block) -> None:
        """``block`` has become free."""
        insort(self.free, (block.size_bytes, block.address, block))

    def remove(self, block: Block) -> None:
        """``block`` is free no more, or about to change its size."""
        del self.free[bisect_left(self.free, (block.size_bytes, block.address))]

    def at(self, place: int) -> Block | None:
        """The free block at a place of the pool's order; None beyond its end."""
        return self.free[place][2] if place < len(self.free) else None

    def add_unmapped(self, block: Block) -> None:
        """``block`` is address space without memory."""
        insort(self.unmapped, block, key=lambda other: other.address)


class Addresses:
    """Addresses of new segments: aligned to 2 MiB, ascending, never used again."""

    def __init__(self) -> None:
        self._next = SMALL_SEGMENT_BYTES

    def take(self, size_bytes: int) -> int:
        """The address of a new stretch of ``size_bytes``."""
        address = self._next
        self._next += -(-size_bytes // SMALL_SEGMENT_BYTES) * SMALL_SEGMENT_BYTES
        return address
