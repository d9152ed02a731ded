"""Whole matrices reach their owners and come back, whatever parts ranks have: the bits of one rank's projections."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from protwin.runtime.osft.exchange import Exchange, Send
from protwin.runtime.osft.projection import project_, projected
from protwin.shared.layout.layout import layout_of
from protwin.shared.layout.owners import Ownership, SentMatrix
from protwin.shared.schema.optimizer import Optimizer
from protwin.shared.schema.workload import Workload
from tests.proof_size import examples
from tests.strategies.subspaces import projected_workloads


class Post:
    """Ranks in threads: each waits for what all others have for it."""

    def __init__(self, num_ranks: int) -> None:
        self._boxes: dict[tuple[int, int], torch.Tensor] = {}
        self._meeting = threading.Barrier(num_ranks, timeout=20)
        self._num_ranks = num_ranks

    def of(self, rank: int) -> Send:
        def send(received: torch.Tensor, sent: torch.Tensor, gets: Sequence[int], gives: Sequence[int]) -> None:
            for other, piece in enumerate(sent.split(list(gives))):
                self._boxes[rank, other] = piece.clone()
            self._meeting.wait()
            pieces = [self._boxes[other, rank] for other in range(self._num_ranks)]
            assert [piece.numel() for piece in pieces] == list(gets)
            received.copy_(torch.cat(pieces))
            self._meeting.wait()

        return send

    def run(self, work: Callable[[int], None]) -> None:
        failures: list[BaseException] = []

        def safely(rank: int) -> None:
            try:
                work(rank)
            except BaseException as error:
                failures.append(error)
                self._meeting.abort()

        threads = [threading.Thread(target=safely, args=(rank,)) for rank in range(self._num_ranks)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if failures:
            raise failures[0]


Matrices = dict[int, torch.Tensor]
"""By parameter."""


def matrices(workload: Workload, seed: int) -> Matrices:
    generator = torch.Generator().manual_seed(seed)
    return {
        index: torch.randn(of.shape, generator=generator, dtype=torch.float32).to(getattr(torch, of.dtype))
        for index, of in enumerate(workload.parameters)
    }


def exchanged(
    of: Ownership, frozen: Sequence[SentMatrix], gradients: Sequence[SentMatrix], given: Matrices
) -> Matrices:
    """The trained matrices as owners have projected them, put together from what ranks got back."""
    post, found = Post(of.num_shards), {one.index: given[one.index].clone().view(-1) for one in gradients}
    axes = {subspace.trained: (subspace.frozen, subspace.axis) for subspace in of.subspaces}

    def rank_work(rank: int) -> None:
        both = (*frozen, *gradients)
        exchange, back = Exchange(both, rank, of.num_shards), Exchange(gradients, rank, of.num_shards)
        whole = {place: torch.full((both[place].size_bytes,), 77, dtype=torch.uint8) for place in exchange.owned}
        own = [given[one.index].view(-1)[slice(*one.ends[rank : rank + 2])].clone() for one in both]
        passing = torch.empty(of.passing_bytes(both), dtype=torch.uint8)
        exchange.to_owners(own, whole.__getitem__, passing, post.of(rank))
        for place in back.owned:
            index = gradients[place].index
            value = whole[len(frozen) + place].view(given[index].dtype).view(given[index].shape)
            high, axis = axes[index]
            assert torch.equal(whole[place].view(given[high].dtype), given[high].view(-1))
            project_(value, given[high], axis)

        def take(place: int, stretch: torch.Tensor) -> None:
            one = gradients[place]
            found[one.index][slice(*one.ends[rank : rank + 2])] = stretch.clone().view(given[one.index].dtype)

        back.from_owners(lambda place: whole[len(frozen) + place], take, passing, post.of(rank))

    post.run(rank_work)
    return {index: value.view(given[index].shape) for index, value in found.items()}


def ownership(workload: Workload, chunk_bytes: int, num_shards: int) -> Ownership:
    chunks = layout_of(workload, chunk_bytes).chunks
    return Ownership(chunks, workload.parameters, num_shards, Optimizer.ADAMW)


@settings(max_examples=examples(300, 20), deadline=None)
@given(
    projected_workloads(max_blocks=2), st.sampled_from((1, 300, 2_000, 10**6)), st.integers(2, 5), st.integers(0, 99)
)
def test_parts_are_projected_as_the_whole(workload: Workload, chunk_bytes: int, num_shards: int, seed: int) -> None:
    """Whatever is cut where, with ranks that have nothing of a matrix; all at once, and one by one: the same bits."""
    of, given_values = ownership(workload, chunk_bytes, num_shards), matrices(workload, seed)
    together = exchanged(of, of.frozen, of.gradients, given_values)
    for place, subspace in enumerate(of.subspaces):
        expected = projected(given_values[subspace.trained], given_values[subspace.frozen], subspace.axis)
        assert torch.equal(together[subspace.trained], expected)
        if place < 3:
            alone = exchanged(of, of.frozen[place : place + 1], of.gradients[place : place + 1], given_values)
            assert torch.equal(alone[subspace.trained], expected)


def test_a_rank_without_a_gradient_sends_zeros() -> None:
    sent = SentMatrix(index=0, chunk=0, owner=1, item_bytes=4, ends=(0, 3, 6))  # type: ignore[arg-type]
    post, arrived = Post(2), torch.full((6,), torch.nan)

    def rank_work(rank: int) -> None:
        exchange = Exchange((sent,), rank, 2)
        own = None if rank == 0 else torch.ones(3)
        passing = torch.full((100,), 255, dtype=torch.uint8)
        exchange.to_owners([own], lambda _: arrived.view(torch.uint8), passing, post.of(rank))

    post.run(rank_work)
    assert arrived.tolist() == [0, 0, 0, 1, 1, 1]
