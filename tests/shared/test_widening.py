"""What device Adam of narrow parameters adds, against a ledger of its steps."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protwin.shared import widening
from protwin.shared.layout import master_bytes
from protwin.shared.shards import regions
from protwin.shared.widening import WIDENED_SCALARS, device_adam_peak_bytes, part_peak_bytes
from protwin.sim.chunk_table import chunk_table
from protwin.sim.costs import CostModel
from tests.sim.hand_made import machine
from tests.strategies import PlannedWorkload, planned_workloads


def stepped_peak_bytes(planned: PlannedWorkload, n_persist: int, piece: int = WIDENED_SCALARS) -> int:
    """Every allocation of device Adam, one after the other; at least 0."""
    layout, parameters = planned.layout, planned.workload.parameters
    chunks = [chunk for chunk in layout.chunks if chunk.id in layout.persistent(n_persist)]
    stepped = [parameters[placed.index] for chunk in chunks for placed in chunk.parameters]
    stepped = [parameter for parameter in stepped if parameter.trainable]
    level = peak = 0
    for wide in (p for p in stepped if not master_bytes(p.dtype)):
        level -= wide.size_bytes
    for narrow in (p for p in stepped if master_bytes(p.dtype)):
        for start in range(0, narrow.num_elements, piece):
            widened = 4 * min(piece, narrow.num_elements - start)
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


def with_parts_by_hand(planned: PlannedWorkload, n_persist: int, n_shard: int, num_ranks: int, piece: int) -> int:
    """As ``stepped_peak_bytes``, then one rank's parts, region by region; their gradients stay."""
    layout, parameters = planned.layout, planned.workload.parameters
    persistent = [c for c in layout.chunks if c.is_trainable and c.id in layout.persistent(n_persist)]
    level = -sum(
        p.size_bytes for c in persistent for placed in c.parameters if (p := parameters[placed.index]).trainable
    )
    peak = stepped_peak_bytes(planned, n_persist, piece)
    for chunk in layout.chunks:
        if chunk.is_trainable and chunk.id in layout.sharded(n_persist, n_shard):
            for region in regions(chunk, parameters):
                if region.trainable and master_bytes(region.dtype):
                    left = region.shard_elements(num_ranks)
                    while left:
                        widened = min(left, piece)
                        peak = max(peak, level + 4 * widened)
                        left -= widened
    return peak


@given(planned_workloads(measured=None), st.integers(1, 5), st.sampled_from((1, 16, 2**20)), st.data())
@settings(max_examples=60)
def test_parts_of_a_rank_are_widened_when_the_persistent_gradients_have_gone(
    planned: PlannedWorkload, num_ranks: int, piece: int, data: st.DataObject
) -> None:
    layout, parameters = planned.layout, planned.workload.parameters
    n_persist = data.draw(st.integers(0, len(layout.chunks)))
    n_shard = data.draw(st.integers(0, len(layout.chunks) - n_persist))
    trained = [chunk for chunk in layout.chunks if chunk.is_trainable]
    persistent = [chunk for chunk in trained if chunk.id in layout.persistent(n_persist)]
    shards = [chunk for chunk in trained if chunk.id in layout.sharded(n_persist, n_shard)]
    with pytest.MonkeyPatch.context() as patched:
        # Pieces so small that parameters of a few kilobytes have several.
        patched.setattr(widening, "WIDENED_SCALARS", piece)
        found = max(
            device_adam_peak_bytes(persistent, parameters),
            part_peak_bytes(shards, persistent, parameters, num_ranks),
        )
    assert found == with_parts_by_hand(planned, n_persist, n_shard, num_ranks, piece)
