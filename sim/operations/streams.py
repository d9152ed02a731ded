"""How long kernels that stream take on a CUDA device: their share of the memory's bandwidth, and why not more.

[Note: Vectorized kernels]
An element-wise kernel of PyTorch loads 16 bytes at a time where its operands lie alike in memory and have one type,
and then the memory sets its pace.  Operands that are broadcast (a norm's weight, the cosines of rotary positions) or
widened on the way (16 bits to float32) go one element at a time, and the multiprocessors set the pace: on an H100 they
do 1.2 elements per clock, whether these have 4, 6 or 8 bytes (``make bench-sheets``: 322, 313 and 280 elements per ns
on 132 multiprocessors at 1.9 GHz).  Casts from float32 to 16 bits are vectorized, and no others
(``float16_copy_kernel_cuda`` in PyTorch's ``Copy.cu``; ``gpu_kernel_impl`` in ``CUDALoops.cuh`` takes operands of
several types, and operands that are broadcast or expanded, one element at a time).

[Note: What a loss reads]
An operation's bytes count each of its tensors once.  The negative log-likelihood picks one element out of each row
forward and writes one backward, into zeros: of its logits it reads nothing else.  Softmax over a vocabulary goes over a
row that no register holds twice and more.

[Note: Dropout]
On a CUDA device one kernel draws, divides and multiplies (``native_dropout``), and workloads that were traced for one
hold it.  A CPU does it in three operations, in place and of whole features CUDA too.  Of a workload that was traced on
a CPU the multiplication is left, which moves what the kernel does but for its mask: one byte for each element, where
the noise has the element's own.

[Note: Metrics of losses]
Composer computes its metrics of every micro-batch behind backward (``_eval_train_metrics`` in ``composer/trainer/
trainer.py``).  Of llm-foundry's models they are LanguageCrossEntropy and LanguagePerplexity, unless a model is told
``use_train_metrics: false``.  Each takes a cross-entropy of its own from all logits, which autocast first widens to
float32.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Final

from ...shared.basics.errors import WorkloadError
from ...shared.schema.hardware import Device, DeviceKind
from ...shared.schema.workload import DType, Operation, OperationClass, Workload

ELEMENTS_PER_CLOCK: Final = 1.2
"""Of one multiprocessor, in kernels that are not vectorized; see [Note: Vectorized kernels]."""
UNPACKED_PER_CLOCK: Final = 2.0
"""Weights of 4 bits that one multiprocessor unpacks per clock in bitsandbytes' kernel.

Derived: before version 0.48 it was 0.8 to 1.3.  3.2 billion weights of StableLM 3B took 37 ms for forward and backward
together, most likely on an A100 (github.com/Lightning-AI/litgpt/pull/275: 5,544 in place of 4,807 s for 20,000
iterations), and one weight of 14,336 by 4,096 took 30 to 50 % of its product with 2,048 rows on an A800
(github.com/bitsandbytes-foundation/bitsandbytes issue 1319).  Table look-ups by shuffles took 1.36 to 2.07 times less
on A100 and H100 (pull/1747); on an RTX 4090 large weights gained nothing, since its memory sets the pace.
"""
_UNPACKING: Final = "bitsandbytes::dequantize_4bit"
DEVICE_STEP_FRAC: Final = 0.7
"""Share of the bandwidth that fused optimizers reach on a device: 61, 63, 67, 72 and 75 % in five trainings on an H100,
float32 and bfloat16; 67 and 78 % by themselves (``make bench-sheets``)."""
_SHARES: Final = {
    # Forward 53 to 62 % on an H100, and apex' first kernel 58 % on an A100; backward takes two kernels that read
    # everything again: 33 and 34 % on an H100, 37 % apex' on an A100 (github.com/NVIDIA/apex/pull/1037), 40 % forward
    # and backward together (github.com/pytorch/pytorch/pull/87445).
    "native_layer_norm": 0.6,
    "native_layer_norm_backward": 0.35,
    # 45, 47 and 58 % forward, 64, 66 and 69 % backward on an H100, of 128,256, 50,257 and 30,522 words.
    "_log_softmax": 0.5,
    "_log_softmax_backward_data": 0.66,
    # Nothing but zeros is written: 98 %.
    "nll_loss_backward": 0.95,
}
"""Share of the bandwidth by operation, where it is far from that of its class; the comments name the sources."""
_COLUMN_SUM_FRAC: Final = 0.35
"""Of sums of 16-bit tensors, which are gradients of biases and norms, over columns: 35 % on an H100."""
_OF_BYTES: Final = {"nll_loss_forward": 0.0, "nll_loss_backward": 0.5, "nll_loss2d_forward": 0.0}
"""Share of an operation's bytes that are moved; see [Note: What a loss reads]."""
_BROADCASTING: Final = frozenset({"mul", "add", "sub", "div"})
_SHIFTS: Final = frozenset({"bitwise_right_shift", "__rshift__", "bitwise_left_shift", "__lshift__"})
_NARROW: Final = frozenset({DType.INT16, DType.INT8, DType.UINT8})
"""Whole numbers of few bits."""
_HALF: Final = frozenset({DType.FLOAT16, DType.BFLOAT16})
"""Types of 16 bits."""
_SCALAR_BYTES: Final = 64
"""Less than any operand that is broadcast has."""


def launched(operations: Sequence[Operation]) -> Sequence[Operation]:
    """``operations`` as a CUDA device runs them; see [Note: Dropout]."""
    if not any(one.name == "bernoulli_" for one in operations):
        return operations
    drawn = _drops(operations)
    spare = {name: Counter(drawn) for name in ("bernoulli_", "div_")}
    found = []
    for one in operations:
        spared = 0
        if one.name in spare:
            spared = min(one.count, spare[one.name][_size(one)])
            spare[one.name][_size(one)] -= spared
        if spared < one.count:
            found.append(one.model_copy(update={"count": one.count - spared}) if spared else one)
    return found


def _drops(operations: Sequence[Operation]) -> Mapping[tuple[int, DType], int]:
    """How many dropouts of each size a CPU took apart: what it draws, divides and multiplies by, in a new tensor."""
    parts = {name: Counter[tuple[int, DType]]() for name in ("bernoulli_", "div_", "mul")}
    for one in operations:
        if one.name in parts:
            parts[one.name][_size(one)] += one.count
    return parts["bernoulli_"] & parts["div_"] & parts["mul"]


def _size(operation: Operation) -> tuple[int, DType]:
    """Elements that an element-wise operation makes, and their type."""
    return operation.flops, operation.dtype


def moved_bytes(operation: Operation) -> float:
    """Bytes that one call reads and writes."""
    return operation.bytes_moved * _OF_BYTES.get(operation.name, 1.0)


def share_of(operation: Operation, device: Device, class_share: float) -> float:
    """Share of the bandwidth that ``operation`` reaches.

    That of its class, which is given, on CPUs and where the device states one; else what is known of its name.
    """
    if device.kind is not DeviceKind.CUDA or operation.operation_class in device.efficiency:
        return class_share
    if operation.name == "sum" and operation.dtype in _HALF:
        return _COLUMN_SUM_FRAC
    return _SHARES.get(operation.name, class_share)


def element_s(operation: Operation, device: Device) -> float:
    """Seconds in which a CUDA device gets through one call element by element; 0: it need not."""
    if operation.name == _UNPACKING:
        return elements_s(operation.flops, device) * ELEMENTS_PER_CLOCK / UNPACKED_PER_CLOCK
    return elements_s(operation.flops, device) if goes_by_elements(operation) else 0.0


def elements_s(number: float, device: Device) -> float:
    """Seconds of so many elements, one by one; 0 where the device states no multiprocessors."""
    if device.num_multiprocessors is None:
        return 0.0
    return number / (ELEMENTS_PER_CLOCK * device.told_clock_hz * device.num_multiprocessors)


def goes_by_elements(operation: Operation) -> bool:
    """Whether a kernel is not vectorized; see [Note: Vectorized kernels].

    Element-wise operations count one FLOP for each element of their result.  One that is given two tensors of which one
    is broadcast moves more than a tensor in and one out, and less than two in and one out.  One that is given whole
    numbers of fewer bits than its result in 16, or that spreads packed bits, moves less than a tensor in and one out.
    """
    if operation.operation_class is not OperationClass.ELEMENTWISE or operation.flops == 0:
        return False
    tensor_bytes = operation.flops * operation.dtype.item_bytes
    if operation.name == "_to_copy":
        if operation.dtype in _NARROW:
            return operation.bytes_moved != 2 * tensor_bytes
        return operation.dtype in (DType.FLOAT32, *_HALF) and operation.bytes_moved < 2 * tensor_bytes
    if operation.name in _SHIFTS:
        return operation.bytes_moved < 2 * tensor_bytes
    is_broadcast = 2 * tensor_bytes + _SCALAR_BYTES < operation.bytes_moved < 2.9 * tensor_bytes
    is_widened = operation.dtype in _HALF and operation.bytes_moved < 2 * tensor_bytes
    return operation.name in _BROADCASTING and (is_broadcast or is_widened)


def loss_metric(workload: Workload) -> tuple[Operation, ...]:
    """What one metric of a micro-batch's logits runs; see [Note: Metrics of losses].

    Raises WorkloadError if nothing before the loss multiplies matrices, so that there are no logits.
    """
    operations = workload.epilogue_forward.operations
    products = [one for one in operations if one.operation_class is OperationClass.MATMUL and len(one.shape) == 4]
    if not products:
        raise WorkloadError(
            f"{workload.model_name} has no matrix product before its loss, and so no logits that metrics are taken "
            f"from. Set loss_metrics to 0 (--loss-metrics 0)."
        )
    head = products[-1]
    num_logits = head.flops // (2 * head.shape[-1])
    float32_bytes = num_logits * DType.FLOAT32.item_bytes

    def streaming(name: str, size_bytes: int) -> Operation:
        return Operation(
            name=name,
            operation_class=OperationClass.ELEMENTWISE,
            dtype=DType.FLOAT32,
            flops=num_logits,
            bytes_moved=size_bytes,
        )

    widening = streaming("_to_copy", float32_bytes + num_logits * head.dtype.item_bytes)
    found = (widening, streaming("_log_softmax", 2 * float32_bytes))
    return found if head.dtype is not DType.FLOAT32 else found[1:]


def loss_metric_bytes(workload: Workload) -> int:
    """What one metric holds at once behind a backward: the logits, their float32 copy and its log-softmax."""
    operations = loss_metric(workload)
    copies_bytes = operations[-1].bytes_moved
    widened_bytes = operations[-1].flops * DType.FLOAT32.item_bytes
    return copies_bytes + (operations[0].bytes_moved - widened_bytes if len(operations) > 1 else 0)
