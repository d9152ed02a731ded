"""Copies: a throttled link keeps its pace whatever their number, and probes take turns among places."""

from __future__ import annotations

import time

import pytest
import torch

from protwin.runtime.devices.cpu_device import CpuDevice
from protwin.runtime.devices.probe import copy_work


@pytest.mark.parametrize("to_device", [False, True])
def test_many_copies_in_one_call_are_made_and_take_as_long_as_the_link_says(to_device: bool) -> None:
    device = CpuDevice(host_to_device_bytes_per_s=1e6, device_to_host_bytes_per_s=1e6)
    sources = [torch.full((size,), size % 251, dtype=torch.uint8) for size in (10_000, 7, 20_000)]
    destinations = [torch.zeros_like(one) for one in sources]
    begun_s = time.perf_counter()
    device.copy_all(destinations, sources, to_device=to_device)
    assert time.perf_counter() - begun_s >= 0.030
    assert all(map(torch.equal, destinations, sources))
    device.copy_all([], [], to_device=to_device)


@pytest.mark.parametrize("to_device", [False, True])
def test_a_probe_copies_among_places_that_no_cache_holds(to_device: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The wrong variant copies the same place over and over."""
    device, hosts = CpuDevice(), set()

    def noted(destination: torch.Tensor, source: torch.Tensor, *, to_device: bool) -> None:
        hosts.add((source if to_device else destination).data_ptr())

    monkeypatch.setattr(device, "copy", noted)
    work = copy_work(device, 2**22, to_device=to_device)
    for _ in range(100):
        work()
    assert len(hosts) * 2**22 >= 2**27
