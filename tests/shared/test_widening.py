"""What device Adam of narrow parameters adds, against a ledger of its steps."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings

from protwin.shared.layout import master_bytes
from protwin.shared.widening import WIDENED_SCALARS, device_adam_peak_bytes
from protwin.sim.chunk_table import chunk_table
from protwin.sim.costs import CostModel
from tests.sim.hand_made import machine
from tests.strategies import PlannedWorkload, planned_workloads


def stepped_peak_bytes(planned: PlannedWorkload, n_persist: int) -> int:
    """Every allocation of device Adam, one after the other; at least 0."""
    layout, parameters = planned.layout, planned.workload.parameters
    chunks = [chunk for chunk in layout.chunks if chunk.id in layout.persistent(n_persist)]
    stepped = [parameters[placed.index] for chunk in chunks for placed in chunk.parameters]
    stepped = [parameter for parameter in stepped if parameter.trainable]
    level = peak = 0
    for wide in (p for p in stepped if not master_bytes(p.dtype)):
        level -= wide.size_bytes
    for narrow in (p for p in stepped if master_bytes(p.dtype)):
        for start in range(0, narrow.num_elements, WIDENED_SCALARS):
            widened = 4 * min(WIDENED_SCALARS, narrow.num_elements - start)
            level += widened
            peak = max(peak, level)
            level -= widened
        level -= narrow.size_bytes
    return peak


@given(planned_workloads(measured=None))
@settings(max_examples=60)
def test_one_gradient_is_widened_at_a_time_and_the_wide_ones_have_gone(planned: PlannedWorkload) -> None:
    layout, parameters = planned.layout, planned.workload.parameters
    table = chunk_table(planned.workload, layout, CostModel(machine(), use_measured=False))
    found = []
    for n_persist in range(len(layout.chunks) + 1):
        chunks = [c for c in layout.chunks if c.is_trainable and c.id in layout.persistent(n_persist)]
        found.append(device_adam_peak_bytes(chunks, parameters))
        assert found[-1] == stepped_peak_bytes(planned, n_persist)
    assert np.array_equal(table.device_adam_bytes, found)
