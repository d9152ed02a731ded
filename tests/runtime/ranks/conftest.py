"""Processes that many tests share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.runtime.ranks.processes import Pool, Ranks


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    with Pool() as pool:
        yield pool


@pytest.fixture
def two_ranks(pool: Pool) -> Ranks:
    return pool.of(2)


@pytest.fixture
def three_ranks(pool: Pool) -> Ranks:
    return pool.of(3)


@pytest.fixture
def four_ranks(pool: Pool) -> Ranks:
    return pool.of(4)


@pytest.fixture
def five_ranks(pool: Pool) -> Ranks:
    return pool.of(5)
