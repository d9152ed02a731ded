"""Where numpy's own generator is: told without asking it while nobody draws."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from protwin.runtime.model.snapshot import GeneratorStates, put_back, random_states_kept

DRAWS: list[Callable[[], object]] = [
    lambda: None,
    np.random.rand,
    np.random.randn,
    lambda: np.random.randint(10),
    lambda: np.random.randn(3),
    lambda: np.random.seed(5),
    lambda: np.random.set_state(np.random.get_state()),
]


def where() -> tuple[object, ...]:
    kind, key, *rest = np.random.get_state()
    return kind, bytes(key), *rest


@given(st.lists(st.sampled_from(range(len(DRAWS))), max_size=8))
@settings(deadline=None)
def test_a_draw_is_noticed_and_drawn_again(numbers: list[int]) -> None:
    """Also of a second normal number, which is left over from the first and changes no word."""
    with random_states_kept():
        for number in numbers:
            before = where()
            states = GeneratorStates([])
            DRAWS[number]()
            after = where()
            changed = states.changed()
            assert bool(changed) == (after != before)
            with put_back(changed):
                assert where() == before
            assert where() == after
