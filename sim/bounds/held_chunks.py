"""Device bytes that gathered chunks are guaranteed to hold, for every number of buffers at once.

Of the chunks that a step does not use, the one with the farthest next use makes room (``shared/layout/slots.py``).  So
a chunk stays from one use to the next if, at every step in between, there are buffers for the step's own chunks and for
all chunks whose next use comes no later.  This says it without assigning slots; where uses nest, as those of a forward
and its backward, nothing else stays.  Of chunks that are used together before and after, any may go: so many stay, and
the smallest count.
"""

from __future__ import annotations

import numpy as np

from ..space.space import BoolArray, IntArray


class HeldChunks:
    """What the steps of one micro-batch hold.

    Shapes: C chunks, T steps, U uses, I pauses between two uses of a chunk, of which I' belong to gathered chunks.
    """

    def __init__(self, step: IntArray, chunk: IntArray, size_bytes: IntArray, num_steps: int) -> None:
        """``step``, ``chunk``: (U,) of all uses.  ``size_bytes``: (C,)."""
        self._num_steps = num_steps
        self._size_bytes = size_bytes
        order = np.lexsort((step, chunk))
        self._use_step, self._use_chunk = step[order], chunk[order]
        """(U,) chunk by chunk, steps ascending."""
        pauses = np.flatnonzero(self._use_chunk[1:] == self._use_chunk[:-1])
        begin, end = self._use_step[pauses], self._use_step[pauses + 1]
        order = np.lexsort((self._size_bytes[self._use_chunk[pauses]], begin, end))
        self._pause_chunk = self._use_chunk[pauses[order]]
        """(I,) those that end first come first; of those with the same uses, the smallest."""
        self._begin, self._end = begin[order], end[order]
        """(I,) the use before and the next one."""
        steps = np.arange(num_steps)
        self._is_paused = (self._begin[:, None] < steps) & (steps < self._end[:, None])
        """(I, T)"""

    def least_bytes(self, is_gathered: BoolArray, n_buffer: IntArray) -> IntArray:
        """(R, T) bytes on the device during each step, no fewer for each of ``n_buffer``, (R,).

        ``is_gathered``: (C,).
        """
        step, chunk = (of[is_gathered[self._use_chunk]] for of in (self._use_step, self._use_chunk))
        num_needed = np.bincount(step, minlength=self._num_steps)
        needed_bytes = np.zeros(self._num_steps, dtype=np.int64)
        np.add.at(needed_bytes, step, self._size_bytes[chunk])
        pauses = np.flatnonzero(is_gathered[self._pause_chunk])
        is_paused, begin, end = self._is_paused[pauses], self._begin[pauses], self._end[pauses]
        # Where ends tie, any of the chunks may go: all of them count, but for larger ones with the same uses.
        no_later = is_paused.cumsum(axis=0)[np.searchsorted(end, end, side="right") - 1]
        both = end * self._num_steps + begin
        no_larger = np.arange(len(pauses)) - (np.searchsorted(both, both, side="right") - 1)
        enough = np.where(is_paused, no_later + no_larger[:, None] + num_needed, 0).max(axis=1, initial=0)
        """(I',) buffers with which the chunk stays."""
        order = np.argsort(enough)
        sizes = self._size_bytes[self._pause_chunk[pauses]][order, None] * is_paused[order]
        staying_bytes = np.zeros((len(pauses) + 1, self._num_steps), dtype=np.int64)
        sizes.cumsum(axis=0, out=staying_bytes[1:])
        num_staying = np.searchsorted(enough[order], n_buffer, side="right")
        held: IntArray = needed_bytes + staying_bytes[num_staying]
        return held
