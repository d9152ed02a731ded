"""Models in the styles that people write: each of them trains by drawn plans to the bits of the plain loop."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils import parametrizations, prune

from protwin.runtime import trace
from protwin.shared.basics.errors import WorkloadError
from tests.proof_size import some_quick
from tests.runtime.equality import random_plans, trained
from tests.runtime.models import Case, point_batches

WIDTH = 16
Pair = namedtuple("Pair", ["hidden", "extra"])


class Block(nn.Module):
    """A residual block; the styles differ in what they do with it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 40), nn.Linear(40, WIDTH)

    def body(self, hidden: torch.Tensor) -> torch.Tensor:
        """(..., WIDTH) in and out."""
        return hidden + self.down(functional.gelu(self.up(self.norm(hidden))))

    def forward(self, hidden: Any) -> Any:
        """As ``body``."""
        return self.body(hidden)


class Net(nn.Module):
    """Blocks of one class between two linear maps; ``take`` and ``give`` are how the hidden state travels."""

    def __init__(self, block: Callable[[], nn.Module], num_blocks: int = 3) -> None:
        super().__init__()
        self.entry, self.exit = nn.Linear(5, WIDTH), nn.Linear(WIDTH, 3)
        self.blocks = nn.ModuleList(block() for _ in range(num_blocks))

    def forward(self, points: torch.Tensor) -> torch.Tensor:
        """(batch, 5) to (batch, 3)."""
        kind = type(self.blocks[0])
        state = getattr(kind, "wrap", lambda hidden: hidden)(self.entry(points))
        for block in self.blocks:
            state = block(state)
        return self.exit(getattr(kind, "unwrap", lambda state: state)(state))


class OfDicts(Block):
    wrap = staticmethod(lambda hidden: {"hidden": hidden, "means": []})
    unwrap = staticmethod(lambda state: state["hidden"] + torch.stack(state["means"]).sum())

    def forward(self, hidden: Any) -> Any:
        return {"hidden": self.body(hidden["hidden"]), "means": [*hidden["means"], hidden["hidden"].mean()]}


class OfPairs(Block):
    wrap = staticmethod(lambda hidden: Pair(hidden, hidden.mean()))
    unwrap = staticmethod(lambda state: state.hidden + state.extra)

    def forward(self, hidden: Any) -> Any:
        return Pair(self.body(hidden.hidden), hidden.extra + hidden.hidden.std())


@dataclass
class State:
    """What blocks hand on, and change."""

    hidden: torch.Tensor
    before: torch.Tensor


class OfStates(Block):
    wrap = staticmethod(lambda hidden: State(hidden, 2 * hidden))
    unwrap = staticmethod(lambda state: state.hidden + state.before)

    def forward(self, hidden: Any) -> Any:
        before, hidden.hidden = hidden.hidden, self.body(hidden.hidden + hidden.before)
        hidden.before = before
        return hidden


class Running(Block):
    """A buffer that forward changes in place, and one that it replaces."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("count", torch.zeros((), dtype=torch.long))

    def forward(self, hidden: Any) -> Any:
        if self.training:
            with torch.no_grad():
                self.mean.mul_(0.9).add_(hidden.detach().mean(0), alpha=0.1)
            self.count = self.count + 1
        return self.body(hidden - self.mean)


class Squared(torch.autograd.Function):
    """Saves what it is given, and keeps a tensor aside."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(weight)
        ctx.hidden = hidden
        return hidden.square() @ weight.t()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        (weight,) = ctx.saved_tensors
        return 2 * ctx.hidden * (gradient @ weight), gradient.t() @ ctx.hidden.square()


class OfFunctions(Block):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / 10)

    def forward(self, hidden: Any) -> Any:
        return self.body(hidden) + Squared.apply(hidden, self.weight)


class Recurrent(Block):
    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.LSTM(WIDTH, WIDTH, batch_first=True)

    def forward(self, hidden: Any) -> Any:
        return self.body(hidden) + self.cell(hidden.unsqueeze(0))[0].squeeze(0)


class ByChance(Block):
    def forward(self, hidden: Any) -> Any:
        kept = (torch.rand(len(hidden), 1) > 0.3).float()
        return hidden + kept * (self.body(functional.dropout(hidden, 0.1, self.training)) - hidden)


class ReadsWeights(Block):
    def forward(self, hidden: Any) -> Any:
        standard = (self.up.weight - self.up.weight.mean(1, keepdim=True)) / self.up.weight.std(1, keepdim=True)
        return self.body(hidden) + functional.linear(hidden, standard).mean() + self.down.weight.norm()


class Remembers(Block):
    """Its output stays on it, until the next forward."""

    def forward(self, hidden: Any) -> Any:
        self.latest = self.body(hidden)
        return self.latest


class Half(Block):
    """Narrow maps in a wide model."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = self.up.bfloat16(), self.down.bfloat16()

    def body(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + self.down(functional.gelu(self.up(self.norm(hidden).bfloat16()))).float()


class Spectral(nn.Module):
    """Weights that are no matrix: of three dims, of none, and empty."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2, WIDTH, WIDTH // 2) / 8)
        self.gain, self.nothing = nn.Parameter(torch.tensor(0.5)), nn.Parameter(torch.zeros(0))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + self.gain * torch.einsum("bd,hde->bhe", hidden, self.weight).flatten(1)


def changed(change: Callable[[Any], Any]) -> Callable[[], nn.Module]:
    """A net whose blocks ``change`` has been done to."""

    def build() -> nn.Module:
        model = Net(Block)
        for block in model.blocks:
            change(block)
        return model

    return build


def shared() -> nn.Module:
    model: Any = Net(Block, 4)
    model.blocks[2].up.weight = model.blocks[0].up.weight
    model.blocks[3] = model.blocks[1]
    return model


def transposed() -> nn.Module:
    model: Any = Net(Block)
    model.blocks[1].up.weight = nn.Parameter(torch.randn(WIDTH, 40).t())
    flat = torch.randn(2 * WIDTH)
    model.blocks[0].down.bias, model.blocks[2].down.bias = nn.Parameter(flat[:WIDTH]), nn.Parameter(flat[WIDTH:])
    return model


def hooked(block: Any) -> None:
    block.up.register_forward_hook(lambda module, given, output: 1.1 * output)
    block.down.weight.register_hook(lambda gradient: gradient.clamp(-0.1, 0.1))


STYLES: dict[str, Callable[[], nn.Module]] = {
    **{kind.__name__: partial(Net, kind) for kind in (OfDicts, OfPairs, OfStates, Running, OfFunctions, Recurrent)},
    **{kind.__name__: partial(Net, kind) for kind in (ByChance, ReadsWeights, Remembers, Half, Spectral)},
    "weight_norm": changed(lambda block: parametrizations.weight_norm(block.up)),
    "spectral_norm": changed(lambda block: parametrizations.spectral_norm(block.up)),
    "orthogonal": changed(lambda block: parametrizations.orthogonal(block.down)),
    "pruned": changed(lambda block: prune.l1_unstructured(block.up, "weight", 0.3)),
    "hooked": changed(hooked),
    "shared": shared,
    "transposed": transposed,
}


def built(style: str) -> nn.Module:
    torch.manual_seed(0)
    return STYLES[style]()


@some_quick(("style", "seed"), product(STYLES, range(3)), quick=4)
def test_a_style_trains_to_the_bits_of_the_plain_loop(style: str, seed: int) -> None:
    case = Case(partial(built, style), point_batches(), has_loss=False)
    for plan in random_plans(case.workload, 2, seed=1000 * seed + list(STYLES).index(style)):
        expected = case.plain_with(plan.micro_batches, plan.max_gradient_norm)
        outcome = trained(case, plan)
        assert outcome.losses == expected.losses, plan
        assert not outcome.different, plan
        assert outcome.peak_bytes <= outcome.guaranteed_bytes, plan


class Turned(nn.Module):
    """A filter over frequencies, as a complex parameter or as the real one that a trace says to make of it."""

    def __init__(self, *, is_real: bool) -> None:
        super().__init__()
        self.inner, weight = nn.Linear(WIDTH, WIDTH), torch.randn(WIDTH // 2 + 1, dtype=torch.complex64)
        self.filter = nn.Parameter(torch.view_as_real(weight).clone() if is_real else weight)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        weight = self.filter if self.filter.is_complex() else torch.view_as_complex(self.filter)
        return hidden + self.inner(torch.fft.irfft(torch.fft.rfft(hidden) * weight, n=WIDTH))


def filters(*, is_real: bool) -> nn.Module:
    torch.manual_seed(0)
    return Net(partial(Turned, is_real=is_real))


def test_a_complex_parameter_is_refused_by_name_and_with_what_does_the_same() -> None:
    complex_one, case = filters(is_real=False), Case(partial(filters, is_real=True), point_batches(), has_loss=False)
    points = case.batches[0]["points"]
    with pytest.raises(WorkloadError, match=r"^parameter blocks\.0\.filter is of torch\.complex64; .*view_as_real"):
        trace(complex_one, points, loss=lambda output, _: output.sum())
    assert torch.equal(complex_one(points), case.build()(points))
    (plan,) = random_plans(case.workload, 1, seed=3)
    assert not trained(case, plan).different
    # Stepped as the complex one is: torch steps the real view of it.
    stepped = []
    for model in (complex_one, case.build()):
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        model(points).square().mean().backward()
        optimizer.step()
        stepped.append(model(points))
    torch.testing.assert_close(*stepped)
