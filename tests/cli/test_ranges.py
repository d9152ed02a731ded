"""Several numbers in one option."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from protwin.shared.basics.errors import ProtwinError
from protwin.shared.cli.ranges import parse_numbers


@pytest.mark.parametrize(
    ("text", "numbers"),
    [
        ("2048:131072", (2048, 4096, 8192, 16384, 32768, 65536, 131072)),
        ("1:16", (1, 2, 4, 8, 16)),
        ("3:20", (3, 6, 12, 20)),
        ("5:5", (5,)),
        ("7", (7,)),
        ("1024:4096:1024", (1024, 2048, 3072, 4096)),
        ("1:6:2", (1, 3, 5)),
        ("4,1, 2,4", (1, 2, 4)),
        ("1:4,6,8:9", (1, 2, 4, 6, 8, 9)),
        ("1000000000", (10**9,)),
    ],
)
def test_numbers_are_read(text: str, numbers: tuple[int, ...]) -> None:
    assert parse_numbers(text).values == numbers


@pytest.mark.parametrize("seed", range(30))
def test_a_range_doubles_from_end_to_end(seed: int) -> None:
    draw = random.Random(seed)
    low = draw.randint(1, 5000)
    high = low + draw.choice([0, 1, draw.randint(0, 10**6)])
    found = parse_numbers(f"{low}:{high}").values
    assert (found[0], found[-1]) == (low, high)
    assert all(right == 2 * left for left, right in pairwise(found[:-1]))
    assert all(left < right <= 2 * left for left, right in pairwise(found))
    step = draw.randint(1, 2000)
    last = min(high, low + 999 * step)
    in_steps = parse_numbers(f"{low}:{last}:{step}").values
    assert in_steps == tuple(number for number in range(low, last + 1) if (number - low) % step == 0)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "nothing where a number should be"),
        (":", "nothing where a number should be"),
        ("1,,2", "nothing where a number should be"),
        ("1:", "nothing where a number should be"),
        ("0", "has 0, outside 1 to 1,000,000,000"),
        ("1:4:0", "has 0, outside"),
        ("1000000001", "outside 1 to 1,000,000,000"),
        ("4096:2048", r"runs from 4,096 down to 2,048. Write 2048:4096."),
        ("1:2:3:4", "has 4 ends"),
        ("-1", "'-1', which is no whole number"),
        ("1.5", "'1.5', which is no whole number"),
        ("1e3", "'1e3', which is no whole number"),
        ("²", "which is no whole number"),
        ("1:1001:1", "more than 1,000 numbers"),
        ("1:1000000000:1", "more than 1,000 numbers"),
        ("9" * 10**5, "which is no whole number"),
    ],
)
def test_what_is_no_range_is_refused(text: str, complaint: str) -> None:
    with pytest.raises(ProtwinError, match=complaint) as refused:
        parse_numbers(text)
    assert len(str(refused.value)) < 400
