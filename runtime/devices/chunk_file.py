"""The file that chunks lie in: preallocated, locked, and read and written by explicit calls.

[Note: No mapped memory]
What is read from a mapped file arrives by page faults, and a disk that fails raises no error then: the system ends the
process with SIGBUS.  A call fails with a number that says why.  So training reads with ``preadv`` and writes with
``pwritev``.  Checkpoints alone map what they save, so that a state larger than the host's memory can be written, and
read all of it by calls before they do.

[Note: The page cache]
The system keeps what was read and written in memory that it takes back when others need it.  But chunks are on the disk
because the host has no memory for them, and what is read now is not read again before everything else was.  So pages
are given back behind every piece; those that were written are on the disk first (``fdatasync``).

[Note: A file that nobody has to clear away]
The file means nothing without the process that wrote it: a training goes on from a checkpoint.  Its lock ends with its
holder, however that ends, so whoever finds it without a lock writes over it.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

import torch

from ...shared.basics.disk_space import why_unwritable
from ...shared.basics.errors import FileError
from .device import TrainingDevice

NAME: Final = "protwin-chunks.bin"
_PIECE_BYTES: Final = 64 * 2**20
"""What is read or written before its pages are given back."""
_MOST_NOTED: Final = 4096
"""Calls whose time is kept."""
_NO_LOCKS: Final = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)


def check_folder(folder: str | Path) -> None:
    """Raise FileError unless ``folder`` is one."""
    path = Path(folder)
    if not path.is_dir():
        what = "is no folder" if path.exists() else "does not exist"
        raise FileError(f"{folder} {what}. Make a folder on a fast disk, and name it as disk folder.")


class ChunkFile:
    """A file of one size in a folder, for one training.  Errors of the disk are FileErrors that name the folder."""

    def __init__(self, folder: str | Path, size_bytes: int, device: TrainingDevice | None = None) -> None:
        """Take ``size_bytes`` of the disk, so that it cannot be full later.

        ``device`` says how fast a disk it emulates, if it does.  Raises FileError if the folder is missing, read-only
        or too full, or if another training uses it.
        """
        self.folder = Path(folder)
        self.size_bytes = size_bytes
        self.read_bytes = self.written_bytes = 0
        """Moved so far."""
        self._write_s = 0.0
        self.writes: list[tuple[int, float]] = []
        """Bytes and seconds of the first calls of ``write``."""
        self._device = device
        self._path = self.folder / NAME
        check_folder(folder)
        try:
            self._handle = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise FileError(why_unwritable(self.folder, error)) from error
        try:
            self._lock()
            # What a killed training has left may be longer.
            os.ftruncate(self._handle, size_bytes)
            os.posix_fallocate(self._handle, 0, max(1, size_bytes))
        except BaseException as error:
            if not isinstance(error, FileError):
                self._remove()
            os.close(self._handle)
            if isinstance(error, OSError):
                raise FileError(why_unwritable(self.folder, error, need_bytes=size_bytes)) from error
            raise

    def _lock(self) -> None:
        try:
            fcntl.flock(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise FileError(
                f"{self.folder} is used by another training at this moment, of this process or another one. Give every "
                f"training a disk folder of its own."
            ) from None
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            warnings.warn(
                f"the file system of {self.folder} keeps no locks ({error.strerror}), so nothing will tell if two "
                f"trainings use this folder at once. See to it that each has one of its own.",
                stacklevel=2,
            )

    # -- reading and writing -----------------------------------------------------------------------------------------

    def read(self, into: torch.Tensor, offset_bytes: int) -> None:
        """Fill a uint8 tensor of the host.  Raises FileError."""
        self.read_parts((into, offset_bytes))

    def read_parts(self, *parts: tuple[torch.Tensor, int]) -> None:
        """Fill uint8 tensors of the host, each from its offset, as one task of the disk.  Raises FileError."""
        start_s = time.perf_counter()
        for piece, at in (piece for into, offset_bytes in parts for piece in _pieces(into, offset_bytes)):
            view, done = piece.numpy().data, 0
            while done < len(view):
                try:
                    count = os.preadv(self._handle, [view[done:]], at + done)
                except OSError as error:
                    raise self._failed("read", error) from error
                if not count:
                    raise FileError(f"{self._path} ends early: somebody has shortened it. Go on from a checkpoint.")
                done += count
            self._give_pages_back(at, done)
            self.read_bytes += done
        if self._device is not None:
            self._device.pace_disk(start_s, sum(len(into) for into, _ in parts), is_write=False)

    def write(self, *parts: tuple[torch.Tensor, int]) -> None:
        """Write uint8 tensors of the host, each to its offset; they are on the disk then.  Raises FileError."""
        start_s = time.perf_counter()
        unsynced: list[tuple[int, int]] = []
        for piece, at in (piece for source, offset_bytes in parts for piece in _pieces(source, offset_bytes)):
            view, done = piece.numpy().data, 0
            try:
                while done < len(view):
                    done += os.pwritev(self._handle, [view[done:]], at + done)
            except OSError as error:
                raise self._failed("written", error) from error
            unsynced.append((at, done))
            if sum(size_bytes for _, size_bytes in unsynced) >= _PIECE_BYTES:
                self._sync(unsynced)
        self._sync(unsynced)
        size_bytes = sum(source.numel() for source, _ in parts)
        if self._device is not None:
            self._device.pace_disk(start_s, size_bytes, is_write=True)
        taken_s = time.perf_counter() - start_s
        self._write_s += taken_s
        if size_bytes and len(self.writes) < _MOST_NOTED:
            self.writes.append((size_bytes, taken_s))

    def _sync(self, written: list[tuple[int, int]]) -> None:
        """Have what was ``written`` on the disk, and give its pages back; empties the list."""
        if not written:
            return
        try:
            os.fdatasync(self._handle)
        except OSError as error:
            raise self._failed("written", error) from error
        for offset_bytes, size_bytes in written:
            self._give_pages_back(offset_bytes, size_bytes)
            self.written_bytes += size_bytes
        written.clear()

    def mapped(self, offset_bytes: int, size_bytes: int) -> mmap.mmap:
        """Memory that is read from the file when it is looked at, after all of it was read by calls.

        What is written to it is nobody else's; who uses it is done before the file is written again.  ``offset_bytes``
        is a multiple of a page, ``size_bytes`` positive.  Raises FileError.
        """
        scratch = torch.empty(min(size_bytes, _PIECE_BYTES), dtype=torch.uint8)
        for begin in range(0, size_bytes, _PIECE_BYTES):
            self.read(scratch[: min(_PIECE_BYTES, size_bytes - begin)], offset_bytes + begin)
        return mmap.mmap(self._handle, size_bytes, access=mmap.ACCESS_COPY, offset=offset_bytes)

    def _give_pages_back(self, offset_bytes: int, size_bytes: int) -> None:
        # A file system that knows no such advice keeps its pages.
        with suppress(OSError):
            os.posix_fadvise(self._handle, offset_bytes, size_bytes, os.POSIX_FADV_DONTNEED)

    def _failed(self, verb: str, error: OSError) -> FileError:
        return FileError(
            f"the disk of {self.folder} cannot be {verb} ({error.strerror}), so training ends. Check the disk, and go "
            f"on from the latest checkpoint with another disk folder."
        )

    # -- speed -------------------------------------------------------------------------------------------------------

    def measured_write_bytes_per_s(self) -> float:
        """Of all that was written so far; 0 if nothing was."""
        return self.written_bytes / self._write_s if self._write_s > 0 else 0.0

    def measured_reads(self, stretches: Sequence[tuple[int, int]], most_bytes: int) -> list[tuple[int, float]]:
        """Bytes and seconds of reading these stretches, (offset, bytes), one by one until ``most_bytes`` were read.

        Raises FileError.
        """
        found: list[tuple[int, float]] = []
        for offset_bytes, size_bytes in stretches:
            left_bytes = most_bytes - sum(done for done, _ in found)
            scratch = torch.empty(min(size_bytes, left_bytes), dtype=torch.uint8)
            if not len(scratch):
                break
            start_s = time.perf_counter()
            self.read(scratch, offset_bytes)
            found.append((len(scratch), time.perf_counter() - start_s))
        return found

    # -- ending ------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Give the disk's space back.  Idempotent."""
        if self._handle >= 0:
            self._remove()
            handle, self._handle = self._handle, -1
            os.close(handle)

    def _remove(self) -> None:
        with suppress(OSError):
            os.unlink(self._path)


def measured_disk_rates(
    folder: str | Path, size_bytes: int, device: TrainingDevice | None = None
) -> tuple[float, float]:
    """Bytes per second that a file of ``size_bytes`` in ``folder`` is read and written with.

    ``device`` says how fast a disk it emulates, if it does.  Raises FileError if the file cannot be written.
    """
    file = ChunkFile(folder, size_bytes, device)
    try:
        piece = torch.randint(0, 256, (min(size_bytes, _PIECE_BYTES),), dtype=torch.uint8)
        for begin in range(0, size_bytes, _PIECE_BYTES):
            file.write((piece[: min(_PIECE_BYTES, size_bytes - begin)], begin))
        [(read_bytes, read_s)] = file.measured_reads([(0, size_bytes)], size_bytes)  # nothing is in the page cache
        return read_bytes / max(1e-9, read_s), file.measured_write_bytes_per_s()
    finally:
        file.close()


def _pieces(tensor: torch.Tensor, offset_bytes: int) -> Iterator[tuple[torch.Tensor, int]]:
    """Stretches of a tensor with their places in the file."""
    for begin in range(0, len(tensor), _PIECE_BYTES):
        yield tensor[begin : begin + _PIECE_BYTES], offset_bytes + begin
