"""Seconds of a convolution on a CUDA device, from its shape.

[Note: Convolutions]
cuDNN computes a convolution as a product that nobody lays out: of every place by what its result is made of (Chetlur et
al., arXiv 1410.0759).  So tiles and waves of products hold ([Note: Tiles and waves] in ``kernels.py``), for every group
by itself: groups of few channels fill a part of a tile.  Backward makes two such products of as many multiplications.

Matrix units take the channels last.  Where they lie otherwise, as they do unless a model says so, every tensor is laid
out anew, and its result back: one more read and one more write of each (NVIDIA, Convolutional Layers User's Guide,
DU-09796-001, on tensor layouts).  Of depthwise convolutions, whose groups are single channels, kernels take either.
"""

from __future__ import annotations

from ...shared.schema.hardware import Device
from ...shared.schema.workload import DType, Operation, OperationClass
from .efficiency import efficiency_frac, sustained_flop_per_s, tensor_float_flop_per_s
from .kernels import product_s


def is_convolution(operation: Operation) -> bool:
    """Whether ``operation`` is a convolution of known shape, or the backward of one."""
    return operation.name.startswith("convolution") and len(operation.shape) == 5


def convolution_s(operation: Operation, device: Device, peak_flop_per_s: float) -> float:
    """Seconds of all kernels of a convolution; see [Note: Convolutions].

    ``peak_flop_per_s``: of the units that multiply its type (``matrix_flop_per_s`` in ``roofline.py``).
    """
    groups, places, channels, inner, is_last = operation.shape
    on_matrix_units = operation.dtype is not DType.FLOAT32 or tensor_float_flop_per_s(device) is not None
    dtype = DType.BFLOAT16 if on_matrix_units else DType.FLOAT32
    whole_flops = 2 * groups * places * channels * inner
    one_s = product_s((groups, places, channels, inner), device, sustained_flop_per_s(device, peak_flop_per_s, dtype))
    multiplying_s = one_s * operation.flops / whole_flops if whole_flops else 0.0
    streamed = device.memory_bandwidth_bytes_per_s * efficiency_frac(device, OperationClass.ELEMENTWISE)
    moving_s = operation.bytes_moved / streamed
    is_laid_out = bool(is_last) or not on_matrix_units or (groups > 1 and channels == 1)
    return max(multiplying_s, moving_s) + (0.0 if is_laid_out else 2 * moving_s)
