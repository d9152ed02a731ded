"""What the search reads of a section program alone, against the tables that full training has for all modes at once."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from protwin.shared.compile.activation_levels import NO_TASK_BYTES, activation_levels
from protwin.shared.compile.compile import FULL_TRAINING
from protwin.shared.schema.workload import Workload
from protwin.sim.space.section_program import SectionProgram
from tests.proof_size import examples
from tests.strategies.workloads import workloads


@given(workloads(), st.data())
@settings(max_examples=examples(100, 7), deadline=None)
def test_levels_read_from_buffers_are_those_of_the_account(model: Workload, data: st.DataObject) -> None:
    blocks, micro_batches = model.num_blocks, data.draw(st.integers(1, 5))
    n_swap = data.draw(st.integers(0, blocks))
    is_swap = np.arange(blocks) < n_swap
    is_checkpoint = np.array([data.draw(st.lists(st.booleans(), min_size=blocks, max_size=blocks))]) & ~is_swap
    program = SectionProgram.of(FULL_TRAINING, model, is_checkpoint, is_swap=is_swap, micro_batches=micro_batches)
    found = program.levels()
    expected = activation_levels(
        model, is_checkpoint, is_swap[None], np.zeros_like(is_checkpoint, dtype=np.int64), micro_batches
    )
    assert np.array_equal(found.alive_bytes[:, found.kind], expected.alive_bytes[:, expected.kind])
    assert np.array_equal(found.peak_bytes, expected.peak_bytes)
    if micro_batches > 1:
        assert np.array_equal(found.adding_bytes, expected.adding_bytes)
    assert np.array_equal(found.end_bytes, expected.end_bytes)
    kept = found.peak_bytes != NO_TASK_BYTES
    assert np.array_equal(kept[0, blocks + 3 : -1 : 2], is_checkpoint[0, ::-1])
