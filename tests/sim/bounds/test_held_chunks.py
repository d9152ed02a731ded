"""What gathered chunks are guaranteed to hold, beside slots that are assigned one by one."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from hypothesis import example, given
from hypothesis import strategies as st

from protwin.shared.layout.slots import assign_slots
from protwin.shared.schema.schedule import ChunkId
from protwin.sim.bounds.held_chunks import HeldChunks

Needed = list[list[ChunkId]]
_NUM_CHUNKS = 7
_SIZES = st.lists(st.integers(1, 9), min_size=_NUM_CHUNKS, max_size=_NUM_CHUNKS)
_STEPS = st.lists(
    st.lists(st.integers(0, _NUM_CHUNKS - 1).map(ChunkId), unique=True, max_size=3), min_size=1, max_size=12
)


def _assigned_bytes(needed: Needed, sizes: list[int], n_buffer: int) -> np.ndarray:
    """By step, the bytes of all stays that it lies in."""
    held = np.zeros(len(needed), dtype=np.int64)
    for stay in assign_slots(needed, n_buffer):
        held[stay.first_step : stay.last_step + 1] += sizes[stay.chunk]
    return held


def _least_bytes(needed: Needed, sizes: list[int], gathered: set[int], counts: range) -> np.ndarray:
    uses = np.array([(step, chunk) for step, chunks in enumerate(needed) for chunk in chunks], dtype=np.int64)
    step, chunk = uses.reshape(-1, 2).T
    bounds = HeldChunks(step, chunk, np.array(sizes), len(needed))
    return bounds.least_bytes(np.isin(np.arange(_NUM_CHUNKS), sorted(gathered)), np.array(counts))


@given(needed=_STEPS, sizes=_SIZES, gathered=st.sets(st.integers(0, _NUM_CHUNKS - 1)))
# Of three chunks with the same uses two stay, whichever; the bound must not count the largest.
@example(
    needed=[[ChunkId(0), ChunkId(1), ChunkId(2)], [ChunkId(3)], [ChunkId(0), ChunkId(1), ChunkId(2)]],
    sizes=[1, 9, 9, 1, 1, 1, 1],
    gathered={0, 1, 2, 3},
)
def test_assigned_slots_hold_no_less(needed: Needed, sizes: list[int], gathered: set[int]) -> None:
    """For every number of buffers that suffices."""
    left = [[chunk for chunk in chunks if chunk in gathered] for chunks in needed]
    counts = range(max(1, max(map(len, left))), _NUM_CHUNKS + 2)
    least = _least_bytes(needed, sizes, gathered, counts)
    for n_buffer, of_count in zip(counts, least, strict=True):
        assert (of_count <= _assigned_bytes(left, sizes, n_buffer)).all()


@given(sizes=_SIZES, at_turn=st.booleans())
def test_nested_uses_hold_no_more(sizes: list[int], at_turn: bool) -> None:
    """Of a forward and its backward, with one chunk a step, the bound is exact."""
    forward: Needed = [[ChunkId(chunk)] for chunk in range(_NUM_CHUNKS)]
    needed = [*forward, *([[]] if at_turn else []), *reversed(forward)]
    counts = range(1, _NUM_CHUNKS + 1)
    least = _least_bytes(needed, sizes, set(range(_NUM_CHUNKS)), counts)
    for n_buffer, of_count in zip(counts, least, strict=True):
        assert of_count.tolist() == _assigned_bytes(needed, sizes, n_buffer).tolist()
    assert all((one <= other).all() for one, other in pairwise(least)), "more buffers hold more"
