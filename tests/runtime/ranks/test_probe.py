"""Measuring a machine as two ranks reach it, and asking about it afterwards."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from protwin.runtime import CpuDevice, probe_ranks
from protwin.runtime.commands.run_ranks import ranks_to_measure
from protwin.runtime.devices.machine import host_memory_bytes, machine_name, num_cores
from protwin.runtime.ranks import rank_probe
from protwin.runtime.ranks.collective_probe import SCHEDULED, measure_collectives, scheduled_work
from protwin.runtime.ranks.collectives import Collectives
from protwin.runtime.ranks.rank_probe import hardware_of_devices, hardware_of_ranks
from protwin.runtime.ranks.world import join_world
from protwin.shared import ProtwinError, RanksError, load_hardware
from protwin.shared.catalogue.machines import machine
from protwin.shared.catalogue.rank_share import machine_of_rank
from protwin.shared.schema.hardware import Collective, DeviceKind, Hardware, Link, LinkPoint, MeasuredCollective
from protwin.shared.schema.schedule import TaskKind
from protwin.sim import search
from protwin.sim.costs.fabrics import CALL_OVERHEAD_S, machine_collective, modelled_collective
from protwin.sim.searching.request import SearchRequest, Step
from tests.calibration.fitting.test_fit import a_workload
from tests.proof_size import share
from tests.runtime.ranks.processes import Ranks
from tests.runtime.ranks.test_run import protwin_on
from tests.strategies.machines import hardware as random_hardware

SIZES = (2**12, 2**16, 2**20)


def told_of_few_sizes(rank: int, folder: Path, *arguments: str) -> tuple[int, str, str]:
    """The command, with fewer sizes of collectives."""
    few = partial(measure_collectives, sizes=SIZES)
    with patch("protwin.runtime.ranks.rank_probe.measure_collectives", few):
        return protwin_on(rank, folder, *arguments)


@pytest.mark.slow
def test_one_rank_tells_the_machine_of_both_which_can_be_searched(two_ranks: Ranks, tmp_path: Path) -> None:
    arguments = ("hardware", "probe", "--seconds=0.1", "--output=machine.toml")
    (code, told, errors), other = two_ranks.run(told_of_few_sizes, tmp_path, *arguments)
    assert (code, errors) == (0, "")
    assert other == (0, "", "")
    assert "processes of one CPU" in told
    found = load_hardware(tmp_path / "machine.toml")
    assert (found.name, found.num_devices) == (f"{machine_name()}, shared by 2 ranks", 2)
    assert found.device.kind is DeviceKind.CPU
    assert found.device.memory_bytes == host_memory_bytes() // 2
    assert (found.host.num_cores, found.host.memory_bytes) == (num_cores(), host_memory_bytes())
    assert {one.collective for one in found.collectives} == set(SCHEDULED)
    for one in found.collectives:
        assert one.num_ranks == 2
        assert tuple(point.size_bytes for point in one.table) == SIZES
        seconds = [point.seconds for point in one.table]
        assert seconds == sorted(seconds)
        assert all(beside.seconds >= alone.seconds for alone, beside in zip(one.table, one.beside_compute, strict=True))
    answer = search(SearchRequest(workload=a_workload(num_blocks=2), hardware=found, step=Step(num_ranks=2)))
    assert answer.plan.num_ranks == 2


def test_every_collective_of_a_schedule_is_measured() -> None:
    """As collectives are named in tasks; and all-to-alls, which several kinds of tasks are."""
    kinds = {TaskKind.ALL_GATHER, TaskKind.REDUCE_SCATTER, TaskKind.ALL_REDUCE}
    assert {one.value for one in SCHEDULED} == {kind.value for kind in kinds} | {"all_to_all"}


def counted(rank: int, slow_rank: int) -> tuple[list[int], tuple[MeasuredCollective, ...]]:
    """How often each collective was called by size, where calls of one rank take longer; and what was found."""
    calls: dict[tuple[Collective, int], int] = {}

    def work(collectives: Collectives, collective: Collective, size_bytes: int, target: torch.device) -> object:
        done = scheduled_work(collectives, collective, size_bytes, target)

        def count() -> None:
            calls[collective, size_bytes] = calls.get((collective, size_bytes), 0) + 1
            if rank == slow_rank:
                torch.ones(200_000).exp_()
            done()

        return count

    world = join_world(2, timeout_s=60)
    assert world is not None
    world.open_lane(torch.device("cpu"))
    try:
        with patch("protwin.runtime.ranks.collective_probe.scheduled_work", work):
            found = measure_collectives(world, CpuDevice(), seconds=0.05, sizes=SIZES)
    finally:
        world.leave()
    return list(calls.values()), found


def test_ranks_call_equally_often_whichever_is_slow(two_ranks: Ranks) -> None:
    """Otherwise the last calls of one would wait for ever; what was found is the same on both."""
    for slow_rank in share(range(2), 2):
        one, other = two_ranks.run(counted, slow_rank)
        assert one == other
        assert min(one[0]) >= 2 * 5, "alone and beside compute"


def does_what_its_name_says(rank: int) -> list[list[float]]:
    """Each collective's work on one pair of scalars of a rank's own."""
    world = join_world(2, timeout_s=60)
    assert world is not None
    world.open_lane(torch.device("cpu"))
    collectives, results = Collectives(world, world.lane_group), []
    made: list[torch.Tensor] = []

    def zeros(size: int, *, device: torch.device) -> torch.Tensor:
        made.append(torch.full((size,), rank + 1.0))
        return made[-1]

    try:
        for collective in SCHEDULED:
            with patch("protwin.runtime.ranks.collective_probe.torch.zeros", zeros):
                work = scheduled_work(collectives, collective, 8, torch.device("cpu"))
            work()
            results.append([value for tensor in made for value in tensor.tolist()])
            made.clear()
    finally:
        collectives.close()
        world.leave()
    return results


def test_the_work_is_that_of_tasks(two_ranks: Ranks) -> None:
    """Rank 0 has ones and rank 1 twos: whole (2,), then the rank's own part (1,) of what is scattered."""
    (gathered, scattered, reduced, exchanged), of_second = two_ranks.run(does_what_its_name_says)
    gathered_1, scattered_1, reduced_1, exchanged_1 = of_second
    assert gathered[:2] == gathered_1[:2] == [1.0, 2.0]
    assert scattered[2:] == scattered_1[2:] == [3.0]
    assert reduced[:2] == reduced_1[:2] == [3.0, 3.0]
    assert exchanged[3:] == exchanged_1[3:] == [1.0, 2.0], "a scalar of each rank for each"


def gathers(num_ranks: int, seconds: tuple[float, ...]) -> MeasuredCollective:
    points = tuple(LinkPoint(size_bytes=size, seconds=one_s) for size, one_s in zip(SIZES, seconds, strict=True))
    return MeasuredCollective(collective=Collective.ALL_GATHER, num_ranks=num_ranks, table=points)


def slowed(hardware: Hardware, factor: float) -> Hardware:
    """A CPU that takes so many times as long for everything."""
    device = hardware.device.model_copy(
        update={
            "kind": DeviceKind.CPU,
            "memory_bandwidth_bytes_per_s": hardware.device.memory_bandwidth_bytes_per_s / factor,
            "peak_flop_per_s": {dtype: peak / factor for dtype, peak in hardware.device.peak_flop_per_s.items()},
            "vector_flop_per_s": hardware.device.vector_flop_per_s / factor,
            "launch_overhead_s": hardware.device.launch_overhead_s * factor,
            "reserved_bytes": 0,
        }
    )
    link = Link(
        name="copies",
        latency_s=1e-5 * factor,
        bandwidth_bytes_per_s=1e9 / factor,
        table=(LinkPoint(size_bytes=2**20, seconds=1e-3 * factor),),
    )
    rates = {"memory_bandwidth_bytes_per_s": 1e10, "adam_bytes_per_s": 5e9, "matrix_flop_per_s": 4e10}
    host = hardware.host.model_copy(update={name: rate / factor for name, rate in rates.items()})
    return hardware.model_copy(update={"device": device, "host": host, "host_to_device": link, "device_to_host": link})


@given(random_hardware(), st.lists(st.floats(0.1, 10), min_size=2, max_size=4), st.floats(1e-5, 1e-3))
def test_the_slowest_rank_sets_the_pace(one: Hardware, factors: list[float], latency_s: float) -> None:
    """A rank's part of the machine is what the slowest rank measured beside the others."""
    num_ranks, seconds = len(factors), (latency_s, 2 * latency_s, 0.25)
    found = hardware_of_ranks([slowed(one, factor) for factor in factors], [gathers(num_ranks, seconds)])
    own, expected = machine_of_rank(found, num_ranks), slowed(one, max(factors))
    for name in ("memory_bandwidth_bytes_per_s", "vector_flop_per_s", "launch_overhead_s", "peak_flop_per_s"):
        assert getattr(own.device, name) == getattr(expected.device, name)
    for name in ("memory_bandwidth_bytes_per_s", "adam_bytes_per_s", "matrix_flop_per_s"):
        assert getattr(own.host, name) == pytest.approx(getattr(expected.host, name))
    assert own.host_to_device == own.device_to_host == expected.host_to_device
    # The path from process to process gives the smallest and the largest all-gather.
    small_s, large_s = (
        modelled_collective(Collective.ALL_GATHER, size, found, num_ranks).seconds for size in (SIZES[0], SIZES[-1])
    )
    assert small_s == pytest.approx(latency_s + (0.25 - latency_s) * SIZES[0] / SIZES[-1] + CALL_OVERHEAD_S)
    assert large_s == pytest.approx(0.25 + CALL_OVERHEAD_S)


def test_a_mistake_is_told_once(two_ranks: Ranks, tmp_path: Path) -> None:
    found = two_ranks.run(protwin_on, tmp_path, "hardware", "probe", "--ranks=3", "--seconds=0.2")
    assert [code for code, _, _ in found] == [2, 2]
    (line,) = "".join(errors for _, _, errors in found).splitlines()
    assert line.startswith("error: --ranks is 3, but 2 processes were started (WORLD_SIZE = 2). ")


def test_a_folder_that_cannot_be_written_is_told_on_all_ranks(two_ranks: Ranks, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    found = two_ranks.run(
        protwin_on, tmp_path, "hardware", "probe", "--seconds=0.1", "--disk-folder=missing", "--output=machine.toml"
    )
    assert [code for code, _, _ in found] == [2, 2]
    assert len("".join(errors for _, _, errors in found).splitlines()) == 1
    assert not (tmp_path / "machine.toml").exists()


def test_what_ranks_cannot_measure_is_refused() -> None:
    with pytest.raises(RanksError, match="1 ranks do nothing together"):
        probe_ranks(1)
    with pytest.raises(RanksError, match="ranks are on 2 hosts"):
        rank_probe._device(_WorldOf(("here", "there")), None)  # type: ignore[arg-type]


class _WorldOf:
    local_rank = 0

    def __init__(self, hosts: tuple[str, ...]) -> None:
        self.hosts = hosts


@pytest.mark.parametrize("driver_tells", [True, False])
def test_devices_have_the_node_that_the_driver_tells_and_their_collectives(driver_tells: bool) -> None:
    """Where the driver tells none, it is what the collectives imply."""
    alone = machine("a100-80gb-x8") if driver_tells else machine("a100-80gb")
    found = hardware_of_devices(alone, [gathers(2, (1e-5, 2e-5, 1e-3))])
    assert (found.device, found.host, found.name) == (alone.device, alone.host, alone.name)
    assert found.node is not None
    assert found.num_devices == (8 if driver_tells else 2)
    assert (found.node == alone.node) is driver_tells
    assert machine_collective(Collective.ALL_GATHER, SIZES[-1], found, 2).seconds == 1e-3


def test_ranks_are_found_or_started() -> None:
    launched = {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "MASTER_ADDR": "here", "MASTER_PORT": "1"}
    assert ranks_to_measure(None, {}) == (1, False)
    assert ranks_to_measure(1, {}) == (1, False)
    assert ranks_to_measure(3, {}) == (3, True)
    assert ranks_to_measure(None, launched) == ranks_to_measure(4, launched) == (4, False)
    with pytest.raises(ProtwinError, match="--ranks is 2, but 4 processes were started"):
        ranks_to_measure(2, launched)
