"""What training lets go of: shared gradients, buffers that forward replaces, and models of generated classes."""

from __future__ import annotations

import gc
import weakref
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

from protwin.runtime import CpuDevice, carry_out
from protwin.shared.compile.compile import compile_schedule
from protwin.shared.layout.layout import layout_of
from protwin.shared.schema.plan import Plan
from protwin.shared.schema.workload import Workload
from protwin.shared.verify.guaranteed_peak import guaranteed_device_peak
from tests.runtime.models import SEED, Case, differences

WIDTH, ROWS = 16, 8


class Joined(nn.Module):
    """Its three biases are put together, so that their gradients are parts of one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3 * WIDTH, WIDTH))
        self.biases = nn.ParameterList(nn.Parameter(torch.randn(WIDTH)) for _ in range(3))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """(rows, WIDTH) in and out."""
        made = nn.functional.linear(rows, self.weight, torch.cat(list(self.biases)))
        return rows + made.view(-1, 3, WIDTH).sum(1).tanh()


class Averaging(nn.Module):
    """Forward puts another buffer in the place of a large one."""

    average: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("average", torch.zeros(64, WIDTH))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """(rows, WIDTH) in and out."""
        made: torch.Tensor = self.weight(rows)
        self.average = self.average * 0.9 + made.detach().mean(0) * 0.1
        return rows + made.tanh() * self.average.mean()


class Normed(nn.Module):
    """Its weight is of a class that torch generates, which holds it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """(rows, WIDTH) in and out."""
        return rows + self.weight(rows).tanh()


@dataclass
class Result:
    loss: torch.Tensor


class Stack(nn.Module):
    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__()
        torch.manual_seed(SEED)
        self.layers = nn.ModuleList(kind() for _ in range(3))

    def forward(self, rows: torch.Tensor) -> Result:
        """(rows, WIDTH)."""
        for layer in self.layers:
            rows = layer(rows)
        return Result(rows.square().mean())


def plan_of(workload: Workload, *, is_offloaded: bool) -> Plan:
    """Every parameter in a chunk of its own, on the host or on the device."""
    num_chunks = len(layout_of(workload, 1).chunks)
    places: dict[str, Any] = (
        {"n_persist": 0, "n_buffer": num_chunks} if is_offloaded else {"n_persist": num_chunks, "n_buffer": 0}
    )
    return Plan(workload_id=workload.identity, chunk_bytes=1, **places)


@pytest.mark.parametrize("is_offloaded", [True, False], ids=["offloaded", "persistent"])
@pytest.mark.parametrize("kind", [Joined, Averaging, Normed])
def test_nothing_is_held_for_longer_than_it_is_needed(kind: type[nn.Module], is_offloaded: bool) -> None:
    """The budget is the guaranteed peak; what is there when the model has gone is nothing."""
    case = Case(lambda: Stack(kind), [{"rows": torch.randn(ROWS, WIDTH)} for _ in range(4)])
    plan = plan_of(case.workload, is_offloaded=is_offloaded)
    device = CpuDevice(guaranteed_device_peak(compile_schedule(plan, case.workload)).size_bytes)
    assert device.ledger is not None
    model, least_bytes = case.build(), 0
    with carry_out(model, plan, case.workload, optimizer=case.make_optimizer, device=device) as training:
        for batch in case.batches:
            loss = case.loss(model, batch)
            loss.backward()
            del loss
            training.step()
            least_bytes = min(least_bytes, *device.ledger.named.values())
    assert least_bytes == 0
    assert differences(model, case.plain.weights[-1]) == []
    layers = [weakref.ref(module) for module in model.modules()]
    del model, training, batch
    gc.collect()
    assert [module() for module in layers if module() is not None] == []
    assert device.ledger.named_bytes == device.ledger.watched_bytes == 0
