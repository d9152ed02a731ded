"""Owners of subspaces: every scalar has one rank, work is even, and amounts are those of the rank with the most."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from protwin.shared.layout.layout import layout_of
from protwin.shared.layout.owners import Ownership
from protwin.shared.layout.shards import regions
from protwin.shared.schema.optimizer import Optimizer
from protwin.shared.schema.workload import SubspaceAxis, Workload
from tests.proof_size import examples
from tests.strategies.subspaces import projected_workloads


@settings(max_examples=examples(500, 40))
@given(projected_workloads(max_blocks=3), st.sampled_from((1, 300, 5_000, 10**6)), st.integers(2, 9))
def test_every_scalar_is_sent_once_and_work_is_even(workload: Workload, chunk_bytes: int, num_shards: int) -> None:
    chunks, parameters = layout_of(workload, chunk_bytes).chunks, workload.parameters
    of = Ownership(chunks, parameters, num_shards, Optimizer.ADAMW)
    assert sorted(of.subspaces, key=lambda s: s.trained) == sorted(workload.subspaces, key=lambda s: s.trained)
    for one, subspace in zip(of.gradients, of.subspaces, strict=True):
        assert one.index == subspace.trained
        assert one.ends[0] == 0
        assert one.ends[-1] == parameters[one.index].num_elements
        # Byte by byte: what rank has the scalar, by its place in its region.
        chunk = chunks[one.chunk]
        shares, begins, at = [], [], 0
        for region in regions(chunk, parameters):
            shares.append(region.shard_elements(num_shards) * region.dtype.item_bytes)
            begins.append(at)
            at += region.size_bytes
        offset = next(placed.offset_bytes for placed in chunk.parameters if placed.index == one.index)
        place = max(place for place, begin in enumerate(begins) if begin <= offset)
        for scalar in range(0, parameters[one.index].num_elements, 7):
            rank = (offset - begins[place] + scalar * parameters[one.index].dtype.item_bytes) // shares[place]
            assert one.ends[rank] <= scalar < one.ends[rank + 1]
    load = [0] * num_shards
    work = []
    for subspace, owner in zip(of.subspaces, of.owners, strict=True):
        (n, k), (_, r) = parameters[subspace.frozen].shape, parameters[subspace.trained].shape
        if subspace.axis is SubspaceAxis.ROWS:
            (k, n), (r, _) = parameters[subspace.frozen].shape, parameters[subspace.trained].shape
        work.append(4 * n * k * r)
        load[owner] += work[-1]
    # Of any distribution the busiest rank has at least this.
    least = max(max(work), sum(work) / num_shards)
    assert max(load) <= 2 * least
    assert of.gradient_work.flops == max(load)
