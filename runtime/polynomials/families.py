"""From a model's configuration to its family of workloads: traces at a few shapes, and polynomials through them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any, Final

from torch import nn

from ...shared.basics.errors import ProtwinError, WorkloadError
from ...shared.basics.gc_pause import gc_paused
from ...shared.families.family import (
    BATCH_SIZE,
    SEQUENCE_LENGTH,
    TARGET_LENGTH,
    FamilyPiece,
    FamilyPlace,
    Limit,
    WorkloadFamily,
)
from ...shared.families.tilings import LEAST_TILE, FamilyTilings, TiledPiece
from ...shared.observed.assembly import TracedShape, assemble
from ...shared.observed.observation import Observation
from ...shared.observed.observed_inputs import PhaseKey
from ...shared.schema.schedule import OuterSection
from ...shared.schema.training_options import FULL_TRAINING, TrainingOptions
from ...shared.schema.workload import DType
from ..model.blocks import find_blocks
from ..model.configurations import quiet
from ..model.identity import structure_of
from ..tiles.mlp_modules import Mlps, find_mlps, names_of
from ..tracing.configurations import autocast_of, batch_of, configured_model, limits_of, variables_of
from ..tracing.facts import traced_model
from ..tracing.fake_subject import FakeSubject
from .family_fit import NotPolynomialError, Shape, do_the_same, fit_piece
from .tiled_fit import Seen, TiledFit, TilesNotPolynomialError

_BATCHES: Final = (2, 3)
"""Figures are of first degree in the batch's size.  A batch of one is another piece where it is another program."""
_PROVEN_BATCHES: Final = (7, 29)
_LENGTHS: Final = (37, 53, 101)
"""Figures are of second degree in a sequence's length."""
_LONGEST_PROVEN: Final = 131_101
_SHORTEST: Final = 2
"""A sequence of one token is no sequence: transposed copies become views."""
_DEGREE: Final = 2
_MANY_TILES: Final = 8
"""In the trace of the shortest tiles."""
_ABOUT: Final = 9
"""Traces that most models need, for progress."""
_PARTS: Final = ("mlp", "loss")
"""What runs in tiles."""
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


@gc_paused()
def tilings_of_family(
    family: WorkloadFamily, configuration: Mapping[str, Any], *, name: str
) -> tuple[FamilyTilings | None, list[str]]:
    """What the shipped kind of family does in any number of tiles; None, with the reasons, if it knows none.

    Some reasons may be given beside what is known: a model may have tiles of the loss and none of MLPs.
    """
    model = configured_model(configuration, name, family.compute_dtype, FULL_TRAINING)
    why: dict[str, str] = {}
    mlps: Mlps = ()
    if family.variables != (BATCH_SIZE, SEQUENCE_LENGTH):
        return None, ["only models of one sequence have tiles without a trace"]
    with quiet():
        blocks = find_blocks(model)
        try:
            mlps = find_mlps(blocks)
        except ProtwinError as error:
            why["mlp"] = str(error)
        tracer = _TiledTracer(model, family, mlps)
        # In one shape each part has tiles alone: what one does must not depend on the other.
        piece = family.pieces[-1]
        shape = _tiled_shapes(piece)[-1]
        alone = {}
        for part in (part for part in _PARTS if part not in why):
            try:
                alone[part] = tracer.at(piece, shape, (part,))
            except ProtwinError as error:
                why[part] = str(error)
        if not alone:
            return None, list(why.values())
        pieces: list[TiledPiece] = []
        for piece in family.pieces:
            found, reasons = tracer.piece(piece, alone)
            why |= reasons
            pieces.append(found)
    if len(why) == 2:
        return None, list(why.values())
    tilings = FamilyTilings(
        model_name=family.model_name,
        model_hash=family.model_hash,
        compute_dtype=family.compute_dtype,
        modules=() if "mlp" in why else names_of(blocks, mlps),
        why_no_mlp_tiles=why.get("mlp"),
        why_no_loss_tiles=why.get("loss"),
        pieces=tuple(pieces),
        software=family.software,
    )
    return tilings, list(why.values())


class _TiledTracer:
    """Traces of one model in tiles."""

    def __init__(self, model: nn.Module, family: WorkloadFamily, mlps: Mlps) -> None:
        self._model, self._family, self._mlps = model, family, mlps

    def at(self, piece: FamilyPiece, shape: Sequence[int], parts: Collection[str]) -> Seen:
        """One trace with ``parts`` in tiles, whose other parts are those of the family.

        ``shape`` ends with the number of tiles.  Raises TilesNotPolynomialError if they are not, and what a trace
        raises.
        """
        *values, tiles = shape
        mlp_tiles, loss_tiles = (tiles if part in parts else 1 for part in _PARTS)
        subject = FakeSubject(self._model, loss_tiles=loss_tiles)
        with subject.in_tiles(self._mlps, mlp_tiles):
            given: dict[str, int | None] = dict(zip(self._family.variables, values, strict=True))
            found = subject.at(batch_of(self._model, given))
        known = piece.shape_at(tuple(values))
        if found.shared_inputs != known.shared_inputs:
            raise TilesNotPolynomialError(f"blocks are given other tensors in tiles at {list(shape)}.")
        for mode, sections in known.observed.items():
            for key, seen in sections.items():
                is_tiled = any(_belongs(key, part) for part in parts)
                if not is_tiled and not _are_alike(seen, found.observed[mode][key]):
                    raise TilesNotPolynomialError(
                        f"{key[0]} of {key[1]} in mode {mode} does other things with tiles elsewhere, at {list(shape)}."
                    )
        return found.observed

    def piece(self, piece: FamilyPiece, alone: Mapping[str, Seen]) -> tuple[TiledPiece, dict[str, str]]:
        """What belongs to a piece, of the parts that can have tiles, and why one has none after all.

        ``alone``: for each part, its trace in the last shape of the family's last piece.
        """
        shapes = _tiled_shapes(piece)
        is_last = piece is self._family.pieces[-1]
        traced = [self.at(piece, shape, alone) for shape in (shapes[:-1] if is_last else shapes)]
        fit = TiledFit.of_piece(piece)
        why: dict[str, str] = {}
        places: dict[str, list[FamilyPlace]] = {}
        for part, own in alone.items():
            seen = [(shape[:-1], found) for shape, found in zip(shapes, [*traced, own], strict=False)]
            try:
                places[part] = fit.places(seen, partial(_belongs, part=part))
            except TilesNotPolynomialError as error:
                why[part] = str(error)
        found = fit.piece(
            mlp_places=tuple(places.get("mlp", ())), loss_places=tuple(places.get("loss", ())), traced_at=tuple(shapes)
        )
        return found, why


def _belongs(key: PhaseKey, part: str) -> bool:
    """Whether a section is one that changes where a part runs in tiles."""
    return key[1] is OuterSection.EPILOGUE if part == "loss" else not isinstance(key[1], OuterSection)


def _are_alike(known: Observation, found: Observation) -> bool:
    names = ("calls", "levels", "adding_levels", "net_bytes", "gradient_bytes", "output_bytes", "saved_bytes")
    return all(getattr(known, name) == getattr(found, name) for name in names)


def _tiled_shapes(piece: FamilyPiece) -> list[tuple[int, ...]]:
    """Shapes in a piece's range, each with a number of tiles: tiles of one length and of two, and the shortest."""
    (_, least), (most_batch, most) = piece.least, piece.most
    batches = (1,) * 4 if most_batch == 1 else (2, 3, 7, 5)
    end = _LONGEST_PROVEN if most is None else most
    fitted = _length_range(least, most).fitted
    lengths = [fitted[0], fitted[2], end, max(least, 5 * _MANY_TILES // 2 // batches[-1])]
    found: list[tuple[int, ...]] = []
    for number, (batch, length) in enumerate(zip(batches, lengths, strict=True)):
        tokens = batch * length
        # One longer tile in some, several in others.
        wants_one = number == 1
        counts = [n for n in range(2 if wants_one else 3, 12) if tokens % n and (tokens % n == 1) == wants_one]
        tiles = next(iter(counts), 3) if number < 3 else min(_MANY_TILES, tokens // LEAST_TILE - 1)
        found.append((batch, length, tiles))
    return found


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
