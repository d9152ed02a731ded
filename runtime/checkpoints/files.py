"""Single files of a checkpoint, synced when they are written, and read without running code."""

from __future__ import annotations

import io
import os
import pickle
import re
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import safetensors
import torch
from safetensors.torch import save_file

from ...shared.basics.errors import FileError
from .manifest import damaged


def pack(path: Path, content: Mapping[str, Any], what: str) -> None:
    """Write torch's file format.

    Raises OSError, and FileError, which calls the content ``what``, if ``weights_only`` would not read it back.
    """
    with _refusing_unsafe(what):
        with path.open("wb") as stream:
            save_to(stream, dict(content))
            sync(stream)
        # Mapped, so that this reads no tensors.
        torch.load(path, map_location="cpu", weights_only=True, mmap=True)


def packed_in(content: Any, what: str) -> io.BytesIO:
    """The same in memory, for what is small.  Raises FileError as ``pack`` does."""
    stream = io.BytesIO()
    with _refusing_unsafe(what):
        save_to(stream, content)
        stream.seek(0)
        torch.load(stream, map_location="cpu", weights_only=True)
    return stream


def save_to(stream: IO[bytes], content: Any) -> None:
    """``torch.save``, whose errors of files are OSError."""
    try:
        torch.save(content, stream)
    except RuntimeError as error:
        # torch's writer complains of its position when it is cleared away after the stream's own error.
        if isinstance(error.__context__, OSError):
            raise error.__context__ from None
        raise


@contextmanager
def _refusing_unsafe(what: str) -> Iterator[None]:
    try:
        yield
    except (pickle.PicklingError, pickle.UnpicklingError, TypeError, AttributeError) as error:
        reason = str(error).strip().splitlines()[0]
        raise FileError(
            f"{what} cannot be saved so that it is safe to read back: {reason}. Give numbers, text, lists, tables and "
            f"tensors alone."
        ) from error


def unpacked(path: Path, *, is_mapped: bool) -> dict[str, Any]:
    """Read torch's file format; ``is_mapped`` leaves tensors on the disk until they are looked at.

    Raises FileError if it is damaged.
    """
    try:
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=is_mapped)
    except (pickle.UnpicklingError, RuntimeError, EOFError) as error:
        raise damaged(path, f"torch cannot read it ({str(error).strip().splitlines()[0]})") from error
    if not isinstance(content, dict):
        raise damaged(path, f"it holds a {type(content).__name__}")
    return content


def write(path: Path, content: bytes) -> None:
    """Raises OSError."""
    with path.open("wb") as stream:
        stream.write(content)
        sync(stream)


def write_weights(path: Path, weights: Mapping[str, torch.Tensor]) -> None:
    """Write a file of safetensors.  Raises OSError."""
    with path.open("wb") as stream:
        mode = stat.S_IMODE(os.fstat(stream.fileno()).st_mode)
    try:
        # transformers refuses a file that does not name its framework.
        save_file(dict(weights), path, metadata={"format": "pt"})
    except safetensors.SafetensorError as error:
        raise _system_error(error) or error from error
    # safetensors puts a file of its own in the place, which nobody else may read.
    path.chmod(mode)
    with path.open("rb+") as stream:
        sync(stream)


def _system_error(error: safetensors.SafetensorError) -> OSError | None:
    """The system's error that safetensors tells of in words alone; None if it tells of none."""
    found = re.search(r"\(os error (\d+)\)", str(error))
    return OSError(int(found[1]), os.strerror(int(found[1]))) if found is not None else None


def sync(stream: IO[bytes]) -> None:
    """Have what was written reach the disk.  Raises OSError."""
    stream.flush()
    os.fsync(stream.fileno())
