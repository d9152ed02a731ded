"""What one of several ranks has of a machine's memory."""

from __future__ import annotations

from ...shared.catalogue.rank_share import machine_of_rank
from ...shared.schema.hardware import Hardware
from .libraries import collective_bytes


def rank_device_bytes(hardware: Hardware, num_ranks: int) -> int:
    """Device memory that each rank has for training, less what carries collectives (``library_workspaces``)."""
    return max(1, hardware.device.usable_bytes - collective_bytes(hardware, num_ranks))


def rank_host_bytes(hardware: Hardware, num_ranks: int) -> int:
    """Host memory that each rank has: its share of a socket's.  Raises HardwareError as ``machine_of_rank`` does."""
    return hardware.host.memory_bytes if num_ranks == 1 else machine_of_rank(hardware, num_ranks).host.memory_bytes
