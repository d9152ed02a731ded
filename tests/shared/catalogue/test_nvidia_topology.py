"""Nodes from what nvidia-smi shows; the matrices were published with measurements, which name them."""

from __future__ import annotations

import pytest

from protwin.shared.basics.errors import HardwareError
from protwin.shared.catalogue.nvidia_topology import node_of_matrix
from protwin.shared.catalogue.parts import node_part
from protwin.shared.schema.hardware import Topology

# github.com/NVIDIA/nccl-tests issue 178: eight A100 PCIe in pairs.
BRIDGES = """
        GPU0    GPU1    GPU2    GPU3    GPU4    GPU5    GPU6    GPU7    CPU Affinity    NUMA Affinity
GPU0     X      NV12    NODE    NODE    SYS     SYS     SYS     SYS     0-31,64-95      0
GPU1    NV12     X      NODE    NODE    SYS     SYS     SYS     SYS     0-31,64-95      0
GPU2    NODE    NODE     X      NV12    SYS     SYS     SYS     SYS     0-31,64-95      0
GPU3    NODE    NODE    NV12     X      SYS     SYS     SYS     SYS     0-31,64-95      0
GPU4    SYS     SYS     SYS     SYS      X      NV12    NODE    NODE    32-63,96-127    1
GPU5    SYS     SYS     SYS     SYS     NV12     X      NODE    NODE    32-63,96-127    1
GPU6    SYS     SYS     SYS     SYS     NODE    NODE     X      NV12    32-63,96-127    1
GPU7    SYS     SYS     SYS     SYS     NODE    NODE    NV12     X      32-63,96-127    1
"""


def square(rows: list[str], header: str = "") -> str:
    return "\n".join([header, *(f"GPU{number}\t{row}" for number, row in enumerate(rows))])


def switched(num_devices: int, links: int, adapters: list[str]) -> str:
    """All devices on a switch; ``adapters``: for each device its cells in the adapters' columns."""
    rows = []
    for device in range(num_devices):
        cells = ["X" if other == device else f"NV{links}" for other in range(num_devices)]
        socket = 0 if device < num_devices // 2 else 1
        rows.append(
            "\t".join([*cells, *adapters[device].split(), "0-55,112-167" if not socket else "56-111", str(socket)])
        )
    return square(rows, "\tGPU0\tNIC0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID")


def test_pairs_with_bridges() -> None:
    node, known = node_of_matrix(BRIDGES, (8, 0)), node_part("a100-bridges-8")
    assert (node.topology, node.sockets, node.pcie_roots) == (known.topology, known.sockets, known.pcie_roots)
    assert node.device_link is not None
    assert known.device_link is not None
    assert node.device_link.bandwidth_bytes_per_s == pytest.approx(known.device_link.bandwidth_bytes_per_s, rel=0.16)


def test_a_switch_with_an_adapter_for_each() -> None:
    # As in github.com/NVIDIA/nccl issue 1264: every H100 meets one adapter below its own PCIe switch.
    adapters = [" ".join("PIX" if other == device else "SYS" for other in range(8)) for device in range(8)]
    node, known = node_of_matrix(switched(8, 18, adapters), (9, 0)), node_part("hgx-h100-8")
    assert (node.topology, node.sockets, node.pcie_roots) == (known.topology, known.sockets, known.pcie_roots)
    assert node.reduces_in_switch
    assert node.device_link is not None
    assert node.device_link.bandwidth_bytes_per_s == pytest.approx(370e9, rel=0.01)


def test_adapters_tell_which_devices_share_a_switch() -> None:
    adapters = [" ".join("PXB" if other == device // 2 else "NODE" for other in range(4)) for device in range(8)]
    node, known = node_of_matrix(switched(8, 12, adapters), (8, 0)), node_part("hgx-a100-8")
    assert (node.topology, node.sockets, node.pcie_roots) == (known.topology, known.sockets, known.pcie_roots)
    assert not node.reduces_in_switch


def test_a_hybrid_cube_mesh_makes_rings() -> None:
    # A DGX-1 with P100: four NVLinks each, no device linked to all others.
    node = node_of_matrix(
        square(
            [
                "X NV1 NV1 NV1 NV1 SOC SOC SOC PIX SOC PHB SOC 0-19",
                "NV1 X NV1 NV1 SOC NV1 SOC SOC PIX SOC PHB SOC 0-19",
                "NV1 NV1 X NV1 SOC SOC NV1 SOC PHB SOC PIX SOC 0-19",
                "NV1 NV1 NV1 X SOC SOC SOC NV1 PHB SOC PIX SOC 0-19",
                "NV1 SOC SOC SOC X NV1 NV1 NV1 SOC PIX SOC PHB 20-39",
                "SOC NV1 SOC SOC NV1 X NV1 NV1 SOC PIX SOC PHB 20-39",
                "SOC SOC NV1 SOC NV1 NV1 X NV1 SOC PHB SOC PIX 20-39",
                "SOC SOC SOC NV1 NV1 NV1 NV1 X SOC PHB SOC PIX 20-39",
            ]
        ),
        (6, 0),
    )
    assert node.topology is Topology.RING
    assert (node.sockets, node.pcie_roots) == ((4, 4), (2, 2, 2, 2))
    assert node.device_link is not None
    assert node.device_link.bandwidth_bytes_per_s == 4 * 18e9


def test_boards_without_links_meet_in_the_host() -> None:
    rows = ["X PHB SOC SOC 0-9,20-29", "PHB X SOC SOC 0-9,20-29", "SOC SOC X PHB 10-19", "SOC SOC PHB X 10-19"]
    node = node_of_matrix(square(rows), (8, 9))
    assert (node.topology, node.device_link) == (Topology.HOST, None)
    assert (node.sockets, node.pcie_roots) == ((2, 2), (1, 1, 1, 1))
    below_one = node_of_matrix(square(["X PIX 0-9 0", "PIX X 0-9 0"], "CPU Affinity  NUMA Affinity"), (8, 9))
    assert (below_one.sockets, below_one.pcie_roots) == ((2,), (2,))


def test_a_few_links_to_each_are_a_mesh() -> None:
    node = node_of_matrix(square(["X NV2 NV2 NV2", "NV2 X NV2 NV2", "NV2 NV2 X NV2", "NV2 NV2 NV2 X"]), (7, 0))
    assert node.topology is Topology.MESH
    assert node.device_link is not None
    assert node.device_link.bandwidth_bytes_per_s == 40e9


def test_one_device_is_a_node_of_one() -> None:
    node = node_of_matrix("\tGPU0\tCPU Affinity\tNUMA Affinity\nGPU0\t X \t0-15\tN/A\n", (9, 0))
    assert (node.num_devices, node.sockets, node.pcie_roots, node.topology) == (1, (1,), (1,), Topology.HOST)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no output of nvidia-smi topo -m"),
        ("Failed to initialize NVML", "no output of nvidia-smi topo -m"),
        (square(["X NV4", "NV4"]), "no output of nvidia-smi topo -m"),
        (square(["X SYS NV4 SYS", "SYS X SYS NV4", "NV4 SYS X SYS", "SYS NV4 SYS X"]), "neither in pairs 0-1"),
        (square(["X NV4 SYS", "NV4 X SYS", "SYS SYS X"]), "neither in pairs"),
        (square(["X SYS PIX", "SYS X SYS", "PIX SYS X"]), "not numbered in a row: device 2"),
        (square(["X NV4", "NV4 X"]), "compute capability 8.9 reaches"),
    ],
)
def test_what_cannot_be_told_is_refused(text: str, message: str) -> None:
    with pytest.raises(HardwareError, match=message):
        node_of_matrix(text, (8, 9))
