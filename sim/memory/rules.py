"""The sizes by which PyTorch's caching allocator for CUDA rounds.

Read off ``c10/cuda/CUDACachingAllocator.cpp`` and ``c10/core/AllocatorConfig.h`` of PyTorch; names in brackets are its
constants and functions.
"""

from __future__ import annotations

from typing import Final

MIN_BLOCK_BYTES: Final = 512
"""Every size is rounded up to a multiple (kMinBlockSize)."""
SMALL_BYTES: Final = 2**20
"""The largest size of the small pool (kSmallSize)."""
SMALL_SEGMENT_BYTES: Final = 2 * 2**20
"""A segment of the small pool, and a page of its expandable one (kSmallBuffer)."""
LARGE_SEGMENT_BYTES: Final = 20 * 2**20
"""A segment for sizes above the small pool's and below ``OWN_SEGMENT_BYTES``, and a page of the large pool's expandable
one (kLargeBuffer, large_segment_size)."""
OWN_SEGMENT_BYTES: Final = 10 * 2**20
"""From this size on a request gets a segment of its own (kMinLargeAlloc)."""
SEGMENT_ROUNDING_BYTES: Final = 2 * 2**20
"""Own segments are multiples of this (kRoundLarge)."""


def round_size(size_bytes: int) -> int:
    """The size of the block that a request of ``size_bytes`` gets, if it is split to measure (round_size).  Bytes."""
    return -(-size_bytes // MIN_BLOCK_BYTES) * MIN_BLOCK_BYTES


def segment_size(size_bytes: int) -> int:
    """What a rounded size that no cached block holds is asked of the driver as (get_allocation_size).  Bytes."""
    if size_bytes <= SMALL_BYTES:
        return SMALL_SEGMENT_BYTES
    if size_bytes < OWN_SEGMENT_BYTES:
        return LARGE_SEGMENT_BYTES
    return -(-size_bytes // SEGMENT_ROUNDING_BYTES) * SEGMENT_ROUNDING_BYTES
