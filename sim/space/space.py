"""The space of plans that the search looks through: which values each knob may take, and plans as arrays of knobs."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Annotated, Any, Final, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
from pydantic import BeforeValidator, Field, NonNegativeInt, PositiveInt, field_validator

from ...shared.answers.plan_kind import PlanKind
from ...shared.basics.documents import FrozenModel
from ...shared.basics.errors import ProtwinError
from ...shared.basics.units import as_bytes
from ...shared.layout.layout import Layout
from ...shared.layout.residencies import ChunkResidency
from ...shared.schema.plan import Plan
from ...shared.schema.workload import Workload
from .placements import COUNTED, Placements
from .step_spec import StepSpec

IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]
Values = TypeVar("Values", IntArray, BoolArray)


def _as_values(value: Any) -> Any:
    return (value,) if isinstance(value, int | np.integer) and not isinstance(value, bool) else value


def _as_sizes(value: Any) -> Any:
    """Sizes, of which each may be text."""
    values = (value,) if isinstance(value, str) else _as_values(value)
    if not isinstance(values, tuple | list):
        return values
    try:
        return tuple(as_bytes(size) if isinstance(size, str) else size for size in values)
    except ProtwinError as error:
        raise ValueError(str(error)) from error


LARGEST_KNOB: Final = 10**6
"""No layout has as many chunks, no model as many blocks; much larger numbers would not fit into numpy's."""
ALL: Final = "all"
"""Among the values of ``n_swap`` or ``n_host_stepped``: everything sensible."""
_LARGEST_CHUNK_BYTES: Final = 2**62

_Sizes = Annotated[
    tuple[Annotated[PositiveInt, Field(le=_LARGEST_CHUNK_BYTES)], ...],
    BeforeValidator(_as_sizes),
    Field(min_length=1),
]
_Positive = Annotated[
    tuple[Annotated[PositiveInt, Field(le=LARGEST_KNOB)], ...], BeforeValidator(_as_values), Field(min_length=1)
]
_NonNegative = Annotated[
    tuple[Annotated[NonNegativeInt, Field(le=LARGEST_KNOB)], ...], BeforeValidator(_as_values), Field(min_length=1)
]


class SearchSpace(FrozenModel):
    """What each knob may be: None for everything sensible, one value, or several.  Sizes may be text (``"64MiB"``).

    By default no block swaps: with swaps there are three times as many plans, whose bounds lie close together, and a
    search takes a few times as long.

    Of ``n_disk_state``, None puts on the disk what host memory cannot hold, if a machine has one, and nothing if not
    ([Note: Chunks on the disk] in ``disk_choices.py``); ``n_disk`` then counts for nothing.

    ``n_shard`` is for ranks in mode sharded, ``n_host_stepped`` for one rank or ranks in mode replicated; nobody else
    has any.  Of both, None is for what [Note: Mixtures in the space] names.
    """

    chunk_bytes: _Sizes | None = None
    n_persist: _NonNegative | None = None
    n_host_stepped: _NonNegative | None = (0,)
    looks_up_rows: bool = False
    """Whether all plans look rows of embeddings up on the host; by default none does."""
    n_shard: _NonNegative | None = None
    n_disk_state: _NonNegative | None = (0,)
    n_disk: _NonNegative = (0,)
    n_staging: _Positive = (2, 3)
    """Of plans with chunks on a disk; others have no such places."""
    n_buffer: _NonNegative | None = None
    prefetch_depth: _Positive = (1, 2, 3)
    n_checkpoint: _NonNegative | None = None
    n_swap: _NonNegative | None = (0,)
    n_offload_input: _NonNegative | None = (0,)
    """Of the checkpointed blocks; None for what [Note: Offloaded inputs] in ``enumerate.py`` names."""
    product_stride: _NonNegative | None = (0,)
    """What checkpointed blocks keep: of their products, the first of every so many, and attention (mode SELECTIVE); 0:
    nothing.  None for all that the workload knows."""
    mlp_tiles: _Positive | None = None
    """Tiles of tokens that MLPs run in; None for whole and all numbers that the workload knows."""
    loss_tiles: _Positive | None = None
    """The same of head and loss."""
    sequence_ranks: _Positive | None = None
    """Neighbouring ranks that share each sequence; None for 1 and all numbers that the workload knows and the ranks
    allow."""

    @field_validator("n_swap", "n_host_stepped", "n_offload_input", "product_stride", mode="before")
    @classmethod
    def _every(cls, value: Any) -> Any:
        return None if isinstance(value, tuple) and ALL in value else value

    @property
    def names_disk(self) -> bool:
        """Whether it says how many chunks lie on a disk, or that none does."""
        return self.n_disk_state is not None


class Trips(NamedTuple):
    """Which blocks send something to the host and fetch it back."""

    n_swap: int
    """So many first ones, in mode SWAP: what they have saved."""
    inputs: tuple[int, ...] = ()
    """In mode OFFLOAD_INPUT: their input, if it is theirs alone.  Ascending."""
    tiling: int = 0
    """The first of ``ModeRows.tiles`` in which they send as much."""


@dataclass(frozen=True)
class ModeRows:
    """The choices of activation modes in the space: K of n_swap, n_checkpoint, n_offload_input and tiles, for n blocks.

    See [Note: Tilings] in ``tilings.py``.
    """

    num_blocks: int
    n_swap: IntArray
    """(K,) ascending in each tiling."""
    n_checkpoint: IntArray
    """(K,) ascending for each ``n_swap``."""
    moves: BoolArray | None = None
    """(n,) the blocks that have something to move in mode SWAP, (T, n) if there is a ``tiling``; None if all have."""
    n_offload_input: IntArray | None = None
    """(K,) ascending for each of the pairs; None if no block offloads its input."""
    input_bytes: IntArray | None = None
    """(n,) or (T, n), what each block moves in mode OFFLOAD_INPUT; None if no block offloads its input."""
    tiles: tuple[tuple[int, int, int], ...] = ((1, 1, 0),)
    """(T,) tiles that MLPs run in, and those of head and loss, the fewest first; and what checkpointed blocks keep."""
    tiling: IntArray | None = None
    """(K,) which of ``tiles``, ascending; None if all rows have the first."""
    sends_as: tuple[int, ...] = (0,)
    """(T,) of each tiling the first in which blocks that swap or offload their input send as much."""
    exchanges_as: tuple[int, ...] = (0,)
    """(T,) of each tiling the first in which ranks that share a sequence exchange as much."""

    @cached_property
    def travels(self) -> BoolArray:
        """(K,) whether something is moved, in mode SWAP or OFFLOAD_INPUT."""
        moved = self.is_swap if self.moves is None else np.logical_and(self.is_swap, self.by_row(self.moves))
        travels: BoolArray = np.asarray(np.any(np.logical_or(moved, self.moved_inputs > 0), axis=1))
        return travels

    @cached_property
    def offloads_input(self) -> BoolArray:
        """(K, n) the blocks in mode OFFLOAD_INPUT: the first ones of the checkpointed, the first block last."""
        if self.n_offload_input is None:
            return np.zeros(self.is_checkpoint.shape, dtype=np.bool_)
        order = np.roll(np.arange(self.num_blocks), -1)
        number = np.cumsum(self.is_checkpoint[:, order], axis=1)
        found = np.zeros(self.is_checkpoint.shape, dtype=np.bool_)
        found[:, order] = self.is_checkpoint[:, order] & (number <= self.n_offload_input[:, None])
        return found

    @cached_property
    def moved_inputs(self) -> IntArray:
        """(K, n) bytes of their input that blocks move."""
        sizes = np.zeros(self.num_blocks, dtype=np.int64) if self.input_bytes is None else self.input_bytes
        found: IntArray = np.where(self.offloads_input, sizes if self.input_bytes is None else self.by_row(sizes), 0)
        return found

    def by_row(self, values: Values) -> Values:
        """(K, n) of every row's tiling, or (n,) where there is one alone; ``values``: (T, n), or (n,) then."""
        return values if self.tiling is None else values[self.tiling]

    def rows_in(self, tiling: int) -> IntArray:
        """The rows in one tiling."""
        if self.tiling is None:
            return np.arange(len(self.n_swap))
        return np.flatnonzero(self.tiling == tiling)

    def in_tiling(self, tiling: int) -> ModeRows:
        """The rows in one tiling, as if there were no other."""
        if self.tiling is None:
            return self
        rows = self.rows_in(tiling)
        return ModeRows(
            self.num_blocks,
            self.n_swap[rows],
            self.n_checkpoint[rows],
            None if self.moves is None else self.moves[tiling],
            None if self.n_offload_input is None else self.n_offload_input[rows],
            None if self.input_bytes is None else self.input_bytes[tiling],
            (self.tiles[tiling],),
        )

    def tiles_of(self, row: int) -> tuple[int, int, int]:
        """``mlp_tiles`` and ``loss_tiles`` of a row, and the ``product_stride`` of its checkpointed blocks or 0."""
        return self.tiles[0 if self.tiling is None else int(self.tiling[row])]

    @cached_property
    def trips(self) -> tuple[Trips, ...]:
        """(K,) of every row."""
        inputs: list[tuple[int, ...]] = [()] * len(self.n_swap)
        if self.n_offload_input is not None:
            inputs = [tuple(np.flatnonzero(row).tolist()) for row in self.offloads_input]
        tilings = [0] * len(self.n_swap) if self.tiling is None else self.tiling.tolist()
        return tuple(
            Trips(n_swap, of_row, (self.sends_as if n_swap or of_row else self.exchanges_as)[tiling])
            for n_swap, of_row, tiling in zip(self.n_swap.tolist(), inputs, tilings, strict=True)
        )

    def num_offloading(self, row: int) -> int:
        """``n_offload_input`` of a row."""
        return 0 if self.n_offload_input is None else int(self.n_offload_input[row])

    @cached_property
    def is_checkpoint(self) -> BoolArray:
        """(K, n) the blocks in mode CHECKPOINT, as ``place_activation_modes`` places them."""
        is_checkpoint = np.zeros((len(self.n_swap), self.num_blocks), dtype=np.bool_)
        row = np.repeat(np.arange(len(self.n_swap)), self.n_checkpoint)
        first = np.repeat(self.n_checkpoint.cumsum() - self.n_checkpoint, self.n_checkpoint)
        number = np.arange(len(row)) - first
        others = self.num_blocks - self.n_swap[row]
        is_checkpoint[row, self.n_swap[row] + ((2 * number + 1) * others) // (2 * self.n_checkpoint[row])] = True
        return is_checkpoint

    @cached_property
    def is_swap(self) -> BoolArray:
        """(K, n) the blocks in mode SWAP."""
        is_swap: BoolArray = np.arange(self.num_blocks) < self.n_swap[:, None]
        return is_swap

    @cached_property
    def groups(self) -> tuple[tuple[Trips, IntArray], ...]:
        """The rows in which the same blocks send the same away."""
        rows: dict[Trips, list[int]] = {}
        for row, trips in enumerate(self.trips):
            rows.setdefault(trips, []).append(row)
        return tuple((trips, np.array(rows[trips], dtype=np.int64)) for trips in sorted(rows))


@dataclass(frozen=True)
class LayoutGrid:
    """All candidates that share a layout: residencies x prefetch depths x choices of activation modes.

    Shapes: R rows of residencies and buffers, Q residencies of a chunk, D prefetch depths, K choices of modes.
    """

    layout: Layout
    places: Placements
    prefix: IntArray
    """(R,) which chunks have which residency, as a prefix of ``places``."""
    n_buffer: IntArray
    """(R,) ascending for each prefix."""
    prefetch_depth: IntArray
    """(D,) ascending."""
    modes: ModeRows
    step: StepSpec = field(default_factory=StepSpec)

    @cached_property
    def counts(self) -> IntArray:
        """(R, Q) chunks of every residency, as knobs count them."""
        found: IntArray = self.places.counts[self.prefix]
        return found

    @cached_property
    def travels(self) -> BoolArray:
        """(R,) whether anything of any chunk comes to the device or leaves it."""
        num_still = self.places.num_of(ChunkResidency.PERSISTENT)
        found: BoolArray = num_still[self.prefix] < len(self.layout.chunks)
        return found

    @cached_property
    def _demands(self) -> list[tuple[int, ...]]:
        """(R,) the chunks that have each residency but the simplest, those that ask for the most first."""
        by_residency = [self.places.num_of(residency)[self.prefix] for residency in reversed(ChunkResidency)]
        return list(zip(*(numbers.tolist() for numbers in by_residency[:-1]), strict=True))

    def is_distinct(self, trips: Trips) -> BoolArray:
        """(R, D) whether the plans with these trips differ from those before them.

        Where nothing travels, no chunk and no activation, no depth matters.
        """
        travels = self.travels | (trips.n_swap > 0 or len(trips.inputs) > 0)
        is_distinct: BoolArray = travels[:, None] | (np.arange(len(self.prefetch_depth)) == 0)
        return is_distinct

    def is_of_kind(self, kind: PlanKind, prefixes: IntArray, modes: IntArray) -> BoolArray:
        """(F, M) whether the plans with these of the layout's ``prefixes`` and rows of ``ModeRows`` are of ``kind``."""
        resident, checkpointed, swapped = (
            some.complexity for some in (PlanKind.RESIDENT, PlanKind.CHECKPOINTED, PlanKind.SWAPPED)
        )
        place = self._place_complexity[prefixes, None]
        recomputed = np.where(self.modes.n_checkpoint[modes] > 0, checkpointed, resident)
        activations = np.where(self.modes.travels[modes], swapped, recomputed)
        is_of_kind: BoolArray = np.maximum(place, activations) == kind.complexity
        return is_of_kind

    @cached_property
    def _place_complexity(self) -> IntArray:
        """(P,) of the kind of each of the layout's prefixes, by where chunks lie."""
        found = np.zeros(len(self.places.counts), dtype=np.int64)
        for residency in ChunkResidency:
            found = np.maximum(found, np.where(self.places.num_of(residency) > 0, residency.kind.complexity, 0))
        return found

    @cached_property
    def num_candidates(self) -> int:
        """Distinct plans of this layout."""
        return sum(int(self.is_distinct(trips).sum()) * len(rows) for trips, rows in self.modes.groups)

    def plan(self, workload: Workload, residency: int, depth: int, mode: int) -> Plan:
        """The plan at these indices."""
        knobs: dict[str, Any] = {
            place.knob: int(self.counts[residency, place]) for place in COUNTED if place.knob is not None
        }
        return Plan(
            **knobs,
            **self.places.choice_of_disk(int(self.prefix[residency]))._asdict(),
            workload_id=workload.identity,
            method=workload.method,
            chunk_bytes=self.layout.chunk_bytes,
            n_buffer=int(self.n_buffer[residency]),
            looks_up_rows=any(chunk.rows is not None for chunk in self.layout.chunks),
            prefetch_depth=int(self.prefetch_depth[depth]),
            n_swap=int(self.modes.n_swap[mode]),
            n_checkpoint=int(self.modes.n_checkpoint[mode]),
            n_offload_input=self.modes.num_offloading(mode),
            **self._in_tiles(mode),
            micro_batches=self.step.micro_batches,
            max_gradient_norm=self.step.max_gradient_norm,
            optimizer=self.step.optimizer,
            host_gradients=self.step.host_gradients,
            projects_gradients_on=self.step.projects_gradients_on,
            parallel=self.step.parallel,
            num_ranks=self.step.num_ranks,
            shard_ranks=self.step.shard_ranks,
            sequence_ranks=self.step.sequence_ranks,
        )

    def _in_tiles(self, mode: int) -> dict[str, Any]:
        mlp_tiles, loss_tiles, product_stride = self.modes.tiles_of(mode)
        knobs = {"mlp_tiles": mlp_tiles, "loss_tiles": loss_tiles}
        n_checkpoint = int(self.modes.n_checkpoint[mode])
        if product_stride and n_checkpoint:
            knobs |= {"n_selective": n_checkpoint, "product_stride": product_stride}
        return knobs

    def simplicity(self, residency: int, depth: int, mode: int) -> tuple[int, ...]:
        """Smaller is simpler.

        Fewer tiles of MLPs, then of the loss, no results that are kept, fewer swapped blocks, fewer offloaded inputs,
        fewer recomputed blocks, less look-ahead, fewer chunks on a disk, less of each and fewer places, fewer offloaded
        chunks, fewer sharded ones, fewer that the host steps for the device, fewer buffers, larger chunks.  No two
        distinct plans of a space share it, so a choice by it depends on no order of enumeration.
        """
        return (
            *self.modes.tiles_of(mode),
            int(self.modes.n_swap[mode]),
            self.modes.num_offloading(mode),
            int(self.modes.n_checkpoint[mode]),
            int(self.prefetch_depth[depth]),
            *self.places.on_disk[self.prefix[residency]].tolist(),
            *self._demands[residency],
            int(self.n_buffer[residency]),
            -self.layout.chunk_bytes,
        )
