"""Processes that many tests share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from tests.runtime.ranks.processes import Ranks

Pool = Callable[[int], Ranks]


@pytest.fixture(scope="session")
def _pool() -> Iterator[Pool]:
    """Processes by their number, started when a test first asks for so many, and anew after a test has killed them."""
    started: dict[int, Ranks] = {}
    with ExitStack() as ends:

        def of(num_ranks: int) -> Ranks:
            if num_ranks not in started or not started[num_ranks].are_alive:
                started[num_ranks] = ends.enter_context(Ranks(num_ranks))
            return started[num_ranks]

        yield of


@pytest.fixture
def two_ranks(_pool: Pool) -> Ranks:
    return _pool(2)


@pytest.fixture
def three_ranks(_pool: Pool) -> Ranks:
    return _pool(3)
