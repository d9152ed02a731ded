"""``--optimizer`` on every command that plans, predicts or trains, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from protwin.shared.answers.search_result import SearchResult
from protwin.shared.schema.optimizer import HostGradients, Optimizer
from protwin.shared.schema.plan import Plan
from protwin.shared.schema.record import Record
from tests.cli.conftest import Protwin
from tests.cli.refusals import RUN, SEARCH, SIMULATE, refusal

SMALL = ("--chunk-bytes=64MiB", "--prefetch-depth=1")


def peak_bytes(protwin: Protwin, *arguments: str) -> int:
    result = protwin(*SIMULATE, "--json", *arguments)
    assert result.returncode == 0, result.stderr
    return Record.from_mapping(json.loads(result.stdout), origin="output").guaranteed_peak_device_bytes


def test_the_plan_carries_what_the_search_was_asked_for(protwin_here: Protwin, folder: Path) -> None:
    found = protwin_here(*SEARCH, *SMALL, "--optimizer", "SGD", "--json", "--what-if", "optimizer=adamw-8bit")
    assert found.returncode == 0, found.stderr
    result = SearchResult.from_mapping(json.loads(found.stdout), origin="output")
    plan = Plan.load(folder / "found.json")
    assert plan.optimizer is result.plan.optimizer is Optimizer.SGD
    assert result.prediction.question is not None
    assert result.prediction.question.optimizer == "SGD with momentum"
    assert [answer.change for answer in result.what_if] == ["optimizer=adamw-8bit"]
    shown = protwin_here(*SEARCH[:-2], *SMALL, "--optimizer", "sgd")
    assert "optimizer sgd" in " ".join(shown.stdout.split())


def test_a_prediction_may_be_of_another_optimizer(protwin_here: Protwin, folder: Path) -> None:
    own = peak_bytes(protwin_here)
    assert own == peak_bytes(protwin_here, "--optimizer", "adamw")
    assert peak_bytes(protwin_here, "--optimizer", "AdamW8bit") < peak_bytes(protwin_here, "--optimizer", "lion") < own


@pytest.mark.parametrize("command", [SEARCH, SIMULATE, RUN])
def test_an_unknown_optimizer_is_refused(protwin_here: Protwin, folder: Path, command: tuple[str, ...]) -> None:
    said = refusal(protwin_here, folder, (*command, "--optimizer", "adamw-9bit"))
    assert "there is no optimizer 'adamw-9bit'" in said
    assert "adamw-8bit" in said


@pytest.mark.parametrize("command", [SIMULATE, RUN])
def test_a_plan_of_an_older_schema_is_refused(protwin_here: Protwin, folder: Path, command: tuple[str, ...]) -> None:
    path = folder / "plan.json"
    content = json.loads(path.read_text()) | {"schema_version": 1}
    del content["optimizer"]
    path.write_text(json.dumps(content))
    assert "plan.json has schema_version 1; this release reads 2" in refusal(protwin_here, folder, command)


def test_what_cannot_be_sharded_is_refused(protwin_here: Protwin, folder: Path) -> None:
    search = tuple("a100-80gb-x8" if word == "rtx-3090" else word for word in SEARCH)
    said = refusal(protwin_here, folder, (*search, "--parallel", "sharded", "--optimizer", "adafactor"))
    assert "adafactor needs whole matrices" in said


def test_advice_takes_it_too(protwin_here: Protwin, folder: Path) -> None:
    advised = protwin_here(
        "advise", "--model=workload.json", "--global-batch=2", "--hardware=rtx-3090", "--optimizer=sgd", "--json"
    )
    assert advised.returncode == 0, advised.stderr
    (row,) = json.loads(advised.stdout)["machines"]
    assert row["plan"]["optimizer"] == "sgd"


def test_gradients_on_the_host_are_of_the_plan(protwin_here: Protwin, folder: Path) -> None:
    asked = ("--micro-batches=2", "--host-gradients=float32", "--device-budget=1GiB")
    found = protwin_here(*SEARCH, *SMALL, *asked)
    assert found.returncode == 0, found.stderr
    assert "added up in float32 on the host" in " ".join(found.stdout.split())
    assert Plan.load(folder / "found.json").host_gradients is HostGradients.FLOAT32
    (folder / "found.json").unlink()
    said = refusal(protwin_here, folder, (*SEARCH, "--what-if", "host-gradients=int8"))
    assert "there are no host gradients 'int8'" in said
