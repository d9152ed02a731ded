"""Checkpointed blocks that are given their tensors by name."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import get_device_states

import protwin.runtime.hooks.section_walker as walk
from protwin.runtime import carry_out, trace
from protwin.shared.layout.layout import build_layout
from protwin.shared.schema.plan import Plan
from tests.runtime.models import SEED, adamw, differences, snapshot
from tests.runtime.named_inputs import NamedInputBlock


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(NamedInputBlock() for _ in range(3))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """The loss of (n, 16)."""
        for layer in self.layers:
            rows = layer(hidden=rows)
        return rows.square().mean()


def steps() -> Iterator[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    for _ in range(3):
        yield torch.randn(4, 16, generator=generator)


def train(model: nn.Module) -> list[float]:
    """The loop, by the plan that checkpoints every block."""
    workload = trace(model, next(steps()), repeats=0)
    chunk_bytes = 2_000
    layout = build_layout(workload.parameters, num_blocks=3, chunk_bytes=chunk_bytes)
    plan = Plan(
        workload_id=workload.identity,
        chunk_bytes=chunk_bytes,
        n_persist=0,
        n_buffer=layout.min_buffers(0),
        n_checkpoint=3,
    )
    losses = []
    torch.manual_seed(SEED)
    with carry_out(model, plan, workload, optimizer=adamw) as training:
        for rows in steps():
            loss = model(rows)
            loss.backward()
            training.step()
            losses.append(loss.item())
    return losses


def first_by_name(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor | None:
    """As if the CPU's tensors were a CUDA device's."""
    return next(iter(kwargs.values()))


@pytest.mark.parametrize("is_like_cuda", [False, True])
def test_they_are_recomputed_like_others(is_like_cuda: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(SEED)
    model, plain = Model(), Model()
    plain.load_state_dict(snapshot(model))
    if is_like_cuda:
        monkeypatch.setattr(walk, "tensor_only_by_name", first_by_name)
    optimizer, expected = adamw([{"params": list(plain.parameters())}]), []
    torch.manual_seed(SEED)
    for rows in steps():
        loss = plain(rows)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        expected.append(loss.item())
    assert train(model) == expected
    assert differences(model, snapshot(plain)) == []


class OnCuda(torch.Tensor):
    """What says that it is on a CUDA device."""

    is_cuda = True  # type: ignore[assignment]


def test_a_tensor_is_looked_for_among_names_only_where_no_other_tells_the_device() -> None:
    on_cuda, on_cpu = torch.zeros(1).as_subclass(OnCuda), torch.zeros(1)
    assert walk.tensor_only_by_name((), {"mask": on_cpu, "hidden": on_cuda}) is on_cuda
    assert walk.tensor_only_by_name((on_cuda,), {"hidden": on_cuda}) is None
    assert walk.tensor_only_by_name((on_cpu,), {"mask": on_cpu}) is None
    # The reason: torch itself asks nobody but positional arguments.
    assert "kwargs" not in get_device_states.__code__.co_varnames
