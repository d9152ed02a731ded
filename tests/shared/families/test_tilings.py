"""Passes of a loop over tiles: which there are, and how those that are alike are counted without listing them."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protwin.shared.families.family import OutsideFamilyError
from protwin.shared.families.tilings import TiledLoop, TiledRun, _passes
from protwin.shared.observed.observation import Observation, Repeated
from protwin.shared.schema.workload import DType, Operation, OperationClass

Pass = tuple[list[Operation], list[int]]
"""Operations and the level behind each, relative to the level before the pass."""


def operation(flops: int, moved: int) -> Operation:
    return Operation(
        name="mm", operation_class=OperationClass.MATMUL, dtype=DType.BFLOAT16, flops=flops, bytes_moved=moved
    )


def runs() -> st.SearchStrategy[tuple[Pass, int]]:
    """A run of operations and how often it happens; sizes that make ties likely, and others."""
    sizes = st.sampled_from((0, 10, 10**6, 123_456_789_012))
    one = st.tuples(st.builds(operation, sizes, sizes), st.integers(-3, 3).map(lambda level: level * 1000))
    return st.tuples(
        st.lists(one, min_size=1, max_size=5).map(lambda ones: ([o for o, _ in ones], [level for _, level in ones])),
        st.sampled_from((1, 1, 2, 3, 24, 100)),
    )


def listed(made: list[tuple[Pass, int]], *, gradient: int, once: bool) -> Observation:
    """An observation with all passes listed, or each of those that are alike once."""
    found = Observation(0, gradient_bytes=gradient)
    repeated, level = [], 0
    for (operations, levels), count in made:
        net = levels[-1]
        begin = len(found.operations)
        for number in range(1 if once else count):
            found.operations += operations
            found.levels += [level + number * net + each for each in levels]
        if once and count > 1:
            repeated.append(Repeated(begin, len(found.operations), count, net))
        level += count * net
    found.end_bytes, found.repeated = level, tuple(repeated)
    found.adding_levels = [each - gradient for each in found.levels]
    return found


@given(st.lists(runs(), min_size=1, max_size=6), st.sampled_from((0, 500)))
def test_passes_that_are_alike_are_as_if_each_were_listed(made: list[tuple[Pass, int]], gradient: int) -> None:
    short, whole = (listed(made, gradient=gradient, once=once) for once in (True, False))
    assert short.counted() == whole.counted()
    assert short.curve() == whole.curve()
    assert short.adding_curve() == whole.adding_curve()


def test_a_pass_too_few_is_noticed() -> None:
    made = [(([operation(10, 10)], [1000]), 1), (([operation(10**6, 10), operation(10, 10**6)], [5000, 1000]), 9)]
    short, whole = (listed(made, gradient=0, once=once) for once in (True, False))
    assert (short.curve(), short.counted()) == (whole.curve(), whole.counted())
    (one,) = short.repeated
    fewer = replace(short, repeated=(replace(one, count=8),))
    assert fewer.counted() != whole.counted()
    assert fewer.curve() != whole.curve()
    flat = replace(short, repeated=(replace(one, net_bytes=0),))
    assert flat.curve() != whole.curve(), "levels of passes rise by what each leaves"


def lengths(num_tokens: int, num_tiles: int) -> list[int]:
    """Of tiles, by dealing tokens out one by one."""
    found = [0] * min(num_tiles, num_tokens)
    for token in range(num_tokens):
        found[token % len(found)] += 1
    return found


LOOP = TiledLoop(
    tokens=0,
    first=TiledRun(calls=(1,), steps=(0,), adding=(0,)),
    second=TiledRun(calls=(2,), steps=(0,), adding=(0,)),
    later=TiledRun(calls=(3,), steps=(0,), adding=(0,)),
)


def test_passes_have_the_tokens_of_tiles() -> None:
    rng = random.Random(4)
    for _ in range(500):
        num_tokens, num_tiles = rng.randint(4, 80), rng.randint(2, 90)
        dealt = lengths(num_tokens, num_tiles)
        if min(dealt) < 2:
            with pytest.raises(OutsideFamilyError, match=f"{num_tiles} tiles of {num_tokens} tokens"):
                list(_passes(LOOP, num_tokens, num_tiles))
            continue
        made = [(run.calls[0], at) for run, at, count in _passes(LOOP, num_tokens, num_tiles) for _ in range(count)]
        pairs = list(zip(dealt, [0, *dealt], strict=False))
        assert made == [(min(number, 3), at) for number, at in enumerate(pairs, 1)], (num_tokens, num_tiles)


def test_a_million_tiles_are_few_passes() -> None:
    assert len(list(_passes(LOOP, 2**40 + 2**19, 2**20))) <= 5
