"""Seconds of the arithmetic of fused attention on a CUDA device, from its shape and the kernel that computes it.

[Note: Attention kernels]
Fused attention forms the scores tile by tile and never stores them.  Between the products the softmax runs on the
vector units.  PyTorch's scaled_dot_product_attention takes FlashAttention-2 for 16-bit types and heads up to 256 wide
from Ampere on, which are the devices with matrix units for bfloat16; on Hopper and later, since PyTorch 2.5, cuDNN's
kernel for heads up to 128 wide; and otherwise the memory-efficient kernel of CUTLASS.  A mask other than the causal
one rules out FlashAttention-2 and cuDNN's causal kernel: one of a sliding window, of padding or of packed samples.  An
operation that moves more bytes than queries, keys, values, outputs and their gradients have is given one.  A device
that states ``attention_kernel`` computes with that one wherever the operation has its form: what another version of
PyTorch takes, or a library that a program calls itself.

[Note: Rates of attention kernels]
Each kernel has a share of the matrix units' peak for its products, vector instructions for each score, and passes over
tensors of the size of the queries that come besides.  Hopper's were solved from single kernels measured on an H100
(``make bench-sheets``, causal, 2,048 to 32,768 tokens, heads of 64 and 128), backward from 2,048 and 32,768 tokens.
The FlashAttention-3 paper measured within 12 % of them (arXiv 2407.08608, figures 5 and 6).  Ampere's are those of
FlashAttention-2's paper (arXiv 2307.08691), which also says how many times as long FlashAttention-1 (about twice, from
1.7 to 3) and its version in Triton (1.3 to 2.5) take.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from typing import Final

from ...shared.phases.activation_modes import MEMORY_EFFICIENT
from ...shared.schema.hardware import AttentionKernel, Device
from ...shared.schema.workload import DType, Operation, OperationClass
from .efficiency import clock_frac, efficiency_frac, multiplies_by_warpgroups, sustained_flop_per_s

_CAUSAL_FRAC: Final = 0.6
"""By definition between the shares of FLOPs that a causal mask leaves, a half at most, and that values leave which are
narrower than queries: queries meet keys whole, so that more than a half is left, and three of five products backward.
"""
_SCORE_TILE: Final = 128
"""Rows and columns of scores that attention kernels compute at a time."""
_FLASH_DTYPES: Final = frozenset({DType.FLOAT16, DType.BFLOAT16})
"""Types that FlashAttention and cuDNN's kernel take (torch/nn/attention, and their papers)."""
_WIDEST: Final = {AttentionKernel.CUDNN: 128}
"""Heads that a kernel takes; others 256, and the memory-efficient one any."""
_FLASH_MAX_WIDTH: Final = 256
"""Widest heads of FlashAttention-2 (github.com/Dao-AILab/flash-attention, README)."""
_SUM_BYTES: Final = 4
"""Of the logarithm of a row's sum of exponentials."""
_STATE_BYTES: Final = 64
"""Of the random generator, with dropout."""


@dataclass(frozen=True, slots=True)
class _Direction:
    """What a kernel takes in one direction; see [Note: Rates of attention kernels]."""

    matrix_frac: float | None
    """Of the matrix units' peak; None: as much as products sustain."""
    instructions: float
    """Of the vector units, for one score."""
    passes: float = 0.0
    """Over tensors of the queries' size, besides the operands: gradients added up in float32, and converted."""


@dataclass(frozen=True, slots=True)
class _Rates:
    """Of one kernel, forward and backward."""

    forward: _Direction
    backward: _Direction
    slower: float = 1.0
    """Times as long in all."""


_FLASH_2 = _Rates(
    # Scale, maximum, difference, sum, conversion and an exponential at a quarter of the rate; backward, the gradient of
    # the softmax and a second conversion.  With heads of 128 an A100 so reaches 53 % of its peak forward and 63 %
    # backward, where FlashAttention-2 measured 50 to 73 % and up to 63 % (arXiv 2307.08691, section 4.1).
    _Direction(None, 10.0),
    _Direction(None, 14.0),
)
_BEFORE_HOPPER: Final = {
    AttentionKernel.FLASH_2: _FLASH_2,
    AttentionKernel.FLASH_1: _Rates(_FLASH_2.forward, _FLASH_2.backward, slower=2.0),
    AttentionKernel.TRITON: _Rates(_FLASH_2.forward, _FLASH_2.backward, slower=1.8),
}
"""Of Ampere and Ada; how many times as long FlashAttention-1 and Triton's take: arXiv 2307.08691, section 4.1."""
_HOPPER_FLASH_2 = _Rates(_Direction(0.45, 12.7), _Direction(0.40, 24.8, passes=20.0))
_HOPPER_CUDNN = _Rates(_Direction(1.0, 11.2), _Direction(0.77, 22.8, passes=10.0))
_HOPPER: Final = {
    AttentionKernel.FLASH_2: _HOPPER_FLASH_2,
    AttentionKernel.FLASH_1: _Rates(_HOPPER_FLASH_2.forward, _HOPPER_FLASH_2.backward, slower=2.0),
    AttentionKernel.TRITON: _Rates(_HOPPER_FLASH_2.forward, _HOPPER_FLASH_2.backward, slower=1.8),
    AttentionKernel.CUDNN: _HOPPER_CUDNN,
    # 648 TFLOP/s where cuDNN reaches 600 (arXiv 2407.08608, figure 5, heads of 128).
    AttentionKernel.FLASH_3: _Rates(_HOPPER_CUDNN.forward, _HOPPER_CUDNN.backward, slower=600 / 648),
    AttentionKernel.MEMORY_EFFICIENT: _Rates(_Direction(0.31, 40.0), _Direction(0.20, 104.0, passes=13.0)),
}
"""Of Hopper and later: solved from kernels that were measured one by one on an H100 (``make bench-sheets``)."""
_MEMORY_EFFICIENT_FRAC: Final = 0.6
"""The memory-efficient kernel's rate over FlashAttention-2's in their products, before Hopper and in float32: it takes
1.5 to 2 times as long (xformers' kernel in arXiv 2307.08691, figures 4 to 6)."""


def attention_s(operation: Operation, device: Device, peak_flop_per_s: float) -> float:
    """Seconds of fused attention; see [Note: Attention kernels].

    Each multiprocessor takes one row of tiles of scores at a time.  Under a causal mask (told by the FLOPs, of which
    at most half are left) tiles above the diagonal are left out, and those on it are computed whole.
    """
    heads, queries, keys, width = operation.shape
    assert device.num_multiprocessors is not None
    is_backward = operation.name.endswith("_backward")
    num_products = 5 if is_backward else 2
    whole_flops = 2 * num_products * heads * queries * keys * width
    num_rows, num_columns = heads * ceil(queries / _SCORE_TILE), ceil(keys / _SCORE_TILE)
    counted_frac = operation.flops / whole_flops
    if counted_frac < _CAUSAL_FRAC:
        counted_frac *= 2
        # Rows differ in length, and the short ones fill up what the long ones leave.
        tiles_in_turn = max(num_columns, num_rows * (num_columns + 1) / 2 / device.num_multiprocessors)
    else:
        tiles_in_turn = ceil(num_rows / device.num_multiprocessors) * num_columns
    kernel = kernel_of(operation, device)
    rates = _rates_of(kernel, operation, device)
    direction = rates.backward if is_backward else rates.forward
    sustained = sustained_flop_per_s(device, peak_flop_per_s, operation.dtype)
    if direction.matrix_frac is not None:
        sustained = clock_frac(device) * direction.matrix_frac * peak_flop_per_s
    elif kernel is AttentionKernel.MEMORY_EFFICIENT:
        sustained *= _MEMORY_EFFICIENT_FRAC
    tile_flops = counted_frac * 2 * num_products * _SCORE_TILE**2 * width
    # A vector FLOP/s counts a multiply-add as two.
    tile_vector_flops = 2 * direction.instructions * _SCORE_TILE**2
    tile_s = tile_flops / sustained + tile_vector_flops / (clock_frac(device) * device.vector_flop_per_s)
    streamed = device.memory_bandwidth_bytes_per_s * efficiency_frac(device, OperationClass.ELEMENTWISE)
    besides_s = direction.passes * heads * queries * width * operation.dtype.item_bytes / streamed
    return rates.slower * (tiles_in_turn * tile_s * device.num_multiprocessors + besides_s)


def kernel_of(operation: Operation, device: Device) -> AttentionKernel:
    """The kernel that computes ``operation``: the one that the device states, else the one that PyTorch takes."""
    is_ampere_or_later = DType.BFLOAT16 in device.peak_flop_per_s
    width = operation.shape[3]
    is_other = operation.name.startswith(MEMORY_EFFICIENT) or has_mask(operation)
    if not is_ampere_or_later or operation.dtype not in _FLASH_DTYPES or is_other:
        return AttentionKernel.MEMORY_EFFICIENT
    stated = device.attention_kernel
    usual = AttentionKernel.CUDNN if multiplies_by_warpgroups(device) else AttentionKernel.FLASH_2
    for kernel in (stated, usual, AttentionKernel.FLASH_2):
        if kernel is AttentionKernel.MEMORY_EFFICIENT:
            return kernel
        if kernel is not None and width <= _WIDEST.get(kernel, _FLASH_MAX_WIDTH):
            return kernel
    return AttentionKernel.MEMORY_EFFICIENT


def _rates_of(kernel: AttentionKernel, operation: Operation, device: Device) -> _Rates:
    is_hopper = multiplies_by_warpgroups(device) and operation.dtype in _FLASH_DTYPES
    return (_HOPPER if is_hopper else _BEFORE_HOPPER).get(kernel, _FLASH_2)


def has_mask(operation: Operation) -> bool:
    """Whether fused attention is given a mask; see [Note: Attention kernels].

    Forward moves queries, keys, values and the output, backward these and four gradients, and both a float32 for each
    token of a head.  Heads that share keys move less; with a mask transformers repeats keys, so that it shows.
    """
    heads, queries, keys, width = operation.shape
    num_tensors = 4 if operation.name.endswith("_backward") else 2
    rows_bytes = num_tensors * (queries + keys) * width * operation.dtype.item_bytes
    return operation.bytes_moved > heads * (rows_bytes + _SUM_BYTES * queries) + _STATE_BYTES
