"""What the loss of a student's block costs: operations and bytes of comparing two tensors, forward and backward.

[Note: Work of a block loss]
Losses compute in float32.  Outputs of a narrower type are widened first, which makes a copy of both; the gradient is
narrowed at the end.  Losses of squares save the difference of the two tensors, the cosine both tensors.  What is summed
or averaged away counts for the length of the operation that reads it.  Numbers of one vector or one sample, of losses
that keep any, are left out: one for hundreds of elements.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from ..basics.errors import WorkloadError
from ..basics.suggestions import did_you_mean
from ..phases.operations import DType, Operation, OperationClass
from ..phases.phase import Phase

SCALAR_BYTES: Final = 4
_WIDE: Final = 4
"""Bytes of a float32."""
_GRADIENT_TENSORS: Final = 4
"""Tensors in float32 that backward has at once at most."""
_NUM_SCALARS: Final = 3
"""The loss, and the two that its quotient saves."""


@dataclass(frozen=True)
class _Work:
    """Passes over a tensor of E elements."""

    is_normalized: bool
    """Whether it divides by something of the target."""
    saves_difference: bool
    """Else it saves both tensors."""


_LOSSES: Final = {
    "mse": _Work(is_normalized=False, saves_difference=True),
    "normalized_mse": _Work(is_normalized=True, saves_difference=True),
    "batched_normalized_mse": _Work(is_normalized=True, saves_difference=True),
    "vectorwise_normalized_mse": _Work(is_normalized=True, saves_difference=True),
    "cosine": _Work(is_normalized=True, saves_difference=False),
}


@dataclass(frozen=True)
class LossPhases:
    """A block loss of outputs of one size."""

    forward: Phase
    """It leaves the loss and what its backward needs."""
    backward: Phase
    """It leaves the gradient of the student's output, and takes away what forward has left."""


def loss_phases(loss: str, output_bytes: int, dtype: DType) -> LossPhases:
    """The phases of a loss between outputs of ``output_bytes``, of element type ``dtype``.

    See [Note: Work of a block loss].  Raises WorkloadError for a loss that is not known.
    """
    if loss not in _LOSSES:
        raise WorkloadError(f"loss {loss} is not known. {did_you_mean(loss, _LOSSES)}")
    work, is_narrow = _LOSSES[loss], dtype is not DType.FLOAT32 and dtype.item_bytes < _WIDE
    elements = output_bytes // dtype.item_bytes
    wide_bytes = _WIDE * elements
    copies_bytes = 2 * wide_bytes if is_narrow else 0
    saved_bytes = (wide_bytes if work.saves_difference else copies_bytes) + _NUM_SCALARS * SCALAR_BYTES
    # Of squares, the difference is there beside what is averaged; of the cosine, one product at a time.
    passing_bytes = (2 + work.is_normalized if work.saves_difference else 1) * wide_bytes
    forward = Phase(
        operations=tuple(_forward(work, elements, dtype, is_narrow=is_narrow)),
        net_bytes=saved_bytes,
        curve=((1.0, max(saved_bytes, copies_bytes + passing_bytes)),),
    )
    passes = (1 if work.saves_difference else 2) * 2
    operations = [_operation("aten.mul", elements, wide_bytes, 2 * wide_bytes, count=passes)]
    if is_narrow:
        operations.append(_operation("aten._to_copy", elements, wide_bytes, output_bytes))
    backward = Phase(
        operations=tuple(operations),
        net_bytes=output_bytes - saved_bytes,
        # The gradient, spread over the tensor, goes through a power and two products.
        curve=((1.0, _GRADIENT_TENSORS * wide_bytes),),
    )
    return LossPhases(forward, backward)


def _forward(work: _Work, elements: int, dtype: DType, *, is_narrow: bool) -> Iterator[Operation]:
    wide_bytes = _WIDE * elements
    if is_narrow:
        yield _operation("aten._to_copy", elements, dtype.item_bytes * elements, wide_bytes, count=2)
    if work.saves_difference:
        yield _operation("aten.sub", elements, 2 * wide_bytes, wide_bytes)
        squared = 1 + work.is_normalized
    else:
        yield _operation("aten.mul", elements, 2 * wide_bytes, wide_bytes)
        squared = 2
    yield _operation("aten.pow", elements, wide_bytes, wide_bytes, count=squared)
    summed = squared if work.saves_difference else squared + 1
    yield _operation("aten.mean", elements, wide_bytes, 0, count=summed, operation_class=OperationClass.REDUCTION)


def _operation(
    name: str,
    flops: int,
    read_bytes: int,
    written_bytes: int,
    *,
    count: int = 1,
    operation_class: OperationClass = OperationClass.ELEMENTWISE,
) -> Operation:
    return Operation(
        name=name,
        operation_class=operation_class,
        dtype=DType.FLOAT32,
        flops=flops,
        bytes_moved=read_bytes + written_bytes,
        count=count,
    )
