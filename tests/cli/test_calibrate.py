"""``protwin calibrate``: budgets, and what does not go together."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from protwin.calibration import calibrate
from protwin.shared.catalogue.machines import hardware_to_toml
from protwin.shared.schema.calibration import Calibration
from protwin.shared.schema.schedule import TaskKind
from protwin.shared.schema.workload import Workload
from tests.calibration.fitting.test_budgeted import HERE
from tests.calibration.fitting.test_fit import MACHINE, a_workload, true_calibration
from tests.calibration.fitting.test_updating import an_old_calibration, runs
from tests.cli.conftest import Protwin
from tests.cli.refusals import contents, refusal
from tests.cli.test_whole_chain import MODEL

SMALL = MODEL | {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3}
HERE_WITH = ("calibrate", "--model", "config.json", "--batch-size=1", "--sequence-length=16", "--hardware=machine.toml")


@pytest.fixture
def here(work: Path) -> Path:
    """The folder that commands run in, with a small model and this machine."""
    (work / "config.json").write_text(json.dumps(SMALL))
    (work / "machine.toml").write_text(hardware_to_toml(HERE))
    return work


@pytest.mark.slow
def test_the_least_budget_is_said_and_is_enough(
    protwin_here: Protwin, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(calibrate.__kwdefaults__, "slowdown_seconds", 0.1)
    options = (*HERE_WITH, "--lora-rank=2", "--optimizer=sgd", "--steps=2")
    message = refusal(protwin_here, here, (*options, "--device-budget", "10KiB"))
    found = re.search(r"Raise it to ([\d.]+ [KM]iB)", message)
    assert found is not None, message
    least = found.group(1).replace(" ", "")
    outputs = ("--output", "calibration.json", "--workload-output", "workload.json")
    result = protwin_here(*options, "--device-budget", least, *outputs)
    assert result.returncode == 0, result.stderr
    calibration, workload = Calibration.load(here / "calibration.json"), Workload.load(here / "workload.json")
    assert {TaskKind.GATHER, TaskKind.RECOMPUTE, TaskKind.CPU_ADAM} <= calibration.factors.keys()
    assert workload.is_measured
    assert workload.measured_on == HERE.name
    assert {parameter.name for parameter in workload.parameters if parameter.trainable} == {
        parameter.name for parameter in workload.parameters if "lora_" in parameter.name
    }


@pytest.mark.slow
def test_projections_have_factors_of_their_own(
    protwin_here: Protwin, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(calibrate.__kwdefaults__, "slowdown_seconds", 0.1)
    outputs = ("--output", "calibration.json", "--workload-output", "workload.json")
    result = protwin_here(*HERE_WITH, "--unfreeze-rank-ratio=0.5", "--osft-target=up_proj", "--steps=2", *outputs)
    assert result.returncode == 0, result.stderr
    found = Calibration.load(here / "calibration.json").factors
    assert {kind for kind in TaskKind if "projection" in kind} <= found.keys()
    assert len(Workload.load(here / "workload.json").subspaces) == 2 * 3


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--osft-target=up_proj",), "Write --unfreeze-rank-ratio 0.25"),
        (("--ranks=2", "--device-budget=1GiB"), "--device-budget"),
        (("--lora-targets=q_proj",), "--lora-rank is missing"),
        (("--autocast=int8",), "--autocast int8 is not known"),
        (("--optimizer=sdg",), "sdg"),
        (("--device-budget=0",), "budget"),
        (("--device-budget=much",), "--device-budget"),
        (("--freeze=*",), "no parameter to train"),
    ],
    ids=" ".join,
)
def test_what_makes_no_sense_is_refused(protwin_here: Protwin, here: Path, options: tuple[str, ...], said: str) -> None:
    assert said in refusal(protwin_here, here, (*HERE_WITH, *options))


# -- from records of runs --------------------------------------------------------------------------------------------


@pytest.fixture
def learning(work: Path) -> Path:
    """The folder with two records of a machine, their workloads, and what was known."""
    for number, workload in enumerate((a_workload(), a_workload(5))):
        workload.save(work / f"workload{number}.json")
        for name, pair in zip("ab", runs(workload, true_calibration()), strict=False):
            pair.measured.save(work / f"{name}{number}.json")
    (work / "machine.toml").write_text(hardware_to_toml(MACHINE))
    an_old_calibration().save(work / "old.json")
    return work


LEARN = ("calibrate", "--hardware=machine.toml", "--from=a0.json", "--workload=workload0.json")


def test_a_calibration_learns_from_records_of_several_models(protwin_here: Protwin, learning: Path) -> None:
    before = contents(learning)
    more = ("--from=b0.json", "--from=a1.json", "--workload=workload1.json", "--calibration=old.json")
    result = protwin_here(*LEARN, *more, "--output=new.json")
    assert result.returncode == 0, result.stderr
    found, old = (Calibration.load(learning / f"{name}.json") for name in ("new", "old"))
    assert found.num_runs == old.num_runs + 3
    assert found.fitted_to == ("another", "eight blocks")
    assert found.factor(TaskKind.FORWARD) != old.factor(TaskKind.FORWARD)
    assert contents(learning) == before | {learning / "new.json": (learning / "new.json").read_bytes()}


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (LEARN[:-1], "--workload is missing"),
        ((*LEARN[:-1], "--workload=workload1.json"), "a0.json is a record of workload"),
        ((*LEARN, "--steps=3"), "--steps says what to run"),
        ((*LEARN, "--calibration=old.json", "--output=old.json"), "would take the place of --calibration"),
        ((*LEARN, "--output=a0.json"), "would take the place of --from a0.json"),
        ((*LEARN, "--forgetting=0"), "forgetting is 0.0"),
        ((*LEARN, "--calibration=machine.toml"), "machine.toml"),
        (("calibrate", "--hardware=machine.toml", "--calibration=old.json"), "goes with --from FILE"),
        (("calibrate", "--hardware=machine.toml", "--model=gpt2"), "--batch-size is missing"),
    ],
)
def test_records_that_say_nothing_are_refused(
    protwin_here: Protwin, learning: Path, options: tuple[str, ...], said: str
) -> None:
    assert said in refusal(protwin_here, learning, options)


def test_a_machine_that_was_probed_again_needs_a_new_calibration(protwin_here: Protwin, learning: Path) -> None:
    """Its noisy figures times the old factors were predictions four times as long, and as sure as before."""
    assert protwin_here(*LEARN, "--output=new.json").returncode == 0
    again = MACHINE.device.model_copy(update={"vector_flop_per_s": 2.5e9})
    (learning / "machine.toml").write_text(hardware_to_toml(MACHINE.model_copy(update={"device": again})))
    more = ("--from=b0.json", "--workload=workload0.json")
    said = refusal(protwin_here, learning, ("calibrate", "--hardware=machine.toml", *more, "--calibration=new.json"))
    assert "device.vector_flop_per_s was 10000000000.0, and is 2500000000.0" in " ".join(said.split())
