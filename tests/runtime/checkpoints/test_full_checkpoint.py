"""A disk that fills up at any byte of a save: one message, and the checkpoint that was there."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest
import torch

from protwin.runtime.checkpoints.checkpoints import CheckpointContent, read_checkpoint, write_checkpoint
from protwin.shared.basics.errors import FileError
from tests.full_disk import largest_file
from tests.runtime.file_operations import loaded_step, save

WEIGHTS_BYTES = 4000
STATE_BYTES = 12_000


def large(step: int) -> CheckpointContent:
    """The state of the optimizer is the largest file, the weights the second."""
    weights, state = torch.zeros(WEIGHTS_BYTES // 4), torch.zeros(STATE_BYTES // 4)
    return CheckpointContent("hash", "Model", step, {"weight": weights}, {"state": state}, {"step": step}, "{}")


@pytest.mark.parametrize("limit_bytes", [0, 1, 2000, 4050, 5000, 12_500])
def test_the_system_stops_a_save_at_any_file(limit_bytes: int, tmp_path: Path) -> None:
    """Not by a fault that Python raises: the writers of safetensors and torch meet it in their own code."""
    folder = tmp_path / "saved"
    write_checkpoint(folder, large(1))
    with largest_file(limit_bytes), pytest.raises(FileError) as caught:
        write_checkpoint(folder, large(2))
    message = str(caught.value)
    assert str(folder) in message
    assert "File too large (15.62 KiB are needed" in message
    assert "Raise that limit (ulimit -f)" in message
    assert "as it was" in message
    assert read_checkpoint(folder).step == 1
    assert os.listdir(tmp_path) == ["saved"]


def test_new_folders_go_with_a_save_that_fails(tmp_path: Path) -> None:
    with largest_file(1), pytest.raises(FileError):
        save(1, tmp_path / "some" / "where" / "new")
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(("mask", "mode"), [(0o022, 0o644), (0o077, 0o600), (0o002, 0o664)])
def test_the_umask_decides_who_reads_a_checkpoint(mask: int, mode: int, tmp_path: Path) -> None:
    before = os.umask(mask)
    try:
        save(1, tmp_path / "saved")
    finally:
        os.umask(before)
    modes = {name: stat.S_IMODE((tmp_path / "saved" / name).stat().st_mode) for name in os.listdir(tmp_path / "saved")}
    assert set(modes.values()) == {mode}, modes


@pytest.mark.parametrize("folder", ["/", "//", "/..", "", ".", Path()])
def test_a_folder_that_cannot_be_replaced_is_refused(
    folder: str | Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FileError, match=r"Name a folder (of the checkpoint's own|in it)\."):
        save(1, folder)
    assert os.listdir(tmp_path) == []


def test_the_current_folder_is_read_like_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(1, tmp_path / "saved")
    monkeypatch.chdir(tmp_path / "saved")
    assert loaded_step(".") == loaded_step(Path()) == 1
