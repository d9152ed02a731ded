"""The machine: a device, a host and the links between them, each part replaceable."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from itertools import accumulate
from typing import Annotated, Any, ClassVar, Final, Self, get_origin

from pydantic import (
    BeforeValidator,
    Field,
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    SerializerFunctionWrapHandler,
    ValidationInfo,
    field_validator,
    model_serializer,
    model_validator,
)

from ..basics.documents import Document, FrozenModel, Name
from ..basics.errors import ProtwinError
from ..basics.units import parse_bytes, parse_bytes_per_s, parse_seconds
from .optimizer import Optimizer
from .workload import DType, OperationClass


def _as_bytes(value: object) -> object:
    """The bytes that a text says; whether a field may be 0 is for its own bounds to say."""
    try:
        return parse_bytes(value, least_bytes=0) if isinstance(value, str) else value
    except ProtwinError as error:
        raise ValueError(str(error)) from error


def _as_bytes_per_s(value: object) -> object:
    try:
        return parse_bytes_per_s(value) if isinstance(value, str) else value
    except ProtwinError as error:
        raise ValueError(str(error)) from error


def _as_seconds(value: object) -> object:
    """The seconds that a text with a unit says; one without is a number, as any other field's."""
    try:
        return parse_seconds(value) if isinstance(value, str) else value
    except ProtwinError as error:
        raise ValueError(str(error)) from error


def _as_counts(value: object) -> object:
    """``"4,4"`` as ``("4", "4")``; one line of text can give a list of counts."""
    return tuple(part.strip() for part in value.split(",")) if isinstance(value, str) else value


MemorySize = Annotated[int, BeforeValidator(_as_bytes), Field(gt=0, lt=2**62)]
"""Bytes; people may write ``"80GiB"``."""
Bandwidth = Annotated[float, BeforeValidator(_as_bytes_per_s), Field(gt=0)]
"""Bytes per second; people may write ``"64GB/s"``."""
Seconds = Annotated[NonNegativeFloat, BeforeValidator(_as_seconds)]
"""Seconds; people may write ``"5us"``."""
Counts = Annotated[tuple[PositiveInt, ...], BeforeValidator(_as_counts)]
"""Counts of devices; on one line written ``4,4``."""


class _Part(FrozenModel):
    """A part of a machine, whose figures a file states as numbers: pydantic would take ``true`` for 1."""

    @field_validator("*", mode="before")
    @classmethod
    def _is_no_truth_value(cls, value: object, info: ValidationInfo) -> object:
        assert info.field_name is not None
        annotation = cls.model_fields[info.field_name].annotation
        if annotation is bool:
            return value
        figures = list(value.values()) if isinstance(value, dict) and get_origin(annotation) is dict else value
        for figure in figures if isinstance(figures, list | tuple) else (figures,):
            if isinstance(figure, bool):
                raise ValueError(f"must be a number, not {str(figure).lower()}")
        return value


class DeviceKind(StrEnum):
    """What carries out the compute lane."""

    CUDA = "cuda"
    CPU = "cpu"


class AttentionKernel(StrEnum):
    """What computes fused attention on a CUDA device."""

    FLASH_1 = "flash-1"
    """FlashAttention (arXiv 2205.14135)."""
    TRITON = "triton"
    """The version of it in Triton that came with it."""
    FLASH_2 = "flash-2"
    """FlashAttention-2 (arXiv 2307.08691)."""
    FLASH_3 = "flash-3"
    """FlashAttention-3 (arXiv 2407.08608), for Hopper."""
    CUDNN = "cudnn"
    """cuDNN's kernel, for Hopper and later."""
    MEMORY_EFFICIENT = "memory-efficient"
    """The kernel of xformers and CUTLASS, which takes every type and mask."""


PROBED: Final = "measured by probe_hardware"
"""How the ``source`` of what a probe has measured begins."""

_WIDER: Final[dict[DType, tuple[DType, ...]]] = {
    DType.FLOAT8_E4M3FN: (DType.BFLOAT16, DType.FLOAT16, DType.FLOAT32),
    DType.FLOAT8_E5M2: (DType.FLOAT16, DType.BFLOAT16, DType.FLOAT32),
    DType.FLOAT16: (DType.FLOAT32,),
    DType.BFLOAT16: (DType.FLOAT32,),
    DType.FLOAT32: (),
}
"""Element types that hold every value of another: where a device has no matrix units for a type, it computes there."""


LANES: Final = 128
"""Float32 units of one multiprocessor; Volta, Turing and the A100 have half as many."""
HALVED_CLOCK_HZ: Final = 1.6e9
"""At which those with half as many clock at most, and all others at least (NVIDIA's data sheets: 1,410 to 1,590 MHz,
1,690 and more)."""


class Device(_Part):
    """The accelerator, or the CPU in its place."""

    name: Name
    kind: DeviceKind
    memory_bytes: MemorySize
    reserved_bytes: Annotated[int, BeforeValidator(_as_bytes), Field(ge=0, lt=2**62)] = 0
    """Memory that training cannot have: driver context, libraries, the allocator's rounding."""
    memory_bandwidth_bytes_per_s: Bandwidth
    peak_flop_per_s: dict[DType, PositiveFloat]
    """Dense peak of matrix products by element type."""
    vector_flop_per_s: PositiveFloat
    """Peak outside matrix units, in float32."""
    launch_overhead_s: Seconds
    """Time of an operation that does nothing."""
    num_multiprocessors: PositiveInt | None = None
    """Processors that a kernel's blocks are dealt out to (NVIDIA: SMs, AMD: CUs); None: matrix products take no notice
    of how evenly their tiles fill them."""
    clock_hz: PositiveFloat | None = None
    """Clocks per second at which it reaches ``vector_flop_per_s``; None: what follows from the units that boards have
    (``sim/operations/efficiency.py``).  A file has the field where it is set."""
    efficiency: dict[OperationClass, Annotated[float, Field(gt=0, le=1)]] = {}
    """Share of the roofline that operations of a class reach; ``sim/operations/efficiency.py`` has the defaults and
    their sources."""
    sustained_frac: Annotated[float, Field(gt=0, le=1)] | None = None
    """Share of the matrix units' peak in 16 bits and fewer that power and libraries sustain in the largest products;
    None: what most boards do (``sim/operations/efficiency.py``).  A file has the field where it is set."""
    power_w: PositiveFloat | None = None
    """Watts that the board draws at most by its data sheet; None where they are not known."""
    power_limit_w: PositiveFloat | None = None
    """Watts that the board is limited to (``nvidia-smi --power-limit``); None: to all that it may draw.  A file has the
    field where it is set."""
    attention_kernel: AttentionKernel | None = None
    """What computes fused attention; None: what PyTorch takes there.  A file has the field where it is set."""
    optimizer_s_per_scalar: dict[Optimizer, PositiveFloat] = {}
    """Measured seconds of one step of one float32 scalar on the device; optimizers that are absent take what their
    memory traffic takes."""
    source: str = ""

    @model_serializer(mode="wrap")
    def _without_empty_fields(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        fields: dict[str, Any] = handler(self)
        for name in ("attention_kernel", "clock_hz", "sustained_frac", "power_limit_w"):
            if getattr(self, name) is None:
                fields.pop(name, None)
        return fields

    @property
    def lanes_clock_hz(self) -> float:
        """Clocks per second that its vector units would need with ``LANES`` in each multiprocessor."""
        assert self.num_multiprocessors is not None
        return self.vector_flop_per_s / (2 * LANES * self.num_multiprocessors)

    @property
    def told_clock_hz(self) -> float:
        """Its clock, stated or by the units that boards have; it must state multiprocessors."""
        if self.clock_hz is not None:
            return self.clock_hz
        return max(self.lanes_clock_hz, min(2 * self.lanes_clock_hz, HALVED_CLOCK_HZ))

    @model_validator(mode="after")
    def _leaves_memory(self) -> Self:
        if self.reserved_bytes >= self.memory_bytes:
            raise ValueError(f"reserved_bytes {self.reserved_bytes} leaves nothing of memory_bytes {self.memory_bytes}")
        if not self.peak_flop_per_s:
            raise ValueError("peak_flop_per_s names no element type")
        return self

    @model_validator(mode="after")
    def _is_limited(self) -> Self:
        limit, most = self.power_limit_w, self.power_w
        if limit is not None and (most is None or limit > most):
            most_words = "is not stated" if most is None else f"is {most:g} W"
            raise ValueError(
                f"power_limit_w is {limit:g} W, but power_w {most_words}; it limits what the board may draw"
            )
        return self

    @property
    def drawn_w(self) -> float | None:
        """Watts that the board draws at most, where it is limited; None where they are not known."""
        return self.power_w if self.power_limit_w is None else self.power_limit_w

    def rate_dtype(self, dtype: DType) -> DType | None:
        """The element type whose ``peak_flop_per_s`` products of ``dtype`` reach: itself, or the nearest wider one.

        None where the device states none of them: float32 and narrower types then end at its vector units.
        """
        return next((known for known in (dtype, *_WIDER.get(dtype, ())) if known in self.peak_flop_per_s), None)

    def matrix_flop_per_s(self, dtype: DType) -> float | None:
        """Peak of matrix products of ``dtype``, at the rate of ``rate_dtype``; None where the device has none."""
        known = self.rate_dtype(dtype)
        if known is not None:
            return self.peak_flop_per_s[known]
        return self.vector_flop_per_s if dtype in _WIDER else None

    @property
    def usable_bytes(self) -> int:
        """Memory that a plan may fill."""
        return self.memory_bytes - self.reserved_bytes


class Host(_Part):
    """The machine around the device."""

    name: Name
    num_cores: PositiveInt
    memory_bytes: MemorySize
    num_memory_channels: PositiveInt | None = None
    """Channels with memory in them; None: not stated.  The bandwidth is that of all of them."""
    memory_bandwidth_bytes_per_s: Bandwidth
    """What a stream of all cores reaches, reads and writes together."""
    adam_bytes_per_s: Bandwidth | None = None
    """Measured rate of fused CPU Adam, in bytes of memory it moves; None: derived from the memory bandwidth."""
    optimizer_s_per_scalar: dict[Optimizer, PositiveFloat] = {}
    """Measured seconds of one step of one float32 scalar on all cores; of optimizers that are absent, memory traffic
    at the rate of CPU Adam, or the cores' arithmetic, tells the time (``sim/costs/task_costs.py``)."""
    matrix_flop_per_s: PositiveFloat | None = None
    """Measured rate of float32 matrix products on all cores; None: ``sim/costs/projections.py`` derives it.  A file has
    the field where it is set."""
    source: str = ""

    @model_serializer(mode="wrap")
    def _without_empty_fields(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        fields: dict[str, Any] = handler(self)
        if self.matrix_flop_per_s is None:
            fields.pop("matrix_flop_per_s", None)
        return fields


class LinkPoint(_Part):
    """A measured copy, or a measured collective."""

    size_bytes: PositiveInt
    seconds: PositiveFloat


class Link(_Part):
    """One direction between host and device."""

    name: Name
    latency_s: Seconds
    bandwidth_bytes_per_s: Bandwidth
    """What large copies reach, not the signalling rate."""
    table: tuple[LinkPoint, ...] = ()
    """Measured copies, ascending in size; they replace latency and bandwidth within their range."""
    source: str = ""

    @model_validator(mode="after")
    def _table_ascends(self) -> Self:
        _check_ascending(self.table)
        return self


def _check_ascending(table: Sequence[LinkPoint]) -> None:
    sizes = [point.size_bytes for point in table]
    if sizes != sorted(set(sizes)):
        raise ValueError("table must ascend strictly in size_bytes")


class Collective(StrEnum):
    """An exchange that all ranks take part in."""

    ALL_REDUCE = "all_reduce"
    REDUCE_SCATTER = "reduce_scatter"
    ALL_GATHER = "all_gather"
    ALL_TO_ALL = "all_to_all"


class MeasuredCollective(_Part):
    """Seconds of a collective over some number of ranks, alone and beside compute.

    A size is that of the whole buffer: what every rank ends up with (ALL_GATHER, ALL_REDUCE) or begins with
    (REDUCE_SCATTER), or what every rank has for all ranks together, itself included (ALL_TO_ALL).
    """

    collective: Collective
    num_ranks: Annotated[int, Field(ge=2)]
    table: tuple[LinkPoint, ...] = Field(min_length=1)
    """Alone, ascending in size."""
    beside_compute: tuple[LinkPoint, ...] = ()
    """The same sizes while every rank computes; empty: not measured."""
    compute_slowdown: Annotated[float, Field(ge=1)] = 1.0
    """How much longer compute takes meanwhile than alone."""
    source: str = ""

    @model_validator(mode="after")
    def _tables_ascend(self) -> Self:
        _check_ascending(self.table)
        sizes = [point.size_bytes for point in self.table]
        if self.beside_compute and [point.size_bytes for point in self.beside_compute] != sizes:
            raise ValueError("beside_compute must have the sizes of table")
        return self


class Topology(StrEnum):
    """How the devices of a node reach each other."""

    HOST = "host"
    """Over PCIe, through the host."""
    PAIRS = "pairs"
    """A bridge joins devices 0 and 1, 2 and 3, and so on; every other way leads through the host."""
    RING = "ring"
    """Links from device to device that form rings through all of them."""
    MESH = "mesh"
    """One link between every two devices."""
    SWITCH = "switch"
    """A switch, through which each device reaches any other at full speed."""


class Node(_Part):
    """Several equal devices in one machine.  Devices are numbered, and groups of them are given by their sizes."""

    name: Name
    num_devices: PositiveInt
    sockets: Counts
    """Devices at each processor socket.  Every socket is a host of its own: the machine's ``host`` describes one."""
    pcie_roots: Counts
    """Devices that share one way into their socket: a root port, or the uplink of a PCIe switch."""
    root_bandwidth_bytes_per_s: Bandwidth | None = None
    """What that way carries in one direction; None: as much as its devices ask for."""
    topology: Topology
    device_link: Link | None = None
    """One direction.  RING, SWITCH: what a device sends to all others together; MESH, PAIRS: what it sends to one other
    device.  None for HOST alone."""
    host_path: Link | None = None
    """What a device sends to another one through the host, alone; None: what its copies to the host reach."""
    through_host_memory: bool = False
    """Whether what takes the host's path is written to the host's memory and read from there (devices that may not
    write into each other)."""
    reduces_in_switch: bool = False
    """Whether the switch adds up what several devices send, and copies to several (NVLink SHARP)."""
    source: str = ""

    @model_validator(mode="after")
    def _groups_hold_the_devices(self) -> Self:
        for field, groups in (("sockets", self.sockets), ("pcie_roots", self.pcie_roots)):
            if sum(groups) != self.num_devices:
                shown = ",".join(map(str, groups))
                raise ValueError(
                    f"{field} {shown} hold {sum(groups)} devices, but num_devices is {self.num_devices}"
                    f"; change both, as in node.num_devices=4 with node.{field}=2,2"
                )
        if not set(accumulate(self.sockets)) <= set(accumulate(self.pcie_roots)):
            raise ValueError("pcie_roots: a root belongs to one socket, but here one has devices of two")
        return self

    @model_validator(mode="after")
    def _links_match_the_topology(self) -> Self:
        if (self.device_link is None) != (self.topology is Topology.HOST):
            wanted = "has no device_link" if self.topology is Topology.HOST else "needs a device_link"
            raise ValueError(f"device_link: topology {self.topology} {wanted}")
        if self.topology is Topology.PAIRS and self.num_devices % 2:
            raise ValueError(f"num_devices: {self.num_devices} devices cannot be joined in pairs")
        if self.reduces_in_switch and self.topology is not Topology.SWITCH:
            raise ValueError(f"reduces_in_switch: topology {self.topology} has no switch")
        return self


class Network(_Part):
    """What joins nodes; every node reaches any other at full speed."""

    name: Name
    num_nodes: PositiveInt = 1
    adapters_per_node: PositiveInt = 1
    link: Link
    """One adapter, one direction."""
    source: str = ""


class Disk(_Part):
    """A disk of the host, of which plans use files in one folder."""

    name: Name
    capacity_bytes: MemorySize
    """What files may take of it."""
    read_bytes_per_s: Bandwidth
    """What large reads reach, one at a time."""
    write_bytes_per_s: Bandwidth
    """What large writes keep up, one at a time, until they are on the disk."""
    latency_s: Seconds = 0.0
    """Of one read or write."""
    source: str = ""


class Hardware(_Part, Document):
    """A machine: one device, or several equal ones in a node, or several such nodes."""

    KIND: ClassVar[str] = "hardware"
    TABLES: ClassVar[str] = "tables.machines:hardware_details"
    FORMS: ClassVar[str] = "Write sizes as 24GiB, bandwidths as 25GB/s, FLOP/s as 71e12, seconds as 5us."

    name: Name
    device: Device
    host: Host
    """One socket and the memory beside it."""
    host_to_device: Link
    device_to_host: Link
    full_duplex: bool = True
    """Whether both directions run at full speed side by side."""
    disk: Disk | None = None
    """None: no disk is known that plans may use."""
    node: Node | None = None
    """None: one device in one machine."""
    network: Network | None = None
    """None: one machine."""
    collectives: tuple[MeasuredCollective, ...] = ()
    """Measured on this machine; they replace what its links imply (``sim/costs/fabrics.py``)."""
    price_usd_per_hour: PositiveFloat | None = None
    """Rent of one machine with all of its devices, in US dollars."""
    overrides: tuple[str, ...] = ()
    """What was changed of it, as ``--set`` takes it: ``device.memory_bytes=40GiB``."""

    @model_validator(mode="after")
    def _collectives_are_its_own(self) -> Self:
        measured = [(one.collective, one.num_ranks) for one in self.collectives]
        most = max((one.num_ranks for one in self.collectives), default=1)
        if most > self.num_devices:
            raise ValueError(f"collectives has a table of {most} ranks, but the machine has {self.num_devices} devices")
        if len(set(measured)) != len(measured):
            raise ValueError("collectives has two tables of one collective over the same number of ranks")
        return self

    @property
    def devices_per_node(self) -> int:
        """Devices in one machine."""
        return 1 if self.node is None else self.node.num_devices

    @property
    def num_nodes(self) -> int:
        """Machines."""
        return 1 if self.network is None else self.network.num_nodes

    @property
    def num_devices(self) -> int:
        """Devices in all machines together."""
        return self.devices_per_node * self.num_nodes
