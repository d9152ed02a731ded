"""What a lookup of rows on the host costs."""

from __future__ import annotations

import pytest

from protwin.shared.schema.schedule import TaskKind
from protwin.sim.costs.task_costs import CostModel, host_adam_bytes_per_s
from tests.shared.looking_up import PLACE_ROWS, ROW_BYTES, WORD_ROWS, lookups, planned
from tests.shared.verdicts import compiled
from tests.sim.hand_made import machine


def test_a_lookup_takes_the_host_and_the_link() -> None:
    """Rows read and written on the host, then copied, on top of the phase."""
    hardware = machine()
    costs = CostModel(hardware)
    forward = compiled(planned(lookups())).tasks[0]
    assert forward.phase is not None
    without = costs.phase_s(forward.phase.model_copy(update={"looked_up_bytes": 0}), TaskKind.FORWARD)
    rows = ROW_BYTES * (WORD_ROWS + PLACE_ROWS)
    link = hardware.host_to_device
    assert not link.table
    copy_s = link.latency_s + rows / link.bandwidth_bytes_per_s
    expected_s = without + 2 * rows / host_adam_bytes_per_s(hardware.host) + copy_s
    assert costs.task_s(forward) == pytest.approx(expected_s, rel=1e-12)
