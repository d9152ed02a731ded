"""All-to-alls among the ranks that share a sequence: from each rank's tokens to its heads, and back.

Source: DeepSpeed Ulysses, arXiv 2309.14509.

Legend: P ranks; B samples; S tokens of the whole sequence; H heads of a tensor; D features of a head.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final, Protocol

import torch
from torch._subclasses.fake_tensor import is_fake
from torch.utils._python_dispatch import _disable_current_modes

from ...shared.basics.errors import PlanError


class Peers(Protocol):
    """The ranks that share a sequence, as one of them sees them."""

    @property
    def rank(self) -> int:
        """Of this process among them: its place in the sequence."""
        ...

    @property
    def num_ranks(self) -> int:
        """P."""
        ...

    def exchange(self, received: torch.Tensor, sent: torch.Tensor) -> None:
        """Row p of ``sent`` (P, n) goes to rank p; row p of ``received`` (P, n) comes from it.  Contiguous."""

    def add_up(self, value: torch.Tensor) -> None:
        """The sum over ranks takes the place of ``value``, of no axis."""

    def check_same(self, batch: Mapping[str, torch.Tensor | int]) -> None:
        """Raise ScheduleError, on all ranks alike, unless all have the same numbers of these names."""


class EmulatedPeers:
    """One rank alone that does what it would do among others; what they would send it has from itself.

    Shapes, memory and arithmetic are those of one of P ranks; values are not.  Whoever watches operations sees none: an
    exchange is no work of the device's.
    """

    rank = 0

    def __init__(self, num_ranks: int) -> None:
        self.num_ranks = num_ranks
        """P."""

    def exchange(self, received: torch.Tensor, sent: torch.Tensor) -> None:
        """As if all others had the same."""
        with _disable_current_modes():
            if not is_fake(sent):
                received.copy_(sent)

    def add_up(self, value: torch.Tensor) -> None:
        """As if all others had the same."""
        value.mul_(self.num_ranks)

    def check_same(self, batch: Mapping[str, torch.Tensor | int]) -> None:
        """As if all others had the same."""


_LISTENERS: Final[list[Callable[[int], None]]] = []
"""Not by thread: backward of a CUDA device has one of its own."""


@contextmanager
def exchanges_heard(listener: Callable[[int], None]) -> Iterator[None]:
    """Within the block, ``listener`` is told of every exchange: the bytes that this rank gives, its own part too."""
    _LISTENERS.append(listener)
    try:
        yield
    finally:
        _LISTENERS.remove(listener)


def check_heads(num_heads: int, num_key_heads: int, num_ranks: int, name: str) -> None:
    """Raise PlanError unless ``num_ranks`` can divide the heads of ``name``.

    They divide query heads.  They divide key-value heads too, or are a multiple of them: each of these is then
    replicated on as many ranks as have its queries.
    """
    allowed = allowed_ranks(num_heads, num_key_heads)
    if num_ranks not in allowed:
        raise PlanError(
            f"sequence_ranks: {num_ranks} ranks cannot divide the {num_heads} query heads and {num_key_heads} "
            f"key-value heads of {name}. Ranks divide query heads, and divide key-value heads or are a multiple of "
            f"them. Choose from {', '.join(map(str, allowed))}."
        )


def allowed_ranks(num_heads: int, num_key_heads: int) -> list[int]:
    """Numbers of ranks that can divide heads (``check_heads``), in order."""
    return [ranks for ranks in range(1, num_heads + 1) if _divide(num_heads, num_key_heads, ranks)]


def _divide(num_heads: int, num_key_heads: int, ranks: int) -> bool:
    return num_heads % ranks == 0 and (num_key_heads % ranks == 0 or ranks % num_key_heads == 0)


def to_heads(peers: Peers, tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """From (B, H, S/P, D) each to (B, H', S, D): all tokens of this rank's heads, in one all-to-all.

    H' is H / P, or 1 where P is a multiple of H.  Gradients of a head that several ranks have add up.
    """
    result: tuple[torch.Tensor, ...] = _ToHeads.apply(peers, *tensors)  # type: ignore[no-untyped-call]
    return result


def to_tokens(peers: Peers, tensor: torch.Tensor) -> torch.Tensor:
    """From (B, S, H / P, D) to (B, S/P, H, D): this rank's tokens of all heads."""
    result: torch.Tensor = _ToTokens.apply(peers, tensor)  # type: ignore[no-untyped-call]
    return result


def mean_of_ranks(peers: Peers, loss: torch.Tensor) -> torch.Tensor:
    """The mean over ranks of ``loss`` (), which gets its gradient as it comes: ranks' gradients are averaged anyway."""
    result: torch.Tensor = _Mean.apply(peers, loss)  # type: ignore[no-untyped-call]
    return result


class _ToHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, peers: Peers, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.peers = peers
        ctx.num_heads = [tensor.shape[1] for tensor in tensors]
        return tuple(_gather_tokens(peers, tensors))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        return (None, *_scatter_tokens(ctx.peers, gradients, ctx.num_heads))


class _ToTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, peers: Peers, tensor: torch.Tensor) -> torch.Tensor:
        ctx.peers = peers
        num_heads = tensor.shape[2] * peers.num_ranks
        (tokens,) = _scatter_tokens(peers, [tensor.transpose(1, 2)], [num_heads])
        return tokens.transpose(1, 2).contiguous()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        (heads,) = _gather_tokens(ctx.peers, [gradients[0].transpose(1, 2)])
        return None, heads.transpose(1, 2)


class _Mean(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, peers: Peers, loss: torch.Tensor) -> torch.Tensor:
        total = loss.detach().clone()
        peers.add_up(total)
        return total.div_(peers.num_ranks)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        return None, gradients[0]


def _gather_tokens(peers: Peers, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """(B, H, S/P, D) each to (B, H', S, D)."""
    ranks = peers.num_ranks
    parts = [_part(tensor, ranks) for tensor in tensors]
    sizes = [part.numel() for part in parts]
    sent = tensors[0].new_empty((ranks, sum(sizes)))
    for tensor, own, places in zip(tensors, parts, torch.split(sent, sizes, dim=1), strict=True):
        # Each group of ranks has the heads of one stretch: several of one rank, or one of several ranks.
        groups = min(ranks, tensor.shape[1])
        by_group = torch.unflatten(tensor, 1, (groups, -1)).transpose(0, 1)
        places.view(groups, ranks // groups, *own.shape).copy_(by_group.unsqueeze(1))
    received = _exchanged(peers, sent)
    del sent
    found = []
    for own, places in zip(parts, torch.split(received, sizes, dim=1), strict=True):
        batch, heads, tokens, features = own.shape
        whole = received.new_empty((batch, heads, ranks, tokens, features))
        whole.copy_(places.view(ranks, *own.shape).permute(1, 2, 0, 3, 4))
        found.append(whole.view(batch, heads, ranks * tokens, features))
    return found


def _scatter_tokens(peers: Peers, tensors: Sequence[torch.Tensor], num_heads: Sequence[int]) -> list[torch.Tensor]:
    """(B, H', S, D) each to (B, H, S/P, D), whose numbers of heads H are ``num_heads``; replicas add up."""
    ranks = peers.num_ranks
    shapes = [(t.shape[0], t.shape[1], t.shape[2] // ranks, t.shape[3]) for t in tensors]
    sizes = [tensor.numel() // ranks for tensor in tensors]
    sent = tensors[0].new_empty((ranks, sum(sizes)))
    for tensor, shape, places in zip(tensors, shapes, torch.split(sent, sizes, dim=1), strict=True):
        places.view(ranks, *shape).copy_(torch.unflatten(tensor, 2, (ranks, -1)).permute(2, 0, 1, 3, 4))
    received = _exchanged(peers, sent)
    del sent
    found = []
    for shape, total, places in zip(shapes, num_heads, torch.split(received, sizes, dim=1), strict=True):
        batch, heads, tokens, features = shape
        replicas = ranks * heads // total
        by_rank = places.view(ranks, *shape).permute(1, 0, 2, 3, 4)
        whole = received.new_empty((batch, total, tokens, features))
        if replicas == 1:
            whole.view(batch, ranks, heads, tokens, features).copy_(by_rank)
        else:
            torch.sum(by_rank.reshape(batch, total, replicas, tokens, features), dim=2, out=whole)
        found.append(whole)
    return found


def _part(tensor: torch.Tensor, ranks: int) -> torch.Tensor:
    """The part of (B, H, S/P, D) that goes to one rank, for its shape."""
    return tensor[:, : max(1, tensor.shape[1] // ranks)]


def _exchanged(peers: Peers, sent: torch.Tensor) -> torch.Tensor:
    received = torch.empty_like(sent)
    for listener in _LISTENERS:
        listener(sent.nbytes)
    peers.exchange(received, sent)
    return received
