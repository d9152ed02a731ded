"""The longest published samples: what is bisected, and that tiles of families decide it."""

from __future__ import annotations

import pytest

from protwin.calibration.published import longest
from protwin.calibration.published.runs import LONGEST_ON_ONE_H100, PUBLISHED_RUNS, Quantity

BUDGET_BYTES = 70 * 2**30


@pytest.mark.slow
def test_the_longest_fits_and_the_next_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(longest, "_FEWEST", 384)
    monkeypatch.setattr(longest, "_MOST", 416)
    found = longest._longest(BUDGET_BYTES)
    assert 384 * 1024 <= found < 415 * 1024
    assert longest._fits(found, BUDGET_BYTES)
    assert not longest._fits(found + 1024, BUDGET_BYTES)


def test_without_tiles_it_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """The wrong variant: few tiles keep too much of the loss."""
    monkeypatch.setattr(longest, "_TILES", 2)
    assert not longest._fits(384 * 1024, BUDGET_BYTES)


def test_the_run_has_one_figure_of_this_kind() -> None:
    (figure,) = (m for run in PUBLISHED_RUNS for m in run.measurements if m.quantity is Quantity.LONGEST)
    assert (figure.row, figure.case, figure.readings) == ("R7", LONGEST_ON_ONE_H100, (500_000.0,))
