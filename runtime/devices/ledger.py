"""The memory ledger: which storages are alive on the device, counted as they come and go.

On the CPU the host's memory stands in for the device's, and no allocator keeps the two apart.  The ledger does: it
counts what the compute thread's operations produce (a dispatch mode sees every one of them, in forward, backward and
recomputation), what they are given that was there before anybody watched, and what the runtime allocates by name, and
raises the device's out-of-memory error beyond the budget.  What only other threads touch is on the host's side and does
not count.

[Note: Storages that linger]
A storage that has been copied to the host is let go of, and yet others may hold it: the caller of a block holds the
block's input until the block has returned, a moment beyond the end of its forward, which hooks tell.  It counts until
it has gone.  If its bytes come back before that, they come back to the same storage: a schedule accounts for one.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import torch

from ...shared.basics.errors import DeviceOutOfMemoryError, ScheduleError, WorkloadError
from ...shared.basics.units import format_bytes
from ...shared.schema.schedule import Content
from ..model.nested_tensors import has_storage, tensors_in
from .watching_mode import WatchingMode

_LIFT_FRESH: Final = torch.ops.aten.lift_fresh.default


class CpuOutOfMemoryError(DeviceOutOfMemoryError, torch.OutOfMemoryError):
    """The enforced budget of the CPU device is exceeded; also torch's own out-of-memory error."""


class MemoryChange(NamedTuple):
    """Bytes of the device that came or went."""

    at_s: float
    content: Content | None
    more_bytes: int
    is_named: bool
    """Whether the runtime allocated them by name; else operations did."""
    num_operations: int
    """Operations watched so far."""


class MemoryLedger:
    """Bytes alive on one device.  Thread-safe; sizes in bytes, times in seconds of ``time.perf_counter``."""

    def __init__(self, budget_bytes: int | None = None, *, device_type: str = "cpu") -> None:
        self.budget_bytes = budget_bytes
        self.device_type = device_type
        """Of tensors that count although no watched operation made them."""
        self.named_bytes = 0
        """Bytes allocated by name (``allocate``)."""
        self.watched_bytes = 0
        """Bytes of storages seen by the dispatch mode or adopted."""
        self.watched_peak_bytes = 0
        """Highest ``watched_bytes`` since ``reset_watched_peak``."""
        self.claim_bytes = 0
        """What the running task may hold beyond named allocations while nobody watches (Note: Claims)."""
        self.peak_bytes = 0
        self.named: dict[Content | None, int] = {}
        """Bytes allocated by name, by what they hold."""
        self.watched: dict[Content | None, int] = {}
        """Watched bytes by what they hold, as far as it was said; None: what operations made."""
        self.changes: list[MemoryChange] | None = None
        """Everything that came and went, in order, while somebody asks for it."""
        self.num_operations = 0
        """Operations watched so far."""
        self.before_operation: Callable[[], None] | None = None
        """Called before each watched operation."""
        self.on_operation: Callable[[Any, tuple[Any, ...], dict[str, Any], Any], None] | None = None
        """Called after each watched operation with (operator, args, kwargs, result)."""
        self.planned_bytes = 0
        """What plans that are being carried out take at most, of what was traced; 0: nobody has said."""
        self.is_evaluating = False
        """Whether a model runs forward alone, of which plans say nothing."""
        self.doing = "setting up"
        """What the compute thread is doing, for messages."""
        self.hint: Callable[[], str | None] | None = None
        """Why memory lacks, if it is known, and what helps, up to the last remedy."""
        self.is_finding = True
        """Whether what operations are given and nobody knew is on the device, and not data that is being prepared."""
        self.place: Callable[[], Hashable] | None = None
        """Where the model is, which is noted of what operations make; None: nowhere."""
        self.on_forget: Callable[[int, Hashable, int], None] | None = None
        """Called when a watched storage goes, with its address, the place that was noted of it and its bytes."""
        self._lock = threading.RLock()
        self._watched: dict[int, _Watched] = {}
        self._inputs: dict[int, _Watched] = {}
        """Those that were adopted as inputs of the latest call."""
        self._mode: WatchingMode | None = None
        self._moment: float | None = None

    # -- levels ------------------------------------------------------------------------------------------------------

    @property
    def is_metering(self) -> bool:
        """Whether operations are being watched."""
        return self._mode is not None

    @property
    def level_bytes(self) -> int:
        """Bytes alive now; while nobody watches, with the running task's claim in place of its operations."""
        return self.named_bytes + (self.watched_bytes if self.is_metering else self.claim_bytes)

    @property
    def alive(self) -> dict[Content | None, int]:
        """Bytes alive by what they hold."""
        return {c: self.named.get(c, 0) + self.watched.get(c, 0) for c in self.named.keys() | self.watched.keys()}

    def reset_peak(self) -> None:
        """Forget the peak; it becomes the present level."""
        with self._lock:
            self.peak_bytes = self.level_bytes

    @property
    def now_s(self) -> float:
        """The present moment, on the clock of ``changes``."""
        return time.perf_counter() if self._moment is None else self._moment

    @contextmanager
    def one_moment(self) -> Iterator[float]:
        """Whatever comes and goes within the block does so at one moment, which is given: it changes hands."""
        with self._lock:
            self._moment = time.perf_counter()
        try:
            yield self._moment
        finally:
            self._moment = None

    def take_changes(self) -> tuple[list[MemoryChange], dict[Content | None, int]]:
        """What came and went since the last call, and what is allocated by name now; goes on noting."""
        with self._lock:
            changes, self.changes = self.changes or [], []
            return changes, dict(self.named)

    def reset_watched_peak(self) -> None:
        """Forget the peak of watched bytes; it becomes their present level."""
        with self._lock:
            self.watched_peak_bytes = self.watched_bytes

    def claim(self, size_bytes: int) -> None:
        """Set what the running task may hold.  Raises CpuOutOfMemoryError beyond the budget."""
        with self._lock:
            more_bytes = size_bytes - self.claim_bytes
            if more_bytes > 0 and self.budget_bytes is not None:
                self._enforce(more_bytes, "the running task")
            self.claim_bytes = size_bytes
            self._changed()

    def counted_bytes(self, storage: torch.UntypedStorage) -> int:
        """Bytes that a storage counts for beside named allocations; 0 if it is not known."""
        known = self._watched.get(storage._cdata)
        return known.size_bytes if known is not None else 0

    # -- named allocations -------------------------------------------------------------------------------------------

    def allocate(self, size_bytes: int, name: str, content: Content | None = None) -> None:
        """Count an allocation by the runtime itself.  Raises CpuOutOfMemoryError beyond the budget."""
        with self._lock:
            self._enforce(size_bytes, name)
            self._count_named(size_bytes, content)

    def free(self, size_bytes: int, content: Content | None = None) -> None:
        """Count the end of a named allocation."""
        with self._lock:
            self._count_named(-size_bytes, content)

    def free_with(self, storage: torch.UntypedStorage, size_bytes: int, content: Content | None) -> LingeringStorage:
        """Count the end of a named allocation when nobody holds ``storage`` any more, which its owner lets go of."""
        lingering = LingeringStorage(size_bytes, content)
        lingering.gone = weakref.finalize(storage, self._free_lingering, lingering)
        lingering.gone.atexit = False
        return lingering

    def take_back(self, lingering: LingeringStorage) -> torch.UntypedStorage | None:
        """The storage, if it has not gone; its bytes stay a named allocation, which the caller frees from now on."""
        found = lingering.gone.detach()
        if found is None:
            # Another thread may be about to say so.
            self._free_lingering(lingering)
            return None
        storage: torch.UntypedStorage = found[0]
        with self._lock:
            known = self._watched.get(storage._cdata)
            if known is not None and not known.size_bytes:
                del self._watched[storage._cdata]  # its owner may have it watched again
            return storage

    def adopt(self, tensors: Iterable[torch.Tensor], content: Content | None = None) -> int:
        """Count tensors that exist already (parameters, buffers, optimizer state, the batch).  Returns new bytes."""
        found = list(tensors)
        with self._lock:
            new_bytes = sum(
                self._register(tensor.untyped_storage(), _own_bytes(tensor), content=content) for tensor in found
            )
            if content is not None:
                self.label(found, content)
            return new_bytes

    def adopt_inputs(self, tensors: Iterable[torch.Tensor]) -> None:
        """Count what the model is called with, until the next such call, whatever else keeps it.

        A loop may keep its batches in a list: on the device each is only while it is trained on.
        """
        found = list(tensors)
        with self._lock:
            self.let_inputs_go()
            for tensor in found:
                storage = tensor.untyped_storage()
                if storage._cdata not in self._watched:
                    self._register(storage, _own_bytes(tensor), content=Content.RESIDENT)
                    self._inputs[storage._cdata] = self._watched[storage._cdata]
            self.label(found, Content.RESIDENT)

    def let_inputs_go(self) -> None:
        """Count the inputs of the latest call no longer, and know nothing of them."""
        with self._lock:
            for key, entry in self._inputs.items():
                # Another storage may have this address by now.
                if self._watched.get(key) is entry:
                    self._forget(key)
            self._inputs.clear()

    def label(self, tensors: Iterable[torch.Tensor], content: Content) -> None:
        """Say what watched storages hold."""
        with self._lock:
            for tensor in tensors:
                known = self._watched.get(tensor.untyped_storage()._cdata)
                if known is not None and known.content is not content:
                    self._hold(-known.size_bytes, known.content, is_named=False)
                    self._hold(known.size_bytes, content, is_named=False)
                    known.content = content

    def alive_beside(self, tensors: Iterable[torch.Tensor]) -> Iterator[LivingStorage]:
        """The watched storages that are alive, those of ``tensors`` left out."""
        left_out = {tensor.untyped_storage()._cdata for tensor in tensors}
        with self._lock:
            found = [LivingStorage(k, w.size_bytes, w.place) for k, w in self._watched.items() if k not in left_out]
        return iter([storage for storage in found if storage.size_bytes])

    def ignore(self, tensors: Iterable[torch.Tensor]) -> None:
        """Know these tensors' storages without counting them: named allocations, host memory."""
        with self._lock:
            for tensor in tensors:
                self._register(tensor.untyped_storage(), 0)

    def make_named(self, tensors: Iterable[torch.Tensor], content: Content | None = None) -> None:
        """Count the storages of ``tensors`` as named allocations from now on, whether or not they were watched.

        Whoever holds them frees ``tensors.storage_bytes`` of them.
        """
        with self._lock:
            storages = {storage._cdata: storage for storage in (tensor.untyped_storage() for tensor in tensors)}
            for key, storage in storages.items():
                known = self._watched.get(key)
                if known is not None:
                    self.watched_bytes -= known.size_bytes
                    self._hold(-known.size_bytes, known.content, is_named=False)
                    known.size_bytes, known.is_whole = 0, False
                self.named_bytes += storage.nbytes()
                self._hold(storage.nbytes(), content, is_named=True)
            self._changed()

    # -- watching ----------------------------------------------------------------------------------------------------

    def start_metering(self) -> None:
        """Watch every operation of this thread until ``stop_metering``, whatever other modes come and go meanwhile.

        Raises ScheduleError if somebody watches already.
        """
        if self._mode is not None:
            raise ScheduleError(
                "two models were to be trained on one CpuDevice at once: another one is between its forward and its "
                "step. Complete that step before this forward, or give each training a CpuDevice of its own."
            )
        self._mode = WatchingMode(self)
        self._mode.enter_beneath_others()

    def stop_metering(self) -> None:
        """Stop watching, on any thread; does nothing if nobody watches."""
        mode, self._mode = self._mode, None
        if mode is not None:
            mode.end()

    @contextmanager
    def metering(self) -> Iterator[MemoryLedger]:
        """Watch every operation within the block, before the modes around it see it."""
        assert self._mode is None, "metering twice"
        self._mode = WatchingMode(self)
        self._mode.__enter__()  # type: ignore[no-untyped-call]
        try:
            yield self
        finally:
            self.stop_metering()

    # -- inside ------------------------------------------------------------------------------------------------------

    def _free_lingering(self, lingering: LingeringStorage) -> None:
        with self._lock:
            freed_bytes, lingering.size_bytes = lingering.size_bytes, 0
            if freed_bytes:
                self._count_named(-freed_bytes, lingering.content)

    def watch_result(self, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """Count the storages that an operation was given and nobody knew, that it made, or gave another size."""
        self.num_operations += 1
        elsewhere = self._find(args, kwargs) if operator is not _LIFT_FRESH else set()
        for tensor in tensors_in(result):
            if tensor.layout is not torch.strided:
                raise WorkloadError(
                    f"{operator} made a sparse tensor ({str(tensor.layout).removeprefix('torch.')}), whose memory "
                    f"cannot be placed. If it is the gradient of an embedding, make that with sparse=False: values and "
                    f"results are the same."
                )
            if tensor._is_zerotensor():
                # It states a size and has no memory.
                continue
            storage = tensor.untyped_storage()
            known = self._watched.get(storage._cdata)
            if known is not None:
                if known.is_whole and known.size_bytes != storage.nbytes():
                    self._resize(storage, known, operator)
                continue
            if storage._cdata not in elsewhere:
                with self._lock:
                    self._register(storage, storage.nbytes(), operator, is_whole=True)
        if self.on_operation is not None:
            self.on_operation(operator, args, kwargs, result)

    def _find(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> set[int]:
        """Count what an operation was given that lives already, whatever keeps it: a cache, a table, labels.

        Gives the storages that are somewhere else, of which views are no new memory.
        """
        elsewhere: set[int] = set()
        for tensor in tensors_in((args, kwargs)):
            storage = tensor.untyped_storage() if has_storage(tensor) else None
            if storage is not None and storage._cdata not in self._watched:
                if not self.is_finding or tensor.device.type != self.device_type:
                    elsewhere.add(storage._cdata)
                    continue
                with self._lock:
                    self._register(storage, _own_bytes(tensor), content=Content.RESIDENT)
        return elsewhere

    def _register(
        self,
        storage: torch.UntypedStorage,
        size_bytes: int,
        operator: Hashable = None,
        *,
        is_whole: bool = False,
        content: Content | None = None,
    ) -> int:
        key = storage._cdata
        if key in self._watched:
            return 0
        self._enforce(size_bytes, operator if operator is not None else "a tensor")
        place = self.place() if self.place is not None else None
        gone = weakref.ref(storage, lambda _: self._forget(key))
        self._watched[key] = _Watched(size_bytes, is_whole, gone, content, place)
        self._count(size_bytes, content)
        return size_bytes

    def _resize(self, storage: torch.UntypedStorage, known: _Watched, operator: Hashable) -> None:
        with self._lock:
            more_bytes = storage.nbytes() - known.size_bytes
            self._enforce(more_bytes, operator)
            known.size_bytes += more_bytes
            self._count(more_bytes, known.content)

    def _forget(self, key: int) -> None:
        with self._lock:
            entry = self._watched.pop(key, None)
            if entry is not None:
                self._count(-entry.size_bytes, entry.content)
                if self.on_forget is not None:
                    self.on_forget(key, entry.place, entry.size_bytes)

    def _hold(self, more_bytes: int, content: Content | None, *, is_named: bool) -> None:
        held = self.named if is_named else self.watched
        held[content] = held.get(content, 0) + more_bytes
        if self.changes is not None:
            self.changes.append(MemoryChange(self.now_s, content, more_bytes, is_named, self.num_operations))

    def _count_named(self, more_bytes: int, content: Content | None) -> None:
        self.named_bytes += more_bytes
        self._hold(more_bytes, content, is_named=True)
        self._changed()

    def _count(self, more_bytes: int, content: Content | None) -> None:
        self.watched_bytes += more_bytes
        self._hold(more_bytes, content, is_named=False)
        self.watched_peak_bytes = max(self.watched_peak_bytes, self.watched_bytes)
        self._changed()

    def _changed(self) -> None:
        self.peak_bytes = max(self.peak_bytes, self.level_bytes)

    def _enforce(self, more_bytes: int, name: Hashable) -> None:
        """Raise CpuOutOfMemoryError if ``more_bytes`` do not fit beside what is there."""
        level = self.level_bytes
        if self.budget_bytes is None or more_bytes <= 0 or level + more_bytes <= self.budget_bytes:
            return
        free = format_bytes(max(0, self.budget_bytes - level))
        if self.is_evaluating:
            remedy = "Evaluate on smaller batches, or"
        elif 0 < self.planned_bytes <= self.budget_bytes:
            remedy = beyond_trace(self.planned_bytes)
        else:
            remedy = "Search a plan for this budget, or"
        remedy = (self.hint() if self.hint is not None else None) or remedy
        raise CpuOutOfMemoryError(
            f"out of memory on the CPU device: {name} needs {format_bytes(more_bytes)} but {free} of the budget of "
            f"{format_bytes(self.budget_bytes)} is free, while {self.doing}. {remedy} raise it to at least "
            f"{format_bytes(level + more_bytes)}."
        )

    @contextmanager
    def planning(self, more_bytes: int) -> Iterator[None]:
        """Within the block plans take ``more_bytes`` more than before."""
        self.planned_bytes += more_bytes
        try:
            yield
        finally:
            self.planned_bytes -= more_bytes


def beyond_trace(planned_bytes: int) -> str:
    """Why memory may lack though the plan fits, and what helps, up to the last remedy."""
    return (
        f"The plan takes at most {format_bytes(planned_bytes)} of what was traced, so that the loop runs or holds more "
        f"than that: a larger batch, other inputs or outputs of the model, another loss, autocast, another model "
        f"beside it, or outputs and losses of earlier forwards that are still held. Let go of these before the next "
        f"forward (del), trace the model with the batch and the loss that it is trained with and search a plan again, "
        f"or"
    )


@dataclass(slots=True)
class LingeringStorage:
    """One that its owner has let go of, and that somebody still holds."""

    size_bytes: int
    """Those that count; 0 when it has gone."""
    content: Content | None
    gone: weakref.finalize[..., Any] = field(init=False)
    """Counts its end."""


@dataclass(slots=True)
class _Watched:
    """One storage that is counted."""

    size_bytes: int
    """Bytes that it counts for."""
    is_whole: bool
    """Whether these are all of its bytes, so that a change of its size counts."""
    storage: weakref.ref[Any]
    """Tells when it is gone."""
    content: Content | None
    place: Hashable
    """Where the model was when it was made."""


@dataclass(frozen=True, slots=True)
class LivingStorage:
    """A watched storage that is alive."""

    key: int
    """The storage's address."""
    size_bytes: int
    place: Hashable
    """Where the model was when it was made or found; None: nowhere."""


def _own_bytes(tensor: torch.Tensor) -> int:
    """Bytes of the tensor itself, not of a larger storage that it is a slice of."""
    return min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes())
