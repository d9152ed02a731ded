"""The compiled allocator, which plays the requests of a program.  What it does says ``sim/memory/allocator.py``."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from ctypes import byref
from typing import Final

import numpy as np

from .library import Allocated, library

_NO_LIMIT: Final = -1
_DONE, _OUT_OF_MEMORY, _, _DEVICE_FULL = range(4)


class DeviceFullError(Exception):
    """The modelled device has no room for a segment, whatever is given back."""


class CompiledAllocator:
    """One device's allocator."""

    def __init__(self, limit_bytes: int | None = None, *, expandable_segments: bool = False) -> None:
        """``limit_bytes``: the most that the driver hands out; None for a device without end."""
        loaded = library()
        assert loaded is not None, "callers ask is_available first"
        assert limit_bytes is None or limit_bytes >= 0, "a device has no less than nothing"
        self._loaded = loaded
        limit = _NO_LIMIT if limit_bytes is None else limit_bytes
        self._allocator: int | None = loaded.protwin_allocator_new(limit, expandable_segments)
        if not self._allocator:
            raise MemoryError("the compiled allocator found no memory")
        weakref.finalize(self, loaded.protwin_allocator_free, self._allocator)
        self.level = Allocated()
        """What it holds, and has held."""

    def play(self, requests: Sequence[int]) -> Allocated:
        """Carry ``requests`` out: bytes of a tensor that is made, or, negative, how many ago the one was that is freed.

        Raises DeviceFullError.
        """
        numbers = np.ascontiguousarray(requests, dtype=np.int64)
        status = self._loaded.protwin_allocator_play(
            self._allocator, len(numbers), numbers.ctypes.data, byref(self.level)
        )
        if status == _OUT_OF_MEMORY:
            raise MemoryError("the compiled allocator found no memory")
        if status == _DEVICE_FULL:
            raise DeviceFullError
        assert status == _DONE, "tensors are made before they are freed, and of some size"
        return self.level
