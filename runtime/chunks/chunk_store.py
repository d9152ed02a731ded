"""What lies on the disk of every chunk, and the places of the host that it passes through, as the schedule has them."""

from __future__ import annotations

import mmap
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Final

import torch

from ...shared.basics.units import format_bytes, format_rate
from ...shared.schema.hardware import Disk
from ...shared.schema.schedule import Allocation, ChunkId, Content, Memory, Schedule
from ..devices.chunk_file import ChunkFile
from ..devices.device import TrainingDevice

_PAGE_BYTES: Final = 4096
_SPARE_BYTES: Final = 8
"""Per tensor of an optimizer's state: what it may lose to the alignment of its element type."""
_SLOW_FRAC: Final = 0.5
"""A disk that reaches less of what was stated is told of."""
_LEAST_MEASURED_BYTES: Final = 64 * 2**20
_LEAST_CALLS: Final = 8
"""A disk is judged by so many bytes or so many calls, no matter how small these are."""
_MOST_MEASURED_BYTES: Final = 256 * 2**20
"""What is read to measure the disk."""

Place = tuple[Content, Memory]


class ChunkStore:
    """The chunks of a schedule that lie on the disk, wholly or in their optimizer state."""

    def __init__(
        self, schedule: Schedule, device: TrainingDevice, folder: str | Path, num_state_tensors: Mapping[ChunkId, int]
    ) -> None:
        """Take the disk's space and the host's places.

        ``num_state_tensors``: by chunk, the most tensors that its optimizer keeps.  Raises FileError as ``ChunkFile``
        does.
        """
        most = _SPARE_BYTES * max(num_state_tensors.values(), default=0)
        homes = [b for b in schedule.buffers if b.is_static and b.memory is Memory.DISK]
        self._records: dict[tuple[Content, int], tuple[int, int]] = {}
        """(offset, bytes) of what the file holds."""
        end = 0
        for home in homes:
            assert home.chunk is not None
            size_bytes = home.size_bytes + (most if home.content is Content.OPTIMIZER_STATE else 0)
            self._records[home.content, home.chunk] = end, size_bytes
            end += -(-size_bytes // _PAGE_BYTES) * _PAGE_BYTES
        self.file = ChunkFile(folder, end, device)
        self._places: dict[tuple[Place, int], torch.Tensor] = {}
        for buffer in schedule.buffers:
            if buffer.is_static and buffer.chunk is None and buffer.slot is not None:
                spare = most if buffer.content is Content.OPTIMIZER_STATE else 0
                is_pinned = buffer.memory is Memory.PINNED_HOST
                made = device.host_buffer(buffer.size_bytes) if is_pinned else _on_host(buffer.size_bytes + spare)
                self._places[(buffer.content, buffer.memory), buffer.slot] = made
        if device.ledger is not None:
            # Steps, gathers and evaluations move them; they are the host's.
            device.ledger.ignore(list(self._places.values()))
        self.chunks = {chunk: ChunkOnDisk(self, chunk, list(found)) for chunk, found in _passing(schedule).items()}
        """By chunk."""

    def record(self, content: Content, chunk: int) -> tuple[int, int] | None:
        """(offset, bytes) in the file; None if it does not lie there."""
        return self._records.get((content, chunk))

    def place(self, buffer: Allocation) -> torch.Tensor:
        """Where ``buffer`` is, as uint8."""
        assert buffer.slot is not None
        return self._places[(buffer.content, buffer.memory), buffer.slot]

    def check_speed(self, stated: Disk) -> None:
        """Warn if reads or writes take more than twice as long as ``stated``; everything was written once by now.

        Raises FileError.
        """
        stretches = [record for record in self._records.values() if record[1]]
        # Few reads say nothing; they can be repeated.
        stretches *= -(-_LEAST_CALLS // max(1, len(stretches)))
        reads = self.file.measured_reads(stretches, _MOST_MEASURED_BYTES)
        for verb, calls, bytes_per_s in (
            ("reads", reads, stated.read_bytes_per_s),
            ("writes", self.file.writes, stated.write_bytes_per_s),
        ):
            if is_slow(calls, bytes_per_s, stated.latency_s):
                moved_bytes = sum(size_bytes for size_bytes, _ in calls)
                measured = format_rate(moved_bytes / sum(seconds for _, seconds in calls))
                warnings.warn(
                    f"the disk of {self.file.folder} {verb} {measured} in calls of "
                    f"{format_bytes(moved_bytes // len(calls))}, but {stated.name} is stated to reach "
                    f"{format_rate(bytes_per_s)}: training will be slower than predicted. Name a folder on a "
                    f"faster disk, or search with what protwin hardware probe --disk-folder measures.",
                    stacklevel=2,
                )

    def close(self) -> None:
        """Give everything back.  Idempotent."""
        self.file.close()
        self._places.clear()
        self.chunks.clear()


def is_slow(calls: Sequence[tuple[int, float]], bytes_per_s: float, latency_s: float) -> bool:
    """Whether calls, bytes and seconds each, are clearly slower than stated.

    They take more than twice the stated time, both all together and in the median, so that one that was held up says
    nothing; too few say nothing either.
    """
    if sum(size_bytes for size_bytes, _ in calls) < _LEAST_MEASURED_BYTES and len(calls) < _LEAST_CALLS:
        return False
    stated_s = [latency_s + size_bytes / bytes_per_s for size_bytes, _ in calls]
    shares = sorted(stated / max(taken, 1e-12) for stated, (_, taken) in zip(stated_s, calls, strict=True))
    in_all = sum(stated_s) / max(sum(taken for _, taken in calls), 1e-12)
    return in_all < _SLOW_FRAC and median(shares) < _SLOW_FRAC


class ChunkOnDisk:
    """One chunk's records in the file, and its places on the host; each is another chunk's for most of the time."""

    def __init__(self, store: ChunkStore, chunk: ChunkId, passing: list[Allocation]) -> None:
        self._file = store.file
        found = {(b.content, b.memory): store.place(b) for b in passing}
        self.parameter_record = store.record(Content.PARAMETERS, chunk)
        self.state_record = store.record(Content.OPTIMIZER_STATE, chunk)
        self.parameters = _first(found.get((Content.PARAMETERS, Memory.HOST)), self.parameter_record)
        """Where CPU Adam steps them, as uint8; None if they are not stepped, or not on the disk."""
        self.state = _first(found.get((Content.OPTIMIZER_STATE, Memory.HOST)), self.state_record)
        """The same of masters and what the optimizer keeps."""
        self.gradients = found.get((Content.GRADIENTS, Memory.PINNED_HOST))
        """Where they arrive; None if they have a place of their own."""
        self._on_its_way = {
            b.slot: _first(store.place(b), self.parameter_record)
            for b in passing
            if (b.content, b.memory) == (Content.PARAMETERS, Memory.PINNED_HOST)
        }
        self.scratch = next(iter(self._on_its_way.values()), None)
        """A place for parameters while no lane runs; None if they are not on the disk."""
        self._mapped_state: mmap.mmap | None = None
        """Since it was last written: several tensors of a chunk are looked at one after the other."""

    # -- while lanes run ---------------------------------------------------------------------------------------------

    def on_its_way(self, slot: int | None) -> torch.Tensor:
        """The place of that number, from which a gather copies parameters; None: the one to use while no lane runs."""
        place = self.scratch if slot is None else self._on_its_way[slot]
        assert place is not None
        return place

    def read_for_gather(self, slot: int | None) -> torch.Tensor:
        """Read the parameters into ``on_its_way``; gives that.  Raises FileError."""
        assert self.parameter_record is not None
        place = self.on_its_way(slot)
        self._file.read(place, self.parameter_record[0])
        return place

    def read_to_step(self) -> None:
        """Read what CPU Adam steps into the chunk's places.  Raises FileError."""
        self._file.read_parts(*((place, record[0]) for place, record in self._stepped()))

    def read_to_project(self) -> None:
        """Read the parameters alone into the place where CPU Adam steps them.  Raises FileError."""
        assert self.parameters is not None
        assert self.parameter_record is not None
        self._file.read(self.parameters, self.parameter_record[0])

    def write_stepped(self) -> None:
        """Write what CPU Adam has stepped in the chunk's places.  Raises FileError."""
        self._mapped_state = None
        self._file.write(*((place, record[0]) for place, record in self._stepped()))

    def _stepped(self) -> Iterator[tuple[torch.Tensor, tuple[int, int]]]:
        for place, record in ((self.parameters, self.parameter_record), (self.state, self.state_record)):
            if place is not None and record is not None:
                yield place, record

    # -- while none does ---------------------------------------------------------------------------------------------

    def write_parameters(self, values: torch.Tensor) -> None:
        """Replace the parameters on the disk.  Raises FileError."""
        assert self.parameter_record is not None
        self._file.write((values, self.parameter_record[0]))

    def mapped_parameters(self) -> torch.Tensor:
        """The parameters as they are on the disk, as uint8, for who is done before they are stepped again.

        Raises FileError.
        """
        assert self.parameter_record is not None
        if not self.parameter_record[1]:
            return torch.empty(0, dtype=torch.uint8)
        return torch.frombuffer(self._file.mapped(*self.parameter_record), dtype=torch.uint8)

    def mapped_state(self) -> mmap.mmap:
        """The same of masters and what the optimizer keeps.  Raises FileError."""
        assert self.state_record is not None
        if self._mapped_state is None:
            self._mapped_state = self._file.mapped(*self.state_record)
        return self._mapped_state


def _passing(schedule: Schedule) -> dict[ChunkId, list[Allocation]]:
    """What passes through places of the host, by chunk."""
    found: dict[ChunkId, list[Allocation]] = {}
    for buffer in schedule.buffers:
        if not buffer.is_static and buffer.memory is not Memory.DEVICE:
            assert buffer.chunk is not None
            found.setdefault(buffer.chunk, []).append(buffer)
    return found


def _first(place: torch.Tensor | None, record: tuple[int, int] | None) -> torch.Tensor | None:
    return None if place is None or record is None else place[: record[1]]


def _on_host(size_bytes: int) -> torch.Tensor:
    return torch.empty(size_bytes, dtype=torch.uint8)


def chunk_store(
    schedule: Schedule, device: TrainingDevice, folder: str | Path | None, num_state_tensors: Mapping[ChunkId, int]
) -> ChunkStore | None:
    """The store of a schedule; None if nothing lies on a disk, whatever the folder.  Errors as of ``ChunkStore``."""
    if not schedule.static_bytes(Memory.DISK):
        return None
    assert folder is not None
    return ChunkStore(schedule, device, folder, num_state_tensors)
