"""A place that takes no more bytes: the message that says how many are needed, how many are free, and what helps."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Final

_FULL: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def is_full(error: BaseException | None) -> bool:
    """Whether the system refused to write because the place takes no more: disk, quota or largest file."""
    return isinstance(error, OSError) and error.errno in _FULL


def why_unwritable(path: str | Path, error: Exception, *, need_bytes: int | None = None) -> str:
    """Why ``path`` cannot be written, in one sentence, and what to do if its disk takes no more.

    ``need_bytes`` is the size of what was to be written, where it is known.  Names no file but ``path``.
    """
    reason = (isinstance(error, OSError) and error.strerror) or str(error)
    if not isinstance(error, OSError) or not is_full(error):
        return f"{path} cannot be written: {reason}."
    told, remedy = _bound(path, error.errno, need_bytes)
    return f"{path} cannot be written: {reason}{f' ({told})' if told else ''}. {remedy}"


def _bound(path: str | Path, number: int | None, need_bytes: int | None) -> tuple[str, str]:
    """What is needed and what the place takes at most, in words, and what to do."""
    needed = "" if need_bytes is None else f"{_size(need_bytes)} are needed"
    if number == errno.EFBIG:
        import resource

        largest, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
        if largest != resource.RLIM_INFINITY:
            allowed = "this process may write files of {} at most"
            return _beside(need_bytes, largest, allowed), "Raise that limit (ulimit -f)."
        return needed, "Name a place whose file system takes larger files."
    joint = ", " if needed else ""
    if number == errno.EDQUOT:
        return f"{needed}{joint}your quota is used up", "Free some space, or name another place."
    free = _free(path)
    if free is None:
        return needed, "Free some space, or name another place."
    free_bytes, free_files = free
    if free_files == 0:
        told = f"{needed}{joint}the file system takes no more files"
        return told, "Remove some files there, or name another place."
    if need_bytes is not None and need_bytes <= free_bytes:
        # What was half written is gone again, files take whole blocks, and others write too.
        told = (
            f"{_size(need_bytes)} and what the file system keeps beside them are needed, {_size(free_bytes)} are free"
        )
        return told, "Free some space, or name another place."
    return _beside(need_bytes, free_bytes, "{} are free"), "Free some space, or name another place."


def _beside(need_bytes: int | None, bound_bytes: int, bound: str) -> str:
    """Both sizes, to the byte where they would read alike."""
    need, most = "" if need_bytes is None else _size(need_bytes), _size(bound_bytes)
    if need_bytes is not None and need == most:
        need, most = f"{need_bytes:,} B", f"{bound_bytes:,} B"
    return ", ".join([*([f"{need} are needed"] if need else []), bound.format(most)])


def _free(path: str | Path) -> tuple[int, int | None] | None:
    """Bytes and files that a user may still add where ``path`` is; None if it lies on no disk (``/dev/full``).

    Some file systems count no files: then None for them.
    """
    named = Path(os.path.realpath(path))
    try:
        place = next(place for place in (named, *named.parents) if place.exists())
        if not (place.is_file() or place.is_dir()):
            return None
        found = os.statvfs(place)
    except OSError:
        return None
    return found.f_bavail * found.f_frsize, found.f_favail if found.f_files else None


def _size(size_bytes: int) -> str:
    from .units import format_bytes

    return format_bytes(size_bytes)
