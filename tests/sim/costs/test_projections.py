"""Seconds of projections, by the machine's own figures."""

from __future__ import annotations

import pytest

from protwin.shared.catalogue.machines import load_hardware
from protwin.sim.costs.projections import (
    CORE_FLOP_PER_S,
    device_projection_s,
    host_flop_per_s,
    host_projection_s,
)
from tests.sim.hand_made import machine


def test_a_host_multiplies_as_measured_or_by_its_cores() -> None:
    box = load_hardware("rtx-4090")
    assert host_flop_per_s(box) == box.host.num_cores * CORE_FLOP_PER_S
    measured = box.model_copy(update={"host": box.host.model_copy(update={"matrix_flop_per_s": 1e12})})
    assert host_flop_per_s(measured) == 1e12
    # 10^12 FLOPs, no memory: one second, and two dispatches.
    expected_s = 1.0 + 2 * box.device.launch_overhead_s
    assert host_projection_s(measured, 10**12, 0, 1) == pytest.approx(expected_s)


def test_large_projections_are_bound_by_products_and_thin_ones_by_memory() -> None:
    device = load_hardware("rtx-4090").device
    few, many = (device_projection_s(device, flops, 10**9, 1) for flops in (10**6, 10**15))
    assert few == pytest.approx(device_projection_s(device, 0, 10**9, 1))
    assert many > 10 * few
    assert device_projection_s(device, 0, 2 * 10**9, 1) > few


def test_small_projections_cost_their_dispatches() -> None:
    device = load_hardware("rtx-4090").device
    assert device_projection_s(device, 1, 1, 100) == pytest.approx(200 * device.launch_overhead_s, rel=0.5)


def test_a_cpu_that_is_the_device_multiplies_as_the_device_does() -> None:
    box = machine()
    assert host_flop_per_s(box) > 0
    assert host_projection_s(box, 10**9, 0, 0) == pytest.approx(10**9 / host_flop_per_s(box))
