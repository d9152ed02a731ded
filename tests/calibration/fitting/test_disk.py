"""Calibrating the lane of a disk: its factors come back, its sets of lanes suffice, and its plans can be carried out.

As in ``test_fit`` the machine is the simulator under a calibration that the test chose.
"""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Iterator
from functools import partial
from itertools import combinations
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from protwin.calibration import Subject, calibrate, measure_slowdowns
from protwin.calibration.fitting import calibrate as calibrating
from protwin.calibration.fitting.fit import Pair, fit_calibration
from protwin.calibration.fitting.measurement_plans import bootstrap_plans, spanning_plans
from protwin.calibration.fitting.optimizer_costs import OptimizerCosts
from protwin.calibration.fitting.slowdowns import disk_work, sets_of_lanes
from protwin.runtime import CpuDevice, trace
from protwin.runtime.devices.chunk_file import ChunkFile
from protwin.shared.basics.errors import CalibrationError, FileError
from protwin.shared.compile.compile import compile_schedule
from protwin.shared.layout.layout import build_layout
from protwin.shared.schema.calibration import Calibration, Contention, Factor
from protwin.shared.schema.hardware import Disk, Hardware
from protwin.shared.schema.plan import Plan
from protwin.shared.schema.record import Origin
from protwin.shared.schema.schedule import LANES_ALONE, Lane, TaskKind, lanes_of
from protwin.shared.schema.workload import Workload
from protwin.shared.verify.verify import verify_schedule
from protwin.sim import simulate
from protwin.sim.costs.contention import ContentionModel
from tests.calibration.fitting import test_fit as without_disk
from tests.calibration.resident import Block
from tests.runtime.equality import FAST_FOLDER
from tests.shared import small_models
from tests.strategies.workloads import workloads

DISK = Disk(name="disk", capacity_bytes=2**40, read_bytes_per_s=4e8, write_bytes_per_s=2e8, latency_s=1e-4)
MACHINE = without_disk.MACHINE.model_copy(update={"disk": DISK})
TRUTH = without_disk.TRUTH | {TaskKind.DISK_READ: 1.7, TaskKind.DISK_WRITE: 0.7}
SLOW = (
    *without_disk.SLOW,
    Contention(lanes=(Lane.COMPUTE, Lane.DISK), slowdowns=(1.2, 1.5)),
    Contention(lanes=(Lane.CPU_OPTIM, Lane.DISK), slowdowns=(1.6, 1.3)),
)
SECRET = Calibration(
    hardware_name=MACHINE.name,
    machine="here",
    factors={kind: Factor(value=value) for kind, value in TRUTH.items()},
    contention=SLOW,
)


@pytest.fixture
def folder() -> Iterator[Path]:
    """In memory where the system has such folders."""
    with TemporaryDirectory(dir=FAST_FOLDER) as found:
        yield Path(found)


# -- fitting ---------------------------------------------------------------------------------------------------------


def fitted(workload: Workload, contention: tuple[Contention, ...]) -> Calibration:
    """To what the machine would record of the bootstrap plans."""
    records = [simulate(plan, workload, MACHINE, SECRET) for plan in bootstrap_plans(workload, has_disk=True)]
    pairs = [Pair(workload, record.model_copy(update={"origin": Origin.MEASURED})) for record in records]
    return fit_calibration(pairs, MACHINE, contention=contention, machine="here", software={})


def largest_error(found: Calibration, kinds: tuple[TaskKind, ...]) -> float:
    return max(abs(found.factor(kind) / TRUTH[kind] - 1) for kind in kinds)


def test_the_factors_of_reads_and_writes_come_back() -> None:
    """Within 2 %, though other lanes slow them; the wrong variant takes slowdown for the disk's own cost."""
    workload = without_disk.a_workload()
    assert largest_error(fitted(workload, SLOW), tuple(TRUTH)) < 0.02
    ignored = tuple(c.model_copy(update={"slowdowns": (1.0, 1.0)}) if Lane.DISK in c.lanes else c for c in SLOW)
    assert largest_error(fitted(workload, ignored), (TaskKind.DISK_READ, TaskKind.DISK_WRITE)) > 0.05


def test_plans_with_a_disk_take_as_long_as_predicted() -> None:
    """Those that nothing was fitted to, within 1 %."""
    workload = without_disk.a_workload()
    found = fitted(workload, SLOW)
    on_disk = [plan for plan in spanning_plans(workload, has_disk=True).values() if plan.n_disk_state]
    assert len(on_disk) >= 5
    for plan in on_disk:
        truth_s = simulate(plan, workload, MACHINE, SECRET).iteration_s
        assert simulate(plan, workload, MACHINE, found).iteration_s == pytest.approx(truth_s, rel=0.01)


@given(workloads(max_blocks=4), st.data())
@settings(max_examples=20, suppress_health_check=[HealthCheck.too_slow])
def test_plans_for_measuring_are_valid_for_any_workload(workload: Workload, data: st.DataObject) -> None:
    """By the verifier; those with a disk come on top of the others, which stay what they are."""
    fitting = bootstrap_plans(workload, has_disk=True)
    judging = spanning_plans(workload, has_disk=True)
    assert not set(judging.values()) & set(fitting)
    plans = (*fitting, *judging.values())
    others = {*bootstrap_plans(workload), *spanning_plans(workload).values()}
    assert {plan for plan in plans if not plan.n_disk_state} == others
    on_disk = [plan for plan in plans if plan.n_disk_state]
    for plan in (fitting[-1], data.draw(st.sampled_from(on_disk)), data.draw(st.sampled_from(plans))):
        layout = build_layout(workload.parameters, num_blocks=workload.num_blocks, chunk_bytes=plan.chunk_bytes)
        verify_schedule(compile_schedule(plan, workload, layout), plan, workload, layout)


def test_every_place_of_a_chunk_is_judged() -> None:
    """State alone on the disk, parameters too, one place and several, and host-stepped chunks beside them."""
    plans = [p for p in spanning_plans(without_disk.a_workload(), has_disk=True).values() if p.n_disk_state]
    assert {plan.n_disk for plan in plans} >= {0}
    assert any(0 < plan.n_disk < plan.n_disk_state for plan in plans)
    assert {plan.n_staging for plan in plans} >= {1, 2, 3}
    assert any(plan.n_host_stepped and plan.n_persist for plan in plans)


# -- slowdowns -------------------------------------------------------------------------------------------------------


def test_the_sets_with_a_disk_are_enough() -> None:
    """Where lanes are slowed independently, the measured sets give all others exactly."""
    every = lanes_of(1, has_disk=True)
    alone = {frozenset(found) for size in range(1, 5) for found in combinations(LANES_ALONE, size)}
    assert set(sets_of_lanes()) == alone
    sets = sets_of_lanes(has_disk=True)
    assert set(sets) > alone
    assert len(sets) - len(alone) == 6

    def slowdown(lane: Lane, lanes: frozenset[Lane]) -> float:
        return math.prod(1 + 0.1 * (every.index(lane) + 1) * (every.index(o) + 2) for o in lanes if o is not lane)

    contention = tuple(
        Contention(lanes=order, slowdowns=tuple(slowdown(lane, lanes) for lane in order))
        for lanes in sets
        if len(order := tuple(lane for lane in Lane if lane in lanes)) > 1
    )
    found = ContentionModel.of(MACHINE, SECRET.model_copy(update={"contention": contention}), has_disk=True)
    for lanes, slowdowns in found.slowdowns.items():
        assert slowdowns == pytest.approx({lane: slowdown(lane, lanes) for lane in lanes})


def test_slowdowns_beside_a_disk_are_measured(folder: Path) -> None:
    threads = threading.active_count()
    device = CpuDevice(disk_read_bytes_per_s=4e8, disk_write_bytes_per_s=4e8)
    calls: list[tuple[int, int]] = []
    found = measure_slowdowns(
        device, seconds=0.15, rounds=1, disk_folder=folder, on_progress=lambda *done: calls.append(done)
    )
    assert {frozenset(entry.lanes) for entry in found} == {s for s in sets_of_lanes(has_disk=True) if len(s) > 1}
    assert all(slowdown >= 1 for entry in found for slowdown in entry.slowdowns)
    assert calls[-1] == (21, 21)
    assert os.listdir(folder) == []
    assert threading.active_count() == threads


@pytest.mark.parametrize(("most_s", "expected"), [(math.inf, 2**20), (0.0, 2**16)])
def test_pieces_are_as_large_as_time_allows(most_s: float, expected: int, folder: Path) -> None:
    file = ChunkFile(folder, 2 * 2**20)
    move = disk_work(CpuDevice(), file, most_s)
    before = file.read_bytes, file.written_bytes
    move()
    assert (file.read_bytes - before[0], file.written_bytes - before[1]) == (expected, expected)
    file.close()


# -- calibrating -----------------------------------------------------------------------------------------------------


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList([Block(32) for _ in range(3)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def subject(folder: Path, hardware: Hardware) -> Subject:
    torch.manual_seed(0)
    model, batch = Model(), {"x": torch.randn(4, 32)}
    workload = trace(model, batch, name="three blocks")
    make_device = partial(CpuDevice, disk_read_bytes_per_s=5e7, disk_write_bytes_per_s=5e7)
    return Subject(model, batch, workload, hardware, make_device, disk_folder=folder)


@pytest.mark.slow
def test_a_calibration_measures_the_disk_of_a_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibrating, "optimizer_costs", lambda *_, **__: (OptimizerCosts(), OptimizerCosts()))
    found = calibrate(subject(folder, MACHINE), steps=2, slowdown_seconds=0.1)
    assert {TaskKind.DISK_READ, TaskKind.DISK_WRITE} <= set(found.factors)
    assert any(Lane.DISK in entry.lanes for entry in found.contention)
    assert found.num_runs == len(bootstrap_plans(without_disk.a_workload(), has_disk=True))
    assert os.listdir(folder) == []


def test_a_folder_without_a_described_disk_is_refused(folder: Path) -> None:
    """Before anything is measured."""
    with pytest.raises(CalibrationError, match=r"has no disk.*protwin hardware probe --disk-folder"):
        calibrate(subject(folder, without_disk.MACHINE))
    with pytest.raises(FileError, match="does not exist"):
        calibrate(subject(folder / "absent", MACHINE))


def test_a_plan_that_is_fitted_to_has_reads_of_several_sizes() -> None:
    """A latency is told from a rate."""
    workload = without_disk.a_workload()
    plan: Plan = bootstrap_plans(workload, has_disk=True)[-1]
    schedule = compile_schedule(plan, workload)
    for kind in (TaskKind.DISK_READ, TaskKind.DISK_WRITE):
        assert len({task.moved_bytes for task in schedule.tasks if task.kind is kind}) > 1


def test_too_few_chunks_for_the_disk_are_on_none() -> None:
    """A plan that would have nothing on the disk is none more."""
    workload = small_models.workload([small_models.parameter(f"{block}", 0, block) for block in range(2)], 2)
    extra = [plan for plan in spanning_plans(workload, has_disk=True).values() if not plan.n_disk_state]
    assert set(extra) == set(spanning_plans(workload).values())
