"""A checkpoint is replaced as a whole, whatever happens at whatever moment."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from protwin.runtime.checkpoints.checkpoints import has_checkpoint
from protwin.shared.basics.errors import FileError
from tests.runtime import killed_saving, killed_training
from tests.runtime.file_operations import before_every_operation, loaded_step, save
from tests.runtime.killed_training import SUBJECTS
from tests.runtime.models import SEED, STEPS, cases, differences
from tests.runtime.ranks.processes import printed_by
from tests.runtime.resuming import mixed, start, train


@pytest.fixture(scope="module")
def kills(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """What ``killed_saving`` found."""
    said = printed_by(killed_saving.main, str(tmp_path_factory.mktemp("kills")))
    found: dict[str, list[dict[str, Any]]] = json.loads(said)
    return found


@pytest.mark.slow
def test_killed_before_any_operation_a_whole_checkpoint_loads(kills: dict[str, list[dict[str, Any]]]) -> None:
    found = kills["right"]
    operations = [kill["operation"] for kill in found]
    assert len(operations) > 20
    assert {"fsync", "mkdir", "open", "rename", "rmdir", "unlink"} < set(operations)
    loaded = [kill["loaded"] for kill in found]
    assert loaded == sorted(loaded, key=str)
    assert set(loaded) == {1, 2}
    # The earlier one as long as the new one is not in its place: the kill before the second rename still gives it.
    renames = [place for place, name in enumerate(operations) if name == "rename"]
    assert loaded.index(2) == renames[1] + 1
    assert operations[-1] is None
    assert all(kill["names"] == ["saved"] for kill in found)


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["in place", "removed first"])
def test_wrong_ways_lose_the_checkpoint(variant: str, kills: dict[str, list[dict[str, Any]]]) -> None:
    message = kills[variant][-1]["loaded"]
    assert isinstance(message, str)
    assert "damaged" in message or "no complete" in message or "not exist" in message


@pytest.mark.parametrize("is_lasting", [False, True])
def test_a_fault_of_any_operation_loses_nothing(is_lasting: bool, tmp_path: Path) -> None:
    """A full disk, for one operation or for good."""
    number = 0
    while True:
        number += 1
        folder = tmp_path / str(number) / "saved"
        save(1, folder)
        remaining = number

        def fail(name: str, _: tuple[Any, ...]) -> None:
            nonlocal remaining
            remaining -= 1
            if remaining == 0 or (is_lasting and remaining < 0):
                raise OSError(28, "No space left on device")

        error = None
        try:
            with before_every_operation(fail):
                save(2, folder)
        except FileError as found:
            error = str(found)
        expected = 2 if error is None or "is complete" in error else 1
        assert loaded_step(folder) == expected, error
        save(3, folder)
        assert loaded_step(folder) == 3
        assert os.listdir(folder.parent) == ["saved"]
        if remaining > 0:
            assert error is None
            break
        assert error is not None
        assert "No space left" in error
    assert number > 20


def test_a_save_that_fails_does_not_disturb_training(tmp_path: Path) -> None:
    case = cases()["gpt2 with dropout, tied"]
    model = case.build()
    losses = []

    def fail(name: str, _: tuple[Any, ...]) -> None:
        if name == "fsync":
            raise OSError(28, "No space left on device")

    with start(case, model, mixed(case.workload)) as training:
        torch.manual_seed(SEED)
        for step in range(STEPS):
            with before_every_operation(fail), pytest.raises(FileError, match="No space left"):
                training.save(tmp_path / "saved")
            losses += train(case, model, training, step, step + 1)
    assert losses == case.plain.losses
    assert differences(model, case.plain.weights[-1]) == []
    assert os.listdir(tmp_path) == []


def test_what_is_not_ours_is_not_replaced(tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "thesis.tex").write_text("years of work")
    with pytest.raises(FileError, match=r"holds thesis\.tex"):
        save(1, mine)
    (tmp_path / "file").write_text("")
    with pytest.raises(FileError, match="is a file"):
        save(1, tmp_path / "file")
    with pytest.raises(FileError, match="cannot be written"):
        save(1, tmp_path / "file" / "below")
    with pytest.raises(FileError, match="cannot be written"):
        save(1, tmp_path / ("long" * 100))
    save(1, tmp_path / "saved")
    (tmp_path / "saved" / "notes.txt").write_text("mine")
    with pytest.raises(FileError, match=r"holds notes\.txt"):
        save(2, tmp_path / "saved")
    assert (mine / "thesis.tex").read_text() == "years of work"
    assert sorted(os.listdir(tmp_path)) == ["file", "mine", "saved"]


def test_an_interrupted_swap_is_finished(tmp_path: Path) -> None:
    """Both places in which the two renames can leave the earlier folder, with and without an empty one in its place."""
    for name, is_empty, is_replaced in (("a", False, False), ("b", True, False), ("c", False, True)):
        folder, previous = tmp_path / name, tmp_path / f".{name}.previous"
        save(1, folder)
        folder.rename(previous)
        if is_empty:
            folder.mkdir()
        if is_replaced:
            (tmp_path / "new").mkdir()
            save(2, tmp_path / "new")
            (tmp_path / "new").rename(folder)
        assert has_checkpoint(folder)
        assert loaded_step(folder) == (2 if is_replaced else 1)
        save(3, folder)
        assert loaded_step(folder) == 3
        assert not previous.exists()
    assert not has_checkpoint(tmp_path / "nowhere")
    (tmp_path / "file").write_text("")
    with pytest.raises(FileError, match="is a file"):
        has_checkpoint(tmp_path / "file")


def test_empty_folders_links_and_new_folders_are_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "empty").mkdir()
    save(1, tmp_path / "empty")
    (tmp_path / "link").symlink_to(tmp_path / "empty")
    save(2, tmp_path / "link")
    assert loaded_step(tmp_path / "empty") == loaded_step(str(tmp_path / "link")) == 2
    assert (tmp_path / "link").is_symlink()
    save(3, tmp_path / "some" / "where" / "new")
    monkeypatch.chdir(tmp_path / "some")
    save(4, "where/new")
    assert loaded_step(tmp_path / "some" / "where" / "new") == 4


@pytest.mark.slow
def test_trainings_killed_at_random_moments_resume_and_end_equal(tmp_path: Path) -> None:
    for seed in "01234":
        ends = json.loads(printed_by(killed_training.main, str(tmp_path / seed), "6", seed))
        assert [end["code"] for end in ends].count(-9) >= 6
        assert ends[-1]["code"] == 0
        assert {end["subject"] for end in ends} == {subject.case for subject in SUBJECTS[:2]}
        # On a machine that has become busier since the first run, all may be killed before their first step.
        if any(end["from"] not in (None, 0) for end in ends):
            return
    raise AssertionError("none were resumed on their way")
