"""The sizes by which PyTorch's caching allocator for CUDA rounds, and the settings that change them.

Read off ``c10/cuda/CUDACachingAllocator.cpp`` and ``c10/core/AllocatorConfig.h`` of PyTorch; the names in brackets are
those of its constants.  The settings are those of ``PYTORCH_CUDA_ALLOC_CONF``, with its defaults.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from ...shared.basics.errors import PlanError

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


@dataclass(frozen=True, slots=True)
class AllocatorSettings:
    """What ``PYTORCH_CUDA_ALLOC_CONF`` may say."""

    roundup_power2_divisions: int = 0
    """Divisions of every power of two that sizes are rounded up to; 0 or 1: multiples of 512 bytes alone."""
    max_split_bytes: int | None = None
    """Blocks of at least this size are not split (max_split_size), more than 20 MiB; None: all may be."""
    max_non_split_rounding_bytes: int = LARGE_SEGMENT_BYTES
    """How much larger than asked for a block may be that is not split (max_non_split_rounding_size)."""
    expandable_segments: bool = False
    garbage_collection_threshold_frac: float = 0.0
    """Share of the limit beyond which old cached segments are given back before a new one is asked for; 0: never."""

    def __post_init__(self) -> None:
        """Raise PlanError for what PyTorch refuses too."""
        if self.max_split_bytes is not None and self.max_split_bytes <= LARGE_SEGMENT_BYTES:
            raise PlanError(
                f"max_split_bytes is {self.max_split_bytes}; it must be more than {LARGE_SEGMENT_BYTES}, a segment."
            )
        if self.max_non_split_rounding_bytes < LARGE_SEGMENT_BYTES:
            raise PlanError(
                f"max_non_split_rounding_bytes is {self.max_non_split_rounding_bytes}; it must be at least "
                f"{LARGE_SEGMENT_BYTES}, a segment."
            )
        if not 0 <= self.garbage_collection_threshold_frac < 1:
            raise PlanError(
                f"garbage_collection_threshold_frac is {self.garbage_collection_threshold_frac}; it must be at least "
                f"0 and below 1."
            )
        divisions = self.roundup_power2_divisions
        if divisions < 0 or divisions & (divisions - 1):
            raise PlanError(f"roundup_power2_divisions is {divisions}; it must be 0 or a power of two.")


def round_size(size_bytes: int, settings: AllocatorSettings) -> int:
    """The size of the block that a request of ``size_bytes`` gets, if it is split to measure.  Bytes.

    Multiples of 512 bytes; with divisions d, sizes above 512 d instead step through the d-th parts of the power of two
    below them (round_size, roundup_power2_next_division).
    """
    divisions = settings.roundup_power2_divisions
    if divisions > 1 and size_bytes > MIN_BLOCK_BYTES * divisions:
        step = 1 << (size_bytes.bit_length() - divisions.bit_length())
        return -(-size_bytes // step) * step
    return -(-size_bytes // MIN_BLOCK_BYTES) * MIN_BLOCK_BYTES


def segment_size(size_bytes: int) -> int:
    """What a rounded size that no cached block holds is asked of the driver as (get_allocation_size).  Bytes."""
    if size_bytes <= SMALL_BYTES:
        return SMALL_SEGMENT_BYTES
    if size_bytes < OWN_SEGMENT_BYTES:
        return LARGE_SEGMENT_BYTES
    return -(-size_bytes // SEGMENT_ROUNDING_BYTES) * SEGMENT_ROUNDING_BYTES
