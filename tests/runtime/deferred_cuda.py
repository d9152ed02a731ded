"""A stand-in for torch's CUDA interface that really defers: what is queued on a stream runs later, on another thread.

The device's own code (``CudaDevice``, lanes, chunks) runs against it unchanged, with CPU tensors in the place of CUDA
ones.  It is an adversary where a device is one:

- An operation on a thread that has a current stream is only queued; its result is an empty tensor of the right shape
  until the stream comes to it.  Reading a value on the host waits for the stream, as on CUDA.
- Streams run in order and know nothing of each other but by events.  A *starved* stream runs only when some thread
  waits and nothing else can: it is as far behind the others as the events allow.
- Memory that is let go of is given away at once: from that point of the stream that it was allocated on, it holds
  nothing but ones in every bit (NaN, in floats).  So whoever frees what a copy still reads, or copies into what compute
  still uses, computes nonsense.

- Collectives of its tensors by the lane's group are queued on the current stream, as NCCL's are, and run on ``wire``,
  a group of gloo's that nothing else uses; those of the host's tensors run at once, and so do those by other groups,
  which carry copies on the host.  Every rank has a stand-in of its own in its process.

Not modelled: time, the allocator's rounding, several devices in one process.
"""

from __future__ import annotations

import random
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FakeWork
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

from protwin.runtime import CudaDevice

READS_ON_HOST = {"aten::_local_scalar_dense", "aten::equal", "aten::is_nonzero"}
NO_WORK = {"aten::set_", "aten::detach", "aten::alias", "aten::lift_fresh", "aten::_reshape_alias"}
TOTAL_BYTES = 2**40
LANE = "protwin lane group"
_LATE_S = 0.005


class StandInStream:
    """A queue of work."""

    def __init__(self, cuda: DeferredCuda, name: str) -> None:
        self.cuda = cuda
        self.name = name
        self.cuda_stream = id(self)
        self.queue: deque[Callable[[], None] | tuple[StandInEvent, int]] = deque()

    def wait_event(self, event: StandInEvent) -> None:
        self.cuda.put(self, (event, event.asked))

    def synchronize(self) -> None:
        event = StandInEvent(self.cuda)
        event.record(self)
        event.synchronize()


class StandInEvent:
    """As CUDA's: what is waited for is the latest record at the time of asking."""

    def __init__(self, cuda: DeferredCuda) -> None:
        self.cuda = cuda
        self.asked = self.passed = 0
        self.at_s = 0.0

    def record(self, stream: StandInStream) -> None:
        self.asked += 1
        asked = self.asked

        def passes() -> None:
            self.passed, self.at_s = asked, time.perf_counter()

        self.cuda.put(stream, passes)

    def synchronize(self) -> None:
        self.cuda.wait_until(lambda asked=self.asked: self.passed >= asked)  # type: ignore[misc]

    def query(self) -> bool:
        return self.passed >= self.asked

    def elapsed_time(self, end: StandInEvent) -> float:
        assert self.query()
        assert end.query()
        return (end.at_s - self.at_s) * 1e3


@dataclass
class DeferredCuda:
    """What ``torch.cuda`` is while ``installed``."""

    starved: str = ""
    """Name of the stream that is kept behind: "compute", or the order in which the lanes made theirs ("1", "2", ..)."""
    seed: int = 0
    allocated_bytes: int = 0
    peak_bytes: int = 0
    num_deferred: int = 0
    pinned: dict[int, int] = field(default_factory=dict)
    fraction: float = 1.0
    failure: BaseException | None = None
    wire: dist.ProcessGroup | None = None
    """What collectives of the device's tensors run on."""
    num_collectives: int = 0
    uuid: str = "stand-in"

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)
        self._changed = threading.Condition()
        self._num_waiting = 0
        self._is_over = False
        self._local = threading.local()
        self._blocks: dict[int, tuple[torch.Tensor, StandInStream]] = {}
        self._emptied: set[int] = set()
        self._dying: deque[int] = deque()
        self._streams: list[StandInStream] = []
        self.compute = self.make_stream("compute")
        self._runner = threading.Thread(target=self._run, daemon=True, name="stand-in device")
        self._runner.start()

    # -- queues ------------------------------------------------------------------------------------------------------

    def make_stream(self, name: str = "") -> StandInStream:
        with self._changed:
            stream = StandInStream(self, name or str(len(self._streams)))
            self._streams.append(stream)
        return stream

    def put(self, stream: StandInStream, work: Any) -> None:
        with self._changed:
            stream.queue.append(work)
            self._changed.notify_all()

    def wait_until(self, is_done: Callable[[], bool]) -> None:
        with self._changed:
            self._num_waiting += 1
            self._changed.notify_all()
            while not is_done() and self.failure is None:
                assert self._changed.wait(timeout=60), "the stand-in device hangs"
            self._num_waiting -= 1
        if self.failure is not None:
            raise RuntimeError("the stand-in device failed") from self.failure

    def synchronize(self, *_: Any) -> None:
        for stream in list(self._streams):
            stream.synchronize()

    def stop(self) -> None:
        with self._changed:
            self._is_over = True
            self._changed.notify_all()
        self._runner.join()

    def _run(self) -> None:
        with torch.no_grad():
            while (work := self._next()) is not None:
                try:
                    work()
                except BaseException as error:
                    self.failure = error
                with self._changed:
                    self._changed.notify_all()

    def _next(self) -> Callable[[], None] | None:
        is_late = False
        with self._changed:
            while not self._is_over:
                able = [stream for stream in self._streams if self._can_run(stream)]
                eager = [stream for stream in able if stream.name != self.starved]
                if eager or (able and (self._num_waiting or is_late)):
                    return self._random.choice(eager or able).queue.popleft()  # type: ignore[return-value]
                # Another rank may wait for this one, whose threads wait for that one's word.
                is_late = not self._changed.wait(timeout=None if self.wire is None else _LATE_S)
            return None

    @staticmethod
    def _can_run(stream: StandInStream) -> bool:
        while stream.queue and isinstance(stream.queue[0], tuple):
            event, asked = stream.queue[0]
            if event.passed < asked:
                return False
            stream.queue.popleft()
        return bool(stream.queue)

    # -- memory ------------------------------------------------------------------------------------------------------

    def allocate(self, shape: Any, stride: Any, dtype: torch.dtype) -> torch.Tensor:
        """A tensor whose memory outlives its storage, so that what becomes of it afterwards can be seen."""
        extent = 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
        num = 0 if 0 in tuple(shape) else extent
        if num == 0:
            return torch.empty_strided(shape, stride, dtype=dtype)
        block = torch.empty(num * dtype.itemsize, dtype=torch.uint8)
        storage = torch.frombuffer(block.numpy(), dtype=torch.uint8).untyped_storage()
        key = storage._cdata
        with self._changed:
            self._bury()
            self._blocks[key] = block, self.current()
            self._count(block.numel())
        weakref.finalize(storage, self._dying.append, key)
        return torch.empty(0, dtype=dtype).set_(storage, 0, tuple(shape), tuple(stride))

    def _bury(self) -> None:
        """What has died is given away; not when it dies, which may be in the midst of anything."""
        with self._changed:
            while self._dying:
                key = self._dying.popleft()
                block, stream = self._blocks.pop(key)
                if key in self._emptied:
                    self._emptied.discard(key)
                    continue
                self._count(-block.numel())
                self.put(stream, lambda block=block: block.fill_(255))

    def resize(self, storage: torch.UntypedStorage, size_bytes: int) -> torch.UntypedStorage:
        """Storages keep their memory; what they lose or gain is what it holds, and the count."""
        key = storage._cdata
        assert key in self._blocks, "resized a storage that is not the device's"
        block, stream = self._blocks[key]
        if size_bytes == 0 and key not in self._emptied:
            self._emptied.add(key)
            self._count(-block.numel())
            self.put(stream, lambda: block.fill_(255))
        elif size_bytes > 0 and key in self._emptied:
            assert size_bytes == block.numel()
            assert self.current() is stream, "memory comes from the pool of another stream"
            self._emptied.discard(key)
            self._count(block.numel())
        return storage

    def _count(self, more_bytes: int) -> None:
        self.allocated_bytes += more_bytes
        self.peak_bytes = max(self.peak_bytes, self.allocated_bytes)

    def reset_peak(self, *_: Any) -> None:
        self._bury()
        self.peak_bytes = self.allocated_bytes

    def level(self, *_: Any) -> int:
        self._bury()
        return self.allocated_bytes

    def peak(self, *_: Any) -> int:
        self._bury()
        return self.peak_bytes

    def has(self, tensor: torch.Tensor) -> bool:
        """Whether it lies in the device's memory."""
        self._bury()
        return tensor.untyped_storage()._cdata in self._blocks

    def seen_by_device(self, tensor: torch.Tensor) -> torch.Tensor:
        """The same memory, kept by nobody's storage, with a version counter of its own."""
        found = self._blocks.get(tensor.untyped_storage()._cdata)
        storage = tensor.untyped_storage() if found is None else found[0].untyped_storage()
        return torch.empty(0, dtype=tensor.dtype).set_(storage, tensor.storage_offset(), tensor.size(), tensor.stride())

    # -- collectives -------------------------------------------------------------------------------------------------

    def collective(self, func: Any, args: Any, kwargs: Any) -> Any:
        """An operation of torch.distributed: of the device's tensors queued, of the host's done."""
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        named = {argument.name: value for argument, value in zip(func._schema.arguments, args, strict=False)} | kwargs
        if dist.ProcessGroup.unbox(named["process_group"]).group_desc != LANE:
            # It carries tensors of the host: a device's are copied there first.
            self.current().synchronize()
            return func(*args, **kwargs)
        if not any(self.has(tensor) for tensor in tensors):
            return func(*args, **kwargs)
        assert self.wire is not None
        inside = tree_map(lambda v: self.seen_by_device(v) if isinstance(v, torch.Tensor) else v, named)
        inside["process_group"] = self.wire.boxed()
        self.num_collectives += 1

        def work() -> None:
            given = func(**inside)
            dist.Work.unbox(given[-1] if isinstance(given, tuple) else given).wait()

        self.put(self.current(), work)
        done = FakeWork().boxed()
        written = args[0]
        return done if len(func._schema.returns) == 1 else (written, done)

    # -- the current stream ------------------------------------------------------------------------------------------

    def current(self, *_: Any) -> StandInStream:
        return getattr(self._local, "stream", self.compute)

    @contextmanager
    def on(self, stream: StandInStream) -> Iterator[None]:
        before = getattr(self._local, "stream", None)
        self._local.stream = stream
        try:
            with _Deferring(self):
                yield
        finally:
            self._local.stream = before or self.compute

    # -- in the place of torch.cuda ----------------------------------------------------------------------------------

    @contextmanager
    def installed(self) -> Iterator[DeferredCuda]:
        """``torch.cuda`` is this, and the block runs on its compute stream."""
        registry = SimpleNamespace(
            cudaHostRegister=lambda address, size, _: self.pinned.update({address: size}) or 0,
            cudaHostUnregister=lambda address: self.pinned.pop(address) and 0,
        )
        to_list, resize = torch.Tensor.tolist, torch.UntypedStorage.resize_

        def synchronized_list(tensor: torch.Tensor) -> Any:
            # What is on the host is read without waiting.
            if hasattr(self._local, "stream") and self.has(tensor):
                self.current().synchronize()
            return to_list(tensor)

        exchange = dist.all_gather_object

        def exchange_at_once(*args: Any, **kwargs: Any) -> None:
            """Objects travel through memory of the host."""
            with _disable_current_modes():
                exchange(*args, **kwargs)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(dist, "all_gather_object", exchange_at_once)
            for name, value in {
                "is_available": lambda: True,
                "device_count": lambda: 1,
                "get_device_properties": lambda *_: SimpleNamespace(total_memory=TOTAL_BYTES, uuid=self.uuid),
                "get_device_name": lambda *_: "stand-in",
                "Stream": lambda *_: self.make_stream(),
                "Event": lambda **_: StandInEvent(self),
                "current_stream": self.current,
                "stream": self.on,
                "synchronize": self.synchronize,
                "empty_cache": lambda: None,
                "memory_allocated": self.level,
                "memory_reserved": self.level,
                "max_memory_allocated": self.peak,
                "reset_peak_memory_stats": self.reset_peak,
                "get_per_process_memory_fraction": lambda *_: self.fraction,
                "set_per_process_memory_fraction": lambda fraction, _: setattr(self, "fraction", fraction),
                "cudart": lambda: registry,
            }.items():
                patch.setattr(torch.cuda, name, value)
            patch.setattr(torch.Tensor, "tolist", synchronized_list)
            patch.setattr(
                torch.UntypedStorage,
                "resize_",
                lambda storage, size: (
                    self.resize(storage, size) if storage._cdata in self._blocks else resize(storage, size)
                ),
            )
            try:
                with self.on(self.compute):
                    yield self
            finally:
                self.stop()


class _Deferring(TorchDispatchMode):
    """Queues the operations of one thread on its current stream."""

    def __init__(self, cuda: DeferredCuda) -> None:
        super().__init__()
        self._cuda = cuda

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        cuda, name = self._cuda, func._schema.name
        if func.namespace == "c10d":
            return cuda.collective(func, args, kwargs)
        if name in READS_ON_HOST:
            cuda.current().synchronize()
            return func(*args, **kwargs)
        if name in NO_WORK or func.is_view:
            return func(*args, **kwargs)
        if name.startswith(("aten::empty", "aten::new_empty")):
            made = func(*args, **kwargs)
            return cuda.allocate(made.shape, made.stride(), made.dtype)
        if func._schema.is_mutable:
            self._queue(func, args, kwargs, ())
            written = [
                value
                for argument, value in zip(func._schema.arguments, args, strict=False)
                if argument.alias_info is not None and argument.alias_info.is_write
            ]
            written += [kwargs[a.name] for a in func._schema.arguments if a.kwarg_only and a.is_out]
            returned = tuple(written[: len(func._schema.returns)])
            return returned[0] if len(returned) == 1 else (returned or None)
        results = self._results(func, args, kwargs)
        self._queue(func, args, kwargs, results if isinstance(results, (tuple, list)) else (results,))
        return results

    def _results(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Empty tensors of the shapes that the operation gives."""

        def shape_of(value: Any) -> Any:
            if isinstance(value, torch.device):
                return torch.device("meta")
            if not isinstance(value, torch.Tensor):
                return value
            return torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device="meta")

        shapes = func(*tree_map(shape_of, args), **tree_map(shape_of, kwargs))
        if not any(isinstance(leaf, torch.Tensor) and leaf.is_meta for leaf in _leaves(shapes)):
            # Without tensors among its arguments an operation has no device to follow.
            shapes = func(*args, **kwargs)
        return tree_map(
            lambda shape: (
                self._cuda.allocate(shape.shape, shape.stride(), shape.dtype)
                if isinstance(shape, torch.Tensor)
                else shape
            ),
            shapes,
        )

    def _queue(self, func: Any, args: Any, kwargs: Any, results: Any) -> None:
        cuda = self._cuda
        cuda._bury()
        cuda.num_deferred += 1

        def seen(value: Any) -> Any:
            return cuda.seen_by_device(value) if isinstance(value, torch.Tensor) else value

        inside, named, into = tree_map(seen, args), tree_map(seen, kwargs), tree_map(seen, list(results))

        def work() -> None:
            given = func(*inside, **named)
            if into:
                for empty, value in zip(into, given if isinstance(given, (tuple, list)) else (given,), strict=True):
                    if isinstance(empty, torch.Tensor):
                        empty.copy_(value)

        cuda.put(cuda.current(), work)


def _leaves(value: Any) -> list[Any]:
    return list(value) if isinstance(value, (tuple, list)) else [value]


def cuda_device(budget_bytes: int | None = None) -> CudaDevice:
    """A ``CudaDevice`` whose tensors are the CPU's."""
    device = CudaDevice(budget_bytes=budget_bytes)
    device.torch_device = torch.device("cpu")
    return device


def elsewhere(work: Callable[[], None], cuda: DeferredCuda) -> None:
    """``work`` on another thread, as autograd runs the backward of a CUDA device; with its errors."""
    raised: list[BaseException] = []

    def run() -> None:
        try:
            with cuda.on(cuda.compute):
                work()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if raised:
        raise raised[0]


def backward(loss: torch.Tensor, cuda: DeferredCuda) -> None:
    elsewhere(loss.backward, cuda)
