"""``protwin run --replan-after``: a plan that does not suit this machine is left, and what does not go together."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from protwin.shared.catalogue.machines import hardware_to_toml
from protwin.shared.layout.layout import layout_of
from protwin.shared.schema.plan import Plan
from protwin.shared.schema.record import Record
from protwin.shared.schema.workload import Workload
from tests.calibration.fitting.test_budgeted import HERE
from tests.cli.conftest import Protwin
from tests.cli.refusals import refusal
from tests.cli.test_calibrate import SMALL

RUN = ("run", "--plan=plan.json", "--workload=workload.json", "--model=config.json")


_traced: list[str] = []
"""The workload's file, once the first test has traced it."""


@pytest.fixture
def planned(protwin_here: Protwin, work: Path) -> Path:
    """The folder with a model, its workload, this machine and a plan that offloads everything."""
    (work / "config.json").write_text(json.dumps(SMALL))
    (work / "machine.toml").write_text(hardware_to_toml(HERE))
    if not _traced:
        shape = ("--batch-size=1", "--sequence-length=16")
        result = protwin_here("trace", "--model=config.json", *shape, "--output=workload.json")
        assert result.returncode == 0, result.stderr
        _traced.append((work / "workload.json").read_text())
    (work / "workload.json").write_text(_traced[0])
    workload = Workload.load(work / "workload.json")
    buffers = layout_of(workload, 2**16).min_buffers(0)
    Plan(workload_id=workload.identity, chunk_bytes=2**16, n_persist=0, n_buffer=buffers).save(work / "plan.json")
    return work


def test_a_run_goes_on_by_a_better_plan(protwin_here: Protwin, planned: Path) -> None:
    options = ("--hardware=machine.toml", "--replan-after=9", "--steps=15", "--host-to-device=4MB/s")
    result = protwin_here(*RUN, *options, "--output=measured.json")
    assert result.returncode == 0, result.stderr
    assert "changes to a plan of" in result.stderr
    before, after = Plan.load(planned / "plan.json"), Record.load(planned / "measured.json").plan
    assert after.n_persist > before.n_persist


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--replan-after=9",), "describe it by --hardware"),
        (("--replan-after=2", "--hardware=machine.toml"), "--replan-after"),
        (("--replan-after=9", "--hardware=machine.toml", "--steps=9"), "no step would be left"),
        (
            ("--replan-after=9", "--hardware=machine.toml", "--steps=12", "--output=m.json"),
            "Train 14 steps: --steps 14",
        ),
        (("--calibration=plan.json",), "--replan-after N is missing"),
    ],
    ids=" ".join,
)
def test_what_makes_no_sense_is_refused(
    protwin_here: Protwin, planned: Path, options: tuple[str, ...], said: str
) -> None:
    assert said in refusal(protwin_here, planned, (*RUN, *options))
