"""Whatever of a model differs on other ranks is rank 0's afterwards, bit for bit, and what was tied is tied."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from protwin.runtime.ranks import placing
from protwin.runtime.ranks.placing import place_rank_0
from tests.runtime.ranks.processes import Ranks
from tests.runtime.ranks.test_agreement import world_of

PARTS = (
    "trained",
    "frozen",
    "tied",
    "transposed",
    "narrow",
    "scalar",
    "empty",
    "statistics",
    "count",
    "mask",
    "transient",
    "complex",
    "expanded",
    "strided",
)


class Odd(nn.Module):
    """Of everything that a model may hold."""

    def __init__(self) -> None:
        super().__init__()
        self.trained = nn.Parameter(torch.randn(5, 7))
        self.frozen = nn.Parameter(torch.randn(11), requires_grad=False)
        self.tied = nn.Parameter(torch.randn(3, 4))
        self.also_tied = self.tied
        self.transposed = nn.Parameter(torch.randn(6, 4).t())
        self.narrow = nn.Parameter(torch.randn(9).bfloat16())
        self.scalar = nn.Parameter(torch.randn(()))
        self.empty = nn.Parameter(torch.randn(0, 3))
        self.register_buffer("statistics", torch.randn(8).double())
        self.register_buffer("count", torch.randint(0, 1000, (1,)))
        self.register_buffer("mask", torch.rand(13) > 0.5)
        self.register_buffer("transient", torch.randn(2).half(), persistent=False)
        self.register_buffer("complex", torch.randn(3, dtype=torch.complex64))
        self.register_buffer("expanded", torch.randn(3, 1).expand(3, 5))
        self.register_buffer("strided", torch.randn(6, 6)[::2, 1:4])


def bits(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.detach().contiguous().view(-1).view(torch.uint8).tolist())


def place(rank: int, broken: str, piece_bytes: int) -> tuple[dict[str, bytes], dict[str, bytes]]:
    """The bits of every part, before and after."""
    torch.manual_seed(0)
    model = Odd()
    other = model.get_parameter(broken) if broken in dict(model.named_parameters()) else model.get_buffer(broken)
    if rank == 1:
        with torch.no_grad():
            data = other[:, :1] if broken == "expanded" else other
            data.copy_(~data if data.dtype is torch.bool else data + 1)
    identities = {name: id(part) for name, part in (*model.named_parameters(), *model.named_buffers())}
    strides = {name: getattr(model, name).stride() for name in PARTS}
    before = {name: bits(getattr(model, name)) for name in PARTS}
    placing._PIECE_BYTES = piece_bytes  # type: ignore[misc]
    with world_of(2) as world:
        place_rank_0(world, (*model.parameters(), *model.buffers()))
    assert {name: id(part) for name, part in (*model.named_parameters(), *model.named_buffers())} == identities
    assert {name: getattr(model, name).stride() for name in PARTS} == strides
    assert model.also_tied is model.tied
    assert not model.frozen.requires_grad
    return before, {name: bits(getattr(model, name)) for name in PARTS}


@pytest.mark.parametrize("broken", PARTS)
def test_what_differs_becomes_rank_0s(two_ranks: Ranks, broken: str) -> None:
    (first, first_after), (second, second_after) = two_ranks.run(place, broken, 2**24)
    differing = {name for name in PARTS if first[name] != second[name]}
    assert differing == ({broken} - {"empty"}), "nothing was broken"
    assert first_after == second_after == first


def test_a_tensor_may_be_sent_in_many_pieces(two_ranks: Ranks) -> None:
    """Of a size that divides none of them."""
    (first, first_after), (_, second_after) = two_ranks.run(place, "trained", 24)
    assert first_after == second_after == first
