"""The machine: a device, a host and the links between them, each part replaceable."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, ClassVar, Self

from pydantic import BeforeValidator, Field, NonNegativeFloat, PositiveFloat, PositiveInt, model_validator

from .errors import ProtwinError
from .files import Document, FrozenModel
from .units import parse_bytes, parse_bytes_per_s
from .workload import DType, OperationClass


def _as_bytes(value: object) -> object:
    try:
        return parse_bytes(value) if isinstance(value, str) else value
    except ProtwinError as error:
        raise ValueError(str(error)) from error


def _as_bytes_per_s(value: object) -> object:
    try:
        return parse_bytes_per_s(value) if isinstance(value, str) else value
    except ProtwinError as error:
        raise ValueError(str(error)) from error


MemorySize = Annotated[int, BeforeValidator(_as_bytes), Field(gt=0, lt=2**62)]
"""Bytes; people may write ``"80GiB"``."""
Bandwidth = Annotated[float, BeforeValidator(_as_bytes_per_s), Field(gt=0)]
"""Bytes per second; people may write ``"64GB/s"``."""


class DeviceKind(StrEnum):
    """What carries out the compute lane."""

    CUDA = "cuda"
    CPU = "cpu"


class Device(FrozenModel):
    """The accelerator, or the CPU in its place."""

    name: str
    kind: DeviceKind
    memory_bytes: MemorySize
    reserved_bytes: Annotated[int, BeforeValidator(_as_bytes), Field(ge=0, lt=2**62)] = 0
    """Memory that training cannot have: driver context, libraries, the allocator's rounding."""
    memory_bandwidth_bytes_per_s: Bandwidth
    peak_flop_per_s: dict[DType, PositiveFloat]
    """Dense peak of matrix products by element type."""
    vector_flop_per_s: PositiveFloat
    """Peak outside matrix units, in float32."""
    launch_overhead_s: NonNegativeFloat
    """Time of an operation that does nothing."""
    num_multiprocessors: PositiveInt | None = None
    """Processors that a kernel's blocks are dealt out to (NVIDIA: SMs, AMD: CUs); None: matrix products take no notice
    of how evenly their tiles fill them."""
    efficiency: dict[OperationClass, Annotated[float, Field(gt=0, le=1)]] = {}
    """Share of the roofline that operations of a class reach; ``sim/costs.py`` has the defaults and their sources."""
    source: str = ""

    @model_validator(mode="after")
    def _leaves_memory(self) -> Self:
        if self.reserved_bytes >= self.memory_bytes:
            raise ValueError(f"reserved_bytes {self.reserved_bytes} leaves nothing of memory_bytes {self.memory_bytes}")
        if not self.peak_flop_per_s:
            raise ValueError("peak_flop_per_s names no element type")
        return self

    @property
    def usable_bytes(self) -> int:
        """Memory that a plan may fill."""
        return self.memory_bytes - self.reserved_bytes


class Host(FrozenModel):
    """The machine around the device."""

    name: str
    num_cores: PositiveInt
    memory_bytes: MemorySize
    memory_bandwidth_bytes_per_s: Bandwidth
    """What a stream of all cores reaches, reads and writes together."""
    adam_bytes_per_s: Bandwidth | None = None
    """Measured rate of fused CPU Adam, in bytes of memory it moves; None: derived from the memory bandwidth."""
    source: str = ""


class LinkPoint(FrozenModel):
    """A measured copy."""

    size_bytes: PositiveInt
    seconds: PositiveFloat


class Link(FrozenModel):
    """One direction between host and device."""

    name: str
    latency_s: NonNegativeFloat
    bandwidth_bytes_per_s: Bandwidth
    """What large copies reach, not the signalling rate."""
    table: tuple[LinkPoint, ...] = ()
    """Measured copies, ascending in size; they replace latency and bandwidth within their range."""
    source: str = ""

    @model_validator(mode="after")
    def _table_ascends(self) -> Self:
        sizes = [point.size_bytes for point in self.table]
        if sizes != sorted(set(sizes)):
            raise ValueError("table must ascend strictly in size_bytes")
        return self


class Hardware(Document):
    """One machine with one device."""

    KIND: ClassVar[str] = "hardware"

    name: str
    device: Device
    host: Host
    host_to_device: Link
    device_to_host: Link
    full_duplex: bool = True
    """Whether both directions run at full speed side by side."""
