"""A calibration looks like every other table, and its names are no markup."""

from __future__ import annotations

from protwin.shared.schema.calibration import Calibration, Factor
from protwin.shared.schema.plan import Plan
from protwin.shared.schema.schedule import TaskKind
from protwin.shared.tables.calibration import calibration_tables
from protwin.shared.tables.record import plan_table
from protwin.shared.tables.terminal import as_text


def test_a_calibration_has_the_look_of_a_plan() -> None:
    text = as_text(calibration_tables(Calibration(hardware_name="[red]machine[/red]", machine="a machine")))
    plan = as_text([plan_table(Plan(workload_id="w", chunk_bytes=1, n_persist=0, n_buffer=1))])
    assert text.startswith("Calibration of [red]machine[/red]\ntask kind")
    assert set("┏┃│┌┓") & set(text) == set()
    assert "─" in text
    assert "─" in plan


def test_what_records_cannot_tell_is_named_as_unknown() -> None:
    """A run with everything on the device has no copies; what nothing was measured of has no empty table."""
    seen = (TaskKind.FORWARD, TaskKind.BACKWARD, TaskKind.DEVICE_ADAM, TaskKind.GATHER)
    bare = Calibration(hardware_name="a machine", machine="a machine", factors=dict.fromkeys(seen, Factor()))
    text = " ".join(as_text(calibration_tables(bare)).split())
    assert "recompute (as forward)" in text
    unknown = text.partition("No run had tasks of these kinds")[2].partition("Run-to-run")[0]
    assert "gradient offload" in unknown
    assert "activation fetch (as gather)" in unknown
    assert "backward" not in unknown
    assert "side by side: not measured" in text
    assert "not fitted to: not known yet" in text
    judged = bare.model_copy(update={"iteration_error_frac": 0.07})
    assert "not fitted to: 7.0%" in as_text(calibration_tables(judged))
