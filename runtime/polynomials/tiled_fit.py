"""Fitting what a family does in tiles to traces, in exact arithmetic ([Note: What is polynomial of tiles]).

Every figure is met at every pass of every trace by a polynomial of at most three terms, the only one of so few, or
there is no fit.  Whoever gives more traces may allow more terms.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import lcm
from typing import Any, Self

from ...shared.basics.errors import WorkloadError
from ...shared.families.calls import FamilyCall
from ...shared.families.family import FamilyPiece, FamilyPlace
from ...shared.families.tilings import TiledLoop, TiledPiece, TiledRun, TiledSection
from ...shared.observed.observation import Observation, OperatorCall
from ...shared.observed.observed_inputs import PhaseKey
from ...shared.schema.plan import ActivationMode
from .few_terms import MOST_TERMS, Solver, Terms, fitted_call, kind_of

Values = tuple[int, ...]
"""Of the family's variables, then the tokens of the tile, and of the one before; 0 where there is none."""
Seen = Mapping[ActivationMode, Mapping[PhaseKey, Observation]]


class TilesNotPolynomialError(WorkloadError):
    """Traces with tiles do not belong together."""


class TiledFit:
    """The sections of one piece, as they are fitted."""

    def __init__(
        self,
        monomials: Sequence[tuple[int, ...]],
        known: Sequence[Sequence[Fraction]],
        most_terms: int = MOST_TERMS,
    ) -> None:
        """``monomials``: exponents of all variables but those of tiles; ``known``: polynomials of the first of them."""
        self._known = known
        self._most_terms = most_terms
        num = len(monomials[0])
        base = [(*exponents, 0, 0) for exponents in monomials]
        self._monomials = [*base, (*[0] * num, 1, 0), (*[0] * num, 0, 1)]
        self._num_base = len(base)
        self._solvers: dict[tuple[tuple[Values, ...], int], Solver] = {}
        self._polynomials: dict[Terms, int] = {}
        self._calls: dict[FamilyCall, int] = {}
        self._sections: dict[TiledSection, int] = {}

    @classmethod
    def of_piece(cls, piece: FamilyPiece) -> Self:
        """Beside the piece of a family without tiles."""
        return cls(piece.monomials, _coefficients(piece))

    @classmethod
    def of_ranks(cls, piece: FamilyPiece, ranks: Collection[int], most_terms: int) -> Self:
        """Beside the same at a rank's own tokens, with the number of ranks, one of ``ranks``, as another variable.

        Some tensors have the tokens of all ranks.  ``most_terms`` has to be less than there will be traces.
        """
        lifted = [(*exponents, 0) for exponents in piece.monomials]
        batches = sorted({exponents[0] for exponents in piece.monomials}) if len(ranks) > 1 else []
        return cls([*lifted, *((batch, 1, 1) for batch in batches)], _coefficients(piece), most_terms)

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
        kinds = [kind_of(call) for call in runs[0].calls]
        for one in runs:
            if [kind_of(call) for call in one.calls] != kinds:
                raise TilesNotPolynomialError(
                    f"the {label} does not do the same at {list(runs[0].values)} and at {list(one.values)}."
                )
        values = [one.values for one in runs]

        def number(figures: Sequence[int], what: str) -> int:
            return self._number(values, figures, num_extra, f"{what}, {label}")

        calls, steps, adding = [], [], []
        for place, (name, *_) in enumerate(kinds):
            call = fitted_call([one.calls[place] for one in runs], number)
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
                f"{'more than one' if terms else 'no'} polynomial of {self._most_terms} terms gives."
            )
        return self._polynomials.setdefault(next(iter(terms)), len(self._polynomials))

    def _terms(self, used: tuple[Values, ...], wanted: tuple[int, ...], num_extra: int) -> Collection[Terms]:
        """The polynomials that give ``wanted``: of few terms, or else one of the family and few terms more."""
        # Of fewest terms, and without the tile's variables if they spare none.
        found = [self._solver(used, extra).polynomials(wanted) for extra in dict.fromkeys((0, num_extra))]
        if any(found):
            return min((terms for terms in found if terms), key=lambda terms: len(next(iter(terms))))
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
        fewest = min(possible, default=self._most_terms)
        return possible[fewest] if fewest < self._most_terms else ()

    def _solver(self, used: tuple[Values, ...], extra: int) -> Solver:
        if (used, extra) not in self._solvers:
            self._solvers[used, extra] = Solver(self._monomials[: self._num_base + extra], used, self._most_terms)
        return self._solvers[used, extra]


def _coefficients(piece: FamilyPiece) -> list[list[Fraction]]:
    return [[Fraction(c, piece.denominator) for c in row] for row in piece.polynomials]


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
