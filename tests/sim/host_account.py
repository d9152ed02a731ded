"""What a plan fills of the host's budget, from the plan alone: the oracle of what searches account for."""

from __future__ import annotations

from math import prod

from protwin.shared.compile.compile import compile_schedule
from protwin.shared.layout.layout import Chunk, Layout, layout_of
from protwin.shared.layout.shards import regions
from protwin.shared.optimizers.work import host_temporary_bytes
from protwin.shared.schema.optimizer import Optimizer
from protwin.shared.schema.plan import ParallelMode, Plan, ProjectionPlace
from protwin.shared.schema.schedule import Memory, Schedule
from protwin.shared.schema.workload import DType, SubspaceAxis, Workload


def host_bytes(plan: Plan, model: Workload, layout: Layout | None = None, schedule: Schedule | None = None) -> int:
    """Buffers and state that are there for good, and what the most demanding step of a chunk makes beside them."""
    layout = layout or layout_of(model, plan.chunk_bytes)
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
        most = max(most, made + max(kernels), *made_by_projections(plan, model, chunk))
    return most


def made_by_projections(plan: Plan, model: Workload, chunk: Chunk) -> list[int]:
    """What each projection of a chunk's gradients and parameters makes on the host, in float32 at least."""
    found = [0]
    for subspace in chunk.subspaces:
        frozen, trained = (model.parameters[place] for place in (subspace.frozen, subspace.trained))
        if trained.dtype is not DType.FLOAT32 or frozen.dtype is not DType.FLOAT32:
            assert {trained.dtype, frozen.dtype} == {DType.BFLOAT16}, "a test of other types says what they take"
        product = prod(frozen.shape) * prod(trained.shape)
        length = frozen.shape[0 if subspace.axis is SubspaceAxis.COLUMNS else 1]
        coefficients = 4 * product // length**2
        is_narrow = trained.dtype is DType.BFLOAT16
        widened = 4 * prod(frozen.shape) if is_narrow else 0
        has_master = is_narrow and plan.optimizer is not Optimizer.ADAMW_BF16
        found.append(coefficients + widened + (4 * prod(trained.shape) if is_narrow and not has_master else 0))
        if plan.projects_gradients_on is ProjectionPlace.HOST:
            arrives_narrow = is_narrow and not plan.widens_on_host
            found.append(coefficients + widened + (4 * prod(trained.shape) if arrives_narrow else 0))
    return found
