"""One writer at a time for a checkpoint's folder.

[Note: A lock that nobody has to clear away]
The lock lies on a file beside the folder, and the system takes it off when its holder ends, however that happens.  The
file is removed while it is still locked.  So whoever gets the lock of a file that is no longer the one of this name got
it too late: another holder has removed that file, and perhaps a third has made a new one.  Then it is tried again.
"""

from __future__ import annotations

import errno
import fcntl
import os
import warnings
from contextlib import suppress
from pathlib import Path
from typing import Final

from ...shared.basics.errors import FileError

_NO_LOCKS: Final = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP)
"""What file systems say that keep no locks, as some of clusters do."""


class FolderLock:
    """Held from construction until ``release``, or until the process ends."""

    def __init__(self, path: Path) -> None:
        """Lock the folder ``path``, which need not exist.  Raises FileError if it is locked, and OSError.

        Warns where the file system keeps no locks: then nothing tells that somebody else writes too.
        """
        self._file = path.with_name(f".{path.name}.lock")
        self._handle: int | None = None
        while self._handle is None:
            self._handle = self._locked(path)

    def _locked(self, path: Path) -> int | None:
        """An open file that has the lock; None if it got the lock too late."""
        handle = os.open(self._file, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(handle), os.stat(self._file)):
                return handle
        except FileNotFoundError:
            pass
        except BlockingIOError:
            os.close(handle)
            raise FileError(
                f"{path} is being saved by somebody else at this moment: another process, or another training of this "
                f"one. Give every training a folder of its own."
            ) from None
        except OSError as error:
            if error.errno in _NO_LOCKS:
                warnings.warn(
                    f"the file system of {path} keeps no locks ({error.strerror}), so nothing will tell if two "
                    f"trainings save into this folder at once. See to it that each has one of its own.",
                    stacklevel=2,
                )
                return handle
            os.close(handle)
            raise
        os.close(handle)
        return None

    def release(self) -> None:
        """Let others have it.  Idempotent.  Raises OSError if the file cannot be removed, which harms nobody."""
        handle, self._handle = self._handle, None
        if handle is None:
            return
        try:
            os.unlink(self._file)
        finally:
            # Said aloud: a forked process has the same open file, and closing ours would leave the lock with it.
            with suppress(OSError):
                fcntl.flock(handle, fcntl.LOCK_UN)
            os.close(handle)
