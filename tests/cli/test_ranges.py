"""Several numbers in one option."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from protwin.shared.basics.errors import ProtwinError
from protwin.shared.basics.units import parse_tokens
from protwin.shared.cli.ranges import parse_numbers
from tests.cli.conftest import Protwin


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


@pytest.mark.parametrize("seed", range(20))
def test_lengths_in_thousands_are_those_of_context_windows(seed: int) -> None:
    """1k is 1,024 tokens, as 128k of a model's card is 131,072; everything else is as without."""
    draw = random.Random(seed)
    low, steps = draw.randint(1, 64), draw.randint(0, 6)
    high = low * 2**steps
    k, m = draw.choice("kK"), draw.choice("mM")
    doubled = tuple(1024 * low * 2**step for step in range(steps + 1))
    assert parse_numbers(f"{low}{k}:{high}{k}", parse_tokens).values == doubled
    assert parse_numbers(f"{low * 1024}: {high} {k}", parse_tokens).values == doubled
    assert parse_numbers(f"{low}{k},{low}{m}", parse_tokens).values == (1024 * low, 1024 * 1024 * low)
    assert parse_numbers(f"{low}:{high}", parse_tokens) == parse_numbers(f"{low}:{high}")


@pytest.mark.parametrize("text", ["8kb", "k", "1.5k", "8 k k", "0x8", "8g", "-8k", "²k", "9" * 21])
def test_what_counts_no_tokens_is_refused(text: str) -> None:
    assert parse_tokens(text) is None
    with pytest.raises(ProtwinError, match="which is no whole number"):
        parse_numbers(text, parse_tokens)
    with pytest.raises(ProtwinError):
        parse_numbers("8k")


def test_every_command_takes_lengths_in_thousands(protwin_here: Protwin) -> None:
    said = ("--model", "gpt2", "--hardware", "rtx-4090", "--batch-size", "1")
    short, long = (protwin_here("search", *said, "--sequence-length", text) for text in ("1k", "1024"))
    assert (short.returncode, short.stdout) == (0, long.stdout)
    asked = ("--what-if", "sequence-length=1k", "--what-if", "sequence-length=1024")
    answered = protwin_here("search", *said, "--sequence-length", "512", *asked).stdout.splitlines()
    first, second = (line.split() for line in answered if line.startswith("sequence-length="))
    assert first[1:] == second[1:]
    refused = protwin_here("search", *said, "--sequence-length", "1kb")
    assert refused.returncode == 2
    assert "'--sequence-length': '1kb' is no whole number of tokens. Write one such as 2048, or 8k for" in (
        " ".join(refused.stderr.split())
    )
