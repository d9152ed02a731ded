"""What a kill between any two operations on files leaves of a bypass run is gone on with, and ends with the same bits.

A kill leaves files as they are: so a run is copied before each of its operations on files, and every copy that differs
from those before it is gone on with.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from pathlib import Path
from typing import Any, Final

import pytest
from safetensors.torch import load_file

from protwin.runtime.bypass.loop import HISTORY
from protwin.runtime.runs.run_folder import STATE
from protwin.shared.basics import documents
from protwin.shared.basics.errors import ProtwinError
from tests.proof_size import share
from tests.runtime.bypass.small_runs import LENGTH, SAMPLES, carry_out, run_of, save_teacher, settings_of
from tests.runtime.file_operations import before_every_operation

STEPS: Final = 6
"""Two periodic checkpoints, one validation in between."""
ONE_IN: Final = 30
"""Of the copies, those that are gone on with outside of a proof."""


def test_a_kill_between_any_two_operations_on_files_changes_nothing(tmp_path: Path) -> None:
    expected, copies = _copied_run(tmp_path)
    assert len(copies) > 40, "how many copies differ"
    for copy in share(copies, ONE_IN):
        _carry_out(copy, tmp_path)
        assert _outcome(copy) == expected, f"what {copy.name} ended with"
        assert not documents.unfinished_copies(copy)


def test_a_state_that_is_not_replaced_at_once_shows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of a file that was synced is among the copies, and is not gone on with."""

    def write_in_two(path: Path, content: bytes) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("wb") as stream:
            for part in (content[: len(content) // 2], content[len(content) // 2 :]):
                stream.write(part)
                stream.flush()
                os.fsync(stream.fileno())

    with monkeypatch.context() as patch:
        patch.setattr(documents, "_replace", write_in_two)
        _, copies = _copied_run(tmp_path)
    halves = [copy for copy in copies if _is_half(copy / STATE)]
    assert halves
    for copy in halves[:2]:
        with pytest.raises(ProtwinError, match=STATE):
            _carry_out(copy, tmp_path)


def _is_half(document: Path) -> bool:
    return document.exists() and not document.read_text().endswith("}\n")


def _copied_run(folder: Path) -> tuple[tuple[Any, str], list[Path]]:
    """What a run ends with, and copies of it before all operations on files, as far as they differ."""
    save_teacher(folder / "teacher")
    run = folder / "saved run"
    copies: dict[str, Path] = {}
    is_copying = False

    def copied(*_: Any) -> None:
        nonlocal is_copying
        if is_copying or not run.exists():
            return
        is_copying = True  # Copying is operations on files, too.
        digest = _digest(run)
        if digest not in copies:
            copies[digest] = folder / f"copy {len(copies)}"
            shutil.copytree(run, copies[digest])
        is_copying = False

    with before_every_operation(copied):
        _carry_out(run, folder)
    return _outcome(run), list(copies.values())


def _carry_out(run: Path, folder: Path) -> None:
    settings = settings_of(folder / "teacher", num_tokens=STEPS * 3 * SAMPLES * LENGTH)
    carry_out(run_of(run, folder / "teacher", settings))


def _outcome(run: Path) -> tuple[Any, str]:
    """Weights and history."""
    (model,) = run.glob("model-*")
    weights = {name: tensor.tolist() for name, tensor in load_file(model / "model.safetensors").items()}
    return weights, (run / HISTORY).read_text()


def _digest(folder: Path) -> str:
    """Of all names and contents."""
    found = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        found.update(f"{path.relative_to(folder)}\0".encode())
        found.update(hashlib.sha256(path.read_bytes() if path.is_file() else b"").digest())
    return found.hexdigest()
