"""The chunk layout: its rules, stated again one by one."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from operator import attrgetter

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn

from protwin.shared.basics.errors import PlanError
from protwin.shared.compile.compile import compile_schedule
from protwin.shared.layout.layout import Chunk, Layout, build_layout, check_layout
from protwin.shared.layout.shards import chunk_state_bytes
from protwin.shared.layout.uses import numbered_uses
from protwin.shared.schema.optimizer import Optimizer
from protwin.shared.schema.workload import DType, OuterSection, Parameter, Uses, Workload
from tests.shared.small_models import chain, parameter, plan, workload
from tests.strategies.plans import CHUNK_BYTES, PlannedWorkload, planned_workloads
from tests.strategies.workloads import uses, workloads

ALIGNMENT = 256
OUTSIDE = (OuterSection.PROLOGUE, OuterSection.EPILOGUE)
UNKNOWN_STATED = Uses(forward=OUTSIDE, backward=OUTSIDE, gradient=OuterSection.PROLOGUE)
"""What is taken for uses that nobody knows."""
HEAD_FORWARD = Uses(forward=OUTSIDE, backward=OUTSIDE[:1], gradient=OuterSection.PROLOGUE)
"""The same to a layout: forward and backward of the epilogue follow each other."""
HEAD_FIRST = Uses(forward=OUTSIDE[::-1], backward=OUTSIDE, gradient=OuterSection.PROLOGUE)
ANY_CHUNK_BYTES = st.sampled_from(CHUNK_BYTES) | st.integers(1, 20_000)


@st.composite
def parameter_lists(draw: DrawFn) -> tuple[list[Parameter], int]:
    """Parameters of up to four blocks, or of any sections, in any order, even one that no model has."""
    num_blocks = draw(st.integers(1, 4))
    found = []
    for index in range(draw(st.integers(0, 12))):
        block = draw(st.none() | st.integers(0, num_blocks - 1))
        found.append(
            Parameter(
                name=f"p{index}",
                shape=(draw(st.integers(0, 700)), draw(st.integers(1, 2))),
                dtype=draw(st.sampled_from((DType.FLOAT32, DType.BFLOAT16, DType.FLOAT64))),
                trainable=draw(st.booleans()),
                block=block,
                uses=draw(st.none() | uses(num_blocks).filter(is_not_of_a_block)) if block is None else None,
            )
        )
    return found, num_blocks


def is_not_of_a_block(of_parameter: Uses) -> bool:
    return not of_parameter.forward == of_parameter.backward == (of_parameter.gradient,)


def users(parameter: Parameter) -> tuple[frozenset[object], frozenset[object], object]:
    """The sections forward and backward that need an outer parameter, and the one that completes its gradient.

    Their order does not count.  Without stated uses, both outer sections need it.  The epilogue, which runs backward
    right after forward, needs what it reads in both.
    """
    stated = parameter.uses or UNKNOWN_STATED
    forward, backward = set(stated.forward), set(stated.backward)
    if OuterSection.EPILOGUE in forward | backward:
        forward.add(OuterSection.EPILOGUE)
        backward.add(OuterSection.EPILOGUE)
    return frozenset(forward), frozenset(backward), stated.gradient


def empty_outer(*uses_of_each: Uses | None) -> tuple[list[Parameter], int]:
    """Outer parameters without scalars, one for each of the uses, in a model of one block."""
    found = [
        Parameter(name=f"p{index}", shape=(0, 1), dtype=DType.FLOAT32, uses=of_parameter)
        for index, of_parameter in enumerate(uses_of_each)
    ]
    return found, 1


def padded(parameter: Parameter) -> int:
    size_bytes = parameter.size_bytes
    while size_bytes % ALIGNMENT:
        size_bytes += 1
    return size_bytes


def members(chunk: Chunk, parameters: list[Parameter]) -> list[Parameter]:
    return [parameters[placed.index] for placed in chunk.parameters]


def drawn_layout(drawn: tuple[list[Parameter], int], chunk_bytes: int) -> tuple[list[Parameter], Layout]:
    parameters, num_blocks = drawn
    return parameters, build_layout(parameters, num_blocks=num_blocks, chunk_bytes=chunk_bytes)


@given(parameter_lists(), ANY_CHUNK_BYTES)
def test_every_parameter_has_one_place(drawn: tuple[list[Parameter], int], chunk_bytes: int) -> None:
    parameters, layout = drawn_layout(drawn, chunk_bytes)
    placed = [member.index for chunk in layout.chunks for member in chunk.parameters]
    assert sorted(placed) == list(range(len(parameters)))
    assert [chunk.id for chunk in layout.chunks] == list(range(len(layout.chunks)))
    assert all(chunk.parameters for chunk in layout.chunks)


@given(parameter_lists(), ANY_CHUNK_BYTES)
def test_places_are_aligned_and_do_not_overlap(drawn: tuple[list[Parameter], int], chunk_bytes: int) -> None:
    parameters, layout = drawn_layout(drawn, chunk_bytes)
    for chunk in layout.chunks:
        end = 0
        for placed in chunk.parameters:
            assert placed.offset_bytes % ALIGNMENT == 0
            assert placed.offset_bytes >= end
            end = placed.offset_bytes + parameters[placed.index].size_bytes
        assert end <= chunk.size_bytes


@given(parameter_lists(), ANY_CHUNK_BYTES)
def test_no_chunk_is_too_large_but_those_of_one_parameter(drawn: tuple[list[Parameter], int], chunk_bytes: int) -> None:
    _, layout = drawn_layout(drawn, chunk_bytes)
    for chunk in layout.chunks:
        assert chunk.size_bytes <= chunk_bytes or len(chunk.parameters) == 1


@given(parameter_lists(), ANY_CHUNK_BYTES)
def test_nothing_is_wasted_but_the_alignment(drawn: tuple[list[Parameter], int], chunk_bytes: int) -> None:
    parameters, layout = drawn_layout(drawn, chunk_bytes)
    for chunk in layout.chunks:
        assert chunk.size_bytes == sum(map(padded, members(chunk, parameters)))
    wasted = sum(chunk.size_bytes for chunk in layout.chunks) - sum(p.size_bytes for p in parameters)
    assert 0 <= wasted <= (ALIGNMENT - 1) * len(parameters)


@given(parameter_lists(), ANY_CHUNK_BYTES)
@example(empty_outer(None, UNKNOWN_STATED, HEAD_FORWARD, HEAD_FIRST), 1)
def test_a_chunk_is_of_blocks_or_of_equal_uses(drawn: tuple[list[Parameter], int], chunk_bytes: int) -> None:
    parameters, layout = drawn_layout(drawn, chunk_bytes)
    for chunk in layout.chunks:
        found = members(chunk, parameters)
        if found[0].block is None:
            assert {(p.block, users(p)) for p in found} == {(None, users(found[0]))}
        else:
            owners = tuple(sorted({1 + p.block for p in found if p.block is not None}))
            assert chunk.forward == chunk.backward == owners
            assert all(p.block is not None for p in found)


@given(parameter_lists(), ANY_CHUNK_BYTES)
def test_a_block_stays_together_and_in_order(drawn: tuple[list[Parameter], int], chunk_bytes: int) -> None:
    """Sections come in the order of the program, each whole, its parameters in their order."""
    parameters, layout = drawn_layout(drawn, chunk_bytes)
    placed = [member.index for chunk in layout.chunks for member in chunk.parameters]
    for block in range(layout.num_blocks):
        own = [index for index, p in enumerate(parameters) if p.block == block]
        where = [placed.index(index) for index in own]
        assert where == list(range(where[0], where[0] + len(own))) if own else True
        chunks = [c.id for c in layout.chunks if any(p.block == block for p in members(c, parameters))]
        # With only one block's parameters between its first and its last chunk.
        for chunk in chunks[1:-1]:
            assert layout.chunks[chunk].forward == (1 + block,)
    firsts = [min(chunk.forward) for chunk in layout.chunks if parameters[chunk.parameters[0].index].uses is None]
    assert firsts == sorted(firsts)


@given(parameter_lists(), ANY_CHUNK_BYTES)
def test_chunks_end_only_where_they_must(drawn: tuple[list[Parameter], int], chunk_bytes: int) -> None:
    """What begins a chunk (a whole block, or within one a parameter) did not fit into the one before."""
    parameters, layout = drawn_layout(drawn, chunk_bytes)
    for chunk, following in pairwise(layout.chunks):
        first, before = parameters[following.parameters[0].index], members(chunk, parameters)
        if (first.block is None) != (before[0].block is None):
            continue
        if first.block is None and users(first) != users(before[0]):
            continue
        if first.block is not None and first.block not in {p.block for p in before}:
            needed = sum(padded(p) for p in parameters if p.block == first.block)
        else:
            needed = padded(first)
        assert chunk.size_bytes + needed > chunk_bytes


@given(parameter_lists(), ANY_CHUNK_BYTES)
def test_a_shared_chunk_holds_each_later_block_whole(drawn: tuple[list[Parameter], int], chunk_bytes: int) -> None:
    parameters, layout = drawn_layout(drawn, chunk_bytes)
    for chunk in layout.chunks:
        owners = list(dict.fromkeys(p.block for p in members(chunk, parameters)))
        for owner in owners[1:]:
            inside = [p for p in members(chunk, parameters) if p.block == owner]
            assert inside == [p for p in parameters if p.block == owner]


@given(parameter_lists(), ANY_CHUNK_BYTES)
def test_sums_over_parameters(drawn: tuple[list[Parameter], int], chunk_bytes: int) -> None:
    parameters, layout = drawn_layout(drawn, chunk_bytes)
    for chunk in layout.chunks:
        trained = [p for p in members(chunk, parameters) if p.trainable]
        completing = [(numbered_uses(p, layout.num_blocks).gradient, p.size_bytes) for p in trained]
        sums = Counter({section: 0 for section, _ in completing})
        for section, size_bytes in completing:
            sums[section] += size_bytes
        assert chunk.gradients == tuple(sorted(sums.items()))
        assert chunk.gradient_bytes == sum(p.size_bytes for p in trained)
        assert chunk.completed_by == min(sums, default=None)
        assert chunk.staging_bytes == sum(map(padded, trained))
        assert chunk.num_trainable == sum(p.shape[0] * p.shape[1] for p in trained)
        assert chunk.is_trainable == any(p.size_bytes for p in trained)
        # Two moments: float32, or float64 beside float64; a float32 master beside bfloat16; a count of steps.
        per_element = {DType.FLOAT32: 8, DType.FLOAT64: 16, DType.BFLOAT16: 12}
        assert chunk_state_bytes(chunk, parameters, Optimizer.ADAMW) == sum(
            p.shape[0] * p.shape[1] * per_element[p.dtype] + 4 for p in trained
        )


# -- residency -------------------------------------------------------------------------------------------------------


@given(workloads(min_parameters=0), ANY_CHUNK_BYTES)
def test_persistent_chunks_are_the_first(model: Workload, chunk_bytes: int) -> None:
    layout = build_layout(model.parameters, num_blocks=model.num_blocks, chunk_bytes=chunk_bytes)
    for n_persist in range(len(layout.chunks) + 1):
        expected = {c.id for c in layout.chunks if c.id < n_persist}
        assert layout.persistent(n_persist) == expected
        needs = [
            sum(1 for c in layout.chunks if section in passing(c) and c.id not in expected)
            for section in range(model.num_blocks + 2)
            for passing in (attrgetter("forward"), attrgetter("backward"))
        ]
        assert layout.min_buffers(n_persist) == max(needs)
    with pytest.raises(PlanError, match=f"gives {len(layout.chunks)} chunks"):
        layout.persistent(len(layout.chunks) + 1)


@settings(max_examples=30)
@given(planned_workloads())
def test_min_buffers_is_the_fewest_that_compile(case: PlannedWorkload) -> None:
    fewest = case.layout.min_buffers(case.plan.n_persist + case.plan.n_host_stepped)
    compile_schedule(case.plan.model_copy(update={"n_buffer": fewest}), case.workload, case.layout)
    for n_buffer in range(max(0, fewest - 2), fewest):
        with pytest.raises(PlanError, match=f"Raise n_buffer to {fewest},"):
            compile_schedule(case.plan.model_copy(update={"n_buffer": n_buffer}), case.workload, case.layout)


# -- by hand ---------------------------------------------------------------------------------------------------------


HEAD = Uses(forward=(OuterSection.EPILOGUE,), backward=(OuterSection.EPILOGUE,), gradient=OuterSection.EPILOGUE)


def test_a_layout_by_hand() -> None:
    """Block 0 fits behind no embedding; block 1 does not fit whole behind it; block 2 fills up block 1's last."""
    parameters = [
        parameter("embedding", 64, None),  # 256 bytes; used at both ends, for all that anybody knows
        parameter("a", 100, 0),  # 400, padded to 512
        parameter("b", 1, 0),  # 4, padded to 256
        parameter("c", 64, 1),  # 256
        parameter("d", 65, 1),  # 260, padded to 512
        parameter("e", 1_000, 1),  # 4 000, too large: 4 096
        parameter("f", 10, 1),  # padded to 256
        parameter("g", 20, 2, trainable=False),  # padded to 256
        parameter("h", 30, None).model_copy(update={"uses": HEAD}),
    ]
    layout = build_layout(parameters, num_blocks=3, chunk_bytes=1_024)
    assert [[parameters[m.index].name for m in chunk.parameters] for chunk in layout.chunks] == [
        ["embedding"],
        ["a", "b"],
        ["c", "d"],
        ["e"],
        ["f", "g"],
        ["h"],
    ]
    assert [chunk.size_bytes for chunk in layout.chunks] == [256, 768, 768, 4_096, 512, 256]
    assert [m.offset_bytes for m in layout.chunks[1].parameters] == [0, 512]
    assert layout.chunks[4].forward == layout.chunks[4].backward == (2, 3)
    assert layout.chunks[4].gradients == ((2, 40),)
    assert layout.chunks[4].staging_bytes == 256
    assert layout.needed == ((0,), (1,), (2, 3, 4), (4,), (0, 5), (4,), (2, 3, 4), (1,), (0,))
    assert [layout.min_buffers(n) for n in range(7)] == [3, 3, 3, 2, 1, 1, 0]


@pytest.mark.parametrize("chunk_bytes", [0, -1])
def test_chunks_have_a_size(chunk_bytes: int) -> None:
    with pytest.raises(PlanError, match="must be positive"):
        build_layout([], num_blocks=1, chunk_bytes=chunk_bytes)


def test_a_layout_belongs_to_a_plan_and_a_workload() -> None:
    model, other = chain(3), chain(4)
    knobs = plan(model)
    layout = build_layout(model.parameters, num_blocks=3, chunk_bytes=knobs.chunk_bytes)
    check_layout(layout, knobs, model)
    with pytest.raises(PlanError, match="chunk_bytes = 4096 but the plan says 512"):
        check_layout(layout, knobs.model_copy(update={"chunk_bytes": 512}), model)
    with pytest.raises(PlanError, match="3 parameters of 3 blocks but the workload has 4 of 4"):
        check_layout(layout, knobs, other)
    with pytest.raises(PlanError, match="2 parameters of 3 blocks"):
        check_layout(build_layout(model.parameters[:2], num_blocks=3, chunk_bytes=4_096), knobs, model)
    assert workload(model.parameters, 3).identity == model.identity
