"""Chunks on the host's disk, on a timeline worked out by hand; what a disk costs, and machines that have none."""

from __future__ import annotations

import pytest

from protwin.shared.basics.errors import HardwareError
from protwin.shared.schema.hardware import DeviceKind, Disk, Hardware
from protwin.shared.schema.plan import Plan
from protwin.shared.schema.schedule import LANES_ALONE, Lane, TaskKind
from protwin.shared.schema.workload import Workload
from protwin.shared.tables.labels import bottleneck
from protwin.sim.costs.contention import ContentionModel
from protwin.sim.engine.simulator import simulate
from protwin.sim.questions.faster_parts import faster_disk
from tests.sim.hand_made import CHUNK_BYTES, assert_timeline, machine, plan, workload

STATE_BYTES = 64 * 8 + 4
DISK = Disk(
    name="slow disk",
    capacity_bytes=10**6,
    read_bytes_per_s=CHUNK_BYTES,
    write_bytes_per_s=(CHUNK_BYTES + STATE_BYTES) / 2,
)

# Two blocks of one chunk each, all on the disk, one place of each sort, and a buffer for each.  Parameters are read in
# 1 second, what is stepped in 772 / 256 = 3 + 1/64, and written in 2; gathers, offloads and CPU Adam take 1.
#
# From the end of backward 1, at t = -3 of an iteration that begins with its prologue at 0:
#
#   gradients of chunk 1 leave (-2), CPU Adam steps it (-1), it is written (1), and its place is free
#   chunk 0, whose gradients left at 0, is read to be stepped (4 + 1/64), stepped (5 + 1/64) and written (7 + 1/64)
#   chunk 0 is read for the next forward (8 + 1/64) and gathered (9 + 1/64): forward 0
#   with that gather the place of parameters is free: chunk 1 is read (10 + 1/64) and gathered (11 + 1/64): forward 1
#   epilogue (1 + 1) and backward 1 (2): at 16 + 1/64, 19 + 1/64 seconds after the one before
E = 1 / 64
EXPECTED = {
    Lane.COMPUTE: [
        ("forward prologue", 0, 1),
        ("forward 0", 9 + E, 10 + E),
        ("forward 1", 11 + E, 12 + E),
        ("forward epilogue", 12 + E, 13 + E),
        ("backward epilogue", 13 + E, 14 + E),
        ("backward 1", 14 + E, 16 + E),
        ("backward 0", 16 + E, 18 + E),
        ("backward prologue", 18 + E, 19 + E),
        ("device_adam", 19 + E, 19 + E),
    ],
    Lane.H2D: [("gather chunk 0", 8 + E, 9 + E), ("gather chunk 1", 10 + E, 11 + E)],
    Lane.D2H: [("gradient_offload chunk 1", 16 + E, 17 + E), ("gradient_offload chunk 0", 18 + E, 19 + E)],
    Lane.CPU_OPTIM: [("cpu_adam chunk 1", 17 + E, 18 + E), ("cpu_adam chunk 0", 23 + 2 * E, 24 + 2 * E)],
    Lane.DISK: [
        ("disk_read chunk 0", 7 + E, 8 + E),
        ("disk_read chunk 1", 9 + E, 10 + E),
        ("disk_read chunk 1", 10 + E, 13 + 2 * E),
        ("disk_write chunk 1", 18 + E, 20 + E),
        ("disk_read chunk 0", 20 + E, 23 + 2 * E),
        ("disk_write chunk 0", 24 + 2 * E, 26 + 2 * E),
    ],
}


def on_disk(model: Workload, *, n_staging: int = 1, n_buffer: int = 2) -> Plan:
    changes = {"n_disk_state": model.num_blocks, "n_disk": model.num_blocks, "n_staging": n_staging}
    return plan(model, n_buffer=n_buffer).model_copy(update=changes)


def test_what_lies_on_the_disk_comes_and_goes_through_one_place() -> None:
    model = workload()
    record = simulate(on_disk(model), model, machine(disk=DISK))
    for lane, expected in EXPECTED.items():
        assert_timeline(record, lane, expected)
    assert record.iteration_s == pytest.approx(19 + E)
    assert record.lane(Lane.DISK).moved_bytes == 2 * CHUNK_BYTES + 4 * (CHUNK_BYTES + STATE_BYTES)
    assert bottleneck(record) is Lane.DISK
    assert record.lanes_shown == (*LANES_ALONE, Lane.DISK)
    assert {wait.cause for wait in record.waits or ()} >= {TaskKind.DISK_READ, TaskKind.DISK_WRITE}


def test_host_memory_is_that_of_the_places() -> None:
    """Parameters, gradients, parameters and state of one chunk, however many chunks there are; pages of 4 KiB."""
    for num_blocks in (2, 5):
        model = workload(num_blocks)
        host = simulate(on_disk(model), model, machine(disk=DISK)).host_memory
        assert host is not None
        assert host.pinned_requested_bytes == 2 * 4096
        assert host.state_bytes == CHUNK_BYTES + STATE_BYTES


def test_more_places_never_take_longer() -> None:
    model = workload(4)
    times_s = [
        simulate(on_disk(model, n_staging=places), model, machine(disk=DISK)).iteration_s for places in (1, 2, 3, 4)
    ]
    assert times_s == sorted(times_s, reverse=True)
    assert times_s[0] > times_s[-1]


def test_many_micro_batches_are_simulated_as_few() -> None:
    """What is folded takes as long as what is simulated whole: micro-batches in the middle take the same time each."""
    model = workload(3)
    times_s = []
    for micro_batches in (30, 31, 32):
        chosen = on_disk(model, n_staging=2).model_copy(update={"micro_batches": micro_batches})
        times_s.append(simulate(chosen, model, machine(disk=DISK)).iteration_s)
    assert times_s[2] - times_s[1] == pytest.approx(times_s[1] - times_s[0])


# -- the machine -----------------------------------------------------------------------------------------------------


def test_a_faster_disk_is_faster() -> None:
    model, slow = workload(), machine(disk=DISK)
    before, after = (simulate(on_disk(model), model, one).iteration_s for one in (slow, faster_disk(slow)))
    assert after < before


def test_disk_and_cpu_adam_share_host_memory() -> None:
    """A disk of 600 B/s passes host memory of 3 000 B/s three times: 0.6 of it; CPU Adam draws 1 792 of 3 000."""
    disk = DISK.model_copy(update={"read_bytes_per_s": 600.0, "write_bytes_per_s": 100.0})
    slow = machine(disk=disk, host_bytes_per_s=3_000.0)
    contention = ContentionModel.of(slow, has_disk=True)
    together = contention.rates(frozenset({Lane.CPU_OPTIM, Lane.DISK}))
    assert contention.lanes == (*LANES_ALONE, Lane.DISK)
    drawn = together[Lane.DISK] * 0.6 + together[Lane.CPU_OPTIM] * 1_792 / 3_000
    assert drawn == pytest.approx(1)
    assert ContentionModel.of(slow).lanes == LANES_ALONE


def test_a_machine_without_a_disk_or_with_too_small_a_one_is_told_of() -> None:
    model = workload()
    with pytest.raises(HardwareError, match=r"slow machine has no disk.*--set disk=NAME.*n_disk_state to 0"):
        simulate(on_disk(model), model, machine())
    small: Hardware = machine(disk=DISK.model_copy(update={"capacity_bytes": 1_000}), kind=DeviceKind.CPU)
    with pytest.raises(HardwareError, match=r"chunks take 1\.\d+ KiB of the disk slow disk, which has 1000 B"):
        simulate(on_disk(model), model, small)
