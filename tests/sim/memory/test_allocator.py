"""The model of the caching allocator: sequences worked out by hand, an oracle that looks for gaps, invariants."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protwin.sim.memory.allocator import AllocatorFullError, CachingAllocator
from protwin.sim.memory.blocks import Block
from protwin.sim.memory.rules import round_size, segment_size
from tests.proof_size import examples
from tests.sim.plain_allocator import PlainAllocator

KIB, MIB = 2**10, 2**20


# -- sizes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("size_bytes", "block_bytes", "asked_bytes"),
    [
        (1, 512, 2 * MIB),
        (512, 512, 2 * MIB),
        (513, 1024, 2 * MIB),
        (MIB - 1, MIB, 2 * MIB),
        (MIB, MIB, 2 * MIB),
        (MIB + 1, MIB + 512, 20 * MIB),
        (10 * MIB - 512, 10 * MIB - 512, 20 * MIB),
        (10 * MIB - 511, 10 * MIB, 10 * MIB),
        (10 * MIB + 1, 10 * MIB + 512, 12 * MIB),
        (202_375_168, 202_375_168, 97 * 2 * MIB),
    ],
)
def test_blocks_and_segments(size_bytes: int, block_bytes: int, asked_bytes: int) -> None:
    assert round_size(size_bytes) == block_bytes
    assert segment_size(block_bytes) == asked_bytes


# -- by hand ---------------------------------------------------------------------------------------------------------


def test_small_requests_share_segments_of_2_mib() -> None:
    allocator = CachingAllocator()
    blocks = [allocator.malloc(300 * KIB) for _ in range(6)]  # 1 800 KiB of 2 048
    assert allocator.reserved_bytes == 2 * MIB
    blocks.append(allocator.malloc(300 * KIB))
    assert allocator.reserved_bytes == 4 * MIB
    assert allocator.allocated_bytes == 7 * 300 * KIB
    allocator.free(blocks[1])
    assert allocator.malloc(299 * KIB).address == blocks[1].address  # the smallest block that holds it


def test_requests_below_10_mib_share_segments_of_20() -> None:
    allocator = CachingAllocator()
    for _ in range(4):
        allocator.malloc(6 * MIB)
    assert allocator.reserved_bytes == 40 * MIB  # three to a segment, 2 MiB left over
    allocator.malloc(2 * MIB)
    assert allocator.reserved_bytes == 40 * MIB
    allocator.malloc(10 * MIB)  # has a segment of its own, though 14 MiB are free in one piece
    assert allocator.reserved_bytes == 40 * MIB
    allocator.malloc(11 * MIB + 1)
    assert allocator.reserved_bytes == 52 * MIB


def test_a_rest_of_up_to_1_mib_goes_with_a_large_block() -> None:
    allocator = CachingAllocator()
    first = allocator.malloc(100 * MIB)
    allocator.free(first)
    kept = allocator.malloc(99 * MIB)
    assert kept.size_bytes == 100 * MIB  # 1 MiB left over is no block of its own
    assert allocator.allocated_bytes == 100 * MIB
    assert allocator.requested_bytes == 99 * MIB
    allocator.free(kept)
    split = allocator.malloc(99 * MIB - 512)
    assert split.size_bytes == 99 * MIB - 512
    assert allocator.malloc(MIB + 512).address == split.address + split.size_bytes
    assert allocator.reserved_bytes == 100 * MIB


def test_neighbours_merge_and_strangers_do_not() -> None:
    allocator = CachingAllocator()
    a, b, c = (allocator.malloc(6 * MIB) for _ in range(3))
    allocator.free(a)
    allocator.free(c)
    assert allocator.malloc(8 * MIB).address == c.address  # c and the 2 MiB behind it
    assert allocator.reserved_bytes == 20 * MIB
    allocator.free(b)
    assert allocator.malloc(12 * MIB).address == a.address
    assert allocator.reserved_bytes == 20 * MIB


def test_what_changes_its_size_fragments() -> None:
    # Three tensors of 100 MiB go, one of 101 comes: none of the three segments holds it.
    allocator = CachingAllocator()
    blocks = [allocator.malloc(100 * MIB) for _ in range(3)]
    for block in blocks:
        allocator.free(block)
    allocator.malloc(101 * MIB)
    assert allocator.reserved_bytes == 300 * MIB + 102 * MIB
    # Expandable segments take 15 pages for the three and one more for nothing: 101 MiB are there in one piece.
    allocator = CachingAllocator(expandable_segments=True)
    blocks = [allocator.malloc(100 * MIB) for _ in range(3)]
    assert allocator.reserved_bytes == 300 * MIB
    for block in blocks:
        allocator.free(block)
    allocator.malloc(101 * MIB)
    assert allocator.reserved_bytes == 300 * MIB


def test_streams_share_nothing() -> None:
    allocator = CachingAllocator()
    allocator.free(allocator.malloc(50 * MIB, stream=0))
    allocator.malloc(50 * MIB, stream=1)
    assert allocator.reserved_bytes == 100 * MIB
    allocator.malloc(50 * MIB, stream=0)
    assert allocator.reserved_bytes == 100 * MIB


def test_out_of_memory_gives_cached_segments_back_first() -> None:
    allocator = CachingAllocator(limit_bytes=100 * MIB)
    allocator.free(allocator.malloc(60 * MIB))
    held = allocator.malloc(6 * MIB, stream=1)
    allocator.malloc(80 * MIB)  # the 60 MiB go, the segment of 20 of which 6 are in use stays
    assert (allocator.reserved_bytes, allocator.num_retries) == (100 * MIB, 1)
    with pytest.raises(AllocatorFullError, match=r"needs 2 MiB more but has 100 MiB of 100 MiB, 86 MiB of it in use"):
        allocator.malloc(1)
    allocator.free(held)
    allocator.malloc(1)
    assert (allocator.reserved_bytes, allocator.num_retries) == (82 * MIB, 3)


def test_expandable_segments_grow_by_pages() -> None:
    allocator = CachingAllocator(expandable_segments=True)
    first = allocator.malloc(MIB + 512)
    assert allocator.reserved_bytes == 20 * MIB
    second = allocator.malloc(30 * MIB)  # 19 MiB less 512 are there, 11 MiB more make a second page
    assert second.address == first.address + MIB + 512
    assert allocator.reserved_bytes == 40 * MIB
    allocator.malloc(KIB)
    assert allocator.reserved_bytes == 42 * MIB  # small ones have pages of 2 MiB
    allocator.free(first)
    third = allocator.malloc(2 * MIB)  # does not fit before ``second``
    assert third.address == second.address + 30 * MIB
    allocator.free(second)
    allocator.empty_cache()
    # In use: 2 MiB from 31 MiB + 512 on.  The first page is free from end to end.
    assert allocator.reserved_bytes == 20 * MIB + 2 * MIB
    # What is unmapped in front is filled first.
    assert allocator.malloc(25 * MIB).address == first.address
    assert allocator.reserved_bytes == 40 * MIB + 2 * MIB


# -- against the oracle ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Act:
    """Ask for so many bytes on a stream, or free the block at a place among those in use, or empty the cache."""

    size_bytes: int = 0
    stream: int = 0
    place: int | None = None


SIZES = (
    st.integers(1, 4 * KIB)
    | st.integers(1, 2 * MIB)
    | st.integers(MIB, 12 * MIB)
    | st.integers(8 * MIB, 90 * MIB)
    | st.sampled_from((MIB, MIB + 1, 10 * MIB, 20 * MIB, 40 * MIB))
)
ACTS = st.lists(
    st.builds(Act, size_bytes=SIZES, stream=st.integers(0, 1))
    | st.builds(Act, place=st.integers(0, 50))
    | st.builds(Act, place=st.integers(0, 50))
    | st.just(Act()),
    max_size=60,
)
LIMITS = st.none() | st.sampled_from((60 * MIB, 150 * MIB))


def run(allocator: CachingAllocator, acts: Sequence[Act]) -> list[tuple[int, int, int]]:
    """(address, size, reserved) after every act; address -1 where memory ran out."""
    held: list[Block] = []
    found = []
    for act in acts:
        address = 0
        if act.size_bytes:
            try:
                held.append(allocator.malloc(act.size_bytes, act.stream))
                address = held[-1].address
            except AllocatorFullError:
                address = -1
        elif act.place is None:
            allocator.empty_cache()
        elif held:
            allocator.free(held.pop(act.place % len(held)))
        found.append((address, held[-1].size_bytes if held else 0, allocator.reserved_bytes))
        check(allocator, held)
    return found


def check(allocator: CachingAllocator, held: Sequence[Block]) -> None:
    """What holds at every moment."""
    segments = allocator.segments
    assert allocator.reserved_bytes == sum(segment.size_bytes for segment in segments)
    assert allocator.allocated_bytes == sum(block.size_bytes for block in held)
    assert allocator.requested_bytes == sum(block.requested_bytes for block in held)
    assert allocator.requested_bytes <= allocator.allocated_bytes <= allocator.reserved_bytes
    assert allocator.limit_bytes is None or allocator.reserved_bytes <= allocator.limit_bytes
    assert sorted((b.address, b.size_bytes) for b in held) == [
        (address, size) for segment in segments for address, size, is_used in segment.blocks if is_used
    ]
    end = 0
    for segment in segments:
        assert segment.address % (2 * MIB) == 0
        assert segment.size_bytes % (2 * MIB) == 0
        assert segment.address >= end
        was_used = True
        end = segment.address
        for address, size, is_used in segment.blocks:
            assert address == end
            assert size % 512 == 0
            assert is_used or was_used, "two free neighbours"
            end, was_used = address + size, is_used


def run_plainly(plain: PlainAllocator, acts: Sequence[Act]) -> list[tuple[int, int, int]]:
    held: list[int] = []
    found = []
    for act in acts:
        address: int | None = 0
        if act.size_bytes:
            address = plain.malloc(act.size_bytes, act.stream)
            if address is not None:
                held.append(address)
        elif act.place is None:
            plain.empty_cache()
        elif held:
            plain.free(held.pop(act.place % len(held)))
        found.append((-1 if address is None else address, plain.used[held[-1]] if held else 0, plain.reserved()))
    return found


@settings(max_examples=examples(300, 24))
@given(ACTS, st.booleans(), LIMITS)
def test_every_block_lies_where_the_oracle_puts_it(
    acts: list[Act], is_expandable: bool, limit_bytes: int | None
) -> None:
    plain = PlainAllocator(expandable=is_expandable, limit=limit_bytes)
    allocator = CachingAllocator(expandable_segments=is_expandable, limit_bytes=limit_bytes)
    assert run(allocator, acts) == run_plainly(plain, acts)
    for block in [block for segment in allocator.segments for block in segment.blocks if block[2]]:
        plain.free(block[0])
    plain.empty_cache()
    assert plain.reserved() == 0


@given(ACTS, st.booleans())
def test_when_all_is_free_the_cache_can_be_emptied(acts: list[Act], is_expandable: bool) -> None:
    allocator = CachingAllocator(expandable_segments=is_expandable)
    held: list[Block] = []
    for act in acts:
        if act.size_bytes:
            held.append(allocator.malloc(act.size_bytes, act.stream))
        elif act.place is not None and held:
            allocator.free(held.pop(act.place % len(held)))
    for block in held:
        allocator.free(block)
    assert allocator.allocated_bytes == allocator.requested_bytes == 0
    allocator.empty_cache()
    assert allocator.reserved_bytes == 0
    assert allocator.segments == ()


class NeverMerges(CachingAllocator):
    """A wrong variant: freed blocks stay apart."""

    def free(self, block: Block) -> None:
        before, after = block.before, block.after
        block.before = block.after = None
        super().free(block)
        block.before, block.after = before, after


class WorstFit(CachingAllocator):
    """A wrong variant: the largest free block is taken."""

    def _cached(self, pool, size):  # type: ignore[no-untyped-def]
        return super()._cached(pool, max([size, *(block.size_bytes for block in pool)]))


@pytest.mark.parametrize("variant", [NeverMerges, WorstFit])
def test_the_oracle_tells_wrong_variants(variant: type[CachingAllocator]) -> None:
    sizes = [6 * MIB, 6 * MIB, 6 * MIB, 15 * MIB, 3 * MIB]
    acts = [*(Act(size) for size in sizes), Act(place=0), Act(place=0), Act(12 * MIB), Act(2 * MIB), Act(2 * MIB)]
    found = []
    allocator = variant()
    held: list[Block] = []
    for act in acts:
        if act.size_bytes:
            held.append(allocator.malloc(act.size_bytes))
        else:
            allocator.free(held.pop(0))
        found.append((held[-1].address if act.size_bytes else 0, held[-1].size_bytes, allocator.reserved_bytes))
    assert found != run_plainly(PlainAllocator(), acts)
    assert run(CachingAllocator(), acts) == run_plainly(PlainAllocator(), acts)
