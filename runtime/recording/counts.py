"""What a training has moved and stepped so far, under all plans that it has carried out."""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass(frozen=True, kw_only=True, slots=True)
class Counts:
    """Sums over iterations."""

    num_iterations: int = 0
    num_gathers: int = 0
    num_cpu_adam_steps: int = 0
    bytes_host_to_device: int = 0
    bytes_device_to_host: int = 0
    bytes_read_from_disk: int = 0
    bytes_written_to_disk: int = 0

    def __add__(self, other: Counts) -> Counts:
        """Of both together."""
        return Counts(**{one.name: getattr(self, one.name) + getattr(other, one.name) for one in fields(self)})


class Counted:
    """What can be asked of a training while it goes on, and afterwards."""

    @property
    def counts(self) -> Counts:
        """All of it at once."""
        raise NotImplementedError

    @property
    def num_iterations(self) -> int:
        """Completed iterations."""
        return self.counts.num_iterations

    @property
    def bytes_host_to_device(self) -> int:
        """Bytes gathered so far."""
        return self.counts.bytes_host_to_device

    @property
    def bytes_device_to_host(self) -> int:
        """Bytes of gradients offloaded so far."""
        return self.counts.bytes_device_to_host

    @property
    def num_gathers(self) -> int:
        """Chunks gathered so far."""
        return self.counts.num_gathers

    @property
    def num_cpu_adam_steps(self) -> int:
        """Chunks stepped by CPU Adam so far."""
        return self.counts.num_cpu_adam_steps

    @property
    def bytes_read_from_disk(self) -> int:
        """Bytes that lanes have read so far of chunks on the disk."""
        return self.counts.bytes_read_from_disk

    @property
    def bytes_written_to_disk(self) -> int:
        """Bytes that lanes have written so far of chunks on the disk."""
        return self.counts.bytes_written_to_disk
