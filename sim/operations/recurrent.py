"""Seconds of a recurrent layer on a CUDA device, from its shape.

[Note: Recurrent steps]
cuDNN multiplies the inputs of all steps at once, and states step by step: the product of one with the recurrent
weights, and what makes the next one of it (Appleyard et al., arXiv 1604.01946).  Backward the products that give
gradients of inputs and of weights are of all steps at once again.  A step takes as long as its product, or as launching
its kernels, the longer of the two.  Small states stay within one kernel for all steps.

Layers and directions count one after the other, though cuDNN overlaps steps of several where the device has room.
"""

from __future__ import annotations

from typing import Final

from ...shared.schema.hardware import Device
from ...shared.schema.workload import DType, Operation
from .efficiency import KERNEL_FIXED_S, sustained_flop_per_s, tensor_float_flop_per_s
from .kernels import product_s

LAUNCH_S: Final = 3.2e-6
"""The driver's own launch: 3.0 to 3.3 µs (github.com/meta-pytorch/tritonbench/pull/1017)."""
FORWARD_KERNELS: Final = 2
"""Of one step: 6.4 to 6.8 µs a step and layer of LSTMs and plain layers with one to seven samples, measured
(github.com/xwang233/code-snippet, cudnn-rnn-bench-62143, states of 152 to 320)."""
BACKWARD_KERNELS: Final = 3
"""The same: 8.4 to 12.8 µs, measured."""
SMALL_STATES: Final = 128
"""The widest states of gated layers that stay within one kernel, measured there; twice as wide ones of plain layers."""
SMALL_FORWARD_S: Final = 2.3e-6
"""Of such a step: medians of nine layers measured there, 0.6 to 5.6 µs."""
SMALL_BACKWARD_S: Final = 3.2e-6
"""The same backward, 1.0 to 8.8 µs, measured."""


def is_recurrent(operation: Operation) -> bool:
    """Whether ``operation`` runs all steps of a recurrent layer, or is its backward.

    An LSTM that a CPU has run (``mkldnn_rnn_layer``) is cuDNN's on a CUDA device.
    """
    return operation.name.startswith(("_cudnn_rnn", "mkldnn_rnn_layer")) and len(operation.shape) == 5


def recurrent_s(operation: Operation, device: Device, peak_flop_per_s: float) -> float:
    """Seconds of all kernels of a recurrent layer; see [Note: Recurrent steps].

    ``peak_flop_per_s``: of the units that multiply its type (``matrix_flop_per_s`` in ``roofline.py``).
    """
    layers, steps, samples, gates, state = operation.shape
    is_backward = operation.name.endswith("_backward")
    on_matrix_units = operation.dtype is not DType.FLOAT32 or tensor_float_flop_per_s(device) is not None
    dtype = DType.BFLOAT16 if on_matrix_units else DType.FLOAT32
    sustained = sustained_flop_per_s(device, peak_flop_per_s, dtype)
    step_flops = 2 * samples * gates * state
    at_once_flops = operation.flops - layers * steps * step_flops
    like_flops = layers * steps * step_flops
    like_s = layers * product_s((1, steps * samples, gates, state), device, sustained)
    at_once_s = like_s * at_once_flops / like_flops if like_flops else 0.0
    if state <= (2 * SMALL_STATES if gates == state else SMALL_STATES):
        step_s = SMALL_BACKWARD_S if is_backward else SMALL_FORWARD_S
    else:
        launching_s = (BACKWARD_KERNELS if is_backward else FORWARD_KERNELS) * LAUNCH_S
        step_s = max(product_s((1, samples, gates, state), device, sustained) + KERNEL_FIXED_S, launching_s)
    return layers * steps * step_s + at_once_s
