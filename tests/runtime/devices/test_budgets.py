"""Budgets as Python code states them."""

from __future__ import annotations

import pytest

from protwin.runtime import CpuDevice
from protwin.shared.basics.errors import ProtwinError


def test_a_budget_may_be_text() -> None:
    assert CpuDevice("50MiB").budget_bytes == CpuDevice(50 * 2**20).budget_bytes == 50 * 2**20


@pytest.mark.parametrize("wrong", ["50 apples", "0MiB", "-1GiB", "99999EiB"])
def test_text_that_is_no_budget_says_what_to_write(wrong: str) -> None:
    with pytest.raises(ProtwinError, match=r"Write (one|a size) such as|known are"):
        CpuDevice(wrong)
