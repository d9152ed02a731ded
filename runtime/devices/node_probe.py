"""How the devices of this machine are joined, as far as its driver tells."""

from __future__ import annotations

import subprocess
from typing import Final

import torch

from ...shared.basics.errors import HardwareError
from ...shared.catalogue.nvidia_topology import node_of_matrix
from ...shared.catalogue.rank_share import host_share
from ...shared.schema.hardware import Hardware, Node

_COMMAND: Final = ("nvidia-smi", "topo", "-m")
_TIMEOUT_S: Final = 20.0


def told_by_driver(found: Hardware, target: torch.device) -> Hardware:
    """``found``, which was measured on the CUDA device ``target``, with what its driver tells besides.

    That is the number of its multiprocessors, and the node if there are several devices.  What was measured of the host
    is of all sockets together: of several, the machine's host is one.
    """
    properties = torch.cuda.get_device_properties(target)
    node, said = probe_node()
    device = found.device.model_copy(
        update={
            "num_multiprocessors": properties.multi_processor_count,
            "source": "; ".join(filter(None, (found.device.source, said))),
        }
    )
    host = found.host if node is None else host_share(found.host, len(node.sockets))
    return found.model_copy(update={"device": device, "host": host, "node": node})


def probe_node() -> tuple[Node | None, str]:
    """The node that this machine is, and what is to be said of it; None with one device, or with the reason why not.

    Links between devices are not measured: their bandwidth is what NCCL counts them for.
    """
    num_devices = torch.cuda.device_count()
    if num_devices < 2:
        return None, ""
    try:
        node = node_of_matrix(_matrix(), torch.cuda.get_device_capability(0))
    except HardwareError as error:
        return None, f"node: not known, since {error}"
    if node.num_devices != num_devices:
        return None, f"node: not known, since {num_devices} of the machine's {node.num_devices} devices are visible"
    return node, "node: as nvidia-smi shows it"


def _matrix() -> str:
    """The output of nvidia-smi.  Raises HardwareError if there is none."""
    try:
        done = subprocess.run(_COMMAND, capture_output=True, text=True, timeout=_TIMEOUT_S, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        raise HardwareError(f"{' '.join(_COMMAND)} failed ({type(error).__name__}). Write the node by hand.") from error
    return done.stdout
