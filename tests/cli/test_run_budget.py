"""``protwin run`` with a budget that its plan may exceed is refused before anything is built."""

from __future__ import annotations

from pathlib import Path

import pytest

from protwin.shared.basics.units import format_bytes, format_enough_bytes
from protwin.shared.compile.compile import compile_schedule
from protwin.shared.schema.plan import Plan
from protwin.shared.schema.workload import Workload
from protwin.shared.verify.guaranteed_peak import guaranteed_device_peak
from tests.cli.conftest import Protwin
from tests.cli.refusals import RUN, refusal


@pytest.fixture
def peak_bytes(folder: Path) -> int:
    schedule = compile_schedule(Plan.load(folder / "plan.json"), Workload.load(folder / "workload.json"))
    return guaranteed_device_peak(schedule).size_bytes


@pytest.mark.parametrize("missing_bytes", [1, 2**20])
def test_the_peak_and_the_budget_are_named(
    protwin_here: Protwin, folder: Path, peak_bytes: int, missing_bytes: int
) -> None:
    said = refusal(protwin_here, folder, (*RUN, f"--device-budget={peak_bytes - missing_bytes}"))
    assert f"may reach {format_bytes(peak_bytes)}, during " in said
    assert f"raise it to {format_enough_bytes(peak_bytes)}." in said


def test_a_budget_of_the_peak_is_no_reason_to_refuse(protwin_here: Protwin, folder: Path, peak_bytes: int) -> None:
    """What is refused then is the model, which is another than the workload's."""
    said = refusal(protwin_here, folder, (*RUN, f"--device-budget={peak_bytes}"))
    assert "--device-budget" not in said
