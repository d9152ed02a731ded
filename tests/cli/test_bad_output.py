"""Output that cannot be written is refused before the work, and an interruption leaves nothing behind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from protwin.shared.schema.plan import Plan
from protwin.shared.schema.record import Record
from protwin.shared.schema.workload import Workload
from tests.cli.conftest import Protwin
from tests.cli.refusals import CALIBRATE, RUN, SEARCH, SIMULATE, contents, refusal, replaced
from tests.cli.saved import decoder
from tests.interrupting import interrupt


def test_output_that_cannot_be_written_is_refused(protwin_here: Protwin, folder: Path) -> None:
    assert "plan.json" in refusal(protwin_here, folder, replaced(SEARCH, "found.json", "machine.toml/plan.json"))


def test_a_folder_is_no_output(protwin_here: Protwin, folder: Path) -> None:
    (folder / "out").mkdir()
    assert "out" in refusal(protwin_here, folder, replaced(SEARCH, "found.json", "out"))


@pytest.mark.parametrize(
    "arguments",
    [
        (*SEARCH[:-1], "workload.json"),
        (*SEARCH[:-1], "./workload.json"),
        (*SIMULATE, "--output=plan.json"),
        (*SIMULATE, "--timeline=plan.json"),
        (*SIMULATE, "--output=new.json", "--timeline=out/../new.json"),
        (*SIMULATE, "--calibration=calibration.json", "--output=calibration.json"),
        ("trace", "--model=plan.json", "--batch-size=1", "--sequence-length=8", "--output=plan.json"),
        (*RUN, "--output=workload.json"),
        (*RUN, "--text=machine.toml", "--output=new.json", "--timeline=new.json"),
        (*CALIBRATE, "--output=new.json", "--workload-output=new.json"),
        ("compare", "plan.json", "workload.json", "--output=workload.json"),
    ],
    ids=" ".join,
)
def test_no_output_takes_the_place_of_another_file(
    protwin_here: Protwin, folder: Path, arguments: tuple[str, ...]
) -> None:
    assert "the same file" in refusal(protwin_here, folder, arguments)


@pytest.mark.parametrize(
    "arguments",
    [
        replaced(SEARCH, "found.json", "plan.toml"),
        replaced(SEARCH, "found.json", "machine.toml/plan.json"),
        (*SIMULATE, "--timeline=machine.toml/new.json"),
        (*RUN, "--timeline=machine.toml/new.json"),
        (*RUN, "--output=."),
        (*CALIBRATE, "--workload-output=machine.toml/new.json"),
        (*CALIBRATE, "--workload-output=new.toml"),
        ("compare", "a.json", "b.json", "--timeline=machine.toml/new.json"),
        ("hardware", "probe", "--output=machine.toml/new.toml"),
        ("hardware", "probe", "--output=machine.yaml"),
        ("hardware", "show", "rtx-3090", "--output=machine"),
        (*SIMULATE, "--report=report.txt"),
        (*SIMULATE, "--output=new.html"),
        (*SIMULATE, "--timeline=new.htm"),
        ("largest", "--output=new.html"),
    ],
    ids=" ".join,
)
def test_every_output_is_checked_before_the_work(
    protwin_here: Protwin, folder: Path, arguments: tuple[str, ...]
) -> None:
    """The plan and the workload are damaged, so that a command that looks at them first says so."""
    for name in ("plan.json", "workload.json"):
        (folder / name).write_text("damaged")
    message = refusal(protwin_here, folder, arguments)
    assert "is no folder" in message or "is a folder" in message or "Choose a name that ends in" in message


@pytest.mark.parametrize(
    "arguments",
    [
        replaced(SEARCH, "found.json", "no/such folder/plan.json"),
        (*SIMULATE, "--timeline=no/such folder/new.json"),
        (*SIMULATE, "--report=no/such folder/new.html"),
        (*RUN, "--output=no/such folder/new.json"),
        (*CALIBRATE, "--workload-output=no/such folder/new.json"),
        ("advise", "--model=gpt2", "--global-batch=1", "--state=no/such folder/new.json"),
        ("hardware", "show", "rtx-3090", "--output=no/such folder/new.toml"),
    ],
    ids=" ".join,
)
def test_a_missing_folder_is_named_with_the_command_that_makes_it(
    protwin_here: Protwin, folder: Path, arguments: tuple[str, ...]
) -> None:
    message = refusal(protwin_here, folder, arguments)
    assert "folder no/such folder is missing" in message
    assert message.endswith("mkdir -p 'no/such folder'")
    assert not (folder / "no").exists()


def test_standard_output_has_the_document_alone(protwin_here: Protwin, folder: Path) -> None:
    """Each document is the one that a file would hold."""
    machine = ("hardware", "show", "rtx-3090")
    for arguments, kind in ((replaced(SEARCH, "found.json", "-"), Plan), ((*SIMULATE, "--output=-"), Record)):
        result = protwin_here(*arguments)
        assert result.returncode == 0, result.stderr
        document = kind.from_mapping(json.loads(result.stdout), origin="standard output")
        assert protwin_here(*(("file.json" if one == "-" else one.replace("=-", "=file.json")) for one in arguments))
        assert document == kind.load(folder / "file.json")
    assert tomllib.loads(protwin_here(*machine, "--output", "-").stdout)["name"] == "rtx-3090"
    assert not (folder / "-").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((*replaced(SEARCH, "found.json", "-"), "--json"), "--output - and --json both"),
        ((*SIMULATE, "--output=-", "--json"), "--output - and --json both"),
        (("hardware", "show", "rtx-3090", "--output=-", "--json"), "--output - and --json both"),
        (("compare", "a.json", "b.json", "--output=-", "--json"), "--output - and --json both"),
        ((*SIMULATE, "--timeline=-"), "--timeline - is not possible"),
        ((*SIMULATE, "--report", "-"), "--report - is not possible"),
        (("advise", "--model=gpt2", "--global-batch=1", "--state=-"), "--state - is not possible"),
    ],
    ids=str,
)
def test_standard_output_gets_one_thing(
    protwin_here: Protwin, folder: Path, arguments: tuple[str, ...], message: str
) -> None:
    (folder / "workload.json").write_text("damaged")
    assert message in refusal(protwin_here, folder, arguments)


def test_a_device_is_written_to(protwin: Protwin, folder: Path) -> None:
    result = protwin(*replaced(SEARCH, "found.json", "/dev/stderr"))
    assert json.loads(result.stderr)["kind"] == "plan"


def test_a_refusal_leaves_the_old_output_alone(protwin_here: Protwin, folder: Path) -> None:
    (folder / "found.json").write_text("an older plan")
    refusal(protwin_here, folder, (*SEARCH, "--device-budget", "20MiB"))
    assert (folder / "found.json").read_text() == "an older plan"


def test_output_is_checked_before_the_work(protwin_here: Protwin, folder: Path) -> None:
    (folder / "workload.json").write_text("damaged")
    assert "is a folder" in refusal(protwin_here, folder, replaced(SEARCH, "found.json", "."))


# -- interruption ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arguments", [SEARCH, SIMULATE], ids=["search", "simulate"])
def test_an_interruption_leaves_nothing_behind(
    folder: Path, environment: dict[str, str], arguments: tuple[str, ...]
) -> None:
    """The model is a pipe, so that the command is at work, waiting for it, when it is interrupted."""
    os.mkfifo(folder / "pipe.json")
    before = contents(folder)
    process = subprocess.Popen(
        [Path(sys.executable).with_name("protwin"), *replaced(arguments, "workload.json", "pipe.json")],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with (folder / "pipe.json").open("wb"):
        output, errors = interrupt(process)
    assert (process.returncode, output, errors) == (130, "", "interrupted\n")
    assert contents(folder) == before


def test_workloads_of_these_tests_are_workloads(folder: Path) -> None:
    assert Workload.load(folder / "workload.json") == decoder()
