"""What a plan fills of the host's budget, from the plan alone: the oracle of what searches account for."""

from __future__ import annotations

from math import prod

from protwin.shared.compile.compile import compile_schedule
from protwin.shared.layout.layout import Layout, build_layout
from protwin.shared.layout.shards import regions
from protwin.shared.optimizers.work import host_temporary_bytes
from protwin.shared.schema.optimizer import Optimizer
from protwin.shared.schema.plan import ParallelMode, Plan
from protwin.shared.schema.schedule import Memory, Schedule
from protwin.shared.schema.workload import DType, Workload


def host_bytes(plan: Plan, model: Workload, layout: Layout | None = None, schedule: Schedule | None = None) -> int:
    """Buffers and state that are there for good, and what the most demanding step of a chunk makes beside them."""
    layout = layout or build_layout(model.parameters, num_blocks=model.num_blocks, chunk_bytes=plan.chunk_bytes)
    schedule = schedule or compile_schedule(plan, model, layout)
    static_bytes = schedule.static_bytes(Memory.PINNED_HOST) + schedule.static_bytes(Memory.HOST)
    return static_bytes + made_by_steps(plan, model, layout)


def made_by_steps(plan: Plan, model: Workload, layout: Layout) -> int:
    """The most that the step of one chunk makes; chunks that the host steps come after all others."""
    most = 0
    for chunk in layout.chunks[plan.n_persist :]:
        if plan.n_persist <= chunk.id < plan.n_persist + plan.n_shard:
            continue
        members = [model.parameters[placed.index] for placed in chunk.parameters]
        stepped = [(p.dtype, p.shape) for p in members if p.trainable]
        if plan.parallel is ParallelMode.SHARDED and plan.num_ranks > 1:
            parts = [r for r in regions(chunk, model.parameters) if r.trainable]
            stepped = [(r.dtype, (r.shard_elements(plan.shard_ranks or plan.num_ranks),)) for r in parts]
        made, kernels = 0, [0]
        for dtype, shape in stepped:
            is_narrow = dtype.item_bytes < 4
            keeps_bf16 = plan.optimizer is Optimizer.ADAMW_BF16 and dtype is DType.BFLOAT16
            weight_bytes = 4 if is_narrow and not keeps_bf16 else dtype.item_bytes
            arrived_bytes = 4 if is_narrow and plan.widens_on_host else dtype.item_bytes
            if weight_bytes != arrived_bytes:
                made += prod(shape) * weight_bytes
            kernels.append(host_temporary_bytes((dtype, shape), plan.optimizer))
        most = max(most, made + max(kernels))
    return most
