"""Slots: no choice of what makes room for what gathers fewer chunks, and the stays are what they say."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn

from protwin.shared.basics.errors import PlanError
from protwin.shared.layout.slots import Stay, assign_slots
from protwin.shared.schema.schedule import ChunkId
from tests.proof_size import examples

Needs = tuple[tuple[ChunkId, ...], ...]


@st.composite
def needs(draw: DrawFn) -> tuple[Needs, int]:
    """A forward over a few blocks followed by its backward, or any order of uses; and a number of slots."""
    one = st.lists(st.integers(0, 4).map(ChunkId), max_size=3, unique=True).map(tuple)
    steps = tuple(draw(st.lists(one, max_size=6)))
    if draw(st.booleans()):
        steps += steps[::-1]
    fewest = max(map(len, steps), default=0)
    return steps, fewest + draw(st.integers(0, 3))


def fewest_gathers(steps: Needs, n_buffer: int) -> int:
    """Brute force: at every step, try to keep every subset of what is there."""

    @cache
    def best(step: int, present: frozenset[ChunkId]) -> int:
        if step == len(steps):
            return 0
        needed = frozenset(steps[step])
        gathered = len(needed - present)
        spare = n_buffer - len(needed)
        optional = sorted(present - needed)
        return gathered + min(
            best(step + 1, needed | frozenset(kept))
            for size in range(min(spare, len(optional)) + 1)
            for kept in combinations(optional, size)
        )

    return best(0, frozenset())


def gathers(steps: Needs, n_buffer: int, victim: Callable[[dict[ChunkId, tuple[int, int]]], ChunkId]) -> int:
    """Gathers of a policy that picks its victim from (step of arrival, step of last use)."""
    present: dict[ChunkId, tuple[int, int]] = {}
    count = 0
    for step, needed in enumerate(steps):
        for chunk in needed:
            if chunk not in present:
                count += 1
                if len(present) == n_buffer:
                    del present[victim({c: times for c, times in present.items() if c not in needed})]
                present[chunk] = (step, step)
            present[chunk] = (present[chunk][0], step)
    return count


def first_in(present: dict[ChunkId, tuple[int, int]]) -> ChunkId:
    return min(present, key=lambda chunk: present[chunk][0])


def least_recently_used(present: dict[ChunkId, tuple[int, int]]) -> ChunkId:
    return min(present, key=lambda chunk: present[chunk][1])


@settings(max_examples=examples(300, 100))
@given(needs())
def test_no_choice_gathers_fewer(drawn: tuple[Needs, int]) -> None:
    steps, n_buffer = drawn
    found = len(assign_slots(steps, n_buffer))
    assert found == fewest_gathers(steps, n_buffer)
    assert found <= min(gathers(steps, n_buffer, first_in), gathers(steps, n_buffer, least_recently_used))


def test_the_oracle_tells_good_policies_from_bad() -> None:
    """The wrong variants: both throw out at the turn what backward needs first."""
    forward = tuple((ChunkId(chunk),) for chunk in range(5))
    steps = forward + forward[::-1]
    assert len(assign_slots(steps, 3)) == fewest_gathers(steps, 3) == 7
    loop = (*forward[:4], *forward[:4])
    assert fewest_gathers(loop, 3) == len(assign_slots(loop, 3)) == 5
    assert gathers(loop, 3, first_in) == gathers(loop, 3, least_recently_used) == 8


@settings(max_examples=examples(300, 100))
@given(needs())
def test_stays_are_what_they_say(drawn: tuple[Needs, int]) -> None:
    steps, n_buffer = drawn
    stays = assign_slots(steps, n_buffer)
    assert [stay.first_step for stay in stays] == sorted(stay.first_step for stay in stays)
    for step, needed in enumerate(steps):
        for chunk in needed:
            there = [s for s in stays if s.chunk == chunk and s.first_step <= step <= s.last_step]
            assert len(there) == 1, "every use finds the chunk once"
        assert sum(stay.first_step <= step <= stay.last_step for stay in stays) <= n_buffer
    for index, stay in enumerate(stays):
        assert stay.chunk in steps[stay.first_step]
        assert stay.chunk in steps[stay.last_step]
        assert 0 <= stay.slot < n_buffer
        assert_follows(stays, index)


def assert_follows(stays: Sequence[Stay], index: int) -> None:
    """``previous`` is the latest earlier stay in the slot, and that one has ended."""
    stay = stays[index]
    earlier = [other for other in range(index) if stays[other].slot == stay.slot]
    assert stay.previous == (earlier[-1] if earlier else None)
    if earlier:
        assert stays[earlier[-1]].last_step < stay.first_step


def test_a_step_that_needs_more_than_there_is() -> None:
    steps = [[ChunkId(0)], [ChunkId(1), ChunkId(2)], [ChunkId(0), ChunkId(1), ChunkId(2)], [ChunkId(3)]]
    with pytest.raises(PlanError, match=r"needs 3 gathered chunks at once but n_buffer is 1\. Raise n_buffer to 3,"):
        assign_slots(steps, 1)
    assert assign_slots([], 0) == assign_slots([[], []], 0) == []
