"""``protwin run`` with a budget that its plan may exceed is refused before anything is built."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from protwin.shared.basics.units import format_bytes, format_enough_bytes
from protwin.shared.compile.compile import compile_schedule
from protwin.shared.schema.plan import Plan
from protwin.shared.schema.workload import Workload
from protwin.shared.verify.guaranteed_peak import guaranteed_device_peak
from protwin.shared.workloads.source import load_workload
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


def test_a_model_that_the_machine_cannot_hold_is_refused_without_torch(tmp_path: Path) -> None:
    """14 bytes for each of its published parameters: 2 of the weight, 4 of the gradient widened, and two moments."""
    workload = load_workload("llama-3.1-405b", batch_size=1, sequence_length=512)
    plan = Plan(workload_id=workload.identity, chunk_bytes=2**40, n_persist=1, n_buffer=0, n_checkpoint=0)
    plan.save(tmp_path / "plan.json")
    asked = ["run", "--plan", str(tmp_path / "plan.json"), "--model", "llama-3.1-405b"]
    asked += ["--batch-size", "1", "--sequence-length", "512"]
    code = (
        f"import sys; sys.modules['torch'] = None; sys.argv = {['protwin', *asked]!r}\n"
        "from protwin.shared.cli.main import main; main()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 2
    need = format_bytes(14 * 405_853_388_800)
    assert f"llama-3.1-405b with its optimizer state needs about {need} but this machine has " in done.stderr
