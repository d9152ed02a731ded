"""A disk that the CPU as a device emulates: as slow as it is told, in trainings and where machines are measured."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch

from protwin.runtime import CpuDevice
from protwin.runtime.devices.chunk_file import ChunkFile, measured_disk_rates
from protwin.runtime.devices.probe import probe_hardware
from protwin.shared.basics.errors import HardwareError

READ, WRITE = 4e7, 2e7


def slow() -> CpuDevice:
    return CpuDevice(disk_read_bytes_per_s=READ, disk_write_bytes_per_s=WRITE)


def test_a_throttled_disk_is_never_faster(tmp_path: Path) -> None:
    read, write = measured_disk_rates(tmp_path, 2**20, slow())
    assert 0 < read <= READ
    assert 0 < write <= WRITE


def test_a_throttled_disk_says_so() -> None:
    assert slow().emulated == (
        "device memory is host memory",
        "disk reads throttled to 40 MB/s",
        "disk writes throttled to 20 MB/s",
    )
    assert CpuDevice().emulated == ("device memory is host memory",)


def test_a_machine_with_a_throttled_disk_is_described_as_slow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("protwin.runtime.devices.probe._DISK_BYTES", 2**20)
    disk = probe_hardware(seconds=0.1, device=slow(), disk_folder=tmp_path).disk
    assert disk is not None
    assert disk.read_bytes_per_s <= READ
    assert disk.write_bytes_per_s <= WRITE
    assert "disk reads throttled to 40 MB/s" in disk.source


def test_waits_for_a_slow_disk_end_with_training(tmp_path: Path) -> None:
    """The wrong variant would read for a day."""
    device = CpuDevice(disk_read_bytes_per_s=1.0)
    given_up = threading.Event()
    given_up.set()
    device.cut_waits_short(given_up)
    file = ChunkFile(tmp_path, 2**17, device)
    file.read(torch.empty(2**17, dtype=torch.uint8), 0)
    assert file.read_bytes == 2**17
    file.close()


@pytest.mark.parametrize("name", ["disk_read_bytes_per_s", "disk_write_bytes_per_s"])
@pytest.mark.parametrize("rate", [0.0, -1.0, float("inf")])
def test_rates_are_positive(name: str, rate: float) -> None:
    with pytest.raises(HardwareError, match=name):
        CpuDevice(**{name: rate})
