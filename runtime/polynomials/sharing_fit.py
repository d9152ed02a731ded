"""Fitting what one of several ranks does that share sequences, in exact arithmetic.

[Note: What is polynomial of shared sequences] in ``shared/families/sharings.py``.  A section of a trace is laid beside
the family's at a rank's own tokens: what both have in front and behind stays, and the figures of what lies between are
polynomials of at most three terms, or of another one and so many more, and the only ones of so few, or there is no
fit.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import lcm, prod
from typing import Any, Final

from ...shared.families.calls import FamilyCall
from ...shared.families.family import FamilyPlace, FamilySharedInput, OutsideFamilyError, phase_key
from ...shared.families.sharings import FamilySharings, SharedEdit, SharedPiece, rest_bytes
from ...shared.families.tilings import TiledRun
from ...shared.observed.assembly import TracedShape, phase_of
from ...shared.observed.observation import Observation, OperatorCall
from ...shared.observed.observed_inputs import ObservedInput, PhaseKey
from ...shared.schema.plan import ActivationMode
from .family_fit import NotPolynomialError
from .few_terms import Solver, Terms, fitted_call, kind_of

Values = tuple[int, ...]
"""Batch, a rank's own tokens of a sequence, number of ranks."""
_MONOMIALS: Final = tuple(
    (batch, tokens, ranks)
    for batch in range(2)
    for tokens, ranks in ((0, 1), (0, 0), (1, 1), (1, 2), (2, 1), (2, 2), (2, 3))
)
"""Exponents, that of ranks one more than it is: parts of the heads, whole ones, sequences of all ranks' tokens."""
_OUTSIDE_PHASES: Final = ("gradient_bytes", "output_bytes", "saved_bytes")
_FIGURES: Final = ("levels", "adding_levels", "net_bytes", "exchanges", *_OUTSIDE_PHASES)
"""What two observations of a section have in common if they are one, beside what they call."""
Observed = Mapping[ActivationMode, Mapping[PhaseKey, Observation]]


@dataclass(frozen=True)
class SharedTrace:
    """One rank's trace beside the family at its own tokens."""

    values: Values
    base: TracedShape
    found: TracedShape


@dataclass(frozen=True, slots=True)
class _Row:
    """One operation."""

    call: OperatorCall
    step: int
    adding: int


class SharingFit:
    """Edits and polynomials, as they are fitted; those of equal figures once."""

    def __init__(self, facts: Mapping[str, Any]) -> None:
        """``facts``: what the document says of the family."""
        self._facts = facts
        self._polynomials: dict[Terms, int] = {}
        self._calls: dict[FamilyCall, int] = {}
        self._edits: dict[SharedEdit, int] = {}
        self._document: FamilySharings | None = None
        """With as many edits as when it was last asked for."""
        self._solvers: dict[tuple[tuple[Values, ...], tuple[int, ...]], Solver] = {}

    def document(self, **rest: Any) -> FamilySharings:
        """All that was fitted."""
        denominator = lcm(*(c.denominator for row in self._polynomials for _, c in row))
        return FamilySharings(
            monomials=_MONOMIALS,
            denominator=denominator,
            polynomials=tuple(tuple((i, int(c * denominator)) for i, c in row) for row in self._polynomials),
            calls=tuple(self._calls),
            edits=tuple(self._edits),
            **self._facts,
            **rest,
        )

    def piece(
        self,
        traced: Sequence[SharedTrace],
        like: Sequence[SharedPiece],
        **rest: Any,
    ) -> SharedPiece:
        """The piece of traces that belong together, with the edits of those ``like`` it wherever they meet all of them.

        ``rest``: its other fields.  Raises NotPolynomialError.
        """
        ranks = {values[-1] for values in (one.values for one in traced)}
        allowed = tuple(
            index
            for index, (batch, _, power) in enumerate(_MONOMIALS)
            if (not batch or any(one.values[0] > 1 for one in traced)) and (len(ranks) > 1 or power == 1)
        )
        number = _Number(self, [one.values for one in traced], allowed)
        resident = number([one.found.resident_bytes for one in traced], "resident bytes")
        shared_inputs = tuple(_shared_inputs([one.found.shared_inputs for one in traced], number))
        known: dict[tuple[ActivationMode, PhaseKey], dict[int, FamilyPlace]] = {}
        for one in (place for piece in like for place in piece.places):
            known.setdefault((one.mode, phase_key((one.kind, one.section))), {}).setdefault(one.seen, one)
        places = []
        for mode, sections in traced[0].found.observed.items():
            for kind, section in sections:
                others = known.get((mode, (kind, section)), {}).values()
                place = next((other for other in others if self._meets(other, traced)), None)
                if place is None:
                    seen = [
                        (one.base.observed[mode][kind, section], one.found.observed[mode][kind, section])
                        for one in traced
                    ]
                    edit = self._edit(seen, number, f"{kind} of {section} in mode {mode}")
                    index = self._edits.setdefault(edit, len(self._edits))
                    place = FamilyPlace(mode=mode, kind=kind, section=section, seen=index)
                places.append(place)
        return SharedPiece(places=tuple(places), resident=resident, shared_inputs=shared_inputs, **rest)

    def edited(self, places: Sequence[FamilyPlace], seen: TracedShape, base: TracedShape, values: Values) -> Observed:
        """``FamilySharings.edited`` of what was fitted so far."""
        if self._document is None or len(self._document.edits) != len(self._edits):
            self._document = self.document(pieces=())
        return self._document.edited(places, seen.observed, base.observed, values)

    def _meets(self, place: FamilyPlace, traced: Sequence[SharedTrace]) -> bool:
        """Whether the edit at a place, fitted to other traces, gives what these have there."""
        try:
            return all(
                are_alike(self.edited((place,), one.base, one.base, one.values), one.found.observed, lambda _: True)
                for one in traced
            )
        except OutsideFamilyError:
            return False

    def _edit(self, seen: Sequence[tuple[Observation, Observation]], number: _Number, label: str) -> SharedEdit:
        rows = [(_rows(base), _rows(found)) for base, found in seen]
        front, behind = _common(rows, label)
        begin, end = front, len(rows[0][0]) - behind
        runs = [found[front : len(found) - behind] for _, found in rows]
        saved = [(base.saved_bytes, found.saved_bytes) for base, found in seen]
        saved_front, saved_behind = _common(saved, f"what is saved by the {label}")
        middles = [found[saved_front : len(found) - saved_behind] for _, found in saved]
        if len({len(found.exchanges) for _, found in seen}) != 1:
            raise NotPolynomialError(f"the {label} exchanges other tensors in one trace than in another.")

        def more(name: str) -> int:
            return number([getattr(found, name) - getattr(base, name) for base, found in seen], f"{name}, {label}")

        return SharedEdit(
            begin=begin,
            end=end,
            run=self._run(runs, number, label),
            rest=number([rest_bytes(found) - rest_bytes(base) for base, found in seen], f"rest, {label}"),
            gradient=more("gradient_bytes"),
            output=more("output_bytes"),
            saved_begin=saved_front,
            saved_end=len(saved[0][0]) - saved_behind,
            saved=tuple(number(sizes, f"saved bytes, {label}") for sizes in zip(*middles, strict=True)),
            exchanges=tuple(
                number(sizes, f"exchanged bytes, {label}")
                for sizes in zip(*(found.exchanges for _, found in seen), strict=True)
            ),
        )

    def _run(self, runs: Sequence[Sequence[_Row]], number: _Number, label: str) -> TiledRun:
        kinds = [kind_of(row.call) for row in runs[0]]
        if any([kind_of(row.call) for row in one] != kinds for one in runs):
            raise NotPolynomialError(f"the {label} does not do the same in all traces of equal kind.")
        calls, steps, adding = [], [], []
        for place, (name, *_) in enumerate(kinds):
            call = fitted_call(
                [one[place].call for one in runs], lambda figures, what: number(figures, f"{what}, {label}")
            )
            calls.append(self._calls.setdefault(call, len(self._calls)))
            steps.append(number([one[place].step for one in runs], f"level after {name}, {label}"))
            adding.append(number([one[place].adding for one in runs], f"adding level after {name}, {label}"))
        return TiledRun(calls=tuple(calls), steps=tuple(steps), adding=tuple(adding))

    @property
    def polynomials(self) -> tuple[Terms, ...]:
        """All that there are so far."""
        return tuple(self._polynomials)

    def solver(self, values: Sequence[Values], allowed: tuple[int, ...]) -> Solver:
        """Polynomials of the monomials ``allowed`` through figures at ``values``."""
        key = (tuple(values), allowed)
        if key not in self._solvers:
            self._solvers[key] = Solver([_MONOMIALS[index] for index in allowed], values)
        return self._solvers[key]

    def interned(self, terms: Terms) -> int:
        """Index of a polynomial."""
        return self._polynomials.setdefault(terms, len(self._polynomials))


class _Number:
    """Indices of polynomials that give figures at the shapes of some traces."""

    def __init__(self, fit: SharingFit, values: Sequence[Values], allowed: tuple[int, ...]) -> None:
        self._fit, self._values, self._allowed = fit, values, allowed
        self._solver = fit.solver(values, allowed)

    def __call__(self, figures: Iterable[int], label: str) -> int:
        """Raises NotPolynomialError if there is none, or a second."""
        wanted = tuple(figure * values[-1] for figure, values in zip(figures, self._values, strict=True))
        found = self._solver.polynomials(wanted) or self._beside_known(wanted)
        if len(found) != 1:
            raise NotPolynomialError(
                f"the {label}, times the number of ranks, is {list(wanted)} at {[list(v) for v in self._values]}, "
                f"which {'more than one' if found else 'no'} polynomial of few terms gives."
            )
        return self._fit.interned(tuple((self._allowed[i], Fraction(c)) for i, c in next(iter(found))))

    def _beside_known(self, wanted: tuple[int, ...]) -> Collection[Terms]:
        """Polynomials that are another one, with either sign, and few terms more: levels fall by several tensors."""
        possible: dict[int, set[Terms]] = {}
        places = {index: place for place, index in enumerate(self._allowed)}
        for known in self._fit.polynomials:
            if not known or any(index not in places for index, _ in known):
                continue
            given = [sum((c * self._power(index, v) for index, c in known), Fraction(0)) for v in self._values]
            for sign in (1, -1):
                rest = [figure - sign * value for figure, value in zip(wanted, given, strict=True)]
                if any(value.denominator > 1 for value in rest):
                    continue
                for more in self._solver.polynomials(tuple(map(int, rest))):
                    total = {places[index]: sign * c for index, c in known}
                    for i, c in more:
                        total[i] = total.get(i, Fraction(0)) + c
                    terms = tuple((i, c) for i, c in sorted(total.items()) if c)
                    possible.setdefault(len(more), set()).add(terms)
        return possible[min(possible)] if possible else ()

    @staticmethod
    def _power(index: int, values: Values) -> int:
        return prod(value**exponent for value, exponent in zip(values, _MONOMIALS[index], strict=True))


def _rows(seen: Observation) -> list[_Row]:
    before, found = 0, []
    for call, level, adding in zip(seen.calls, seen.levels, seen.adding_levels, strict=True):
        found.append(_Row(call, level - before, adding - level))
        before = level
    return found


def _common(pairs: Sequence[tuple[Sequence[Any], Sequence[Any]]], label: str) -> tuple[int, int]:
    """How many members every pair has in common in front, and how many behind."""
    if len({(len(base), len(found)) for base, found in pairs}) != 1:
        raise NotPolynomialError(f"the {label} has other numbers of operations in one trace than in another.")
    least = min(len(base) if len(base) < len(found) else len(found) for base, found in pairs)
    front = min(_equal(base, found, least) for base, found in pairs)
    behind = min(_equal(base[::-1], found[::-1], least - front) for base, found in pairs)
    return front, behind


def _equal(first: Sequence[Any], second: Sequence[Any], most: int) -> int:
    return next((i for i in range(most) if first[i] != second[i]), most)


def _shared_inputs(traced: Sequence[Sequence[ObservedInput]], number: _Number) -> Iterable[FamilySharedInput]:
    if len({len(given) for given in traced}) != 1:
        raise NotPolynomialError("blocks are given other tensors in one trace than in another.")
    for same in zip(*traced, strict=True):
        if len({(given.blocks, given.kept, given.checkpointed, given.made_by) for given in same}) != 1:
            raise NotPolynomialError("tensors that blocks are given go elsewhere in one trace than in another.")
        yield FamilySharedInput(
            size=number([given.size_bytes for given in same], "bytes of what blocks are given"),
            blocks=same[0].blocks,
            kept=same[0].kept,
            checkpointed=same[0].checkpointed,
            made_by=same[0].made_by,
        )


def are_alike(made: Observed, found: Observed, wanted: Callable[[PhaseKey], bool]) -> bool:
    """Whether all sections ``wanted`` of ``made`` are as in ``found``."""
    return all(
        _is_one(seen, found[mode][key])
        for mode, sections in made.items()
        for key, seen in sections.items()
        if wanted(key)
    )


def _is_one(made: Observation, found: Observation) -> bool:
    if made.repeated:  # passes that a trace lists one by one
        return phase_of(made, None) == phase_of(found, None) and all(
            getattr(made, name) == getattr(found, name) for name in _OUTSIDE_PHASES
        )
    # Which products are changed later matters to results that are kept, of which tiles have none.
    calls = "operations" if made.passes else "calls"
    return all(getattr(made, name) == getattr(found, name) for name in (calls, *_FIGURES))
