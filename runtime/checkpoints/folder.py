"""Replacing a folder of files as a whole, so that being killed at any moment costs at most the new one.

[Note: Swapping folders]
A folder cannot be replaced by one rename while it has content, so two are needed.  The new content is written and
synced beside it as ``.NAME.part``; then NAME becomes ``.NAME.previous``, the part becomes NAME, and the previous one is
removed.  So ``.NAME.previous`` matters only while there is no NAME: then it is what a reader gets, and the next writer
puts it back first.  A part is never read.  Whatever is removed loses its manifest first, by which it is recognised as
incomplete if its removal is interrupted.  All of this holds for one writer at a time, which ``FolderLock`` sees to.

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
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from ...shared.basics.disk_space import why_unwritable
from ...shared.basics.errors import FileError


def find_folder(folder: str | Path) -> Path | None:
    """Where the content of ``folder`` is now (Note: Swapping folders), None if there is none.

    Raises FileError if ``folder`` is no folder, or cannot be looked into.
    """
    path = _resolved(folder)
    try:
        if path.exists() and not path.is_dir():
            raise FileError(f"{folder} is a file, expected a folder. Name the folder that was given to save().")
        for place in (path, _previous(path)):
            if place.is_dir() and os.listdir(place):
                return place
    except OSError as error:
        raise FileError(f"{folder} cannot be read: {error}.") from error
    return None


@contextmanager
def replaced_folder(
    folder: str | Path, *, manifest: str, known: Collection[str], need_bytes: int | None = None
) -> Iterator[Path]:
    """An empty folder to write into, which becomes ``folder`` when the block ends; the block syncs its files.

    ``known`` are the names that ``folder`` may hold already, ``manifest`` the one that says it is complete,
    ``need_bytes`` about the size of the new content, for messages.  If the block raises, or anything cannot be written,
    ``folder`` is what it was.  Raises FileError, also if ``folder`` holds anything that would be lost, or if somebody
    else is writing it.
    """
    path = _resolved(folder)
    made = [above for above in path.parents if not above.exists()]
    try:
        with _locked(path, need_bytes) as lock, _replaced(path, lock, manifest, known, need_bytes) as part:
            yield part
    except BaseException:
        with suppress(OSError):
            for above in made:
                above.rmdir()
        raise


@contextmanager
def _locked(path: Path, need_bytes: int | None) -> Iterator[FolderLock]:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = FolderLock(path)
    except OSError as error:
        raise _unwritable(path, error, need_bytes) from error
    try:
        yield lock
    finally:
        with suppress(OSError):
            lock.release()


@contextmanager
def _replaced(
    path: Path, lock: FolderLock, manifest: str, known: Collection[str], need_bytes: int | None
) -> Iterator[Path]:
    part = path.with_name(f".{path.name}.part")
    try:
        _finish_swap(path, manifest)
        _check_replaceable(path, manifest, known)
        _remove(part, manifest)
        os.mkdir(part)
    except OSError as error:
        raise _unwritable(path, error, need_bytes) from error
    try:
        yield part
        sync_folder(part)
        _swap(path, part)
    except BaseException as error:
        with suppress(OSError):
            _remove(part, manifest)
        if isinstance(error, OSError):
            raise _unwritable(path, error, need_bytes) from error
        raise
    try:
        sync_folder(path.parent)
        _remove(_previous(path), manifest)
        lock.release()
    except OSError as error:
        raise FileError(
            f"{path} is complete, but tidying up after it failed: {error}. Remove {_previous(path)} if it is there."
        ) from error


def remove_folder(folder: str | Path, *, manifest: str) -> None:
    """Remove a folder that ``replaced_folder`` has written, so that a kill leaves it whole or recognised as incomplete.

    Nothing happens if there is none.  Raises FileError if it cannot be removed, or if somebody else is writing it.
    """
    path = _resolved(folder)
    try:
        if not path.exists() and not _previous(path).exists():
            return
        with _locked(path, None):
            # The one before first: once the other is gone, it would count as the content.
            _remove(_previous(path), manifest)
            _remove(path, manifest)
            sync_folder(path.parent)
    except OSError as error:
        raise FileError(f"{path} cannot be removed: {error.strerror}.") from error


def sync_folder(path: Path) -> None:
    """Have the names in a folder written to the disk.  Raises OSError."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _resolved(folder: str | Path) -> Path:
    try:
        path = Path(folder).resolve()
    except (OSError, RuntimeError, ValueError) as error:
        raise FileError(f"{folder!r} is no path: {error}. Name a folder.") from error
    if not path.name or not os.fspath(folder):
        named = "is the root of all folders" if not path.name else "is empty"
        raise FileError(f"{os.fspath(folder)!r} {named}. Name a folder of the checkpoint's own.")
    return path


def _previous(path: Path) -> Path:
    return path.with_name(f".{path.name}.previous")


def _unwritable(path: Path, error: OSError, need_bytes: int | None) -> FileError:
    return FileError(f"{why_unwritable(path, error, need_bytes=need_bytes)} What was there before is as it was.")


def _finish_swap(path: Path, manifest: str) -> None:
    previous = _previous(path)
    if not previous.exists():
        return
    if not path.exists() or (path.is_dir() and not os.listdir(path)):
        os.rename(previous, path)
    else:
        _remove(previous, manifest)


def _check_replaceable(path: Path, manifest: str, known: Collection[str]) -> None:
    """Raise FileError unless ``path`` is missing, empty, or holds what an earlier save left and nothing else."""
    if not path.exists():
        return
    if not path.is_dir():
        raise FileError(f"{path} is a file. Name a folder of its own for the checkpoint.")
    if path.samefile(os.curdir):
        # Once it is replaced, no relative path of this process means anything.
        raise FileError(f"{path} is the current folder, which a save would replace. Name a folder in it.")
    names = sorted(os.listdir(path))
    foreign = [name for name in names if name not in known]
    if foreign or (names and manifest not in names):
        what = foreign[0] if foreign else names[0]
        raise FileError(
            f"{path} holds {what}, which is not part of a checkpoint and would be lost. Move it away, or name another "
            f"folder."
        )


def _swap(path: Path, part: Path) -> None:
    previous = _previous(path)
    is_replacing = path.exists()
    if is_replacing:
        os.rename(path, previous)
    try:
        os.rename(part, path)
    except BaseException:
        if is_replacing:
            os.rename(previous, path)
        raise


def _remove(path: Path, manifest: str) -> None:
    """Remove a flat folder that is ours, its manifest first.  Nothing happens if there is none."""
    if not path.is_dir():
        return
    names = os.listdir(path)
    for name in sorted(names, key=lambda name: name != manifest):
        os.unlink(path / name)
    os.rmdir(path)


# -- one writer at a time --------------------------------------------------------------------------------------------

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
