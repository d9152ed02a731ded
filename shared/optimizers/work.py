"""What one step of an optimizer moves through memory, and what it makes on the way."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Final

from ..schema.optimizer import Optimizer
from ..schema.workload import DType
from .state import Stepped, is_quantized, master_bytes, state_tensors, stepped_dtype, summed_dtype

_MATRIX_PASSES: Final = 17
_VECTOR_PASSES: Final = 19
"""Times that Adafactor reads or writes as many scalars as the weight has, the weight's factors left out.

``_single_tensor_adafactor`` of torch 2.13, without weight decay, by operation.  Both: norm of the weight 1, clamp 2,
reciprocal root 2, times the gradient 3, norm of the update 1, addition to the weight 3.  A matrix: norms of the
gradient's rows and columns 2, product of the factors 1, division 2.  A vector: square 2, interpolation 3, copy 2.
"""

_FLOAT32_BYTES: Final = 4
PAGED_BYTES_PER_SCALAR: Final = 2
"""Of two moments, one byte each."""


@lru_cache(maxsize=2**16)
def traffic_bytes(stepped: Stepped, optimizer: Optimizer, gradient: DType | None = None) -> int:
    """Memory traffic of one step of one parameter.

    Moments, their scales and the stepped weight in and out, the gradient in, and a narrower weight out; of Adafactor
    every pass over its intermediate tensors (``_MATRIX_PASSES``).  ``gradient``: its element type, if it is not the
    parameter's.
    """
    dtype, shape = stepped
    count, weight, gradient = prod(shape), stepped_dtype(dtype, optimizer), gradient or dtype
    rounded_bytes = count * dtype.item_bytes if master_bytes(dtype, optimizer) else 0
    if optimizer is Optimizer.ADAFACTOR:
        passes = _MATRIX_PASSES if len(shape) > 1 else _VECTOR_PASSES
        widened_bytes = count * gradient.item_bytes if gradient is not weight else 0
        return passes * count * weight.item_bytes + widened_bytes + rounded_bytes
    moments_bytes = sum(tensor.size_bytes for tensor in state_tensors(stepped, optimizer) if tensor.is_moment)
    if gradient.item_bytes > weight.item_bytes:
        # Rounded to the weight's type before the step: out, and in again.
        rounded_bytes += 2 * count * weight.item_bytes
    return 2 * (moments_bytes + count * weight.item_bytes) + count * gradient.item_bytes + rounded_bytes


def temporary_bytes(stepped: Stepped, optimizer: Optimizer) -> int:
    """The most that a step of one parameter holds at once beside weight, gradient and state.

    Fused kernels and those of bitsandbytes hold nothing.  Adafactor's update is as large as the weight, and beside it
    stand means of rows and columns and of the rows' factors, or a vector's squared gradient and a norm.
    """
    if optimizer is not Optimizer.ADAFACTOR:
        return 0
    dtype, shape = stepped
    count, item_bytes = prod(shape), stepped_dtype(dtype, optimizer).item_bytes
    if len(shape) < 2:
        return (2 * count + 1) * item_bytes
    matrices = prod(shape[:-2])
    return (count + matrices * (shape[-2] + shape[-1] + 1)) * item_bytes


def host_temporary_bytes(stepped: Stepped, optimizer: Optimizer) -> int:
    """The most that a step on the host holds at once beside weight, gradient and state.

    Kernels of bitsandbytes for the CPU are passes over whole tensors (``_optimizer_update_8bit_blockwise_cpu`` and
    ``_optimizer_update_32bit_cpu``, version 0.50.2): both moments in float32, the scaled gradient and two tensors of
    the denominator, or three tensors where moments are float32 already.
    """
    count = prod(stepped[1])
    if is_quantized(stepped, optimizer):
        return _FLOAT32_BYTES * 5 * count
    if optimizer.is_of_bitsandbytes:
        return _FLOAT32_BYTES * 3 * count
    return temporary_bytes(stepped, optimizer)


def host_step_bytes(together: Iterable[Stepped], optimizer: Optimizer, *, widens: bool) -> int:
    """The most that the step of one chunk on the host holds at once beside weights, gradients and state.

    All gradients whose element type is not their weight's are converted first; then one tensor is stepped after the
    other.  ``widens``: gradients are added up in float32.
    """
    converted_bytes = most_bytes = 0
    for one in together:
        dtype, shape = one
        weight = stepped_dtype(dtype, optimizer)
        if weight is not (summed_dtype(dtype) if widens else dtype):
            converted_bytes += prod(shape) * weight.item_bytes
        most_bytes = max(most_bytes, host_temporary_bytes(one, optimizer))
    return converted_bytes + most_bytes


def widened_scalars(count: int, optimizer: Optimizer, piece: int) -> int:
    """Scalars of a narrow parameter whose gradient is widened at once: a piece, or all where pieces would not do."""
    return min(count, piece) if optimizer.is_elementwise else count


@dataclass(frozen=True, slots=True)
class HostKernels:
    """How kernels on a host step what one fused kernel does not: by operations over whole tensors, one by one."""

    operations_per_tensor: int
    """Operations of Python's, each of which is dispatched by itself."""
    bytes_per_scalar: int = 0
    """Traffic of all passes over a tensor and over what they make, of a float32 weight; 0 where ``traffic_bytes`` has
    them."""
    core_s_per_scalar: float = 0.0
    """Seconds of one core, where arithmetic and not memory takes the time."""


def host_kernels(optimizer: Optimizer) -> HostKernels:
    """The kernels of ``optimizer`` on a host ([Note: Steps on a host])."""
    named = Optimizer.ADAMW_8BIT if optimizer is Optimizer.PAGED_ADAMW_8BIT else optimizer
    return _HOST_KERNELS.get(named, _FUSED)


_FUSED: Final = HostKernels(operations_per_tensor=0)
_HOST_KERNELS: Final[dict[Optimizer, HostKernels]] = {
    # _single_tensor_adafactor of torch 2.13 without weight decay, as counted above; square roots of sizes and steps
    # are Python's own numbers.
    Optimizer.ADAFACTOR: HostKernels(operations_per_tensor=20, bytes_per_scalar=4 * 17, core_s_per_scalar=8e-9),
    # _optimizer_update_32bit_cpu: scaled gradient 2 passes, decayed moment 2, interpolation 3, sign 2, addition to the
    # weight 3, moment 2 and 3.
    Optimizer.LION: HostKernels(operations_per_tensor=9, bytes_per_scalar=4 * 17, core_s_per_scalar=2.5e-9),
    # _optimizer_update_8bit_blockwise_cpu: 22 passes over float32 (scaled gradient 2, first moment 5, second moment 5,
    # denominator 6, weight 4), two moments from one byte to four and back, and from new bytes to the old ones.  Four
    # operations are bitsandbytes' own, each of which passes through Python's dispatcher and counts as five of torch.
    Optimizer.ADAMW_8BIT: HostKernels(
        operations_per_tensor=22 + 4 * 5, bytes_per_scalar=4 * 22 + 2 * 5 + 2 * 7, core_s_per_scalar=22e-9
    ),
}
"""[Note: Steps on a host]
Fused kernels of torch step all tensors of a chunk in one call, without Python in between.  Adafactor and the kernels of
bitsandbytes 0.50.2 for the CPU are torch operations over whole tensors, called from Python for one tensor after
another.  A step then takes the longest of what its passes take of the memory and its arithmetic of the cores, and a
dispatch for every operation on top.

Measured on one core of an AMD EPYC with torch 2.13: of 8 million scalars each took 8-bit AdamW 21 to 23 ns and Lion 2.4
to 2.5 ns, where fused AdamW took 0.7 to 0.9 ns; of 4 million each took Adafactor 8 ns, whose norms and roots take most.
Each of eight small tensors took Lion 28 to 55 us more, Adafactor 34 to 75 us and 8-bit AdamW 170 to 230 us, in seconds
of the thread, where an operation that does nothing took 2 to 4 us.
"""


def device_operations_per_tensor(optimizer: Optimizer) -> int:
    """Operations that a step on a CUDA device dispatches for every tensor; 0 where one kernel steps many of them.

    Those of bitsandbytes launch one kernel each, and wait for it (``sync_gpu`` in ``optimizer.py``).
    """
    if optimizer is Optimizer.ADAFACTOR:
        return _HOST_KERNELS[optimizer].operations_per_tensor
    return 2 if optimizer.is_of_bitsandbytes else 0
