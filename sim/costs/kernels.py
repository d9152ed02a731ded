"""Seconds of arithmetic in one matrix product or attention on a CUDA device, from its shape.

[Note: Tiles and waves]
A product is cut into tiles of its output, which are dealt out to the multiprocessors; each computes whole tiles, one
after the other.  What sticks out of the matrix is computed too (tile quantization), and while the last tiles are being
computed multiprocessors without one wait (wave quantization).  Libraries choose among tile sizes: large ones load less
for each multiplication, small ones fill the device better.  Where there are fewer tiles than multiprocessors, the
shared dimension is split as well, and the partial sums are added up by a second kernel.  The choice that takes the
least time counts here; each choice takes longer for a larger product, and so does the least.
Source: NVIDIA, Matrix Multiplication Background User's Guide (DU-09799-001), chapters 2 and 3.

[Note: Attention kernels]
Fused attention forms the scores tile by tile and never stores them.  Between the products the softmax runs on the
vector units, and the matrix units wait for it.  PyTorch's scaled_dot_product_attention takes FlashAttention-2 for
16-bit types and heads up to 256 wide from Ampere on, which are the devices with matrix units for bfloat16, and
otherwise the memory-efficient kernel of CUTLASS.  A mask other than the causal one rules out FlashAttention-2 as well:
one of a sliding window, of padding or of packed samples.  An operation that moves more bytes than queries, keys,
values, outputs and their gradients have is given one.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from math import ceil
from typing import Final

from ...shared.schema.hardware import Device
from ...shared.schema.workload import DType, Operation, OperationClass
from .efficiency import KERNEL_FIXED_S, efficiency_frac, sustained_flop_per_s

_TILES: Final = ((256, 128), (128, 256), (128, 128), (128, 64), (64, 128), (64, 64), (64, 32), (32, 64), (32, 32))
"""Rows and columns of output tiles, as the guide lists them (section 2.3), and the smaller ones of CUTLASS."""
_SLICE: Final = 32
"""Tiles step through the shared dimension in slices of this width."""
_SHORTEST_SPLIT: Final = 128
"""The shared dimension is not split shorter than this."""
_SPLITS: Final = (2, 4, 8, 16)
_MULTIPLICATIONS_PER_FETCH: Final = 8.0
"""Multiply-adds that take as long as the fetch of one operand: an instruction that fetches brings 256 elements to a
warp (ldmatrix.x4), one that multiplies does 2 048 multiply-adds (mma.m16n8k16), and each takes its turn to issue (PTX
ISA, warp-level matrix instructions)."""
_PARTIAL_SUM_BYTES: Final = 4

_FLASH_MAX_WIDTH: Final = 256
_FLASH_DTYPES: Final = frozenset({DType.FLOAT16, DType.BFLOAT16})
_SCORE_TILE: Final = 128
"""Rows and columns of scores that attention kernels compute at a time."""
_SOFTMAX_INSTRUCTIONS: Final = {False: 10.0, True: 14.0}
"""Vector instructions for one score, forward and backward: scale, maximum, difference, sum, conversion and an
exponential at a quarter of the rate; backward, the gradient of the softmax and a second conversion.  With heads of 128
an A100 so reaches 53 % of its peak forward and 63 % backward, where FlashAttention-2 measured 50 to 73 % and up to 63 %
(arXiv 2307.08691, section 4.1)."""
_OLDER_INSTRUCTION_FRAC: Final = 2 / 3
"""What mma.sync, which FlashAttention-2 is written with, reaches of Hopper's matrix units (arXiv 2407.08608)."""
_OLDER_INSTRUCTION_RATE: Final = 8.0
"""Matrix over vector FLOP/s that mma.sync keeps up with where there are 8-bit matrix types: of those devices the ones
before Hopper have 4 times at most."""
_SUM_BYTES: Final = 4
"""Of the logarithm of a row's sum of exponentials."""
_STATE_BYTES: Final = 64
"""Of the random generator, with dropout."""
_MEMORY_EFFICIENT_FRAC: Final = 0.6
"""The memory-efficient kernel's rate over FlashAttention-2's in their products: it takes 1.5 to 2 times as long
(xformers' kernel in arXiv 2307.08691, figures 4 to 6)."""


def kernel_s(operation: Operation, device: Device, peak_flop_per_s: float) -> float | None:
    """Seconds of the arithmetic of a matrix product or attention; None where its shape does not tell.

    ``peak_flop_per_s`` is the matrix units' peak in the operation's type.  Moving its operands is another matter.
    """
    if len(operation.shape) != 4 or device.num_multiprocessors is None:
        return None
    if operation.operation_class is OperationClass.ATTENTION:
        if OperationClass.ATTENTION in device.efficiency:
            return operation.flops / (peak_flop_per_s * efficiency_frac(device, OperationClass.ATTENTION))
        return attention_s(operation, device, peak_flop_per_s)
    return product_s(operation.shape, device, sustained_flop_per_s(device, peak_flop_per_s))


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


def attention_s(operation: Operation, device: Device, peak_flop_per_s: float) -> float:
    """Seconds of fused attention; see [Note: Attention kernels].

    Each multiprocessor takes one row of tiles of scores at a time.  Under a causal mask (told by the FLOPs, of which
    half are left) tiles above the diagonal are left out, and those on it are computed whole.
    """
    heads, queries, keys, width = operation.shape
    assert device.num_multiprocessors is not None
    is_backward = operation.name.endswith("_backward")
    num_products = 5 if is_backward else 2
    whole_flops = 2 * num_products * heads * queries * keys * width
    num_rows, num_columns = heads * ceil(queries / _SCORE_TILE), ceil(keys / _SCORE_TILE)
    if operation.flops * 4 < whole_flops * 3:
        # Rows differ in length, and the short ones fill up what the long ones leave.
        tiles_in_turn = max(num_columns, num_rows * (num_columns + 1) / 2 / device.num_multiprocessors)
    else:
        tiles_in_turn = ceil(num_rows / device.num_multiprocessors) * num_columns
    tile_flops = 2 * num_products * _SCORE_TILE**2 * width
    # A vector FLOP/s counts a multiply-add as two.
    tile_vector_flops = 2 * _SOFTMAX_INSTRUCTIONS[is_backward] * _SCORE_TILE**2
    matrix_flop_per_s = _attention_flop_per_s(operation, device, peak_flop_per_s)
    tile_s = tile_flops / matrix_flop_per_s + tile_vector_flops / device.vector_flop_per_s
    return tiles_in_turn * tile_s * device.num_multiprocessors


def runs_flash(operation: Operation, device: Device) -> bool:
    """Whether torch's scaled_dot_product_attention takes FlashAttention-2, rather than the memory-efficient kernel."""
    is_ampere_or_later = DType.BFLOAT16 in device.peak_flop_per_s
    is_its_form = operation.dtype in _FLASH_DTYPES and operation.shape[3] <= _FLASH_MAX_WIDTH
    return is_ampere_or_later and is_its_form and not has_mask(operation)


def has_mask(operation: Operation) -> bool:
    """Whether fused attention is given a mask; see [Note: Attention kernels].

    Forward moves queries, keys, values and the output, backward these and four gradients, and both a float32 for each
    token of a head.  Heads that share keys move less; with a mask transformers repeats keys, so that it shows.
    """
    heads, queries, keys, width = operation.shape
    num_tensors = 4 if operation.name.endswith("_backward") else 2
    rows_bytes = num_tensors * (queries + keys) * width * operation.dtype.item_bytes
    return operation.bytes_moved > heads * (rows_bytes + _SUM_BYTES * queries) + _STATE_BYTES


def _attention_flop_per_s(operation: Operation, device: Device, peak_flop_per_s: float) -> float:
    sustained = sustained_flop_per_s(device, peak_flop_per_s)
    if not runs_flash(operation, device):
        return _MEMORY_EFFICIENT_FRAC * sustained
    if DType.FLOAT8_E4M3FN in device.peak_flop_per_s:
        kept_up = min(sustained, _OLDER_INSTRUCTION_RATE * device.vector_flop_per_s)
        return max(_OLDER_INSTRUCTION_FRAC * sustained, kept_up)
    return sustained
