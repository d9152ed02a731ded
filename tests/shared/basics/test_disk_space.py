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
    message = why_unwritable(path, error, need_bytes=2**60)
    assert "(1048576 TiB are needed, " in message
    # Others write meanwhile, so that the figure is compared by its unit alone.
    assert format_bytes(found.f_bavail * found.f_frsize).split()[1] + " are free)" in message


@pytest.mark.parametrize(
    ("need_bytes", "free_bytes", "told"),
    [
        (155_238, 155_648, "(151.6 KiB and what the file system keeps beside them are needed, 152 KiB are free)"),
        (2**41, 2**41 - 4096, "(2,199,023,255,552 B are needed, 2,199,023,251,456 B are free)"),
        (155_649, 151_552, "(152 KiB are needed, 148 KiB are free)"),
    ],
)
def test_what_is_needed_and_what_is_free_do_not_contradict_each_other(
    need_bytes: int, free_bytes: int, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk can have more bytes free than a file has, once what was half written of it is gone."""
    found = list(os.statvfs(tmp_path))
    found[0:8] = [4096, 4096, free_bytes, free_bytes // 4096, free_bytes // 4096, 100, 100, 100]
    monkeypatch.setattr(os, "statvfs", lambda _: os.statvfs_result(found))
    message = why_unwritable(tmp_path / "plan.json", OSError(errno.ENOSPC, "No space left"), need_bytes=need_bytes)
    assert told in message


def test_quotas_and_other_errors_have_their_own_words(tmp_path: Path) -> None:
    quota = OSError(errno.EDQUOT, "Disk quota exceeded")
    assert is_full(quota)
    assert "your quota is used up" in why_unwritable(tmp_path, quota)
    for error in (OSError(errno.EACCES, "Permission denied"), ValueError("embedded null byte")):
        assert not is_full(error)
        assert why_unwritable("plan.json", error).startswith("plan.json cannot be written: ")
