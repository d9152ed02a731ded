"""The node that ``nvidia-smi topo -m`` shows.

[Note: The matrix]
A row and a column for every device; a cell says how the two reach each other: NV4 over four NVLinks (each pair of
devices on an NVSwitch shows all of a device's links), PIX and PXB below one PCIe switch, PHB and NODE within a socket,
SYS between sockets.  NVLinks hide what the way through the host would be.  But further columns stand for network
adapters: two devices that share a PCIe switch, or a socket, with the same adapter share it with each other.  The last
columns name the processor's cores and its socket (NUMA Affinity).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from ..basics.errors import HardwareError
from ..schema.hardware import Link, Node, Topology

_SAME_SWITCH: Final = ("PIX", "PXB")
_SAME_SOCKET: Final = (*_SAME_SWITCH, "PHB", "NODE")
_BETWEEN_SOCKETS: Final = ("SYS", "SOC")
_CELL: Final = re.compile(r"X|NV\d+|PIX|PXB|PHB|NODE|SYS|SOC")
_MOST_LINKS: Final = 18
"""NVLinks of a device: none has had more."""
_STEP_LATENCY_S: Final = 3.4e-6
_LINK_BYTES_PER_S: Final[Mapping[tuple[int, int], float]] = {
    (6, 0): 18.0e9,
    (7, 0): 20.0e9,
    (8, 0): 20.0e9,
    (8, 6): 12.0e9,
    (9, 0): 20.6e9,
    (10, 0): 40.1e9,
}
"""What NCCL counts one NVLink for, by the device's compute capability (src/graph/topo.h in github.com/NVIDIA/nccl)."""
_FIRST_ADDING_SWITCH: Final = (9, 0)


@dataclass(frozen=True)
class _Matrix:
    cells: tuple[tuple[str, ...], ...]
    """Row by row: to every device, then to every adapter."""
    sockets: tuple[str, ...]
    """NUMA affinity by device; empty where the matrix has none."""

    @property
    def num_devices(self) -> int:
        return len(self.cells)

    def num_links(self, one: int, other: int) -> int:
        """NVLinks between two devices, or from one of them to the switch."""
        cell = self.cells[one][other]
        return int(cell[2:]) if cell.startswith("NV") else 0


def node_of_matrix(text: str, compute_capability: tuple[int, int]) -> Node:
    """The node that the output of ``nvidia-smi topo -m`` describes.

    Bandwidths of NVLinks are those that NCCL counts for devices of the compute capability.  Raises HardwareError if the
    text holds no such matrix, if devices of one socket or root are not numbered in a row, or if NVLinks join them in a
    way that ``Topology`` has no name for.
    """
    matrix = _parsed(text)
    topology, num_links = _topology(matrix)
    link = None
    if topology is not Topology.HOST:
        rate = _LINK_BYTES_PER_S.get(compute_capability)
        if rate is None:
            shown = ".".join(map(str, compute_capability))
            raise HardwareError(
                f"nobody has said what an NVLink of devices with compute capability {shown} reaches. "
                f"Write the node into the machine's file, with node.device_link.bandwidth_bytes_per_s."
            )
        source = (
            f"nvidia-smi: {num_links} NVLinks; bandwidth: NCCL counts {rate / 1e9:.4g} GB/s each (src/graph/topo.h)"
        )
        link = Link(name="NVLink", latency_s=_STEP_LATENCY_S, bandwidth_bytes_per_s=num_links * rate, source=source)
    return Node(
        name="this machine",
        num_devices=matrix.num_devices,
        sockets=_sizes(_sockets(matrix), "socket"),
        pcie_roots=_sizes(_roots(matrix), "PCIe switch"),
        topology=topology,
        device_link=link,
        reduces_in_switch=topology is Topology.SWITCH and compute_capability >= _FIRST_ADDING_SWITCH,
        source="nvidia-smi topo -m",
    )


def _parsed(text: str) -> _Matrix:
    lines = [re.sub(r"\x1b\[[0-9;]*m", "", line) for line in text.splitlines()]
    rows = [line.split() for line in lines if re.match(r"GPU\d+\s", line)]
    cells = [[cell for cell in row[1:] if _CELL.fullmatch(cell)] for row in rows]
    if not rows or len({len(row) for row in cells}) != 1 or len(cells[0]) < len(cells):
        raise HardwareError(
            "this is no output of nvidia-smi topo -m: it has no square of rows GPU0, GPU1, .... "
            "Write the node into the machine's file instead."
        )
    after = [row[1 + len(cells[0]) :] for row in rows]  # cores, socket, and in newer versions the device's own number
    has_sockets = any("NUMA Affinity" in line for line in lines) and all(len(rest) >= 2 for rest in after)
    sockets = tuple(rest[1] for rest in after) if has_sockets else ()
    return _Matrix(tuple(tuple(row) for row in cells), sockets)


def _topology(matrix: _Matrix) -> tuple[Topology, int]:
    """How NVLinks join the devices, and how many a device's ``device_link`` stands for."""
    devices = range(matrix.num_devices)
    links = [[matrix.num_links(one, other) for other in devices if other != one] for one in devices]
    totals = {sum(row) for row in links}
    most = max((max(row, default=0) for row in links), default=0)
    if totals == {0}:
        return Topology.HOST, 0
    if all(row.count(0) == len(row) - 1 for row in links):
        partners = [next(other for other in devices if matrix.num_links(one, other)) for one in devices]
        if all(partner == one ^ 1 for one, partner in enumerate(partners)):
            return Topology.PAIRS, most
    elif all(count == most for row in links for count in row):
        is_switch = most * (matrix.num_devices - 1) > _MOST_LINKS
        return (Topology.SWITCH if is_switch else Topology.MESH), most
    elif len(totals) == 1:
        return Topology.RING, totals.pop()
    raise HardwareError(
        "NVLinks join the devices of this machine neither in pairs 0-1, 2-3, ... nor all alike. "
        "Write the node into the machine's file, or leave out devices with CUDA_VISIBLE_DEVICES."
    )


def _sockets(matrix: _Matrix) -> list[int]:
    """The socket of every device: by affinity, else by what devices and adapters meet within; all in one if none do."""
    if matrix.sockets:
        return [matrix.sockets.index(socket) for socket in matrix.sockets]
    within = _joined(matrix, _SAME_SOCKET)
    is_told = any(cell in (*_SAME_SOCKET, *_BETWEEN_SOCKETS) for row in matrix.cells for cell in row)
    return within if is_told else [0] * matrix.num_devices


def _roots(matrix: _Matrix) -> list[int]:
    """The PCIe switch of every device, by each other and by the adapters below it."""
    return _joined(matrix, _SAME_SWITCH)


def _joined(matrix: _Matrix, kinds: Sequence[str]) -> list[int]:
    """The group of every device, named after its first member: those that meet, or meet an adapter, in these ways."""
    adapters = range(matrix.num_devices, len(matrix.cells[0]))
    group = list(range(matrix.num_devices))
    for other, there in enumerate(matrix.cells):
        for one, here in enumerate(matrix.cells[:other]):
            if here[other] in kinds or any(here[at] in kinds and there[at] in kinds for at in adapters):
                low, high = sorted((group[one], group[other]))
                group = [low if member == high else member for member in group]
    return group


def _sizes(groups: Sequence[int], what: str) -> tuple[int, ...]:
    """How many devices each group has, in order of their numbers."""
    sizes: list[int] = []
    for device, group in enumerate(groups):
        if device and group == groups[device - 1]:
            sizes[-1] += 1
        elif group in groups[:device]:
            raise HardwareError(
                f"devices of one {what} are not numbered in a row: device {device} has that of an earlier one. "
                f"Write the node into the machine's file."
            )
        else:
            sizes.append(1)
    return tuple(sizes)
