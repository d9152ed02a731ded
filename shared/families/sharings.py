"""What a family of workloads does where ranks share each sequence, as one of these ranks.

[Note: What is polynomial of shared sequences]
A rank does what the whole would do with its own tokens, except in attention, which has all tokens of its part of the
heads and exchanges ahead of it and behind, and in the prologue, which makes positions and masks of the whole.  So what
a rank does is the family's section at its own tokens with one stretch of operations in the place of another: an edit.
Its figures are polynomials of the batch's size, of a rank's own tokens and of the number of ranks, over that number
again: each rank has a part of the heads.

Numbers of ranks make other programs.  Where there are more ranks than key-value heads, gradients of replicas are added
up; where each has one query head, copies become views.  So there is a piece for each class of such numbers.

[Note: Edits in tiles]
Tiles of an MLP change another stretch of a block's section than attention.  An edit is therefore made in tiles too,
wherever the section in tiles has what the edit replaces, with all that lies before it, or with all that lies behind it.
Tiles of the loss have figures of their own, since the loss of a part of a sequence is another sum.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import prod
from typing import ClassVar, Final, Self

from pydantic import NonNegativeInt, PositiveInt, model_validator

from ..basics.documents import Document, FrozenModel
from ..observed.assembly import TracedModel, TracedShape
from ..observed.observation import Observation, Repeated
from ..observed.observed_inputs import PhaseKey
from ..schema.plan import ActivationMode
from ..schema.workload import DType, Workload
from .calls import FamilyCall, Number, call_at
from .family import Change, FamilyPiece, FamilyPlace, FamilySharedInput, OutsideFamilyError, WorkloadFamily, phase_key
from .tilings import FamilyTilings, TiledPiece, TiledRun
from .variants import checked_tiles, with_loss_tilings, with_sharings, with_tilings


class SharedEdit(FrozenModel):
    """One stretch of a section's operations in the place of another, and what else differs."""

    begin: NonNegativeInt
    """Index of the first operation that goes."""
    end: NonNegativeInt
    """Index behind the last one."""
    run: TiledRun
    """What comes in their place."""
    rest: Number
    """By how much more the level changes behind the last operation."""
    gradient: Number
    output: Number
    saved_begin: NonNegativeInt = 0
    """The same of the storages that a block's forward saves."""
    saved_end: NonNegativeInt = 0
    saved: tuple[Number, ...] = ()
    exchanges: tuple[Number, ...] = ()
    """Bytes that the rank gives into each all-to-all."""


class SharedPiece(FrozenModel):
    """Numbers of ranks and a range of shapes in which one rank does the same things."""

    ranks: tuple[PositiveInt, ...]
    least: tuple[PositiveInt, ...]
    """Smallest batch, and shortest whole sequence."""
    most: tuple[PositiveInt | None, ...]
    base: NonNegativeInt
    """The family's piece that is edited, at a rank's own tokens."""
    places: tuple[FamilyPlace, ...]
    """``seen``: index into ``edits``."""
    shared_inputs: tuple[FamilySharedInput, ...] = ()
    resident: Number
    loss: int | None = None
    """Index into ``losses``; None: nothing is known of tiles of the loss."""
    has_mlp_tiles: bool = False
    """Whether edits were compared with traces whose MLPs run in tiles."""
    traced_at: tuple[tuple[PositiveInt, ...], ...]
    """Batch, a rank's own tokens and number of ranks of traces that every figure meets."""

    def holds(self, batch_size: int, sequence_length: int, ranks: int) -> bool:
        """Whether one of so many ranks that share such sequences is known."""
        values = zip((batch_size, sequence_length), self.least, self.most, strict=True)
        return ranks in self.ranks and all(least <= v and (most is None or v <= most) for v, least, most in values)


class FamilySharings(Document):
    """What one rank of several does that share each sequence, of a family of workloads."""

    KIND: ClassVar[str] = "family_sharings"

    model_name: str
    model_hash: str
    compute_dtype: DType
    monomials: tuple[tuple[int, ...], ...]
    """Exponents of the batch's size, of a rank's own tokens and of the number of ranks, which is one higher."""
    denominator: PositiveInt = 1
    polynomials: tuple[tuple[tuple[int, int], ...], ...]
    """(monomial, coefficient) of each term."""
    calls: tuple[FamilyCall, ...]
    edits: tuple[SharedEdit, ...]
    losses: tuple[TiledPiece, ...] = ()
    """Head and loss of a rank in tiles of its own tokens."""
    pieces: tuple[SharedPiece, ...]
    beside: str = ""
    """Digest of the family that is edited (``runtime/polynomials/freshness.py``); empty for none."""
    fingerprint: str = ""
    """Of the code that they were fitted with, by a small model of the same architecture; empty where nobody asked."""
    software: dict[str, str] = {}

    @model_validator(mode="after")
    def _is_consistent(self) -> Self:
        runs = [edit.run for edit in self.edits]
        if any(not len(run.calls) == len(run.steps) == len(run.adding) for run in runs):
            raise ValueError("a run needs one level for each of its calls")
        if any(not 0 <= call < len(self.calls) for run in runs for call in run.calls):
            raise ValueError(f"a run names a call beyond the {len(self.calls)} that there are")
        if any(not 0 <= place.seen < len(self.edits) for piece in self.pieces for place in piece.places):
            raise ValueError(f"a place names an edit beyond the {len(self.edits)} that there are")
        if any(piece.loss is not None and not 0 <= piece.loss < len(self.losses) for piece in self.pieces):
            raise ValueError(f"a piece names a loss beyond the {len(self.losses)} that there are")
        if any(not 0 <= i < len(self.monomials) for row in self.polynomials for i, _ in row):
            raise ValueError(f"a polynomial names a monomial beyond the {len(self.monomials)} that there are")
        return self

    def workload(
        self,
        whole: Workload,
        family: WorkloadFamily,
        tilings: FamilyTilings | None,
        *,
        sequence_ranks: Sequence[int],
        mlp_tiles: Sequence[int] = (),
        loss_tiles: Sequence[int] = (),
    ) -> Workload:
        """``whole``, a workload of ``family``, that knows numbers of ranks: what a trace gives, figure by figure.

        ``mlp_tiles``, ``loss_tiles``: of a rank's own tokens, by the family's ``tilings``.  Raises WorkloadError as
        ``checked_tiles``; OutsideFamilyError if nothing was proven there.
        """
        assert self.model_hash == family.model_hash, "sharings of another family"
        batch_size = whole.num_samples
        at = partial(_Shared, self, family, batch_size, whole.num_tokens // batch_size)
        found = {}
        for ranks in sequence_ranks:
            one = at(ranks)
            shared = one.workload()
            counts = checked_tiles(mlp_tiles, whole.num_tokens // ranks)
            modules = tilings.modules if tilings is not None else ()
            shared = with_tilings(shared, {n: one.workload(one.in_mlp_tiles(tilings, n)) for n in counts}, modules)
            of_loss = sorted(set(loss_tiles) - {1})
            found[ranks] = with_loss_tilings(shared, {n: one.workload(one.in_loss_tiles(n)) for n in of_loss})
        return with_sharings(whole, found)

    def edited(
        self,
        places: Sequence[FamilyPlace],
        seen: Mapping[ActivationMode, Mapping[PhaseKey, Observation]],
        base: Mapping[ActivationMode, Mapping[PhaseKey, Observation]],
        values: tuple[int, ...],
    ) -> dict[ActivationMode, dict[PhaseKey, Observation]]:
        """The sections at ``places`` as a rank does them, by its edits of ``seen``.

        ``seen``: the family's at the rank's own tokens, as in ``base`` or in tiles.  ``values``: batch, own tokens,
        ranks.  Raises OutsideFamilyError if tiles changed what an edit replaces.
        """
        numbers = _Numbers(self, values)
        observed: dict[ActivationMode, dict[PhaseKey, Observation]] = {}
        for place in places:
            key = phase_key((place.kind, place.section))
            found = self._made(self.edits[place.seen], seen[place.mode][key], base[place.mode][key], numbers)
            if found is None:
                raise OutsideFamilyError(f"nothing is known exactly of {self.model_name} in tiles and shared.")
            observed.setdefault(place.mode, {})[key] = found
        return observed

    def _made(self, edit: SharedEdit, seen: Observation, base: Observation, numbers: _Numbers) -> Observation | None:
        """``seen`` with an edit of ``base``; None if it does not have what the edit replaces."""
        begin = _place_of(edit, seen, base)
        saved_begin = _saved_place(edit, seen, base)
        if begin is None or saved_begin is None:
            return None
        calls = [call_at(self.calls[index], numbers) for index in edit.run.calls]
        end, more = begin + edit.end - edit.begin, len(calls) - (edit.end - edit.begin)
        before = _level_before(seen, begin)
        levels, adding_levels, level = [], [], before
        for step, adding in zip(edit.run.steps, edit.run.adding, strict=True):
            level += numbers[step]
            levels.append(level)
            adding_levels.append(level + numbers[adding])
        higher = level - (seen.levels[end - 1] if end > begin else before)
        levels_now = [*seen.levels[:begin], *levels, *(level + higher for level in seen.levels[end:])]
        saved_end = saved_begin + edit.saved_end - edit.saved_begin
        saved = [numbers[size] for size in edit.saved]
        return Observation(
            0,
            end_bytes=seen.net_bytes + higher + numbers[edit.rest],
            operations=[*seen.operations[:begin], *(call.operation() for call in calls), *seen.operations[end:]],
            calls=[*seen.calls[:begin], *calls, *seen.calls[end:]],
            levels=levels_now,
            adding_levels=[
                *seen.adding_levels[:begin],
                *adding_levels,
                *(level + higher for level in seen.adding_levels[end:]),
            ],
            gradient_bytes=seen.gradient_bytes + numbers[edit.gradient],
            output_bytes=seen.output_bytes + numbers[edit.output],
            saved_bytes=[*seen.saved_bytes[:saved_begin], *saved, *seen.saved_bytes[saved_end:]],
            exchanges=[numbers[size] for size in edit.exchanges],
            passes=[(place if place <= begin else place + more, tokens) for place, tokens in seen.passes],
            repeated=tuple(
                one if one.end <= begin else Repeated(one.begin + more, one.end + more, one.count, one.net_bytes)
                for one in seen.repeated
            ),
        )


def _place_of(edit: SharedEdit, seen: Observation, base: Observation) -> int | None:
    """Where ``seen`` has the operations of ``base`` that an edit replaces ([Note: Edits in tiles]); None if nowhere."""
    if edit.end > len(base.calls):
        return None  # fitted to another piece
    if seen is base:
        return edit.begin
    first_repeated = seen.repeated[0].begin if seen.repeated else len(seen.calls)
    if edit.end <= first_repeated and all(
        getattr(seen, name)[: edit.end] == getattr(base, name)[: edit.end] for name in _BY_OPERATION
    ):
        return edit.begin
    begin = edit.begin + len(seen.calls) - len(base.calls)
    last_repeated = seen.repeated[-1].end if seen.repeated else 0
    if begin < last_repeated or seen.calls[begin:] != base.calls[edit.begin :]:
        return None
    higher = _level_before(seen, begin) - _level_before(base, edit.begin)
    has_same = all(
        getattr(seen, name)[begin:] == [level + higher for level in getattr(base, name)[edit.begin :]]
        for name in ("levels", "adding_levels")
    )
    return begin if has_same else None


_BY_OPERATION: Final = ("calls", "levels", "adding_levels")


def rest_bytes(seen: Observation) -> int:
    """By how much the level changes behind the last operation."""
    return seen.net_bytes - _level_before(seen, len(seen.calls))


def _level_before(seen: Observation, place: int) -> int:
    """The level when the operation at ``place`` begins."""
    if place == 0:
        return 0
    more = next((one for one in seen.repeated if one.end == place), None)
    return seen.levels[place - 1] + ((more.count - 1) * more.net_bytes if more is not None else 0)


def _saved_place(edit: SharedEdit, seen: Observation, base: Observation) -> int | None:
    """Where ``seen`` has the saved storages of ``base`` that an edit replaces; None if nowhere."""
    if edit.saved_end > len(base.saved_bytes):
        return None
    if seen.saved_bytes[: edit.saved_end] == base.saved_bytes[: edit.saved_end]:
        return edit.saved_begin
    begin = edit.saved_begin + len(seen.saved_bytes) - len(base.saved_bytes)
    return begin if begin >= 0 and seen.saved_bytes[begin:] == base.saved_bytes[edit.saved_begin :] else None


class _Shared:
    """One rank of a family at one shape and number of ranks."""

    def __init__(
        self, sharings: FamilySharings, family: WorkloadFamily, batch_size: int, sequence_length: int, ranks: int
    ) -> None:
        """Raises OutsideFamilyError if nothing was proven there."""
        piece = next((one for one in sharings.pieces if one.holds(batch_size, sequence_length, ranks)), None)
        own, rest = divmod(sequence_length, ranks)
        if piece is None or rest or own < family.pieces[piece.base].least[1]:
            raise OutsideFamilyError(
                f"nothing is known exactly of {ranks} ranks that share {batch_size} sequences of {sequence_length} "
                f"tokens of {family.model_name}."
            )
        self._sharings, self._family, self._piece = sharings, family, piece
        self._whole = (batch_size, sequence_length)
        self._own = (batch_size, own)
        self._values = (*self._own, ranks)
        self._base = self._edited_piece.shape_at(self._own)

    @property
    def _edited_piece(self) -> FamilyPiece:
        return self._family.pieces[self._piece.base]

    def workload(self, changed: TracedShape | None = None) -> Workload:
        """What the rank does, of sections as they are or as ``changed`` has them."""

        def traced() -> tuple[TracedModel, TracedShape]:
            return self._family.traced_model(), changed if changed is not None else self._shape(self._base)

        return self._family.assembled(traced, self._whole)

    def in_mlp_tiles(self, tilings: FamilyTilings | None, num_tiles: int) -> TracedShape:
        """Raises OutsideFamilyError if nothing is known of them."""
        if tilings is None or not self._piece.has_mlp_tiles:
            raise OutsideFamilyError(f"nothing is known exactly of {self._family.model_name} in tiles and shared.")
        return self._shape(self._in_tiles(tilings.mlp_change(self._family, num_tiles)))

    def in_loss_tiles(self, num_tiles: int) -> TracedShape:
        """Raises OutsideFamilyError if nothing is known of them."""
        if self._piece.loss is None:
            raise OutsideFamilyError(f"nothing is known exactly of the loss of {self._family.model_name} in tiles.")
        tiled = self._sharings.losses[self._piece.loss]
        return tiled.changed(self._shape(self._base), self._values, tiled.loss_places, num_tiles, notes_squares=False)

    def _in_tiles(self, change: Change) -> TracedShape:
        return change(self._base, self._edited_piece, self._own)

    def _shape(self, own: TracedShape) -> TracedShape:
        """What a trace of the rank sees, of sections at its own tokens."""
        numbers = _Numbers(self._sharings, self._values)
        whole = self._family.piece_at(self._whole).facts_at(self._whole)
        return replace(
            whole,
            resident_bytes=numbers[self._piece.resident],
            observed=self._sharings.edited(self._piece.places, own.observed, self._base.observed, self._values),
            shared_inputs=tuple(given.at(numbers[given.size]) for given in self._piece.shared_inputs),
            staying_inputs=self._base.staying_inputs,
            sequence_ranks=self._values[-1],
        )


class _Numbers:
    """Values of the polynomials, each computed when it is asked for."""

    def __init__(self, sharings: FamilySharings, values: tuple[int, ...]) -> None:
        self._sharings = sharings
        self._powers = [
            prod(value**exponent for value, exponent in zip(values, exponents, strict=True))
            for exponents in sharings.monomials
        ]
        self._divisor = sharings.denominator * values[-1]

    def __getitem__(self, number: Number) -> int:
        total: int = sum(c * self._powers[i] for i, c in self._sharings.polynomials[number])
        found, rest = divmod(total, self._divisor)
        if rest:
            raise OutsideFamilyError(f"nothing is known exactly of {self._sharings.model_name} shared so.")
        return found
