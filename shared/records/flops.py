"""Floating-point operations of training, as utilisation counts them.

[Note: Model FLOPs]
Model FLOPs utilisation (MFU; PaLM, arXiv 2204.02311, appendix B) is what the model needs over what the devices could
have done meanwhile.  It needs its matrix products and its attention, forward and backward, and nothing twice: what is
recomputed is left out, which hardware FLOPs utilisation (HFU) counts.  PaLM writes 6 N + 12 L H Q T per token for N
parameters, L layers of H heads that are Q wide, and T tokens of a sample.  Here the products are those that the trace
saw, so that embeddings that are looked up, frozen weights (which need no gradient of their own: 4 N), experts that are
not chosen and heads that are tied count as what they take.  Attention counts the whole square of scores, as PaLM does,
whether or not a kernel leaves out the half above the diagonal: 4 q k w FLOPs forward for q queries, k keys and heads
that are w wide, twice as many backward.  Fused attention recomputes its scores in backward, 2 q k w more, which are
the hardware's.  Element-wise operations, normalizations and the optimizer do not count.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from ..schema.schedule import Schedule
from ..schema.workload import Operation, OperationClass, Phase, Workload

_PRODUCTS: Final = {False: (2, 2), True: (4, 5)}
"""Products of the size of the scores in attention, by whether it is the backward: needed, and carried out."""


def model_flops(workload: Workload) -> int | None:
    """FLOPs that one micro-batch needs; see [Note: Model FLOPs].  None where the workload lists no operations."""
    counts: dict[int, int] = {}
    for block in workload.blocks:
        counts[block.profile] = counts.get(block.profile, 0) + 1
    outer = (
        workload.prologue_forward,
        workload.epilogue_forward,
        workload.epilogue_backward,
        workload.prologue_backward,
    )
    total = sum(_needed_flops(phase) for phase in outer)
    for index, count in counts.items():
        profile = workload.profiles[index]
        total += count * (_needed_flops(profile.forward) + _needed_flops(profile.backward))
    return total or None


def hardware_flops(schedule: Schedule) -> int | None:
    """FLOPs that one rank carries out in an iteration, recomputation among them; None where no operation is listed."""
    known: dict[int, int] = {}
    total = 0
    for task in schedule.tasks:
        if task.phase is not None:
            # Equal blocks share their phases, which the schedule holds.
            flops = known.get(id(task.phase))
            if flops is None:
                flops = known[id(task.phase)] = _carried_out_flops(task.phase)
            total += flops
    return total or None


def _needed_flops(phase: Phase) -> int:
    return _sum(phase.operations, 0)


def _carried_out_flops(phase: Phase) -> int:
    return _sum(phase.operations, 1)


def _sum(operations: Iterable[Operation], account: int) -> int:
    return sum(_flops(operation, account) * operation.count for operation in operations)


def _flops(operation: Operation, account: int) -> int:
    """Of one call; ``account``: 0 for what is needed, 1 for what is carried out."""
    if operation.operation_class is OperationClass.MATMUL:
        return operation.flops
    if operation.operation_class is not OperationClass.ATTENTION:
        return 0
    products = _PRODUCTS["backward" in operation.name]
    if len(operation.shape) != 4:
        return operation.flops * products[account] // products[1]
    heads, queries, keys, width = operation.shape
    return 2 * products[account] * heads * queries * keys * width
