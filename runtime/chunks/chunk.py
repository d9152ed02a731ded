"""A chunk's memory: the flat buffer on the device that parameters are views of, its home and gradients on the host.

[Note: Storages that come and go]
Parameters never change identity.  ``param.data`` is set once to a view of the chunk's flat tensor; while the chunk is
away, the flat storage has size 0.  Tensors saved for backward refer to the same storage, so they are whole again when
the chunk is gathered again.  Copies go through a tensor that shares the storage but not the parameters' version
counters: a gather is no change of a parameter's value in the eyes of autograd.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum, auto
from threading import Lock
from typing import Final

import torch
from torch import nn

from ...shared.basics.errors import FileError, ScheduleError
from ...shared.layout.layout import Chunk, aligned
from ...shared.layout.residencies import ChunkResidency
from ...shared.optimizers.state import master_bytes, summed_dtype
from ...shared.schema.optimizer import Optimizer
from ...shared.schema.schedule import Content
from ...shared.schema.workload import DType, Parameter
from ..devices.device import TrainingDevice
from ..model.nested_tensors import storage_bytes
from ..model.strides import in_memory_order, strided
from ..optimizers.state_place import MASTER, StatePlace
from .absent_parameters import bring_back, send_away
from .chunk_store import ChunkOnDisk
from .meta_parameters import set_all, set_values
from .parameter_values import OwnValues, ParameterValues, Wanted


class ChunkState(Enum):
    """Where a chunk's weights are, and what that costs the device."""

    AWAY = auto()
    """On the host alone, and parameters are of a class that refuses to be read.  An offloaded chunk's flat storage has
    size 0; a host-stepped one's holds the values before the step."""
    COMING = auto()
    """The device's bytes are taken, but the copy may still run or be queued.  Parameters refuse to be read until
    ``show``: who waits for the gather's mark calls it."""
    PRESENT = auto()
    """The copy is done, or queued on a stream; persistent and empty chunks are never in another state."""


_NEXT: Final = {
    ChunkState.AWAY: (ChunkState.COMING,),
    ChunkState.COMING: (ChunkState.PRESENT, ChunkState.AWAY),
    ChunkState.PRESENT: (ChunkState.AWAY,),
}
"""Which state may follow which.  A copy that failed leaves a chunk COMING, which goes AWAY from there."""


@dataclass(frozen=True, slots=True)
class HostStepping:
    """What the host does with a chunk that it steps."""

    has_arrivals: bool = False
    """Whether later micro-batches have gradients to add."""
    widens: bool = False
    """Whether gradients of all micro-batches are added to float32 sums."""
    optimizer: Optimizer = Optimizer.ADAMW
    """Says which parameters are stepped through float32 masters."""
    disk: ChunkOnDisk | None = None
    """What lies of it on the disk, if anything does."""


class DeviceChunk:
    """A chunk and the parameters whose values it holds."""

    def __init__(
        self,
        chunk: Chunk,
        specs: Sequence[Parameter],
        parameters: Sequence[nn.Parameter],
        device: TrainingDevice,
        *,
        residency: ChunkResidency,
        stepping: HostStepping | None = None,
        values: ParameterValues | None = None,
    ) -> None:
        """Move the parameters in.  ``stepping``: what the host does with it; by default AdamW without a disk.

        ``values`` says where their values come from; by default they have them.  Raises the device's out-of-memory
        error if a chunk that stays there does not fit, and FileError if the disk or ``values`` fail.
        """
        values = values or OwnValues()
        stepping = stepping or HostStepping()
        self.disk = disk = stepping.disk
        self.state_place = None if disk is None or disk.state is None else StatePlace(disk.state, disk)
        """Where masters and the optimizer's state lie, if these are kept on the disk."""
        self.chunk = chunk
        self.parameters = tuple(parameters)
        self.residency = residency
        self.state = ChunkState.PRESENT
        """Changed by ``make_room``, ``gather`` and ``release``."""
        self.is_shown = True
        """Whether parameters may be read (``show``)."""
        self._device = device
        self._specs = tuple(specs)
        self._optimizer = stepping.optimizer
        self.widens = stepping.widens
        """Whether gradients of every micro-batch arrive beside float32 sums."""
        self.trainable = tuple(p for p, s in zip(parameters, specs, strict=True) if s.trainable)
        values.made(lambda: self._allocate(stepping))
        self._gathering = Lock()
        """Held while the home is copied to the device, or rewritten."""
        self.origins = [parameter.device for parameter in parameters]
        """Where each of them is to be in the end."""
        self.masters: list[torch.Tensor] = []
        """Host weights of trainable parameters that CPU Adam steps, in order; float32."""
        self.targets: list[torch.Tensor | None] = []
        """Where a stepped master is written back to, narrower than itself; None where the home is the master."""
        self.staged: list[torch.Tensor] = []
        """Host views in which gradients are added up, in the order of ``masters``."""
        self.arrived: list[torch.Tensor] = []
        """Host views that receive gradients which are added, in the same order; empty if there are none."""
        self.stepped_next: set[nn.Parameter] = set()
        """Whose gradients of this step have left; ``PlacedModel.drop_gradients`` empties it."""
        self._move_in(values)
        if not self.is_persistent:
            self._let_go()

    def _allocate(self, stepping: HostStepping) -> None:
        """Make the place on the device, the home, and what gradients arrive in."""
        chunk, device, disk = self.chunk, self._device, self.disk
        if self.has_place and device.ledger is not None:
            device.ledger.allocate(chunk.size_bytes, f"chunk {chunk.id}", Content.PARAMETERS)
        self._flat = device.empty(chunk.size_bytes, f"chunk {chunk.id}")
        self._home = None if self.is_persistent or self.is_on_disk else device.host_buffer(chunk.size_bytes)
        if device.ledger is not None:
            # Evaluation gathers on the compute thread, whose operations the ledger watches: the home is the host's.
            device.ledger.ignore([self._flat, *([] if self._home is None else [self._home])])
        is_staged = not self.is_persistent and bool(self.trainable)
        summed_bytes = sum(aligned(s.num_elements * self._summed(s).item_bytes) for s in self._specs if s.trainable)
        has_own = is_staged and (disk is None or disk.gradients is None)
        passing = disk.gradients if is_staged and disk is not None else None
        self._staging = device.host_buffer(summed_bytes) if has_own else passing
        has_arrivals = is_staged and (stepping.has_arrivals or stepping.widens)
        self._arrivals = device.host_buffer(chunk.staging_bytes) if has_arrivals else None

    @property
    def stepped(self) -> tuple[nn.Parameter, ...]:
        """Whose weights ``masters`` are, one by one."""
        return self.trainable

    @property
    def stepped_stretches(self) -> Sequence[slice | None]:
        """Of each of these, the scalars whose weights they are; None: all."""
        return [None] * len(self.trainable)

    @property
    def device_bytes(self) -> int:
        """What it takes on the device when it is there."""
        return self.chunk.size_bytes

    @property
    def copied_bytes(self) -> int:
        """What a gather copies from the host."""
        return self.chunk.size_bytes

    @property
    def is_persistent(self) -> bool:
        """Whether the device has its weights for good, and steps them."""
        return self.residency is ChunkResidency.PERSISTENT

    @property
    def is_on_disk(self) -> bool:
        """Whether its weights have their home on the disk."""
        return self.disk is not None and self.disk.parameter_record is not None

    @property
    def has_place(self) -> bool:
        """Whether its bytes on the device are taken for good; a host-stepped chunk's are filled after every step."""
        return self.residency in (ChunkResidency.PERSISTENT, ChunkResidency.HOST_STEPPED)

    def _move_in(self, values: ParameterValues) -> None:
        staged_bytes = arrived_bytes = 0
        whole = self._home
        if self.disk is not None and self.is_on_disk:
            # Where it is stepped, or what is only read passes through, before it is written.
            whole = self.disk.on_its_way(None) if self.disk.parameters is None else self.disk.parameters
        homes = self._views_in(self._flat if whole is None else whole)
        values.fill(
            [
                Wanted(spec.name, parameter, in_memory_order(home))
                for spec, parameter, home in zip(self._specs, self.parameters, homes, strict=True)
            ]
        )
        for spec, parameter, home in zip(self._specs, self.parameters, homes, strict=True):
            if whole is not None and spec.trainable:
                assert self._staging is not None
                summed = self._summed(spec)
                self.staged.append(view_of(self._staging, staged_bytes, parameter, getattr(torch, summed)))
                staged_bytes += aligned(spec.num_elements * summed.item_bytes)
                if self._arrivals is not None:
                    self.arrived.append(view_of(self._arrivals, arrived_bytes, parameter))
                    arrived_bytes += aligned(spec.size_bytes)
                is_narrow = self._has_master(spec)
                self.masters.append(self._master_of(home) if is_narrow else home)
                self.targets.append(home if is_narrow else None)
        if self.disk is not None:
            # Before the model's own copies go: writing may fail.
            if self.is_on_disk and whole is not None and self.disk.parameters is None:
                self.disk.write_parameters(whole)
            self.disk.write_stepped()
        set_all(self.parameters, self._views_in(self._flat))

    def _summed(self, spec: Parameter) -> DType:
        """The element type in which the host adds gradients up."""
        return summed_dtype(spec.dtype) if self.widens else spec.dtype

    def _master_of(self, home: torch.Tensor) -> torch.Tensor:
        """The float32 weight that is stepped in the place of ``home``, the next one."""
        if self.state_place is None:
            return home.float()
        return self.state_place.put((len(self.masters), MASTER), home, torch.float32)

    def _has_master(self, spec: Parameter) -> bool:
        return master_bytes(DType(spec.dtype), self._optimizer) > 0

    @property
    def narrow(self) -> tuple[nn.Parameter, ...]:
        """Trainable parameters that are stepped through float32 masters."""
        pairs = zip(self.parameters, self._specs, strict=True)
        return tuple(parameter for parameter, spec in pairs if spec.trainable and self._has_master(spec))

    @property
    def wide(self) -> tuple[nn.Parameter, ...]:
        """Trainable parameters that are stepped themselves."""
        narrow = {id(parameter) for parameter in self.narrow}
        return tuple(parameter for parameter in self.trainable if id(parameter) not in narrow)

    def named_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """The parameters with their names."""
        return [(spec.name, parameter) for spec, parameter in zip(self._specs, self.parameters, strict=True)]

    def check_parameters(self) -> None:
        """Raise ScheduleError if a parameter has left the chunk, or was frozen or thawed."""
        own = {flat.untyped_storage()._cdata for flat in self._flats}
        with torch._C.DisableTorchFunctionSubclass():
            self._check_parameters(own)

    @property
    def _flats(self) -> Sequence[torch.Tensor]:
        """What parameters are views of."""
        return (self._flat,)

    def _check_parameters(self, own: Collection[int]) -> None:
        for spec, parameter in zip(self._specs, self.parameters, strict=True):
            if parameter.untyped_storage()._cdata not in own:
                raise ScheduleError(
                    f"parameter {spec.name} has other memory than when the plan was carried out. Close the training "
                    f"before model.to(), model.half(), or an assignment to parameter.data."
                )
            if parameter.requires_grad != spec.trainable:
                raise ScheduleError(
                    f"requires_grad of parameter {spec.name} has become {parameter.requires_grad} since the plan was "
                    f"carried out. Close the training, trace the model again and search a plan for it."
                )

    # -- residency ---------------------------------------------------------------------------------------------------

    def _enter(self, state: ChunkState) -> None:
        if self.chunk.size_bytes > 0:
            assert state in _NEXT[self.state], f"chunk {self.chunk.id} is {self.state} and cannot be {state}"
            self.state = state

    def make_room(self) -> None:
        """Take the device's bytes, unless it has them.

        Raises the device's out-of-memory error if they do not fit.
        """
        with self._gathering:
            if not self.has_place:
                self._take_bytes()
            self._enter(ChunkState.COMING)

    def show(self) -> None:
        """Parameters may be read from now on: the gather is over, or on the stream before what reads them."""
        if not self.is_shown:
            for parameter in self.parameters:
                bring_back(parameter)
            self.is_shown = True

    def _take_bytes(self) -> None:
        name = f"chunk {self.chunk.id}"
        if self._device.ledger is not None:
            self._device.ledger.allocate(self.device_bytes, name, Content.PARAMETERS)
        try:
            self._resize(is_there=True)
        except BaseException:
            if self._device.ledger is not None:
                self._device.ledger.free(self.device_bytes, Content.PARAMETERS)
            raise

    def _resize(self, *, is_there: bool) -> None:
        """Give the flat storage its bytes, or none."""
        self._device.resize(self._flat, self.chunk.size_bytes if is_there else 0, f"chunk {self.chunk.id}")

    def gather(self, passing: torch.Tensor | None = None) -> None:
        """Bring the chunk's home to the device, or ``passing``, what was read of it from the disk.

        Makes room first, unless the compute thread has ([Note: Memory on one stream] in ``memory_events``).
        """
        home = self._home if passing is None else passing
        assert home is not None
        # A place is no memory that comes and goes, so that the compute thread makes none.
        if not self._device.runs_behind or (self.has_place and self.state is ChunkState.AWAY):
            self.make_room()
        with self._gathering:
            self._device.copy(self._flat, home, to_device=True)
            self._enter(ChunkState.PRESENT)

    def release(self) -> None:
        """Give the device's bytes back, in the order of the current stream; who has a place there keeps it."""
        self._let_go()
        if self._device.ledger is not None and not self.has_place:
            self._device.ledger.free(self.device_bytes, Content.PARAMETERS)

    def leave(self) -> None:
        """``release``, if it is there and may go; no copy may be under way.  Idempotent."""
        if self.state is not ChunkState.AWAY and not self.is_persistent and self.chunk.size_bytes > 0:
            self.release()

    def _let_go(self) -> None:
        if self.chunk.size_bytes == 0:
            return
        self._enter(ChunkState.AWAY)
        self.is_shown = False
        for spec, parameter in zip(self._specs, self.parameters, strict=True):
            send_away(parameter, spec.name)
        if not self.has_place:
            self._resize(is_there=False)

    # -- gradients ---------------------------------------------------------------------------------------------------

    def detach_gradients(self) -> list[torch.Tensor | None]:
        """Take the gradients off the parameters, in the order of ``masters``; None where there is none."""
        gradients = [parameter.grad for parameter in self.trainable]
        for parameter, gradient in zip(self.trainable, gradients, strict=True):
            parameter.grad = None
            if gradient is not None:
                self.stepped_next.add(parameter)
        return gradients

    @property
    def leaving_content(self) -> Content:
        """What an offload copies to the host, and drops."""
        return Content.GRADIENTS

    def leaving_bytes(self, gradients: Sequence[torch.Tensor | None]) -> int:
        """The device's bytes that go with ``gradients`` when these have been copied to the host."""
        return storage_bytes(gradients)

    def stage_gradients(self, gradients: list[torch.Tensor | None], *, is_first: bool = True) -> list[bool]:
        """Copy gradients to the host and drop them; says for which trainable parameters there was one.

        Those of the first micro-batch are staged, later ones and those to be widened arrive beside them.
        """
        present = [gradient is not None for gradient in gradients]
        places = self.staged if is_first and not self.widens else self.arrived
        pairs = [(staged, one) for staged, one in zip(places, gradients, strict=True) if one is not None]
        self._device.copy_all([staged for staged, _ in pairs], [one for _, one in pairs], to_device=False)
        gradients[:] = [None] * len(gradients)
        return present

    def accumulate(self, staged: Sequence[bool], arrived: Sequence[bool]) -> list[bool]:
        """Add what has arrived to what is staged; both say for which parameters there is a gradient, as the result.

        The same additions in the same order as autograd's own, so the bits are the same; float32 sums are those of
        gradients that were widened one by one, which rounds nothing.
        """
        added = [place for place, (a, b) in enumerate(zip(staged, arrived, strict=True)) if a and b]
        first = [place for place, (a, b) in enumerate(zip(staged, arrived, strict=True)) if b and not a]
        if added:
            torch._foreach_add_([self.staged[place] for place in added], [self.arrived[place] for place in added])
        if first:
            torch._foreach_copy_([self.staged[place] for place in first], [self.arrived[place] for place in first])
        return [a or b for a, b in zip(staged, arrived, strict=True)]

    def accumulate_one(self, place: int, *, is_staged: bool) -> None:
        """Add what has arrived for one trainable parameter to what is staged, if anything is."""
        if is_staged:
            self.staged[place].add_(self.arrived[place])
        else:
            self.staged[place].copy_(self.arrived[place])

    def moved_gradient_bytes(self, present: Sequence[bool]) -> int:
        """Bytes of the gradients that were there."""
        moved = self.arrived if self.widens else self.staged
        return sum(s.numel() * s.element_size() for s, p in zip(moved, present, strict=True) if p)

    # -- values from outside -----------------------------------------------------------------------------------------

    def values(self) -> dict[str, torch.Tensor]:
        """The parameters' current values by name: where the chunk has its home.

        Those on the disk are read when they are looked at, which is to be before they are stepped again.  Raises
        FileError.
        """
        return self._values_in(self._current())

    def stepped_values(self) -> list[torch.Tensor]:
        """The parameters' values where the host steps them, in order; those on the disk while they have been read."""
        place = self._home if self.disk is None or self.disk.parameters is None else self.disk.parameters
        assert place is not None
        return self._views_in(place)

    def _current(self) -> torch.Tensor:
        if self.disk is not None and self.is_on_disk:
            return self.disk.mapped_parameters()
        return self._flat if self._home is None else self._home

    def _values_in(self, source: torch.Tensor) -> dict[str, torch.Tensor]:
        return {spec.name: view for spec, view in zip(self._specs, self._views_in(source), strict=True)}

    def _views_in(self, source: torch.Tensor) -> list[torch.Tensor]:
        """The parameters' places in a uint8 buffer of the chunk's size, in order."""
        pairs = zip(self.chunk.parameters, self.parameters, strict=True)
        return [view_of(source, placed.offset_bytes, parameter) for placed, parameter in pairs]

    @contextmanager
    def rewriting(self) -> Iterator[dict[str, torch.Tensor]]:
        """``values``, which may be written within the block.  No task but gathers of the chunk may be under way.

        Gathers ahead of the next forward come before the block and are repeated after it, or come after it.  Of a chunk
        on the disk no task at all may be under way.  Raises FileError.
        """
        if self.disk is not None and self.is_on_disk:
            assert self.state is ChunkState.AWAY or not self.chunk.size_bytes
            whole = self.disk.read_for_gather(None)
            yield self._values_in(whole)
            self.disk.write_parameters(whole)
            return
        with self._gathering:
            self._device.synchronize()
            yield self.values()
            if self._home is not None and self.state is not ChunkState.AWAY:
                self._device.copy(self._flat, self._home, to_device=True)
            self._device.synchronize()

    # -- leaving -----------------------------------------------------------------------------------------------------

    def let_originals_go(self) -> None:
        """All ranks have moved this chunk in: from now on its home is all that there is."""

    def keep(self, returning: Collection[nn.Parameter] = ()) -> None:
        """Training begins: parameters that began on the meta device are to be on the host in the end.

        Those that are ``returning`` go back: nobody has changed them, and they are in files.
        """
        pairs = zip(self.parameters, self.origins, strict=True)
        self.origins = [
            torch.device("cpu") if origin.type == "meta" and parameter not in returning else origin
            for parameter, origin in pairs
        ]

    def move_out(self) -> None:
        """Give every parameter a tensor of its own again, where it came from, with its current value.

        Raises FileError if the disk fails; parameters that it has are NaN then.
        """
        failure: FileError | None = None
        try:
            source = self._current()
        except FileError as error:
            failure, source = error, torch.full((self.chunk.size_bytes,), 255, dtype=torch.uint8)
        for placed, parameter, origin in zip(self.chunk.parameters, self.parameters, self.origins, strict=True):
            value = view_of(source, placed.offset_bytes, parameter)
            bring_back(parameter)
            set_values(parameter, value.to(origin, copy=True))
        if (self.has_place or self.state is not ChunkState.AWAY) and self._device.ledger is not None:
            self._device.ledger.free(self.chunk.size_bytes, Content.PARAMETERS)
        # Dropped, not shrunk: somebody else may hold the storage by now, such as an array of numpy.
        self.state = ChunkState.AWAY
        self._flat = torch.empty(0, dtype=torch.uint8, device=self._flat.device)
        self._home = self._staging = self._arrivals = self.disk = self.state_place = None
        self.masters, self.targets, self.staged, self.arrived = [], [], [], []
        if failure is not None:
            raise failure


def view_of(
    flat: torch.Tensor, offset_bytes: int, like: torch.Tensor, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """The stretch of a uint8 buffer that holds a tensor of the shape and strides of ``like``, or of another dtype."""
    dtype = like.dtype if dtype is None else dtype
    size_bytes = like.numel() * dtype.itemsize
    return strided(flat[offset_bytes : offset_bytes + size_bytes].view(dtype), like)
