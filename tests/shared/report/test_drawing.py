"""The drawing rules of the report, one by one: ticks, labels, losses, colours."""

from __future__ import annotations

import math
import re
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protwin.shared.report.axes import Scale, Unit, ticks
from protwin.shared.report.bars import KIND_COLOURS
from protwin.shared.report.losses import LossTolerance, agreement
from protwin.shared.report.memory import CONTENT_COLOURS, Limit, memory_chart
from protwin.shared.report.page import Report
from protwin.shared.report.svg import STROKES, spread
from protwin.shared.schema.schedule import Content, Memory, TaskKind
from tests.shared.laid_out import LaidOut, laid_out
from tests.shared.report_pages import (
    CSS,
    LOSSES,
    full_report,
    parse,
)


@pytest.fixture(scope="module")
def example() -> LaidOut:
    return laid_out(8, noise_frac=0.2)


@given(low=st.floats(-1e6, 1e6), span=st.floats(1e-6, 1e6), at_most=st.integers(2, 15))
def test_ticks_are_round_evenly_spaced_and_few(low: float, span: float, at_most: int) -> None:
    found = ticks(low, low + span, Unit(1.0, ""), at_most=at_most)
    assert len(found) <= at_most + 1
    if len(found) > 1:
        step = found[1].value - found[0].value
        digits = step / 10 ** math.floor(math.log10(step * 1.000001))
        assert min(abs(digits - factor) for factor in (1, 2, 5)) < 1e-3
        for tick in found:
            assert low - 1e-6 * span <= tick.value <= low + span * (1 + 1e-6)
            assert float(tick.label.replace("−", "-").replace(",", "")) == pytest.approx(tick.value, abs=step * 1e-3)


@pytest.mark.parametrize(
    ("low", "high", "unit", "labels"),
    [
        (0.0, 0.012, Unit(1e-3, "ms"), ["0", "2", "4", "6", "8", "10", "12"]),
        (-0.5, 0.5, Unit(1.0, "s"), ["−0.4", "−0.2", "0.0", "0.2", "0.4"]),
        (0.0, 3 * 2**30, Unit(2.0**30, "GiB"), ["0.0", "0.5", "1.0", "1.5", "2.0", "2.5", "3.0"]),
        (1.0, 1.0, Unit(1.0, ""), ["1"]),
        (-2000.0, 9000.0, Unit(1.0, ""), ["−2,000", "0", "2,000", "4,000", "6,000", "8,000"]),
    ],
)
def test_ticks_by_example(low: float, high: float, unit: Unit, labels: list[str]) -> None:
    assert [tick.label for tick in ticks(low, high, unit, at_most=7)] == labels


@given(positions=st.lists(st.floats(0, 300), max_size=6))
def test_labels_do_not_overlap(positions: list[float]) -> None:
    placed = spread(positions, gap=16.0)
    assert all(after >= before for before, after in zip(positions, placed, strict=True))
    ordered = sorted(placed)
    assert all(b - a >= 16.0 - 1e-9 for a, b in pairwise(ordered))


def test_a_scale_runs_either_way_and_survives_a_point() -> None:
    assert Scale(0, 10, 100, 0)(2.5) == 75
    assert Scale(3, 3, 0, 50)(3) == 0


@pytest.mark.parametrize(
    ("other", "headline", "detail"),
    [
        (LOSSES, "identical", "bit for bit in all 30 steps"),
        ([*LOSSES[:29], LOSSES[29] + 0.25], "different", "from step 29 on, by at most 0.25"),
        ([math.nextafter(LOSSES[0], 0), *LOSSES[1:]], "different", "from step 0 on, by at most"),
        (LOSSES[:10], "different", "runs of 30, 10 steps"),
        ([math.nan] * 30, "different", "not finite"),
    ],
)
def test_losses_are_identical_only_bit_for_bit(other: list[float], headline: str, detail: str) -> None:
    found = agreement({"plain": LOSSES, "planned": other})
    assert found is not None
    assert found.headline == headline
    assert detail in found.detail


@pytest.mark.parametrize(
    ("other", "headline", "details"),
    [
        (LOSSES, "identical", ["bit for bit in all 30 steps"]),
        ([*LOSSES[:29], LOSSES[29] + 0.125], "equal within tolerance", ["step 29", "at most 0.125", "of 0.25, halves"]),
        ([LOSSES[0] - 0.25, *LOSSES[1:]], "equal within tolerance", ["step 0 on, by at most 0.25; the tolerance"]),
        ([LOSSES[0] + 0.375, *LOSSES[1:]], "different", ["by at most 0.375: more than the tolerance of 0.25, halves"]),
        (LOSSES[:10], "different", ["runs of 30, 10 steps"]),
        ([math.nan] * 30, "different", ["not finite"]),
    ],
)
def test_losses_within_a_tolerance_are_said_to_be_with_its_numbers(
    other: list[float], headline: str, details: list[str]
) -> None:
    found = agreement({"plain": _eighths(LOSSES), "planned": _eighths(other)}, LossTolerance(0.25, "halves"))
    assert found is not None
    assert found.headline == headline
    assert all(detail in found.detail for detail in details)


def _eighths(losses: list[float]) -> list[float]:
    """Numbers whose differences are exact."""
    return [x if math.isnan(x) else round(8 * x) / 8 for x in losses]


def test_the_page_says_within_which_tolerance_losses_are_equal(example: LaidOut) -> None:
    losses = {"plain": LOSSES, "planned": [loss * (1 + 1e-7) for loss in LOSSES]}
    assert "equal within tolerance" not in full_report(example, losses=losses).lower()
    page = full_report(example, losses=losses, loss_tolerance=LossTolerance(1e-5, "10 roundings")).lower()
    assert page.count("equal within tolerance") >= 2, "in its card and below its figure"
    assert "the tolerance of 1e-05, 10 roundings" in page


def test_a_loss_that_is_not_finite_breaks_the_line(example: LaidOut) -> None:
    broken = [*LOSSES[:10], math.nan, math.inf, *LOSSES[12:]]
    page = parse(full_report(example, losses={"plain": broken, "planned": broken}))
    for element in page.elements:
        for name, value in element.attributes.items():
            if name != "aria-label" and element.tag != "meta":
                assert not re.search(r"\b(nan|inf)\b", value or "")
    curves = [p for p in page.named("path") if "broad" in (p.attributes.get("class") or "")]
    assert [curve.attributes["d"].count("M") for curve in curves if curve.attributes["d"]] == [2]


def test_identical_losses_show_both_a_band_and_rings(example: LaidOut) -> None:
    page = parse(full_report(example))
    assert any("broad" in (p.attributes.get("class") or "") for p in page.named("path"))
    rings = [c for c in page.named("circle") if "ring stroke-orange" in (c.attributes.get("class") or "")]
    assert len(rings) >= len(LOSSES)


# -- colours ---------------------------------------------------------------------------------------------------------


def palettes() -> list[dict[str, str]]:
    """The colour variables in light, and in dark where they replace the light ones."""
    light, dark = (
        dict(re.findall(r"--([a-z-]+): (#[0-9a-f]{6});", part)) for part in CSS.split("prefers-color-scheme: dark")[:2]
    )
    assert light.keys() == dark.keys()
    return [light, dark]


def luminance(colour: str) -> float:
    """Relative luminance, WCAG 2.2."""
    parts = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: str, other: str) -> float:
    """Contrast ratio, WCAG 2.2."""
    darker, lighter = sorted((luminance(one), luminance(other)))
    return (lighter + 0.05) / (darker + 0.05)


@pytest.mark.parametrize("palette", palettes(), ids=["light", "dark"])
def test_words_and_marks_stand_out(palette: dict[str, str]) -> None:
    """WCAG 2.2: 4.5 for words, 3 for what a figure needs to be understood."""
    for ink in ("ink", "quiet", "limit"):
        for ground in ("page", "panel"):
            assert contrast(palette[ink], palette[ground]) >= 4.5
    for colour in {*KIND_COLOURS.values(), *CONTENT_COLOURS.values()}:
        assert contrast(palette[colour], palette["page"]) >= 3, colour
        assert contrast(palette[f"on-{colour}"], palette[colour]) >= 4.5, colour


def test_both_themes_define_every_colour_in_use() -> None:
    used = set(re.findall(r"var\(--([a-z-]+)\)", CSS))
    assert "blue" in used
    for palette in palettes():
        assert used <= palette.keys()
    assert not re.search(r"#[0-9a-f]{3,8}\b", re.sub(r"--[a-z-]+: #[0-9a-f]{6};", "", CSS).replace("#pattern-", ""))


def test_areas_stay_apart_without_colour() -> None:
    """Every area is filled with a pattern, and every pattern is another texture."""
    assert len(set(STROKES.values())) == len(STROKES)
    assert {*KIND_COLOURS.values(), *CONTENT_COLOURS.values()} < STROKES.keys()
    page = parse(Report("t", "", (), ()).html)
    (style,) = page.named("style")
    assert {e.attributes["id"] for e in page.named("pattern")} == {f"pattern-{colour}" for colour in STROKES}
    for colour in STROKES:
        assert f".fill-{colour} {{ fill: url(#pattern-{colour}); }}" in style.words


def test_every_kind_and_content_has_a_colour_of_its_own() -> None:
    assert len(set(KIND_COLOURS.values())) == len(TaskKind) == len(KIND_COLOURS)
    assert len(set(CONTENT_COLOURS.values())) == len(Content) + 1 == len(CONTENT_COLOURS)


@given(sizes=st.lists(st.floats(0.001, 100), min_size=1, max_size=3))
def test_names_of_limits_stay_below_the_buttons_of_the_page(sizes: list[float]) -> None:
    """Which stand right above the drawing; names make room upwards, two of them were on each other's place there."""
    predicted = laid_out(3).predicted
    peak_bytes = next(curve.peak_bytes for curve in predicted.memory if curve.memory is Memory.DEVICE)
    limits = [Limit(f"limit {index}", int(size * peak_bytes), "plain-line") for index, size in enumerate(sizes)]
    figure = memory_chart([predicted], (0.0, predicted.iteration_s), limits)
    assert figure is not None
    names = [element for element in parse(figure.drawing).named("text") if "limit " in element.words]
    assert len(names) == len(limits)
    middles = sorted(float(element.attributes["y"] or "nan") - 4 for element in names)
    assert middles[0] >= 6, "half of a line of 12 pixels"
    assert all(after - before >= 16 - 1e-6 for before, after in pairwise(middles))
