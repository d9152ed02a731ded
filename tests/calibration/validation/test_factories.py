"""What a user's function may give: blocks too, where none are found."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from protwin.calibration.fitting.trained_as import TrainedAs
from protwin.calibration.validation.subjects import factory_subject
from protwin.runtime import CpuDevice
from protwin.shared.basics.errors import WorkloadError
from tests.calibration.fitting.test_fit import MACHINE

MODELS = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x)
        return x.square().mean()

def alone():
    return Net(), torch.randn(2, 8)

def named():
    return Net(), torch.randn(2, 8), None, "layers"
"""


@pytest.mark.parametrize("budget", [None, 2**20])
def test_a_function_names_the_blocks_that_are_not_found(tmp_path: Path, budget: int | None) -> None:
    """Members that are single maps are no blocks by themselves, so that the message asks for their name."""
    place = tmp_path / "models.py"
    place.write_text(MODELS)
    trained_as, make_device = TrainedAs(device_budget_bytes=budget), partial(CpuDevice, budget_bytes=budget)
    with pytest.raises(WorkloadError, match="name them: blocks='layers'"):
        factory_subject(f"{place}:alone", MACHINE, make_device, trained_as, 0)
    assert factory_subject(f"{place}:named", MACHINE, make_device, trained_as, 0).workload.num_blocks == 3
