"""Which cases every run of the tests has, and which are left to a proof."""

from __future__ import annotations

from itertools import product

import pytest

from tests.proof_size import some_quick


def quick_of(mark: pytest.MarkDecorator) -> list[tuple[object, ...]]:
    return [one.values for one in mark.args[1] if not one.marks]


@pytest.mark.parametrize(("lanes", "modes", "quick"), [(4, 3, 4), (7, 3, 6), (3, 3, 3), (5, 2, 4)])
def test_of_two_things_that_are_combined_every_mode_comes(lanes: int, modes: int, quick: int) -> None:
    cases = [*product(range(lanes), range(modes))]
    mark = some_quick(("lane", "mode"), cases, quick=quick)
    assert [one.values for one in mark.args[1]] == cases, "none is lost"
    found = quick_of(mark)
    assert len(found) == quick
    assert {mode for _, mode in found} == set(range(modes))


def test_cases_may_be_named() -> None:
    assert quick_of(some_quick("name", ["a", "b", "c"], quick=["b"])) == [("b",)]
    assert quick_of(some_quick("parts", [("a",), ("a", "b")], quick=1)) == [(("a", "b"),)]


@pytest.mark.parametrize("quick", [0, 3, ["c"], []])
def test_a_choice_that_is_none_is_refused(quick: object) -> None:
    with pytest.raises(AssertionError):
        some_quick("name", ["a", "b"], quick=quick)  # type: ignore[arg-type]
