"""Ranks that share sequences, on the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from protwin.shared.answers.search_result import SearchResult
from protwin.shared.schema.record import Record
from protwin.shared.schema.workload import Workload
from tests.cli.conftest import Protwin
from tests.cli.refusals import refusal
from tests.sim.searching.test_sequence_ranks import shared_decoder, shared_plan

BOX = ("--model", "shared.json", "--hardware", "a100-80gb-x8")


@pytest.fixture
def shared(folder: Path) -> Workload:
    """A workload of which 2 or 8 ranks may share each sequence, and a plan of 8."""
    model = shared_decoder(2, 8)
    model.save(folder / "shared.json")
    shared_plan(model).save(folder / "eight.json")
    return model


def test_plans_are_searched_simulated_and_shown(protwin_here: Protwin, folder: Path, shared: Workload) -> None:
    asked = ("--ranks", "8", "--sequence-ranks", "8", "--parallel", "sharded")
    found = protwin_here("search", *BOX, *asked, "--output", "plan.json", "--json")
    assert found.returncode == 0, found.stderr
    result = SearchResult.from_mapping(json.loads(found.stdout), origin="standard output")
    assert (result.plan.sequence_ranks, result.plan.micro_batches) == (8, 1)
    assert result.prediction.num_samples == shared.num_samples, "eight ranks train on one batch"
    shown = protwin_here("simulate", *BOX, "--plan", "plan.json", "--report", "report.html", "--timeline", "t.json")
    assert shown.returncode == 0, shown.stderr
    assert "sequence_ranks" in shown.stdout
    assert "neighbours that share each sequence" in shown.stdout
    assert "exchange of the sequence" in (folder / "report.html").read_text()
    assert "sequence_exchange" in (folder / "t.json").read_text()
    again = protwin_here("simulate", *BOX, "--plan", "plan.json", "--json")
    record = Record.from_mapping(json.loads(again.stdout), origin="standard output")
    assert record.iteration_s == pytest.approx(result.prediction.iteration_s)


def test_a_step_of_one_batch_is_shared_by_all_ranks(protwin_here: Protwin, folder: Path, shared: Workload) -> None:
    asked = ("--ranks", "8", "--global-batch", str(shared.num_samples), "--json")
    assert protwin_here("search", *BOX, *asked).returncode == 2, "8 ranks cannot have batches of their own"
    found = protwin_here("search", *BOX, *asked, "--sequence-ranks", "8", "--parallel", "sharded")
    assert found.returncode == 0, found.stderr
    chosen = json.loads(found.stdout)["plan"]
    assert (chosen["sequence_ranks"], chosen["micro_batches"]) == (8, 1)


def test_all_that_the_workload_knows_is_weighed_where_none_is_named(
    protwin_here: Protwin, folder: Path, shared: Workload
) -> None:
    found = protwin_here("search", *BOX, "--ranks", "8", "--parallel", "sharded", "--json")
    result = SearchResult.from_mapping(json.loads(found.stdout), origin="standard output")
    assert result.prediction.num_samples == 8 * shared.num_samples
    assert result.plan.micro_batches == result.plan.sequence_ranks


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("search", *BOX, "--ranks", "8", "--sequence-ranks", "3"), "sequence_ranks: 3 does not divide num_ranks 8"),
        (
            ("search", *BOX, "--ranks", "8", "--sequence-ranks", "4"),
            "sequence_ranks 4 asked for, but shared.json is a workload that knows 1, 2, 8",
        ),
        (("search", *BOX[:-1], "rtx-3090", "--sequence-ranks", "8"), "sequence_ranks: 8 with parallel single"),
        (("search", *BOX, "--ranks", "8", "--sequence-ranks", "0"), "'0' is too small. Write one from 1 to"),
        (("simulate", *BOX, "--plan", "eight.json", "--ranks", "4"), "sequence_ranks: 8 does not divide num_ranks 4"),
        (("simulate", *BOX, "--plan", "odd.json"), "sequence_ranks: 8 does not divide num_ranks 12"),
        (("simulate", *BOX, "--plan", "single.json"), "sequence_ranks: 8 with parallel single"),
        (("simulate", *BOX, "--plan", "bypass.json"), "sequence_ranks: 8 with method bypass, whose blocks run whole"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_bad_input_gets_one_message(
    protwin_here: Protwin, folder: Path, shared: Workload, arguments: tuple[str, ...], reason: str
) -> None:
    good = json.loads((folder / "eight.json").read_text())
    for name, change in {
        "odd": {"num_ranks": 12},
        "single": {"num_ranks": 1, "parallel": "single"},
        "bypass": {"method": "bypass", "n_checkpoint": 0},
    }.items():
        (folder / f"{name}.json").write_text(json.dumps(good | change))
    assert reason in refusal(protwin_here, folder, arguments)


def test_workloads_that_contradict_themselves_are_refused(
    protwin_here: Protwin, folder: Path, shared: Workload
) -> None:
    content = json.loads((folder / "shared.json").read_text())
    content["sequence_sharings"][0]["profile_of"].pop()
    (folder / "shared.json").write_text(json.dumps(content))
    said = refusal(protwin_here, folder, ("search", *BOX, "--ranks", "8"))
    assert "sequence_sharings: 2 ranks have profiles of 3 blocks of 4" in said
