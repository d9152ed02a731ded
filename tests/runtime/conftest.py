"""What every test of the runtime leaves behind, nothing that still runs, and a training that mistakes are made in."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from torch import nn

from protwin.runtime import Training, carry_out
from tests.runtime.life_cycle import plan_for
from tests.runtime.models import Case, cases
from tests.runtime.watchdog import ends_in_time, lanes_alive


@pytest.fixture(autouse=True)
def _no_lane_outlives_its_test() -> Iterator[None]:
    before = len(lanes_alive())
    yield
    assert len(lanes_alive()) <= before, "a training was left open"


@pytest.fixture
def case() -> Case:
    return cases()["llama"]


@pytest.fixture
def model(case: Case) -> nn.Module:
    return case.build()


@pytest.fixture
def training(case: Case, model: nn.Module) -> Iterator[Training]:
    """One step done, the model in the middle of training."""
    with ends_in_time():
        started = carry_out(model, plan_for(case.workload), case.workload, optimizer=case.make_optimizer)
        case.loss(model, case.batches[0]).backward()
        started.step()
        yield started
        started.close()
