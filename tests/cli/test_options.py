"""Options that commands share."""

from __future__ import annotations

from pathlib import Path

import pytest

from protwin.shared.cli_options import cache_folder, changes_of, examples, writable
from protwin.shared.errors import FileError, ProtwinError


def test_changes_are_a_mapping() -> None:
    assert changes_of(None) == {}
    assert changes_of(["device.memory_bytes = 40GiB", "host=epyc=64"]) == {
        "device.memory_bytes": "40GiB",
        "host": "epyc=64",
    }


@pytest.mark.parametrize("assignment", ["", "=", "device", "device=", "=40GiB", " = "])
def test_what_is_no_assignment_is_refused(assignment: str) -> None:
    with pytest.raises(ProtwinError, match="is no assignment"):
        changes_of([assignment])


def test_writable_paths_pass(tmp_path: Path) -> None:
    assert writable(None) is None
    for path in (tmp_path / "new.json", tmp_path / "some" / "new" / "folder" / "new.json", Path("new.json")):
        assert writable(path) == path
    assert list(tmp_path.iterdir()) == [], "nothing is made before it is needed"


def test_paths_that_cannot_be_written_are_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(FileError, match="is a folder"):
        writable(tmp_path)
    with pytest.raises(FileError, match="is no folder"):
        writable(tmp_path / "file" / "new.json")


def test_the_cache_is_the_users_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "protwin" / "workloads"
    for ignored in ("", "relative/folder"):
        monkeypatch.setenv("XDG_CACHE_HOME", ignored)
        monkeypatch.setenv("HOME", str(tmp_path / "home"))
        assert cache_folder() == tmp_path / "home" / ".cache" / "protwin" / "workloads"


def test_examples_keep_their_lines() -> None:
    assert examples("protwin a") == "\b\nExample:\n  protwin a"
    assert examples("protwin a", "protwin b") == "\b\nExamples:\n  protwin a\n  protwin b"
