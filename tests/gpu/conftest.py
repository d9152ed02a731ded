"""What every test on a GPU runs under: algorithms that give the same bits each time, and an empty device."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from tests.runtime.watchdog import lanes_alive

# cuBLAS reads it when its first handle is made.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Torch says where it has no deterministic algorithm; the tests see to it that none of these matters."""
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.filterwarnings("ignore:.*determinis.*"))


@pytest.fixture(autouse=True)
def _same_bits_each_time() -> Iterator[None]:
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        torch.use_deterministic_algorithms(before)


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    yield
    assert lanes_alive() == [], "a training was left open"
    gc.collect()
    torch.cuda.empty_cache()
