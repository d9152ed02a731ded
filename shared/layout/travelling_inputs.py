"""What blocks are given by the block before them, and may send to the host until they are recomputed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from ..phases.shared_inputs import SharedInput
from ..schema.workload import Workload


def input_bytes(workload: Workload) -> list[int]:
    """By block, what mode OFFLOAD_INPUT moves: the output of the block before, where that is this block's input alone.

    Nothing of blocks of which a trace saw something else (``Workload.staying_inputs``).
    """
    found = handed_bytes(
        [workload.profile_of(b).output_bytes for b in range(workload.num_blocks)], workload.shared_inputs
    )
    for block in workload.staying_inputs:
        found[block] = 0
    return found


def handed_bytes(output_bytes: Sequence[int], shared_inputs: Sequence[SharedInput]) -> list[int]:
    """By block, what it is handed by the block before, as far as shared inputs and the sizes of outputs tell.

    Nothing of the first block, and of one behind a block with whose forward a part of the model returns: that of a
    decoder which follows an encoder.  What the block before has made for later blocks too, position biases for one,
    stays: a block that is the first to hold a shared input hands on so much less than it is handed.  What it returns
    beside its output, which no block is given, does not travel.
    """
    ends_of_parts = {shared.let_go_by for shared in shared_inputs if not shared.is_returned}
    returned: Counter[int] = Counter()
    first_held: Counter[int] = Counter()
    for shared in shared_inputs:
        if shared.is_returned:
            assert shared.let_go_by is not None
            returned[shared.let_go_by] += shared.size_bytes
        if shared.checkpointed_by:
            first_held[min(shared.checkpointed_by)] += shared.size_bytes
    found = [0] * len(output_bytes)
    for block in range(1, len(output_bytes)):
        if block - 1 not in ends_of_parts:
            fewer_bytes = max(0, output_bytes[block - 1] - output_bytes[block])
            found[block] = max(0, output_bytes[block - 1] - min(fewer_bytes, first_held[block]) - returned[block])
    return found
