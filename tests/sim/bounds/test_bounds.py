"""What the search believes before it simulates: no bound exceeds what it bounds, and some are exact."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from scipy.optimize import linprog

from protwin.shared.compile.residency import Residency
from protwin.shared.schema.calibration import Calibration, Contention
from protwin.shared.schema.hardware import Hardware
from protwin.shared.schema.optimizer import HostGradients
from protwin.shared.schema.schedule import LANES_ALONE, Lane, Memory, TaskKind
from protwin.shared.schema.workload import BlockProfile, DType
from protwin.shared.verify.guaranteed_peak import guaranteed_device_peak
from protwin.sim.bounds import lane_programs, replay
from protwin.sim.bounds.exact_peaks import family_peaks
from protwin.sim.bounds.replay import REPLAY_FRAC, Replayer, ReplayPlan
from protwin.sim.bounds.throughput import Throughput
from protwin.sim.costs.contention import ContentionModel
from protwin.sim.costs.task_costs import CostModel
from protwin.sim.kernels.library import SWITCH
from protwin.sim.memory.host import step_peak_bytes
from protwin.sim.space.chunk_table import chunk_table
from protwin.sim.space.placements import Placements
from protwin.sim.space.plan_family import CPU_OPTIM
from tests.proof_size import examples
from tests.sim.bound_cases import Case, case, cases, hand_made
from tests.sim.hand_made import Seconds, machine, phase, plan, workload
from tests.sim.host_account import made_by_steps
from tests.sim.ranked_cases import ranked_cases
from tests.strategies.machines import contentions, hardware
from tests.strategies.plans import plans

LANES = LANES_ALONE


# -- memory ----------------------------------------------------------------------------------------------------------


@given(cases())
@settings(max_examples=examples(80, 10))
def test_memory_bounds_never_exceed_the_guaranteed_peak_and_the_last_one_equals_it(found: Case) -> None:
    peak_bytes = guaranteed_device_peak(found.schedule).size_bytes
    assert found.activation_bound_bytes() <= found.memory_bound_bytes() <= peak_bytes
    assert found.exact_peak_bytes() == peak_bytes


@given(cases())
@settings(max_examples=examples(50, 7))
def test_host_bytes_are_those_of_the_schedule(found: Case) -> None:
    prefix = np.array([found.prefix])
    trips = found.compute.modes.trips[int(found.mode[0])]
    pinned_bytes = found.chunks.pinned_host_bytes(prefix)[0] + found.compute.trip_bytes(trips)
    assert pinned_bytes == found.schedule.static_bytes(Memory.PINNED_HOST)
    assert found.chunks.host_bytes(prefix)[0] == found.schedule.static_bytes(Memory.HOST)


@given(cases())
@settings(max_examples=examples(50, 7))
def test_what_steps_make_on_the_host_is_that_of_the_largest_step(found: Case) -> None:
    made_bytes = made_by_steps(found.plan, found.workload, found.layout)
    assert found.chunks.step_bytes(np.array([found.prefix]))[0] == made_bytes
    account_bytes = step_peak_bytes(
        found.schedule,
        found.workload.parameters,
        found.layout,
        widens=found.plan.widens_on_host,
        is_on_host=False,
    )
    assert account_bytes == made_bytes


def test_narrow_gradients_are_converted_for_all_of_a_chunk() -> None:
    # Chunks of 64 scalars of 2 bytes: a step converts 64 gradients to 4 bytes, unless they are added up in float32.
    model = workload(num_blocks=3)
    narrow = tuple(p.model_copy(update={"dtype": DType.BFLOAT16}) for p in model.parameters)
    model = model.model_copy(update={"parameters": narrow})
    for knobs, expected in (
        ({}, 256),
        ({"n_persist": 3, "n_buffer": 0}, 0),
        ({"n_persist": 1, "n_host_stepped": 1}, 256),
        ({"host_gradients": HostGradients.FLOAT32, "micro_batches": 2}, 0),
        ({"host_gradients": HostGradients.FLOAT32}, 256),
    ):
        found = hand_made(model, plan(model).model_copy(update=knobs), machine())
        assert found.chunks.step_bytes(np.array([found.prefix])).tolist() == [expected]


def test_adding_all_buffers_to_the_activations_is_no_bound_of_memory() -> None:
    # The wrong variant: every buffer is full at the highest level of activations.  The highest level comes in the
    # first backwards, and when forward begins nothing is saved yet: with prefetch depth 1, two chunks are there.
    model = workload(num_blocks=6)
    found = hand_made(model, plan(model, n_buffer=2, n_checkpoint=6), machine())
    roomy = hand_made(model, plan(model, n_buffer=6, n_checkpoint=0), machine())
    for one in (found, roomy):
        assert one.memory_bound_bytes() <= one.exact_peak_bytes()
    levels = (roomy.compute.levels.alive_bytes[:, 0] + roomy.compute.levels.peak_bytes).max(axis=1)[0]
    gradient_bytes = 256 * 6
    all_buffers = roomy.plan.n_buffer * 256 + int(levels) + gradient_bytes
    assert all_buffers > guaranteed_device_peak(roomy.schedule).size_bytes


SPIKE_BYTES = 10**8
"""Passes within one phase of one section, so that this phase has the peak."""


@given(cases() | ranked_cases())
@settings(max_examples=examples(300, 20))
def test_fewer_buffers_hold_no_more(found: Case) -> None:
    """Whatever the look-ahead and the modes; but where chunks come from a disk, whose lane has another order then."""
    assume(found.policies.residency.fewer_buffers_add and found.plan.n_disk == 0)
    most_buffers = found.num_gathered
    peaks = [
        family_peaks(found.family(most, (1, 2, 3)), found.mode) for most in range(found.plan.n_buffer, most_buffers + 1)
    ]
    for fewer, more in pairwise(peaks):
        assert (fewer <= more).all()


@st.composite
def travelling(draw: st.DrawFn) -> Case:
    """Chunks of a few bytes, beside which blocks send large inputs and large activations to the host."""
    small = workload(num_blocks=4)
    spikes = ("forward", "recompute", "backward", "epilogue_forward", "epilogue_backward")
    spike, block = draw(st.sampled_from(spikes)), draw(st.integers(0, 3))
    sizes = draw(st.lists(st.integers(1, 50), min_size=4, max_size=4))
    profiles = [_large(small.profiles[0], 10_000 * size, spike if at == block else "") for at, size in enumerate(sizes)]
    model = small.model_copy(
        update={
            "profiles": tuple(profiles),
            "blocks": tuple(one.model_copy(update={"profile": number}) for number, one in enumerate(small.blocks)),
        }
    )
    if spike.startswith("epilogue"):
        whole = phase(1.0, getattr(model, spike).net_bytes, SPIKE_BYTES)
        model = model.model_copy(update={spike: whole})
    n_swap, n_checkpoint, n_offload_input = draw(st.sampled_from(((4, 0, 0), (0, 4, 4), (2, 2, 2), (1, 3, 1))))
    knobs = {
        "n_swap": n_swap,
        "n_checkpoint": n_checkpoint,
        "n_offload_input": n_offload_input,
        "micro_batches": draw(st.integers(1, 2)),
        "prefetch_depth": draw(st.sampled_from((1, 1, 2, 3))),
    }
    n_persist = draw(st.integers(0, 4))
    chosen = plan(model, n_persist=n_persist, n_buffer=min(4 - n_persist, draw(st.integers(1, 4))))
    return hand_made(model, chosen.model_copy(update=knobs), machine())


def _large(small: BlockProfile, size_bytes: int, spike: str) -> BlockProfile:
    """The block with an output of this size, and three times as much to swap."""
    saved_bytes = 3 * size_bytes
    both_bytes = size_bytes + saved_bytes
    high = {one: both_bytes + SPIKE_BYTES * (one == spike) for one in ("forward", "recompute", "backward")}
    return small.model_copy(
        update={
            "output_bytes": size_bytes,
            "swappable_bytes": saved_bytes,
            "forward": phase(1.0, both_bytes, high["forward"]),
            "backward": phase(2.0, 256 - both_bytes, high["backward"]),
            "checkpoint_forward": phase(1.0, size_bytes, high["forward"]),
            "recompute": phase(1.0, saved_bytes, high["recompute"]),
            "checkpoint_backward": phase(2.0, 256 - both_bytes, high["backward"]),
        }
    )


@given(travelling())
@settings(max_examples=examples(400, 60))
def test_what_travels_is_in_the_bound_while_it_is_on_the_device_for_every_timing(found: Case) -> None:
    peak_bytes = guaranteed_device_peak(found.schedule).size_bytes
    bound_bytes = found.memory_bound_bytes()
    assert bound_bytes <= peak_bytes
    if found.plan.prefetch_depth == 1:
        # Nothing but chunks and their gradients is left out.
        assert peak_bytes - bound_bytes <= 2 * 256 * found.workload.num_blocks


# -- throughput ------------------------------------------------------------------------------------------------------


def _least_time_s(contention: ContentionModel, work_s: list[float]) -> float:
    """The linear program itself: seconds in which exactly each set of lanes is active, so that all work gets done."""
    sets = [frozenset(lane for bit, lane in enumerate(LANES) if mask >> bit & 1) for mask in range(1, 16)]
    progress = np.array([[contention.rates(lanes).get(lane, 0.0) for lanes in sets] for lane in LANES])
    found = linprog(np.ones(len(sets)), A_ub=-progress, b_ub=-np.array(work_s), method="highs")
    assert found.success
    return float(found.fun)


@given(
    st.lists(contentions(), max_size=6, unique_by=lambda entry: frozenset(entry.lanes)),
    hardware(),
    st.lists(st.just(0.0) | st.floats(0.01, 10), min_size=4, max_size=4),
)
@settings(max_examples=examples(100, 10))
def test_throughput_weights_reach_the_optimum_of_the_linear_program(
    measured: list[Contention], box: Hardware, work_s: list[float]
) -> None:
    calibration = Calibration(hardware_name=box.name, machine=box.name, contention=tuple(measured))
    contention = ContentionModel.of(box, calibration)
    best = float((np.array(work_s) @ Throughput.of(contention).weights.T).max())
    least = _least_time_s(contention, work_s)
    # The solver's own tolerance is 1e-7.
    assert best <= least + 1e-6
    assert best == pytest.approx(least, rel=1e-5, abs=1e-6)


def test_adding_the_work_of_all_lanes_is_no_bound_of_time() -> None:
    # The wrong variant ignores that lanes overlap.
    model = workload(num_blocks=4, seconds=Seconds(forward=2.0, backward=4.0))
    found = hand_made(model, plan(model, n_buffer=2), machine())
    simulated_s = found.simulated_s()
    durations_s = found.costs.durations_s(found.schedule)
    assert sum(durations_s) > simulated_s
    assert found.time_bound_s() <= simulated_s


def test_adding_the_tail_to_the_work_of_the_busiest_lane_is_no_bound_of_time() -> None:
    # The wrong variant: all of compute, then the last chunk's copy, CPU Adam and gather.  With persistent blocks
    # before the first offloaded one, forward of the next iteration goes on meanwhile.
    model = workload(num_blocks=4, seconds=Seconds(prologue=3.0))
    found = hand_made(model, plan(model, n_persist=2, n_buffer=2), machine())
    durations_s = found.costs.durations_s(found.schedule)
    compute_s = sum(durations_s[task] for task in found.schedule.lanes[Lane.COMPUTE])
    assert compute_s + 3.0 > found.simulated_s()
    assert found.time_bound_s() <= found.simulated_s()


# -- time ------------------------------------------------------------------------------------------------------------


@given(cases() | ranked_cases())
@settings(max_examples=examples(200, 7))
def test_time_bounds_never_exceed_the_simulated_period(found: Case) -> None:
    simulated_s = found.simulated_s()
    assert found.work_bound_s() <= simulated_s
    assert found.time_bound_s() <= simulated_s


@given(cases() | ranked_cases(), st.data())
@settings(max_examples=examples(200, 14))
def test_a_bound_holds_for_plans_with_fewer(found: Case, data: st.DataObject) -> None:
    assert Residency.fewer_buffers_add
    assume(found.plan.n_disk == 0)  # further reads shift the turns of all
    n_buffer = data.draw(st.integers(found.plan.n_buffer, max(found.plan.n_buffer, found.num_gathered)))
    depth = found.plan.prefetch_depth + data.draw(st.integers(0, 2))
    assert found.time_bound_s(n_buffer, depth) <= found.simulated_s()


def test_the_cycle_through_cpu_adam_is_counted() -> None:
    # By hand: forward of both blocks, both epilogues, backward of both: 2 + 2 + 4 = 8 s.  Then the gradients of block 0
    # leave, are stepped, and the chunk comes back, in 1 + 10 + 1 s; CPU Adam of block 1 began 2 s before and holds
    # the lane for 10 s, so that of block 0 starts 1 + 10 - 2 = 9 s after its backward.  Together 8 + 9 + 10 + 1.
    model = workload(num_blocks=2)
    found = hand_made(model, plan(model, n_buffer=2), machine(cpu_adam_s=10.0))
    assert found.simulated_s() == pytest.approx(28)
    assert found.time_bound_s() == pytest.approx(28, rel=1e-4)


def test_the_cycle_through_sums_that_fall_behind_is_counted() -> None:
    # By hand: the first micro-batch takes 2 + 2 + 4 = 8 s, the prologue's backward and forward 2 s, and the second one
    # 2 + 2 + 2 = 6 s up to the end of its first backward; the gradient leaves in 1 s.  From there the lane of CPU Adam
    # never rests: 3 * 2 sums of 6 s, which move 3 bytes where a step of 14 s moves 7, and 2 steps; then the chunk of
    # block 0 comes back in 1 s.  Neither the work of the lane nor the way through the last micro-batch says as much.
    model = workload(num_blocks=2)
    of_four = plan(model, n_buffer=2).model_copy(update={"micro_batches": 4})
    found = hand_made(model, of_four, machine(cpu_adam_s=14.0))
    sums_s = found.compute.prices.seconds(TaskKind.GRADIENT_ACCUMULATE, found.chunks.facts.accumulate_work)
    assert sums_s[0] == pytest.approx(6)
    assert found.simulated_s() == pytest.approx(16 + 1 + 36 + 28 + 1)
    assert found.time_bound_s(num_events=64) == pytest.approx(82, rel=1e-4)


# -- replays ---------------------------------------------------------------------------------------------------------


@given(cases())
@settings(max_examples=examples(100, 10))
def test_a_replay_has_the_period_of_the_simulation(found: Case) -> None:
    replayed_s, simulated_s = found.replayed_s(), found.simulated_s()
    assert np.isnan(replayed_s) or replayed_s == pytest.approx(simulated_s, rel=(1 - REPLAY_FRAC) / 2)


@given(st.data())
@settings(max_examples=20)
def test_plans_that_are_replayed_together_do_not_disturb_each_other(data: st.DataObject) -> None:
    found = data.draw(cases())
    rows = []
    for _ in range(5):
        chosen, layout = data.draw(plans(found.workload))
        places = Placements.of(layout, [(chosen.n_persist, chosen.n_host_stepped, chosen.n_shard)])
        has_disk = found.chunks.has_disk
        chunks = chunk_table(found.workload, layout, found.costs, found.chunks.step, places, has_disk=has_disk)
        other = replace(found, plan=chosen, chunks=chunks)
        rows.append(ReplayPlan(other.family(), 0, int(found.mode[0])))
    together = Replayer(found.contention).periods_s(rows)
    alone = [Replayer(found.contention).periods_s([row])[0] for row in rows]
    np.testing.assert_array_equal(together, alone)


def _slow_copies() -> Case:
    """Four chunks in one block, whose gradients leave in 4 s each while CPU Adam takes 1 s."""
    model = workload(num_blocks=1)
    weights = tuple(model.parameters[0].model_copy(update={"name": f"blocks.0.weight.{number}"}) for number in range(4))
    model = model.model_copy(update={"parameters": weights})
    return hand_made(model, plan(model, n_buffer=4), machine(offload_s=4.0))


def test_tasks_are_fused_only_where_nobody_can_tell(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SWITCH, "0")  # the compiled replay fuses no tasks
    found = _slow_copies()
    assert found.replayed_s() == pytest.approx(found.simulated_s())
    quick = replace(found, costs=CostModel(machine(offload_s=0.5), use_measured=True))
    quick = case(quick.workload, quick.plan, quick.layout, quick.costs, quick.contention)
    family = quick.family()
    fused = lane_programs.copy_programs(family, 0, np.ones(4))
    assert len(fused[CPU_OPTIM].durations_s) == 1 < family.lanes.lengths[CPU_OPTIM]
    assert quick.replayed_s() == pytest.approx(quick.simulated_s())
    # The wrong variant fuses CPU Adam although the next chunk's gradients may still be on their way.
    original = lane_programs.copy_programs
    monkeypatch.setattr(replay, "copy_programs", lambda family, depth, slowest: original(family, depth, 0 * slowest))
    assert found.replayed_s() < found.simulated_s() * (1 - 1e-3)


def test_cpu_adam_is_fused_over_blocks_only_where_gradients_surely_arrive_in_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(SWITCH, "0")  # the compiled replay fuses no tasks

    def of_cpu_adam(seconds: float) -> Case:
        model = workload(num_blocks=4)
        return hand_made(model, plan(model, n_buffer=4), machine(cpu_adam_s=seconds))

    busy, idle = of_cpu_adam(4.5), of_cpu_adam(1.0)
    for found, num_tasks in ((busy, 1), (idle, 4)):
        # From one copy to the next: recomputation, if any, and backward for 3 s, and the copy for 1 s.
        fused = lane_programs.copy_programs(found.family(), 0, np.ones(4))
        assert len(fused[CPU_OPTIM].durations_s) == num_tasks
        assert found.replayed_s() == pytest.approx(found.simulated_s())
    # The wrong variant takes copies and compute for instantaneous.
    original = lane_programs.copy_programs
    monkeypatch.setattr(replay, "copy_programs", lambda family, depth, slowest: original(family, depth, 0 * slowest))
    assert idle.replayed_s() < idle.simulated_s() * (1 - 1e-3)


@given(cases())
@settings(max_examples=examples(60, 7))
def test_a_family_that_let_go_is_replayed_as_before(found: Case) -> None:
    depths = [found.plan.prefetch_depth, found.plan.prefetch_depth + 1]
    whole, less = (found.family(depths=depths) for _ in range(2))
    peaks = family_peaks(less, found.mode)
    less.let_go()
    slowest = np.full(whole.num_lanes, 1.5)
    for depth in range(len(depths)):
        for one, other in zip(*(lane_programs.copy_programs(of, depth, slowest) for of in (whole, less)), strict=True):
            assert np.array_equal(one.begins, other.begins)
            assert np.array_equal(one.durations_s, other.durations_s)
            assert np.array_equal(one.waits, other.waits)
    assert np.array_equal(family_peaks(less, found.mode), peaks)
