"""Workloads whose trained parameters are kept orthogonal to frozen ones, and plans for them.

Every draw shrinks towards one subspace, projected on the host.
"""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st
from hypothesis.strategies import DrawFn

from protwin.shared.layout.layout import Layout, layout_of, why_not_on_device
from protwin.shared.schema.plan import ParallelMode, Plan, ProjectionPlace, TrainingMethod, why_not_held
from protwin.shared.schema.workload import Parameter, Subspace, SubspaceAxis, Workload
from tests.strategies.plans import (
    PlannedWorkload,
    any_host_gradients,
    any_optimizer,
    plans,
    shard_groups,
    shared_by_ranks,
)
from tests.strategies.workloads import workloads

_MODES = (None, None, ParallelMode.REPLICATED, ParallelMode.DDP, ParallelMode.SHARDED)


def _divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]


@st.composite
def with_subspaces(draw: DrawFn, workload: Workload) -> Workload:
    """``workload`` with some of its trained parameters as matrices beside frozen ones, which follow or precede them.

    Gradients keep their sizes.  Where nothing can be trained so, a block gets an empty-handed pair: one scalar each.
    """
    parameters: list[Parameter] = []
    pairs: list[tuple[int, SubspaceAxis]] = []
    for parameter in workload.parameters:
        can = parameter.trainable and parameter.num_elements > 0
        if not can or not (draw(st.sampled_from((True, True, False))) or not pairs):
            parameters.append(parameter)
            continue
        axis = draw(st.sampled_from(SubspaceAxis))
        length = draw(st.sampled_from(_divisors(parameter.num_elements)))
        trained, frozen = (length, parameter.num_elements // length), (length, draw(st.integers(1, 9)))
        if axis is SubspaceAxis.ROWS:
            trained, frozen = trained[::-1], frozen[::-1]
        beside = Parameter(
            name=f"{parameter.name}.frozen",
            shape=frozen,
            dtype=parameter.dtype,
            trainable=False,
            block=parameter.block,
            uses=parameter.uses,
        )
        parameters += [beside, parameter.model_copy(update={"shape": trained})]
        pairs.append((len(parameters) - 1, axis))
    if not pairs:
        pair = [
            Parameter(name=f"last.{name}", shape=(1, 1), dtype=workload.compute_dtype, trainable=trained, block=0)
            for name, trained in (("frozen", False), ("trained", True))
        ]
        parameters += pair
        pairs.append((len(parameters) - 1, SubspaceAxis.COLUMNS))
    subspaces = tuple(Subspace(frozen=place - 1, trained=place, axis=axis) for place, axis in pairs)
    fields: dict[str, Any] = {name: getattr(workload, name) for name in Workload.model_fields}
    return Workload(**fields | {"parameters": tuple(parameters), "subspaces": subspaces})


@st.composite
def projected_workloads(draw: DrawFn, max_blocks: int = 6, measured: bool | None = True) -> Workload:
    """Random workloads with subspaces."""
    return draw(with_subspaces(draw(workloads(max_blocks, measured))))


@st.composite
def projected_plans(
    draw: DrawFn, max_blocks: int = 6, modes: tuple[ParallelMode | None, ...] = _MODES, measured: bool | None = True
) -> PlannedWorkload:
    """A random workload with subspaces and a random plan for it, of one rank or of several."""
    workload = draw(projected_workloads(max_blocks, measured))
    chosen = {"optimizers": any_optimizer(workload), "host_gradients": any_host_gradients(workload)}
    plan, layout = draw(plans_of_subspaces(workload, **chosen))
    mode = draw(st.sampled_from(modes))
    if mode is None:
        return PlannedWorkload(workload, plan, layout)
    # Ranks have no chunks on disks.
    plan = plan.model_copy(update=dict.fromkeys(("n_disk_state", "n_disk", "n_staging"), 0))
    num_ranks = draw(st.sampled_from((2, 3, 4) if mode is ParallelMode.SHARDED else (2, 3)))
    plan = draw(shared_by_ranks(plan, layout, mode, num_ranks))
    if mode is ParallelMode.SHARDED:
        left = len(layout.chunks) - plan.n_persist
        n_shard = draw(st.just(left) | st.integers(max(0, layout.num_owned - plan.n_persist), left))
        plan = plan.model_copy(update={"n_shard": n_shard, "shard_ranks": draw(shard_groups(num_ranks))})
    return PlannedWorkload(workload, Plan(**plan.model_dump()), layout)


@st.composite  # type: ignore[arg-type]
def plans_of_subspaces(draw: DrawFn, workload: Workload, **chosen: Any) -> tuple[Plan, Layout]:
    """A plan of one rank that ``workload`` can follow, and its layout; ``chosen``: as of ``plans``."""
    drawn, _ = draw(plans(workload, **chosen))
    layout = layout_of(workload, drawn.chunk_bytes)
    num_chunks = len(layout.chunks)
    n_persist = draw(st.just(0) | st.integers(0, num_chunks))
    n_host_stepped = min(drawn.n_host_stepped, num_chunks - n_persist)
    spare = draw(st.integers(0, 5))
    n_disk_state = draw(st.just(0) | st.integers(0, num_chunks - n_persist - n_host_stepped))
    knobs: dict[str, Any] = {
        "method": TrainingMethod.OSFT,
        "n_persist": n_persist,
        "n_host_stepped": n_host_stepped,
        "n_buffer": layout.min_buffers(n_persist + n_host_stepped) + spare,
        "n_disk_state": n_disk_state,
        "n_disk": draw(st.integers(0, n_disk_state)),
        "n_staging": draw(st.integers(1, 3)) if n_disk_state else 0,
    }
    is_held = why_not_held(drawn.host_gradients, drawn.micro_batches) is None
    if is_held and why_not_on_device(layout) is None:
        knobs["projects_gradients_on"] = draw(st.sampled_from(ProjectionPlace))
    plan = drawn.model_copy(update=knobs)
    return Plan(**plan.model_dump()), layout
