"""The demo says one thing of its noise, wherever it says it."""

from __future__ import annotations

import pytest

from protwin.calibration.demos.demo import run_noise_frac, with_noise
from protwin.shared.records.comparison import compare_records
from protwin.shared.report.report import Facts, report
from protwin.shared.tables.comparison import comparison_tables
from protwin.shared.tables.record import record_tables
from protwin.shared.tables.table import Table
from tests.shared.laid_out import laid_out


def test_noise_is_the_largest_distance_from_the_median() -> None:
    assert run_noise_frac([0.9, 1.0, 1.3]) == pytest.approx(0.3)
    assert run_noise_frac([1.0, 2.0]) == pytest.approx(0.5 / 1.5)
    assert run_noise_frac([0.7]) == 0


@pytest.mark.parametrize(("noise_frac", "said"), [(0.306, "± 30.6 %"), (0.0, None)])
def test_tables_page_and_comparison_say_the_same(noise_frac: float, said: str | None) -> None:
    """The larger of what the run and what other runs tell."""
    example = laid_out()
    measured = with_noise(example.measured, noise_frac)
    assert measured.iteration_noise_frac == max(noise_frac, example.measured.iteration_noise_frac)
    said = said or f"± {100 * example.measured.iteration_noise_frac:.1f} %"
    laid_over = compare_records(example.predicted, measured)
    assert laid_over.noise_frac == measured.iteration_noise_frac
    page = report("demo", Facts(predicted=example.predicted, measured=measured)).html
    titles = [part.title or "" for part in comparison_tables(laid_over) if isinstance(part, Table)]
    cells = [cell for part in record_tables(measured) if isinstance(part, Table) for row in part.rows for cell in row]
    assert any(said in title for title in titles)
    assert said in cells
    assert f"noise {said}" in page
