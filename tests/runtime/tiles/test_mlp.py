"""Modules that run in tiles, beside the same modules whole."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint

from protwin.runtime.tiles import mlp
from protwin.runtime.tiles.mlp import TiledModule
from protwin.shared.basics.errors import ScheduleError
from tests.runtime.tiles.tiled import HIDDEN, Gated, Noisy, Residual, Routed, made, results, tile, worst

TOLERANCE = 2e-6
"""Of float32: products over fewer tokens add in another order, over some hundred terms."""
KINDS: list[Callable[[], nn.Module]] = [Gated, Routed, Residual]


def inputs(shape: tuple[int, ...], *, needs_grad: bool, is_contiguous: bool = True, seed: int = 0) -> torch.Tensor:
    x = torch.randn(*shape, HIDDEN, generator=torch.Generator().manual_seed(seed))
    x = x if is_contiguous else x.transpose(0, -2).contiguous().transpose(0, -2)
    return x.requires_grad_(needs_grad)


@settings(max_examples=40, deadline=None)
@given(
    kind=st.sampled_from(KINDS),
    shape=st.sampled_from([(3, 5), (1, 7), (2, 1), (11,), (2, 3, 2)]),
    num_tiles=st.integers(1, 7) | st.just(99),
    needs_grad=st.booleans(),
    is_contiguous=st.booleans(),
    frozen=st.sampled_from(["", "gate", "up", "router", "."]),
    num_backwards=st.integers(1, 2),
)
def test_tiles_do_what_the_whole_does(
    kind: Callable[[], nn.Module],
    shape: tuple[int, ...],
    num_tiles: int,
    needs_grad: bool,
    is_contiguous: bool,
    frozen: str,
    num_backwards: int,
) -> None:
    found = []
    for number in (1, num_tiles):
        module = made(kind)
        for name, parameter in module.named_parameters():
            parameter.requires_grad_(not frozen or frozen not in f".{name}")
        if not needs_grad and not any(parameter.requires_grad for parameter in module.parameters()):
            return
        if number > 1:
            tile(module, number)
        x = inputs(shape, needs_grad=needs_grad, is_contiguous=is_contiguous)
        more = {"residual": inputs(shape, needs_grad=True, seed=1)} if kind is Residual else {}
        found.append(results(module, x, num_backwards=num_backwards, **more))
    assert worst(*found) <= TOLERANCE


class Shared(TiledModule):
    """Wrong: gradients are divided by the number of tiles."""

    def run(self, *args: Any, **kwargs: Any) -> Any:
        for parameter in self.module.parameters():
            parameter.register_hook(lambda gradient: gradient / self.num_tiles)
        return super().run(*args, **kwargs)


class FirstOfBatch(TiledModule):
    """Wrong: tiles are stretches of the second dim, written as if there were one sample."""

    def run(self, *args: Any, **kwargs: Any) -> Any:
        outputs = [self.forward(part, **kwargs) for part in args[0].chunk(self.num_tiles, dim=1)]
        return torch.cat([output.reshape(1, -1, HIDDEN) for output in outputs], dim=1).reshape(args[0].shape)


@pytest.mark.parametrize("wrong", [Shared, FirstOfBatch])
def test_wrong_tiles_are_seen(wrong: type[TiledModule]) -> None:
    whole, tiled = made(Gated), made(Gated)
    tile(tiled, 3, wrong)
    results_of = [results(module, inputs((3, 5), needs_grad=True)) for module in (whole, tiled)]
    assert worst(*results_of) > 1e-2


def counted(module: nn.Module) -> Counter[str]:
    """How often gradients of parameters pass, and become final."""
    counts: Counter[str] = Counter()
    for name, parameter in module.named_parameters():
        parameter.register_hook(lambda _, name=name: counts.update([f"{name} passes"]))
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: counts.update([f"{name} is final"]))
    return counts


def test_hooks_fire_once_per_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    module = made(Routed)
    counts = counted(module)
    tile(module, 4)
    results(module, inputs((3, 5), needs_grad=True))
    assert set(counts.values()) == {1}
    assert len(counts) == 2 * len(list(module.parameters()))
    # On the parameters themselves, every tile would fire them.
    counts.clear()
    monkeypatch.setattr(mlp.nn, "Parameter", lambda tensor, requires_grad: tensor)
    own = {parameter.data_ptr(): parameter for parameter in module.parameters()}
    monkeypatch.setattr(torch.Tensor, "detach", lambda tensor: own.get(tensor.data_ptr(), tensor.data))
    results(module, inputs((3, 5), needs_grad=True))
    assert max(counts.values()) > 1


def noisy_by_hand(x: torch.Tensor, num_tiles: int) -> dict[str, torch.Tensor | None]:
    """The tiles one after the other, with graphs that are kept."""
    module = made(Noisy)

    def run(whole: torch.Tensor) -> torch.Tensor:
        flat = whole.reshape(1, -1, HIDDEN)
        parts = [type(module).forward(module, part) for part in flat.tensor_split(num_tiles, dim=1)]
        return torch.cat(parts, dim=1).reshape(whole.shape)

    module.forward = run  # type: ignore[method-assign]
    torch.manual_seed(5)
    return results(module, x)


def test_dropout_is_recomputed_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = noisy_by_hand(inputs((3, 5), needs_grad=True), 4)

    def tiled() -> tuple[dict[str, torch.Tensor | None], torch.Tensor]:
        module = made(Noisy)
        tile(module, 4)
        torch.manual_seed(5)
        found = results(module, inputs((3, 5), needs_grad=True))
        return found, torch.rand(1)

    found, behind = tiled()
    assert worst(expected, found) <= TOLERANCE
    noisy_by_hand(inputs((3, 5), needs_grad=True), 4)
    assert torch.equal(torch.rand(1), behind)  # a recomputation draws nothing
    monkeypatch.setattr(mlp.torch, "set_rng_state", lambda state: None)
    assert worst(expected, tiled()[0]) > 1e-2


def test_autocast_is_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(num_tiles: int) -> dict[str, torch.Tensor | None]:
        module = made(Gated)
        if num_tiles > 1:
            tile(module, num_tiles)
        x = inputs((3, 5), needs_grad=True)
        weights = torch.randn(x.shape, generator=torch.Generator().manual_seed(2))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            output = module(x)
            # The same weights again, with a graph: a cast kept from tiles would have none.
            again = module.gate(x)
        ((output * weights).sum() + again.sum()).backward()
        found = {name: parameter.grad for name, parameter in module.named_parameters()}
        return {"output": output.detach(), **found, "x": x.grad}

    assert worst(run(1), run(4)) <= 2**-6  # a few roundings of bfloat16
    exact = {name: value for name, value in run(4).items() if name != "output"}
    monkeypatch.setattr(mlp._Run, "as_then", lambda run: torch.autocast("cpu", enabled=False))
    assert worst(exact, {name: value for name, value in run(4).items() if name != "output"}) > 1e-4


class Block(nn.Module):
    """A residual block, with a normalization behind its module or without."""

    def __init__(self, *, normalizes_output: bool) -> None:
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(HIDDEN), Gated()
        self.behind = nn.LayerNorm(HIDDEN) if normalizes_output else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.behind(self.mlp(self.norm(x)))


@pytest.mark.parametrize(("normalizes_output", "num_forwards"), [(False, 2), (True, 3)])
def test_within_a_checkpoint_tiles_run_again_once(normalizes_output: bool, num_forwards: int) -> None:
    found, num_calls = [], 0
    for num_tiles in (1, 4):
        torch.manual_seed(0)
        block = Block(normalizes_output=normalizes_output)
        own = block.mlp.forward

        def counting(x: torch.Tensor, own: Callable[..., torch.Tensor] = own) -> torch.Tensor:
            nonlocal num_calls
            num_calls += 1
            return own(x)

        num_calls = 0
        if num_tiles > 1:
            block.mlp.forward = TiledModule("mlp", block.mlp, counting, num_tiles).run  # type: ignore[method-assign]
        checkpointed = nn.Module()
        checkpointed.block = block
        checkpointed.forward = lambda x, block=block: checkpoint(block, x, use_reentrant=False)  # type: ignore[method-assign]
        found.append(results(checkpointed, inputs((3, 5), needs_grad=True)))
    assert worst(*found) <= TOLERANCE
    assert num_calls == 4 * num_forwards


def test_what_a_plan_cannot_carry_is_refused() -> None:
    module = made(Gated)
    tile(module, 2)
    x = inputs((3, 5), needs_grad=True)
    with pytest.raises(ScheduleError, match="create_graph"):
        torch.autograd.grad(module(x).sum(), x, create_graph=True)
    output = module(x)
    with torch.no_grad():
        module.up.weight.mul_(2)
    with pytest.raises(ScheduleError, match="changed between"):
        output.sum().backward()
    module.up.register_forward_hook(lambda *_: None)
    with pytest.raises(ScheduleError, match=r"mlp\.up has a hook"):
        module(x)


def test_tensors_without_a_place_for_tokens_are_refused() -> None:
    module = made(Residual)
    tile(module, 2)
    with pytest.raises(ScheduleError, match="which part of it belongs to which token"):
        module(inputs((3, 5), needs_grad=True), residual=torch.randn(4, HIDDEN))
    mean = nn.Module()
    mean.forward = lambda x: x.mean(dim=(0, 1))  # type: ignore[method-assign]
    tile(mean, 2)
    with pytest.raises(ScheduleError, match="they have no place"):
        mean(inputs((3, 5), needs_grad=True))
