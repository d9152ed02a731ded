"""Saved activations of one block on their way to the host and back.

[Note: What travels]
Within a block's forward, autograd hands every tensor that it saves to ``pack``.  What travels are the storages that the
block itself made: not parameters and buffers, not what it was given, not what it hands on, and nothing so small that a
copy costs more than its memory; nor what the block keeps in an attribute, which would stay there besides.  Autograd
keeps a handle instead of such a tensor; ``unpack`` makes the tensor anew, as a view of the storage that has come back,
so strides and shared storages stay what they were.  What the block saves and drops before it ends, a branch that its
result does not depend on, goes at once, as ever.  Each storage that has come back goes when the last operation that
saved a part of it has run backward, as it would have gone without the trip.

Casts of weights that autocast keeps travel too, unless others use them ([Note: Casts that blocks share] in
``weight_casts``).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Protocol, TypeVar

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from ...shared.basics.errors import ScheduleError
from ...shared.schema.plan import ActivationMode
from ...shared.schema.schedule import Content, Schedule, TaskKind
from ...shared.schema.workload import SMALLEST_SWAPPED_BYTES
from ..devices.device import TrainingDevice
from ..devices.ledger import LingeringStorage, MemoryLedger
from ..model.blocks import NamedBlock, run_again
from ..model.kept_tensors import kept_tensors
from ..model.nested_tensors import has_storage, storages_in
from .weight_casts import WeightCasts

_T = TypeVar("_T")


class SavedStorage:
    """A storage that autograd saved at least a part of."""

    __slots__ = ("__weakref__", "is_kept", "lingering", "returned", "size_bytes", "source", "versions")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.source: torch.Tensor | None = tensor.detach()
        """Keeps the storage until it has been copied to the host."""
        self.size_bytes = tensor.untyped_storage().nbytes()
        self.versions: set[int] = set()
        """Of its tensors, when they were saved."""
        self.is_kept = True
        """Whether it stays on the device."""
        self.lingering: LingeringStorage | None = None
        """The device's storage, if somebody held it when it had been copied to the host."""
        self.returned: torch.Tensor | None = None
        """Its bytes, when they have come back."""


class SavedTensor:
    """What autograd holds in place of a tensor."""

    __slots__ = ("dtype", "is_conjugate", "is_negative", "of", "offset", "shape", "stride", "version")

    def __init__(self, of: SavedStorage, tensor: torch.Tensor) -> None:
        self.of = of
        self.dtype = tensor.dtype
        self.shape = tensor.shape
        self.stride = tensor.stride()
        self.offset = tensor.storage_offset()
        # Lazy views: their storage has the values that conj() and the minus have yet to be applied to.
        self.is_conjugate = tensor.is_conj()
        self.is_negative = tensor.is_neg()
        self.version = tensor._version
        of.versions.add(self.version)

    def tensor(self) -> torch.Tensor:
        """The tensor as it was saved."""
        holder = self.of.source if self.of.is_kept else self.of.returned
        if holder is None:
            raise ScheduleError(
                "backward needs activations that have not come back from the host: it runs in another order than the "
                "schedule. Call backward() once, on the loss of the whole model."
            )
        if self.of.is_kept and holder._version != self.version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation"
            )
        made = torch.empty(0, dtype=self.dtype, device=holder.device)
        made.set_(holder.untyped_storage(), self.offset, self.shape, self.stride)
        if self.is_conjugate:
            made = made.conj()
        return torch._neg_view(made) if self.is_negative else made


class _OwnStorages:
    """Tells the storages that a running block makes itself from those that it was given or that the model keeps."""

    def __init__(self, model: nn.Module, block: nn.Module) -> None:
        self._model = model
        self._modules = list(block.modules())
        self._of_model = {
            tensor.untyped_storage()._cdata: weakref.ref(tensor.untyped_storage())
            for tensor in (*model.parameters(), *model.buffers())
            if has_storage(tensor)
        }
        """By address, which a buffer that a block replaces leaves to what blocks make."""
        self._of_block: dict[int, weakref.ref[Any]] = {}
        """The same of the block's buffers, as the running forward found them."""
        self._given: set[int] = set()

    def begin(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """The block is about to run on these."""
        self._given = storages_in((args, kwargs))
        # A forward may have filled or replaced them.
        self._of_block = {storage._cdata: weakref.ref(storage) for storage in self._buffers()}

    def _buffers(self) -> list[torch.UntypedStorage]:
        """The storages of the block's buffers, as they are now."""
        buffers = (buffer for module in self._modules for buffer in module._buffers.values() if buffer is not None)
        return [buffer.untyped_storage() for buffer in buffers if has_storage(buffer)]

    def key_of(self, tensor: torch.Tensor) -> int | None:
        """The storage of a tensor that is saved, if the block made it."""
        if not has_storage(tensor):
            return None
        key = tensor.untyped_storage()._cdata
        of_model = _alive(self._of_model, key) is not None or _alive(self._of_block, key) is not None
        return None if key in self._given or of_model else key

    def staying(self, output: Any) -> set[int]:
        """The storages that outlive the block's forward anyway: what it hands on, and what its modules keep."""
        kept = kept_tensors(self._modules, model=self._model)
        storages = [*self._buffers(), *(tensor.untyped_storage() for tensor in kept)]
        return storages_in(output) | {storage._cdata for storage in storages}


class SwappableTally:
    """Counts what could travel; everything stays where it is.  For tracing, which must not change what it measures."""

    def __init__(self, model: nn.Module, block: nn.Module, *, runs_again: bool = False) -> None:
        self.sizes_bytes: list[int] = []
        """Of the storages that the latest forward made, saved and neither handed on nor kept; tiny ones included."""
        self._own = _OwnStorages(model, block)
        self._casts = WeightCasts(model, block, runs_again=runs_again)
        self._found: dict[int, weakref.ref[Any]] = {}
        """By address, which a storage that is gone leaves to later ones."""

    def run(self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The block's forward."""
        self._own.begin(args, kwargs)
        self._found.clear()
        self._casts.begin()
        with saved_tensors_hooks(self._pack, lambda tensor: tensor):
            output = forward(*args, **kwargs)
        self._casts.forget()
        staying = self._own.staying(output)
        alive = [(key, storage) for key, reference in self._found.items() if (storage := reference()) is not None]
        self.sizes_bytes = [storage.nbytes() for key, storage in alive if key not in staying]
        return output

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor:
        key = self._own.key_of(tensor)
        if key is not None and not self._casts.stays(tensor) and _alive(self._found, key) is None:
            self._found.pop(key, None)
            self._found[key] = weakref.ref(tensor.untyped_storage())
        # An operation that saved its own result would hold itself otherwise.
        return tensor.detach()


class SavedActivations:
    """Collects what one block saves while its forward runs."""

    def __init__(self, model: nn.Module, block: nn.Module, *, runs_again: bool = False) -> None:
        self._own = _OwnStorages(model, block)
        self._casts = WeightCasts(model, block, runs_again=runs_again)
        self._saved: dict[int, weakref.ref[SavedStorage]] = {}
        """By address, which a storage that is gone leaves to later ones.  Autograd alone holds them."""
        self._found: list[SavedStorage] = []
        """Those that are there when the forward ends."""

    def run(self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The block's forward, with autograd's saving watched."""
        self._own.begin(args, kwargs)
        self._found.clear()
        self._saved.clear()
        self._casts.begin()
        with saved_tensors_hooks(self._pack, _unpack):
            output = forward(*args, **kwargs)
        staying = self._own.staying(output)
        self._casts.let_go(staying)
        alive = {key: saved for key in self._saved if (saved := _alive(self._saved, key)) is not None}
        self._found = list(alive.values())
        for key, saved in alive.items():
            assert saved.source is not None
            is_small = saved.size_bytes < SMALLEST_SWAPPED_BYTES
            # What was changed after it was saved stays, for backward to say so.
            saved.is_kept = is_small or key in staying or saved.versions != {saved.source._version}
        return output

    def take(self) -> list[SavedStorage]:
        """The storages that may travel, in the order in which they were saved; they are handed over."""
        found = [saved for saved in self._found if not saved.is_kept]
        self._found.clear()
        self._saved.clear()
        return found

    def _pack(self, tensor: torch.Tensor) -> Any:
        key = self._own.key_of(tensor)
        if key is None or self._casts.stays(tensor):
            return tensor
        saved = _alive(self._saved, key)
        if saved is None:
            saved = SavedStorage(tensor)
            self._saved.pop(key, None)
            self._saved[key] = weakref.ref(saved)
        return SavedTensor(saved, tensor)


class Saving(Protocol):
    """Who knows what travels of a block."""

    def take(self) -> list[SavedStorage]:
        """The storages that may travel, when the block's forward has ended; they are handed over."""


class SwappedBlock:
    """A block of which something travels, and its home on the host.

    One micro-batch at a time: its backward has run before the next one's forward begins.
    """

    arrives_for: ClassVar[TaskKind] = TaskKind.BACKWARD
    """The task of the block that reads what has come back first."""

    def __init__(
        self, saving: Saving, number: int, size_bytes: int, device: TrainingDevice, *, what: str = "activations"
    ) -> None:
        self._saving = saving
        self._name = f"{what} of block {number}"
        self._device = device
        self._home = device.host_buffer(size_bytes)
        self._travelling: list[SavedStorage] = []
        self._sent: list[torch.Tensor] = []
        """What copies that are queued still read ([Note: Memory on one stream] in ``memory_events``)."""
        self._out_bytes = 0
        self._back_bytes = 0

    # -- out ---------------------------------------------------------------------------------------------------------

    def leave(self) -> list[torch.Tensor]:
        """Forward has ended; gives what is about to leave.  What does not fit into its home stays on the device.

        Shapes that differ from the traced ones may save more than the schedule has room for.
        """
        room = self._home.numel()
        for saved in self._saving.take():
            saved.is_kept = saved.size_bytes > room
            if not saved.is_kept:
                room -= saved.size_bytes
                self._travelling.append(saved)
        self._out_bytes = sum(saved.size_bytes for saved in self._travelling)
        if self._device.runs_behind:
            self._sent = [saved.source for saved in self._travelling if saved.source is not None]
        return [saved.source for saved in self._travelling if saved.source is not None]

    def offload(self) -> int:
        """Copy everything to the host and let the device's storages go; gives the bytes."""
        leaving = [saved.source for saved in self._travelling if saved.source is not None]
        flats = [_bytes_of(source.untyped_storage(), self._device) for source in leaving]
        self._device.copy_all(self._places(), flats, to_device=False)
        storages = [weakref.ref(source.untyped_storage()) for source in leaving]
        del leaving, flats
        for saved, storage in zip(self._travelling, storages, strict=True):
            saved.source = None
            saved.lingering = self._let_go(storage, saved.size_bytes)
            self._out_bytes -= saved.size_bytes
        return sum(saved.size_bytes for saved in self._travelling)

    def _places(self) -> Sequence[torch.Tensor]:
        """Where on the host each of what travels lies, in order."""
        sizes = [saved.size_bytes for saved in self._travelling]
        return torch.split(self._home[: sum(sizes)], sizes)

    def let_go(self) -> None:
        """The current stream waits for the copies to the host: nobody needs the device's storages any more."""
        self._sent.clear()

    def _let_go(self, storage: weakref.ref[Any], size_bytes: int) -> LingeringStorage | None:
        """The storage counts until nobody holds it: a block's caller, or the model somewhere outside autograd."""
        ledger = self._device.ledger
        if ledger is None:
            return None
        held = storage()
        if held is not None:
            return ledger.free_with(held, size_bytes, Content.SWAPPED)
        ledger.free(size_bytes, Content.SWAPPED)
        return None

    # -- back --------------------------------------------------------------------------------------------------------

    def make_room(self) -> None:
        """Take the device's bytes for what comes back.  Raises the device's out-of-memory error if they do not fit."""
        ledger = self._device.ledger
        total = sum(saved.size_bytes for saved in self._travelling)
        if ledger is not None:
            self._take_back(ledger)
            ledger.allocate(total - self._back_bytes, self._name, Content.SWAPPED)
        self._back_bytes = total
        if self._sent:
            # A trip so short that the copy to the host may still read: what it read comes back to where it was.
            for saved, sent in zip(self._travelling, self._sent, strict=True):
                saved.returned = _bytes_of(sent.untyped_storage(), self._device)
            return
        for saved in self._travelling:
            if saved.returned is None:
                saved.returned = self._device.empty(saved.size_bytes, self._name)

    def _take_back(self, ledger: MemoryLedger) -> None:
        """What somebody still holds comes back to where it was, as if it had never left ([Note: Storages that linger]).

        A second one beside it is more than a schedule accounts for.
        """
        self._back_bytes = 0
        for saved in self._travelling:
            held = ledger.take_back(saved.lingering) if saved.lingering is not None else None
            if held is not None:
                saved.returned = _bytes_of(held, self._device)
                self._back_bytes += saved.size_bytes

    def fetch(self) -> int:
        """Copy everything back; gives the bytes.

        Makes room first, unless the compute thread has ([Note: Memory on one stream] in ``memory_events``).
        """
        if not self._device.runs_behind:
            self.make_room()
        coming = [saved.returned for saved in self._travelling if saved.returned is not None]
        self._device.copy_all(coming, self._places(), to_device=True)
        return sum(saved.size_bytes for saved in self._travelling)

    def arrive(self) -> None:
        """Backward, or recomputation before it, is about to begin: what has come back belongs to its operations now."""
        returned = [saved.returned for saved in self._travelling if saved.returned is not None]
        self._travelling.clear()
        back_bytes, self._back_bytes = self._back_bytes, 0
        ledger = self._device.ledger
        if ledger is not None:
            ledger.free(back_bytes, Content.SWAPPED)
            if ledger.is_metering:
                ledger.adopt(returned, Content.SWAPPED)

    def forget(self) -> None:
        """Let go of everything that has not come back, whoever still holds the graph.  Idempotent."""
        self._saving.take()
        for saved in self._travelling:
            saved.source = saved.returned = None
        ledger = self._device.ledger
        if ledger is not None:
            ledger.free(self._out_bytes + self._back_bytes, Content.SWAPPED)
        self._out_bytes = self._back_bytes = 0
        self._travelling.clear()
        self._sent.clear()

    def close(self) -> None:
        """Give the home on the host back too; no copy may be under way.  Idempotent."""
        self.forget()
        self._home = torch.empty(0, dtype=torch.uint8)


class SwappedActivations(SwappedBlock):
    """A block in mode SWAP: its saved activations, and their home on the host."""

    def __init__(
        self,
        model: nn.Module,
        block: nn.Module,
        number: int,
        size_bytes: int,
        device: TrainingDevice,
        *,
        runs_again: bool = False,
    ) -> None:
        self._activations = SavedActivations(model, block, runs_again=runs_again)
        super().__init__(self._activations, number, size_bytes, device)

    def run(self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The block's forward."""
        self.forget()
        return self._activations.run(forward, args, kwargs)


def swapped_blocks(
    model: nn.Module,
    blocks: Sequence[NamedBlock],
    modes: Sequence[ActivationMode],
    schedule: Schedule,
    device: TrainingDevice,
) -> dict[int, SwappedActivations]:
    """The blocks whose saved activations travel, with room on the host for them."""
    again = run_again(blocks)
    return {
        number: SwappedActivations(model, blocks[number].module, number, size_bytes, device, runs_again=number in again)
        for number, size_bytes in rooms_on_host(schedule).items()
        if modes[number] is ActivationMode.SWAP
    }


def rooms_on_host(schedule: Schedule) -> dict[int, int]:
    """By block, the bytes on the host of what travels."""
    return {
        buffer.section: buffer.size_bytes
        for buffer in schedule.buffers
        if buffer.content is Content.SWAPPED and buffer.is_static and isinstance(buffer.section, int)
    }


def _alive(by_address: Mapping[int, weakref.ref[_T]], key: int) -> _T | None:
    """What lies at an address, if it is still there."""
    reference = by_address.get(key)
    return None if reference is None else reference()


def _unpack(saved: Any) -> torch.Tensor:
    return saved.tensor() if isinstance(saved, SavedTensor) else saved


def _bytes_of(storage: torch.UntypedStorage, device: TrainingDevice) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=device.torch_device).set_(storage)
