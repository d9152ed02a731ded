"""How lanes slow each other: what was measured is kept, company never helps, and the data sheet fills the rest."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protwin.shared.catalogue.machines import machine as known_machine
from protwin.shared.catalogue.machines import machine_names
from protwin.shared.catalogue.parts import disk_part
from protwin.shared.schema.calibration import Calibration, Contention
from protwin.shared.schema.hardware import DeviceKind, Hardware, Network
from protwin.shared.schema.optimizer import Optimizer
from protwin.shared.schema.schedule import LANES_ALONE, Lane, lanes_of
from protwin.sim.costs.contention import ContentionModel
from protwin.sim.costs.lane_demands import Resource, lane_demands
from tests.sim.hand_made import MACHINE, STEPPED_BYTES, machine
from tests.strategies.machines import calibrations, hardware

SETS = [frozenset(lanes) for size in range(1, len(LANES_ALONE) + 1) for lanes in combinations(LANES_ALONE, size)]
COMPUTE, H2D, D2H, CPU_OPTIM = LANES_ALONE


def of_four(hardware: Hardware) -> Hardware:
    """As many machines, joined by a network as fast as their links to the device."""
    return hardware.model_copy(update={"network": Network(name="network", num_nodes=4, link=hardware.host_to_device)})


def calibrated(measured: dict[tuple[Lane, ...], tuple[float, ...]]) -> Calibration:
    return Calibration(
        hardware_name=MACHINE,
        machine=MACHINE,
        contention=tuple(Contention(lanes=lanes, slowdowns=values) for lanes, values in measured.items()),
    )


def growing_pairs(sets: list[frozenset[Lane]]) -> Iterator[tuple[frozenset[Lane], frozenset[Lane]]]:
    """Every set of lanes with every larger one that contains it."""
    for smaller in sets:
        for larger in sets:
            if smaller < larger:
                yield smaller, larger


@given(hardware(), st.none() | calibrations(), st.sampled_from(((1, False), (4, False), (1, True))))
def test_company_never_makes_a_lane_faster(
    hardware: Hardware, calibration: Calibration | None, chosen: tuple[int, bool]
) -> None:
    num_ranks, has_disk = chosen
    box = of_four(hardware).model_copy(update={"disk": disk_part("nvme-pcie4-2tb")})
    contention = ContentionModel.of(box, calibration, num_ranks=num_ranks, has_disk=has_disk)
    lanes = lanes_of(num_ranks, has_disk=has_disk)
    sets = [frozenset(some) for size in range(1, len(lanes) + 1) for some in combinations(lanes, size)]
    assert contention.lanes == lanes == ContentionModel.none(num_ranks=num_ranks, has_disk=has_disk).lanes
    assert contention.slowdowns.keys() == set(sets)
    for smaller, larger in growing_pairs(sets):
        for lane in smaller:
            assert contention.rates(larger)[lane] <= contention.rates(smaller)[lane]
    for lanes in sets:
        rates = contention.rates(lanes)
        assert rates.keys() == lanes
        assert all(0 < rate <= 1 for rate in rates.values())
        if len(lanes) == 1:
            assert list(rates.values()) == [1.0]


def test_taking_measurements_as_they_are_would_make_company_helpful() -> None:
    # Three lanes were measured with less noise than two of them: 1.3 against 1.4 for compute.
    calibration = calibrated({(COMPUTE, H2D): (1.4, 1.1), (COMPUTE, H2D, CPU_OPTIM): (1.3, 1.9, 1.9)})
    as_they_are = {frozenset(entry.lanes): entry.slowdowns[0] for entry in calibration.contention}
    assert as_they_are[frozenset({COMPUTE, H2D, CPU_OPTIM})] < as_they_are[frozenset({COMPUTE, H2D})]
    contention = ContentionModel.of(machine(), calibration)
    assert contention.slowdowns[frozenset({COMPUTE, H2D, CPU_OPTIM})][COMPUTE] == 1.4


@given(st.data())
def test_consistent_measurements_are_kept(data: st.DataObject) -> None:
    # Slowdowns that grow with the company are what they are.
    growth = {lane: data.draw(st.floats(0, 2)) for lane in LANES_ALONE}
    chosen = data.draw(st.lists(st.sampled_from([lanes for lanes in SETS if len(lanes) > 1]), unique=True))
    measured = {
        tuple(sorted(lanes)): tuple(1 + growth[lane] * (len(lanes) - 1) for lane in sorted(lanes)) for lanes in chosen
    }
    contention = ContentionModel.of(machine(), calibrated(measured))
    for lanes, values in measured.items():
        for lane, slowdown in zip(lanes, values, strict=True):
            assert contention.slowdowns[frozenset(lanes)][lane] == slowdown


@given(hardware(), calibrations(), st.lists(st.floats(1, 8), min_size=3, max_size=3))
def test_what_was_measured_beside_collectives_is_nothing_to_one_rank(
    hardware: Hardware, calibration: Calibration, slowdowns: list[float]
) -> None:
    of_one = [entry for entry in calibration.contention if Lane.COLLECTIVE not in entry.lanes]
    beside = Contention(lanes=(COMPUTE, H2D, Lane.COLLECTIVE), slowdowns=tuple(slowdowns))
    with_it, without = (
        ContentionModel.of(hardware, calibration.model_copy(update={"contention": entries}))
        for entries in ((*of_one, beside), tuple(of_one))
    )
    assert with_it == without


def test_sets_that_were_not_measured_multiply_the_fewest_groups() -> None:
    contention = ContentionModel.of(
        machine(),
        calibrated(
            {
                (COMPUTE, H2D): (1.1, 1.0),
                (COMPUTE, D2H): (1.2, 1.0),
                (COMPUTE, CPU_OPTIM): (1.5, 1.25),
                (COMPUTE, H2D, CPU_OPTIM): (1.8, 1.0, 1.25),
            }
        ),
    )
    # Two groups of one: 1.1 * 1.2.
    assert contention.slowdowns[frozenset({COMPUTE, H2D, D2H})][COMPUTE] == pytest.approx(1.1 * 1.2)
    # All four: {h2d, cpu_optim} and {d2h}, 1.8 * 1.2, rather than three groups of one, 1.1 * 1.2 * 1.5 = 1.98.
    assert contention.slowdowns[frozenset(LANES_ALONE)][COMPUTE] == pytest.approx(1.8 * 1.2)


def test_a_measured_set_bounds_the_unmeasured_ones_within_it() -> None:
    # Nobody measured the pair, and the data sheet of this machine says 2 for each; the three together were 1.5.
    slow = machine(gather_s=1.0, offload_s=1.0, full_duplex=False)
    assert ContentionModel.of(slow).slowdowns[frozenset({H2D, D2H})][H2D] == 2.0
    contention = ContentionModel.of(slow, calibrated({(COMPUTE, H2D, D2H): (1.0, 1.5, 1.6)}))
    assert dict(contention.slowdowns[frozenset({H2D, D2H})]) == {H2D: 1.5, D2H: 1.6}


# -- from the data sheet ---------------------------------------------------------------------------------------------


def test_a_roomy_host_with_duplex_links_disturbs_nobody() -> None:
    contention = ContentionModel.of(machine(host_bytes_per_s=1e9))
    assert contention == ContentionModel.none()


def test_one_direction_at_a_time() -> None:
    contention = ContentionModel.of(machine(full_duplex=False))
    assert dict(contention.rates(frozenset({H2D, D2H}))) == {H2D: 0.5, D2H: 0.5}
    assert dict(contention.rates(frozenset(LANES_ALONE))) == {COMPUTE: 1.0, H2D: 0.5, D2H: 0.5, CPU_OPTIM: 1.0}


def test_copies_and_cpu_adam_share_the_host_memory() -> None:
    # Per second: copies 256 bytes each way, CPU Adam 1 792; the host gives 1 792.
    host_bytes_per_s = float(STEPPED_BYTES)
    rates = ContentionModel.of(machine(host_bytes_per_s=host_bytes_per_s)).rates
    assert dict(rates(frozenset({H2D, D2H}))) == {H2D: 1.0, D2H: 1.0}
    demand = (1792 + 256) / 1792
    assert dict(rates(frozenset({H2D, CPU_OPTIM}))) == pytest.approx({H2D: 1 / demand, CPU_OPTIM: 1 / demand})
    all_four = (1792 + 256 + 256) / 1792
    assert rates(frozenset(LANES_ALONE))[CPU_OPTIM] == pytest.approx(1 / all_four)
    assert rates(frozenset(LANES_ALONE))[COMPUTE] == 1.0  # it runs from the device's own memory


def test_a_two_core_machine_whose_cpu_is_the_device() -> None:
    # Measured on one: compute slows 1.13 times beside a copy or CPU Adam, these two slow each other 1.8 times, and all
    # three together slow between 1.6 and 2.5 times.  Copies there draw 45 % of the memory bandwidth to read and as
    # much to write, CPU Adam 90 %.
    small = machine(kind=DeviceKind.CPU, gather_s=256 / 4.5e9, offload_s=256 / 4.5e9, cpu_adam_s=1792 / 9e9)
    small = small.model_copy(update={"host": small.host.model_copy(update={"memory_bandwidth_bytes_per_s": 10e9})})
    slowdowns = ContentionModel.of(small).slowdowns
    for lane in (H2D, D2H, CPU_OPTIM):
        assert slowdowns[frozenset({COMPUTE, lane})][COMPUTE] == pytest.approx(1.13)
    assert slowdowns[frozenset({H2D, CPU_OPTIM})][H2D] == pytest.approx(1.8)
    assert 1.6 <= slowdowns[frozenset({COMPUTE, H2D, CPU_OPTIM})][COMPUTE] <= 2.5


@given(hardware())
def test_no_resource_of_an_unmeasured_machine_gives_more_than_it_has(hardware: Hardware) -> None:
    demands, contention = lane_demands(hardware), ContentionModel.of(hardware)
    assert all(0 <= share <= 1 for demand in demands.values() for share in demand.values())
    for lanes in SETS:
        rates = contention.rates(lanes)
        for resource in Resource:
            assert sum(rates[lane] * demands[lane].get(resource, 0.0) for lane in lanes) <= 1 + 1e-9


@given(hardware())
def test_lanes_that_are_alike_are_slowed_alike(hardware: Hardware) -> None:
    alike = hardware.model_copy(update={"device_to_host": hardware.host_to_device})
    contention = ContentionModel.of(alike)
    for lanes in SETS:
        if {H2D, D2H} <= lanes:
            assert contention.rates(lanes)[H2D] == pytest.approx(contention.rates(lanes)[D2H])


@given(hardware(), st.floats(1, 8))
def test_more_host_memory_bandwidth_never_slows_the_slowest(hardware: Hardware, factor: float) -> None:
    # CPU Adam's own rate is stated: a machine that derives it from the bandwidth would ask for more.
    host = hardware.host.model_copy(update={"adam_bytes_per_s": 1e9})
    faster = host.model_copy(update={"memory_bandwidth_bytes_per_s": factor * host.memory_bandwidth_bytes_per_s})
    before = ContentionModel.of(hardware.model_copy(update={"host": host}))
    after = ContentionModel.of(hardware.model_copy(update={"host": faster}))
    for lanes in SETS:
        assert min(after.rates(lanes).values()) >= min(before.rates(lanes).values()) * (1 - 1e-9)


def test_a_link_that_holds_up_copies_leaves_memory_to_cpu_adam() -> None:
    # Copies of 1 792 bytes a second each share a link: together they draw 1 792 from the host, as CPU Adam does.
    shared = machine(
        gather_s=256 / 1792, offload_s=256 / 1792, full_duplex=False, host_bytes_per_s=2 * float(STEPPED_BYTES)
    )
    assert dict(ContentionModel.of(shared).rates(frozenset({H2D, D2H, CPU_OPTIM}))) == pytest.approx(
        {H2D: 0.5, D2H: 0.5, CPU_OPTIM: 1.0}
    )
    both_ways = shared.model_copy(update={"full_duplex": True})
    assert ContentionModel.of(both_ways).rates(frozenset({H2D, D2H, CPU_OPTIM}))[CPU_OPTIM] == pytest.approx(2 / 3)


def test_cores_are_shared_where_the_cpu_computes() -> None:
    # Copies too slow to trouble the memory, CPU Adam that keeps all cores busy, compute on three of four.
    small = machine(kind=DeviceKind.CPU, gather_s=1.0, offload_s=1.0, cpu_adam_s=1792 / 40e9)
    host = small.host.model_copy(update={"num_cores": 4, "memory_bandwidth_bytes_per_s": 1e13})
    rates = ContentionModel.of(small.model_copy(update={"host": host})).rates
    assert dict(rates(frozenset({COMPUTE, CPU_OPTIM}))) == pytest.approx({COMPUTE: 1 / 1.75, CPU_OPTIM: 1 / 1.75})
    assert dict(rates(frozenset({COMPUTE, H2D}))) == pytest.approx({COMPUTE: 1.0, H2D: 1.0})


def test_collectives_share_the_device_with_compute() -> None:
    h100 = known_machine("h100-80gb-x8")
    demands = lane_demands(h100, 8)
    assert demands[Lane.COLLECTIVE][Resource.DEVICE_MEMORY] == pytest.approx(3 * 370 / 3350)
    # Compute has 108 of 132 processors, and waits for 3 passes of 370 GB/s over a memory of 3 350.
    rates = ContentionModel.of(h100, num_ranks=8).rates(frozenset({COMPUTE, Lane.COLLECTIVE}))
    assert rates[COMPUTE] == pytest.approx(108 / 132 / (1 + 3 * 370 / 3350))
    assert rates[Lane.COLLECTIVE] == 1.0
    through_memory = lane_demands(known_machine("rtx-4090-x8"), 8)
    assert Resource.HOST_MEMORY in through_memory[Lane.COLLECTIVE]
    assert Resource.HOST_MEMORY not in demands[Lane.COLLECTIVE]


def test_kernels_beside_all_gathers_take_as_long_as_was_measured() -> None:
    """An A100 in GPT training: products 1.76, attention 1.83 times; an H100: products 1.3 to 1.7 times."""
    pair = frozenset({COMPUTE, Lane.COLLECTIVE})
    a100, h100 = (
        ContentionModel.of(known_machine(name), num_ranks=8).slowdowns[pair][COMPUTE]
        for name in ("a100-80gb-x8", "h100-80gb-x8")
    )
    assert a100 == pytest.approx((1.76 + 1.83) / 2, rel=0.05)
    assert 1.3 <= h100 <= 1.7
    assert h100 < a100


@pytest.mark.parametrize("name", machine_names())
def test_copies_alone_disturb_neither_compute_nor_each_other(name: str) -> None:
    hardware = known_machine(name)
    rates = ContentionModel.of(hardware).rates(frozenset({COMPUTE, H2D}))
    assert dict(rates) == {COMPUTE: 1.0, H2D: 1.0}
    # The model lets copies have the device's memory for nothing: they fit beside compute on every machine.
    copied = hardware.host_to_device.bandwidth_bytes_per_s + hardware.device_to_host.bandwidth_bytes_per_s
    drawn = lane_demands(hardware)[COMPUTE][Resource.DEVICE_MEMORY]
    assert drawn + copied / hardware.device.memory_bandwidth_bytes_per_s <= 0.6
    both = ContentionModel.of(hardware).rates(frozenset({H2D, D2H}))
    host_shared = (
        hardware.host_to_device.bandwidth_bytes_per_s + hardware.device_to_host.bandwidth_bytes_per_s
        > hardware.host.memory_bandwidth_bytes_per_s
    )
    assert (both[H2D] == both[D2H] == 1.0) == (hardware.full_duplex and not host_shared)


def test_measured_slowdowns_follow_what_the_optimizer_draws() -> None:
    """Copies beside a step on a host of few cores: AdamW fills the memory, and 8-bit AdamW does not."""
    box = machine(kind=DeviceKind.CUDA)
    host = {"num_cores": 1, "adam_bytes_per_s": 90e9, "memory_bandwidth_bytes_per_s": 100e9}
    links = {"host_to_device": box.host_to_device.model_copy(update={"bandwidth_bytes_per_s": 50e9})}
    box = box.model_copy(update={"host": box.host.model_copy(update=host), **links})
    pair, copies = frozenset((Lane.H2D, Lane.CPU_OPTIM)), frozenset((Lane.H2D, Lane.D2H))
    measured = calibrated({(Lane.H2D, Lane.CPU_OPTIM): (1.6, 1.5), (Lane.H2D, Lane.D2H): (1.1, 1.2)})
    measured = measured.model_copy(update={"hardware_name": box.name})
    usual, quantized = (
        ContentionModel.of(box, measured, optimizer=optimizer).slowdowns
        for optimizer in (Optimizer.ADAMW, Optimizer.ADAMW_8BIT)
    )
    # 0.9 and 0.5 of the memory are 1.4; 0.05 and 0.5 fit.
    assert usual[pair] == {Lane.H2D: 1.6, Lane.CPU_OPTIM: 1.5}
    assert quantized[pair] == pytest.approx({Lane.H2D: 1.6 / 1.4, Lane.CPU_OPTIM: 1.5 / 1.4})
    assert usual[copies] == quantized[copies] == {Lane.H2D: 1.1, Lane.D2H: 1.2}


def test_no_lanes_no_rates() -> None:
    assert dict(ContentionModel.none().rates(frozenset())) == {}
