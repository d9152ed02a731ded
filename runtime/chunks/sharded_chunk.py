"""A chunk of which every rank has one part at home: on its host, or on its device.

[Note: Regions in memory]
The parts are those of [Note: Shards] in ``shared/layout/shards.py``.  Each region has a flat tensor of its own on the
device, as long as the shards of all ranks: parameters lie in it as in the chunk, and what pads the last shard lies
behind them.  So a rank's shard is one stretch of every region, a collective of one region moves equal
stretches in the order of the ranks, and parameters keep their alignment whatever the number of ranks is.

[Note: Pieces]
A shard begins and ends within parameters.  What a rank steps are therefore *pieces*: each is the stretch of one
parameter that lies in the rank's shard, with its parameter's group, and with a gradient only if the parameter has one.
An optimizer that treats every scalar by itself gives the same bits for pieces as for whole parameters.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from ...shared.basics.errors import PlanError, RanksError
from ...shared.layout.layout import Chunk
from ...shared.layout.residencies import ChunkResidency
from ...shared.layout.shards import Region
from ...shared.schema.schedule import Content
from ...shared.schema.workload import Parameter
from ..devices.device import TrainingDevice
from ..model.strides import copy_strided, in_memory_order
from ..optimizers.chunk_optimizer import ChunkOptimizer, MakeOptimizer
from ..optimizers.device_steps import ELEMENTWISE
from ..optimizers.step_options import StepOptions
from ..optimizers.widened_gradients import WidenedGradients
from ..ranks.collectives import Collectives
from .absent_parameters import bring_back
from .chunk import ChunkState, DeviceChunk, HostStepping, view_of
from .meta_parameters import set_all, set_values
from .parameter_values import ParameterValues, Wanted


@dataclass(frozen=True, slots=True)
class Shards:
    """How a chunk is shared among ranks."""

    regions: Sequence[Region]
    between_steps: Collectives
    """Of those that share it, all ranks or those of one shard group: what the compute thread reads whole chunks by,
    while no lane does anything together with other ranks."""


@dataclass(frozen=True, slots=True)
class _RegionMemory:
    """One region on this rank."""

    offset_bytes: int
    """Where it begins in the chunk."""
    whole: torch.Tensor
    """The shards of all ranks on the device, uint8; without memory while the chunk is away."""
    scalars: torch.Tensor
    """The same in the region's element type."""
    own: slice
    """The rank's shard of them."""
    home: torch.Tensor
    """The rank's shard where it stays."""
    trainable: bool


@dataclass(frozen=True, slots=True)
class _Piece:
    """The stretch of a parameter that lies in this rank's shard ([Note: Pieces])."""

    parameter: nn.Parameter
    place: int
    """Of the parameter among those that are trained."""
    region: int
    """The number of its region among those that are trained."""
    in_shard: slice
    begin: int
    """The number of its first scalar in the parameter, whose scalars are numbered as they lie in memory."""


class ShardedChunk(DeviceChunk):
    """One rank's part of a chunk, and the whole of it while it is on the device."""

    def __init__(
        self,
        chunk: Chunk,
        specs: Sequence[Parameter],
        parameters: Sequence[nn.Parameter],
        device: TrainingDevice,
        *,
        residency: ChunkResidency,
        stepping: HostStepping,
        shards: Shards,
        values: ParameterValues | None = None,
    ) -> None:
        """Move the rank's part in.  ``residency``: SHARDED if the device has it for good, or OFFLOADED.

        Raises the device's out-of-memory error if a part that stays there does not fit.
        """
        self._shards = shards
        self._regions: list[_RegionMemory] = []
        self._trained: list[_RegionMemory] = []
        """Those whose gradients are added up."""
        self._pieces: list[_Piece] = []
        self._originals: list[torch.Tensor] = []
        """What parameters were before, until all ranks have moved in: one that cannot gives no part to the others."""
        self._sums: list[torch.Tensor] = []
        """The shards in which gradients are added up, of trained regions: on the host, or where device Adam is."""
        self._arrivals_of_regions: list[torch.Tensor] = []
        """Where gradients arrive beside these sums, if any do."""
        self.present: list[bool] = []
        """For which pieces device Adam has a gradient in this step."""
        super().__init__(chunk, specs, parameters, device, residency=residency, stepping=stepping, values=values)

    @property
    def is_on_device(self) -> bool:
        """Whether the rank's part stays on the device, which steps it."""
        return self.residency is ChunkResidency.SHARDED

    @property
    def between_steps(self) -> Collectives:
        """Of the ranks that share it."""
        return self._shards.between_steps

    # -- memory ------------------------------------------------------------------------------------------------------

    def _allocate(self, stepping: HostStepping) -> None:
        device, ranks = self._device, self._shards.between_steps
        offset_bytes = 0
        for region in self._shards.regions:
            count = region.shard_elements(ranks.num_ranks)
            dtype: torch.dtype = getattr(torch, region.dtype)
            whole = device.empty(ranks.num_ranks * count * dtype.itemsize, f"chunk {self.chunk.id}")
            memory = _RegionMemory(
                offset_bytes,
                whole,
                whole.view(dtype),
                slice(ranks.rank * count, (ranks.rank + 1) * count),
                self._at_home(count, dtype, Content.PARAMETERS),
                region.trainable,
            )
            self._regions.append(memory)
            offset_bytes += region.size_bytes
            if device.ledger is not None:
                device.ledger.ignore([whole, memory.home])
            if region.trainable:
                self._trained.append(memory)
        self._find_pieces()
        for memory in self._trained:
            dtype = memory.home.dtype
            is_widened = self.widens and not self.is_on_device
            summed = torch.promote_types(dtype, torch.float32) if is_widened else dtype
            self._sums.append(self._at_home(memory.home.numel(), summed, Content.REDUCED_GRADIENTS))
        if (stepping.has_arrivals or stepping.widens) and not self.is_on_device:
            self._arrivals_of_regions = [
                self._at_home(memory.home.numel(), memory.home.dtype, Content.GRADIENTS) for memory in self._trained
            ]
        if device.ledger is not None:
            device.ledger.ignore([*self._sums, *self._arrivals_of_regions])

    def _at_home(self, count: int, dtype: torch.dtype, content: Content) -> torch.Tensor:
        """Memory for so many scalars where the part stays."""
        size_bytes = count * dtype.itemsize
        if not self.is_on_device:
            return self._device.host_buffer(size_bytes).view(dtype)
        name = f"a part of chunk {self.chunk.id}"
        if self._device.ledger is not None:
            self._device.ledger.allocate(size_bytes, name, content)
        return self._device.empty(size_bytes, name).view(dtype)

    def _find_pieces(self) -> None:
        """The stretches of parameters in the rank's shards."""
        place = 0
        for placed, spec, parameter in zip(self.chunk.parameters, self._specs, self.parameters, strict=True):
            if not spec.trainable:
                continue
            number = _holding(self._trained, placed.offset_bytes)
            region = self._trained[number]
            begin = (placed.offset_bytes - region.offset_bytes) // spec.dtype.item_bytes
            first, last = max(begin, region.own.start), min(begin + spec.num_elements, region.own.stop)
            if first < last:
                in_shard = slice(first - region.own.start, last - region.own.start)
                self._pieces.append(_Piece(parameter, place, number, in_shard, first - begin))
            place += 1
        if place and not self._pieces:
            # Of no scalars: every rank has an optimizer, even where all shards are padding.
            self._pieces.append(_Piece(self.trainable[0], 0, 0, slice(0, 0), 0))

    def _move_in(self, values: ParameterValues) -> None:
        for region in self._regions:
            # What pads it is sent to other ranks.
            region.home.zero_()
        values.fill([self._wanted(place) for place in range(len(self.parameters))])
        narrow = {id(parameter) for parameter in self.narrow}
        for piece in self._pieces:
            home = self._trained[piece.region].home[piece.in_shard]
            is_narrow = id(piece.parameter) in narrow
            self.masters.append(home.float() if is_narrow else home)
            self.targets.append(home if is_narrow else None)
            self.staged.append(self._sums[piece.region][piece.in_shard])
            if self._arrivals_of_regions:
                self.arrived.append(self._arrivals_of_regions[piece.region][piece.in_shard])
        if self.is_on_device and self._device.ledger is not None:
            masters = [m for m, t in zip(self.masters, self.targets, strict=True) if t is not None]
            self._device.ledger.adopt(masters, Content.OPTIMIZER_STATE)
        self._originals = [parameter.data for parameter in self.parameters]
        set_all(self.parameters, self._views())

    def _wanted(self, number: int) -> Wanted:
        """The stretch of a parameter that lies in the rank's shard, and those in the shards of the others."""
        placed, spec = self.chunk.parameters[number], self._specs[number]
        region = self._regions[_holding(self._regions, placed.offset_bytes)]
        begin = (placed.offset_bytes - region.offset_bytes) // spec.dtype.item_bytes
        count = region.home.numel()
        group, stretches = self._shards.between_steps, []
        for rank in range(group.world.num_ranks):
            # Neighbours share a chunk; where they are several groups, each has all of it.
            ends = (count * (rank % group.num_ranks + end) - begin for end in (0, 1))
            first, last = (min(max(end, 0), spec.num_elements) for end in ends)
            stretches.append(slice(first, last))
        own = stretches[group.world.rank]
        first = max(begin - region.own.start, 0)
        place = region.home[first : first + own.stop - own.start]
        return Wanted(spec.name, self.parameters[number], place, stretches)

    def let_originals_go(self) -> None:
        """All ranks have moved this chunk in: from now on their parts are all that there is."""
        self._originals = []

    def keep(self, returning: Collection[nn.Parameter] = ()) -> None:
        """Training begins: what began on the meta device is to be whole on the host of rank 0 in the end."""
        if self._shards.between_steps.world.rank == 0:
            super().keep(returning)

    def _views(self) -> list[torch.Tensor]:
        """The parameters' places in their regions, in order."""
        found = []
        for placed, parameter in zip(self.chunk.parameters, self.parameters, strict=True):
            region = self._regions[_holding(self._regions, placed.offset_bytes)]
            found.append(view_of(region.whole, placed.offset_bytes - region.offset_bytes, parameter))
        return found

    @property
    def _flats(self) -> Sequence[torch.Tensor]:
        return [region.whole for region in self._regions]

    @property
    def stepped(self) -> tuple[nn.Parameter, ...]:
        """Whose pieces ``masters`` are, one by one."""
        return tuple(piece.parameter for piece in self._pieces)

    @property
    def stepped_stretches(self) -> Sequence[slice | None]:
        """Of each of these, the scalars that lie in the rank's shard."""
        ends = [piece.begin + piece.in_shard.stop - piece.in_shard.start for piece in self._pieces]
        return [slice(piece.begin, end) for piece, end in zip(self._pieces, ends, strict=True)]

    def own_scalars(self) -> list[tuple[str, nn.Parameter, int, torch.Tensor]]:
        """What of all parameters lies in the rank's shards: name, parameter, number of its first scalar, scalars (n,).

        They are the home, so that who writes them does so while the chunk is away.
        """
        found = []
        for placed, spec, parameter in zip(self.chunk.parameters, self._specs, self.parameters, strict=True):
            region = self._regions[_holding(self._regions, placed.offset_bytes)]
            begin = (placed.offset_bytes - region.offset_bytes) // spec.dtype.item_bytes
            first, last = max(begin, region.own.start), min(begin + spec.num_elements, region.own.stop)
            if first < last:
                in_shard = slice(first - region.own.start, last - region.own.start)
                found.append((spec.name, parameter, first - begin, region.home[in_shard]))
            elif not spec.num_elements:
                found.append((spec.name, parameter, 0, region.home[:0]))
        return found

    @property
    def device_bytes(self) -> int:
        """The parts of all ranks."""
        return self._shards.between_steps.num_ranks * self._part_bytes

    @property
    def copied_bytes(self) -> int:
        """The rank's part."""
        return self._part_bytes

    @property
    def _part_bytes(self) -> int:
        return sum(region.home.numel() * region.home.element_size() for region in self._regions)

    def _resize(self, *, is_there: bool) -> None:
        for region in self._regions:
            count = self._shards.between_steps.num_ranks * region.home.numel()
            size_bytes = count * region.home.element_size() if is_there else 0
            self._device.resize(region.whole, size_bytes, f"chunk {self.chunk.id}")

    # -- coming ------------------------------------------------------------------------------------------------------

    def gather(self, passing: torch.Tensor | None = None) -> None:
        """Copy the rank's part from the host to its place in the whole; ``exchange`` brings the others'.

        Makes room first, unless the compute thread has ([Note: Memory on one stream] in ``memory_events``).
        """
        assert passing is None
        if not self._device.runs_behind:
            self.make_room()
        with self._gathering:
            for region in self._regions:
                self._device.copy(region.scalars[region.own], region.home, to_device=True)

    def exchange(self, ranks: Collectives) -> None:
        """Every rank sends its part to all others; a part that stays on the device is sent from there.

        Makes room for that one first, unless the compute thread has.
        """
        if self.is_on_device and not self._device.runs_behind:
            self.make_room()
        with self._gathering:
            for region in self._regions:
                ranks.gather(region.scalars, region.home if self.is_on_device else region.scalars[region.own])
            self._enter(ChunkState.PRESENT)

    def bring(self) -> None:
        """Between two steps, on the compute thread: all that brings the whole to the device.  All ranks do so."""
        if self._device.runs_behind:
            self.make_room()
        if not self.is_on_device:
            self.gather()
        self.exchange(self._shards.between_steps)

    # -- gradients ---------------------------------------------------------------------------------------------------

    @property
    def leaving_content(self) -> Content:
        """The rank's part of what was added up."""
        return Content.REDUCED_GRADIENTS

    def leaving_bytes(self, gradients: Sequence[torch.Tensor | None]) -> int:
        """All of the part, whatever is there of it."""
        return self.part_gradient_bytes

    @property
    def part_gradient_bytes(self) -> int:
        """The rank's part of the gradients."""
        return sum(region.home.numel() * region.home.element_size() for region in self._trained)

    def flats(self) -> list[torch.Tensor]:
        """Uninitialised memory for what ``flattened`` gives, a tensor for each of the trained regions."""
        ranks, device = self._shards.between_steps.num_ranks, self._device.torch_device
        return [
            torch.empty(ranks * region.home.numel(), dtype=region.home.dtype, device=device) for region in self._trained
        ]

    def flattened(self, gradients: Sequence[torch.Tensor | None], flats: list[torch.Tensor]) -> list[torch.Tensor]:
        """``flats`` with the gradients of all trainable parameters, in the order of the ranks' shards."""
        for flat in flats:
            flat.zero_()
        offset_of = {
            id(p): placed.offset_bytes for p, placed in zip(self.parameters, self.chunk.parameters, strict=True)
        }
        for parameter, gradient in zip(self.trainable, gradients, strict=True):
            if gradient is None or not gradient.numel():
                continue
            offset_bytes = offset_of[id(parameter)]
            number = _holding(self._trained, offset_bytes)
            begin = (offset_bytes - self._trained[number].offset_bytes) // gradient.element_size()
            ordered = gradient if gradient.stride() == parameter.stride() else copy_strided(gradient, parameter)
            flats[number][begin : begin + gradient.numel()] = in_memory_order(ordered)
        return flats

    def parts(self) -> list[torch.Tensor]:
        """Uninitialised shards of the trained regions' gradients, one each."""
        return [torch.empty_like(region.home, device=self._device.torch_device) for region in self._trained]

    def kept_parts(self) -> list[torch.Tensor]:
        """Where a part on the device has its gradients."""
        assert self.is_on_device
        return self._sums

    def pieces_of(self, parts: Sequence[torch.Tensor], is_there: Sequence[bool]) -> list[torch.Tensor | None]:
        """The gradients of all pieces within ``parts``; None for parameters that no rank has one for."""
        return [parts[piece.region][piece.in_shard] if is_there[piece.place] else None for piece in self._pieces]

    def presence(self, is_there: Sequence[bool]) -> list[bool]:
        """For which pieces there is a gradient, from the same for trainable parameters."""
        return [is_there[piece.place] for piece in self._pieces]

    def add_parts(self, parts: Sequence[torch.Tensor], is_there: Sequence[bool]) -> None:
        """Add a later micro-batch's gradients to those that stay on the device."""
        arrived = self.pieces_of(parts, is_there)
        for number, (staged, gradient) in enumerate(zip(self.staged, arrived, strict=True)):
            if gradient is not None and self.present[number]:
                staged.add_(gradient)
            elif gradient is not None:
                staged.copy_(gradient)
        self.present = [a or b for a, b in zip(self.present, self.presence(is_there), strict=True)]

    def waiting(self) -> list[torch.Tensor | None]:
        """The gradients of all pieces that device Adam is to step; None where there is none."""
        present = self.present or [False] * len(self._pieces)
        return [gradient if there else None for gradient, there in zip(self.staged, present, strict=True)]

    # -- whole values ------------------------------------------------------------------------------------------------

    def values(self) -> dict[str, torch.Tensor]:
        """The parameters' current values by name, read from all ranks: each of them has to ask for them."""
        ranks = self._shards.between_steps
        wholes = []
        for region in self._regions:
            wholes.append(torch.empty(ranks.num_ranks * region.home.numel(), dtype=region.home.dtype))
            ranks.gather(wholes[-1], region.home.cpu())
        return self._named(wholes)

    def values_on_first(self) -> dict[str, torch.Tensor] | None:
        """The same on the first rank alone, None on the others; each of them has to ask for them."""
        ranks = self._shards.between_steps
        if ranks.world.rank >= ranks.num_ranks:
            # The first shard group has all of it.
            return None
        wholes = []
        for region in self._regions:
            is_here = ranks.rank == 0
            wholes.append(torch.empty(ranks.num_ranks * region.home.numel() * is_here, dtype=region.home.dtype))
            ranks.gather_on_first(wholes[-1], region.home.cpu())
        return self._named(wholes) if ranks.rank == 0 else None

    def _named(self, wholes: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
        """The parameters in their regions, by name."""
        found: dict[str, torch.Tensor] = {}
        for placed, spec, parameter in zip(self.chunk.parameters, self._specs, self.parameters, strict=True):
            number = _holding(self._regions, placed.offset_bytes)
            offset_bytes = placed.offset_bytes - self._regions[number].offset_bytes
            found[spec.name] = view_of(wholes[number].view(torch.uint8), offset_bytes, parameter)
        return found

    def move_out(self) -> None:
        """Give every parameter a tensor of its own again, where it came from; all ranks do so together.

        After the ranks were separated nobody has the others' parts: parameters are NaN then.  Raises RanksError if a
        rank does not come; they are NaN then too.
        """
        lost: RanksError | None = None
        try:
            values = self._last_values()
        except RanksError as error:
            # Nobody is asked again: each would be waited for.
            self._shards.between_steps.close()
            lost, values = error, self._lost_values()
        for parameter, value in zip(self.parameters, values, strict=True):
            bring_back(parameter)
            set_values(parameter, value)
        ledger = self._device.ledger
        if ledger is not None:
            if self.state is not ChunkState.AWAY:
                ledger.free(self.device_bytes, Content.PARAMETERS)
            if self.is_on_device:
                ledger.free(self._part_bytes, Content.PARAMETERS)
                ledger.free(self.part_gradient_bytes, Content.REDUCED_GRADIENTS)
        self.state = ChunkState.AWAY
        self._regions, self._trained, self._pieces, self._sums, self._arrivals_of_regions = [], [], [], [], []
        self.masters, self.targets, self.staged, self.arrived = [], [], [], []
        if lost is not None:
            raise lost

    def _last_values(self) -> list[torch.Tensor]:
        if self._originals:
            return self._originals
        if self._shards.between_steps.is_closed:
            return self._lost_values()
        values = self.values()
        return [values[spec.name].to(origin, copy=True) for spec, origin in zip(self._specs, self.origins, strict=True)]

    def _lost_values(self) -> list[torch.Tensor]:
        with torch._C.DisableTorchFunctionSubclass():
            pairs = zip(self.parameters, self.origins, strict=True)
            return [torch.full_like(parameter, torch.nan, device=origin) for parameter, origin in pairs]


def _holding(regions: Sequence[_RegionMemory], offset_bytes: int) -> int:
    """The number of the region, one of ``regions``, that has a parameter at this place of the chunk."""
    return max(number for number, region in enumerate(regions) if region.offset_bytes <= offset_bytes)


def part_optimizer(
    chunk: ShardedChunk, options: StepOptions, make_optimizer: MakeOptimizer, widened: WidenedGradients | None = None
) -> ChunkOptimizer:
    """What steps the pieces of ``chunk``.  Raises PlanError if the optimizer looks at more than one scalar at once."""
    made = ChunkOptimizer(chunk.masters, chunk.stepped, options, make_optimizer, targets=chunk.targets, widened=widened)
    if chunk.stepped and not isinstance(made.optimizer, ELEMENTWISE):
        raise PlanError(
            f"{type(made.optimizer).__name__} may need whole parameters, but ranks in mode sharded have pieces of "
            f"them. Choose an optimizer that steps every scalar by itself, such as AdamW, or search a plan with "
            f"parallel = ddp or replicated."
        )
    return made
