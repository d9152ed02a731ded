"""Seconds of a phase, and of one operation of it, from the device's data sheet.

[Note: Launches]
The host thread that dispatches operations and the device that executes them are two workers with a queue between.  On
CUDA the host runs ahead, hundreds of kernels deep, and a phase takes as long as the slower of the two needs for all of
its operations: max(dispatches, executions).  Taking the larger one operation by operation would bill small kernels for
dispatches that happen while a large one before them still runs.  A dispatch takes the host DISPATCHES_PER_LAUNCH times
as long as an operation that does nothing, and a kernel takes the device KERNEL_FIXED_S besides its work.  Kernels of
a compiled graph take COMPILED_DISPATCHES_PER_LAUNCH, and its call DISPATCHES_PER_GRAPH.  On the CPU one thread
dispatches and then executes, so the two add up.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from ...shared.basics.errors import HardwareError
from ...shared.schema.hardware import Device, DeviceKind
from ...shared.schema.workload import DType, Operation, OperationClass, Phase
from .chunked import chunked_s, dispatches_per_launch, is_chunked
from .convolutions import convolution_s, is_convolution
from .efficiency import (
    COMPILED_DISPATCHES_PER_LAUNCH,
    DISPATCHES_PER_GRAPH,
    KERNEL_FIXED_S,
    efficiency_frac,
    power_slowdown,
    tensor_float_flop_per_s,
)
from .kernels import kernel_s
from .recurrent import is_recurrent, recurrent_s
from .streams import element_s, launched, moved_bytes, share_of

_MATRIX_CLASSES: Final = frozenset({OperationClass.MATMUL, OperationClass.ATTENTION})


def roofline_s(phase: Phase, device: Device) -> float:
    """Seconds of a phase from its operations and the device's data sheet.

    Each operation executes for max(arithmetic, bytes / (bandwidth * efficiency)) (roofline: Williams, Waterman,
    Patterson, doi 10.1145/1498765.1498785), the arithmetic being flops / (peak * efficiency), or what its shape implies
    (``sim/operations/kernels.py``); and it costs one launch, see [Note: Launches].
    Raises HardwareError if the device states no peak for an element type that matrix products use.
    """
    operations = phase.operations if device.kind is DeviceKind.CPU else launched(phase.operations)
    is_compiled = phase.num_graphs is not None
    seconds = [(operation, operation_s(operation, device, is_compiled=is_compiled)) for operation in operations]
    working_s = sum(of_one_s for _, of_one_s in seconds)
    if device.kind is DeviceKind.CPU:
        return working_s
    products_s = sum(of_one_s for operation, of_one_s in seconds if operation.operation_class in _MATRIX_CLASSES)
    if working_s > 0:
        working_s += products_s * (power_slowdown(device, products_s / working_s) - 1)
    return max(working_s, _dispatches(operations, phase.num_graphs) * device.launch_overhead_s)


def _dispatches(operations: Sequence[Operation], num_graphs: int | None) -> float:
    """How many times as long the host takes as for an operation that does nothing; see [Note: Launches]."""
    if num_graphs is None:
        return sum(operation.count * dispatches_per_launch(operation) for operation in operations)
    num_launches = sum(operation.count for operation in operations)
    return num_launches * COMPILED_DISPATCHES_PER_LAUNCH + num_graphs * DISPATCHES_PER_GRAPH


def operation_s(operation: Operation, device: Device, *, is_compiled: bool = False) -> float:
    """What all of an operation's kernels keep ``device`` busy, with what each takes besides its work.

    ``is_compiled``: whether it is of a graph that torch.compile has compiled.
    """
    is_cpu = device.kind is DeviceKind.CPU
    besides_s = device.launch_overhead_s if is_cpu else min(KERNEL_FIXED_S, device.launch_overhead_s)
    return operation.count * (_execution_s(operation, device, is_compiled) + besides_s)


def _execution_s(operation: Operation, device: Device, is_compiled: bool) -> float:
    operation_class = operation.operation_class
    efficiency = efficiency_frac(device, operation_class)
    if operation_class not in _MATRIX_CLASSES:
        streaming_s = moved_bytes(operation) / device.memory_bandwidth_bytes_per_s
        if device.kind is DeviceKind.CPU:
            return max(operation.flops / device.vector_flop_per_s, streaming_s) / efficiency
        share = share_of(operation, device, efficiency)
        calculating_s = operation.flops / device.vector_flop_per_s / efficiency
        return max(calculating_s, streaming_s / share, element_s(operation, device))
    moving_s = operation.bytes_moved / device.memory_bandwidth_bytes_per_s
    if operation.flops == 0:
        return moving_s / efficiency
    peak = matrix_flop_per_s(device, operation)
    if device.kind is DeviceKind.CUDA and device.num_multiprocessors is not None:
        if is_convolution(operation):
            return convolution_s(operation, device, peak)
        if is_recurrent(operation):
            return recurrent_s(operation, device, peak)
        if is_chunked(operation):
            return chunked_s(operation, device, peak)
    is_cuda = device.kind is DeviceKind.CUDA
    multiplying_s = kernel_s(operation, device, peak, is_compiled=is_compiled) if is_cuda else None
    if multiplying_s is None:
        return max(operation.flops / peak, moving_s) / efficiency
    # Operands stream in as those of element-wise operations do.
    return max(multiplying_s, moving_s / efficiency_frac(device, OperationClass.ELEMENTWISE))


def matrix_flop_per_s(device: Device, operation: Operation) -> float:
    """Peak of matrix products in the operation's element type, or the nearest wider one that the device states.

    Float32 and narrower end at the vector units, which every device has.  What cuDNN computes takes TF32 for float32.
    Raises HardwareError for other types.
    """
    if operation.dtype is DType.FLOAT32 and (is_convolution(operation) or is_recurrent(operation)):
        tensor_float = tensor_float_flop_per_s(device)
        if tensor_float is not None:
            return tensor_float
    peak = device.matrix_flop_per_s(operation.dtype)
    if peak is not None:
        return peak
    stated: Sequence[str] = sorted(device.peak_flop_per_s)
    raise HardwareError(
        f"{operation.name} multiplies matrices of {operation.dtype} but {device.name} states peak_flop_per_s for "
        f"{', '.join(stated)} only. Add {operation.dtype} to the device's peak_flop_per_s."
    )
