"""Polynomials of few terms through figures at given values of their variables, in exact arithmetic."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fractions import Fraction
from itertools import combinations
from math import lcm, prod
from typing import Any, Final

from ...shared.families.calls import FamilyCall
from ...shared.observed.observation import OperatorCall

MOST_TERMS: Final = 3
Values = tuple[int, ...]
"""Of the variables."""
Terms = tuple[tuple[int, Fraction], ...]
"""A polynomial: (monomial, coefficient) of each term."""


def kind_of(call: OperatorCall) -> tuple[Any, ...]:
    """What of a call is no number."""
    storages = tuple(storage for storage, _ in call.reads)
    counts = len(call.writes_bytes), len(call.shape)
    return call.name, call.operation_class, call.dtype, storages, *counts, call.is_changed


def fitted_call(made: Sequence[OperatorCall], number: Callable[[Sequence[int], str], int]) -> FamilyCall:
    """The call that all of ``made`` are, which are of one kind.

    ``number`` gives the index of the polynomial through figures, one for each of ``made``; its text is what they are.
    """
    name, operation_class, dtype, storages, num_writes, num_dims, is_changed = kind_of(made[0])
    return FamilyCall(
        name=name,
        operation_class=operation_class,
        dtype=dtype,
        flops=number([one.flops for one in made], f"FLOPs of {name}"),
        reads=tuple(
            (storage, number([one.reads[i][1] for one in made], f"bytes read by {name}"))
            for i, storage in enumerate(storages)
        ),
        writes=tuple(
            number([one.writes_bytes[i] for one in made], f"bytes written by {name}") for i in range(num_writes)
        ),
        shape=tuple(number([one.shape[i] for one in made], f"shape of {name}") for i in range(num_dims)),
        is_changed=is_changed,
    )


class Solver:
    """Polynomials of few terms through figures at given values of the variables."""

    def __init__(
        self, monomials: Sequence[tuple[int, ...]], values: Sequence[Values], most_terms: int = MOST_TERMS
    ) -> None:
        self._most_terms = most_terms
        self._rows = [[prod(v**e for v, e in zip(at, m, strict=True)) for m in monomials] for at in values]
        self._known: dict[tuple[int, ...], frozenset[Terms]] = {}
        self._bases: dict[int, dict[tuple[int, ...], tuple[list[int], list[list[Fraction]]]]] = {}
        self._num = len(monomials)

    def polynomials(self, figures: tuple[int, ...]) -> frozenset[Terms]:
        """Those of fewest terms that give ``figures``: the terms of each, as (monomial, coefficient)."""
        found = self._known.get(figures)
        if found is None:
            found = self._known[figures] = self._through(figures)
        return found

    def rest(self, figures: tuple[int, ...], row: Sequence[Fraction]) -> tuple[int, ...] | None:
        """``figures`` less those of a polynomial of the family's variables; None if that is none of whole numbers."""
        given = [sum((c * r for c, r in zip(row, powers, strict=False) if c), Fraction(0)) for powers in self._rows]
        if any(value.denominator > 1 for value in given):
            return None
        return tuple(figure - int(value) for figure, value in zip(figures, given, strict=True))

    def _through(self, figures: tuple[int, ...]) -> frozenset[Terms]:
        if not any(figures):
            return frozenset({()})
        for size in range(1, min(self._most_terms, len(self._rows) - 1) + 1):
            found = set()
            for chosen, (places, inverse) in self._inverses(size).items():
                given = [figures[place] for place in places]
                terms = [sum((a * b for a, b in zip(line, given, strict=True) if b), Fraction(0)) for line in inverse]
                if all(terms) and self._are_met(chosen, terms, figures):
                    found.add(tuple(zip(chosen, terms, strict=True)))
            if found:
                return frozenset(found)
        return frozenset()

    def _are_met(self, chosen: tuple[int, ...], terms: Sequence[Fraction], figures: tuple[int, ...]) -> bool:
        common = lcm(*(term.denominator for term in terms))
        whole = [int(term * common) for term in terms]
        return all(
            sum(c * row[i] for i, c in zip(chosen, whole, strict=True)) == figure * common
            for row, figure in zip(self._rows, figures, strict=True)
        )

    def _inverses(self, size: int) -> dict[tuple[int, ...], tuple[list[int], list[list[Fraction]]]]:
        """By ``size`` monomials of a polynomial: rows that determine their coefficients, and the inverse of these."""
        if size not in self._bases:
            self._bases[size] = {}
            for chosen in combinations(range(self._num), size):
                solved = _independent([[Fraction(row[i]) for i in chosen] for row in self._rows])
                if solved is not None:
                    self._bases[size][chosen] = solved
        return self._bases[size]


def _independent(rows: Sequence[Sequence[Fraction]]) -> tuple[list[int], list[list[Fraction]]] | None:
    """The first rows that are independent, as many as there are columns, and their inverse; None if they are fewer."""
    size = len(rows[0])
    places: list[int] = []
    # Rows in reduced form, each with the combination of the chosen rows that it is.
    reduced: list[tuple[int, list[Fraction]]] = []
    for place, row in enumerate(rows):
        line = [*row, *(Fraction(int(i == len(places))) for i in range(size))]
        for column, other in reduced:
            factor = line[column]
            if factor:
                line = [a - factor * b for a, b in zip(line, other, strict=True)]
        pivot = next((i for i in range(size) if line[i]), None)
        if pivot is None:
            continue
        head = line[pivot]
        line = [value / head for value in line]
        reduced = [(c, [a - o[pivot] * b for a, b in zip(o, line, strict=True)] if o[pivot] else o) for c, o in reduced]
        reduced.append((pivot, line))
        places.append(place)
        if len(places) == size:
            return places, [line[size:] for _, line in sorted(reduced, key=lambda one: one[0])]
    return None
