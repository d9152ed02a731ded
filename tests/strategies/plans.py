"""Plans that a workload can follow, for one rank and for several.

Every draw shrinks towards one chunk and KEEP everywhere.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from hypothesis import strategies as st
from hypothesis.strategies import DrawFn, SearchStrategy

from protwin.shared.layout.layout import Layout, build_layout
from protwin.shared.schema.optimizer import HostGradients, Optimizer
from protwin.shared.schema.plan import ActivationMode, ParallelMode, Plan, mode_counts
from protwin.shared.schema.workload import DType, Workload
from tests.strategies.workloads import workloads

CHUNK_BYTES: Final = (2**30, 8192, 4096, 2048, 1024, 512, 256, 1)
"""From one chunk for everything to one chunk per parameter."""
ADAMW: Final = st.just(Optimizer.ADAMW)
AS_PARAMETERS: Final = st.just(HostGradients.PARAMETERS)


@dataclass(frozen=True)
class PlannedWorkload:
    """A workload, a plan that it can follow, and the layout of the two."""

    workload: Workload
    plan: Plan
    layout: Layout


def any_optimizer(workload: Workload) -> SearchStrategy[Optimizer]:
    """AdamW in every second plan, else any that can step the workload's parameters."""
    dtypes = {parameter.dtype for parameter in workload.parameters if parameter.trainable}
    has_empty = any(parameter.trainable and not parameter.num_elements for parameter in workload.parameters)
    able = [
        optimizer
        for optimizer in Optimizer
        if not (optimizer.is_of_bitsandbytes and DType.FLOAT64 in dtypes)
        and not (optimizer is Optimizer.ADAFACTOR and has_empty)
        and not (optimizer is Optimizer.ADAMW_BF16 and dtypes and DType.BFLOAT16 not in dtypes)
    ]
    return ADAMW | st.sampled_from(able)


def any_host_gradients(workload: Workload) -> SearchStrategy[HostGradients]:
    """Those of the parameters, or float32 where any trained parameter is narrower."""
    narrow = any(parameter.trainable and parameter.dtype.item_bytes < 4 for parameter in workload.parameters)
    return st.sampled_from(tuple(HostGradients) if narrow else (HostGradients.PARAMETERS,))


@st.composite
def plans(
    draw: DrawFn,
    workload: Workload,
    max_prefetch_depth: int = 4,
    optimizers: SearchStrategy[Optimizer] = ADAMW,
    host_gradients: SearchStrategy[HostGradients] = AS_PARAMETERS,
    *,
    has_disk: bool = False,
) -> tuple[Plan, Layout]:
    """A plan that ``workload`` can follow, and its layout; ``has_disk``: with chunks on a disk in every other plan."""
    chunk_bytes = draw(st.sampled_from(CHUNK_BYTES) | st.integers(1, 20_000))
    layout = build_layout(workload.parameters, num_blocks=workload.num_blocks, chunk_bytes=chunk_bytes)
    n_persist = draw(st.integers(0, len(layout.chunks)))
    n_host_stepped = draw(st.just(0) | st.integers(0, len(layout.chunks) - n_persist))
    n_buffer = layout.min_buffers(n_persist + n_host_stepped) + draw(st.integers(0, 5) | st.just(len(layout.chunks)))
    modes = None
    n_checkpoint = draw(st.integers(0, workload.num_blocks))
    n_swap = draw(st.integers(0, workload.num_blocks - n_checkpoint))
    counts: dict[str, Any] = {
        "n_checkpoint": n_checkpoint,
        "n_swap": n_swap,
        "n_offload_input": draw(st.integers(0, n_checkpoint)),
    }
    keeps_results = all(profile.selective for profile in workload.profiles)
    if keeps_results:
        counts["n_selective"] = draw(st.integers(0, n_checkpoint - counts["n_offload_input"]))
    if draw(st.booleans()):
        able = [mode for mode in ActivationMode if keeps_results or mode is not ActivationMode.SELECTIVE]
        modes = tuple(draw(st.lists(st.sampled_from(able), min_size=workload.num_blocks, max_size=workload.num_blocks)))
        counts = mode_counts(modes)
    num_offloaded = len(layout.chunks) - n_persist - n_host_stepped
    n_disk_state = draw(st.just(0) | st.integers(0, num_offloaded)) if has_disk else 0
    # Where nothing is trained there is no norm to limit, and nothing harms one that is taken early.
    norms = (None, None, 1.0) if any(parameter.trainable for parameter in workload.parameters) else (None,)
    plan = Plan(
        workload_id=workload.identity,
        n_disk_state=n_disk_state,
        n_disk=draw(st.integers(0, n_disk_state)),
        n_staging=draw(st.integers(1, 3)) if n_disk_state else 0,
        optimizer=draw(optimizers),
        host_gradients=draw(host_gradients),
        chunk_bytes=chunk_bytes,
        n_persist=n_persist,
        n_host_stepped=n_host_stepped,
        n_buffer=n_buffer,
        prefetch_depth=draw(st.integers(1, max_prefetch_depth)),
        **counts,
        activation_modes=modes,
        micro_batches=draw(st.sampled_from((1, 1, 2, 3))),
        max_gradient_norm=draw(st.sampled_from(norms)),
    )
    return plan, layout


@st.composite
def planned_workloads(
    draw: DrawFn,
    max_blocks: int = 6,
    measured: bool | None = True,
    min_parameters: int = 1,
    *,
    has_disk: bool = False,
) -> PlannedWorkload:
    """A random workload with a random plan for it."""
    workload = draw(workloads(max_blocks, measured, min_parameters))
    chosen: dict[str, Any] = {"optimizers": any_optimizer(workload), "host_gradients": any_host_gradients(workload)}
    plan, layout = draw(plans(workload, **chosen, has_disk=has_disk))
    return PlannedWorkload(workload, plan, layout)


@st.composite
def parallel_workloads(draw: DrawFn, max_blocks: int = 6, measured: bool | None = True) -> PlannedWorkload:
    """A random workload with a random plan for several ranks; often more of them than a chunk has scalars."""
    case = draw(planned_workloads(max_blocks, measured))
    mode = draw(st.sampled_from((ParallelMode.SHARDED, ParallelMode.REPLICATED, ParallelMode.DDP)))
    num_ranks = draw(st.sampled_from((2, 3, 4, 5, 6, 8, 1000)))
    plan = draw(shared_by_ranks(case.plan, case.layout, mode, num_ranks))
    if mode is ParallelMode.SHARDED:
        plan = plan.model_copy(update={"shard_ranks": draw(shard_groups(num_ranks))})
    return PlannedWorkload(case.workload, plan, case.layout)


@st.composite
def plans_of_ranks(draw: DrawFn, workload: Workload, mode: ParallelMode, num_ranks: int) -> tuple[Plan, Layout]:
    """A plan for so many ranks that ``workload`` can follow, and its layout."""
    plan, layout = draw(plans(workload))
    return draw(shared_by_ranks(plan, layout, mode, num_ranks)), layout


def shard_groups(num_ranks: int) -> SearchStrategy[int | None]:
    """Ranks of a shard group: all of them in every other plan, else any number that makes equal groups."""
    smaller = [number for number in range(2, num_ranks) if num_ranks % number == 0]
    return st.none() | st.sampled_from(smaller) if smaller else st.none()


@st.composite
def shared_by_ranks(draw: DrawFn, plan: Plan, layout: Layout, mode: ParallelMode, num_ranks: int) -> Plan:
    """``plan``, a plan of one rank, for several of them."""
    knobs: dict[str, object] = {"parallel": mode, "num_ranks": num_ranks}
    if mode is ParallelMode.DDP:
        knobs |= {"n_persist": len(layout.chunks), "n_host_stepped": 0}
    if mode is ParallelMode.SHARDED:
        if plan.optimizer is Optimizer.ADAFACTOR:
            knobs["optimizer"] = Optimizer.SGD
        knobs |= {"n_persist": plan.num_kept, "n_host_stepped": 0}
        num_left = len(layout.chunks) - plan.num_kept
        knobs["n_shard"] = draw(st.just(0) | st.just(num_left) | st.integers(0, num_left))
    return plan.model_copy(update=knobs)
