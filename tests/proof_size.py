"""How many examples a property is tried on: some in every run of the tests, all of them in ``make prove``."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Sequence
from itertools import islice
from typing import Any, Final, TypeVar

import pytest

T = TypeVar("T")

IS_PROOF: Final = os.environ.get("PROTWIN_PROOF") == "1"
"""Set by the section ``properties`` of ``make prove``."""


def examples(proof: int, quick: int) -> int:
    """``proof`` in ``make prove``, else ``quick``: enough to notice the wrong variants that the tests keep."""
    return proof if IS_PROOF else quick


def share(cases: Iterable[T], one_in: int) -> list[T]:
    """All ``cases`` in ``make prove``, else one in ``one_in``, evenly spaced."""
    return list(islice(cases, 0, None, 1 if IS_PROOF else one_in))


def some_quick(
    names: str | Sequence[str], cases: Iterable[Any], *, quick: int | Collection[Any], ids: Any = None
) -> pytest.MarkDecorator:
    """``pytest.mark.parametrize`` with ``quick`` of the cases, or just these, in every run; the others are slow.

    For cases that go the same way: none is lost, ``make prove`` and ``make test ARGS="-m slow"`` run the rest.  Of a
    number, each comes from another stretch, at another place in it: of two things that are combined the same one would
    come again and again.
    """
    found = list(cases)
    if isinstance(quick, int):
        assert 0 < quick < len(found), "nothing would be left to every run, or nothing to others"
        length = len(found) // quick
        kept = [found[place * len(found) // quick + (length - 1 - place) % length] for place in range(quick)]
    else:
        kept = list(quick)
        assert all(case in found for case in kept), "there is no such case"
    assert 0 < len(kept) < len(found), "nothing would be left to every run, or nothing to others"
    is_single = isinstance(names, str) and "," not in names
    parameters = [
        pytest.param(*((case,) if is_single else case), marks=() if case in kept else pytest.mark.slow)
        for case in found
    ]
    return pytest.mark.parametrize(names, parameters, ids=ids)
