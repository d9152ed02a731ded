"""From a family of workloads to what ranks do that share its sequences: traces of one rank, and polynomials of them."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from typing import Any, Final

from torch import nn

from ...shared.basics.errors import ProtwinError
from ...shared.basics.gc_pause import gc_paused
from ...shared.families.family import BATCH_SIZE, SEQUENCE_LENGTH, FamilyPiece, OutsideFamilyError, WorkloadFamily
from ...shared.families.sharings import FamilySharings, SharedPiece
from ...shared.families.tilings import LEAST_TILE, FamilyTilings, TiledPiece
from ...shared.observed.assembly import TracedShape
from ...shared.schema.schedule import OuterSection
from ...shared.schema.training_options import FULL_TRAINING
from ..model.blocks import find_blocks
from ..model.configurations import quiet
from ..sequences.exchange import allowed_ranks
from ..sequences.sharing import check_model, heads_of
from ..tiles.mlp_modules import Mlps, find_mlps
from ..tracing.configurations import batch_of, configured_model
from ..tracing.fake_subject import FakeSubject
from .family_fit import NotPolynomialError
from .few_terms import MOST_TERMS
from .sharing_fit import SharedTrace, SharingFit, Values, are_alike
from .tiled_fit import TiledFit, TilesNotPolynomialError

_OFFSETS: Final = (35, 51, 99, 14, 62)
"""Of a rank's own tokens over the shortest, in traces."""
_LONGEST: Final = 131_101
_BATCHES: Final = (2, 3, 7, 2, 5)
_SEVERAL: Final = 5
"""Traces for several numbers of ranks."""
_ONE_NUMBER: Final = 4
_TILED: Final = 4
"""Traces with tiles."""
_FURTHER: Final = ((5, 24), (2, 72), (3, 7), (7, 45))
"""Batches, and own tokens over the shortest, of traces with tiles where figures of the loss have more terms."""
_MORE_TERMS: Final = 5
_PROOFS: Final = 3
"""Traces more than such figures have terms."""

_Tiled = dict[tuple[int, ...], TracedShape]
"""Traces by batch, own tokens, ranks and tiles."""


@gc_paused()
def sharings_of_family(
    family: WorkloadFamily, tilings: FamilyTilings | None, configuration: Mapping[str, Any], *, name: str
) -> tuple[FamilySharings | None, list[str]]:
    """What one of several ranks does that share sequences of a shipped kind of family; None if nothing is known.

    Beside it the reasons of what is not known: classes of numbers of ranks, tiles.
    """
    if family.variables != (BATCH_SIZE, SEQUENCE_LENGTH):
        return None, ["ranks share sequences of models of one sequence alone."]
    model = configured_model(configuration, name, family.compute_dtype, FULL_TRAINING)
    heads = heads_of(model)
    numbers = [ranks for ranks in allowed_ranks(*heads) if ranks > 1] if heads is not None else []
    if heads is None or not numbers:
        return None, ["it has no heads of attention that ranks could divide."]
    try:
        check_model(model, numbers[0])
    except ProtwinError as error:
        return None, [str(error)]
    with quiet():
        tracer = _Tracer(model, family, tilings)
        pieces = tracer.pieces([list(same) for _, same in groupby(numbers, partial(_class_of, *heads))])
    if not pieces:
        return None, tracer.why
    return tracer.fit.document(losses=tuple(tracer.losses), pieces=tuple(pieces)), tracer.why


def _class_of(num_heads: int, num_key_heads: int, ranks: int) -> tuple[bool, bool]:
    """What makes one program of several numbers of ranks: replicas of key-value heads, and more than one query head."""
    return ranks > num_key_heads, ranks == num_heads


@dataclass
class _Tracer:
    """Traces of one rank of a model."""

    model: nn.Module
    family: WorkloadFamily
    tilings: FamilyTilings | None
    why: list[str] = field(default_factory=list)
    losses: list[TiledPiece] = field(default_factory=list)

    def __post_init__(self) -> None:
        facts = {name: getattr(self.family, name) for name in ("model_name", "model_hash", "compute_dtype", "software")}
        self.fit = SharingFit(facts)
        self._subject = FakeSubject(self.model)
        self._mlps: Mlps = ()
        if self.tilings is not None and self.tilings.modules:
            self._mlps = find_mlps(find_blocks(self.model))

    def pieces(self, classes: Sequence[Sequence[int]]) -> list[SharedPiece]:
        """All that can be fitted; ``classes``: numbers of ranks that make one program each."""
        found: list[SharedPiece] = []
        # Batches of one last: most of what they do is what others do.
        for piece in sorted(self.family.pieces, key=lambda piece: piece.most[0] == 1):
            own: list[SharedPiece] = []
            for ranks in classes:
                own += self._untiled(piece, ranks, [*found, *own])
            found += self._tiled(piece, own, found) if self.tilings is not None and own else own
        return found

    def _untiled(self, piece: FamilyPiece, ranks: Sequence[int], known: Sequence[SharedPiece]) -> list[SharedPiece]:
        base = next(i for i, one in enumerate(self.family.pieces) if _batches(one) == _batches(piece))
        like = [one for one in known if one.ranks == tuple(ranks)]
        like += [one for one in known if (one.least, one.most) == (piece.least, piece.most)]
        try:
            traced = [self._trace(base, values) for values in _shapes(piece, ranks)]
            made = self.fit.piece(
                traced,
                like,
                ranks=tuple(ranks),
                least=piece.least,
                most=piece.most,
                base=base,
                traced_at=tuple(one.values for one in traced),
            )
            return [made]
        except NotPolynomialError as error:
            self.why.append(f"{', '.join(map(str, ranks))} ranks: {error}")
            return []

    def _trace(self, base: int, values: Values) -> SharedTrace:
        batch, tokens, ranks = values
        self._subject.sequence_ranks = ranks
        found = self._subject.at(batch_of(self.model, _given(values)))
        whole = (batch, tokens * ranks)
        facts = self.family.piece_at(whole).facts_at(whole)
        assert (facts.batch_shapes, facts.num_tokens) == (found.batch_shapes, found.num_tokens)
        return SharedTrace(values, self.family.pieces[base].shape_at((batch, tokens)), found)

    def _tiled(
        self, piece: FamilyPiece, own: Sequence[SharedPiece], known: Sequence[SharedPiece]
    ) -> Iterator[SharedPiece]:
        """``own``, pieces of one range, with what traces in tiles say of them."""
        assert self.tilings is not None
        # One of each class of ranks, all of other tokens and tiles.
        known_shapes = [_tiled_shapes(piece, part.ranks) for part in own]
        shapes = [of_part[place % len(of_part)] for place, of_part in enumerate(known_shapes)]
        tokens = {shape[:2] for shape in shapes}
        more = [shape for of_part in known_shapes for shape in of_part if shape[:2] not in tokens]
        like = next((one.loss for one in known if one.least[1] == piece.least[1] and one.loss is not None), None)
        traced: _Tiled = {shape: self._trace_in_tiles(shape) for shape in shapes}
        loss = like
        if self.tilings.why_no_loss_tiles is not None:
            loss = None
        elif like is None or not all(self._meets(like, shape, found) for shape, found in traced.items()):
            traced |= {shape: self._trace_in_tiles(shape) for shape in more[: max(0, _TILED - len(traced))]}
            loss = self._loss(piece, traced, [ranks for part in own for ranks in part.ranks])
        for part in own:
            of_part = {shape: found for shape, found in traced.items() if shape[2] in part.ranks}
            yield part.model_copy(update={"loss": loss, "has_mlp_tiles": self._has_mlp_tiles(part, of_part)})

    def _trace_in_tiles(self, shape: tuple[int, ...]) -> TracedShape:
        *values, num_tiles = shape
        assert self.tilings is not None
        subject = FakeSubject(self.model, loss_tiles=num_tiles if self.tilings.why_no_loss_tiles is None else 1)
        subject.sequence_ranks = values[-1]
        with subject.in_tiles(self._mlps, num_tiles if self._mlps else 1):
            return subject.at(batch_of(self.model, _given(tuple(values))))

    def _loss(self, piece: FamilyPiece, traced: _Tiled, ranks: Sequence[int]) -> int | None:
        """Index of what ``traced`` do in head and loss; further traces are added to them where these are too few.

        When a model returns, its frames let several tensors go at once, which is a figure of as many terms.
        """
        try:
            return self._fitted_loss(piece, traced, MOST_TERMS)
        except TilesNotPolynomialError:
            further = _further_shapes(piece, ranks, {shape[:2] for shape in traced})
            traced |= {shape: self._trace_in_tiles(shape) for shape in further}
        try:
            return self._fitted_loss(piece, traced, min(_MORE_TERMS, len(traced) - _PROOFS))
        except TilesNotPolynomialError as error:
            self.why.append(str(error))
            return None

    def _fitted_loss(self, piece: FamilyPiece, traced: _Tiled, most_terms: int) -> int:
        fit = TiledFit.of_ranks(piece, {shape[2] for shape in traced}, most_terms)
        seen = [(shape[:-1], found.observed) for shape, found in traced.items()]
        places = fit.places(seen, lambda key: key[1] is OuterSection.EPILOGUE)
        self.losses.append(fit.piece(loss_places=tuple(places), traced_at=tuple(traced)))
        return len(self.losses) - 1

    def _meets(self, loss: int, shape: tuple[int, ...], found: TracedShape) -> bool:
        *values, num_tiles = shape
        tiled = self.losses[loss]
        try:
            made = tiled.changed(found, tuple(values), tiled.loss_places, num_tiles, notes_squares=False)
        except OutsideFamilyError:
            return False
        return are_alike(made.observed, found.observed, lambda key: key[1] is OuterSection.EPILOGUE)

    def _has_mlp_tiles(self, part: SharedPiece, traced: _Tiled) -> bool:
        if not self._mlps or not traced:
            return False
        assert self.tilings is not None
        base = self.family.pieces[part.base]
        for (batch, tokens, ranks, num_tiles), found in traced.items():
            whole = base.shape_at((batch, tokens))
            with suppress(OutsideFamilyError):
                tiled = self.tilings.mlp_change(self.family, num_tiles)(whole, base, (batch, tokens))
                places = tuple(place for place in part.places if not isinstance(place.section, OuterSection))
                made = self.fit.edited(places, tiled, whole, (batch, tokens, ranks))
                if are_alike(made, found.observed, lambda _: True):
                    continue
            self.why.append(f"{ranks} ranks do other things in tiles of MLPs than ranks and tiles apart.")
            return False
        return True


def _given(values: Values) -> dict[str, int | None]:
    batch, tokens, ranks = values
    return {BATCH_SIZE: batch, SEQUENCE_LENGTH: tokens * ranks, "target_length": None}


def _batches(piece: FamilyPiece) -> tuple[int, int | None]:
    return piece.least[0], piece.most[0]


def _range_of_tokens(piece: FamilyPiece, ranks: int) -> tuple[int, int]:
    return max(2, -(-piece.least[1] // ranks)), (piece.most[1] or _LONGEST) // ranks


def _tokens(piece: FamilyPiece, ranks: int, count: int) -> list[int]:
    """So many numbers of a rank's own tokens, the longest among them."""
    least, end = _range_of_tokens(piece, ranks)
    wanted = [min(least + offset, end) for offset in _OFFSETS]
    wanted[2] = end
    if len(set(wanted)) < len(wanted):
        wanted = [least + (end - least) * part // len(wanted) for part in range(1, len(wanted) + 1)]
    return wanted[:count]


def _shapes(piece: FamilyPiece, ranks: Sequence[int]) -> list[tuple[int, int, int]]:
    """Batches, tokens and ranks to trace at, each number of ranks among them."""
    is_lone = piece.most[0] == 1
    # Figures of batches of one know no batch.
    count = (max(_SEVERAL, len(ranks)) if len(ranks) > 1 else _ONE_NUMBER) - is_lone
    batches = (1,) if is_lone else _BATCHES if piece.least[0] > 1 else (1, *_BATCHES)
    found = []
    for i in range(count):
        # A batch of one begins with the numbers that others end with.
        number = ranks[(-1 - i if is_lone else i) % len(ranks)]
        tokens = _tokens(piece, number, len(_OFFSETS))
        found.append((batches[i % len(batches)], tokens[i % len(tokens)], number))
    return found


def _tiled_shapes(piece: FamilyPiece, ranks: Sequence[int]) -> list[tuple[int, int, int, int]]:
    """Shapes of ``_shapes``, each with a number of tiles of unequal lengths."""
    return [(*shape, _count_of_tiles(i, shape)) for i, shape in enumerate(_shapes(piece, ranks)[:_TILED])]


def _further_shapes(
    piece: FamilyPiece, ranks: Sequence[int], known: Collection[tuple[int, ...]]
) -> list[tuple[int, int, int, int]]:
    """The same of other batches and tokens than those ``known``, with these numbers of ranks in turns."""
    found = []
    for i, (batch, offset) in enumerate(_FURTHER):
        number = ranks[i % len(ranks)]
        least, end = _range_of_tokens(piece, number)
        shape = (1 if piece.most[0] == 1 else batch, least + offset % (end - least + 1), number)
        if shape[:2] not in known:
            found.append((*shape, _count_of_tiles(i, shape)))
    return found


def _count_of_tiles(place: int, shape: Values) -> int:
    """Tiles of unequal lengths: of the second shape one is longer, of others several, where that can be."""
    own = shape[0] * shape[1]
    counts = [n for n in range(2 if place == 1 else 3 + place, 12 + place) if own % n and own // n >= LEAST_TILE]
    wanted = [n for n in counts if (own % n == 1) == (place == 1)]
    return (wanted or counts or [2])[0]
