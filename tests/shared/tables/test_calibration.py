"""A calibration looks like every other table, and its names are no markup."""

from __future__ import annotations

from protwin.shared.schema.calibration import Calibration
from protwin.shared.schema.plan import Plan
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
