"""Workloads of bypass distillation of a few small pairs, and plans that they can follow."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.strategies import DrawFn

from protwin.shared.layout.layout import layout_of
from protwin.shared.phases.distillation import Distillation
from protwin.shared.schema.plan import ParallelMode, Plan, TrainingMethod
from protwin.shared.schema.workload import Block, BlockProfile, DType, OuterSection, Parameter, Phase, Uses, Workload
from protwin.shared.workloads.stages import stage_workload
from tests.strategies.plans import (
    CHUNK_BYTES,
    PlannedWorkload,
    any_host_gradients,
    any_optimizer,
    shard_groups,
    shared_by_ranks,
)
from tests.strategies.workloads import SIZES_BYTES, phases

Shapes = tuple[tuple[int, DType, bool], ...]
"""Elements, element type and trainability of each parameter of a block."""
_DTYPES = st.sampled_from((DType.FLOAT32, DType.BFLOAT16))


@st.composite
def _parameters(draw: DrawFn, dtypes: st.SearchStrategy[DType], *, is_teacher: bool) -> Shapes:
    trained = st.just(False) if is_teacher else st.sampled_from((True, True, True, False))
    number = draw(st.integers(0, 3))
    return tuple((draw(st.integers(0, 1000)), draw(dtypes), draw(trained)) for _ in range(number))


@st.composite
def _teachers(draw: DrawFn, measured: bool | None, hidden_bytes: int | None) -> tuple[BlockProfile, Phase]:
    forward = draw(phases(draw(SIZES_BYTES) if hidden_bytes is None else hidden_bytes, measured))
    nothing = Phase()
    return (
        BlockProfile(
            output_bytes=max(0, forward.net_bytes),
            forward=forward,
            backward=nothing,
            checkpoint_forward=forward,
            recompute=nothing,
            checkpoint_backward=nothing,
        ),
        nothing,
    )


@st.composite
def _students(draw: DrawFn, parameters: Shapes, given_bytes: int, measured: bool | None) -> tuple[BlockProfile, Phase]:
    """A backward releases what its block and its loss saved, its output and its input; it may leave a little."""
    gradient_bytes = sum(elements * dtype.item_bytes for elements, dtype, trainable in parameters if trainable)
    stated_bytes = draw(st.sampled_from((gradient_bytes, None)))
    output_bytes, saved_bytes, loss_bytes = draw(SIZES_BYTES), draw(SIZES_BYTES), draw(st.integers(0, 8_000))
    left_bytes = draw(st.sampled_from((0, 0, 4, 512)))
    freed_bytes = output_bytes + saved_bytes + loss_bytes + given_bytes - left_bytes
    nothing = Phase()
    backward = draw(phases(gradient_bytes - freed_bytes, measured, stated_bytes))
    return (
        BlockProfile(
            output_bytes=output_bytes,
            forward=draw(phases(output_bytes + saved_bytes, measured)),
            backward=backward,
            checkpoint_forward=nothing,
            recompute=nothing,
            checkpoint_backward=nothing,
        ),
        draw(phases(loss_bytes, measured)),
    )


@st.composite
def bypass_workloads(
    draw: DrawFn, max_pairs: int = 4, measured: bool | None = True, *, min_pairs: int = 1, is_even: bool = False
) -> Workload:
    """Workloads of up to ``max_pairs`` pairs; every block is of a kind of its own, or like the pair's before.

    ``is_even``: the teacher's hidden state has one size everywhere, so that pipelines may have it in stages.
    """
    dtypes = draw(st.sampled_from((st.just(DType.FLOAT32), st.just(DType.BFLOAT16), _DTYPES)))
    num_pairs = draw(st.integers(min_pairs, max_pairs))
    hidden_bytes = draw(st.integers(1, 20_000)) if is_even else None
    embedded_bytes = draw(SIZES_BYTES) if hidden_bytes is None else hidden_bytes
    passing_bytes = draw(st.sampled_from((0, 0, embedded_bytes // 2)))
    embedded_bytes += passing_bytes if is_even else 0
    profiles: list[BlockProfile] = []
    losses: list[Phase] = []
    blocks: list[Block] = []
    parameters = [
        Parameter(
            name="teacher.embedding",
            shape=(draw(st.integers(1, 1000)),),
            dtype=draw(dtypes),
            trainable=False,
            uses=Uses(
                forward=draw(st.sampled_from(((OuterSection.PROLOGUE,), (OuterSection.PROLOGUE, 0)))),
                backward=(),
                gradient=OuterSection.PROLOGUE,
            ),
        )
    ]
    given_bytes = embedded_bytes - passing_bytes
    of_kind: list[Shapes] = []
    for pair in range(num_pairs):
        is_new = pair == 0 or draw(st.booleans())
        if is_new:
            of_kind = [draw(_parameters(dtypes, is_teacher=True)), draw(_parameters(dtypes, is_teacher=False))]
            students = _students(of_kind[1], given_bytes, measured)
            for profile, loss in (draw(_teachers(measured, hidden_bytes)), draw(students)):
                profiles.append(profile)
                losses.append(loss)
        for place, model in enumerate(("teacher", "student")):
            block = len(blocks)
            blocks.append(Block(name=f"{model}.layers.{pair}", profile=len(profiles) - 2 + place))
            parameters += [
                Parameter(
                    name=f"{model}.layers.{pair}.{number}", shape=(n,), dtype=dtype, trainable=learnt, block=block
                )
                for number, (n, dtype, learnt) in enumerate(of_kind[place])
            ]
        given_bytes = profiles[-2].output_bytes
    return Workload(
        model_name="random pairs",
        model_hash="0123456789abcdef",
        batch_shapes={"input_ids": (2, 8)},
        num_samples=2,
        num_tokens=16,
        compute_dtype=DType.FLOAT32,
        parameters=tuple(parameters),
        blocks=tuple(blocks),
        profiles=tuple(profiles),
        prologue_forward=draw(phases(embedded_bytes, measured)),
        epilogue_forward=Phase(),
        epilogue_backward=Phase(),
        prologue_backward=Phase(),
        distillation=Distillation(losses=tuple(losses), passing_bytes=passing_bytes, loss="mse"),
        resident_bytes=draw(SIZES_BYTES),
        traced_with="real",
        measured_on="random machine" if measured else None,
    )


@st.composite
def stage_workloads(draw: DrawFn, max_pairs: int = 4, measured: bool | None = True) -> Workload:
    """One stage of a random pipeline."""
    whole = draw(bypass_workloads(max_pairs, measured, min_pairs=2, is_even=True))
    of_pairs = whole.num_blocks // 2
    first = draw(st.integers(0, of_pairs - 1))
    number = draw(st.integers(1, of_pairs - first if first else of_pairs - 1))
    least = (first > 0) + 1 + (first + number < of_pairs)
    num_stages = draw(st.integers(least, of_pairs - number + 1))
    return stage_workload(whole, first, number, num_stages)


@st.composite
def bypass_cases(
    draw: DrawFn,
    max_pairs: int = 4,
    measured: bool | None = True,
    *,
    workloads: st.SearchStrategy[Workload] | None = None,
    has_disk: bool = True,
) -> PlannedWorkload:
    """A random workload of bypass distillation, or one of ``workloads``, with a random plan for one rank of it."""
    workload = draw(bypass_workloads(max_pairs, measured) if workloads is None else workloads)
    chunk_bytes = draw(st.sampled_from(CHUNK_BYTES) | st.integers(1, 20_000))
    layout = layout_of(workload, chunk_bytes)
    num_chunks = len(layout.chunks)
    n_persist = draw(st.integers(0, num_chunks))
    n_host_stepped = draw(st.just(0) | st.integers(0, num_chunks - n_persist))
    n_buffer = layout.min_buffers(n_persist + n_host_stepped) + draw(st.integers(0, 5) | st.just(num_chunks))
    most_on_disk = 0 if workload.num_stages > 1 or not has_disk else num_chunks - n_persist - n_host_stepped
    n_disk_state = draw(st.just(0) | st.integers(0, most_on_disk))
    plan = Plan(
        workload_id=workload.identity,
        method=TrainingMethod.BYPASS,
        chunk_bytes=chunk_bytes,
        n_persist=n_persist,
        n_host_stepped=n_host_stepped,
        n_disk_state=n_disk_state,
        n_disk=draw(st.integers(0, n_disk_state)),
        n_staging=draw(st.integers(1, 3)) if n_disk_state else 0,
        n_buffer=n_buffer,
        prefetch_depth=draw(st.integers(1, 4)),
        micro_batches=draw(st.sampled_from((1, 1, 2, 3))),
        optimizer=draw(any_optimizer(workload)),
        host_gradients=draw(any_host_gradients(workload)),
        max_gradient_norm=draw(st.sampled_from((None, 0.5))),
    )
    return PlannedWorkload(workload, plan, layout)


@st.composite
def cases_of_ranks(
    draw: DrawFn, max_pairs: int = 4, measured: bool | None = True, *, most_ranks: int = 6
) -> PlannedWorkload:
    """A stage of a pipeline, data parallel ranks of a whole distillation, or both, with a random plan."""
    models = stage_workloads(max_pairs, measured) | bypass_workloads(max_pairs, measured)
    case = draw(bypass_cases(workloads=models, has_disk=False))
    num_stages = case.workload.num_stages
    numbers = [number for number in range(1, most_ranks // num_stages + 1) if number * num_stages > 1]
    num_ranks = draw(st.sampled_from(numbers))
    if num_ranks == 1:
        return case
    mode = draw(st.sampled_from((ParallelMode.SHARDED, ParallelMode.REPLICATED, ParallelMode.DDP)))
    of_one = case.plan
    if mode is ParallelMode.SHARDED:
        # The norm of a block whose gradients are in parts is not known.
        of_one = of_one.model_copy(update={"max_gradient_norm": None})
    plan = draw(shared_by_ranks(of_one, case.layout, mode, num_ranks))
    if mode is ParallelMode.SHARDED:
        plan = plan.model_copy(update={"shard_ranks": draw(shard_groups(num_ranks))})
    return PlannedWorkload(case.workload, plan, case.layout)
