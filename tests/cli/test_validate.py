"""``protwin validate``: a model of the user's own, and what makes no sense."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from protwin.calibration.validation import validate as validating
from protwin.calibration.validation.fidelity import Fidelity
from protwin.runtime.model.identity import software_versions
from protwin.shared.catalogue.machines import hardware_to_toml
from protwin.shared.schema.calibration import Calibration
from tests.calibration.fitting.test_budgeted import HERE
from tests.cli.conftest import Protwin
from tests.cli.refusals import refusal
from tests.cli.test_calibrate import SMALL
from tests.shared.report_pages import check_self_contained, parse

MODELS = """
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        widths = (32, 48, 64, 32)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(a, b), nn.GELU()) for a, b in zip(widths, widths[1:]))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def make():
    return Net(), torch.randn(8, 32), lambda output, batch: output.square().mean()


def no_model():
    return "nothing"


def broken():
    raise RuntimeError("no weights here")
"""
OF_FILE = ("validate", "--model", "models.py:make", "--hardware", "machine.toml")
CONFIGURED = ("validate", "--model", "config.json", "--hardware", "machine.toml", "--batch-size=1")


@pytest.fixture
def here(work: Path) -> Path:
    (work / "config.json").write_text(json.dumps(SMALL))
    (work / "models.py").write_text(MODELS)
    (work / "machine.toml").write_text(hardware_to_toml(HERE))
    (work / "student.toml").write_text('kind = "student"\nschema_version = 1\n')
    return work


def test_a_model_of_one_s_own_is_judged(protwin_here: Protwin, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Within a budget, by a calibration that is fitted meanwhile, and then by one that is at hand."""
    monkeypatch.setattr(validating, "measure_slowdowns", lambda *_, **__: ())
    for name, value in {"_LARGEST_FRAC": 100.0, "_SETTLED_FRAC": 100.0, "_USUAL_ROUNDS": 3}.items():
        monkeypatch.setattr(validating, name, value)
    options = (*OF_FILE, "--plans=3", "--seed=5", "--device-budget=60KiB")
    result = protwin_here(*options, "--output", "found.json", "--report", "found.html")
    assert result.returncode == 0, result.stderr
    assert "What is to blame" in result.stdout
    found = Fidelity.load(here / "found.json")
    assert found.model == "Net of make"
    assert len(found.plans) == 3 + 1
    assert all(plan.guaranteed_peak_bytes <= found.budget_bytes == 60 * 2**10 for plan in found.plans)
    assert found.num_over_guarantee == 0
    assert found.seed == 5
    whole = sum(plan.predicted_iteration_s - plan.measured_iteration_s for plan in found.plans)
    measured_s = sum(plan.measured_iteration_s for plan in found.plans)
    assert sum(kind.blame_frac for kind in found.kinds) == pytest.approx(whole / measured_s)
    page = parse((here / "found.html").read_text(encoding="utf-8"))
    check_self_contained(page)
    # On a machine that others use, turns may find that it changed meanwhile: that is said, and nothing else is.
    assert all(note.startswith("The machine changed") for note in found.notes)
    headings = [*(["Warning"] if found.notes else []), "Plans", "Altogether", "What is to blame"]
    assert [heading.words for heading in page.named("h2")] == headings

    judged = Calibration(hardware_name=HERE.name, machine=HERE.name, software=software_versions())
    judged.save(here / "calibration.json")
    again = protwin_here(*options, "--calibration", "calibration.json", "--json")
    assert again.returncode == 0, again.stderr
    assert [one["plan"] for one in json.loads(again.stdout)["plans"]][:3] == [
        plan.plan.model_dump(mode="json") for plan in found.plans[:3]
    ], "the same plans for the same seed"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ((*CONFIGURED,), "Give --sequence-length"),
        ((*OF_FILE, "--batch-size=1"), "Leave out --batch-size"),
        ((*OF_FILE, "--method=bypass"), "--student"),
        ((*OF_FILE, "--method=osft"), "Add --unfreeze-rank-ratio 0.25"),
        ((*OF_FILE, "--method=full", "--unfreeze-rank-ratio=0.5"), "--method full factorises nothing"),
        ((*OF_FILE, "--student=student.toml"), "Name a config.json"),
        ((*OF_FILE, "--plans=2"), "--plans"),
        ((*OF_FILE, "--minutes=0"), "no time"),
        ((*OF_FILE, "--minutes=0.001", "--calibration=good.json"), "minutes are too few to say anything"),
        ((*OF_FILE, "--device-budget=1KiB"), "1 KiB"),
        ((*OF_FILE, "--calibration=other.json"), "Calibrate this machine"),
        ((*OF_FILE, "--calibration=old.json"), "torch 0.1"),
        ((*OF_FILE, "--ranks=2", "--device-budget=1MiB"), "--device-budget"),
        (("validate", "--model", "models.py:nothing", "--hardware=machine.toml"), "no function nothing"),
        (("validate", "--model", "models.py:no_model", "--hardware=machine.toml"), "gives a str"),
        (("validate", "--model", "models.py:broken", "--hardware=machine.toml"), "no weights here"),
        (("validate", "--model", "absent.py:make", "--hardware=machine.toml"), "does not exist"),
        (("validate", "--model", "models.py:make", "--hardware=rtx-3090"), "is not this machine"),
    ],
    ids=lambda value: " ".join(value[3:]) if isinstance(value, tuple) else "",
)
def test_what_makes_no_sense_is_refused(protwin_here: Protwin, here: Path, options: tuple[str, ...], said: str) -> None:
    known: dict[str, Any] = {"hardware_name": HERE.name, "machine": HERE.name, "software": software_versions()}
    Calibration(**known).save(here / "good.json")
    Calibration(**known | {"machine": "another"}).save(here / "other.json")
    Calibration(**known | {"software": {"torch": "0.1"}}).save(here / "old.json")
    assert said in refusal(protwin_here, here, options)
