"""A model's workload at every shape of its batch: figures as polynomials instead of numbers.

[Note: What is polynomial]
A tensor's bytes and an operator's arithmetic are products of the batch's dims and of constants, so they are polynomials
in batch size and sequence length, and so is every level of memory, which is a sum of tensors.  What a workload derives
from them is not: equal operations are counted together, a lookup reads at most its table, curves keep the highest level
of stretches whose ends depend on all operations' shares, tiny tensors are not swapped, equal blocks share a profile.
So a family keeps what a trace records, call by call (``shared/observed/observation.py``), and a workload at one shape
is assembled from it as a trace's is (``shared/observed/assembly.py``).

[Note: Where a family holds]
A model may do other things at other shapes: with a batch of one, copies become views; beyond a sliding window, masks
appear.  A family is made of pieces, each with the range of shapes that it was fitted in and the shapes at which it was
compared with a trace, and refuses every other shape.

[Note: Packed rows]
Where samples lie end to end, attention is told where they end and needs no mask, beyond a sliding window neither: it
does what it does in the piece of the shortest sequences, whose polynomials therefore hold for rows of any length.  Its
arithmetic is that of the samples (``shared/observed/packed.py``).  Their positions are given with the batch, and
counted beside those that the model makes by itself elsewhere: 8 bytes per token too many at most.  A window within a
sample is not counted: the arithmetic of samples beyond it is an upper bound.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import accumulate
from math import prod
from typing import Any, ClassVar, Final, Self

from pydantic import PositiveInt, SerializerFunctionWrapHandler, ValidationError, model_serializer, model_validator

from ..basics.documents import Document, FrozenModel
from ..basics.errors import WorkloadError
from ..factors.structure import ModelStructure
from ..observed.assembly import TracedModel, TracedShape, assemble
from ..observed.observation import Observation, OperatorCall
from ..observed.observed_inputs import ObservedInput, PhaseKey
from ..observed.packed import attending_within_samples
from ..phases.packing import Packing
from ..phases.quadratic import SHORTEST_SQUARE
from ..schema.plan import ActivationMode
from ..schema.schedule import OuterSection, TaskKind
from ..schema.workload import BlockId, DType, Operation, Parameter, Workload
from .calls import FamilyCall, Number, call_at

BATCH_SIZE: Final = "batch_size"
SEQUENCE_LENGTH: Final = "sequence_length"
TARGET_LENGTH: Final = "target_length"
"""Tokens of a decoder beside an encoder, which has ``sequence_length``."""
MAX_TOKENS: Final = 2**40
"""In one iteration; beyond it no figure is of this world."""


class OutsideFamilyError(WorkloadError):
    """A shape that makes sense, but at which nothing was proven."""


_POSITIONS: Final = "position_ids"


class FamilySection(FrozenModel):
    """``Observation`` with polynomials in place of numbers."""

    calls: tuple[int, ...]
    """In order, as indices into the piece's ``calls``."""
    steps: tuple[Number, ...]
    """Level after each call minus the level after the one before."""
    adding: tuple[Number, ...]
    """Level after each call, had gradients been added to earlier ones, minus the level."""
    net: Number
    gradient: Number
    output: Number
    saved: tuple[Number, ...] = ()
    lingering: Number | None = None
    """``Observation.lingering_bytes``.  A file has the field where there are any."""

    @model_serializer(mode="wrap")
    def _without_empty_fields(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        fields: dict[str, Any] = handler(self)
        if self.lingering is None:
            fields.pop("lingering", None)
        return fields


class FamilyPlace(FrozenModel):
    """Where in an iteration a section was seen."""

    mode: ActivationMode
    kind: TaskKind
    section: int | OuterSection
    seen: int
    """Index into the piece's ``sections``."""


class FamilySharedInput(FrozenModel):
    """``ObservedInput`` with a polynomial in place of its size."""

    size: Number
    blocks: tuple[int, ...]
    kept: tuple[TaskKind, int | OuterSection]
    checkpointed: tuple[TaskKind, int | OuterSection]
    made_by: int | None = None
    """A file has the field where there is one."""

    @model_serializer(mode="wrap")
    def _without_empty_fields(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        fields: dict[str, Any] = handler(self)
        if self.made_by is None:
            fields.pop("made_by", None)
        return fields

    def at(self, size_bytes: int) -> ObservedInput:
        """It, of so many bytes."""
        made_by = None if self.made_by is None else BlockId(self.made_by)
        return ObservedInput(size_bytes, self.blocks, phase_key(self.kept), phase_key(self.checkpointed), made_by)


class FamilyPiece(FrozenModel):
    """A range of shapes in which a model does the same things."""

    least: tuple[PositiveInt, ...]
    """Smallest value of every variable."""
    most: tuple[PositiveInt | None, ...]
    """Largest value of every variable; None: as large as you like."""
    monomials: tuple[tuple[int, ...], ...]
    """Exponents of every variable."""
    denominator: PositiveInt = 1
    """Of all coefficients."""
    polynomials: tuple[tuple[int, ...], ...]
    """Coefficients, one for each monomial."""
    calls: tuple[FamilyCall, ...]
    sections: tuple[FamilySection, ...]
    places: tuple[FamilyPlace, ...]
    shared_inputs: tuple[FamilySharedInput, ...] = ()
    staying_inputs: tuple[int, ...] = ()
    """``TracedShape.staying_inputs``.  A file has the field where there are any."""
    batch: dict[str, tuple[Number, ...]]
    """Shape of every tensor of the batch."""
    num_samples: Number
    num_tokens: Number
    resident: Number
    fitted_at: tuple[tuple[PositiveInt, ...], ...]
    """Shapes whose traces the polynomials were fitted to."""
    proven_at: tuple[tuple[PositiveInt, ...], ...]
    """Further shapes at which every figure was compared with a trace."""

    @model_serializer(mode="wrap")
    def _without_empty_fields(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        fields: dict[str, Any] = handler(self)
        if not self.staying_inputs:
            fields.pop("staying_inputs", None)
        return fields

    @model_validator(mode="after")
    def _is_consistent(self) -> Self:
        numbers = [self.num_samples, self.num_tokens, self.resident, *(n for dims in self.batch.values() for n in dims)]
        numbers += (given.size for given in self.shared_inputs)
        for call in self.calls:
            numbers += (call.flops, *(n for _, n in call.reads), *call.writes, *call.shape)
        for section in self.sections:
            numbers += (*section.steps, *section.adding, section.net, section.gradient, section.output, *section.saved)
            numbers += () if section.lingering is None else (section.lingering,)
            if not len(section.calls) == len(section.steps) == len(section.adding):
                raise ValueError("a section needs one level for each of its calls")
            if any(not 0 <= call < len(self.calls) for call in section.calls):
                raise ValueError(f"a section names a call beyond the {len(self.calls)} that there are")
        if numbers and not 0 <= min(numbers) <= max(numbers) < len(self.polynomials):
            raise ValueError(f"a figure names a polynomial beyond the {len(self.polynomials)} that there are")
        if any(not 0 <= place.seen < len(self.sections) for place in self.places):
            raise ValueError(f"a place names a section beyond the {len(self.sections)} that there are")
        if any(len(coefficients) != len(self.monomials) for coefficients in self.polynomials):
            raise ValueError("a polynomial needs one coefficient for each monomial")
        if any(len(exponents) != len(self.least) for exponents in self.monomials) or len(self.most) != len(self.least):
            raise ValueError("a monomial needs one exponent for each variable")
        return self

    def holds(self, values: tuple[int, ...]) -> bool:
        """Whether a shape lies within the range."""
        return all(
            least <= value and (most is None or value <= most)
            for value, least, most in zip(values, self.least, self.most, strict=True)
        )

    def holds_first(self, value: int) -> bool:
        """Whether a value of the first variable lies within the range."""
        most = self.most[0]
        return self.least[0] <= value and (most is None or value <= most)

    def shape_at(self, values: tuple[int, ...]) -> TracedShape:
        """What a trace would see at a shape within the range."""
        numbers = self._numbers(values)
        calls = [call_at(call, numbers) for call in self.calls]
        operations = [call.operation() for call in calls]
        squares = self._numbers(values, of_squares=True) if max(values[1:], default=0) >= SHORTEST_SQUARE else None
        seen = [_section_at(section, calls, operations, numbers, squares) for section in self.sections]
        observed: dict[ActivationMode, dict[PhaseKey, Observation]] = {}
        for place in self.places:
            observed.setdefault(place.mode, {})[phase_key((place.kind, place.section))] = seen[place.seen]
        return replace(
            self._facts(numbers),
            observed=observed,
            shared_inputs=tuple(given.at(numbers[given.size]) for given in self.shared_inputs),
            staying_inputs=self.staying_inputs,
        )

    def facts_at(self, values: tuple[int, ...]) -> TracedShape:
        """The same of nothing but the batch, and of what stays on the device."""
        return self._facts(self._numbers(values))

    def _facts(self, numbers: list[int]) -> TracedShape:
        return TracedShape(
            batch_shapes={name: tuple(numbers[dim] for dim in dims) for name, dims in self.batch.items()},
            num_samples=numbers[self.num_samples],
            num_tokens=numbers[self.num_tokens],
            resident_bytes=numbers[self.resident],
            observed={},
        )

    def _numbers(self, values: tuple[int, ...], *, of_squares: bool = False) -> list[int]:
        """Every polynomial's value, or that of its terms which are of second degree in lengths of sequences."""
        powers = [
            prod(value**exponent for value, exponent in zip(values, exponents, strict=True))
            if not of_squares or sum(exponents[1:]) > 1
            else 0
            for exponents in self.monomials
        ]
        sums = [sum(c * p for c, p in zip(row, powers, strict=True) if c) for row in self.polynomials]
        if self.denominator == 1:
            return sums
        is_whole = of_squares or not any(total % self.denominator for total in sums)
        assert is_whole, "a polynomial of counts is no whole number"
        return [total // self.denominator for total in sums]


Change = Callable[[TracedShape, FamilyPiece, tuple[int, ...]], TracedShape]
"""Of what a trace sees at a shape, by the piece that gives it and the variables' values."""


def _unchanged(shape: TracedShape, *_: object) -> TracedShape:
    return shape


def phase_key(place: tuple[TaskKind, int | OuterSection]) -> PhaseKey:
    """A place's task and section."""
    kind, section = place
    return kind, section if isinstance(section, OuterSection) else BlockId(section)


def _section_at(
    section: FamilySection,
    calls: list[OperatorCall],
    operations: list[Operation],
    numbers: list[int],
    squares: list[int] | None,
) -> Observation:
    observation = Observation(
        0,
        end_bytes=numbers[section.net],
        operations=[operations[call] for call in section.calls],
        calls=[calls[call] for call in section.calls],
        gradient_bytes=numbers[section.gradient],
        lingering_bytes=0 if section.lingering is None else numbers[section.lingering],
        output_bytes=numbers[section.output],
        saved_bytes=[numbers[size] for size in section.saved],
    )
    level = 0
    for step, adding in zip(section.steps, section.adding, strict=True):
        level += numbers[step]
        observation.levels.append(level)
        observation.adding_levels.append(level + numbers[adding])
    if squares is not None:
        observation.square_bytes = squares[section.net]
        levels = accumulate(squares[step] for step in section.steps)
        observation.square_peak_bytes = max(0, max(levels, default=0))
    return observation


class Limit(FrozenModel):
    """The largest value that the model itself takes."""

    variable: str
    most: PositiveInt
    reason: str
    """``"it has learned positions for 1024 tokens"``."""


class WorkloadFamily(Document):
    """One model, trained in one way, at every shape of its batch."""

    KIND: ClassVar[str] = "workload_family"
    SCHEMA_VERSION: ClassVar[int] = 2
    """2: parameters outside the blocks name the sections that use them."""

    model_name: str
    model_hash: str
    compute_dtype: DType
    twins: dict[DType, str] = {}
    """Other element types in which the model does the same, each with the model's hash in it."""
    variables: tuple[str, ...]
    """What a shape is made of: ``batch_size``, then ``sequence_length`` and ``target_length`` where there are such."""
    limits: tuple[Limit, ...] = ()
    parameters: tuple[Parameter, ...]
    """In execution order."""
    block_names: tuple[str, ...]
    stands_for: tuple[int, ...]
    """For every block, the traced one that does the same."""
    row_lookups: tuple[str, ...] = ()
    """``TracedModel.row_lookups``."""
    structure: ModelStructure | None = None
    """What the model is made of; None in families of before it was kept."""
    pieces: tuple[FamilyPiece, ...]
    software: dict[str, str] = {}

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if not self.pieces:
            raise ValueError("a family needs at least one piece")
        if any(len(piece.least) != len(self.variables) for piece in self.pieces):
            raise ValueError(f"every piece needs a range for each of {', '.join(self.variables)}")
        if not self.block_names or len(self.block_names) != len(self.stands_for):
            raise ValueError("a family needs blocks, and for each the traced one that does the same")
        return self

    @property
    def has_sequence(self) -> bool:
        """Whether a shape names a sequence's length."""
        return SEQUENCE_LENGTH in self.variables

    def at(
        self,
        *,
        batch_size: int,
        sequence_length: int | None = None,
        target_length: int | None = None,
        packing: Packing | None = None,
        change: Change | None = None,
    ) -> Workload:
        """The workload at one shape: what a trace gives there, figure by figure.

        ``target_length`` is the decoder's beside an encoder, and that of the encoder where none is given.  ``packing``:
        samples that lie end to end in rows of ``sequence_length`` tokens ([Note: Packed rows]).  ``change`` of what a
        trace sees there is made first.  Raises WorkloadError, naming the field, if a value is missing, superfluous, no
        count or too large, OutsideFamilyError if it makes sense but nothing was proven there.
        """
        given = {BATCH_SIZE: batch_size, SEQUENCE_LENGTH: sequence_length, TARGET_LENGTH: target_length}
        if packing is not None:
            return self._packed(given, packing, change or _unchanged)
        values = self.values_of(given)
        piece, change = self.piece_at(values), change or _unchanged
        return self.assembled(lambda: (self.traced_model(), change(piece.shape_at(values), piece, values)), values)

    def _packed(self, given: Mapping[str, int | None], packing: Packing, change: Change) -> Workload:
        if TARGET_LENGTH in self.variables or not self.has_sequence:
            raise WorkloadError(
                f"packed lengths: {self.model_name} reads no rows of tokens that attend to each other alone. Leave "
                f"them out."
            )
        # Positions begin anew with each sample, so the longest sample has to meet what limits a sequence.
        batch_size, _ = self.values_of({**given, SEQUENCE_LENGTH: packing.longest})
        values = (batch_size, packing.row_tokens)
        self._check_size(values)
        piece = next((piece for piece in self.pieces if piece.holds_first(batch_size)), None)
        if piece is None:
            raise OutsideFamilyError(f"nothing is known exactly of {batch_size} packed rows of {self.model_name}.")

        def traced() -> tuple[TracedModel, TracedShape]:
            shape = change(piece.shape_at(values), piece, values)
            return self.traced_model(), replace(
                shape,
                batch_shapes={**shape.batch_shapes, _POSITIONS: values},
                resident_bytes=shape.resident_bytes + batch_size * packing.row_tokens * DType.INT64.item_bytes,
                observed=attending_within_samples(shape.observed, packing, self.model_name),
                packing=packing,
            )

        return self.assembled(traced, values)

    def traced_model(self) -> TracedModel:
        """What a trace says of the model at every shape."""
        return TracedModel(
            model_name=self.model_name,
            model_hash=self.model_hash,
            compute_dtype=self.compute_dtype,
            parameters=self.parameters,
            block_names=self.block_names,
            stands_for=self.stands_for,
            row_lookups=self.row_lookups,
            traced_with="fake",
            software=self.software,
        )

    def assembled(self, traced: Callable[[], tuple[TracedModel, TracedShape]], values: tuple[int, ...]) -> Workload:
        """The workload of what ``traced`` gives for the variables ``values``.

        Raises WorkloadError if they are too large.
        """
        try:
            return assemble(*traced())
        except ValidationError as error:
            raise WorkloadError(
                f"{self._shown(values)} is too large for {self.model_name}: a phase of one iteration would hold or "
                f"move more than 2**60 bytes. Lower {' or '.join(self.variables)}."
            ) from error

    def in_dtype(self, dtype: DType) -> WorkloadFamily:
        """The family in another element type of ``twins``.  Raises WorkloadError if it is not one."""
        if dtype == self.compute_dtype:
            return self
        if dtype not in self.twins:
            known = ", ".join((self.compute_dtype, *self.twins))
            raise WorkloadError(f"{self.model_name} is known in {known}, not in {dtype}. Trace it in that dtype.")
        own, other = self.compute_dtype, dtype

        def swapped(found: DType) -> DType:
            return other if found == own else found

        pieces = tuple(
            piece.model_copy(
                update={"calls": tuple(c.model_copy(update={"dtype": swapped(c.dtype)}) for c in piece.calls)}
            )
            for piece in self.pieces
        )
        return self.model_copy(
            update={
                "model_hash": self.twins[dtype],
                "compute_dtype": dtype,
                "twins": {own: self.model_hash} | {t: h for t, h in self.twins.items() if t != dtype},
                "parameters": tuple(p.model_copy(update={"dtype": swapped(p.dtype)}) for p in self.parameters),
                "pieces": pieces,
            }
        )

    def values_of(self, given: Mapping[str, int | None]) -> tuple[int, ...]:
        """The variables' values of a shape, in order.  Raises WorkloadError as ``at``."""
        found: dict[str, int] = {}
        for name, value in given.items():
            if name not in self.variables:
                if value is not None:
                    raise WorkloadError(f"{name} is {value!r}, but {self.model_name} has none. Leave it out.")
                continue
            if value is None and name == TARGET_LENGTH:
                value = given[SEQUENCE_LENGTH]
            limit = min((limit for limit in self.limits if limit.variable == name), key=_most, default=None)
            most = limit.most if limit is not None else MAX_TOKENS
            if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
                state = "is missing" if value is None else f"is {value!r}"
                reason = f": {self.model_name} {limit.reason}" if limit is not None else ""
                raise WorkloadError(f"{name} {state}; it must be a whole number from 1 to {most}{reason}.")
            found[name] = value
        self._check_size(tuple(found.values()))
        return tuple(found[name] for name in self.variables)

    def _check_size(self, values: tuple[int, ...]) -> None:
        tokens = values[0] * max(values[1:], default=1)
        if tokens > MAX_TOKENS:
            raise WorkloadError(
                f"{self._shown(values)} makes {tokens} tokens; at most {MAX_TOKENS} are predicted. Lower "
                f"{' or '.join(self.variables)}."
            )

    def piece_at(self, values: tuple[int, ...]) -> FamilyPiece:
        """The piece of a shape.  Raises OutsideFamilyError if there is none."""
        for piece in self.pieces:
            if piece.holds(values):
                return piece
        ranges = "; ".join(
            ", ".join(
                f"{name} {least} to {most}" if most is not None else f"{name} from {least}"
                for name, least, most in zip(self.variables, piece.least, piece.most, strict=True)
            )
            for piece in self.pieces
        )
        raise OutsideFamilyError(
            f"{self._shown(values)} is outside of what is known exactly of {self.model_name}, which is: {ranges}."
        )

    def _shown(self, values: tuple[int, ...]) -> str:
        return " and ".join(f"{name} {value}" for name, value in zip(self.variables, values, strict=True))


def _most(limit: Limit) -> int:
    return limit.most
