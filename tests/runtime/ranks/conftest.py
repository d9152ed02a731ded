"""Processes that many tests share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.runtime.ranks.processes import Pool, Ranks


@pytest.fixture(scope="session")
def _pool() -> Iterator[Pool]:
    with Pool() as pool:
        yield pool


@pytest.fixture
def two_ranks(_pool: Pool) -> Ranks:
    return _pool.of(2)


@pytest.fixture
def three_ranks(_pool: Pool) -> Ranks:
    return _pool.of(3)
