"""Seconds of arithmetic in one matrix product on a CUDA device, from its shape; attention has a file of its own.

[Note: Tiles and waves]
A product is cut into tiles of its output, which are dealt out to the multiprocessors; each computes whole tiles, one
after the other.  What sticks out of the matrix is computed too (tile quantization), and while the last tiles are being
computed multiprocessors without one wait (wave quantization).  Libraries choose among tile sizes: large ones load less
for each multiplication, small ones fill the device better.  Where there are fewer tiles than multiprocessors, the
shared dimension is split as well, and the partial sums are added up by a second kernel.  The choice that takes the
least time counts here; each choice takes longer for a larger product, and so does the least.
Source: NVIDIA, Matrix Multiplication Background User's Guide (DU-09799-001), chapters 2 and 3.

[Note: Rows that begin anywhere]
16-bit products load 16 bytes at a time where all rows of all operands begin at multiples of 8 elements.  Of an m x k
by k x n product the result has rows of n.  Operands have rows of m or k where they lie transposed, which the shape does
not tell: these are the vocabulary in the backward of a head, or the tokens of a batch, which nothing has rows of.  A
vocabulary is taken to be what exceeds 16,384.

[Note: Products that are padded]
Inductor copies operands of such products to multiples of 8 elements, with zeros, where the product and its copies take
less than the product alone (``torch/_inductor/fx_passes/pad_mm.py``, with ``shape_padding``, the default).  The result
is a view of the padded one.  It times both; here both are priced.  Copies are as long as the wider operands, read and
written; their memory is not counted.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from math import ceil, gcd
from typing import Final

from ...shared.schema.hardware import Device
from ...shared.schema.workload import DType, Operation, OperationClass
from .attention import attention_s
from .efficiency import KERNEL_FIXED_S, UNALIGNED_FLOP_PER_CLOCK, efficiency_frac, sustained_flop_per_s

_TILES: Final = ((256, 128), (128, 256), (128, 128), (128, 64), (64, 128), (64, 64), (64, 32), (32, 64), (32, 32))
"""Rows and columns of output tiles, as the guide lists them (section 2.3), and the smaller ones of CUTLASS."""
_SLICE: Final = 32
"""Tiles step through the shared dimension in slices of this width."""
_SHORTEST_SPLIT: Final = 128
"""The shared dimension is not split shorter than this."""
_SPLITS: Final = (2, 4, 8, 16)
"""Parts of the shared dimension that CUTLASS tries."""
_MULTIPLICATIONS_PER_FETCH: Final = 8.0
"""Multiply-adds that take as long as the fetch of one operand: an instruction that fetches brings 256 elements to a
warp (ldmatrix.x4), one that multiplies does 2 048 multiply-adds (mma.m16n8k16), and each takes its turn to issue (PTX
ISA, warp-level matrix instructions)."""
_ALIGNED: Final = 8
"""Elements of 2 bytes that are loaded at a time, 16 bytes (DU-09799-001, chapter 2)."""
_MOST_TOKENS: Final = 16_384
"""By definition: a dimension above it is a vocabulary, see [Note: Rows that begin anywhere]."""
_PARTIAL_SUM_BYTES: Final = 4
"""Of a float32: products of 16 bits are added up in it (NVIDIA, DU-09799-001)."""


def kernel_s(
    operation: Operation, device: Device, peak_flop_per_s: float, *, is_compiled: bool = False
) -> float | None:
    """Seconds of the arithmetic of a matrix product or attention; None where its shape does not tell.

    ``peak_flop_per_s`` is the matrix units' peak in the operation's type; ``is_compiled``: whether operands may be
    padded ([Note: Products that are padded]).  Moving its operands is another matter.
    """
    if len(operation.shape) != 4 or device.num_multiprocessors is None:
        return None
    if operation.operation_class is OperationClass.ATTENTION:
        if OperationClass.ATTENTION in device.efficiency:
            return operation.flops / (peak_flop_per_s * efficiency_frac(device, OperationClass.ATTENTION))
        return attention_s(operation, device, peak_flop_per_s)
    sustained = sustained_flop_per_s(device, peak_flop_per_s, operation.dtype)
    if operation.dtype.item_bytes == DType.FLOAT16.item_bytes and OperationClass.MATMUL not in device.efficiency:
        unaligned = UNALIGNED_FLOP_PER_CLOCK.get(alignment_of(operation.shape))
        if unaligned is not None:
            slower = min(sustained, unaligned * device.told_clock_hz * device.num_multiprocessors)
            as_it_is_s = product_s(operation.shape, device, slower)
            return min(as_it_is_s, _padded_s(operation, device, sustained)) if is_compiled else as_it_is_s
    return product_s(operation.shape, device, sustained)


def _padded_s(operation: Operation, device: Device, sustained_flop_per_s: float) -> float:
    """Seconds of a product whose sizes are padded to aligned ones, and of the copies."""
    batch, *sizes = operation.shape
    m, n, k = padded = [-(-size // _ALIGNED) * _ALIGNED for size in sizes]
    is_padded = [size != wider for size, wider in zip(sizes, padded, strict=True)]
    copied = batch * (m * k * (is_padded[0] or is_padded[2]) + k * n * (is_padded[1] or is_padded[2]))
    bandwidth = device.memory_bandwidth_bytes_per_s * efficiency_frac(device, OperationClass.ELEMENTWISE)
    copies_s = 2 * copied * operation.dtype.item_bytes / bandwidth
    return product_s((batch, m, n, k), device, sustained_flop_per_s) + copies_s


def alignment_of(shape: tuple[int, ...]) -> int:
    """Elements, 8 at most, that every row of a product is a multiple of; see [Note: Rows that begin anywhere]."""
    _, m, n, k = shape
    return gcd(_ALIGNED, n, *(of for of in (m, k) if of > _MOST_TOKENS))


def product_s(shape: tuple[int, ...], device: Device, sustained_flop_per_s: float) -> float:
    """Seconds of ``batch`` products of m x k by k x n, for the best choice of tiles; see [Note: Tiles and waves]."""
    assert device.num_multiprocessors is not None
    bandwidth = device.memory_bandwidth_bytes_per_s * efficiency_frac(device, OperationClass.ELEMENTWISE)
    fixed_s = min(KERNEL_FIXED_S, device.launch_overhead_s)
    return _least_s(shape, device.num_multiprocessors, sustained_flop_per_s, bandwidth, fixed_s)


@lru_cache(maxsize=1024)
def _least_s(
    shape: tuple[int, ...], num_processors: int, flop_per_s: float, bytes_per_s: float, fixed_s: float
) -> float:
    """The best choice.  A model has few distinct products, and they recur in all of its phases."""
    return min(_choices_s(shape, num_processors, flop_per_s, bytes_per_s, fixed_s))


def _choices_s(
    shape: tuple[int, ...], num_processors: int, flop_per_s: float, bytes_per_s: float, fixed_s: float
) -> Iterator[float]:
    """Seconds with every tile, and with every tile and split; ``fixed_s``: of the kernel that adds partial sums."""
    batch, m, n, k = shape
    for rows, columns in _TILES:
        num_tiles = batch * ceil(m / rows) * ceil(n / columns)
        slice_s = 2 * rows * columns * _SLICE * _slowdown(rows, columns) / (flop_per_s / num_processors)
        yield ceil(num_tiles / num_processors) * ceil(k / _SLICE) * slice_s
        if num_tiles >= num_processors:
            continue
        for parts in _SPLITS:
            if k < parts * _SHORTEST_SPLIT:
                break
            multiplying_s = ceil(num_tiles * parts / num_processors) * ceil(k / parts / _SLICE) * slice_s
            sums_bytes = 2 * parts * batch * m * n * _PARTIAL_SUM_BYTES  # written, and read again
            yield multiplying_s + sums_bytes / bytes_per_s + fixed_s


def _slowdown(rows: int, columns: int) -> float:
    """Seconds of a slice of a tile over those of its multiplications, the largest tile's taken as 1."""
    largest_rows, largest_columns = _TILES[0]
    of_largest = 1 + _MULTIPLICATIONS_PER_FETCH * (largest_rows + largest_columns) / (largest_rows * largest_columns)
    return (1 + _MULTIPLICATIONS_PER_FETCH * (rows + columns) / (rows * columns)) / of_largest
