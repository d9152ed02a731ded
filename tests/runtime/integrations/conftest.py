"""What all tests of this folder have."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from accelerate.state import AcceleratorState, GradientState, PartialState


@pytest.fixture(autouse=True)
def _fresh_accelerator() -> Iterator[None]:
    """Accelerate keeps its settings for the process."""
    yield
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()
