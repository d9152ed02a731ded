"""A full disk, for every command that writes: one message, exit code 2, the old files, nothing beside them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from protwin.shared.schema.workload import Workload
from tests.cli.conftest import Protwin
from tests.cli.refusals import SEARCH, SIMULATE, contents
from tests.cli.test_run_checkpoints import MODEL
from tests.full_disk import largest_file
from tests.runtime.resuming import kept

SHAPE = ("--batch-size=1", "--sequence-length=16")


@pytest.mark.parametrize(
    "arguments",
    [
        SEARCH,
        (*SIMULATE, "--output=old.json"),
        (*SIMULATE, "--timeline=new-trace.json"),
        (*SIMULATE, "--report=new-report.html"),
        ("hardware", "show", "h100-80gb", "--output=old.toml"),
        ("trace", "--model=gpt2", *SHAPE, "--output=old.json"),
    ],
    ids=" ".join,
)
def test_what_cannot_be_written_whole_is_not_written(
    arguments: tuple[str, ...], protwin_here: Protwin, folder: Path
) -> None:
    for name in ("old.json", "old.toml"):
        (folder / name).write_text("old")
    before = contents(folder)
    with largest_file(200):
        result = protwin_here(*arguments)
    assert result.returncode == 2, result.stdout + result.stderr
    messages = [line for line in result.stderr.splitlines() if not line.startswith("warning: ")]
    assert len(messages) == 1
    assert "cannot be written: File too large" in messages[0]
    assert "are needed" in messages[0]
    assert contents(folder) == before


def test_a_cache_that_takes_no_more_is_a_warning(protwin_here: Protwin, folder: Path) -> None:
    """The answer needs no cache; it goes to a device here, which no limit holds for."""
    (folder / "config.json").write_text(json.dumps(MODEL))
    with largest_file(1000):  # standard error is a file here too
        result = protwin_here("search", "--model=config.json", *SHAPE, "--hardware=rtx-3090", "--output=/dev/null")
    assert result.returncode == 0
    told = " ".join(result.stderr.split())
    assert "warning: the traced workload is not kept" in told
    assert "File too large" in " ".join(result.stderr.split())


def test_a_run_ends_with_the_checkpoint_that_was_there(protwin_here: Protwin, work: Path) -> None:
    (work / "config.json").write_text(json.dumps(MODEL))
    assert protwin_here("trace", "--model=config.json", *SHAPE, "--output=workload.json").returncode == 0
    kept(Workload.load(work / "workload.json")).save(work / "plan.json")
    run = ("run", "--plan=plan.json", "--workload=workload.json", "--model=config.json", "--checkpoint=saved")
    assert protwin_here(*run, "--steps=1").returncode == 0
    before = contents(work)
    with largest_file(10_000):
        result = protwin_here(*run, "--steps=2", "--resume")
    assert result.returncode == 2
    assert result.stderr.count("\n") == 1
    assert "saved cannot be written: File too large" in result.stderr
    assert "What was there before is as it was" in result.stderr
    assert contents(work) == before
    assert protwin_here(*run, "--steps=2", "--resume").returncode == 0


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_a_stream_that_takes_no_more_keeps_the_exit_code(
    stream: str, folder: Path, environment: dict[str, str]
) -> None:
    """Nothing can be said on standard error when that is full; the exit code still does."""
    command = ["search", "--model=workload.json", f"--hardware={'rtx-3090' if stream == 'stdout' else 'rtx'}"]
    streams: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with open("/dev/full", "w") as full:
        script = Path(sys.executable).with_name("protwin")
        result = subprocess.run(
            [script, *command], cwd=folder, env=environment, check=False, **streams | {stream: full}
        )
    assert result.returncode == 2
    assert b"Traceback" not in (result.stderr or b"")


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_output_that_is_cut_is_no_success(unbuffered: str, folder: Path, environment: dict[str, str]) -> None:
    """The system takes the first bytes of a long answer: Python without buffers calls that done."""
    script = Path(sys.executable).with_name("protwin")
    command = [script, "search", "--model=workload.json", "--hardware=rtx-3090", "--json"]
    with (folder / "answer.json").open("w") as answer, largest_file(200):
        result = subprocess.run(
            command,
            cwd=folder,
            env=environment | {"PYTHONUNBUFFERED": unbuffered},
            check=False,
            stdout=answer,
            stderr=subprocess.PIPE,
        )
    assert result.returncode == 2
    assert result.stderr.startswith(b"error: standard output takes no more: File too large.")
