"""Calibrating with two ranks: what both measure together is one answer on both."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

from protwin.calibration import Subject, calibrate
from protwin.calibration.fitting import calibrate as calibrating
from protwin.calibration.fitting import slowdowns
from protwin.calibration.fitting.calibrate import check_probed_here
from protwin.calibration.fitting.optimizer_costs import OptimizerCosts
from protwin.runtime import CpuDevice, trace
from protwin.runtime.devices.machine import machine_name, name_of_ranks
from protwin.runtime.ranks.world import join_world
from protwin.shared import Calibration, CalibrationError
from protwin.shared.catalogue.machines import hardware_to_toml
from protwin.shared.schema.hardware import Hardware
from protwin.shared.schema.schedule import Lane, TaskKind
from tests.calibration.fitting.test_fit_of_ranks import TWO
from tests.runtime.ranks.processes import Ranks
from tests.runtime.ranks.test_run import protwin_on

HERE = TWO.model_copy(update={"name": name_of_ranks(2)})
ARGUMENTS = ("calibrate", "--model=gpt2", "--batch-size=1", "--sequence-length=8", "--hardware=machine.toml")


class Blocks(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(64, 64) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).relu()
        return x.square().mean()


@contextmanager
def in_short() -> Iterator[None]:
    """One round of small pieces, and no steps of other optimizers, which every rank makes alone."""
    with ExitStack() as patches:
        for name, value in (("_COPY_BYTES", 2**16), ("_ADAM_SCALARS", 2**12)):
            patches.enter_context(patch.object(slowdowns, name, value))
        one_round = partial(slowdowns.measure_slowdowns, rounds=1)
        patches.enter_context(patch.object(calibrating, "measure_slowdowns", one_round))
        nothing = (OptimizerCosts(), OptimizerCosts())
        patches.enter_context(patch.object(calibrating, "optimizer_costs", lambda *_, **__: nothing))
        yield


def calibrated(rank: int, hardware: Hardware) -> tuple[Calibration, bool, bool]:
    """The calibration, whether the model is as before, and whether the default group is still there."""
    torch.manual_seed(rank)
    model, batch = Blocks(), {"x": torch.randn(2, 64)}
    before = [parameter.detach().clone() for parameter in model.parameters()]
    world = join_world(2, timeout_s=120)
    assert world is not None
    world.open_lane(torch.device("cpu"))
    subject = Subject(model, batch, trace(model, batch, blocks="layers"), hardware, world=world)
    subject = subject.on_workload_of_first()
    try:
        with in_short():
            found = calibrate(subject, steps=2, slowdown_seconds=0.1)
    finally:
        world.leave()
    same = all(torch.equal(own, was) for own, was in zip(model.parameters(), before, strict=True))
    return found, same, torch.distributed.is_initialized()


@pytest.mark.slow
def test_two_ranks_give_one_calibration_of_all_that_they_do_together(two_ranks: Ranks) -> None:
    (found, same, is_open), (other, same_there, _) = two_ranks.run(calibrated, HERE)
    assert found == other
    assert same
    assert same_there
    assert not is_open
    assert found.hardware_name == HERE.name
    for kind in (TaskKind.ALL_GATHER, TaskKind.REDUCE_SCATTER, TaskKind.ALL_REDUCE):
        assert found.factors[kind].num_pairs % 2 == 0, "tasks of both"
        assert found.factors[kind].num_pairs > 0
    measured = {frozenset(entry.lanes) for entry in found.contention}
    assert sum(Lane.COLLECTIVE in lanes for lanes in measured) == 15
    assert len(measured) == 26


def test_a_machine_that_was_probed_otherwise_is_refused_once(two_ranks: Ranks, tmp_path: Path) -> None:
    one = TWO.model_copy(update={"name": machine_name(), "node": None, "collectives": ()})
    (tmp_path / "machine.toml").write_text(hardware_to_toml(one), encoding="utf-8")
    found = two_ranks.run(protwin_on, tmp_path, *ARGUMENTS)
    assert [code for code, _, _ in found] == [2, 2]
    (line,) = "".join(errors for _, _, errors in found).splitlines()
    assert "protwin hardware probe --ranks 2 --output machine.toml" in line


def test_names_tell_with_how_many_ranks_a_machine_was_probed() -> None:
    device = CpuDevice()
    check_probed_here(HERE, device, 2)
    for hardware, num_ranks in ((HERE, 1), (HERE, 3), (TWO, 2)):
        with pytest.raises(CalibrationError, match="is not this machine"):
            check_probed_here(hardware, device, num_ranks)


def test_ranks_have_no_disk_to_measure(tmp_path: Path) -> None:
    class TwoRanks:
        num_ranks = 2

    disk = {"name": "d", "capacity_bytes": 2**30, "read_bytes_per_s": 1e9, "write_bytes_per_s": 1e9}
    hardware = Hardware.model_validate(HERE.model_dump() | {"disk": disk})
    model, batch = Blocks(), {"x": torch.randn(2, 64)}
    workload = trace(model, batch, blocks="layers", repeats=0)
    subject = Subject(model, batch, workload, hardware, disk_folder=tmp_path, world=TwoRanks())  # type: ignore[arg-type]
    with pytest.raises(CalibrationError, match="2 ranks have no chunks on a disk"):
        calibrate(subject)
