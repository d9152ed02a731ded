"""Page-locked host memory of exact size.

torch's own allocator of pinned memory rounds every size up to a power of two and keeps what was freed: a home of 5 GiB
would take 8, for good.  So pages are mapped for each buffer alone and registered with CUDA, as they are
(``cudaHostRegister``); when the last tensor that looks into them is gone, they are given back to the system.  Pages of
its own are necessary: a page that two buffers share could be registered once only.
"""

from __future__ import annotations

import contextlib
import mmap
import threading

import torch

from ...shared.basics.errors import HardwareError
from ...shared.basics.units import format_bytes

_PORTABLE = 1
"""cudaHostRegisterPortable: pinned for all contexts of the process."""


class PinnedMemory:
    """Makes pinned buffers and counts what is alive."""

    def __init__(self) -> None:
        self.size_bytes = 0
        """Bytes of all buffers that are alive."""
        self._lock = threading.RLock()

    def count(self, more_bytes: int) -> None:
        """A buffer was pinned, or unpinned by whichever thread let go of it last."""
        with self._lock:
            self.size_bytes += more_bytes

    def buffer(self, size_bytes: int) -> torch.Tensor:
        """An uninitialised pinned buffer (uint8).  Raises HardwareError if the system does not lock so much memory.

        Nothing may still be copied from or to it when its last tensor goes.
        """
        if size_bytes == 0:
            return torch.empty(0, dtype=torch.uint8)
        pages = _PinnedPages(-1, size_bytes)
        if hasattr(mmap, "MADV_DONTFORK"):
            # A process that is forked meanwhile, for a data loader perhaps, would share the pages, and whichever of the
            # two writes first would go on with a copy that the device knows nothing of.
            pages.madvise(mmap.MADV_DONTFORK)
        buffer = torch.frombuffer(pages, dtype=torch.uint8)
        runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        code = int(runtime.cudaHostRegister(buffer.data_ptr(), size_bytes, _PORTABLE))
        if code != 0:
            raise HardwareError(
                f"{format_bytes(size_bytes)} of host memory could not be pinned (CUDA error {code}); "
                f"{format_bytes(self.size_bytes)} are pinned already. Raise the limit of locked memory (ulimit -l), "
                f"keep more chunks persistent (n_persist), or swap fewer blocks (n_swap)."
            )
        pages.pinned(buffer.data_ptr(), self)
        return buffer


class _PinnedPages(mmap.mmap):
    """Anonymous pages that are unpinned before they are unmapped."""

    _address = 0
    _owner: PinnedMemory | None = None

    def pinned(self, address: int, owner: PinnedMemory) -> None:
        """They are pinned from now on."""
        self._address, self._owner = address, owner
        owner.count(len(self))

    def __del__(self) -> None:
        owner, self._owner = self._owner, None
        if owner is not None:
            owner.count(-len(self))
            # At the end of the process CUDA may be gone before the last tensor is.
            with contextlib.suppress(Exception):
                runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
                runtime.cudaHostUnregister(self._address)
