"""A real validation in whose course a link is throttled: it is noticed, and intervals hold."""

from __future__ import annotations

import time

import pytest
import torch
from torch import nn

from protwin.calibration.fitting.subject import Subject
from protwin.calibration.validation.validate import Trial, validate
from protwin.runtime import CpuDevice, trace
from protwin.shared.schema.schedule import Lane
from tests.calibration.fitting.test_budgeted import HERE

USUAL_BYTES_PER_S = 2e8
NUM_ROUNDS = 4


class Net(nn.Module):
    """Blocks of a mebibyte."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(512, 512), nn.GELU()) for _ in range(4))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Of rows of 512."""
        for layer in self.layers:
            hidden = layer(hidden)
        return hidden.square().mean()


class Link:
    """What all devices of a machine copy through."""

    bytes_per_s = USUAL_BYTES_PER_S


class BehindLink(CpuDevice):
    """Copies take the time of a link whose speed may change."""

    def __init__(self, link: Link) -> None:
        super().__init__()
        self.link = link

    def copy(self, destination: torch.Tensor, source: torch.Tensor, *, to_device: bool) -> None:
        """Copy, and wait for the link."""
        begun_s = time.perf_counter()
        super().copy(destination, source, to_device=to_device)
        until_s = begun_s + source.numel() * source.element_size() / self.link.bytes_per_s
        time.sleep(max(0.0, until_s - time.perf_counter()))


@pytest.mark.slow
def test_a_link_that_is_throttled_while_plans_take_turns() -> None:
    torch.manual_seed(0)
    link, model, batch = Link(), Net(), {"hidden": torch.randn(64, 512)}
    workload = trace(model, batch)
    subject = Subject(model, batch, workload, HERE, make_device=lambda: BehindLink(link))

    def throttle(done: int, total: int) -> None:
        if done / total > 1.5 / NUM_ROUNDS:
            link.bytes_per_s = USUAL_BYTES_PER_S / 2

    trial = Trial(num_plans=8, most_rounds=NUM_ROUNDS, slowdown_seconds=1.0)
    found, _ = validate(subject, trial, on_progress=throttle)
    change = found.change
    assert change is not None
    assert change.first_round in (2, 3)
    assert change.lanes[Lane.H2D] == pytest.approx(2.0, rel=0.3)
    assert change.lanes[Lane.D2H] == pytest.approx(2.0, rel=0.3)
    assert any("The machine changed" in note for note in found.notes)
    assert found.time_coverage_frac is not None
    assert found.time_coverage_frac >= 0.85
