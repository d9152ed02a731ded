"""A normalization of an MLP's output runs in the MLP's tiles, so that these run again once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from protwin.runtime.model.blocks import NamedBlock
from protwin.runtime.tiles import mlp_modules
from protwin.runtime.tiles.mlp_modules import in_tiles, modules_of
from protwin.shared.basics.errors import ScheduleError
from tests.runtime.tiles.tiled import HIDDEN, Gated, Result, Routed, results, worst

TOLERANCE = 2e-6
Between = Callable[[torch.Tensor], torch.Tensor]


class Block(nn.Module):
    """As in Gemma 2: what the MLP gives is normalized, and then added."""

    def __init__(self, mlp: type[nn.Module] = Gated, between: Between = lambda hidden: hidden) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.mlp, self.post_feedforward_layernorm = nn.LayerNorm(HIDDEN), mlp(), nn.LayerNorm(HIDDEN)
        self.between = between
        self.more: Any = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.mlp(self.norm(x))
        hidden = hidden[0] if isinstance(hidden, tuple) else hidden
        found = x + self.post_feedforward_layernorm(self.between(hidden))
        return found if self.more is None else found + self.more(hidden)


class Outer(nn.Module):
    def __init__(self, block: Block, is_checkpointed: bool) -> None:
        super().__init__()
        self.block, self.is_checkpointed = block, is_checkpointed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = checkpoint(self.block, x, use_reentrant=False) if self.is_checkpointed else self.block(x)
        return found


def ran(block: Block, num_tiles: int, *, is_checkpointed: bool) -> tuple[Result, Counter[str]]:
    """All gradients, and how often MLP and normalization ran, and gradients became final."""
    counts: Counter[str] = Counter()
    modules = modules_of((NamedBlock("block", block),), (("mlp",),))

    def counting(name: str, own: Callable[..., Any]) -> Callable[..., Any]:
        def forward(*args: Any) -> Any:
            # Of no tokens it is asked for the shape of what it gives.
            counts.update([name] if args[0].numel() else [])
            return own(*args)

        return forward

    for name in ("mlp", "post_feedforward_layernorm"):
        part = getattr(block, name)
        part.forward = counting(name, part.forward)
    for name, parameter in block.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: counts.update([f"{name} is final"]))
    x = torch.randn(3, 5, HIDDEN, generator=torch.Generator().manual_seed(1)).requires_grad_()
    with in_tiles(modules, num_tiles):
        found = results(Outer(block, is_checkpointed), x)
    return found, counts


@pytest.mark.parametrize(("is_checkpointed", "num_tiles"), [*product([True, False], [2, 4, 7, 99])])
def test_tiles_run_again_once(num_tiles: int, is_checkpointed: bool) -> None:
    wanted, _ = ran(Block(), 1, is_checkpointed=is_checkpointed)
    found, counts = ran(Block(), num_tiles, is_checkpointed=is_checkpointed)
    assert worst(wanted, found) <= TOLERANCE
    number = min(num_tiles, 15)
    assert counts["mlp"] == counts["post_feedforward_layernorm"] == 2 * number
    assert {count for name, count in counts.items() if name.endswith("final")} == {1}


def test_without_it_tiles_run_a_third_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mlp_modules, "follower_of", lambda *_: None)
    _, counts = ran(Block(), 4, is_checkpointed=True)
    assert counts["mlp"] == 3 * 4


@pytest.mark.parametrize("is_checkpointed", [True, False])
def test_others_that_want_the_output_get_it(is_checkpointed: bool) -> None:
    for between, more in (
        (torch.sin, None),
        (lambda hidden: hidden[:, :, :], None),
        (lambda hidden: hidden * 2.0, None),
        (lambda hidden: hidden + 0, torch.tanh),
    ):
        blocks = [Block(between=between) for _ in range(2)]
        for block in blocks:
            block.more = more
        (wanted, _), (found, _) = (
            ran(block, tiles, is_checkpointed=is_checkpointed) for block, tiles in zip(blocks, (1, 4), strict=True)
        )
        assert worst(wanted, found) <= TOLERANCE


def test_hooks_and_experts_have_no_stand_in() -> None:
    seen: list[torch.Tensor] = []
    block = Block()
    block.mlp.register_forward_hook(lambda *args: seen.append(args[-1]))
    found, _ = ran(block, 4, is_checkpointed=False)
    assert type(seen[0]) is torch.Tensor
    assert worst(ran(Block(), 1, is_checkpointed=False)[0], found) <= TOLERANCE
    pair = [ran(Block(Routed), tiles, is_checkpointed=False)[0] for tiles in (1, 3)]
    assert worst(*pair) <= TOLERANCE


class Pair(Gated):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        return super().forward(x), None


def test_an_mlp_that_gives_more_than_a_tensor_runs_alone() -> None:
    pair = [ran(Block(Pair), tiles, is_checkpointed=True)[0] for tiles in (1, 3)]
    assert worst(*pair) <= TOLERANCE


def test_what_is_looked_at_afterwards_is_refused() -> None:
    block, kept = Block(), []
    block.between = lambda hidden: kept.append(hidden) or hidden  # type: ignore[func-returns-value]
    ran(block, 4, is_checkpointed=False)
    with pytest.raises(ScheduleError, match=r"output of block\.mlp is looked at when its block has ended"):
        kept[0].sum()
