"""Folders of runs: whose they are, which checkpoint wins, and when they are complete."""

from __future__ import annotations

import json
import math
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from protwin.runtime.checkpoints.manifest import MANIFEST
from protwin.runtime.runs.run_folder import CheckpointRole, RunFolder, finished_model, read_state
from protwin.shared.basics.errors import FileError

from .settings import LLAMA, settings, student

PERIODIC, BEST, FINAL = CheckpointRole.PERIODIC, CheckpointRole.BEST, CheckpointRole.FINAL


def save(folder: RunFolder, step: int, role: CheckpointRole, *, is_whole: bool = True) -> Path:
    """What a checkpoint looks like to a run."""
    path = folder.checkpoint_path(step, role)
    path.mkdir()
    for name in ("model.safetensors", "optimizer.pt", *([MANIFEST] if is_whole else [])):
        (path / name).write_text("{}")
    return path


def save_model(folder: RunFolder) -> None:
    folder.model_path.mkdir()
    (folder.model_path / "config.json").write_text("{}")


def content(path: Path) -> dict[str, str]:
    return {str(one.relative_to(path)): one.read_text() for one in path.rglob("*") if one.is_file()}


def test_a_run_goes_on_in_its_folder(tmp_path: Path) -> None:
    folder = RunFolder.begin(tmp_path / "run", settings())
    assert folder.newest is None
    save(folder, 3, PERIODIC)
    again = RunFolder.begin(tmp_path / "run", settings(save_every=7))
    assert again.newest is not None
    assert again.newest.step == 3
    assert again.newest.num_batches(settings()) == 9, "micro-batches of completed steps, whatever its role"


def test_what_a_folder_says_of_itself_is_read_back_whatever_the_teacher_is(tmp_path: Path) -> None:
    """Configurations hold infinities and tuples."""
    asked = settings(teacher_configuration=LLAMA | {"time_step_limit": (0.0, math.inf)}, student=student())
    RunFolder.begin(tmp_path, asked)
    found = read_state(tmp_path)
    assert found is not None
    assert found.settings == asked
    assert found.fingerprint == asked.fingerprint


@pytest.mark.parametrize("order", [(4, BEST, 6, PERIODIC), (6, FINAL, 8, PERIODIC), (8, BEST, 6, FINAL)])
def test_the_newest_whole_checkpoint_wins_whatever_its_role(tmp_path: Path, order: tuple[Any, ...]) -> None:
    folder = RunFolder.begin(tmp_path, settings(num_tokens=960))
    first, role, second, other = order
    save(folder, first, role)
    save(folder, second, other)
    save(folder, 9, PERIODIC, is_whole=False)
    (tmp_path / ".step-00000010-periodic.part").mkdir()
    assert folder.newest is not None
    assert folder.newest.step == max(first, second)
    # Killed while it was replaced: it lies under the name of the one before, and is whole.
    path = folder.newest.path
    path.rename(path.with_name(f".{path.name}.previous"))
    assert folder.newest is not None
    assert folder.newest.path == path


def test_what_is_superseded_goes_and_a_kill_while_it_goes_leaves_the_newest_and_the_best(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = RunFolder.begin(tmp_path / "whole", settings(num_tokens=960))
    for step, role in ((2, BEST), (4, PERIODIC), (5, BEST), (6, FINAL), (8, PERIODIC)):
        save(whole, step, role)
    unlink, num_calls = os.unlink, 0

    def killed(path: Any, *args: Any, **options: Any) -> None:
        nonlocal left
        if left == 0:
            raise KeyboardInterrupt
        left -= 1
        unlink(path, *args, **options)

    while True:
        place = tmp_path / str(num_calls)
        shutil.copytree(tmp_path / "whole", place)
        folder, left = RunFolder(place, whole.settings), num_calls
        with monkeypatch.context() as patched:
            patched.setattr(os, "unlink", killed)
            try:
                folder.remove_superseded()
                is_done = True
            except KeyboardInterrupt:
                is_done = False
        assert [(one.step, one.role) for one in folder.checkpoints[-1:]] == [(8, PERIODIC)]
        assert folder.best is not None
        assert folder.best.step == 5
        for one in folder.checkpoints:
            assert len(list(one.path.iterdir())) == 3, "whole or not there"
        folder.remove_superseded()
        assert [one.step for one in folder.checkpoints] == [5, 8]
        if is_done:
            break
        num_calls += 1
    assert num_calls >= 9


def test_a_run_is_complete_when_its_model_is_there_and_its_settings_are_these(tmp_path: Path) -> None:
    folder = RunFolder.begin(tmp_path, settings())
    assert not folder.is_complete
    with pytest.raises(FileError, match="holds no model, so that the run is not complete"):
        folder.finish()
    save_model(folder)
    assert not folder.is_complete, "only once it is said"
    folder.finish()
    assert folder.is_complete
    assert RunFolder.begin(tmp_path, settings(log_every=1)).is_complete, "what has no effect does not count"
    for changed in ({"seed": 1}, {"num_tokens": 9600}):
        assert not RunFolder(tmp_path, settings(**changed)).is_complete
    shutil.rmtree(folder.model_path)
    assert not folder.is_complete


def test_a_longer_budget_goes_on_with_the_same_run(tmp_path: Path) -> None:
    folder = RunFolder.begin(tmp_path, settings())
    save(folder, 10, FINAL)
    save_model(folder)
    folder.finish()
    longer = RunFolder.begin(tmp_path, settings(num_tokens=960))
    assert not longer.is_complete
    assert longer.newest is not None
    assert longer.newest.step == 10
    assert longer.model_path != folder.model_path
    save(longer, 14, PERIODIC)
    before = content(tmp_path)
    with pytest.raises(FileError, match="has completed 14 steps, and num_tokens = 480 are 10"):
        RunFolder.begin(tmp_path, settings())
    assert content(tmp_path) == before


def test_a_folder_knows_the_budgets_that_its_run_was_continued_from(tmp_path: Path) -> None:
    """Ten steps of the first budget, four of twenty, and then twenty-five."""
    begun = RunFolder.begin(tmp_path, settings())
    save(begun, 10, FINAL)
    for num_tokens in (9600, 480, 960):  # no step is trained under the first two
        longer = RunFolder.begin(tmp_path, settings(num_tokens=num_tokens))
        assert (longer.fingerprint == settings(num_tokens=num_tokens).fingerprint) is (num_tokens == 480)
    save(longer, 14, PERIODIC)
    again = RunFolder.begin(tmp_path, settings(num_tokens=960, log_every=1))
    assert again.fingerprint == longer.fingerprint
    last = RunFolder.begin(tmp_path, settings(num_tokens=1200))
    assert [(one.num_tokens, one.until_step) for one in last.earlier] == [(480, 10), (960, 14)]
    save_model(last)
    last.finish()
    assert RunFolder.begin(tmp_path, settings(num_tokens=1200)).is_complete
    # Without its checkpoints a finished run is what it was; but one that goes on begins anew.
    for one in last.checkpoints:
        shutil.rmtree(one.path)
    assert RunFolder.begin(tmp_path, settings(num_tokens=1200)).is_complete
    assert RunFolder.begin(tmp_path, settings(num_tokens=2400)).earlier == ()


def test_folders_of_earlier_releases_are_read_and_their_runs_are_the_same(tmp_path: Path) -> None:
    """They know neither of budgets before, nor of code, nor of what was asked for."""
    RunFolder.begin(tmp_path, settings())
    state = json.loads((tmp_path / "run.json").read_text())
    del state["earlier"], state["inputs"], state["settings"]["teacher_code"]
    assert state["fingerprint"] == "3b01800d12e874fa816f89ef56b3647e4753ec4bd84f3b8406018aeab9b4b3f4", "as it was then"
    (tmp_path / "run.json").write_text(json.dumps(state))
    found = read_state(tmp_path)
    assert found is not None
    assert found.settings == settings()
    assert RunFolder.begin(tmp_path, settings()).fingerprint == state["fingerprint"]


def test_a_run_that_was_finished_is_known_by_what_it_was_asked_for_with(tmp_path: Path) -> None:
    folder = RunFolder.begin(tmp_path, settings(), inputs="same files")
    assert finished_model(tmp_path, "same files") is None, "it is not finished"
    save_model(folder)
    folder.finish()
    assert finished_model(tmp_path, "same files") == folder.model_path
    assert finished_model(tmp_path, "other files") is None
    assert finished_model(tmp_path / "nowhere", "same files") is None
    RunFolder.begin(tmp_path, settings(num_tokens=960), inputs="other files")
    assert finished_model(tmp_path, "same files") is None, "it goes on"
    shutil.rmtree(folder.model_path)
    RunFolder.begin(tmp_path, settings(), inputs="same files")
    assert finished_model(tmp_path, "same files") is None


def test_what_is_not_this_run_is_refused_and_left_as_it_is(tmp_path: Path) -> None:
    RunFolder.begin(tmp_path / "run", settings())
    before = content(tmp_path)
    for changed, words in (
        ({"learning_rate": 1e-3}, r"another run: its learning_rate is 0\.0001 and not 0\.001"),
        ({"student": student()}, "another run: it has another student"),
        ({"data": "ff"}, "its data is a7 and not ff"),
    ):
        with pytest.raises(FileError, match=words):
            RunFolder.begin(tmp_path / "run", settings(**changed))
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "notes.txt").write_text("mine")
    with pytest.raises(FileError, match=r"holds notes\.txt and no run"):
        RunFolder.begin(tmp_path / "other", settings())
    (tmp_path / "file").write_text("mine")
    with pytest.raises(FileError, match="cannot be read"):
        RunFolder.begin(tmp_path / "file", settings())
    del before["run/run.json"]
    (tmp_path / "run" / "run.json").write_text((tmp_path / "run" / "run.json").read_text().replace('"a7"', '"a8"'))
    with pytest.raises(FileError, match="its fingerprint is of other settings"):
        read_state(tmp_path / "run")
    assert read_state(tmp_path / "nowhere") is None
