"""Fitting a family's polynomials to traces, in exact arithmetic.

Traces at as many shapes as there are monomials determine every polynomial; traces at further shapes must then be met
figure by figure, or the fit is refused.

[Note: Few terms]
Nearly every figure is a product of dims, or a sum of two or three.  So fewer shapes than there are monomials are enough
if every set of at most three monomials is tried, and all those through which a figure can be met at every shape give
the same polynomial.  A figure that needs more terms, or for which there is a second polynomial, is refused: then as
many shapes as monomials must be traced.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import combinations
from math import lcm, prod
from typing import Any

from ...shared.basics.errors import WorkloadError
from ...shared.families.calls import FamilyCall
from ...shared.families.family import FamilyPiece, FamilyPlace, FamilySection, FamilySharedInput
from ...shared.observed.assembly import TracedShape
from ...shared.observed.observation import Observation, OperatorCall
from ...shared.observed.observed_inputs import ObservedInput, PhaseKey
from ...shared.schema.plan import ActivationMode

Shape = tuple[int, ...]
"""Values of the family's variables."""


class NotPolynomialError(WorkloadError):
    """Traces at different shapes do not belong to one piece."""


def fit_piece(
    fitted: Mapping[Shape, TracedShape],
    proofs: Mapping[Shape, TracedShape],
    *,
    monomials: Sequence[tuple[int, ...]],
    least: Shape,
    most: tuple[int | None, ...],
    most_terms: int | None = None,
) -> FamilyPiece:
    """The piece that gives ``fitted``, whose shapes determine it, and ``proofs``.

    With ``most_terms``, figures have at most so many terms (Note: Few terms), and ``fitted`` and ``proofs`` are met all
    the same.  Raises NotPolynomialError if the model does other things at some of the shapes, or if a figure of
    ``proofs`` is not met; the message names the place and the shapes.
    """
    assert most_terms is not None or len(fitted) == len(monomials), "as many shapes as monomials"
    shapes = [*fitted, *proofs]
    sheets = [Sheet.of(traced) for traced in (*fitted.values(), *proofs.values())]
    for shape, sheet in zip(shapes, sheets, strict=True):
        if sheet.structure != sheets[0].structure:
            raise NotPolynomialError(
                f"the model does not do the same at {list(shapes[0])} and at {list(shape)}: "
                f"{first_difference(sheets[0].structure, sheet.structure)}."
            )
    solver: _Solver | _FewTerms = (
        _Solver(shapes, num_fitted=len(fitted), monomials=monomials)
        if most_terms is None
        else _FewTerms(shapes, monomials=monomials, most_terms=most_terms)
    )
    numbers = []
    for place in range(len(sheets[0].numbers)):
        values = tuple(sheet.numbers[place] for sheet in sheets)
        numbers.append(solver.polynomial(values, sheets[0].labels[place]))
    denominator = lcm(*(c.denominator for row in solver.polynomials for c in row))
    return piece_of_sheet(
        sheets[0],
        numbers,
        least=least,
        most=most,
        monomials=tuple(monomials),
        denominator=denominator,
        polynomials=tuple(tuple(int(c * denominator) for c in row) for row in solver.polynomials),
        fitted_at=tuple(fitted),
        proven_at=tuple(proofs),
    )


def do_the_same(first: TracedShape, second: TracedShape) -> bool:
    """Whether a model runs one program at both shapes, so that both may belong to one piece."""
    return Sheet.of(first).structure == Sheet.of(second).structure


@dataclass
class Sheet:
    """All numbers of a trace in a fixed order, and everything of it that is no number."""

    numbers: list[int] = field(default_factory=list)
    labels: list[str] = field(default_factory=list)
    """What each number is, for messages."""
    structure: list[Any] = field(default_factory=list)
    """Names, classes and places of numbers."""

    @classmethod
    def of(cls, traced: TracedShape) -> Sheet:
        """The sheet of one trace."""
        sheet = cls()
        for name, value in (
            ("num_samples", traced.num_samples),
            ("num_tokens", traced.num_tokens),
            ("resident_bytes", traced.resident_bytes),
        ):
            sheet._add(value, name)
        batch = [(n, tuple(sheet._add(d, f"dim of {n}") for d in dims)) for n, dims in traced.batch_shapes.items()]
        sheet.structure.append(tuple(batch))
        for mode, sections in traced.observed.items():
            for key, observation in sections.items():
                sheet._observation(mode, key, observation)
        sheet.structure.append(tuple(sheet._shared_input(given) for given in traced.shared_inputs))
        sheet.structure.append(("blocks whose input stays", traced.staying_inputs))
        return sheet

    def _add(self, value: int, label: str) -> int:
        self.numbers.append(value)
        self.labels.append(label)
        return len(self.numbers) - 1

    def _shared_input(self, given: ObservedInput) -> tuple[Any, ...]:
        label = f"bytes of what blocks {list(given.blocks)} are given"
        return (self._add(given.size_bytes, label), given.blocks, given.kept, given.checkpointed, given.made_by)

    def _observation(self, mode: ActivationMode, key: PhaseKey, observation: Observation) -> None:
        kind, section = key
        of = f"{kind} of {section} in mode {mode}"
        self.structure.append((mode, kind, section))
        before = 0
        calls, steps, adding = [], [], []
        for call, level, added in zip(observation.calls, observation.levels, observation.adding_levels, strict=True):
            calls.append(self._call(call, of))
            steps.append(self._add(level - before, f"level after {call.name}, {of}"))
            adding.append(self._add(added - level, f"adding level after {call.name}, {of}"))
            before = level
        rest = (
            self._add(observation.net_bytes, f"net bytes, {of}"),
            self._add(observation.gradient_bytes, f"gradient bytes, {of}"),
            self._add(observation.output_bytes, f"output bytes, {of}"),
            self._add(observation.lingering_bytes, f"bytes that frames hold when it is announced, {of}"),
        )
        saved = tuple(self._add(size, f"saved bytes, {of}") for size in observation.saved_bytes)
        self.structure.append((tuple(calls), tuple(steps), tuple(adding), rest, saved))

    def _call(self, call: OperatorCall, of: str) -> tuple[Any, ...]:
        label = f"{call.name}, {of}"
        return (
            call.name,
            call.operation_class,
            call.dtype,
            self._add(call.flops, f"FLOPs of {label}"),
            tuple((storage, self._add(size, f"bytes read by {label}")) for storage, size in call.reads),
            tuple(self._add(size, f"bytes written by {label}") for size in call.writes_bytes),
            tuple(self._add(dim, f"shape of {label}") for dim in call.shape),
            call.is_changed,
        )


def first_difference(first: Sequence[Any], second: Sequence[Any]) -> str:
    """Where two structures part, in words."""
    section: Any = "its batch"
    for one, other in zip(first, second, strict=False):
        if one == other:
            section = one
            continue
        if len(one) == 5 and len(other) == 5:
            names, others = [call[0] for call in one[0]], [call[0] for call in other[0]]
            if names == others:
                return f"in {section} some operator is given or saves other tensors"
            place = next((i for i, (a, b) in enumerate(zip(names, others, strict=False)) if a != b), None)
            if place is None:
                return f"in {section} there are {len(names)} operators at one and {len(others)} at the other"
            return f"in {section} operator {place} is {names[place]} at one and {others[place]} at the other"
        return f"{one!r:.100} at one and {other!r:.100} at the other"
    return f"{len(first) // 2} sections at one and {len(second) // 2} at the other"


class _Solver:
    """Polynomials through values at given shapes, each found once."""

    def __init__(self, shapes: Sequence[Shape], *, num_fitted: int, monomials: Sequence[tuple[int, ...]]) -> None:
        rows = [[Fraction(prod(v**e for v, e in zip(s, m, strict=True))) for m in monomials] for s in shapes]
        self._inverse = _inverse(rows[:num_fitted])
        self._proofs = rows[num_fitted:]
        self._shapes = shapes
        self._num_fitted = num_fitted
        self._known: dict[tuple[int, ...], int] = {}
        self.polynomials: list[tuple[Fraction, ...]] = []

    def polynomial(self, values: tuple[int, ...], label: str) -> int:
        """Index of the polynomial through ``values``.  Raises NotPolynomialError if there is none."""
        found = self._known.get(values)
        if found is None:
            row = tuple(
                sum((i * v for i, v in zip(line, values, strict=False) if v), Fraction(0)) for line in self._inverse
            )
            for place, powers in enumerate(self._proofs, self._num_fitted):
                computed = sum((c * p for c, p in zip(row, powers, strict=True)), Fraction(0))
                if computed != values[place]:
                    raise NotPolynomialError(
                        f"the {label} is {values[place]} at {list(self._shapes[place])}, where the polynomial "
                        f"through the other shapes gives {computed}."
                    )
            found = self._known[values] = len(self.polynomials)
            self.polynomials.append(row)
        return found


class _FewTerms:
    """The only polynomials of few terms that meet all shapes, each found once."""

    def __init__(self, shapes: Sequence[Shape], *, monomials: Sequence[tuple[int, ...]], most_terms: int) -> None:
        assert most_terms < len(shapes), "more shapes than terms"
        self._rows = [[prod(v**e for v, e in zip(s, m, strict=True)) for m in monomials] for s in shapes]
        self._most_terms = most_terms
        self._shapes = shapes
        self._known: dict[tuple[int, ...], int] = {}
        self.polynomials: list[tuple[Fraction, ...]] = []
        self._inverses = {
            chosen: _inverse([[Fraction(row[i]) for i in chosen] for row in self._rows[: len(chosen)]])
            for num_terms in range(1, most_terms + 1)
            for chosen in combinations(range(len(monomials)), num_terms)
        }

    def polynomial(self, values: tuple[int, ...], label: str) -> int:
        """Index of the polynomial that gives ``values``.  Raises NotPolynomialError if there is none, or a second."""
        found = self._known.get(values)
        if found is None:
            possible = {row for chosen in self._inverses if (row := self._through(chosen, values)) is not None}
            if len(possible) != 1:
                raise NotPolynomialError(
                    f"the {label} is {list(values)} at {[list(shape) for shape in self._shapes]}, which "
                    f"{'no' if not possible else 'more than one'} polynomial of {self._most_terms} terms gives."
                )
            found = self._known[values] = len(self.polynomials)
            self.polynomials += possible
        return found

    def _through(self, chosen: tuple[int, ...], values: tuple[int, ...]) -> tuple[Fraction, ...] | None:
        """The polynomial of the monomials ``chosen`` that gives ``values``; None if there is none."""
        terms = [
            sum((c * v for c, v in zip(line, values, strict=False) if v), Fraction(0))
            for line in self._inverses[chosen]
        ]
        for row, value in zip(self._rows[len(chosen) :], values[len(chosen) :], strict=True):
            if sum((term * row[i] for i, term in zip(chosen, terms, strict=True)), Fraction(0)) != value:
                return None
        by_monomial = dict(zip(chosen, terms, strict=True))
        return tuple(by_monomial.get(i, Fraction(0)) for i in range(len(self._rows[0])))


def _inverse(matrix: Sequence[Sequence[Fraction]]) -> list[list[Fraction]]:
    """The inverse by elimination.  Raises NotPolynomialError if the shapes do not determine the polynomials."""
    size = len(matrix)
    rows = [[*row, *(Fraction(int(i == j)) for j in range(size))] for i, row in enumerate(matrix)]
    for column in range(size):
        pivot = next((i for i in range(column, size) if rows[i][column]), None)
        if pivot is None:
            raise NotPolynomialError("the shapes that were traced do not determine the polynomials. Choose others.")
        rows[column], rows[pivot] = rows[pivot], rows[column]
        head = rows[column][column]
        rows[column] = [value / head for value in rows[column]]
        for i in range(size):
            factor = rows[i][column]
            if i != column and factor:
                rows[i] = [a - factor * b for a, b in zip(rows[i], rows[column], strict=True)]
    return [row[size:] for row in rows]


def piece_of_sheet(
    sheet: Sheet, numbers: Sequence[int], *, polynomials: tuple[tuple[int, ...], ...], **rest: Any
) -> FamilyPiece:
    """The piece of a sheet whose numbers are the ``polynomials`` of these places; equal calls and sections once."""
    calls: dict[FamilyCall, int] = {}
    sections: dict[FamilySection, int] = {}
    places: list[FamilyPlace] = []
    batch, *observations, shared_inputs, (_, staying_inputs) = sheet.structure
    for (mode, kind, section), (made, steps, adding, outer, saved) in zip(
        observations[::2], observations[1::2], strict=True
    ):
        indices = []
        for name, operation_class, dtype, flops, reads, writes, shape, is_changed in made:
            call = FamilyCall(
                name=name,
                operation_class=operation_class,
                dtype=dtype,
                flops=numbers[flops],
                reads=tuple((storage, numbers[size]) for storage, size in reads),
                writes=tuple(numbers[size] for size in writes),
                shape=tuple(numbers[dim] for dim in shape),
                is_changed=is_changed,
            )
            indices.append(calls.setdefault(call, len(calls)))
        found = FamilySection(
            calls=tuple(indices),
            steps=tuple(numbers[step] for step in steps),
            adding=tuple(numbers[step] for step in adding),
            net=numbers[outer[0]],
            gradient=numbers[outer[1]],
            output=numbers[outer[2]],
            saved=tuple(numbers[size] for size in saved),
            lingering=numbers[outer[3]] if any(polynomials[numbers[outer[3]]]) else None,
        )
        seen = sections.setdefault(found, len(sections))
        places.append(FamilyPlace(mode=mode, kind=kind, section=section, seen=seen))
    return FamilyPiece(
        calls=tuple(calls),
        sections=tuple(sections),
        places=tuple(places),
        shared_inputs=tuple(
            FamilySharedInput(size=numbers[size], blocks=blocks, kept=kept, checkpointed=checkpointed, made_by=made_by)
            for size, blocks, kept, checkpointed, made_by in shared_inputs
        ),
        staying_inputs=staying_inputs,
        batch={name: tuple(numbers[dim] for dim in dims) for name, dims in batch},
        num_samples=numbers[0],
        num_tokens=numbers[1],
        resident=numbers[2],
        polynomials=polynomials,
        **rest,
    )
