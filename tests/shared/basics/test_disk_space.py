"""What is said, and what is left, where a place takes no more."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from protwin.shared.basics.disk_space import is_full, why_unwritable
from protwin.shared.basics.documents import write_atomically
from protwin.shared.basics.errors import FileError
from protwin.shared.basics.units import format_bytes
from tests.full_disk import largest_file


@pytest.mark.parametrize("limit_bytes", [0, 7, 9999])
def test_a_file_too_large_is_told_with_its_bound(limit_bytes: int, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text("old")
    with largest_file(limit_bytes), pytest.raises(FileError) as caught:
        write_atomically(path, b"x" * 10_000)
    assert str(caught.value) == (
        f"{path} cannot be written: File too large (9.766 KiB are needed, this process may write files of "
        f"{format_bytes(limit_bytes)} at most). Raise that limit (ulimit -f)."
    )
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["plan.json"]


def test_folders_that_were_made_for_a_file_go_with_it(tmp_path: Path) -> None:
    with largest_file(1), pytest.raises(FileError):
        write_atomically(tmp_path / "some" / "where" / "plan.json", "text")
    assert os.listdir(tmp_path) == []


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
def test_a_device_that_is_full_has_nothing_free_to_tell() -> None:
    with pytest.raises(FileError) as caught:
        write_atomically("/dev/full", "text")
    told = "/dev/full cannot be written: No space left on device (4 B are needed). Free some space, or name another"
    assert str(caught.value).startswith(told)


@pytest.mark.parametrize("depth", [0, 1, 3])
def test_what_is_free_is_what_the_system_says(depth: int, tmp_path: Path) -> None:
    """Of the nearest folder that is there."""
    path = tmp_path.joinpath(*["new"] * depth, "plan.json")
    error = OSError(errno.ENOSPC, "No space left on device")
    found = os.statvfs(tmp_path)
    message = why_unwritable(path, error, need_bytes=3 * 2**20)
    assert "(3 MiB are needed, " in message
    # Others write meanwhile, so that the figure is compared by its unit alone.
    assert format_bytes(found.f_bavail * found.f_frsize).split()[1] + " are free)" in message


def test_quotas_and_other_errors_have_their_own_words(tmp_path: Path) -> None:
    quota = OSError(errno.EDQUOT, "Disk quota exceeded")
    assert is_full(quota)
    assert "your quota is used up" in why_unwritable(tmp_path, quota)
    for error in (OSError(errno.EACCES, "Permission denied"), ValueError("embedded null byte")):
        assert not is_full(error)
        assert why_unwritable("plan.json", error).startswith("plan.json cannot be written: ")
