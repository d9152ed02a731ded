"""Fitting what a family does in tiles to traces, in exact arithmetic ([Note: What is polynomial of tiles]).

Every figure is met at every pass of every trace by a polynomial of at most three terms, the only one of so few, or
there is no fit.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import combinations
from math import lcm, prod
from typing import Any, Final

from ...shared.basics.errors import WorkloadError
from ...shared.families.family import FamilyCall, FamilyPiece, FamilyPlace
from ...shared.families.tilings import TiledLoop, TiledPiece, TiledRun, TiledSection
from ...shared.observed.observation import Observation, OperatorCall
from ...shared.observed.observed_inputs import PhaseKey
from ...shared.schema.plan import ActivationMode

_MOST_TERMS: Final = 3
Values = tuple[int, ...]
"""Of the family's variables, then the tokens of the tile, and of the one before; 0 where there is none."""
Terms = tuple[tuple[int, Fraction], ...]
"""A polynomial: (monomial, coefficient) of each term."""
Seen = Mapping[ActivationMode, Mapping[PhaseKey, Observation]]


class TilesNotPolynomialError(WorkloadError):
    """Traces with tiles do not belong together."""


class TiledFit:
    """The sections of one piece, as they are fitted."""

    def __init__(self, piece: FamilyPiece) -> None:
        """``piece``: that of the family without tiles."""
        monomials = piece.monomials
        self._known = [[Fraction(c, piece.denominator) for c in row] for row in piece.polynomials]
        num = len(monomials[0])
        base = [(*exponents, 0, 0) for exponents in monomials]
        self._monomials = [*base, (*[0] * num, 1, 0), (*[0] * num, 0, 1)]
        self._num_base = len(base)
        self._solvers: dict[tuple[tuple[Values, ...], int], _Solver] = {}
        self._polynomials: dict[Terms, int] = {}
        self._calls: dict[FamilyCall, int] = {}
        self._sections: dict[TiledSection, int] = {}

    def places(self, traced: Sequence[tuple[Values, Seen]], wanted: Callable[[PhaseKey], bool]) -> list[FamilyPlace]:
        """The sections at wanted places, by what traces at shapes (the family's variables) have seen of them.

        Raises TilesNotPolynomialError, naming the place.
        """
        found = []
        for mode, sections in traced[0][1].items():
            for kind, section in filter(wanted, sections):
                key = (kind, section)
                if any(key not in seen[mode] for _, seen in traced):
                    raise TilesNotPolynomialError(f"not every trace has a {kind} of {section} in mode {mode}.")
                label = f"{kind} of {section} in mode {mode}"
                made = self._section([(values, seen[mode][key]) for values, seen in traced], label)
                index = self._sections.setdefault(made, len(self._sections))
                found.append(FamilyPlace(mode=mode, kind=kind, section=section, seen=index))
        return found

    def piece(self, **rest: Any) -> TiledPiece:
        """All that was fitted."""
        denominator = lcm(*(c.denominator for row in self._polynomials for _, c in row))
        return TiledPiece(
            monomials=tuple(self._monomials),
            denominator=denominator,
            polynomials=tuple(tuple((i, int(c * denominator)) for i, c in row) for row in self._polynomials),
            calls=tuple(self._calls),
            sections=tuple(self._sections),
            **rest,
        )

    def _section(self, traced: Sequence[tuple[Values, Observation]], label: str) -> TiledSection:
        cut = [_Cut.of(values, seen) for values, seen in traced]
        if len({len(one.loops) for one in cut}) != 1:
            raise TilesNotPolynomialError(f"the {label} has other loops over tiles in one trace than in another.")
        loops = tuple(self._loop([one.loops[place] for one in cut], label) for place in range(len(cut[0].loops)))
        runs = tuple(
            self._run([one.outside[place] for one in cut], label, num_extra=1 if place else 0)
            for place in range(len(loops) + 1)
        )
        ends = [one.outside[-1].values for one in cut]
        seen = [observation for _, observation in traced]

        def number(what: str, figures: Sequence[int]) -> int:
            return self._number(ends, figures, 1 if loops else 0, f"{what}, {label}")

        if len({len(one.saved_bytes) for one in seen}) != 1:
            raise TilesNotPolynomialError(f"the {label} saves other tensors in one trace than in another.")
        return TiledSection(
            runs=runs,
            loops=loops,
            net=number("net bytes", [one.net_bytes for one in seen]),
            gradient=number("gradient bytes", [one.gradient_bytes for one in seen]),
            output=number("output bytes", [one.output_bytes for one in seen]),
            saved=tuple(number("saved bytes", sizes) for sizes in zip(*(one.saved_bytes for one in seen), strict=True)),
        )

    def _loop(self, loops: Sequence[Sequence[_Run]], label: str) -> TiledLoop:
        """``loops``: of each trace, its passes."""
        if any(len(passes) < 2 for passes in loops):
            raise TilesNotPolynomialError(f"a loop over tiles has fewer than two passes in the {label}.")
        shapes = [(*passes[0].values[:-2], 0, 0) for passes in loops]
        totals = [sum(one.values[-2] for one in passes) for passes in loops]
        later = [one for passes in loops for one in passes[2:]]
        return TiledLoop(
            tokens=self._number(shapes, totals, 0, f"tokens, {label}"),
            first=self._run([passes[0] for passes in loops], label, num_extra=1),
            second=self._run([passes[1] for passes in loops], label, num_extra=2),
            later=self._run(later, label, num_extra=2),
        )

    def _run(self, runs: Sequence[_Run], label: str, *, num_extra: int) -> TiledRun:
        """What runs that have to be alike do; figures may depend on ``num_extra`` of the tile's two variables."""
        kinds = [_kind(call) for call in runs[0].calls]
        for one in runs:
            if [_kind(call) for call in one.calls] != kinds:
                raise TilesNotPolynomialError(
                    f"the {label} does not do the same at {list(runs[0].values)} and at {list(one.values)}."
                )
        values = [one.values for one in runs]

        def number(figures: Sequence[int], what: str) -> int:
            return self._number(values, figures, num_extra, f"{what}, {label}")

        calls, steps, adding = [], [], []
        for place, (name, operation_class, dtype, storages, num_writes, num_dims) in enumerate(kinds):
            made = [one.calls[place] for one in runs]
            call = FamilyCall(
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
            )
            calls.append(self._calls.setdefault(call, len(self._calls)))
            steps.append(number([one.steps[place] for one in runs], f"level after {name}"))
            adding.append(number([one.adding[place] for one in runs], f"adding level after {name}"))
        return TiledRun(calls=tuple(calls), steps=tuple(steps), adding=tuple(adding))

    def _number(self, values: Sequence[Values], figures: Sequence[int], num_extra: int, label: str) -> int:
        """Index of the polynomial that gives ``figures`` at ``values``."""
        by_values: dict[Values, int] = {}
        for at, figure in zip(values, figures, strict=True):
            if by_values.setdefault(at, figure) != figure:
                raise TilesNotPolynomialError(f"the {label} is {figure} and {by_values[at]} at {list(at)}.")
        used = tuple(at[: len(at) - 2 + num_extra] + (0,) * (2 - num_extra) for at in by_values)
        wanted: tuple[int, ...] = tuple(by_values.values())
        terms = self._terms(used, wanted, num_extra)
        if len(terms) != 1:
            raise TilesNotPolynomialError(
                f"the {label} is {list(wanted[:8])} at {[list(at) for at in used[:8]]}, which "
                f"{'more than one' if terms else 'no'} polynomial of {_MOST_TERMS} terms gives."
            )
        return self._polynomials.setdefault(next(iter(terms)), len(self._polynomials))

    def _terms(self, used: tuple[Values, ...], wanted: tuple[int, ...], num_extra: int) -> Collection[Terms]:
        """The polynomials that give ``wanted``: of few terms, or else one of the family and few terms more."""
        for extra in dict.fromkeys((0, num_extra)):
            found = self._solver(used, extra).polynomials(wanted)
            if found:
                return found
        solver = self._solver(used, num_extra)
        possible: dict[int, set[Terms]] = {}
        for row in self._known:
            rest = solver.rest(wanted, row)
            for more in solver.polynomials(rest) if rest is not None else ():
                total = dict(enumerate(row))
                for i, c in more:
                    total[i] = total.get(i, Fraction(0)) + c
                terms = tuple((i, c) for i, c in sorted(total.items()) if c)
                possible.setdefault(len(more), set()).add(terms)
        fewest = min(possible, default=_MOST_TERMS)
        return possible[fewest] if fewest < _MOST_TERMS else ()

    def _solver(self, used: tuple[Values, ...], extra: int) -> _Solver:
        if (used, extra) not in self._solvers:
            self._solvers[used, extra] = _Solver(self._monomials[: self._num_base + extra], used)
        return self._solvers[used, extra]


@dataclass(frozen=True, slots=True)
class _Run:
    """Operations in a row of one trace."""

    values: Values
    calls: Sequence[OperatorCall]
    steps: Sequence[int]
    adding: Sequence[int]


@dataclass(frozen=True, slots=True)
class _Cut:
    """A section of one trace, cut where passes begin and loops end."""

    outside: list[_Run]
    loops: list[list[_Run]]

    @classmethod
    def of(cls, shape: Values, seen: Observation) -> _Cut:
        """The section ``seen`` at a shape."""
        levels = [0, *seen.levels]
        tile, before, begin, is_within = 0, 0, 0, False
        outside: list[_Run] = []
        loops: list[list[_Run]] = []

        def run(end: int) -> _Run:
            return _Run(
                (*shape, tile, before),
                seen.calls[begin:end],
                [after - at for at, after in zip(levels[begin:end], levels[begin + 1 : end + 1], strict=True)],
                [a - b for a, b in zip(seen.adding_levels[begin:end], seen.levels[begin:end], strict=True)],
            )

        for end, num_tokens in seen.passes:
            if is_within:
                loops[-1].append(run(end))
            else:
                outside.append(run(end))
                loops.append([])
                tile = 0
            is_within = num_tokens is not None
            if num_tokens is not None:
                tile, before = num_tokens, tile
            begin = end
        assert not is_within, "a loop over tiles ends in another section"
        outside.append(run(len(seen.calls)))
        return cls(outside, loops)


def _kind(call: OperatorCall) -> tuple[Any, ...]:
    """What of a call is no number."""
    storages = tuple(storage for storage, _ in call.reads)
    return call.name, call.operation_class, call.dtype, storages, len(call.writes_bytes), len(call.shape)


class _Solver:
    """Polynomials of few terms through figures at given values of the variables."""

    def __init__(self, monomials: Sequence[tuple[int, ...]], values: Sequence[Values]) -> None:
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
        for size in range(1, min(_MOST_TERMS, len(self._rows) - 1) + 1):
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
