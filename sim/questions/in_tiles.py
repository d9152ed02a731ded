"""The numbers of tiles that a model's workload is asked for: those that the user names, or those that may matter.

[Note: Sensible tiles]
Tiles matter where activations of one sample fill a device: of shorter sequences a smaller micro-batch saves as much.
From ``LONG_SEQUENCE`` tokens on, two numbers are worth a look, those that leave about 8,192 and about 2,048 tokens in a
tile: coarser ones save little, and with finer ones attention and what is kept of a block decide.  They are powers of
two, so that tiles of usual lengths are equal.  A model whose tiles nobody knows without a trace is traced in them where
nothing fits without, and not before.  Then sequences count from 2,048 tokens on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Final, Self

from ...shared.basics.errors import ProtwinError, WorkloadError
from ...shared.basics.units import counted
from ...shared.schema.plan import Plan
from ...shared.schema.workload import Workload
from ..searching.request import GlobalBatch, SearchRequest
from ..space.space import SearchSpace

LONG_SEQUENCE: Final = 8192
"""Tokens of a sample."""
_TILE_TOKENS: Final = (8192, 2048)

Tiles = tuple[int, ...]
TiledWorkload = Callable[[Tiles, Tiles], Workload]
"""The workload that knows so many tiles of MLPs, and of the loss, beside 1."""


def sensible_tiles(num_tokens: int) -> Tiles:
    """Numbers of tiles for so many tokens; none for up to 2,048.  See [Note: Sensible tiles].

    For each length of a tile the least power of two that leaves no tile more tokens.
    """
    counts = (1 << (-(-num_tokens // tokens) - 1).bit_length() for tokens in _TILE_TOKENS)
    return tuple(sorted({count for count in counts if count > 1}))


@dataclass(frozen=True, kw_only=True)
class AskedTiles:
    """What a user says about tiles."""

    mlp: Tiles | None = None
    """Of MLPs; None: whatever is sensible."""
    loss: Tiles | None = None
    """Of head and loss."""
    at_any_length: bool = False
    """Whether tiles that nobody has to trace matter for short sequences too: the longest or the least is asked for."""
    is_needed: bool = False
    """Whether nothing fits without, so that a trace is worth its time."""

    @classmethod
    def of(cls, plan: Plan | None) -> Self:
        """Those of one plan; none if it is None."""
        return cls(mlp=(1,), loss=(1,)) if plan is None else cls(mlp=(plan.mlp_tiles,), loss=(plan.loss_tiles,))

    @classmethod
    def named(cls, mlp: Sequence[int] | None, loss: Sequence[int] | None, *, at_any_length: bool = False) -> Self:
        """Those of options; None or none: whatever is sensible."""
        return cls(mlp=tuple(mlp) if mlp else None, loss=tuple(loss) if loss else None, at_any_length=at_any_length)

    @property
    def are_named(self) -> bool:
        """Whether the user names some, or that there shall be none."""
        return self.mlp is not None or self.loss is not None

    @property
    def space(self) -> SearchSpace:
        """With the numbers of tiles that are named."""
        named = {"mlp_tiles": self.mlp, "loss_tiles": self.loss}
        return SearchSpace.model_validate({knob: numbers for knob, numbers in named.items() if numbers is not None})

    @property
    def needed(self) -> AskedTiles:
        """The same where nothing fits without."""
        return replace(self, is_needed=True)

    def workload(
        self,
        num_samples: int | None,
        sequence_length: int | None,
        resolve: TiledWorkload,
        untraced: Callable[[Tiles, Tiles], Workload | None],
    ) -> Workload:
        """The workload of so many samples, with all tiles that are named, and else with those that it can have.

        ``resolve``: traces if it has to; ``untraced``: None where that takes a trace.  Raises what ``resolve`` raises,
        and WorkloadError if there are fewer tokens than tiles.
        """
        self._check(num_samples, sequence_length)
        wanted = list(self._wanted(num_samples, sequence_length))
        for mlp, loss in wanted[:-1]:
            if self.is_needed or self.are_named:
                try:
                    return resolve(mlp, loss)
                except ProtwinError:
                    continue  # what nobody has named may be missing
            found = untraced(mlp, loss)
            if found is not None:
                return found
        return resolve(*wanted[-1])

    def _check(self, num_samples: int | None, sequence_length: int | None) -> None:
        if sequence_length is None:
            return
        num_tokens = (num_samples or 1) * sequence_length
        for knob, named in (("mlp_tiles", self.mlp), ("loss_tiles", self.loss)):
            if (most := max(named or (1,))) > num_tokens:
                raise WorkloadError(
                    f"{knob} is {most:,}, but the batch has {counted(num_tokens, 'token')}, of which every tile has at "
                    f"least one. Name numbers from 1 to {num_tokens:,}."
                )

    def search_in_tiles(self, request: SearchRequest, at_size: Callable[[int], Workload]) -> SearchRequest | None:
        """``request``, in which nothing fits whole, about a workload that knows tiles; None if there is none.

        ``at_size``: the workload of so many samples, with tiles that are needed.  Of a batch of a whole step, the
        smallest micro-batches alone.
        """
        if self.is_needed or self.are_named:
            return None
        workload = request.workload
        if isinstance(workload, GlobalBatch):
            smallest = workload.sizes(request.step.num_ranks)[0]
            if _has_tilings(workload.workload_at(smallest)) or not _has_tilings(at_size(smallest)):
                return None
            return replace(request, workload=replace(workload, workload_at=at_size, micro_batch_sizes=(smallest,)))
        found = None if _has_tilings(workload) else at_size(workload.num_samples)
        return None if found is None or not _has_tilings(found) else replace(request, workload=found)

    def _wanted(self, num_samples: int | None, sequence_length: int | None) -> Iterator[tuple[Tiles, Tiles]]:
        """The most first, and last without what nobody has named."""
        sensible: Tiles = ()
        if sequence_length is not None and (self.is_needed or self.at_any_length or sequence_length >= LONG_SEQUENCE):
            sensible = sensible_tiles((num_samples or 1) * sequence_length)
        open_choice = (sensible, ()) if sensible else ((),)
        of_mlp, of_loss = (open_choice if named is None else (named,) for named in (self.mlp, self.loss))
        yield from product(of_mlp, of_loss)


def _has_tilings(workload: Workload) -> bool:
    return bool(workload.tilings or workload.loss_tilings)
