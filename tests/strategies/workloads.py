"""Workloads of a few small blocks.

Sizes are small (parameters of a few kilobytes) so that chunk boundaries, alignment and evictions all occur within a
few blocks.  Every draw shrinks towards one block and one parameter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from hypothesis import strategies as st
from hypothesis.strategies import DrawFn, SearchStrategy

from protwin.shared.phases.block_profile import SelectiveRecomputation
from protwin.shared.phases.shared_inputs import SharedInput
from protwin.shared.schema.workload import (
    Block,
    BlockProfile,
    DType,
    Operation,
    OperationClass,
    OuterSection,
    Parameter,
    Phase,
    Uses,
    Workload,
    in_forward_order,
)

SIZES_BYTES: Final = st.integers(0, 40_000)
_TRAINED_DTYPES: Final = st.sampled_from((DType.FLOAT32, DType.BFLOAT16))


def operations() -> SearchStrategy[Operation]:
    """Operations of every class, small and cheap."""
    return st.builds(
        Operation,
        name=st.sampled_from(("aten.mm", "aten.add", "aten.native_layer_norm")),
        operation_class=st.sampled_from(OperationClass),
        dtype=_TRAINED_DTYPES,
        flops=st.integers(0, 10**9),
        bytes_moved=st.integers(0, 10**8),
        count=st.integers(1, 8),
        shape=st.just(()) | st.tuples(*[st.integers(1, 2**12)] * 4),
    )


def _curves(draw: DrawFn, net_bytes: int) -> tuple[tuple[float, int], ...]:
    """A curve that begins at 0 or higher and ends at ``net_bytes`` or higher.

    Each entry is the highest level within its stretch; a phase that adds nothing may have none.
    """
    num_stretches = draw(st.integers(0 if net_bytes <= 0 else 1, 3))
    curve = []
    for stretch in range(num_stretches):
        floor = 0 if stretch == 0 else min(0, net_bytes)
        if stretch == num_stretches - 1:
            floor = max(floor, net_bytes)
        curve.append(((stretch + 1) / num_stretches, floor + draw(SIZES_BYTES)))
    return tuple(curve)


@st.composite
def phases(draw: DrawFn, net_bytes: int = 0, measured: bool | None = True, gradient_bytes: int | None = None) -> Phase:
    """A phase of the given net bytes, of which ``gradient_bytes`` are gradients, with curves that agree with them.

    ``measured``: whether it carries seconds, None for either.
    """
    curve = _curves(draw, net_bytes)
    adding_curve: tuple[tuple[float, int], ...] = ()
    if gradient_bytes and draw(st.booleans()):
        # A gradient that goes as soon as it is final lowers levels by itself at most, and none below the first.
        adding_curve = tuple(
            (end, max(level - draw(st.integers(0, gradient_bytes)), 0 if place == 0 else level - gradient_bytes))
            for place, (end, level) in enumerate(curve)
        )
    is_measured = draw(st.booleans()) if measured is None else measured
    return Phase(
        operations=() if is_measured else tuple(draw(st.lists(operations(), max_size=2))),
        net_bytes=net_bytes,
        gradient_bytes=gradient_bytes,
        curve=curve,
        adding_curve=adding_curve,
        measured_s=draw(st.integers(0, 2000)) / 1000 if is_measured else None,
    )


@dataclass(frozen=True)
class _BlockKind:
    """What equal blocks share."""

    parameters: tuple[tuple[int, DType, bool], ...]
    """Elements, element type and trainability of each."""
    profile: BlockProfile


@st.composite
def _parameter_lists(
    draw: DrawFn, dtypes: SearchStrategy[DType], min_size: int, max_size: int
) -> tuple[tuple[int, DType, bool], ...]:
    trained = st.sampled_from((True, True, True, False))
    number = draw(st.integers(min_size, max_size))
    return tuple((draw(st.integers(0, 1000)), draw(dtypes), draw(trained)) for _ in range(number))


def _gradient_bytes(parameters: Sequence[tuple[int, DType, bool]]) -> int:
    return sum(elements * dtype.item_bytes for elements, dtype, trainable in parameters if trainable)


@st.composite
def _block_kinds(draw: DrawFn, dtypes: SearchStrategy[DType], min_parameters: int, measured: bool | None) -> _BlockKind:
    """A backward releases what its block saved and its output, and leaves the block's gradients.

    (It also exchanges the incoming gradient, of its output's size, for one of its input's, and releases that input.)
    A checkpointed forward may leave a little beside its output: the state of the random generator.  A block that runs
    under ``torch.no_grad()`` leaves no gradients; one that leaves all may not say so.
    """
    parameters = draw(_parameter_lists(dtypes, min_parameters, 4))
    gradient_bytes = draw(st.sampled_from((_gradient_bytes(parameters),) * 3 + (0,)))
    is_all = gradient_bytes == _gradient_bytes(parameters)
    stated_bytes = draw(st.sampled_from((gradient_bytes, None))) if is_all else gradient_bytes
    output_bytes, saved_bytes = draw(SIZES_BYTES), draw(SIZES_BYTES)
    recomputed_bytes = draw(st.integers(0, saved_bytes))
    generator_bytes = draw(st.sampled_from((0, 0, 5056)))
    return _BlockKind(
        parameters,
        BlockProfile(
            output_bytes=output_bytes,
            forward=draw(phases(output_bytes + saved_bytes, measured)),
            backward=draw(phases(gradient_bytes - saved_bytes - output_bytes, measured, stated_bytes)),
            checkpoint_forward=draw(phases(output_bytes + generator_bytes, measured)),
            recompute=draw(phases(recomputed_bytes, measured)),
            checkpoint_backward=draw(
                phases(gradient_bytes - recomputed_bytes - output_bytes - generator_bytes, measured, stated_bytes)
            ),
            swappable_bytes=draw(st.integers(0, saved_bytes)),
            selective=draw(_selective(output_bytes + generator_bytes, recomputed_bytes)),
        ),
    )


@st.composite
def _selective(draw: DrawFn, forward_bytes: int, recomputed_bytes: int) -> tuple[SelectiveRecomputation, ...]:
    """What a block keeps of the results of a forward that leaves ``forward_bytes`` beside them.

    A recomputation takes over what is kept, and may let more of it go than it makes.
    """
    kept_bytes = draw(SIZES_BYTES)
    unused_bytes = draw(st.integers(0, kept_bytes))
    return (
        SelectiveRecomputation(
            product_stride=1,
            kept_bytes=kept_bytes,
            unused_bytes=unused_bytes,
            forward_curve=_curves(draw, forward_bytes + kept_bytes),
            recompute=draw(phases(recomputed_bytes - (kept_bytes - unused_bytes), measured=False)),
        ),
    )


@st.composite
def _shared_inputs(draw: DrawFn, num_blocks: int) -> SharedInput:
    """A mask or the like, held by any blocks."""
    blocks = st.integers(0, num_blocks - 1)
    holders = st.sets(blocks).map(sorted).map(tuple)
    return SharedInput(
        size_bytes=draw(st.integers(1, 3_000)),
        let_go_by=draw(st.none() | blocks),
        kept_by=draw(holders),
        checkpointed_by=draw(holders),
        freed_in_kept=draw(holders),
        freed_in_checkpointed=draw(holders),
    )


@st.composite
def uses(draw: DrawFn, num_blocks: int) -> Uses:
    """Any sections: a tied head, an embedding of several, weights that blocks share, what a block alone would own."""
    sections = st.sampled_from(OuterSection) | st.integers(0, num_blocks - 1)
    users = st.lists(sections, max_size=3, unique=True).map(tuple)
    forward = draw(users.filter(len))
    backward = draw(st.just(forward) | users)
    return Uses(forward=forward, backward=backward, gradient=min((draw(sections), *backward), key=in_forward_order))


@st.composite
def workloads(draw: DrawFn, max_blocks: int = 6, measured: bool | None = True, min_parameters: int = 1) -> Workload:
    """Workloads of one to ``max_blocks`` blocks of several kinds, with parameters that no block alone uses anywhere.

    ``measured``: whether phases carry seconds (None: some do); without, they carry operations.
    ``min_parameters``: of each block.
    """
    dtypes = draw(st.sampled_from((st.just(DType.FLOAT32), st.just(DType.BFLOAT16), _TRAINED_DTYPES)))
    num_blocks = draw(st.integers(1, max_blocks))
    kinds = [
        draw(_block_kinds(dtypes, min_parameters, measured)) for _ in range(draw(st.integers(1, min(3, num_blocks))))
    ]
    kind_of_block = [draw(st.integers(0, len(kinds) - 1)) for _ in range(num_blocks)]
    parameters = [
        Parameter(name=f"layers.{block}.{place}", shape=(elements,), dtype=dtype, trainable=trainable, block=block)
        for block, kind in enumerate(kind_of_block)
        for place, (elements, dtype, trainable) in enumerate(kinds[kind].parameters)
    ]
    unowned = draw(_parameter_lists(dtypes, 0, 3))
    used = [draw(st.none() | uses(num_blocks)) for _ in unowned]
    for number, (elements, dtype, trainable) in enumerate(unowned):
        place = draw(st.integers(0, len(parameters)))
        aliases = ("tied",) if number == 0 and elements % 2 else ()
        parameters.insert(
            place,
            Parameter(
                name=f"unowned.{number}",
                shape=(elements, 1),
                dtype=dtype,
                trainable=trainable,
                uses=used[number],
                aliases=aliases,
            ),
        )
    embedded_bytes, loss_bytes = draw(SIZES_BYTES), draw(SIZES_BYTES)
    embedding_gradient_bytes, head_gradient_bytes = (
        _gradient_bytes([p for p, of_p in zip(unowned, used, strict=True) if (of_p and of_p.gradient) == completed])
        for completed in (OuterSection.PROLOGUE, OuterSection.EPILOGUE)
    )
    unknown_bytes = _gradient_bytes([p for p, of_p in zip(unowned, used, strict=True) if of_p is None])
    embedding_gradient_bytes += unknown_bytes
    return Workload(
        model_name="random",
        model_hash="0123456789abcdef",
        batch_shapes={"input_ids": (2, 8)},
        num_samples=2,
        num_tokens=16,
        compute_dtype=DType.FLOAT32,
        parameters=tuple(parameters),
        blocks=tuple(Block(name=f"layers.{block}", profile=kind) for block, kind in enumerate(kind_of_block)),
        profiles=tuple(kind.profile for kind in kinds),
        prologue_forward=draw(phases(embedded_bytes, measured)),
        epilogue_forward=draw(phases(loss_bytes, measured)),
        epilogue_backward=draw(phases(head_gradient_bytes - loss_bytes, measured, head_gradient_bytes)),
        prologue_backward=draw(phases(embedding_gradient_bytes - embedded_bytes, measured, embedding_gradient_bytes)),
        shared_inputs=tuple(draw(st.lists(_shared_inputs(num_blocks), max_size=3))),
        staying_inputs=tuple(sorted(draw(st.sets(st.integers(0, num_blocks - 1), max_size=2)))),
        resident_bytes=draw(SIZES_BYTES),
        traced_with="real",
        measured_on="random machine" if measured else None,
    )
