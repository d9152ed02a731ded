"""What device Adam of narrow parameters adds, against a ledger of its steps."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protwin.shared.compile.chunk_facts import ChunkFacts, StepKnobs, integers
from protwin.shared.layout import adam_memory as widening
from protwin.shared.layout.adam_memory import WIDENED_SCALARS
from protwin.shared.layout.layout import Layout, build_layout
from protwin.shared.layout.shards import regions
from protwin.shared.optimizers.state import master_bytes
from protwin.shared.schema.optimizer import Optimizer
from protwin.shared.schema.plan import ParallelMode
from protwin.shared.schema.workload import DType, Parameter
from tests.proof_size import examples
from tests.strategies.plans import PlannedWorkload, planned_workloads


def stepped_peak_bytes(
    layout: Layout, parameters: Sequence[Parameter], n_persist: int, piece: int = WIDENED_SCALARS
) -> int:
    """Every allocation of device Adam, one after the other; at least 0."""
    chunks = [chunk for chunk in layout.chunks if chunk.id in layout.persistent(n_persist)]
    stepped = [parameters[placed.index] for chunk in chunks for placed in chunk.parameters]
    stepped = [parameter for parameter in stepped if parameter.trainable]
    level = peak = 0
    for wide in (p for p in stepped if not master_bytes(p.dtype, Optimizer.ADAMW)):
        level -= wide.size_bytes
    for chunk in chunks:
        members = [parameters[placed.index] for placed in chunk.parameters]
        waiting = [p for p in members if p.trainable and master_bytes(p.dtype, Optimizer.ADAMW)]
        while waiting:
            called = [waiting.pop(0)]
            while waiting and sum(p.num_elements for p in [*called, waiting[0]]) <= piece:
                called.append(waiting.pop(0))
            # A parameter of more scalars than a piece is called alone, and widened piece by piece.
            peak = max(peak, level + 4 * min(piece, sum(p.num_elements for p in called)))
            level -= sum(p.size_bytes for p in called)
    return peak


@given(planned_workloads(measured=None))
@settings(max_examples=examples(240, 24))
def test_neighbours_are_widened_at_once_and_the_wide_ones_have_gone(planned: PlannedWorkload) -> None:
    layout, parameters = planned.layout, planned.workload.parameters
    for n_persist in range(len(layout.chunks) + 1):
        chunks = [c.id for c in layout.chunks if c.is_trainable and c.id in layout.persistent(n_persist)]
        found = ChunkFacts.of(layout, parameters, StepKnobs()).widened_bytes(integers(chunks), integers([]))
        assert found == stepped_peak_bytes(layout, parameters, n_persist)


def with_parts_by_hand(
    layout: Layout, parameters: Sequence[Parameter], n_persist: int, n_shard: int, num_ranks: int, piece: int
) -> int:
    """As ``stepped_peak_bytes``, then one rank's parts, region by region; their gradients stay."""
    peak = stepped_peak_bytes(layout, parameters, n_persist, piece)
    level = -sum(
        parameters[placed.index].size_bytes
        for chunk in layout.chunks
        if chunk.id in layout.persistent(n_persist)
        for placed in chunk.parameters
        if parameters[placed.index].trainable
    )
    for chunk in layout.chunks:
        if chunk.id in layout.sharded(n_persist, n_shard):
            for region in regions(chunk, parameters):
                left = (
                    region.shard_elements(num_ranks)
                    if region.trainable and master_bytes(region.dtype, Optimizer.ADAMW)
                    else 0
                )
                while left:
                    widened = min(left, piece)
                    peak = max(peak, level + 4 * widened)
                    left -= widened
    return peak


SEVERAL = st.lists(
    st.tuples(st.integers(1, 2000), st.sampled_from((DType.BFLOAT16, DType.BFLOAT16, DType.FLOAT32)), st.booleans()),
    min_size=1,
    max_size=12,
)


@given(SEVERAL, st.integers(1, 5), st.sampled_from((1000, 8192)), st.sampled_from((16, 500, 2**20)), st.data())
def test_parts_of_a_rank_are_widened_when_the_persistent_gradients_have_gone(
    drawn: list[tuple[int, DType, bool]], num_ranks: int, chunk_bytes: int, piece: int, data: st.DataObject
) -> None:
    parameters = [
        Parameter(name=f"blocks.{place}.weight", shape=(elements,), dtype=dtype, block=place // 2, trainable=trainable)
        for place, (elements, dtype, trainable) in enumerate(drawn)
    ]
    layout = build_layout(parameters, num_blocks=(len(parameters) + 1) // 2, chunk_bytes=chunk_bytes)
    n_persist = data.draw(st.integers(0, len(layout.chunks)))
    n_shard = data.draw(st.integers(0, len(layout.chunks) - n_persist))
    trained = [chunk for chunk in layout.chunks if chunk.is_trainable]
    persistent = [chunk.id for chunk in trained if chunk.id in layout.persistent(n_persist)]
    shards = [chunk.id for chunk in trained if chunk.id in layout.sharded(n_persist, n_shard)]
    step = StepKnobs(parallel=ParallelMode.SHARDED, num_ranks=num_ranks)
    with pytest.MonkeyPatch.context() as patched:
        # Pieces so small that parameters of a few kilobytes have several.
        patched.setattr(widening, "WIDENED_SCALARS", piece)
        found = ChunkFacts.of(layout, parameters, step).widened_bytes(integers(persistent), integers(shards))
    assert found == with_parts_by_hand(layout, parameters, n_persist, n_shard, num_ranks, piece)


@given(st.lists(st.integers(0, 9), max_size=9), st.integers(0, 12))
def test_neighbours_are_as_many_as_a_call_may_have_and_none_is_lost(counts: list[int], most: int) -> None:
    found = list(widening.neighbours(counts, most))
    assert [place for start, end in found for place in range(start, end)] == list(range(len(counts)))
    for start, end in found:
        assert end == start + 1 or sum(counts[start:end]) <= most
        assert end == len(counts) or sum(counts[start : end + 1]) > most, "one more would have done"
