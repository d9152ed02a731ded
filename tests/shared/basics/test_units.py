"""Text to quantities and back."""

from __future__ import annotations

import math
import re
from collections.abc import Callable

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from protwin.shared.basics.errors import ProtwinError
from protwin.shared.basics.units import (
    as_bytes,
    counted,
    format_bytes,
    format_enough_bytes,
    format_number,
    format_rate,
    format_seconds,
    parse_bytes,
    parse_bytes_per_s,
    parse_seconds,
)

UNITS = {
    "B": 1,
    "kB": 1_000,
    "KB": 1_000,
    "MB": 1_000_000,
    "GB": 1_000_000_000,
    "TB": 1_000_000_000_000,
    "KiB": 1_024,
    "MiB": 1_048_576,
    "GiB": 1_073_741_824,
    "TiB": 1_099_511_627_776,
}
DURATIONS = {"s": 1, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "\N{GREEK SMALL LETTER MU}s": 1e-6, "ns": 1e-9}
SPACES = st.sampled_from(("", " ", "\t", "  "))


@given(st.integers(1, 2**62 - 1))
def test_whole_bytes_are_exact(size_bytes: int) -> None:
    assert parse_bytes(str(size_bytes)) == parse_bytes(size_bytes) == size_bytes
    assert parse_bytes(f"{size_bytes} B") == size_bytes


@given(st.integers(1, 999_999), st.integers(0, 999), st.sampled_from(sorted(UNITS)), SPACES, SPACES, SPACES)
def test_sizes_with_units(whole: int, thousandths: int, unit: str, before: str, between: str, after: str) -> None:
    size_bytes = parse_bytes(f"{before}{whole}.{thousandths:03d}{between}{unit}{after}")
    assert abs(size_bytes * 1_000 - (whole * 1_000 + thousandths) * UNITS[unit]) <= 500


@given(st.floats(1e-3, 1e9), st.sampled_from(sorted(UNITS)), SPACES)
def test_rates_with_units(value: float, unit: str, between: str) -> None:
    expected = pytest.approx(value * UNITS[unit], rel=1e-12)
    assert parse_bytes_per_s(f"{value!r}{between}{unit}/s") == expected
    assert parse_bytes_per_s(f"{value!r} {unit} / s") == expected
    assert parse_bytes_per_s(value) == pytest.approx(value)


@given(st.integers(0, 999_999), st.integers(-8, 3), st.sampled_from(sorted(DURATIONS)), SPACES)
def test_durations_with_units(number: int, power: int, unit: str, between: str) -> None:
    text = f"{number}e{power}{between}{unit}"
    assert parse_seconds(text) == pytest.approx(number * 10.0**power * DURATIONS[unit], rel=1e-12)
    # Rounded once: the same float as Python's literal.
    assert parse_seconds(f"{number}e{power}") == parse_seconds(f"{number}e{power + 6} us") == float(f"{number}e{power}")


@pytest.mark.parametrize("text", ["", "us", "5 min", "5US", "1 2s", "nan", "1e5us us", "5us/s"])
def test_what_is_no_duration_is_refused(text: str) -> None:
    with pytest.raises(ProtwinError, match=re.escape(repr(text))):
        parse_seconds(text)


@given(st.integers(1, 2**61))
@example(2**60 + 2**39)
def test_enough_is_enough_and_hardly_more(size_bytes: int) -> None:
    read_bytes = parse_bytes(format_enough_bytes(size_bytes))
    assert size_bytes <= read_bytes <= size_bytes * 1.001 + 1
    assert len(format_enough_bytes(size_bytes)) <= len("1023 B") + len(".0 KiB")


def test_figures_rounded_as_usual_may_be_too_little() -> None:
    """The wrong variant."""
    assert parse_bytes(format_bytes(998_162_205_696)) < 998_162_205_696 <= parse_bytes("929.7 GiB")
    assert format_enough_bytes(998_162_205_696) == "929.7 GiB"
    assert format_enough_bytes(8 * 2**30) == format_bytes(8 * 2**30) == "8 GiB"


def test_examples_of_the_documentation() -> None:
    assert parse_bytes("80GiB") == 85_899_345_920
    assert parse_bytes("1.5 GB") == 1_500_000_000
    assert parse_bytes("4096") == 4096
    assert parse_bytes("1e3kB") == 1_000_000
    assert parse_bytes("2.MiB") == 2_097_152
    assert parse_bytes_per_s("64 GB/s") == 64e9
    assert parse_bytes_per_s("25.2GB/s") == 25.2e9


@pytest.mark.parametrize(
    "text",
    [
        "",
        " ",
        "GiB",
        "-1GiB",
        "+1",
        "1,5GB",
        "1.5.2",
        "1 2",
        "0x10",
        "nan",
        "inf",
        "eighty",
        "80 gib",
        "80Gib",
        "80XB",
        "1GB/s",
        "1e",
        "٣",
        "0",
        "0.0GiB",
        "0.4",
        "1e-400",
        "4611686018427387904",
        "1e400",
        "1e999999999999",
        "5" * 5_000,
        0,
        -1,
        2**62,
        10**400,
        0.2,
        math.nan,
        math.inf,
        -math.inf,
        True,
    ],
    ids=lambda text: f"{text!s:.20}",
)
def test_what_is_no_size_is_refused(text: str | float) -> None:
    with pytest.raises(ProtwinError) as caught:
        parse_bytes(text)
    message = str(caught.value)
    assert len(message) < 200
    assert "\n" not in message


@pytest.mark.parametrize(
    "text", ["", "0 GB/s", "-3GB/s", "nan", "1e400GB/s", "GB/s", "3 GB/h", 0, -1.0, math.nan, math.inf, False, 10**400]
)
def test_what_is_no_rate_is_refused(text: str | float) -> None:
    with pytest.raises(ProtwinError):
        parse_bytes_per_s(text)


def test_what_is_far_too_large_is_not_nothing() -> None:
    """Where nothing at all is a size too."""
    assert parse_bytes(0, least_bytes=0) == 0
    for text in ("1e31", "1e400", "1e999999999999TiB"):
        with pytest.raises(ProtwinError, match="outside 0 B to 4 EiB"):
            parse_bytes(text, least_bytes=0)


def test_any_number_of_digits_is_read() -> None:
    assert parse_bytes("1." + "0" * 5_000 + "GiB") == parse_bytes("0" * 5_000 + "1GiB") == 2**30
    assert parse_bytes_per_s("25." + "2" * 5_000 + "GB/s") == pytest.approx(25.2222222222e9)


def test_unknown_units_are_named_with_the_known_ones() -> None:
    with pytest.raises(ProtwinError, match=r"'gb'.*GiB"):
        parse_bytes("3gb")


# -- formatting ------------------------------------------------------------------------------------------------------


@given(st.integers(1, 2**60))
def test_formatted_sizes_read_back_within_their_digits(size_bytes: int) -> None:
    assert parse_bytes(format_bytes(size_bytes)) == pytest.approx(size_bytes, rel=5.1e-4, abs=0.5)


@given(st.floats(1.0, 1e15))
def test_formatted_rates_read_back_within_their_digits(rate: float) -> None:
    assert parse_bytes_per_s(format_rate(rate)) == pytest.approx(rate, rel=5.1e-4)


@given(st.floats(1e-9, 1e7))
def test_formatted_seconds_read_back_within_their_digits(seconds: float) -> None:
    number, unit = format_seconds(seconds).split(" ")
    assert float(number) * {"s": 1, "ms": 1e-3, "µs": 1e-6}[unit] == pytest.approx(seconds, rel=5.1e-4)


@given(st.floats(-1e7, 1e7) | st.just(0.0))
def test_no_exponent_where_a_person_reads(value: float) -> None:
    assert "e+" not in format_seconds(value) + format_bytes(value) + format_rate(abs(value))


@given(st.integers(1, 2**49))
@example(2**10)
@example(2**20)
@example(2**30)
@example(2**40)
def test_the_unit_of_a_size_is_the_largest_that_it_fills(size_bytes: int) -> None:
    for text in (format_bytes(size_bytes), format_enough_bytes(size_bytes)):
        number, unit = text.split(" ")
        assert 1 <= float(number) <= 1024
        # A figure may be rounded up to 1024; what is not rounded has the next unit.
        assert unit == "TiB" or size_bytes < 1024 * UNITS[unit]


@given(st.floats(1e-6, 1e15))
@example(1e-3)
@example(1.0)
@example(1e3)
@example(1e6)
@example(1e9)
@example(1e12)
def test_the_unit_of_a_rate_and_of_a_time_leaves_one_to_three_digits(value: float) -> None:
    of_rate, of_time = format_rate(value).split(" "), format_seconds(value).split(" ")
    if value >= 1:
        assert float(of_rate[0]) >= 1
        assert value < 1000 * UNITS[of_rate[1].removesuffix("/s")] or of_rate[1] == "TB/s"
        assert of_time[1] == "s"
    else:
        assert of_rate[1] == "B/s"
        assert 1 <= float(of_time[0]) <= 1000
        assert of_time[1] == ("ms" if value >= 1e-3 else "µs")


@given(st.floats(-1e12, 1e12))
@example(999.94)
@example(999.96)
def test_numbers_keep_four_digits_or_are_whole_with_commas(value: float) -> None:
    text = format_number(value)
    if abs(value) >= 1000:
        assert text == f"{round(value):,}"
    else:
        assert float(text.replace(",", "")) == pytest.approx(value, rel=5.1e-4)
        assert "e+" not in text


def test_examples_of_formatting() -> None:
    assert format_bytes(0) == "0 B"
    assert format_bytes(1023) == "1023 B"
    assert format_bytes(1024) == "1 KiB"
    assert format_bytes(-1536) == "-1.5 KiB"
    assert format_bytes(3.1 * 2**30) == "3.1 GiB"
    assert format_bytes(2**60) == "1048576 TiB"
    assert format_seconds(0) == "0 s"
    assert format_seconds(0.0123) == "12.3 ms"
    assert format_seconds(-0.25) == "-250 ms"
    assert format_seconds(4.2e-6) == "4.2 µs"
    assert format_seconds(86_400) == "86400 s"
    assert format_rate(25.2e9) == "25.2 GB/s"
    assert format_rate(999_999) == "1000 kB/s"
    assert format_rate(12) == "12 B/s"


@pytest.mark.parametrize(
    ("read", "text", "meant"),
    [
        (parse_bytes, "10gib", "10GiB"),
        (parse_bytes, "1.5 Mb", "1.5MB"),
        (parse_bytes, "2e3tIB", "2e3TiB"),
        (parse_bytes_per_s, "64gb/s", "64GB/s"),
    ],
)
def test_a_unit_in_other_letters_is_asked_about(read: Callable[[str], float], text: str, meant: str) -> None:
    with pytest.raises(ProtwinError, match=f"Did you mean {re.escape(meant)}[?]"):
        read(text)
    assert read(meant) > 0


def test_a_unit_that_resembles_none_is_not() -> None:
    with pytest.raises(ProtwinError, match="unknown unit") as refused:
        parse_bytes("10parsecs")
    assert "Did you mean" not in str(refused.value)


def test_large_units_are_known() -> None:
    assert parse_bytes("5PB") == 5 * 10**15
    assert parse_bytes("3EiB") == 3 * 2**60


@pytest.mark.parametrize("text", ["99999EiB", "4EiB", "4096PiB"])
def test_sizes_that_are_too_large_say_so_in_their_own_unit(text: str) -> None:
    with pytest.raises(ProtwinError, match=f"size '{text}' is outside 1 B to 4 EiB"):
        parse_bytes(text)


@given(st.integers(1, 2**62 - 1))
def test_a_size_is_a_number_or_its_text(size_bytes: int) -> None:
    assert as_bytes(size_bytes) == as_bytes(f"{size_bytes} B") == as_bytes(str(size_bytes)) == size_bytes


@pytest.mark.parametrize(("number", "words"), [(0, "0 ranks"), (1, "1 rank"), (2, "2 ranks"), (1000, "1,000 ranks")])
def test_one_is_no_plural(number: int, words: str) -> None:
    assert counted(number, "rank") == words
