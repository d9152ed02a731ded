"""Seconds of kernels that go through sequences in chunks on a CUDA device: linear attention and state spaces.

[Note: Chunked kernels]
Each program of such a kernel takes one chunk of one head: it loads it, multiplies small matrices of it one after the
other, each of which waits for the last, and stores what it made.  Few programs fit on a multiprocessor at a time, so
that loading, multiplying and what lies between hide little of each other: here they add up.  Small products are issued
by each multiprocessor at a pace of its own, whatever its matrix units could do.  Where the state goes from chunk to
chunk, every step waits for the one before it.

The constants are solved from three forwards of the gated delta rule, heads of 128, and checked on others; seconds are
per token and head:

| device, heads, tokens | measured | here | source |
| --- | ---: | ---: | --- |
| H800, 96 heads, 8,192 | 2.58 ns | solved | github.com/PaddlePaddle/flash-attention/pull/133 |
| H100, 8 heads, 65,536 | 3.75 ns | solved | github.com/flashinfer-ai/flashinfer/pull/3866 |
| H20, 64 heads, 8,192 | 3.83 ns | solved | FlashKDA, BENCHMARK_H20.md |

What they give for others is in ``tests/sim/operations/test_chunked.py``.
"""

from __future__ import annotations

from typing import Final

from ...shared.schema.hardware import Device
from ...shared.schema.workload import Operation, OperationClass
from .efficiency import DISPATCHES_PER_LAUNCH, sustained_flop_per_s

TRITON_DISPATCHES_PER_LAUNCH: Final = 10.0
"""Host seconds for a kernel that a package launches by Triton, with its autotuner, guards and checks in Python: the
forward of Kimi's delta rule, ten launches, took an H100's host 0.74 to 0.82 ms at any small size
(github.com/NVIDIA/cudnn-frontend/pull/1017), that of the gated one, six launches, a B200's 0.20 ms
(github.com/vllm-project/vllm/pull/38981): 75 and 33 µs each."""
_COMPILED: Final = ("causal_conv1d", "selective_scan")
"""Kernels that are launched from C++."""
_STREAMED: Final = 0.7
"""Share of the memory's bandwidth, solved from measured forwards: programs load tiles, and wait for them."""
_FLOP_PER_CLOCK: Final = 1_200
"""Of one multiprocessor, in products of at most 64 rows, solved likewise."""
_STEP_CLOCKS: Final = 1_100
"""From one chunk to the next, solved likewise."""


def is_chunked(operation: Operation) -> bool:
    """Whether ``operation`` is such a kernel."""
    return operation.operation_class is OperationClass.MATMUL and len(operation.shape) == 1


def is_launched(operation: Operation) -> bool:
    """Whether ``operation`` is a kernel of a package, which the trace has taken the place of."""
    return len(operation.shape) == 1


def dispatches_per_launch(operation: Operation) -> float:
    """Host seconds over those of an operation that does nothing; the package's own where it launches by Triton."""
    is_triton = is_launched(operation) and not operation.name.startswith(_COMPILED)
    return TRITON_DISPATCHES_PER_LAUNCH if is_triton else DISPATCHES_PER_LAUNCH


def chunked_s(operation: Operation, device: Device, peak_flop_per_s: float) -> float:
    """Seconds of the kernel; see [Note: Chunked kernels].

    ``peak_flop_per_s``: of the matrix units in its type.  The device states its multiprocessors.
    """
    assert device.num_multiprocessors is not None
    (steps,) = operation.shape
    moving_s = operation.bytes_moved / device.memory_bandwidth_bytes_per_s / _STREAMED
    multiplying_s = operation.flops / sustained_flop_per_s(device, peak_flop_per_s, operation.dtype)
    clock_hz = device.told_clock_hz
    issuing_s = operation.flops / (_FLOP_PER_CLOCK * clock_hz * device.num_multiprocessors)
    return moving_s + multiplying_s + max(issuing_s, steps * _STEP_CLOCKS / clock_hz)
