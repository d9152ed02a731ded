"""MLPs of models: found, tried, refused with the reason."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from protwin.runtime import quantize, trace
from protwin.runtime.model.blocks import NamedBlock, find_blocks
from protwin.runtime.quantized.states import states_as_parameters
from protwin.runtime.tiles.mlp_modules import find_mlps, in_tiles, modules_of, names_of
from protwin.runtime.tiles.mlp_token_wise import why_not_token_wise
from protwin.shared.basics.errors import WorkloadError
from tests.runtime.families import families
from tests.runtime.models import llama, token_batches
from tests.runtime.tiles.tiled import HIDDEN, Gated, Noisy, Residual, Routed

FOUND = {"t5": "DenseReluDense", "mixtral": "mlp", "gemma2": "mlp", "qwen2": "mlp", "vit": "mlp"}


@pytest.mark.parametrize("family", FOUND)
def test_mlps_of_families_are_found_and_left_as_they_were(family: str) -> None:
    model = families()[family].build()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    blocks, random = find_blocks(model), torch.get_rng_state()
    mlps = find_mlps(blocks)
    assert all(len(paths) == 1 and paths[0].rpartition(".")[2] == FOUND[family] for paths in mlps)
    assert torch.equal(random, torch.get_rng_state())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    modules = modules_of(blocks, mlps)
    with in_tiles(modules, 4):
        assert all("forward" in module.__dict__ for module in modules.values())
    assert not any("forward" in module.__dict__ for module in modules.values())


def test_a_model_without_values_is_tried_with_others() -> None:
    with torch.device("meta"):
        model = llama()
    blocks = find_blocks(model)
    assert names_of(blocks, find_mlps(blocks)) == tuple(f"model.layers.{number}.mlp" for number in range(4))


class Centred(nn.Module):
    """What each token gives depends on all."""

    def __init__(self, mlp: nn.Module) -> None:
        super().__init__()
        self.mlp = mlp

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.mlp(x - x.mean(dim=-2, keepdim=True))
        return result


@pytest.mark.parametrize("kind", ["int8", "nf4"])
def test_packed_maps_are_tried_with_other_values_too(kind: str) -> None:
    """Scales that are no numbers stand for those of a model without weights, whose memory nobody has filled."""
    model = llama(num_layers=1)
    quantize(model, kind)
    with states_as_parameters(model):
        mlp = model.get_submodule("model.layers.0.mlp")
        scales = [value for name, value in mlp.named_parameters() if name.endswith(("weight_scale", "weight_absmax"))]
        assert len(scales) == 3
        for scale in scales:
            scale.fill_(float("nan"))
        forwards = [part.__dict__.get("forward") for part in mlp.modules()]
        assert why_not_token_wise(mlp, "mlp") is None
        assert "mixes tokens" in str(why_not_token_wise(Centred(mlp), "mlp"))
        assert [part.__dict__.get("forward") for part in mlp.modules()] == forwards


@pytest.mark.parametrize("family", ["bert", "bart"])
def test_a_block_that_calls_layers_one_by_one_has_none(family: str) -> None:
    with pytest.raises(WorkloadError, match="has no MLP in a module of its own"):
        find_mlps(find_blocks(families()[family].build()))


class OverTokens(nn.Module):
    """Weighs tokens by a softmax over all of them."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Gated()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x * x.mean(-1, keepdim=True).softmax(dim=1))


class Shifted(Gated):
    """Sees the token before each."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x + nn.functional.pad(x, (0, 0, 1, 0))[:, :-1])


class Capacity(nn.Module):
    """An expert that has room for so many tokens of all, by their order."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.expert = nn.Linear(HIDDEN, 2), Gated()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wanted = self.router(x).argmax(-1) == 0
        wanted = wanted | (torch.arange(x.shape[1]) < x.shape[1] // 2)
        has_room = wanted.cumsum(dim=1) <= 64
        return torch.where((wanted & has_room)[..., None], self.expert(x), x)


class Normalized(Gated):
    """Normalizes over the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.over_batch = nn.BatchNorm1d(HIDDEN)


class Counting(Gated):
    """Counts its tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.add_(x.shape[1])
        return super().forward(x)


class InPlace(Gated):
    """Writes to its input."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.mul_(2))


@pytest.mark.parametrize("kind", [Gated, Routed, Residual, Noisy])
def test_token_wise_modules_are_taken(kind: Callable[[], nn.Module]) -> None:
    assert why_not_token_wise(kind(), "mlp") is None


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (OverTokens, "mixes tokens"),
        (Shifted, "mixes tokens"),
        (Capacity, "mixes tokens"),
        (Normalized, r"mixes tokens: blocks\.0\.mlp\.over_batch"),
        (Counting, "changes its input or a buffer"),
        (InPlace, "changes its input or a buffer"),
    ],
)
def test_others_are_refused_with_the_reason(kind: Callable[[], nn.Module], reason: str) -> None:
    block = nn.Module()
    block.mlp = kind()
    with pytest.raises(WorkloadError, match=f"cannot run in tiles of tokens: it {reason}") as raised:
        find_mlps([NamedBlock("blocks.0", block)])
    assert "\n" not in str(raised.value)


def test_named_modules() -> None:
    blocks = find_blocks(llama(num_layers=2))
    assert find_mlps(blocks, "*.1.mlp") == ((), ("mlp",))
    assert find_mlps(blocks, ["*.mlp"]) == (("mlp",), ("mlp",))
    with pytest.raises(WorkloadError, match=r"no module of any block matches '\*\.moe'"):
        find_mlps(blocks, ["*.mlp", "*.moe"])


@pytest.mark.parametrize("mlp_tiles", [0, -1, 2**40, 25, True])
def test_numbers_of_tiles_out_of_range(mlp_tiles: int) -> None:
    with pytest.raises(WorkloadError, match="the batch has 24 tokens"):
        trace(llama(), token_batches(1)[0], repeats=0, mlp_tiles=mlp_tiles)
