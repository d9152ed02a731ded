"""What a family of workloads does where MLPs, or head and loss, run in tiles.

[Note: What is polynomial of tiles]
Tiles of tokens are as equal as can be, so a loop over them has passes of two lengths.  The operations of a pass, and
the steps of the level between them, are polynomials of the batch's shape, of the pass's tokens, and of those of the
pass before, whose tensors go when this one begins.  The first pass makes the sums that later ones add to, and the
second one finds no gradient of a tile to free; from then on passes are alike.  So a family keeps three passes of each
loop, and what comes before, between and behind loops.  At a shape, equal passes are listed once (``Repeated``).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate
from math import prod
from typing import ClassVar, Final, Self

from pydantic import PositiveInt, model_validator

from ..basics.documents import Document, FrozenModel
from ..observed.assembly import TracedShape
from ..observed.observation import Observation, OperatorCall, Repeated
from ..observed.observed_inputs import PhaseKey
from ..phases.packing import Packing
from ..phases.quadratic import SHORTEST_SQUARE
from ..schema.plan import ActivationMode
from ..schema.workload import DType, Operation, Workload
from .calls import FamilyCall, Number, call_at
from .family import Change, FamilyPiece, FamilyPlace, OutsideFamilyError, WorkloadFamily, phase_key
from .variants import checked_tiles, with_loss_tilings, with_tilings

LEAST_TILE: Final = 2
"""Tokens of the shortest tile that a family knows: one token's transposed copies become views."""


class TiledRun(FrozenModel):
    """Operations in a row, as in ``FamilySection``."""

    calls: tuple[int, ...] = ()
    steps: tuple[Number, ...] = ()
    adding: tuple[Number, ...] = ()


class TiledLoop(FrozenModel):
    """A loop over tiles ([Note: What is polynomial of tiles])."""

    tokens: Number
    """Of all tiles together."""
    first: TiledRun
    second: TiledRun
    later: TiledRun


class TiledSection(FrozenModel):
    """A section that has loops over tiles, or none where tiles change what else is in it."""

    runs: tuple[TiledRun, ...]
    """Before the first loop, between loops, and behind the last one."""
    loops: tuple[TiledLoop, ...]
    net: Number
    gradient: Number
    output: Number
    saved: tuple[Number, ...] = ()


class TiledPiece(FrozenModel):
    """What belongs to one piece of a family."""

    monomials: tuple[tuple[int, ...], ...]
    """Exponents of every variable of the family, of the tile's tokens, and of those of the tile before."""
    denominator: PositiveInt = 1
    polynomials: tuple[tuple[tuple[int, int], ...], ...]
    """(monomial, coefficient) of each term."""
    calls: tuple[FamilyCall, ...]
    sections: tuple[TiledSection, ...]
    mlp_places: tuple[FamilyPlace, ...] = ()
    """Sections of blocks whose MLPs run in tiles; none if they cannot."""
    loss_places: tuple[FamilyPlace, ...] = ()
    """Sections where head and loss run in tiles; none if they cannot."""
    traced_at: tuple[tuple[PositiveInt, ...], ...]
    """Shapes, each with the number of tiles, whose traces every figure meets."""

    @model_validator(mode="after")
    def _is_consistent(self) -> Self:
        runs = [run for section in self.sections for run in section.runs]
        runs += (run for s in self.sections for loop in s.loops for run in (loop.first, loop.second, loop.later))
        if any(not len(run.calls) == len(run.steps) == len(run.adding) for run in runs):
            raise ValueError("a run needs one level for each of its calls")
        if any(not 0 <= call < len(self.calls) for run in runs for call in run.calls):
            raise ValueError(f"a run names a call beyond the {len(self.calls)} that there are")
        if any(len(section.runs) != len(section.loops) + 1 for section in self.sections):
            raise ValueError("a section needs one run more than it has loops")
        if any(not 0 <= p.seen < len(self.sections) for p in (*self.mlp_places, *self.loss_places)):
            raise ValueError(f"a place names a section beyond the {len(self.sections)} that there are")
        if any(not 0 <= i < len(self.monomials) for row in self.polynomials for i, _ in row):
            raise ValueError(f"a polynomial names a monomial beyond the {len(self.monomials)} that there are")
        return self

    def changed(
        self,
        shape: TracedShape,
        values: tuple[int, ...],
        places: Sequence[FamilyPlace],
        num_tiles: int,
        *,
        notes_squares: bool = True,
    ) -> TracedShape:
        """``shape`` with the sections at ``places`` in so many tiles.

        ``notes_squares``: whether tensors of the sequence's length squared are told apart.  Raises OutsideFamilyError
        if tiles have fewer than ``LEAST_TILE`` tokens.
        """
        expansion = _Expansion(self, values, num_tiles, notes_squares=notes_squares)
        made = {seen: expansion.section(self.sections[seen]) for seen in {place.seen for place in places}}
        observed: dict[ActivationMode, dict[PhaseKey, Observation]] = {m: dict(o) for m, o in shape.observed.items()}
        for place in places:
            key = phase_key((place.kind, place.section))
            # Frames of sections before it hold the same, whether it runs in tiles or not.
            lingering_bytes = shape.observed[place.mode][key].lingering_bytes
            observed[place.mode][key] = replace(made[place.seen], lingering_bytes=lingering_bytes)
        return replace(shape, observed=observed)


class FamilyTilings(Document):
    """What a family of workloads does in any number of tiles."""

    KIND: ClassVar[str] = "family_tilings"

    model_name: str
    model_hash: str
    compute_dtype: DType
    modules: tuple[str, ...]
    """Dotted paths of the modules that run in tiles; none if they cannot."""
    why_no_mlp_tiles: str | None = None
    why_no_loss_tiles: str | None = None
    pieces: tuple[TiledPiece, ...]
    """One for each piece of the family."""
    beside: str = ""
    """Digest of the family whose pieces these belong to (``runtime/polynomials/freshness.py``); empty for none."""
    fingerprint: str = ""
    """Of the code that they were fitted with, by a small model of the same architecture; empty where nobody asked."""
    software: dict[str, str] = {}

    def knows(self, *, mlp_tiles: Sequence[int], loss_tiles: Sequence[int]) -> bool:
        """Whether it has what is asked for, be it at some shapes."""
        return not ((mlp_tiles and not self.modules) or (loss_tiles and self.why_no_loss_tiles is not None))

    def workload(
        self,
        family: WorkloadFamily,
        *,
        mlp_tiles: Sequence[int],
        loss_tiles: Sequence[int],
        batch_size: int,
        sequence_length: int | None,
        packing: Packing | None = None,
        change: Change | None = None,
    ) -> Workload:
        """``family.at(change=change)`` that knows numbers of tiles: what a trace with them gives, figure by figure.

        Raises WorkloadError as ``family.at`` and ``checked_tiles``; OutsideFamilyError if nothing was proven there.
        """
        assert self.model_hash == family.model_hash, "tilings of another family"
        at = partial(family.at, batch_size=batch_size, sequence_length=sequence_length, packing=packing)
        found = at(change=change)
        counts = checked_tiles(mlp_tiles, found.num_tokens)
        tiled = {n: at(change=_both(self.mlp_change(family, n), change)) for n in counts}
        found = with_tilings(found, tiled, self.modules)
        loss_counts = sorted(set(loss_tiles) - {1})
        return with_loss_tilings(found, {n: at(change=self._tiled(family, "loss_places", n)) for n in loss_counts})

    def mlp_change(self, family: WorkloadFamily, num_tiles: int) -> Change:
        """Of what a trace sees of ``family`` where MLPs run in so many tiles.

        It raises OutsideFamilyError where nothing is known of that.
        """
        return self._tiled(family, "mlp_places", num_tiles)

    def _tiled(self, family: WorkloadFamily, which: str, num_tiles: int) -> Change:
        def change(shape: TracedShape, piece: FamilyPiece, values: tuple[int, ...]) -> TracedShape:
            tiled = self.pieces[next(i for i, one in enumerate(family.pieces) if one is piece)]
            places: tuple[FamilyPlace, ...] = getattr(tiled, which)
            if not places:
                raise OutsideFamilyError(f"nothing is known exactly of {self.model_name} in tiles at {list(values)}.")
            return tiled.changed(shape, values, places, num_tiles)

        return change


def _both(first: Change, second: Change | None) -> Change:
    """One change after the other."""
    if second is None:
        return first
    return lambda shape, piece, values: second(first(shape, piece, values), piece, values)


class _Numbers:
    """Values of a piece's polynomials, each computed when it is asked for."""

    def __init__(self, piece: TiledPiece, values: tuple[int, ...], *, of_squares: bool = False) -> None:
        """``of_squares``: of the terms alone that are of second degree in lengths of sequences."""
        self._piece, self._of_squares = piece, of_squares
        self._powers = [
            prod(value**exponent for value, exponent in zip(values, exponents, strict=True))
            if not of_squares or sum(exponents[1:-2]) > 1
            else 0
            for exponents in piece.monomials
        ]

    def __getitem__(self, number: Number) -> int:
        total: int = sum(c * self._powers[i] for i, c in self._piece.polynomials[number])
        found, rest = divmod(total, self._piece.denominator)
        if rest and not self._of_squares:
            raise OutsideFamilyError("a polynomial of counts is no whole number there, so nothing is known exactly.")
        return found


class _Expansion:
    """Sections of a piece at one shape and number of tiles."""

    def __init__(self, piece: TiledPiece, values: tuple[int, ...], num_tiles: int, *, notes_squares: bool) -> None:
        self._piece, self._values, self._num_tiles = piece, values, num_tiles
        self._notes_squares = notes_squares and max(values[1:], default=0) >= SHORTEST_SQUARE
        self._numbers: dict[tuple[int, int], _Numbers] = {}
        self._calls: dict[tuple[int, int, int], tuple[OperatorCall, Operation]] = {}

    def section(self, section: TiledSection) -> Observation:
        """What a trace would see of it, equal passes listed once."""
        at = (0, 0)
        found = Observation(0)
        repeated: list[Repeated] = []
        level = self._run(found, section.runs[0], at, 0)
        for loop, behind in zip(section.loops, section.runs[1:], strict=True):
            for run, at, count in _passes(loop, self._number(loop.tokens, (0, 0)), self._num_tiles):
                begin, before = len(found.operations), level
                found.passes.append((begin, at[0]))
                level = self._run(found, run, at, level)
                if count > 1:
                    repeated.append(Repeated(begin, len(found.operations), count, level - before))
                    level += (count - 1) * (level - before)
            level = self._run(found, behind, at, level)
        found.repeated = tuple(repeated)
        if self._notes_squares:
            self._note_squares(found, section)
        found.end_bytes = self._number(section.net, at)
        found.gradient_bytes = self._number(section.gradient, at)
        found.output_bytes = self._number(section.output, at)
        found.saved_bytes = [self._number(size, at) for size in section.saved]
        return found

    def _note_squares(self, found: Observation, section: TiledSection) -> None:
        """What of its levels is tensors of the sequence's length squared, which no pass of a loop adds to."""
        squares = _Numbers(self._piece, (*self._values, 0, 0), of_squares=True)
        runs = [section.runs[0]]
        for loop, behind in zip(section.loops, section.runs[1:], strict=True):
            runs += (loop.first, loop.second, loop.later, behind)
        assert not any(squares[step] for loop in section.loops for step in loop.later.steps)
        found.square_bytes = squares[section.net]
        found.square_peak_bytes = max(0, *accumulate(squares[step] for run in runs for step in run.steps))

    def _run(self, found: Observation, run: TiledRun, at: tuple[int, int], level: int) -> int:
        """Add a run's operations; gives the level behind them."""
        for index, step, adding in zip(run.calls, run.steps, run.adding, strict=True):
            call, operation = self._call(index, at)
            found.calls.append(call)
            found.operations.append(operation)
            level += self._number(step, at)
            found.levels.append(level)
            found.adding_levels.append(level + self._number(adding, at))
        return level

    def _call(self, index: int, at: tuple[int, int]) -> tuple[OperatorCall, Operation]:
        known = self._calls.get((index, *at))
        if known is None:
            call = call_at(self._piece.calls[index], self._at(at))
            known = self._calls[(index, *at)] = call, call.operation()
        return known

    def _number(self, number: Number, at: tuple[int, int]) -> int:
        return self._at(at)[number]

    def _at(self, at: tuple[int, int]) -> _Numbers:
        known = self._numbers.get(at)
        if known is None:
            known = self._numbers[at] = _Numbers(self._piece, (*self._values, *at))
        return known


def _passes(loop: TiledLoop, num_tokens: int, num_tiles: int) -> Iterator[tuple[TiledRun, tuple[int, int], int]]:
    """Passes in order: what each does, its tokens with those of the one before, and how many are equal.

    Raises OutsideFamilyError if tiles are shorter than is known.
    """
    count = min(num_tiles, num_tokens)
    short, num_long = divmod(num_tokens, count)
    if short < LEAST_TILE or count < 2:
        raise OutsideFamilyError(
            f"nothing is known exactly of {num_tiles} tiles of {num_tokens} tokens, which has tiles of {short}."
        )

    def tokens(number: int) -> int:
        return short + (number < num_long)

    yield loop.first, (tokens(0), 0), 1
    yield loop.second, (tokens(1), tokens(0)), 1
    if num_long > 2:
        yield loop.later, (short + 1, short + 1), num_long - 2
    if 2 <= num_long < count:
        yield loop.later, (short, short + 1), 1
    rest = count - max(2, num_long + 1 if num_long >= 2 else 2)
    if rest > 0:
        yield loop.later, (short, short), rest
