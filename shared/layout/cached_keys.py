"""Keys and values that attention of a block reads: what a key-value cache keeps of it."""

from __future__ import annotations

from ..schema.workload import Operation, OperationClass, Phase

_SUM_BYTES = 4
"""Of the logarithm of a row's sum of exponentials, which kernels of attention write in float32."""


def cached_bytes(forward: Phase) -> int:
    """Bytes of the keys and values that kernels of attention in ``forward`` read; 0 without such kernels.

    They are known from what a kernel moves: queries, keys and values in, results and sums of rows out.  So heads that
    share keys count once where the kernel is given shared keys.  Where queries, keys and values are parts of one
    tensor, which counts once, every head has keys of its own.  A mask that a kernel reads counts with them, up to as
    many keys and values as there are heads.
    """
    return sum(operation.count * _of_one(operation) for operation in forward.operations)


def _of_one(operation: Operation) -> int:
    if operation.operation_class is not OperationClass.ATTENTION or len(operation.shape) != 4:
        return 0
    heads, queries, keys, width = operation.shape
    row_bytes = width * operation.dtype.item_bytes
    of_all_heads = 2 * heads * keys * row_bytes
    found = operation.bytes_moved - heads * queries * (2 * row_bytes + _SUM_BYTES)
    return min(found, of_all_heads) if found >= 2 * keys * row_bytes else of_all_heads
