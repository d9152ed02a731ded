"""How another system's process holds segments of the device's allocator.

[Note: Streams have segments of their own]
What is allocated within a stream's context is given to that stream alone later (PyTorch,
``c10/cuda/CUDACachingAllocator.cpp``: blocks are searched in the pool of the stream).  fully_shard gathers in a stream
of its own: there it casts a rank's parts of a group, and makes the place that they are gathered into
(``torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py``: foreach_all_gather, in all_gather_copy_in_stream).  From
there they are copied to parameters on the stream of compute.  The place is let go once the next group's is filled
(``_fsdp_param_group.py``: all_gather_state), so that there are two groups' at a time.  What lies outside blocks is one
group, the first that is gathered.

What a reduce-scatter gives lies in the stream that reduces: under fully_shard (foreach_reduce) as under
FullyShardedDataParallel (``torch/distributed/fsdp/_runtime_utils.py``: _reduce_grad, in _post_backward_stream).  So its
segments are there when the parts are not.

ZeRO-2 copies what it has reduced into one buffer for a rank's part of all gradients (``grads_in_partition`` in
DeepSpeed's zero/stage_1_and_2.py), which the first micro-batch leaves for the step.  Every further one makes another,
which is added to the first.  With ``overlap_comm`` all that lies in the stream that reduces.  The schedule has the
first part on the stream of compute, where DeepSpeed flattens a copy of it in the step, so that the second one comes on
top.
"""

from __future__ import annotations

from ...shared.layout.uses import parameters_of_blocks
from ...shared.methods.runtime_profile import Runtime, RuntimeProfile
from ...shared.schema.plan import Plan
from ...shared.schema.workload import Workload
from .reserved import Segments


def segments_of(runtime: RuntimeProfile, plan: Plan, workload: Workload) -> Segments:
    """Of a rank that ``runtime`` trains by ``plan``; see [Note: Streams have segments of their own]."""
    gathers = runtime.runtime is Runtime.FSDP2 and plan.num_ranks > 1
    buckets = runtime.buckets if runtime.runtime is Runtime.DEEPSPEED_ZERO2 else None
    adds = buckets is not None and buckets.number > 1 and plan.micro_batches > 1
    return Segments(
        are_expandable=runtime.expandable_segments,
        gathering_bytes=_gathering_bytes(plan, workload) if gathers else 0,
        reducing_bytes=_part_bytes(plan, workload) if adds else 0,
        parts_apart=runtime.parts_go and plan.num_ranks > 1,
        num_together=runtime.num_widened,
    )


def _part_bytes(plan: Plan, workload: Workload) -> int:
    """Of a rank's part of all gradients."""
    whole = sum(parameter.size_bytes for parameter in workload.parameters if parameter.trainable)
    return -(-whole // (plan.shard_ranks or plan.num_ranks))


def _gathering_bytes(plan: Plan, workload: Workload) -> int:
    of_blocks = parameters_of_blocks(workload)
    inside = {parameter.name for of in of_blocks for parameter in of}
    outside = sum(parameter.size_bytes for parameter in workload.parameters if parameter.name not in inside)
    blocks = [sum(parameter.size_bytes for parameter in of) for of in of_blocks]
    gathered = max((first + second for first, second in zip([outside, *blocks], blocks, strict=False)), default=outside)
    num_shards = plan.shard_ranks or plan.num_ranks
    # The parts of one group are cast while it is gathered.
    return gathered + max(outside, *blocks) // num_shards
