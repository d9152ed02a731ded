"""Polynomials in the sizes of a model, from few traces of small models whose sizes are primes.

[Note: Sizes that are primes]
Nearly every figure is a product of sizes and a small number, or a sum of few such products.  Where all sizes are
different primes, the factors of a figure say of which sizes it is the product, and a second trace says which factor
was a number.  Sums are found by trying: of the products that occur, every two, three and four.  Five traces leave
one of them to prove what was found.  Figures that add up many others, such as all that a block leaves behind,
are compared with the sum of those others first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fractions import Fraction
from itertools import combinations, pairwise
from math import prod
from typing import Any, Final

import numpy as np

from ...shared.families.family import FamilyPiece
from ...shared.families.sized import Polynomial, coefficients_of
from ...shared.observed.assembly import TracedShape
from ...shared.schema.schedule import TaskKind
from .family_fit import NotPolynomialError, Sheet, first_difference, piece_of_sheet

_HIGHEST_POWER: Final = 3
_MOST_TERMS: Final = 4
_LARGEST_DENOMINATOR: Final = 64
_NEARLY: Final = 1e-9
"""Relative error of a candidate in floating point, which exact arithmetic then judges."""
_MAKERS: Final = (TaskKind.RECOMPUTE, TaskKind.FORWARD)
"""Whose backward frees what they leave behind."""
Values = tuple[int, ...]
_Parts = list[tuple[int, int]]
"""Places of figures, each with the sign that it is added with."""


def fit_sized_piece(
    traced: Mapping[Values, TracedShape], *, least: Values, most: tuple[int | None, ...]
) -> FamilyPiece:
    """The piece that gives every one of ``traced``, by the values of all variables.

    Raises NotPolynomialError if the models do other things, or if a figure is no sum of few products.
    """
    shapes = list(traced)
    sheets = [Sheet.of(seen) for seen in traced.values()]
    for shape, sheet in zip(shapes, sheets, strict=True):
        if sheet.structure != sheets[0].structure:
            raise NotPolynomialError(
                f"models do not do the same at {list(shapes[0])} and at {list(shape)}: "
                f"{first_difference(sheets[0].structure, sheet.structure)}."
            )
    rows = list(zip(*(sheet.numbers for sheet in sheets), strict=True))
    solver = _PrimeSolver(shapes, set(rows))
    parts = _sums(sheets[0])
    found: list[Polynomial] = []
    for place, row in enumerate(rows):
        polynomial = solver.polynomial(row)
        for earlier in parts.get(place, ()):
            if polynomial is None:
                polynomial = _with_parts(solver, rows, found, place, earlier)
        if polynomial is None:
            raise NotPolynomialError(
                f"the {sheets[0].labels[place]} is {list(row)} at {[list(shape) for shape in shapes]}, which no sum of "
                f"{_MOST_TERMS} products of sizes gives."
            )
        found.append(polynomial)
    distinct: dict[tuple[Any, ...], int] = {}
    numbers = [distinct.setdefault(tuple(sorted(polynomial.items())), len(distinct)) for polynomial in found]
    return piece_of_sheet(
        sheets[0],
        numbers,
        least=least,
        most=most,
        fitted_at=tuple(shapes),
        proven_at=(),
        **coefficients_of([dict(terms) for terms in distinct], len(least)),
    )


def _with_parts(
    solver: _PrimeSolver,
    rows: Sequence[tuple[int, ...]],
    found: Sequence[Polynomial],
    place: int,
    parts: _Parts,
) -> Polynomial | None:
    """The polynomial of a figure that is a sum of earlier ones (place, sign) and of something simple."""
    rest = tuple(value - sum(sign * rows[part][n] for part, sign in parts) for n, value in enumerate(rows[place]))
    simple = solver.polynomial(rest)
    if simple is None:
        return None
    total = dict(simple)
    for part, sign in parts:
        for exponents, coefficient in found[part].items():
            total[exponents] = total.get(exponents, Fraction(0)) + sign * coefficient
    return {exponents: coefficient for exponents, coefficient in total.items() if coefficient}


def _sums(sheet: Sheet) -> dict[int, list[_Parts]]:
    """By place of a figure, sets of earlier ones (place, sign) that it adds up, each but for something simple.

    A level rises by what is written; the last one is what is left behind; gradients are final one after the other; what
    forward or a recomputation leaves behind goes in backward.
    """
    found: dict[int, list[_Parts]] = {}
    left: dict[tuple[Any, ...], int] = {}
    _, *observations, _, _ = sheet.structure
    for (mode, kind, section), (made, steps, adding, (net, gradient, *_), _) in zip(
        observations[::2], observations[1::2], strict=True
    ):
        for call, step in zip(made, steps, strict=True):
            found[step] = [[(written, 1) for written in call[5]]]
        for before, after in pairwise(adding):
            found[after] = [[(before, 1)]]
        found[net] = [[(step, 1) for step in steps]]
        if adding:
            found[gradient] = [[(adding[-1], -1)]]
        if kind is TaskKind.BACKWARD:
            makers = [left[key] for key in ((mode, k, section) for k in _MAKERS) if key in left]
            # The gradient comes behind what is left in a sheet; it adds up what has become final.
            final = [(adding[-1], -1)] if adding else []
            found[net] += [[(maker, -1), *final] for maker in makers]
        left[mode, kind, section] = net
    return found


class _PrimeSolver:
    """Sums of few products through figures at values that are different primes, each found once."""

    def __init__(self, shapes: Sequence[Values], rows: set[tuple[int, ...]]) -> None:
        self._shapes = shapes
        self._known: dict[tuple[int, ...], Polynomial | None] = {}
        for row in rows:
            found = self._simple(row)
            if found is not None:
                self._known[row] = found
        products = {exponents for polynomial in self._known.values() if polynomial for exponents in polynomial}
        self._products = sorted(products | {(0,) * len(shapes[0])})
        self._values = [self._values_of(exponents) for exponents in self._products]
        self._sums: dict[int, tuple[Any, Any, Any, Any]] = {}

    def polynomial(self, row: tuple[int, ...]) -> Polynomial | None:
        """The only sum of fewest products that gives ``row``; None if there is none, or a second."""
        if row not in self._known:
            found = self._simple(row)
            self._known[row] = self._sum(row) if found is None else found
        return self._known[row]

    def _simple(self, row: tuple[int, ...]) -> Polynomial | None:
        """A product of sizes, or one with a factor more that is a size and a number added up."""
        if not any(row):
            return {}
        if not all(row):
            return None
        exponents = tuple(
            map(min, *(_powers(abs(value), shape) for value, shape in zip(row, self._shapes, strict=True)))
        )
        rest = [Fraction(value, whole) for value, whole in zip(row, self._values_of(exponents), strict=True)]
        if len(set(rest)) == 1:
            return {exponents: rest[0]}
        found = [
            {e: c for e, c in ((_raised(exponents, place), slope), (exponents, number)) if c}
            for place, values in enumerate(zip(*self._shapes, strict=True))
            if (line := _line_through(values, rest)) is not None
            for slope, number in (line,)
        ]
        return found[0] if len(found) == 1 else None

    def _values_of(self, exponents: tuple[int, ...]) -> list[int]:
        return [prod(v**e for v, e in zip(shape, exponents, strict=True)) for shape in self._shapes]

    def _sum(self, row: tuple[int, ...]) -> Polynomial | None:
        wanted = np.array(row, dtype=float)
        largest = float(np.abs(wanted).max())
        for size in range(2, _MOST_TERMS + 1):
            chosen, factors, scales, inverses = self._sums_of(size)
            terms = inverses @ wanted
            errors = np.abs(np.einsum("cts,cs->ct", factors, terms) - wanted).max(axis=1)
            found = [
                polynomial
                for place in np.nonzero(errors <= _NEARLY * largest)[0]
                if (polynomial := self._exact(row, chosen[place], terms[place] / scales[place])) is not None
            ]
            if found:
                return found[0] if len(found) == 1 else None
        return None

    def _sums_of(self, size: int) -> tuple[Any, Any, Any, Any]:
        if size not in self._sums:
            values = np.array(self._values, dtype=float)
            chosen = np.array(list(combinations(range(len(self._products)), size)))
            factors = values[chosen].transpose(0, 2, 1)
            scales = np.abs(factors).max(axis=1, keepdims=True)
            factors = factors / scales
            self._sums[size] = chosen, factors, scales[:, 0, :], np.linalg.pinv(factors)
        return self._sums[size]

    def _exact(self, row: tuple[int, ...], chosen: Any, terms: Any) -> Polynomial | None:
        coefficients = [Fraction(float(term)).limit_denominator(_LARGEST_DENOMINATOR) for term in terms]
        if not all(coefficients):
            return None
        whole = zip(*(self._values[product] for product in chosen), strict=True)
        is_met = all(
            sum((c * v for c, v in zip(coefficients, values, strict=True)), Fraction(0)) == figure
            for values, figure in zip(whole, row, strict=True)
        )
        return {self._products[p]: c for p, c in zip(chosen, coefficients, strict=True)} if is_met else None


def _raised(exponents: tuple[int, ...], place: int) -> tuple[int, ...]:
    """``exponents`` with one more of the variable at ``place``."""
    return tuple(exponent + (n == place) for n, exponent in enumerate(exponents))


def _line_through(values: Sequence[int], figures: Sequence[Fraction]) -> tuple[Fraction, Fraction] | None:
    """Slope and value at nought of the line through all ``figures``; None if there is none."""
    other = next((n for n, value in enumerate(values) if value != values[0]), None)
    if other is None:
        return None
    slope = (figures[other] - figures[0]) / (values[other] - values[0])
    number = figures[0] - slope * values[0]
    return (slope, number) if all(slope * v + number == f for v, f in zip(values, figures, strict=True)) else None


def _powers(value: int, primes: Values) -> tuple[int, ...]:
    """How often each prime divides a figure; a value of one is no prime, and never divides.

    Larger ones first: some are multiples of primes by eight, which two would divide.
    """
    found = [0] * len(primes)
    for place in sorted(range(len(primes)), key=lambda place: -primes[place]):
        prime = primes[place]
        while prime > 1 and found[place] < _HIGHEST_POWER and value % prime == 0:
            value //= prime
            found[place] += 1
    return tuple(found)
