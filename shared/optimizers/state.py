"""The tensors that an optimizer keeps for one weight, as torch and bitsandbytes lay them out.

[Note: 8-bit state]
bitsandbytes quantizes a moment in blocks of 256 scalars, in the order in which they lie in memory: a byte per scalar,
an index into a map of 256 float32 values, and the block's largest magnitude in float32.  The first moment has a signed
map, the second an unsigned one; tensors that are stepped together share both, and here a chunk's tensors do.  A tensor
of fewer than 4,096 scalars keeps float32 moments.  A paged optimizer puts moments of 100,000 scalars and more into
CUDA's unified memory; on the host there is nothing to page.
Source: ``init_state``, ``get_state_buffer`` and ``fill_qmap`` in ``bitsandbytes/optim/optimizer.py``, version 0.50.2.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Final

from ..schema.optimizer import Optimizer
from ..schema.workload import DType, Parameter

BLOCK_SCALARS: Final = 256
"""Scalars of 8-bit state that share a scale."""
LEAST_QUANTIZED_SCALARS: Final = 4096
"""A smaller tensor keeps float32 moments."""
LEAST_PAGED_SCALARS: Final = 100_000
"""A smaller tensor's moments stay in the device's ordinary memory."""
PAGED_NAMES: Final = ("state1", "state2")
"""Keys of a paged tensor's state in unified memory; its scales are not there."""
MAP_BYTES: Final = 256 * 4
"""One map from bytes to values."""
_NUM_MAPS: Final = 2
_SCALAR: Final[tuple[int, ...]] = ()

Stepped = tuple[DType, tuple[int, ...]]
"""A parameter as the optimizer sees it, or one rank's part of several: element type and shape."""


@dataclass(frozen=True, slots=True)
class StateTensor:
    """One tensor that an optimizer keeps for one weight."""

    name: str
    """Its key in the optimizer's state."""
    dtype: DType
    shape: tuple[int, ...]
    is_moment: bool = True
    """Whether every step reads and writes it; counts of steps are not counted as traffic."""

    @property
    def num_elements(self) -> int:
        """Number of scalars."""
        return prod(self.shape)

    @property
    def size_bytes(self) -> int:
        """Bytes without the allocator's rounding."""
        return self.num_elements * self.dtype.item_bytes


def stepped_dtype(dtype: DType, optimizer: Optimizer) -> DType:
    """The element type of the weight that is stepped: the parameter or its float32 master."""
    if optimizer is Optimizer.ADAMW_BF16 and dtype is DType.BFLOAT16:
        return dtype
    return summed_dtype(dtype)


def summed_dtype(dtype: DType) -> DType:
    """The element type of float32 sums on the host for gradients of this type: wider ones stay as they are."""
    return DType.FLOAT32 if dtype.item_bytes < DType.FLOAT32.item_bytes else dtype


def master_bytes(dtype: DType, optimizer: Optimizer) -> int:
    """Bytes per element of the float32 master copy; 0 where the parameter is its own master."""
    weight = stepped_dtype(dtype, optimizer)
    return weight.item_bytes if weight is not dtype else 0


def state_tensors(stepped: Stepped, optimizer: Optimizer) -> tuple[StateTensor, ...]:
    """What ``optimizer`` keeps for one parameter beside its master and the maps that tensors share.

    ``step`` of Adafactor lies on the host also beside a device; its 4 bytes are counted where its parameter lies.
    """
    dtype, shape = stepped
    weight = stepped_dtype(dtype, optimizer)
    step = StateTensor("step", DType.FLOAT32, _SCALAR, is_moment=False)
    match optimizer:
        case Optimizer.ADAMW | Optimizer.ADAM | Optimizer.ADAMW_BF16:
            return StateTensor("exp_avg", weight, shape), StateTensor("exp_avg_sq", weight, shape), step
        case Optimizer.SGD:
            return (StateTensor("momentum_buffer", weight, shape),)
        case Optimizer.ADAFACTOR:
            if len(shape) < 2:
                return StateTensor("variance", weight, shape), step
            rows, columns = (*shape[:-1], 1), (*shape[:-2], 1, shape[-1])
            return StateTensor("row_var", weight, rows), StateTensor("col_var", weight, columns), step
        case Optimizer.LION:
            return (StateTensor("state1", DType.FLOAT32, shape),)
        case Optimizer.ADAMW_8BIT | Optimizer.PAGED_ADAMW_8BIT:
            if not is_quantized(stepped, optimizer):
                return tuple(StateTensor(f"state{number}", DType.FLOAT32, shape) for number in (1, 2))
            blocks = (-(-prod(shape) // BLOCK_SCALARS),)
            return (
                *(StateTensor(f"state{number}", DType.UINT8, shape) for number in (1, 2)),
                *(StateTensor(f"absmax{number}", DType.FLOAT32, blocks) for number in (1, 2)),
            )


def is_quantized(stepped: Stepped, optimizer: Optimizer) -> bool:
    """Whether the moments have one byte per scalar ([Note: 8-bit state])."""
    return optimizer.is_quantized and prod(stepped[1]) >= LEAST_QUANTIZED_SCALARS


def is_paged(stepped: Stepped, optimizer: Optimizer) -> bool:
    """Whether the moments lie in unified memory where the parameter is stepped on a CUDA device."""
    return optimizer is Optimizer.PAGED_ADAMW_8BIT and prod(stepped[1]) >= LEAST_PAGED_SCALARS


def paged_bytes(together: Iterable[Stepped], optimizer: Optimizer) -> int:
    """Bytes of the state of these parameters that lie in unified memory: moments, without their scales."""
    if optimizer is not Optimizer.PAGED_ADAMW_8BIT:
        return 0
    return sum(
        tensor.size_bytes
        for stepped in together
        if is_paged(stepped, optimizer)
        for tensor in state_tensors(stepped, optimizer)
        if tensor.name in PAGED_NAMES
    )


def map_bytes(together: Iterable[Stepped], optimizer: Optimizer) -> int:
    """Bytes of the maps that these parameters, of one chunk, share."""
    if not optimizer.is_quantized:
        return 0
    return _NUM_MAPS * MAP_BYTES if any(is_quantized(stepped, optimizer) for stepped in together) else 0


def state_bytes(together: Iterable[Stepped], optimizer: Optimizer) -> int:
    """Bytes of all that ``optimizer`` keeps for the parameters of one chunk: masters, state and maps."""
    every = list(together)
    return sum(_own_bytes(stepped, optimizer) for stepped in every) + map_bytes(every, optimizer)


@lru_cache(maxsize=2**16)
def _own_bytes(stepped: Stepped, optimizer: Optimizer) -> int:
    """Bytes of one parameter's master and state.  Blocks repeat their shapes."""
    dtype, shape = stepped
    kept_bytes = sum(tensor.size_bytes for tensor in state_tensors(stepped, optimizer))
    return prod(shape) * master_bytes(dtype, optimizer) + kept_bytes


def stepped_of(parameters: Iterable[Parameter]) -> tuple[Stepped, ...]:
    """The trainable ones of ``parameters`` as the optimizer sees them."""
    return tuple((parameter.dtype, parameter.shape) for parameter in parameters if parameter.trainable)
