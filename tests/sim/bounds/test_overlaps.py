"""What the search knows of copies that run side by side, against schedules and simulations."""

from __future__ import annotations

from itertools import chain

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protwin.shared.schema.schedule import Lane, TaskKind
from protwin.sim.bounds.overlaps import Overlaps
from protwin.sim.bounds.throughput import Throughput
from protwin.sim.bounds.time_bounds import TimeBounds
from protwin.sim.costs.contention import ContentionModel
from protwin.sim.space.gather_plan import residency
from tests.proof_size import examples
from tests.sim.bound_cases import Case, cases, hand_made
from tests.sim.hand_made import Seconds, machine, plan, workload


def _together_s(found: Case) -> float:
    """What is believed of a plan."""
    overlaps = Overlaps(found.chunks, Throughput.of(found.contention).least_ratio)
    knobs = found.plan.n_persist, found.plan.n_buffer, found.plan.prefetch_depth
    return float(overlaps.together_s(*(np.array([knob]) for knob in knobs), found.plan.n_swap)[0, -1])


def _simulated_together_s(found: Case) -> float:
    """Work of H2D that a steady iteration of the simulation does while D2H is active."""
    schedule, timing = found.schedule, found.simulated()
    assert timing.is_steady
    begin_s = timing.starts_s[1:].min(axis=1)[-2]
    stop_s = begin_s + timing.iteration_s
    spans = {
        lane: [times_s[:, list(schedule.lanes[lane])].ravel() for times_s in (timing.starts_s, timing.ends_s)]
        for lane in Lane
    }
    cuts = np.unique(np.clip(np.concatenate([*chain.from_iterable(spans.values())]), begin_s, stop_s))
    middles_s = (cuts[1:] + cuts[:-1]) / 2
    is_active = {
        lane: ((starts_s < middles_s[:, None]) & (middles_s[:, None] < ends_s)).any(axis=1)
        for lane, (starts_s, ends_s) in spans.items()
    }
    return sum(
        length_s * found.contention.rates(frozenset(lane for lane in Lane if is_active[lane][place]))[Lane.H2D]
        for place, length_s in enumerate(np.diff(cuts).tolist())
        if is_active[Lane.H2D][place] and is_active[Lane.D2H][place]
    )


@given(cases())
@settings(max_examples=examples(40, 20), deadline=None)
def test_copies_that_are_believed_to_run_side_by_side_do_so_in_the_simulation(found: Case) -> None:
    if found.simulated().is_steady:
        assert _together_s(found) <= _simulated_together_s(found) * (1 + 1e-6) + 1e-12


@given(cases(), st.data())
@settings(max_examples=examples(40, 20))
def test_gathers_are_released_when_the_slots_and_windows_of_the_schedule_say(found: Case, data: st.DataObject) -> None:
    table, chosen = found.chunks, found.plan
    offloaded = np.flatnonzero(table.is_offloaded(chosen.n_persist))
    fewest = max(1, table.layout.min_buffers(chosen.n_persist))
    n_buffer = data.draw(st.integers(fewest, max(fewest, len(offloaded) - 1)))
    depths = np.array([chosen.prefetch_depth])
    order, blocks = Overlaps(table, 1.0).released_at(offloaded, np.array([n_buffer]), depths)

    exact = residency(table, chosen.n_persist, n_buffer)
    positions = exact.positions
    # A lane releases nothing before the tasks ahead.
    waits = np.maximum.accumulate(exact.gather_wait(depths)[0])
    in_last_backward = exact.gather_step >= positions.num_steps - positions.num_blocks
    wait_of = dict(zip(exact.gather_chunk[in_last_backward].tolist(), waits[in_last_backward].tolist(), strict=True))
    for chunk, block in zip(order.tolist(), blocks[0].tolist(), strict=True):
        if block < positions.num_blocks:
            assert wait_of[chunk] == positions.last_backward(np.array(block)) + 1


def test_copies_side_by_side_make_the_bound_sharper() -> None:
    # CPU Adam holds everything up, and takes longer while two copies draw on host memory with it.
    model = workload(num_blocks=6, seconds=Seconds(forward=1.0, backward=4.0))
    box = machine(cpu_adam_s=10.0, host_bytes_per_s=400.0)
    found = hand_made(model, plan(model, n_buffer=2), box, ContentionModel.of(box))
    assert _together_s(found) == pytest.approx(_simulated_together_s(found)) == 4.0
    ignorant = Throughput.of(found.contention)
    ignorant = Throughput(ignorant.weights, np.zeros_like(ignorant.together), ignorant.least_ratio)
    knobs = (np.array([knob]) for knob in (found.plan.n_persist, found.plan.n_buffer, found.plan.prefetch_depth))
    without_s = TimeBounds(found.chunks, found.compute, ignorant).iteration_s(*knobs, found.mode)[0, 0]
    assert without_s + 1.0 < found.time_bound_s() <= found.simulated_s()


def test_the_lesser_of_all_copies_is_not_what_runs_side_by_side() -> None:
    # The wrong variant compares the sums of both directions.  One chunk does not survive the turn; its gather takes 3 s
    # and is released with one copy of 1 s, the next of which comes 10 s later.
    model = workload(num_blocks=4, seconds=Seconds(forward=10.0, backward=10.0))
    found = hand_made(model, plan(model, n_buffer=3), machine(gather_s=3.0))
    durations_s = found.costs.durations_s(found.schedule)
    kinds = [task.kind for task in found.schedule.tasks]
    gathers_s = [seconds for seconds, kind in zip(durations_s, kinds, strict=True) if kind is TaskKind.GATHER][4:]
    offloads_s = [
        seconds for seconds, kind in zip(durations_s, kinds, strict=True) if kind is TaskKind.GRADIENT_OFFLOAD
    ]
    assert min(sum(gathers_s), sum(offloads_s)) == 3.0 > _simulated_together_s(found) == pytest.approx(1.0)
    assert _together_s(found) == 1.0


def test_what_runs_side_by_side_is_unknown_where_gradients_wait_for_sums() -> None:
    model = workload(num_blocks=4)
    chosen = plan(model, n_buffer=2)
    assert _together_s(hand_made(model, chosen, machine())) > 0
    twice = hand_made(model, chosen.model_copy(update={"micro_batches": 2}), machine())
    assert 0 < _together_s(twice) <= _simulated_together_s(twice) * (1 + 1e-9)
    accumulating = chosen.model_copy(update={"micro_batches": 3})
    assert _together_s(hand_made(model, accumulating, machine())) == 0
