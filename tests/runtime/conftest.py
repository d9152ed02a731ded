"""What every test of the runtime leaves behind: nothing that still runs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.runtime.watchdog import lanes_alive


@pytest.fixture(autouse=True)
def _no_lane_outlives_its_test() -> Iterator[None]:
    before = len(lanes_alive())
    yield
    assert len(lanes_alive()) <= before, "a training was left open"
