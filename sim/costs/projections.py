"""How long projections of gradients and parameters take ([Note: Projections] in ``shared/layout/projections.py``).

A projection is two float32 products of thin matrices.  It executes for max(FLOPs / rate of products, bytes of memory /
bandwidth), as any product does, and each of its two operations is dispatched once.
"""

from __future__ import annotations

from typing import Final

from ...shared.schema.hardware import Device, DeviceKind, Hardware
from ...shared.schema.workload import DType, OperationClass
from ..operations.efficiency import KERNEL_FIXED_S, efficiency_frac

PRODUCTS: Final = 2
"""Of one projection: the coefficients, and the frozen matrix times these."""
CORE_FLOP_PER_S: Final = 40e9
"""What one core of a host sustains of float32 products where nobody says (``Host.matrix_flop_per_s``): two fused
multiply-adds of eight lanes a cycle, which every server core since 2013 has (Intel Haswell, AMD Zen 2), are 32 FLOPs;
at 1.6 GHz under such load, 51 GFLOP/s, of which a blocked product keeps 80 %."""


def device_projection_s(device: Device, flops: int, touched_bytes: int, num_tensors: int) -> float:
    """Seconds of ``num_tensors`` projections one after the other on ``device``, before calibration.

    Raises nothing: a device that states no peak of float32 products multiplies on its vector units.
    """
    executing_s = _roofline_s(_device_flop_per_s(device), _device_bytes_per_s(device), flops, touched_bytes)
    num_products = PRODUCTS * num_tensors
    if device.kind is DeviceKind.CPU:
        return executing_s + num_products * device.launch_overhead_s
    fixed_s = min(KERNEL_FIXED_S, device.launch_overhead_s)
    return max(executing_s + num_products * fixed_s, num_products * device.launch_overhead_s)


def host_projection_s(hardware: Hardware, flops: int, touched_bytes: int, num_tensors: int) -> float:
    """Seconds of ``num_tensors`` projections one after the other on all cores of the host, before calibration."""
    host, device = hardware.host, hardware.device
    rate = host_flop_per_s(hardware)
    executing_s = _roofline_s(rate, host.memory_bandwidth_bytes_per_s, flops, touched_bytes)
    return executing_s + PRODUCTS * num_tensors * device.launch_overhead_s


def host_flop_per_s(hardware: Hardware) -> float:
    """FLOP/s of float32 products on the host: measured, else the CPU's as a device, else by the core."""
    if hardware.host.matrix_flop_per_s is not None:
        return hardware.host.matrix_flop_per_s
    if hardware.device.kind is DeviceKind.CPU:
        return _device_flop_per_s(hardware.device)
    return hardware.host.num_cores * CORE_FLOP_PER_S


def _device_flop_per_s(device: Device) -> float:
    peak = device.matrix_flop_per_s(DType.FLOAT32)
    return (device.vector_flop_per_s if peak is None else peak) * efficiency_frac(device, OperationClass.MATMUL)


def _device_bytes_per_s(device: Device) -> float:
    return device.memory_bandwidth_bytes_per_s * efficiency_frac(device, OperationClass.ELEMENTWISE)


def _roofline_s(flop_per_s: float, bytes_per_s: float, flops: int, touched_bytes: int) -> float:
    return max(flops / flop_per_s, touched_bytes / bytes_per_s)
