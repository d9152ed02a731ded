"""Blocks that change something about themselves when they run: recomputation must not change it again."""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import protwin.runtime.hooks.section_walker as walk_module
from protwin.runtime import carry_out, trace
from protwin.runtime.hooks.recomputation import BlockState
from protwin.shared.basics.errors import ScheduleError
from protwin.shared.schema.plan import Plan
from tests.runtime.models import adamw

WIDTH = 8
STEPS = 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, points: torch.Tensor) -> torch.Tensor:
        return points + self.down(torch.tanh(self.up(points)))


class Counting(Block):
    """A warm-up that a buffer counts, in place."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("runs", torch.zeros((), dtype=torch.long))

    def forward(self, points: torch.Tensor) -> torch.Tensor:
        self.runs += 1
        return super().forward(points) * min(1.0, 0.1 + 0.2 * self.runs.item())


class Averaging(Block):
    """A running mean that replaces its buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, points: torch.Tensor) -> torch.Tensor:
        self.mean = self.mean * 0.9 + points.detach().mean(0) * 0.1
        return super().forward(points - self.mean)


class Carrying(Block):
    """A state in a plain attribute, which the first batch makes and every other one replaces."""

    state: torch.Tensor | None = None

    def forward(self, points: torch.Tensor) -> torch.Tensor:
        if self.state is not None:
            points = points + self.state
        self.state = points.detach().mean(0)
        return super().forward(points)


class CarryingInPlace(Block):
    """The same in place."""

    def __init__(self) -> None:
        super().__init__()
        self.state = torch.zeros(WIDTH)

    def forward(self, points: torch.Tensor) -> torch.Tensor:
        self.state += points.detach().mean(0)
        return super().forward(points + self.state)


class CarryingWithGraph(Block):
    """A state that hangs on the graph of what made it, of which the next forward takes the values."""

    def __init__(self) -> None:
        super().__init__()
        self.state: torch.Tensor | None = None

    def forward(self, points: torch.Tensor) -> torch.Tensor:
        if self.state is not None:
            points = points + self.state.detach()
        self.state = torch.tanh(self.up(points)).mean()
        return super().forward(points)


class Numbering(Block):
    """A plain number."""

    runs = 0

    def __init__(self) -> None:
        super().__init__()
        self.runs = 0

    def forward(self, points: torch.Tensor) -> torch.Tensor:
        self.runs += 1
        return super().forward(points) / self.runs


class Spectral(Block):
    """The power iteration of a spectral norm."""

    def __init__(self) -> None:
        super().__init__()
        nn.utils.parametrizations.spectral_norm(self.up)


class Drawing(Block):
    """Noise of a generator of its own, in a list."""

    def __init__(self, draw: Callable[[Any], float], generator: Any) -> None:
        super().__init__()
        self.draw, self.generators = draw, [generator]

    def forward(self, points: torch.Tensor) -> torch.Tensor:
        return super().forward(points * self.draw(self.generators[0]))


class Seeded(Drawing):
    """Noise of the generators that Python and numpy have, and of the block's own of every kind."""

    def __init__(self) -> None:
        random.seed(0)
        np.random.seed(0)
        super().__init__(lambda own: random.random() * np.random.rand() * own.random(), random.Random(1))
        self.own = torch.Generator().manual_seed(2)
        self.bits = np.random.default_rng(3)

    def forward(self, points: torch.Tensor) -> torch.Tensor:
        return super().forward(points + torch.rand(points.shape, generator=self.own)) * self.bits.random()


class Large(Block):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("history", torch.zeros(2**15))

    def forward(self, points: torch.Tensor) -> torch.Tensor:
        self.history[0] += 1
        return super().forward(points)


class LargeAttribute(Block):
    def __init__(self) -> None:
        super().__init__()
        self.history = torch.zeros(2**15)

    def forward(self, points: torch.Tensor) -> torch.Tensor:
        self.history[0] += 1
        return super().forward(points)


class Showing(Block):
    """Leaves what it made last to whoever wants to look at it."""

    def forward(self, points: torch.Tensor) -> torch.Tensor:
        self.shown = torch.tanh(self.up(points))
        return points + self.down(self.shown)


class Sharing(nn.Module):
    """All blocks count in one buffer: each is to see what it saw the first time."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Counting() for _ in range(3)])
        for layer in self.layers[1:]:
            layer.runs = self.layers[0].runs

    def forward(self, points: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            points = layer(points)
        return points.square().mean()


class Stack(Sharing):
    def __init__(self, make: Callable[[], Block]) -> None:
        nn.Module.__init__(self)
        self.layers = nn.ModuleList([make() for _ in range(3)])


class Remembering(Block):
    """What a list, a set, a queue and counts hold that it shares with other blocks, and a dict within its own list."""

    def __init__(self, seen: list[int], kinds: set[int], queue: deque[int], counts: Counter[str]) -> None:
        super().__init__()
        self.seen, self.kinds, self.queue, self.counts, self.own = seen, kinds, queue, counts, [{"runs": 0}]

    def forward(self, points: torch.Tensor) -> torch.Tensor:
        self.counts["runs"] += 1
        self.own[0]["runs"] += 1
        self.seen.append(self.counts["runs"])
        self.kinds.add(self.seen[-1])
        self.queue.append(self.own[0]["runs"] + len(self.kinds))
        return super().forward(points) / (len(self.seen) + sum(self.queue))


def remembering() -> nn.Module:
    shared: tuple[list[int], set[int], deque[int], Counter[str]] = [], set(), deque(maxlen=2), Counter()
    return Stack(lambda: Remembering(*shared))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "remembering": remembering,
    "counting": lambda: Stack(Counting),
    "averaging": lambda: Stack(Averaging),
    "carrying": lambda: Stack(Carrying),
    "carrying in place": lambda: Stack(CarryingInPlace),
    "carrying with a graph": lambda: Stack(CarryingWithGraph),
    "numbering": lambda: Stack(Numbering),
    "spectral norm": lambda: Stack(Spectral),
    "sharing": Sharing,
    "random of Python": lambda: Stack(lambda: Drawing(random.Random.random, random.Random(1))),
    "random of torch": lambda: Stack(
        lambda: Drawing(lambda own: torch.rand((), generator=own).item(), torch.Generator().manual_seed(1))
    ),
    "random of all": lambda: Stack(Seeded),
}


def build(name: str) -> nn.Module:
    torch.manual_seed(0)
    return MODELS[name]()


def batches() -> list[torch.Tensor]:
    return list(torch.randn(STEPS, 5, WIDTH, generator=torch.Generator().manual_seed(1)))


def plain(name: str) -> tuple[list[float], dict[str, torch.Tensor]]:
    model = build(name)
    optimizer = adamw([{"params": list(model.parameters())}])
    losses = []
    for batch in batches():
        loss = model(batch)
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses, model.state_dict()


def recomputed(name: str) -> tuple[list[float], dict[str, torch.Tensor]]:
    model = build(name)
    workload = trace(build(name), batches()[0], repeats=0)
    plan = Plan(workload_id=workload.identity, chunk_bytes=2000, n_persist=0, n_buffer=8, n_checkpoint=3)
    losses = []
    with carry_out(model, plan, workload, optimizer=adamw) as training:
        for batch in batches():
            loss = model(batch)
            loss.backward()
            losses.append(loss.item())
            training.step()
    return losses, model.state_dict()


def are_equal(name: str) -> bool:
    (losses, state), (expected_losses, expected) = recomputed(name), plain(name)
    return losses == expected_losses and all(torch.equal(state[key], expected[key]) for key in expected)


@pytest.mark.parametrize("name", MODELS)
def test_recomputed_blocks_equal_the_plain_loop(name: str) -> None:
    assert are_equal(name)


@pytest.mark.parametrize("name", MODELS)
def test_a_recomputation_that_goes_on_from_there_does_not(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The wrong variant: nothing is noted, so nothing is given back."""

    class Forgetful(BlockState):
        @contextmanager
        def noting(self) -> Iterator[None]:
            yield

    monkeypatch.setattr(walk_module, "BlockState", Forgetful)
    assert not are_equal(name)


def test_a_trace_leaves_generators_of_modules_where_they_were() -> None:
    model = build("random of all")
    layer = model.layers[1]
    before = layer.own.get_state(), layer.bits.bit_generator.state, layer.generators[0].getstate()
    trace(model, batches()[0], repeats=1)
    assert torch.equal(layer.own.get_state(), before[0])
    assert (layer.bits.bit_generator.state, layer.generators[0].getstate()) == before[1:]


def test_a_recomputation_leaves_nothing_in_attributes() -> None:
    """Its graph holds all that it saves up to there, inputs of blocks for one."""
    resident_bytes = [trace(Stack(make), batches()[0], repeats=0).resident_bytes for make in (Block, Showing)]
    assert resident_bytes[1] - resident_bytes[0] == 3 * 2 * batches()[0].nbytes


@pytest.mark.parametrize(("make", "what"), [(Large, "buffer"), (LargeAttribute, "attribute")])
def test_a_large_buffer_that_changes_is_refused(make: Callable[[], Block], what: str) -> None:
    model = Stack(make)
    workload = trace(model, batches()[0], repeats=0)
    plan = Plan(workload_id=workload.identity, chunk_bytes=2000, n_persist=0, n_buffer=8, n_checkpoint=3)
    with (
        carry_out(model, plan, workload) as training,
        pytest.raises(ScheduleError, match=rf"block layers\.0 changes its {what} history \(128 KiB\)"),
    ):
        training.model(batches()[0])
    kept = plan.model_copy(update={"n_checkpoint": 0})
    with carry_out(model, kept, workload) as training:
        training.model(batches()[0]).backward()
        training.step()
