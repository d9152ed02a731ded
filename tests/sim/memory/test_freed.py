"""Which tensors go when a level falls: beside all subsets, and by hand."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protwin.sim.memory import freed
from protwin.sim.memory.freed import Freed, freed_by
from tests.proof_size import examples


@st.composite
def falls(draw: st.DrawFn) -> tuple[tuple[int, ...], int]:
    sizes = tuple(draw(st.lists(st.sampled_from((1, 2, 3, 5, 8, 16, 48, 64, 64, 128)), min_size=1, max_size=9)))
    if draw(st.booleans()):
        return sizes, sum(draw(st.permutations(sizes))[: draw(st.integers(1, len(sizes)))])
    return sizes, draw(st.integers(1, sum(sizes)))


def fewest(sizes: tuple[int, ...], size_bytes: int) -> int | None:
    """The oracle: of all subsets with that sum, how many the smallest has."""
    for number in range(1, len(sizes) + 1):
        if any(sum(chosen) == size_bytes for chosen in combinations(sizes, number)):
            return number
    return None


@settings(max_examples=examples(2000, 200))
@given(falls())
def test_the_fewest_tensors_go_and_the_latest_of_equal_ones(drawn: tuple[tuple[int, ...], int]) -> None:
    sizes, size_bytes = drawn
    places, cut = freed_by(sizes, size_bytes)
    gone_bytes = sum(sizes[place] for place in places)
    assert len(set(places)) == len(places)
    number = fewest(sizes, size_bytes)
    if number is not None and number <= 4:
        assert (gone_bytes, len(places), cut) == (size_bytes, number, None)
    if cut is None:
        assert gone_bytes == size_bytes
    else:
        assert cut not in places
        assert 0 < size_bytes - gone_bytes < sizes[cut]
    for place in places:
        later = [n for n in range(place + 1, len(sizes)) if sizes[n] == sizes[place]]
        assert set(later) <= set(places)


def test_by_hand() -> None:
    # Two equal ones: the latest.  128 is one tensor, and not two of 64.
    assert freed_by((64, 64), 64) == Freed((1,), None)
    assert freed_by((128, 64, 64), 128) == Freed((0,), None)
    # Five of 3 are more than are looked for: the largest that fit go first, which leaves 1 of 16 to cut off a 3.
    assert freed_by((3, 3, 3, 3, 3, 100), 15) == Freed((4, 3, 2, 1, 0), None)
    assert freed_by((3, 3, 3, 3, 3, 100), 16) == Freed((4, 3, 2, 1, 0), 5)


def test_latest_first_alone_is_another_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    """The wrong variant: whatever came last goes, in parts if it must.  Cross-entropy's logits would cut its result."""
    logits, widened, result = 2, 4, 5
    assert set(freed_by((logits, widened, result), logits + widened).places) == {0, 1}
    monkeypatch.setattr(freed, "_exactly", lambda places, size_bytes: [])
    freed_by.cache_clear()
    assert freed_by((logits, widened, result), logits + widened) == Freed((2,), 0)
    freed_by.cache_clear()
