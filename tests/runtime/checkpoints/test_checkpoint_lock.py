"""Two that save into one folder at the same time: one of them is refused, and what is there stays whole."""

from __future__ import annotations

import errno
import fcntl
import os
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from protwin.runtime.checkpoints import folder as checkpoint_folder
from protwin.runtime.checkpoints.folder import FolderLock
from protwin.shared.basics.errors import FileError
from tests.runtime.file_operations import before_every_operation, loaded_step, save

BEING_SAVED = "is being saved by somebody else"


class NoLock:
    """A wrong variant: everybody may write."""

    def __init__(self, path: Path) -> None:
        pass

    def release(self) -> None:
        pass


def interleaved(folder: Path, number: int) -> tuple[bool, str, str]:
    """Save step 2, and before operation ``number`` of that step 3 from the start to the end.

    Says whether there was such an operation, and with what errors the two ended.
    """
    save(1, folder)
    remaining, errors = number, ["", ""]

    def save_meanwhile(name: str, _: tuple[Any, ...]) -> None:
        nonlocal remaining
        remaining -= 1
        if remaining == 0:
            try:
                save(3, folder)
            except FileError as error:
                errors[1] = str(error)

    try:
        with before_every_operation(save_meanwhile):
            save(2, folder)
    except FileError as error:
        errors[0] = str(error)
    return remaining <= 0, errors[0], errors[1]


def test_a_second_save_at_any_moment_of_the_first_is_refused(tmp_path: Path) -> None:
    number, refused = 0, 0
    while True:
        number += 1
        folder = tmp_path / str(number) / "saved"
        has_happened, first, second = interleaved(folder, number)
        assert first == ""
        assert BEING_SAVED in second or second == ""
        # The last one that was let through counts: the first one, unless the second came before or after it all.
        assert loaded_step(folder) == 2
        assert os.listdir(folder.parent) == ["saved"]
        refused += second != ""
        if not has_happened:
            break
    assert refused > 20


def test_without_the_lock_the_first_save_breaks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint_folder, "FolderLock", NoLock)
    outcomes = set()
    for number in (1, 5, 10, 15, 20):
        folder = tmp_path / str(number) / "saved"
        has_happened, first, _ = interleaved(folder, number)
        if not has_happened:
            break
        loaded: int | None = None
        with suppress(FileError):
            loaded = loaded_step(folder)
        outcomes.add((first != "", loaded))
    assert any(is_broken or loaded is None for is_broken, loaded in outcomes)


def test_trainings_that_save_as_fast_as_they_can(tmp_path: Path) -> None:
    """Threads stand for processes: the lock is that of an open file, of which every save has its own."""
    saved: list[int] = []
    errors: list[str] = []

    def hammer(step: int) -> None:
        while saved.count(step) < 4:
            try:
                save(step, tmp_path / "saved")
                saved.append(step)
            except FileError as error:
                errors.append(str(error))
                # Whoever is refused waits for no lock: it asks again, as the next save of a loop does.
                time.sleep(0.001)
                if BEING_SAVED not in errors[-1]:
                    break

    threads = [threading.Thread(target=hammer, args=(step,)) for step in (1, 2, 3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [error for error in errors if BEING_SAVED not in error] == []
    assert sorted(saved) == [1] * 4 + [2] * 4 + [3] * 4
    assert loaded_step(tmp_path / "saved") in saved
    assert os.listdir(tmp_path) == ["saved"]


HOLDER = """
import pathlib, signal, sys
from protwin.runtime.checkpoints.folder import FolderLock
lock = FolderLock(pathlib.Path(sys.argv[1]))
print("held", flush=True)
signal.pause()
"""


def test_a_lock_goes_with_its_holder(tmp_path: Path) -> None:
    """Killed while it saves: the next one neither waits nor clears anything away by hand."""
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path / "saved")], stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(FileError, match=BEING_SAVED):
            save(1, tmp_path / "saved")
        holder.kill()
    assert os.listdir(tmp_path) == [".saved.lock"]
    save(2, tmp_path / "saved")
    assert loaded_step(tmp_path / "saved") == 2
    assert os.listdir(tmp_path) == ["saved"]


def test_a_lock_keeps_one_at_a_time(tmp_path: Path) -> None:
    """Many threads that take and release it: two never have it at once, though its file comes and goes."""
    inside, most, taken = 0, 0, 0
    guard = threading.Lock()

    def take() -> None:
        nonlocal inside, most, taken
        for _ in range(200):
            try:
                lock = FolderLock(tmp_path / "saved")
            except FileError:
                continue
            with guard:
                inside += 1
                most, taken = max(most, inside), taken + 1
            with guard:
                inside -= 1
            lock.release()
            lock.release()

    threads = [threading.Thread(target=take) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == 1
    assert taken > 100
    assert os.listdir(tmp_path) == []


def test_a_folder_beside_it_is_not_locked(tmp_path: Path) -> None:
    lock = FolderLock(tmp_path / "a")
    save(1, tmp_path / "b")
    lock.release()
    assert loaded_step(tmp_path / "b") == 1


def test_where_there_are_no_locks_a_save_warns_and_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    with monkeypatch.context() as patch:
        patch.setattr(fcntl, "flock", refuse)
        with pytest.warns(UserWarning, match="keeps no locks"):
            save(1, tmp_path / "saved")
    assert loaded_step(tmp_path / "saved") == 1
    assert os.listdir(tmp_path) == ["saved"]

    def fail(*_: Any) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(fcntl, "flock", fail)
    with pytest.raises(FileError, match="Input/output error"):
        save(2, tmp_path / "saved")
    assert loaded_step(tmp_path / "saved") == 1
