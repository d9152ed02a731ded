"""Orthogonal subspace fine-tuning of models of the catalogue: asked about without torch, by every command."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from protwin.shared.schema.plan import Plan, TrainingMethod
from tests.cli.conftest import Protwin
from tests.cli.refusals import refusal

SHAPE = ("--model", "gpt2", "--batch-size", "1", "--sequence-length", "64")
OSFT = ("--method", "osft", "--unfreeze-rank-ratio", "0.25")
ON = ("--hardware", "rtx-3090")


@pytest.mark.slow
def test_a_plan_is_searched_and_simulated_without_torch(
    protwin: Protwin, work: Path, without_torch: dict[str, str]
) -> None:
    small = ("--device-budget", "1.5GiB")
    found = protwin("search", *SHAPE, *ON, *OSFT, *small, "--output", "plan.json", "--json", **without_torch)
    assert found.returncode == 0, found.stderr
    assert Plan.load(work / "plan.json").method is TrainingMethod.OSFT
    again = protwin("simulate", *SHAPE, *ON, *OSFT, "--plan", "plan.json", "--json", **without_torch)
    assert again.returncode == 0, again.stderr
    predicted, record = json.loads(found.stdout)["prediction"], json.loads(again.stdout)
    assert predicted["iteration_s"] == record["iteration_s"]
    # Four maps in each of twelve blocks.
    assert predicted["factorisation"] == record["factorisation"]
    assert record["factorisation"]["num_weights"] == 48
    told = protwin("simulate", *SHAPE, *ON, *OSFT, "--plan", "plan.json", **without_torch)
    assert "Before the first step: 48 singular value decompositions, " in told.stdout
    dense = protwin("simulate", *SHAPE, *ON, "--plan", "plan.json", **without_torch)
    assert dense.returncode == 2, "a plan of factors is none of the dense model"


def test_advice_and_named_maps_need_no_torch(protwin: Protwin, work: Path, without_torch: dict[str, str]) -> None:
    shape = ("--model", "gpt2", "--global-batch", "1", "--sequence-length", "64", "--hardware", "rtx-3090")
    result = protwin("advise", *shape, *OSFT, "--osft-target", "c_fc", "--json", **without_torch)
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout)["machines"][0]["plan"]["method"] == "osft"
    assert list(work.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--method", "osft"), "Add --unfreeze-rank-ratio 0.25"),
        (("--unfreeze-rank-ratio", "1.5"), "from 0 to 1"),
        (("--unfreeze-rank-ratio", "some"), "'some' is no number. Write one such as 0.5."),
        (("--osft-target", "c_fc"), "--unfreeze-rank-ratio is missing"),
        (("--method", "full", "--unfreeze-rank-ratio", "0.5"), "--method full factorises nothing"),
        ((*OSFT, "--osft-target", "c_fd"), "no linear map is called 'c_fd'"),
    ],
)
def test_bad_input_is_one_message(protwin_here: Protwin, work: Path, arguments: tuple[str, ...], message: str) -> None:
    assert message in refusal(protwin_here, work, ("search", *SHAPE, *ON, *arguments, "--output", "plan.json"))


@pytest.mark.parametrize("command", ["search", "simulate", "advise", "trace", "run"])
def test_every_help_has_the_options(protwin_here: Protwin, command: str) -> None:
    shown = protwin_here(command, "--help").stdout
    for option in ("--method", "--unfreeze-rank-ratio", "--osft-target"):
        assert option in shown
