"""Simulating chunks that are sharded over the devices: by hand, and against one rank that has everything."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protwin.shared.compile.compile import compile_schedule
from protwin.shared.layout.layout import build_layout
from protwin.shared.schema.optimizer import Optimizer
from protwin.shared.schema.plan import ParallelMode, Plan
from protwin.shared.schema.schedule import Lane, Memory, TaskKind
from protwin.shared.schema.workload import Workload
from protwin.shared.verify.guaranteed_peak import guaranteed_device_peak
from protwin.sim.costs.contention import ContentionModel
from protwin.sim.engine.device_memory import DeviceMemory
from protwin.sim.engine.simulator import simulate_timing
from protwin.sim.memory.host import loading_peak_bytes
from protwin.sim.memory.static_tensors import static_tensors
from tests.proof_size import examples
from tests.sim.hand_made import plan, workload
from tests.strategies.plans import PlannedWorkload, parallel_workloads

ALONE = ContentionModel.none(num_ranks=2)
SECONDS = {Lane.COMPUTE: 1.0, TaskKind.ALL_GATHER: 2.0, TaskKind.REDUCE_SCATTER: 3.0}


def fsdp(model: Workload, num_ranks: int = 2, **knobs: object) -> Plan:
    """Every chunk sharded over the devices."""
    update = {"parallel": ParallelMode.SHARDED, "num_ranks": num_ranks, "n_shard": model.num_blocks, **knobs}
    return plan(model).model_copy(update=update)


def test_a_timeline_by_hand() -> None:
    # One buffer, so that nothing comes ahead.  Device Adam of the iteration before ends at 0: chunk 0 comes from 0 to
    # 2, its forward runs to 3; chunk 1 comes until 5, its forward runs to 6, the epilogue to 8, its backward to 9.
    # Then its gradients are reduced until 12, and chunk 0 comes again until 14; its backward runs to 15, the
    # prologue's to 16, its gradients are reduced until 18, and device Adam runs to 19.
    model = workload(2)
    schedule = compile_schedule(fsdp(model, n_buffer=1), model)
    durations = [SECONDS.get(task.kind, SECONDS.get(task.lane, 0.0)) for task in schedule.tasks]
    timing = simulate_timing(schedule, durations, ALONE)
    assert timing.iteration_s == pytest.approx(19)
    begin = timing.ends_s[0][-1]
    assert schedule.tasks[-1].kind is TaskKind.DEVICE_ADAM
    times: dict[tuple[str, int], tuple[float, float]] = {}
    for task in schedule.tasks:
        number = sum(name == task.name for name, _ in times)
        times[task.name, number] = (timing.starts_s[1][task.id] - begin, timing.ends_s[1][task.id] - begin)
    assert times["all_gather chunk 0", 0] == pytest.approx((0, 2))
    assert times["all_gather chunk 1", 0] == pytest.approx((3, 5))
    assert times["backward 1", 0] == pytest.approx((8, 9))
    assert times["reduce_scatter chunk 1", 0] == pytest.approx((9, 12))
    assert times["all_gather chunk 0", 1] == pytest.approx((12, 14))
    assert times["reduce_scatter chunk 0", 0] == pytest.approx((15, 18))
    assert times["device_adam", 0] == pytest.approx((18, 19))


def test_memory_by_hand() -> None:
    # On each of two devices: half of 64 scalars of two chunks, as parameters, gradients and two moments, and a count
    # of steps each.  The peak is the backward of block 1: the buffer, what the prologue and both blocks hand on and
    # save (3 times 100 and 2 times 1 000), and what the backward adds at its highest.
    model = workload(2)
    schedule = compile_schedule(fsdp(model, n_buffer=1), model)
    static_bytes = 2 * (4 * 128 + 4)
    assert schedule.static_bytes(Memory.DEVICE) == static_bytes
    assert schedule.static_bytes(Memory.PINNED_HOST) == schedule.static_bytes(Memory.HOST) == 0
    assert guaranteed_device_peak(schedule).size_bytes == static_bytes + 256 + 300 + 2_000 + 700


def test_loading_puts_parts_on_the_devices() -> None:
    """A rank reads its part of one chunk of 256 bytes after another; a host that is no device has nothing of it."""
    model = workload(3)
    layout = build_layout(model.parameters, num_blocks=3, chunk_bytes=256)
    schedule = compile_schedule(fsdp(model), model, layout)
    assert loading_peak_bytes(schedule, model.parameters, layout, is_on_host=False) == 0
    # Where the device is the host: a chunk as it is filled, beside the parts of the two before.
    assert loading_peak_bytes(schedule, model.parameters, layout, is_on_host=True) == 2 * 128 + 256


@settings(max_examples=examples(60, 7))
@given(parallel_workloads(max_blocks=4))
def test_what_the_allocator_is_asked_for_is_what_stays_on_the_device(case: PlannedWorkload) -> None:
    schedule = compile_schedule(case.plan, case.workload, case.layout)
    static = static_tensors(schedule, case.workload.parameters, case.layout)
    asked_bytes = sum(tensor.size_bytes for tensor in static.set_up if tensor.stays) + sum(static.first_step)
    assert asked_bytes == schedule.static_bytes(Memory.DEVICE)


@settings(max_examples=examples(60, 7))
@given(parallel_workloads(max_blocks=4), st.integers(1, 1000))
def test_over_endless_links_ranks_do_what_one_does_alone(case: PlannedWorkload, num_ranks: int) -> None:
    """All chunks sharded, collectives in no time: compute follows itself without a gap, and Adam takes its share."""
    num_chunks = len(case.layout.chunks)
    update = {
        "parallel": ParallelMode.SHARDED,
        "num_ranks": num_ranks + 1,
        "shard_ranks": None,
        "n_persist": 0,
        "n_host_stepped": 0,
        "n_shard": num_chunks,
        "n_swap": 0,
        "n_checkpoint": 0,
        "n_offload_input": 0,
        "activation_modes": None,
        "n_buffer": case.layout.min_buffers(0),
        "max_gradient_norm": None,
        "n_selective": 0,
    }
    if case.plan.optimizer is Optimizer.ADAFACTOR:
        # It needs whole matrices, and refuses ranks that have parts of them.
        update["optimizer"] = Optimizer.ADAMW
    sharded = case.plan.model_copy(update=update)
    alone = sharded.model_copy(
        update={"parallel": ParallelMode.SINGLE, "num_ranks": 1, "n_persist": num_chunks, "n_shard": 0}
    )

    def period_s(chosen: Plan, adam_s: float) -> float:
        schedule = compile_schedule(chosen, case.workload, case.layout)
        durations = [
            adam_s if task.kind is TaskKind.DEVICE_ADAM else task.phase.measured_s or 0.0 if task.phase else 0.0
            for task in schedule.tasks
        ]
        contention = ContentionModel.none(num_ranks=chosen.num_ranks)
        return simulate_timing(schedule, durations, contention).iteration_s

    share_s = 1.0 / (num_ranks + 1)
    assert period_s(sharded, share_s) == pytest.approx(period_s(alone, 1.0) - 1.0 + share_s)


@settings(max_examples=examples(40, 6))
@given(parallel_workloads(max_blocks=4), st.integers(0, 2**32 - 1))
def test_what_is_simulated_stays_below_the_guaranteed_peak(case: PlannedWorkload, seed: int) -> None:
    schedule = compile_schedule(case.plan, case.workload, case.layout)
    durations = [((seed >> task.id % 29) % 7) / 4 for task in schedule.tasks]
    contention = ContentionModel.none(num_ranks=case.plan.num_ranks)
    timing = simulate_timing(schedule, durations, contention, num_more_iterations=1)
    peak_bytes = DeviceMemory(schedule, timing).peak_bytes
    assert schedule.static_bytes(Memory.DEVICE) <= peak_bytes <= guaranteed_device_peak(schedule).size_bytes
