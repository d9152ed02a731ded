"""From a model's configuration to its family of workloads: traces at a few shapes, and polynomials through them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, Final

from torch import nn

from ...shared.basics.errors import WorkloadError
from ...shared.basics.gc_pause import gc_paused
from ...shared.schema.training_options import FULL_TRAINING, TrainingOptions
from ...shared.schema.workload import DType
from ...shared.workloads.assembly import TracedShape, assemble
from ...shared.workloads.family import BATCH_SIZE, SEQUENCE_LENGTH, TARGET_LENGTH, FamilyPiece, Limit, WorkloadFamily
from ..model.blocks import find_blocks
from ..model.configurations import quiet
from ..model.identity import structure_of
from .configurations import autocast_of, batch_of, configured_model, limits_of, variables_of
from .family_fit import NotPolynomialError, Shape, do_the_same, fit_piece
from .tracing import FakeSubject, traced_model

_BATCHES: Final = (2, 3)
"""Figures are of first degree in the batch's size.  A batch of one is another piece where it is another program."""
_PROVEN_BATCHES: Final = (7, 29)
_LENGTHS: Final = (37, 53, 101)
"""Figures are of second degree in a sequence's length."""
_LONGEST_PROVEN: Final = 131_101
_SHORTEST: Final = 2
"""A sequence of one token is no sequence: transposed copies become views."""
_DEGREE: Final = 2
_ABOUT: Final = 9
"""Traces that most models need, for progress."""
_TWINS: Final = {DType.BFLOAT16: DType.FLOAT16, DType.FLOAT16: DType.BFLOAT16}


@gc_paused()
def family_of_configuration(
    configuration: Mapping[str, Any],
    *,
    name: str,
    dtype: str | None = None,
    options: TrainingOptions = FULL_TRAINING,
    with_twin: bool = False,
    on_progress: Callable[[int, int], None] | None = None,
) -> WorkloadFamily:
    """The family of workloads of training the model that a Hugging Face ``config.json`` describes.

    ``dtype`` overrides the configuration's; ``with_twin`` also compares the other type of 16 bits, which the family
    then knows as well if the model does the same in it.  Raises WorkloadError if the model cannot be traced,
    NotPolynomialError if its figures are no polynomials within the ranges that are tried.
    """
    model = configured_model(configuration, name, dtype, options)
    with quiet(), autocast_of(options):
        tracer = _Tracer(model, on_progress)
        pieces = tuple(tracer.pieces())
        subject = tracer.subject
        facts = traced_model(
            model,
            find_blocks(model),
            subject.uses,
            name=name,
            traced_with="fake",
            row_lookups=subject.row_lookups,
        )
        family = WorkloadFamily(
            model_name=facts.model_name,
            model_hash=facts.model_hash,
            compute_dtype=facts.compute_dtype,
            variables=tracer.variables,
            limits=tracer.limits,
            parameters=facts.parameters,
            block_names=facts.block_names,
            stands_for=facts.stands_for,
            row_lookups=facts.row_lookups,
            structure=structure_of(model, facts.block_names),
            pieces=pieces,
            software=facts.software,
        )
        twin = _TWINS.get(family.compute_dtype) if with_twin else None
        return family if twin is None else _with_twin(family, twin, configuration, name, options)


def _with_twin(
    family: WorkloadFamily, twin: DType, configuration: Mapping[str, Any], name: str, options: TrainingOptions
) -> WorkloadFamily:
    """``family`` with its twin, if a trace of that shows no other difference."""
    model = configured_model(configuration, name, twin, options)
    subject = FakeSubject(model)
    shape = dict(zip(family.variables, family.pieces[-1].proven_at[0], strict=True))
    traced = subject.at(batch_of(model, shape))
    facts = traced_model(
        model, find_blocks(model), subject.uses, name=name, traced_with="fake", row_lookups=subject.row_lookups
    )
    known = family.model_copy(update={"twins": {twin: facts.model_hash}})
    # Some models differ: T5 looks for overflows in float16 alone.
    does_the_same = known.in_dtype(twin).at(
        batch_size=shape[BATCH_SIZE],
        sequence_length=shape.get(SEQUENCE_LENGTH),
        target_length=shape.get(TARGET_LENGTH),
    ) == assemble(facts, traced)
    return known if does_the_same else family


@dataclass(frozen=True)
class _Range:
    """Values of one variable that belong to one piece."""

    least: int
    most: int | None
    fitted: tuple[int, ...]
    """Values to fit to, one more than the degree."""
    proven: tuple[int, ...]
    """Values to compare at, the ends of the range among them."""

    @property
    def degree(self) -> int:
        return len(self.fitted) - 1


class _Tracer:
    """Traces of one model, each shape once."""

    def __init__(self, model: nn.Module, on_progress: Callable[[int, int], None] | None) -> None:
        self._model = model
        self._on_progress = on_progress
        self._done: dict[Shape, TracedShape] = {}
        self.subject = FakeSubject(model)
        self.variables = variables_of(model)
        self.limits: tuple[Limit, ...] = limits_of(model)

    def pieces(self) -> Iterator[FamilyPiece]:
        """All pieces, those of the smallest shapes first."""
        for lengths in self._length_ranges():
            at = tuple(each.fitted[0] for each in lengths)
            if do_the_same(self._at((1, *at)), self._at((_BATCHES[0], *at))):
                yield self._piece([_Range(1, None, _BATCHES, (1, *_PROVEN_BATCHES)), *lengths])
            else:
                lone = [replace(each, proven=each.proven[-1:]) for each in lengths]
                yield self._piece([_Range(1, 1, (1,), (1,)), *lone])
                yield self._piece([_Range(2, None, _BATCHES, _PROVEN_BATCHES), *lengths])

    def _length_ranges(self) -> list[list[_Range]]:
        """The ranges of all variables but the batch's size, for every piece."""
        if SEQUENCE_LENGTH not in self.variables:
            return [[]]
        most = min((limit.most for limit in self.limits), default=None)
        starts = [_SHORTEST]
        window = _window_of(self._model)
        if window is not None and window > _SHORTEST and (most is None or window <= most):
            starts.append(window)
        ends: list[int | None] = [*(start - 1 for start in starts[1:]), most]
        ranges = [_length_range(start, end) for start, end in zip(starts, ends, strict=True)]
        return [[each, each] if TARGET_LENGTH in self.variables else [each] for each in ranges]

    def _piece(self, ranges: Sequence[_Range]) -> FamilyPiece:
        monomials = [
            exponents
            for exponents in product(*(range(each.degree + 1) for each in ranges))
            if sum(exponents[1:]) <= _DEGREE
        ]
        if len(ranges) == 2 and ranges[0].degree:
            with suppress(NotPolynomialError):
                return self._piece_of_few_terms(ranges, monomials)
        # Where exponents are bounded together, the values at the same places determine the polynomials.
        fitted = [tuple(each.fitted[e] for each, e in zip(ranges, places, strict=True)) for places in monomials]
        proven = dict.fromkeys(_proofs(ranges))
        shapes = [*fitted, *(shape for shape in proven if shape not in fitted)]
        traced = {shape: self._at(shape) for shape in shapes}
        return fit_piece(
            {shape: traced[shape] for shape in fitted},
            {shape: traced[shape] for shape in shapes[len(fitted) :]},
            monomials=monomials,
            least=tuple(each.least for each in ranges),
            most=tuple(each.most for each in ranges),
        )

    def _piece_of_few_terms(self, ranges: Sequence[_Range], monomials: Sequence[tuple[int, ...]]) -> FamilyPiece:
        """The piece from five traces, which are enough where no figure has more than three terms."""
        places = ((0, 0), (1, 1), (0, 2))
        fitted = [(ranges[0].fitted[batch], ranges[1].fitted[length]) for batch, length in places]
        proven = [(ranges[0].proven[-1], ranges[1].proven[0]), (ranges[0].proven[-2], ranges[1].proven[-1])]
        return fit_piece(
            {shape: self._at(shape) for shape in fitted},
            {shape: self._at(shape) for shape in proven},
            monomials=monomials,
            least=tuple(each.least for each in ranges),
            most=tuple(each.most for each in ranges),
            most_terms=3,
        )

    def _at(self, shape: Shape) -> TracedShape:
        if shape not in self._done:
            given: dict[str, int | None] = dict(zip(self.variables, shape, strict=True))
            self._done[shape] = self.subject.at(batch_of(self._model, given))
        if self._on_progress is not None:
            self._on_progress(min(len(self._done), _ABOUT), _ABOUT)
        return self._done[shape]


def _length_range(least: int, most: int | None) -> _Range:
    end = _LONGEST_PROVEN if most is None else most
    if end - least < 2 * _DEGREE:
        raise WorkloadError(f"sequences of {least} to {most} tokens are too few shapes to fit a family to. Trace one.")
    fitted = tuple(least - _SHORTEST + length for length in _LENGTHS)
    if fitted[-1] >= end:
        fitted = (least + 1, (least + end) // 2, end - 1)
    return _Range(least, most, fitted, (least, end))


def _proofs(ranges: Sequence[_Range]) -> Iterator[Shape]:
    """Shapes at the ends of the ranges: each end of each at least once, and lengths unequal where there are two."""
    for place in range(max(len(each.proven) for each in ranges)):
        yield tuple(each.proven[(place + i) % len(each.proven)] for i, each in enumerate(ranges))


def _window_of(model: Any) -> int | None:
    """Tokens from which on a sliding window makes masks; None where it makes none, or always."""
    config = model.config
    window = getattr(config, "sliding_window", None)
    is_used = getattr(config, "use_sliding_window", True) and config._attn_implementation == "sdpa"
    return window if isinstance(window, int) and is_used else None
