"""The space of plans: whole, each plan once, and as large as its knobs are told to be."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings

from protwin.shared.basics.errors import PlanError
from protwin.shared.compile.compile import compile_schedule
from protwin.shared.layout.layout import Layout, build_layout
from protwin.shared.layout.residencies import GATHERED, ChunkResidency, residencies
from protwin.shared.schema.plan import ActivationMode, ParallelMode, Plan
from protwin.shared.schema.workload import DType, Parameter, Workload
from protwin.sim.searching.search import search
from protwin.sim.space.enumerate import chunk_sizes, enumerate_space
from protwin.sim.space.space import LayoutGrid, SearchSpace
from protwin.sim.space.step_spec import StepSpec
from tests.proof_size import examples
from tests.sim.fastest import fastest_request
from tests.sim.hand_made import machine, workload
from tests.strategies.workloads import workloads


def _identity(plan: Plan, model: Workload, layout: Layout) -> tuple[object, ...]:
    """What a plan comes to, whatever its knobs say."""
    places = residencies(plan, layout)
    num_gathered = sum(place in GATHERED for place in places)
    moves = [model.profile_of(block).swappable_bytes > 0 for block in range(model.num_blocks)]
    modes = tuple(
        ActivationMode.KEEP if mode is ActivationMode.SWAP and not moves[block] else mode
        for block, mode in enumerate(plan.modes(model.num_blocks))
    )
    if set(places) <= {ChunkResidency.PERSISTENT}:
        return modes, plan.prefetch_depth if ActivationMode.SWAP in modes else 0
    chunks = tuple(chunk.parameters for chunk in layout.chunks)
    return chunks, places, min(plan.n_buffer, num_gathered), plan.prefetch_depth, modes


def _places(layout: Layout, n_persist: int, n_host_stepped: int) -> tuple[ChunkResidency, ...]:
    """By hand: where chunks lie that are persistent, host-stepped or offloaded."""
    kept = [ChunkResidency.PERSISTENT] * n_persist + [ChunkResidency.HOST_STEPPED] * n_host_stepped
    found = kept + [ChunkResidency.OFFLOADED] * (len(layout.chunks) - len(kept))
    return tuple(
        ChunkResidency.PERSISTENT if place is ChunkResidency.HOST_STEPPED and chunk.num_trainable == 0 else place
        for place, chunk in zip(found, layout.chunks, strict=True)
    )


def _plans(model: Workload, space: SearchSpace | None = None) -> list[Plan]:
    found = []
    for grid in enumerate_space(model, space):
        found += [grid.plan(model, *index) for index in _indices(grid)]
    return found


def _indices(grid: LayoutGrid) -> list[tuple[int, int, int]]:
    return [
        (residency, depth, int(mode))
        for trips, rows in grid.modes.groups
        for residency, depth in np.argwhere(grid.is_distinct(trips)).tolist()
        for mode in rows
    ]


@given(workloads(max_blocks=3))
@settings(max_examples=examples(80, 6))
def test_the_space_holds_every_plan_once_and_each_compiles(model: Workload) -> None:
    space = SearchSpace(prefetch_depth=(1, 3), n_host_stepped=None)
    found = _plans(model, space)
    assert sum(grid.num_candidates for grid in enumerate_space(model, space)) == len(found)
    layouts = {
        size: build_layout(model.parameters, num_blocks=model.num_blocks, chunk_bytes=size)
        for size in {plan.chunk_bytes for plan in found}
    }
    identities = [_identity(plan, model, layouts[plan.chunk_bytes]) for plan in found]
    assert len(set(identities)) == len(identities)
    for plan in found[:: max(1, len(found) // 40)]:
        compile_schedule(plan, model)
    # Small models have few chunks, and no value of n_persist is left out, nor any number of host-stepped chunks.
    known = {(identity[0], identity[1]) for identity in identities if len(identity) > 2}
    for chunk_bytes in chunk_sizes(model):
        layout = build_layout(model.parameters, num_blocks=model.num_blocks, chunk_bytes=chunk_bytes)
        chunks = tuple(chunk.parameters for chunk in layout.chunks)
        for first in range(len(layout.chunks) + 1):
            for counts in ((first, 0), (0, first), (first, len(layout.chunks) - first)):
                places = _places(layout, *counts)
                assert set(places) <= {ChunkResidency.PERSISTENT} or (chunks, places) in known


@given(workloads(max_blocks=4))
@settings(max_examples=examples(100, 7))
def test_no_two_plans_are_equally_simple(model: Workload) -> None:
    space = SearchSpace(n_host_stepped=None)
    keys = [grid.simplicity(*index) for grid in enumerate_space(model, space) for index in _indices(grid)]
    assert len(set(keys)) == len(keys)


@given(workloads(max_blocks=3))
@settings(max_examples=examples(40, 7))
def test_every_choice_of_the_disk_is_there_once_and_compiles(model: Workload) -> None:
    space = SearchSpace(
        prefetch_depth=1, n_checkpoint=0, n_buffer=1000, n_disk_state=(0, 1, 2), n_disk=(0, 1), n_staging=(1, 2)
    )
    grids = enumerate_space(model, space)
    keys = [grid.simplicity(*index) for grid in grids for index in _indices(grid)]
    assert len(set(keys)) == len(keys)
    found: set[tuple[object, ...]] = set()
    for grid in grids:
        trainable = [chunk.is_trainable for chunk in grid.layout.chunks]
        for number, index in enumerate(_indices(grid)):
            plan = grid.plan(model, *index)
            if number % 16 == 0:
                compile_schedule(plan, model, grid.layout)
            stepped = sum(trainable[len(trainable) - plan.n_disk_state :])
            places = plan.n_staging if stepped or plan.n_disk else 0
            chunks = residencies(plan, grid.layout)
            key = (plan.chunk_bytes, chunks, stepped, plan.n_disk, places)
            assert key not in found
            found.add(key)
        # By hand: of one layout, all that agrees where every chunk is offloaded.
        num_chunks = len(trainable)
        for of_state, of_parameters, places in ((1, 0, 1), (1, 1, 2), (2, 0, 2), (2, 1, 1)):
            if of_state <= num_chunks and all(trainable):
                offloaded = (ChunkResidency.OFFLOADED,) * num_chunks
                assert (grid.layout.chunk_bytes, offloaded, of_state, of_parameters, places) in found


def test_numbers_on_the_disk_that_no_plan_can_have_are_named() -> None:
    with pytest.raises(PlanError, match="n_disk_state is at least 9 but no plan offloads more than 4 chunks"):
        enumerate_space(workload(num_blocks=4), SearchSpace(chunk_bytes=256, n_disk_state=9))
    with pytest.raises(PlanError, match="n_disk is at least 2 but n_disk_state is at most 1"):
        enumerate_space(workload(num_blocks=4), SearchSpace(n_disk_state=1, n_disk=2))
    with pytest.raises(PlanError, match="one rank alone knows chunks on a disk"):
        enumerate_space(
            workload(num_blocks=4),
            SearchSpace(n_disk_state=1),
            StepSpec(parallel=ParallelMode.REPLICATED, num_ranks=2),
        )


def test_many_buffers_come_in_growing_steps() -> None:
    (grid,) = enumerate_space(workload(num_blocks=200), SearchSpace(chunk_bytes=256, n_persist=0, n_checkpoint=0))
    counts = grid.n_buffer.tolist()
    assert counts[:9] == list(range(1, 10))
    assert counts[-1] == 200
    assert len(counts) < 40
    assert all(following <= 1.5 * count for count, following in pairwise(counts[1:]))


def test_sizes_of_chunks_follow_the_largest_block() -> None:
    assert chunk_sizes(workload(num_blocks=2)) == [256, 512]
    big = workload(num_blocks=1)
    weight = Parameter(name="w", shape=(100 * 2**20 + 64,), dtype=DType.FLOAT32, block=0)
    big = big.model_copy(update={"parameters": (weight,)})
    assert chunk_sizes(big) == [101 * 2**20, 201 * 2**20, 401 * 2**20, 801 * 2**20]


def of_ranks(space: SearchSpace | None = None, *, is_offloading: bool | None = True) -> set[tuple[int, int, int]]:
    """Persistent, sharded and offloaded chunks of a model of four, on ranks in mode sharded."""
    step = StepSpec(parallel=ParallelMode.SHARDED, num_ranks=8)
    space = (space or SearchSpace()).model_copy(update={"chunk_bytes": (256,)})
    (grid,) = enumerate_space(workload(num_blocks=4), space, step, is_offloading=is_offloading)
    counts = grid.counts[:, (ChunkResidency.PERSISTENT, ChunkResidency.SHARDED, ChunkResidency.OFFLOADED)].tolist()
    assert grid.counts.sum(axis=1).tolist() == [4] * len(counts)
    return {(persistent, sharded, offloaded) for persistent, sharded, offloaded in counts}


def test_ranks_in_mode_sharded_shard_all_that_would_travel_or_some_of_it() -> None:
    offloaded = {(n_persist, 0, 4 - n_persist) for n_persist in range(4)}
    nothing_travels = {(n_persist, 4 - n_persist, 0) for n_persist in range(4)}
    nothing_persists = {(0, n_shard, 4 - n_shard) for n_shard in range(5)}
    assert of_ranks() == offloaded | nothing_travels | nothing_persists
    assert of_ranks(is_offloading=None) == of_ranks() | {(4, 0, 0)}
    assert of_ranks(SearchSpace(n_persist=(1, 2))) == {(1, n, 3 - n) for n in range(4)} | {(2, 0, 2), (2, 2, 0)}


def test_named_numbers_of_shards_go_with_every_number_of_persistent_chunks() -> None:
    assert of_ranks(SearchSpace(n_shard=1)) == {(0, 1, 3), (1, 1, 2), (2, 1, 1), (3, 1, 0)}
    assert of_ranks(SearchSpace(n_shard=(0,))) == {(n_persist, 0, 4 - n_persist) for n_persist in range(4)}


@given(workloads(max_blocks=3))
@settings(max_examples=examples(60, 6))
def test_every_plan_with_shards_is_there_once_and_compiles(model: Workload) -> None:
    step = StepSpec(parallel=ParallelMode.SHARDED, num_ranks=3)
    grids = enumerate_space(model, SearchSpace(prefetch_depth=(1, 2)), step)
    found = [(grid, index, grid.plan(model, *index)) for grid in grids for index in _indices(grid)]
    keys = [grid.simplicity(*index) for grid, index, _ in found]
    assert len(set(keys)) == len(keys)
    layouts = {grid.layout.chunk_bytes: grid.layout for grid in grids}
    identities = {
        (
            _identity(plan, model, layouts[plan.chunk_bytes]),
            layouts[plan.chunk_bytes].sharded(plan.n_persist, plan.n_shard),
        )
        for _, _, plan in found
    }
    assert len(identities) == len(found)
    for _, _, plan in found[:: max(1, len(found) // 20)]:
        compile_schedule(plan, model)


def test_only_ranks_in_mode_sharded_can_be_asked_to_shard() -> None:
    for step in (StepSpec(), StepSpec(parallel=ParallelMode.REPLICATED, num_ranks=2)):
        with pytest.raises(PlanError, match=rf"n_shard is at least 2 but parallel is {step.parallel}"):
            enumerate_space(workload(num_blocks=4), SearchSpace(n_shard=(2, 3)), step)
        enumerate_space(workload(num_blocks=4), SearchSpace(n_shard=(0, 3)), step)


@pytest.mark.parametrize("mode", [ParallelMode.SHARDED, ParallelMode.DDP])
def test_only_hosts_with_whole_chunks_can_be_asked_to_step_them(mode: ParallelMode) -> None:
    with pytest.raises(
        PlanError, match=rf"n_host_stepped is at least 1 but parallel is {mode}.* Allow n_host_stepped = 0"
    ):
        enumerate_space(workload(num_blocks=4), SearchSpace(n_host_stepped=1), StepSpec(parallel=mode, num_ranks=2))


def test_knobs_can_be_fixed() -> None:
    space = SearchSpace(chunk_bytes=256, n_persist=1, n_host_stepped=1, n_buffer=2, prefetch_depth=2, n_checkpoint=3)
    result = search(fastest_request(workload=workload(num_blocks=4), hardware=machine(), space=space))
    assert result.certificate.num_candidates == 1
    fixed = {
        "chunk_bytes": 256,
        "n_persist": 1,
        "n_host_stepped": 1,
        "n_buffer": 2,
        "prefetch_depth": 2,
        "n_checkpoint": 3,
    }
    assert result.plan.model_dump(include=set(fixed)) == fixed


@pytest.mark.parametrize(
    ("space", "message"),
    [
        (SearchSpace(n_checkpoint=(9, 12)), "n_checkpoint is at least 9 but the workload has 4 blocks"),
        (SearchSpace(n_persist=50), "n_persist is at least 50 but no layout has more than 4 chunks"),
        (SearchSpace(chunk_bytes=1024, n_persist=0, n_buffer=0), "n_buffer is at most 0 but .* needs 1"),
    ],
)
def test_an_empty_space_says_which_knob_empties_it(space: SearchSpace, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        search(fastest_request(workload=workload(num_blocks=4), hardware=machine(), space=space))


def test_a_model_without_parameters_in_its_blocks_has_plans_too() -> None:
    model = workload(num_blocks=2)
    bare = model.model_copy(update={"parameters": (Parameter(name="w", shape=(64,), dtype=DType.FLOAT32),)})
    result = search(fastest_request(workload=bare, hardware=machine()))
    assert result.certificate.num_candidates > 3
    assert (result.plan.n_persist, result.plan.n_buffer) == (1, 0)
