"""Parameters of no dim, of one element and of none train as any other, in every residency."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_

from protwin.runtime import carry_out, trace
from protwin.shared.basics.errors import ScheduleError, WorkloadError
from protwin.shared.layout.layout import layout_of
from protwin.shared.schema.plan import Plan


class Gated(nn.Module):
    """A residual block with a gate of no dim and a scale of one element."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(16, 16)
        self.gate = nn.Parameter(torch.tensor(0.5))
        self.scale = nn.Parameter(torch.full((1, 1), 0.9))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale + torch.tanh(self.gate) * self.inner(x)


class Scaled(nn.Module):
    """A stack of them, with a temperature of no dim outside the blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.ModuleList(Gated() for _ in range(4))
        self.temperature = nn.Parameter(torch.tensor(2.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.body:
            x = block(x)
        return (x * self.temperature.exp()).square().mean()


@pytest.mark.parametrize("n_persist", [0, 1, 3])
@pytest.mark.parametrize("limit", [None, 0.01])
def test_they_equal_the_plain_loop(n_persist: int, limit: float | None) -> None:
    torch.manual_seed(0)
    plain, batch = Scaled(), torch.randn(4, 16)
    model = copy.deepcopy(plain)
    workload = trace(model, batch, loss=lambda output, _: output, repeats=0)
    plan = Plan(
        workload_id=workload.identity,
        chunk_bytes=2**12,
        n_persist=n_persist,
        n_buffer=min(2, 3 - n_persist),
        n_checkpoint=1,
        max_gradient_norm=limit,
    )
    optimizer = torch.optim.AdamW(plain.parameters(), fused=True)
    with carry_out(model, plan, workload) as training:
        for _ in range(3):
            model(batch).backward()
            training.step()
            plain(batch).backward()
            if limit is not None:
                clip_grad_norm_(plain.parameters(), limit)
            optimizer.step()
            optimizer.zero_grad()
    for found, expected in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(found, expected)


class WithNothing(Scaled):
    """Beside them a trained parameter without elements, which has a chunk to itself."""

    def __init__(self) -> None:
        super().__init__()
        self.nothing = nn.Parameter(torch.empty(0, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + self.nothing.sum()


@pytest.mark.parametrize("knobs", [{}, {"n_host_stepped": 100}, {"micro_batches": 2, "max_gradient_norm": 0.01}])
def test_a_chunk_of_a_parameter_without_elements_is_offloaded_as_any_other(knobs: dict[str, Any]) -> None:
    torch.manual_seed(0)
    plain, batch = WithNothing(), torch.randn(4, 16)
    model = copy.deepcopy(plain)
    workload = trace(model, batch, loss=lambda output, _: output, repeats=0)
    layout = layout_of(workload, 1)
    assert any(chunk.size_bytes == 0 for chunk in layout.chunks), "it shares a chunk"
    knobs = knobs | ({"n_host_stepped": len(layout.chunks)} if "n_host_stepped" in knobs else {})
    n_buffer = layout.min_buffers(knobs.get("n_host_stepped", 0))
    plan = Plan(workload_id=workload.identity, chunk_bytes=1, n_persist=0, n_buffer=n_buffer, **knobs)
    optimizer = torch.optim.AdamW(plain.parameters(), fused=True)
    with carry_out(model, plan, workload) as training:
        for _ in range(2):
            for of_step in range(plan.micro_batches):
                model(batch + of_step).backward()
                plain(batch + of_step).backward()
            training.step()
            if plan.max_gradient_norm is not None:
                clip_grad_norm_(plain.parameters(), plan.max_gradient_norm)
            optimizer.step()
            optimizer.zero_grad()
    for found, expected in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(found, expected)


class Dropped(Gated):
    """A block that values leave out."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) if x.isnan().any() else x


def test_a_block_that_returns_its_input_is_named_where_values_decide_so() -> None:
    """The order of blocks cannot be found on tensors without values: that is not what is told."""
    model = Scaled()
    model.body[2] = Dropped()
    with pytest.raises(
        ScheduleError, match=r"nothing in the loss leads back to that block's output.*returns its input"
    ):
        trace(model, torch.randn(4, 16), loss=lambda output, _: output, repeats=0)


def test_a_sequential_model_has_its_blocks_or_is_told_to_name_them() -> None:
    """Alike ones among others are found; layers without parts are not taken for blocks, and a part of them is named."""
    model = nn.Sequential(nn.Linear(16, 16), *(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(3)))
    found = trace(model, torch.randn(2, 16), loss=lambda output, _: output.mean(), repeats=0)
    assert [block.name for block in found.blocks] == ["1", "2", "3"]
    layers = nn.Sequential(*(nn.Linear(16, 16) for _ in range(4)))
    with pytest.raises(WorkloadError, match=r"its members are not made of parts.*0 \(Linear\), 1"):
        trace(layers, torch.randn(2, 16), loss=lambda output, _: output.mean(), repeats=0)
    named = trace(model, torch.randn(2, 16), loss=lambda output, _: output.mean(), blocks=["1", "2", "3"], repeats=0)
    assert [block.name for block in named.blocks] == ["1", "2", "3"]
