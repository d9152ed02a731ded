"""Chunks that the device keeps and the host steps, on a timeline worked out by hand."""

from __future__ import annotations

import pytest

from protwin.shared.schema.record import ChunkCounts
from protwin.shared.schema.schedule import Lane
from protwin.sim.engine.simulator import simulate
from tests.sim.hand_made import assert_timeline, machine, plan, workload

# Two blocks of one chunk each; a gather takes 4 seconds, gradients 3, CPU Adam 2.  From the end of backward 1, at 15:
#
#   gradients of chunk 1 leave (3), and with them gone the prologue's backward may begin: 18 to 19
#   gradients of chunk 0 leave (3), behind them: at 21 the next iteration begins
#
# In that iteration CPU Adam steps chunk 0 from 0 to 2, chunk 0 comes back by 6 and chunk 1, stepped long before, by 10:
# forward 0 at 6, forward 1 at 10, the epilogue (1 + 1), backward 1 (2) by 15.  Backwards need no copies.
HOST_STEPPED = {
    Lane.COMPUTE: [
        ("forward prologue", 0, 1),
        ("forward 0", 6, 7),
        ("forward 1", 10, 11),
        ("forward epilogue", 11, 12),
        ("backward epilogue", 12, 13),
        ("backward 1", 13, 15),
        ("backward 0", 15, 17),
        ("backward prologue", 18, 19),
        ("device_adam", 19, 19),
    ],
    Lane.H2D: [("gather chunk 0", 2, 6), ("gather chunk 1", 6, 10)],
    Lane.D2H: [("gradient_offload chunk 1", 15, 18), ("gradient_offload chunk 0", 18, 21)],
    Lane.CPU_OPTIM: [("cpu_adam chunk 1", 18, 20), ("cpu_adam chunk 0", 21, 23)],
}


def test_new_values_come_back_once_per_iteration() -> None:
    model = workload()
    chosen = plan(model, n_buffer=0).model_copy(update={"n_host_stepped": 2})
    record = simulate(chosen, model, machine(gather_s=4, offload_s=3, cpu_adam_s=2))
    for lane, expected in HOST_STEPPED.items():
        assert_timeline(record, lane, expected)
    assert record.iteration_s == pytest.approx(21)
    assert (record.num_gathers, record.num_cpu_adam_steps) == (2, 2)
    assert record.lane(Lane.H2D).moved_bytes == record.lane(Lane.D2H).moved_bytes == 2 * 256


def test_every_micro_batchs_gradients_leave_but_new_values_come_once() -> None:
    model = workload()
    chosen = plan(model, n_buffer=0).model_copy(update={"n_host_stepped": 2, "micro_batches": 3})
    record = simulate(chosen, model, machine())
    assert (record.num_gathers, record.num_cpu_adam_steps) == (2, 2)
    assert record.lane(Lane.D2H).moved_bytes == 3 * 2 * 256


def test_all_residencies_in_one_plan() -> None:
    """Fast links and CPU: compute alone counts, and the one persistent chunk is stepped at its end.

    1 + 3 * 1 + 1 + 1 + 3 * 2 + 1 seconds, and 1 792 bytes of a chunk at 1 792 bytes per second.
    """
    model = workload(3)
    chosen = plan(model, n_persist=1, n_buffer=1).model_copy(update={"n_host_stepped": 1, "prefetch_depth": 2})
    record = simulate(chosen, model, machine(gather_s=1e-3, offload_s=1e-3, cpu_adam_s=1e-3))
    assert record.iteration_s == pytest.approx(14, rel=1e-3)
    assert record.chunks == ChunkCounts(persistent=1, host_stepped=1, sharded=0, offloaded=1)
    assert (record.num_gathers, record.num_cpu_adam_steps) == (2, 2)
