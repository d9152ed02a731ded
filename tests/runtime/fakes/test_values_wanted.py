"""Models that ask for values: what only needs some is traced without, what decides by them is named.

Oracle: the same model with weights, run under the ledger.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import zip_longest

import pytest
import torch
from torch import nn

from protwin.runtime import trace
from protwin.shared import WorkloadError
from protwin.shared.schema.workload import Workload

WIDTH = 16


class Casting(nn.Linear):
    """Asks for a type that it has."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return super().forward(hidden) if self.to(torch.float32) is self else hidden


class Checked(nn.Linear):
    """As the losses of time series and reinforcement learning are computed."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        scale = nn.functional.softplus(super().forward(hidden))
        return -torch.distributions.Normal(hidden, scale).log_prob(hidden.detach())


class Deciding(nn.Linear):
    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = super().forward(hidden)
        return found if found.detach().mean() < 1e9 else -found


def averaged() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH, momentum=None))


def normed() -> nn.Module:
    return nn.utils.weight_norm(nn.Linear(WIDTH, WIDTH))


class Net(nn.Module):
    def __init__(self, make: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(make(), nn.GELU()) for _ in range(4))
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(hidden)  # type: ignore[no-any-return]


def square(output: torch.Tensor, _: object) -> torch.Tensor:
    return output.square().mean()


def traced(make: Callable[[], nn.Module], device: str) -> Workload:
    with torch.device(device):
        return trace(Net(make), torch.rand(8, WIDTH), loss=square, repeats=0)


@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
@pytest.mark.parametrize("make", [averaged, normed, lambda: Casting(WIDTH, WIDTH), lambda: Checked(WIDTH, WIDTH)])
def test_values_that_decide_nothing_are_not_needed(make: Callable[[], nn.Module]) -> None:
    """The count of a mean, what an iteration left, a type that stays, checks."""
    fake, real = traced(make, "meta"), traced(make, "cpu")
    assert fake.identity == real.identity
    for block in range(fake.num_blocks):
        found, wanted = (
            [(phase.peak_bytes, phase.net_bytes) for phase in of.profile_of(block).phases] for of in (fake, real)
        )
        assert found == wanted


def test_who_decides_by_values_is_named() -> None:
    named = r"Net decides in layers\.0\.0 \(Deciding\) what .* Trace it with weights"
    with pytest.raises(WorkloadError, match=named):
        traced(lambda: Deciding(WIDTH, WIDTH), "meta")
    assert traced(lambda: Deciding(WIDTH, WIDTH), "cpu").num_blocks == 4


class Interleaved(nn.Module):
    """Lists of which each runs in turn, as of an Informer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(Deciding(WIDTH, WIDTH), nn.Tanh()) for _ in range(3))
        self.between = nn.ModuleList(averaged() for _ in range(2))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for layer, between in zip_longest(self.layers, self.between):
            hidden = layer(hidden)
            hidden = hidden if between is None else between(hidden)
        return hidden


def test_a_real_iteration_tells_an_order_that_needs_values() -> None:
    """And leaves the model as it was found."""
    torch.manual_seed(0)
    model = Interleaved()
    model.get_parameter("layers.0.0.weight").grad = torch.ones(WIDTH, WIDTH)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    workload = trace(model, torch.rand(8, WIDTH), loss=square, repeats=0)
    order = ["layers.0", "between.0", "layers.1", "between.1", "layers.2"]
    assert [block.name for block in workload.blocks] == order
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    gradients = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    assert list(gradients) == ["layers.0.0.weight"]
    assert torch.equal(gradients["layers.0.0.weight"], torch.ones(WIDTH, WIDTH))
    assert not any(module._forward_hooks or module._backward_hooks for module in model.modules())
