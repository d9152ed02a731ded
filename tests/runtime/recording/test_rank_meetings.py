"""Waits of ranks for each other, on clocks that have nothing in common, against a run that is made up on one clock."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protwin.runtime.recording.rank_meetings import RankStamps, clock_name, groups_of, meetings_of
from protwin.shared.basics.errors import ProtwinError
from protwin.shared.compile.compile import compile_schedule
from protwin.shared.schema.plan import ParallelMode, Plan
from protwin.shared.schema.schedule import Lane, TaskKind
from tests.shared.laid_out import decoder_workload

Array = npt.NDArray[np.float64]
NUM_ITERATIONS = 20
PERIOD_S = 1.0
RATE_FRAC = 2e-5
DRIFT_S = 2 * PERIOD_S * RATE_FRAC


@dataclass(frozen=True)
class Run:
    """What happened, on the one true clock: (R, I) and (R, I, C)."""

    begins_s: Array
    came_s: Array
    ends_s: Array
    waited_s: Array


def run_of(num_ranks: int, groups: npt.NDArray[np.int64], seed: int) -> Run:
    """Ranks come to each collective at random times; it ends a while after the last of its group has come."""
    random = np.random.default_rng(seed)
    num_collectives = groups.shape[1]
    begins_s = PERIOD_S * np.arange(NUM_ITERATIONS) + random.uniform(0, 0.01, (num_ranks, NUM_ITERATIONS))
    at_s = 0.02 + np.sort(random.uniform(0, 0.9, num_collectives)) + PERIOD_S * np.arange(NUM_ITERATIONS)[:, None]
    came_s = at_s + random.uniform(0, 0.01, (num_ranks, NUM_ITERATIONS, num_collectives))
    ends_s, waited_s = np.empty_like(came_s), np.empty_like(came_s)
    for rank in range(num_ranks):
        for column in range(num_collectives):
            together = [other for other in range(num_ranks) if groups[other, column] == groups[rank, column]]
            last_s = np.max([came_s[other, :, column] for other in together], axis=0)
            waited_s[rank, :, column] = last_s - came_s[rank, :, column]
            ends_s[rank, :, column] = last_s + 0.003
    return Run(begins_s, came_s, ends_s, waited_s)


def stamped(run: Run, clocks: list[int], offsets_s: Array, rates: Array, jitter_s: float = 0.0) -> list[RankStamps]:
    """``run`` as each rank's clock tells it; ends are told up to ``jitter_s`` later than they are."""
    random = np.random.default_rng(1)
    found = []
    for rank, clock in enumerate(clocks):

        def on(times_s: Array, clock: int = clock) -> Array:
            return times_s * rates[clock] + offsets_s[clock]

        ends_s = run.ends_s[rank] + random.uniform(0, jitter_s, run.ends_s[rank].shape)
        begins_s = on(run.begins_s[rank])
        iterations = np.arange(NUM_ITERATIONS) + 3
        stamps = (iterations[:-1], begins_s[:-1], np.diff(begins_s), on(run.came_s[rank])[:-1], on(ends_s)[:-1])
        found.append(RankStamps(f"machine {clock}", *stamps))
    return found


@settings(max_examples=30)
@given(st.lists(st.integers(0, 2), min_size=2, max_size=5), st.integers(1, 6), st.integers(0, 10**6))
def test_ranks_on_any_clocks_wait_as_on_one(clocks: list[int], num_collectives: int, seed: int) -> None:
    """Clocks hours apart, whose rates differ: within a period that comes to less than ``DRIFT_S``."""
    groups = np.zeros((len(clocks), num_collectives), dtype=np.int64)
    run, random = run_of(len(clocks), groups, seed), np.random.default_rng(seed)
    stamps = stamped(run, clocks, random.uniform(-1e4, 1e4, 3), 1 + random.uniform(-RATE_FRAC, RATE_FRAC, 3))
    found = meetings_of(stamps, groups)
    rows = found.typical - 3
    assert found.waited_s == pytest.approx(run.waited_s[:, rows].mean(axis=1), abs=DRIFT_S)
    begins_s = found.begins_s - found.begins_s[0]
    assert begins_s == pytest.approx((run.begins_s - run.begins_s[0])[:, rows], abs=DRIFT_S)
    for rank, one in enumerate(stamps):
        last_s = one.of(found.typical).starts_s + run.waited_s[rank, rows]
        assert found.came_s[rank] == pytest.approx(last_s, abs=DRIFT_S)
    totals_s = run.waited_s[:, rows].mean(axis=1).sum(axis=1)
    assert totals_s[found.slowest] <= totals_s.min() + 2 * num_collectives * DRIFT_S


def test_ends_that_are_told_late_hide_waits_of_their_length_alone() -> None:
    clocks, groups = [0, 0, 1, 1], np.zeros((4, 8), dtype=np.int64)
    run = run_of(4, groups, 0)
    found = meetings_of(stamped(run, clocks, np.array([0.0, 500.0]), np.array([1.0, 1 + 1e-5]), jitter_s=1e-3), groups)
    assert found.waited_s == pytest.approx(run.waited_s[:, found.typical - 3].mean(axis=1), abs=1e-3)


def test_machines_that_meet_by_way_of_others_alone() -> None:
    """Machine 3 meets 1 and 2, which meet 0: shards within pairs of ranks, replicas across them."""
    groups = np.array([[0, 0], [0, 1], [1, 0], [1, 1]])
    run = run_of(4, groups, 5)
    offsets_s = np.array([0.0, 7.0, -90.0, 1234.5])
    found = meetings_of(stamped(run, [0, 1, 2, 3], offsets_s, np.ones(4)), groups)
    assert found.waited_s == pytest.approx(run.waited_s[:, found.typical - 3].mean(axis=1), abs=1e-6)
    apart = np.array([[0], [0], [1], [1]])
    with pytest.raises(ProtwinError, match="the clocks of some machines cannot be compared"):
        meetings_of(stamped(run_of(4, apart, 5), [0, 1, 2, 3], offsets_s, np.ones(4)), apart)


def test_groups_are_those_of_the_axes() -> None:
    """Two nodes of three ranks: shards are gathered within each, and averaged over the replicas across."""
    workload = decoder_workload(2)
    plan = Plan(
        workload_id=workload.identity,
        chunk_bytes=2**23,
        n_persist=1,
        n_buffer=3,
        max_gradient_norm=1.0,
        parallel=ParallelMode.SHARDED,
        num_ranks=6,
    )
    for shard_ranks, gathers, averages in ((None, [0] * 6, []), (3, [0, 0, 0, 1, 1, 1], [0, 1, 2, 0, 1, 2])):
        schedule = compile_schedule(plan.model_copy(update={"shard_ranks": shard_ranks}), workload)
        groups, program = groups_of(schedule), schedule.lanes[Lane.COLLECTIVE]
        kinds = [schedule.tasks[task].kind for task in program]
        found = {kind: groups[:, kinds.index(kind)].tolist() for kind in set(kinds)}
        assert found[TaskKind.ALL_GATHER] == found[TaskKind.REDUCE_SCATTER] == gathers
        replicas = [groups[:, at].tolist() for at, task in enumerate(program) if schedule.tasks[task].num_ranks == 2]
        assert bool(replicas) == bool(averages)
        assert all(one == averages for one in replicas)


def test_iterations_are_those_that_count_on_all_ranks() -> None:
    groups = np.zeros((2, 2), dtype=np.int64)
    one, other = stamped(run_of(2, groups, 3), [0, 0], np.zeros(1), np.ones(1))
    odd = one.of(one.iterations[one.iterations % 2 == 1])
    found = meetings_of([odd, other], groups)
    assert set(found.iterations) == set(odd.iterations)
    assert set(found.typical) <= set(found.iterations)
    assert 0 < len(found.typical) <= len(found.iterations) / 2 + 1, "the fastest quarter and the slowest are left out"
    with pytest.raises(ProtwinError, match="no iteration counts on all ranks"):
        meetings_of([odd, other.of(other.iterations[other.iterations % 2 == 0])], groups)


def test_what_is_not_exchanged_is_not_waited_for() -> None:
    """A part without elements: the rank that comes first has ended before the other comes."""
    times = np.arange(3.0)
    first, second = (
        RankStamps("here", np.arange(3), times, np.ones(3), times[:, None] + at_s, times[:, None] + at_s + 0.001)
        for at_s in (0.1, 0.5)
    )
    found = meetings_of([first, second], np.zeros((2, 1), dtype=np.int64))
    assert found.waited_s == pytest.approx(np.array([[0.001], [0.0]]))


def test_processes_of_one_machine_name_one_clock() -> None:
    assert clock_name() == clock_name() != ""
