"""Weights that several blocks use under autocast: one cast for all of them, whatever the blocks' modes."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import nn

from protwin.runtime import carry_out, trace
from protwin.runtime.hooks import swapping
from protwin.runtime.hooks.weight_casts import WeightCasts
from protwin.shared.schema.plan import Plan
from protwin.shared.schema.workload import Workload
from protwin.shared.verify.guaranteed_peak import guaranteed_device_peak
from tests.proof_size import some_quick
from tests.runtime.equality import first
from tests.runtime.models import SEED, adamw, differences, point_batches
from tests.runtime.resuming import plan_of
from tests.runtime.watchdog import ends_in_time
from tests.strategies.plans import plans

WIDTH, LAYERS = 64, 4


class Step(nn.Module):
    """A block with two weights of its own, one of which it uses twice, and one that may be others' too."""

    def __init__(self, common: nn.Module) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)
        self.common = common

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """(batch, width) in and out."""
        again = self.down(torch.tanh(self.up(torch.tanh(self.down(torch.tanh(self.up(hidden)))))))
        return hidden + self.common(torch.tanh(again))


class Stepwise(nn.Module):
    """``has_common``: blocks share a weight; ``has_exits``: the head is used after every block."""

    def __init__(self, *, has_common: bool = False, has_exits: bool = False) -> None:
        super().__init__()
        self.entry = nn.Linear(5, WIDTH)
        common = nn.Linear(WIDTH, WIDTH)
        self.stack = nn.ModuleList(Step(common if has_common else nn.Linear(WIDTH, WIDTH)) for _ in range(LAYERS))
        self.exit = nn.Linear(WIDTH, 3)
        self.has_exits = has_exits

    def forward(self, points: torch.Tensor) -> torch.Tensor:
        """(batch, 5) to (batch, 3)."""
        hidden, total = self.entry(points), torch.zeros(())
        for block in self.stack:
            hidden = block(hidden)
            total = total + self.exit(hidden) if self.has_exits else total
        return total if self.has_exits else self.exit(hidden)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "weights of their own": Stepwise,
    "a weight that blocks share": partial(Stepwise, has_common=True),
    "a head after every block": partial(Stepwise, has_exits=True),
}


def autocast() -> Any:
    return torch.autocast("cpu", dtype=torch.bfloat16)


def loss_of(model: nn.Module, batch: Any) -> torch.Tensor:
    with autocast():
        return nn.functional.cross_entropy(model(batch["points"]).float(), batch["classes"])


def build(name: str) -> nn.Module:
    torch.manual_seed(SEED)
    return MODELS[name]()


@cache
def workload_of(name: str) -> Workload:
    batch = point_batches(1)[0]
    with autocast():
        loss = lambda output, _: nn.functional.cross_entropy(output.float(), batch["classes"])  # noqa: E731
        return trace(build(name), batch["points"], loss=loss, repeats=0)


@cache
def trained_plainly(name: str) -> dict[str, torch.Tensor]:
    model = build(name)
    optimizer = adamw([{"params": list(model.parameters())}])
    for batch in reversed(point_batches()):
        loss_of(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()


def trained(name: str, plan: Plan) -> tuple[list[str], int, int, int]:
    """What differs from the plain loop; the measured peak, the guaranteed one, and what went to the host, in bytes."""
    model, workload = build(name), workload_of(name)
    batches = point_batches()
    with ends_in_time(), carry_out(model, plan, workload, optimizer=adamw) as training:
        while batches:
            # Batches that the loop holds are no part of what a plan accounts for.
            loss_of(model, batches.pop()).backward()
            training.step()
    guaranteed_bytes = guaranteed_device_peak(training.schedule).size_bytes
    different = differences(model, trained_plainly(name))
    return different, training.peak_device_bytes, guaranteed_bytes, training.bytes_device_to_host


def swapping_plan(name: str) -> Plan:
    return plan_of(workload_of(name), chunk_bytes=60_000, n_persist=0).model_copy(update={"n_swap": LAYERS})


@some_quick("name", MODELS, quick=1)
@settings(max_examples=4, phases=[Phase.explicit, Phase.generate])
@given(data=st.data())
def test_random_plans_equal_the_plain_loop(name: str, data: st.DataObject) -> None:
    drawn = data.draw(plans(workload_of(name)).map(first))
    different, measured_bytes, guaranteed_bytes, _ = trained(
        name, drawn.model_copy(update={"micro_batches": 1, "max_gradient_norm": None})
    )
    assert different == []
    assert measured_bytes <= guaranteed_bytes


@pytest.mark.parametrize("name", MODELS)
def test_casts_of_a_blocks_own_weights_travel(name: str) -> None:
    """Each is as wide as its weight is in bfloat16; that of a weight that blocks share stays."""
    different, _, _, to_host_bytes = trained(name, swapping_plan(name))
    assert different == []
    workload = workload_of(name)
    own = [p for p in workload.parameters if p.block is not None]
    trained_bytes = sum(p.size_bytes for p in workload.parameters)
    swapped = sum(workload.profile_of(block).swappable_bytes for block in range(LAYERS))
    assert to_host_bytes == len(point_batches()) * (swapped + trained_bytes)
    casts_bytes = sum(p.size_bytes // 2 for p in own if len(p.shape) == 2)
    activations_bytes = swapped - casts_bytes
    assert 0 < activations_bytes < 0.2 * casts_bytes


@pytest.mark.parametrize("name", list(MODELS)[1:])
def test_a_cast_for_each_block_would_part(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The wrong variant: autocast is made to forget."""
    monkeypatch.setattr(WeightCasts, "let_go", lambda *_: torch.clear_autocast_cache())
    assert trained(name, swapping_plan(name))[0] != []


def test_casts_that_autocast_holds_would_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """The wrong variant: they are copied to the host, and are on the device all the same until forward ends.

    A copy that a busy machine makes late keeps its bytes for that long: the least of several peaks is free of that.
    """
    name = "weights of their own"
    peak_bytes = min(trained(name, swapping_plan(name))[1] for _ in range(6))
    monkeypatch.setattr(WeightCasts, "let_go", lambda *_: None)
    assert trained(name, swapping_plan(name))[1] > 1.2 * peak_bytes


class ByHand(nn.Module):
    """A block that casts its weight itself, and keeps the cast."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.kept = torch.zeros(())

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """(n, width) in and out."""
        self.kept = self.weight.bfloat16()
        return nn.functional.linear(rows, self.kept)


def test_a_cast_that_the_model_keeps_keeps_its_bytes() -> None:
    block, rows = ByHand(), torch.randn(8, WIDTH, requires_grad=True)
    with autocast():
        saving = swapping.SavedActivations(block, block)
        saving.run(block.forward, (rows,), {})
        assert torch.equal(block.kept, block.weight.bfloat16())
        plain = nn.Linear(5, WIDTH)
        saving = swapping.SavedActivations(plain, plain)
        saving.run(plain.forward, (torch.randn(8, 5, requires_grad=True),), {})
        with pytest.raises(RuntimeError, match=r"must be a matrix|cannot be multiplied"):
            plain(torch.randn(8, 5))
