"""Which cases every run of the tests has, and which are left to a proof."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest

from tests.proof_size import some_quick
from tests.quick_cases import CASES, mark_slow_cases


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


def test_every_test_of_which_few_cases_are_quick_exists() -> None:
    root = Path(__file__).parents[1]
    for name in CASES:
        path, _, function = name.partition("::")
        assert f"def {function}(" in (root / path).read_text(encoding="utf-8"), name


class Item:
    def __init__(self, nodeid: str, *marks: str) -> None:
        self.nodeid = nodeid
        self.marks = set(marks)

    def get_closest_marker(self, name: str) -> str | None:
        return name if name in self.marks else None

    def add_marker(self, mark: pytest.MarkDecorator) -> None:
        self.marks.add(mark.name)


def test_as_many_cases_as_the_table_says_stay_quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of seven, of which one is slow already, three stay; of one that the table has none of, none."""
    monkeypatch.setitem(CASES, "a.py::test_some", 3)
    monkeypatch.setitem(CASES, "a.py::test_none", 0)
    items = [Item(f"a.py::test_some[{case}]", *(["slow"] if case == 2 else [])) for case in range(7)]
    items += [Item("a.py::test_none"), Item("a.py::test_other"), Item("a.py::test_other[1]")]
    mark_slow_cases(items)  # type: ignore[arg-type]
    quick = [item.nodeid for item in items if "slow" not in item.marks]
    assert quick == [
        "a.py::test_some[0]",
        "a.py::test_some[4]",
        "a.py::test_some[5]",
        "a.py::test_other",
        "a.py::test_other[1]",
    ]
