"""Ranks that are not alike, against timelines by hand, a plain longest path, and the one rank that stands for all."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_allclose

from protwin.shared.basics.errors import HardwareError, PlanError
from protwin.shared.catalogue.machines import machine as known_machine
from protwin.shared.compile.compile import compile_schedule
from protwin.shared.schema.hardware import Hardware
from protwin.shared.schema.plan import ParallelMode, Plan
from protwin.shared.schema.schedule import Lane, Schedule, TaskKind
from protwin.shared.schema.workload import Workload
from protwin.sim.costs.contention import ContentionModel
from protwin.sim.engine.rank_groups import RankGroup, simulate_group_timings, simulate_groups
from protwin.sim.engine.simulator import simulate, simulate_timing
from tests.cli.saved import decoder
from tests.proof_size import examples
from tests.sim.hand_made import plan, workload
from tests.strategies.plans import PlannedWorkload, parallel_workloads

DURATIONS = st.floats(0, 4) | st.sampled_from((0.0, 0.5, 1.0, 2.0))
ALONE = ContentionModel.none(num_ranks=2)


def ddp_of_two() -> tuple[Schedule, list[str]]:
    """Two blocks, everything on the device, two ranks."""
    model = workload(2)
    knobs = plan(model, n_persist=2, n_buffer=0).model_copy(update={"parallel": ParallelMode.DDP, "num_ranks": 2})
    schedule = compile_schedule(knobs, model)
    return schedule, [task.name for task in schedule.tasks]


# -- by hand ---------------------------------------------------------------------------------------------------------


def test_a_slow_rank_holds_up_a_fast_one_at_every_collective() -> None:
    # Compute tasks take 1 s on the fast rank and 2 s on the slow one, collectives 3 s.  The slow rank ends the
    # backward of block 1 at 12, that of block 0 at 14: all-reduces from 12 to 15 and from 15 to 18.  Adam ends at 19
    # and at 20, so the slow rank's next iteration begins at 20, and with it everything is 20 later.
    schedule, names = ddp_of_two()
    durations = [[3.0 if t.lane is Lane.COLLECTIVE else seconds for t in schedule.tasks] for seconds in (1.0, 2.0)]
    fast, slow = simulate_group_timings(schedule, durations, [ALONE] * 2)
    assert fast.iteration_s == slow.iteration_s == pytest.approx(20)
    assert fast.is_steady
    times = {
        group: {name: (starts, ends) for name, starts, ends in zip(names, t.starts_s[0], t.ends_s[0], strict=True)}
        for group, t in (("fast", fast), ("slow", slow))
    }
    assert times["fast"]["backward 1"] == (5, 6)
    assert times["slow"]["backward 1"] == (10, 12)
    for group in ("fast", "slow"):
        assert times[group]["all_reduce chunk 1"] == (12, 15)
        assert times[group]["all_reduce chunk 0"] == (15, 18)
    assert times["fast"]["device_adam"] == (18, 19)
    assert times["slow"]["device_adam"] == (18, 20)
    assert fast.starts_s[1][0] == 19
    assert slow.starts_s[1][0] == 20


def test_collectives_take_as_long_as_in_the_slowest_group_and_share_with_the_busiest() -> None:
    # The second all-reduce (15 to 18 alone) runs beside the slow rank's prologue backward, 14 to 16, which halves it:
    # by 16 it has made 0.5 of its 3 s, so it ends at 18.5 for both.  The first runs from 12 beside the slow rank's
    # backward of block 0, 12 to 14, and all of its own time too: at half the pace until it ends.
    schedule, names = ddp_of_two()
    durations = [[3.0 if t.lane is Lane.COLLECTIVE else seconds for t in schedule.tasks] for seconds in (1.0, 2.0)]
    beside = frozenset({Lane.COMPUTE, Lane.COLLECTIVE})
    slowdowns = {lanes: dict(found) for lanes, found in ALONE.slowdowns.items()}
    slowdowns[beside] = {Lane.COMPUTE: 1.0, Lane.COLLECTIVE: 2.0}
    shared = ContentionModel(slowdowns)
    fast, slow = simulate_group_timings(schedule, durations, [ALONE, shared])
    ends = dict(zip(names, fast.ends_s[0], strict=True))
    # 12 to 16 at half the pace makes 2 s, the third second passes by 17; then 17 to 20.
    assert ends["all_reduce chunk 1"] == pytest.approx(17)
    assert ends["all_reduce chunk 0"] == pytest.approx(20)
    assert dict(zip(names, slow.ends_s[0], strict=True))["device_adam"] == pytest.approx(22)


# -- against other roads ---------------------------------------------------------------------------------------------


def longest_paths_s(schedule: Schedule, durations_s: Sequence[Sequence[float]], num_iterations: int) -> np.ndarray:
    """Ends (iterations, groups, tasks) without contention: one pass, no clock, no events."""
    num_tasks = len(schedule.tasks)
    ends = np.zeros((num_iterations, len(durations_s), num_tasks))
    free = [dict.fromkeys(Lane, 0.0) for _ in durations_s]
    for iteration in range(num_iterations):
        for task in schedule.tasks:
            starts = []
            for group in range(len(durations_s)):
                waits = [free[group][task.lane], *ends[iteration, group, list(task.after)]]
                if iteration:
                    waits += list(ends[iteration - 1, group, list(task.after_previous)])
                starts.append(max(waits))
            for group, durations in enumerate(durations_s):
                start, seconds = starts[group], durations[task.id]
                if task.lane is Lane.COLLECTIVE:
                    start, seconds = max(starts), max(found[task.id] for found in durations_s)
                ends[iteration, group, task.id] = free[group][task.lane] = start + seconds
    return ends


@settings(max_examples=examples(60, 7))
@given(parallel_workloads(max_blocks=4), st.data())
def test_without_contention_it_is_the_longest_path(case: PlannedWorkload, data: st.DataObject) -> None:
    schedule = compile_schedule(case.plan, case.workload, case.layout)
    durations = [[data.draw(DURATIONS) for _ in schedule.tasks] for _ in range(data.draw(st.integers(1, 3)))]
    found = simulate_group_timings(schedule, durations, [ALONE] * len(durations))
    expected = longest_paths_s(schedule, durations, found[0].num_iterations)
    for group, timing in enumerate(found):
        assert_allclose(timing.ends_s, expected[:, group], rtol=1e-9, atol=1e-9)


@settings(max_examples=examples(40, 6))
@given(parallel_workloads(max_blocks=3), st.integers(1, 4), st.data())
def test_equal_groups_do_exactly_what_one_rank_does(case: PlannedWorkload, groups: int, data: st.DataObject) -> None:
    schedule = compile_schedule(case.plan, case.workload, case.layout)
    durations = [data.draw(DURATIONS) for _ in schedule.tasks]
    contention = ContentionModel.of(known_machine("rtx-4090-x8"), num_ranks=8)
    folded = simulate_timing(schedule, durations, contention, num_more_iterations=1)
    for timing in simulate_group_timings(schedule, [durations] * groups, [contention] * groups):
        assert timing.iteration_s == folded.iteration_s
        assert np.array_equal(timing.starts_s, folded.starts_s)
        assert np.array_equal(timing.ends_s, folded.ends_s)


@settings(max_examples=examples(40, 6))
@given(parallel_workloads(max_blocks=3), st.data())
def test_no_rank_that_is_slower_makes_all_faster(case: PlannedWorkload, data: st.DataObject) -> None:
    schedule = compile_schedule(case.plan, case.workload, case.layout)
    durations = [[data.draw(DURATIONS) for _ in schedule.tasks] for _ in range(2)]
    before = simulate_group_timings(schedule, durations, [ALONE] * 2)[0]
    durations[1] = [seconds * data.draw(st.floats(1, 3)) for seconds in durations[1]]
    after = simulate_group_timings(schedule, durations, [ALONE] * 2)[0]
    assert after.ends_s[0][-1] >= before.ends_s[0][-1] * (1 - 1e-9)
    if before.is_steady and after.is_steady:
        assert after.iteration_s >= before.iteration_s * (1 - 1e-6)


# -- machines --------------------------------------------------------------------------------------------------------


def nodes(name: str, num_nodes: int) -> Hardware:
    hardware = known_machine(name)
    network = known_machine("h100-80gb-x8").network if hardware.network is None else hardware.network
    assert network is not None
    return hardware.model_copy(update={"network": network.model_copy(update={"num_nodes": num_nodes})})


def of(model: Workload, mode: ParallelMode, num_ranks: int) -> Plan:
    persistent = 9 if mode in (ParallelMode.DDP, ParallelMode.SINGLE) else 2
    return Plan(
        workload_id=model.identity,
        chunk_bytes=2**25,
        n_persist=persistent,
        n_buffer=4,
        prefetch_depth=2,
        parallel=mode,
        num_ranks=num_ranks,
    )


@pytest.mark.parametrize("split", [(8,), (7, 1), (4, 4), (2, 2, 4)])
def test_the_prediction_does_not_depend_on_how_equal_ranks_are_grouped(split: tuple[int, ...]) -> None:
    model, hardware = decoder(), known_machine("a100-80gb-x8")
    knobs = of(model, ParallelMode.SHARDED, 8)
    alone = simulate(knobs, model, hardware)
    # Groups have no intervals of peaks.
    alone = alone.model_copy(update=dict.fromkeys(("peak_interval_bytes", "chance_oom")))
    found = simulate_groups(knobs, model, [RankGroup(count, hardware) for count in split])
    assert found.iteration_s == alone.iteration_s
    for group in found.groups:
        # Draws are summed up in another order.
        interval = group.record.iteration_interval_s
        assert interval is not None
        assert alone.iteration_interval_s is not None
        assert interval.low == pytest.approx(alone.iteration_interval_s.low, rel=1e-12)
        assert interval.high == pytest.approx(alone.iteration_interval_s.high, rel=1e-12)
        assert group.record.model_copy(update={"iteration_interval_s": alone.iteration_interval_s}) == alone
    assert found.tokens_per_s == alone.tokens_per_s


@pytest.mark.parametrize(("num_ranks", "micro_batches"), [(1, 1), (1, 3), (8, 1), (8, 3)])
def test_samples_and_tokens_are_those_of_all_ranks_and_micro_batches(num_ranks: int, micro_batches: int) -> None:
    model, hardware = decoder(), known_machine("a100-80gb-x8")
    mode = ParallelMode.DDP if num_ranks > 1 else ParallelMode.SINGLE
    record = simulate(of(model, mode, num_ranks).model_copy(update={"micro_batches": micro_batches}), model, hardware)
    assert record.num_samples == num_ranks * micro_batches * model.num_samples
    assert record.num_tokens == num_ranks * micro_batches * model.num_tokens


def test_one_straggler_sets_the_pace_of_all() -> None:
    model, hardware = decoder(), known_machine("a100-80gb-x8")
    knobs = of(model, ParallelMode.DDP, 8)
    slow = RankGroup(1, hardware, {Lane.COMPUTE: 1.5}, name="throttled")
    found = simulate_groups(knobs, model, [RankGroup(7, hardware), slow])
    even, throttled = found.groups
    assert simulate(knobs, model, hardware).iteration_s < found.iteration_s
    assert found.iteration_s <= 1.5 * simulate(knobs, model, hardware).iteration_s * (1 + 1e-9)
    assert even.waiting_s > throttled.waiting_s
    all_slow = simulate_groups(knobs, model, [RankGroup(8, hardware, {Lane.COMPUTE: 1.5})])
    assert found.iteration_s == pytest.approx(all_slow.iteration_s, rel=0.02)


def test_mixed_machines_go_at_the_pace_of_the_slower_and_cost_the_sum() -> None:
    model = decoder()
    new, old = (
        nodes(name, 2).model_copy(update={"price_usd_per_hour": price})
        for name, price in (("h100-80gb-x8", 24.0), ("a100-80gb-x8", 12.0))
    )
    knobs = of(model, ParallelMode.DDP, 16)
    mixed = simulate_groups(knobs, model, [RankGroup(8, new), RankGroup(8, old)])
    alone = [simulate(knobs, model, hardware).iteration_s for hardware in (new, old)]
    assert alone[0] < alone[1] <= mixed.iteration_s * (1 + 1e-9)
    assert mixed.price_usd_per_hour == 36
    assert mixed.groups[0].record.hardware_name == "h100-80gb-x8"


@pytest.mark.parametrize(
    ("groups", "words"),
    [((3, 4), "7 ranks between them"), ((8, 0), "a group of 0 ranks"), ((), "0 ranks between them")],
)
def test_groups_have_the_ranks_of_the_plan(groups: tuple[int, ...], words: str) -> None:
    model, hardware = decoder(), known_machine("a100-80gb-x8")
    with pytest.raises(PlanError, match=words):
        simulate_groups(of(model, ParallelMode.DDP, 8), model, [RankGroup(count, hardware) for count in groups])


@pytest.mark.parametrize("slowdown", [0.0, -1.0, float("inf"), float("nan")])
def test_slowdowns_are_positive(slowdown: float) -> None:
    model, hardware = decoder(), known_machine("a100-80gb-x8")
    with pytest.raises(PlanError, match="slowdown of compute"):
        simulate_groups(of(model, ParallelMode.DDP, 8), model, [RankGroup(8, hardware, {Lane.COMPUTE: slowdown})])


# -- many ranks ------------------------------------------------------------------------------------------------------

COUNTS = (8, 16, 64, 256, 1024)


@pytest.mark.parametrize("mode", [ParallelMode.DDP, ParallelMode.REPLICATED, ParallelMode.SHARDED])
def test_eight_to_a_thousand_ranks(mode: ParallelMode) -> None:
    """Never faster than as many ranks that need not talk; collectives never below what the links can carry."""
    model, hardware = decoder(), nodes("h100-80gb-x8", 128)
    records = [simulate(of(model, mode, count), model, hardware) for count in COUNTS]
    quiet = hardware.model_copy(update={"node": None, "network": None})
    alone = simulate(of(model, ParallelMode.SINGLE, 1), model, quiet)
    efficiencies = [r.tokens_per_s / count / alone.tokens_per_s for r, count in zip(records, COUNTS, strict=True)]
    assert all(0 < efficiency <= 1 + 1e-9 for efficiency in efficiencies)
    assert [r.num_tokens for r in records] == [count * alone.num_tokens for count in COUNTS]
    node, network = hardware.node, hardware.network
    assert node is not None
    assert node.device_link is not None
    assert network is not None
    for record, count in zip(records, COUNTS, strict=True):
        schedule = compile_schedule(record.plan, model)
        for task in record.tasks:
            if task.lane is Lane.COLLECTIVE:
                moved_bytes = schedule.tasks[task.task].moved_bytes
                # Each rank has to send its part of the buffer, whatever switches do; to reduce, all of it.
                share = 1 / count if task.kind is not TaskKind.ALL_REDUCE else 1.0
                assert task.duration_s >= share * moved_bytes / node.device_link.bandwidth_bytes_per_s
    if mode is ParallelMode.DDP:
        assert sorted(efficiencies, reverse=True) == pytest.approx(efficiencies, rel=1e-6)
        assert records[0].peak_device_bytes == records[-1].peak_device_bytes
    if mode is ParallelMode.SHARDED:
        hosts = [record.peak_pinned_bytes for record in records]
        assert hosts[0] == pytest.approx(8 * hosts[2], rel=0.01)
        assert hosts == sorted(hosts, reverse=True)


def test_more_ranks_than_devices_are_refused() -> None:
    model = decoder()
    with pytest.raises(HardwareError, match="16 ranks do not fit on a100-80gb-x8"):
        simulate(of(model, ParallelMode.DDP, 16), model, known_machine("a100-80gb-x8"))
