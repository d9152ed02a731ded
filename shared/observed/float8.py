"""What a section does where products of its linear maps are computed in float8.

[Note: Float8 products]
A linear map has three products: of the input and the weight, of the output's gradient and the weight, and of that
gradient and the input.  All three read operands of one byte and write what they wrote before.  Units multiply rows of
16 elements, so that a map whose sizes are no multiples of 16 stays as it is; so does everything outside of the blocks,
the head above all (torchtitan's ``filter_fqns``), attention, and embeddings.

Products read both operands along the summed dimension, so that each tensor is wanted in two layouts.  Scaling and casts
move (torchao's own count, ``torchao/testing/training/roofline_utils.py``, and Transformer Engine's
``cast_transpose``), in bytes of one element, where one of the wide type has w:

=========  ================================  ===============================  =====================
tensor     tensorwise                        rowwise                          delayed
=========  ================================  ===============================  =====================
input      read w; read w, write 1 + 1       read w, write 1 + w; w, 1        read w, write 1 + 1
weight     read w; read w, write 1; w, 1     w, 1; read w, write w; w, 1      read w, write 1 + 1
gradient   read w; read w, write 1 + 1       read w, write 1 + w; w, 1        read w, write 1 + 1
=========  ================================  ===============================  =====================

The first read of tensorwise finds the largest element, for which a whole tensor has to be there before it is cast.
Where nothing is saved, the second layout of an input is not made.  Maps that follow one another read one cast input
where the graph is compiled.  What is saved stays in the wide type, as for an input that is cast again; a compiled graph
may save the narrow one instead, which nobody has counted here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from ..schema.workload import DType, Float8, OperationClass
from .observation import Observation, OperatorCall

LARGEST: Final = "float8_largest"
"""The search of the largest element."""
CAST: Final = "float8_cast"
MULTIPLE: Final = 16
"""Of which all sizes of a product have to be multiples (``torch._scaled_mm``; torchao's ``module_filter_fn``)."""
_PRODUCTS: Final = frozenset({"mm", "addmm"})
_WIDE: Final = frozenset({DType.BFLOAT16, DType.FLOAT16})


@dataclass(frozen=True, slots=True)
class _Pass:
    """A kernel over one tensor: how often it reads and writes an element of the wide type, and writes one of a byte."""

    reads: int = 0
    writes: int = 0
    casts: int = 0


_LARGEST = _Pass(reads=1)
_CAST = _Pass(reads=1, casts=1)
_CAST_TWICE = _Pass(reads=1, casts=2)
_TURN = _Pass(reads=1, writes=1)
_CAST_AND_TURN = _Pass(reads=1, writes=1, casts=1)
_INPUT: Final = {
    Float8.TENSORWISE: (_LARGEST, _CAST_TWICE),
    Float8.ROWWISE: (_CAST_AND_TURN, _CAST),
    Float8.DELAYED: (_CAST_TWICE,),
}
_INPUT_ALONE: Final = {
    Float8.TENSORWISE: (_LARGEST, _CAST),
    Float8.ROWWISE: (_CAST,),
    Float8.DELAYED: (_CAST,),
}
"""Where nothing is saved."""
_WEIGHT: Final = {
    Float8.TENSORWISE: (_LARGEST, _CAST),
    Float8.ROWWISE: (_CAST,),
    Float8.DELAYED: (_CAST_TWICE,),
}
_WEIGHT_AGAIN: Final[dict[Float8, tuple[_Pass, ...]]] = {
    Float8.TENSORWISE: (_CAST,),
    Float8.ROWWISE: (_TURN, _CAST),
    Float8.DELAYED: (),
}
"""In backward."""


def is_eligible(call: OperatorCall) -> bool:
    """Whether a call is a product of a linear map that may be computed in float8."""
    return (
        call.name in _PRODUCTS
        and call.dtype in _WIDE
        and len(call.shape) == 4
        and call.shape[0] == 1
        and all(size and size % MULTIPLE == 0 for size in call.shape[1:])
    )


def forward_in_float8(seen: Observation, scaling: Float8, *, is_saved: bool, is_compiled: bool) -> Observation:
    """A forward, or a recomputation, with eligible products in float8; ``is_saved``: for a backward."""
    inputs = (_INPUT if is_saved else _INPUT_ALONE)[scaling]
    made: list[tuple[int, OperatorCall]] = []
    before: OperatorCall | None = None
    for index, call in enumerate(seen.calls):
        if is_eligible(call):
            _, rows, columns, width = call.shape
            is_same = is_compiled and before is not None and (before.shape[1], before.shape[3]) == (rows, width)
            if not is_same:
                made += _passes(index, inputs, rows * width, call.dtype)
            made += _passes(index, _WEIGHT[scaling], width * columns, call.dtype)
        made.append((index, _narrow(call)))
        before = call if is_eligible(call) else None
    return _with(seen, made)


def backward_in_float8(seen: Observation, scaling: Float8, num_tokens: int) -> Observation:
    """A backward with eligible products in float8."""
    made: list[tuple[int, OperatorCall]] = []
    for index, call in enumerate(seen.calls):
        if is_eligible(call) and call.shape[3] != num_tokens:  # of the input; its weight's has the same gradient
            _, rows, columns, width = call.shape
            made += _passes(index, _INPUT[scaling], rows * width, call.dtype)
            made += _passes(index, _WEIGHT_AGAIN[scaling], width * columns, call.dtype)
        made.append((index, _narrow(call)))
    return _with(seen, made)


def _narrow(call: OperatorCall) -> OperatorCall:
    """The product with operands of one byte."""
    if not is_eligible(call):
        return call
    _, rows, columns, width = call.shape
    bias = call.reads[:-2]
    operands = [*bias, (len(bias), rows * width), (len(bias) + 1, width * columns)]
    return replace(call, dtype=DType.FLOAT8_E4M3FN, reads=tuple((n, size) for n, (_, size) in enumerate(operands)))


def _passes(index: int, passes: Sequence[_Pass], num_elements: int, dtype: DType) -> list[tuple[int, OperatorCall]]:
    wide = num_elements * dtype.item_bytes
    return [
        (
            index,
            OperatorCall(
                name=CAST if one.casts or one.writes else LARGEST,
                operation_class=OperationClass.ELEMENTWISE if one.casts or one.writes else OperationClass.REDUCTION,
                dtype=dtype,
                flops=num_elements,
                reads=((0, one.reads * wide),),
                writes_bytes=(*[wide] * one.writes, *[num_elements] * one.casts),
            ),
        )
        for one in passes
    ]


def _with(seen: Observation, made: Sequence[tuple[int, OperatorCall]]) -> Observation:
    """``seen`` with other calls, each at the place of a call of before."""
    calls = [call for _, call in made]
    return replace(
        seen,
        calls=calls,
        operations=[call.operation() for call in calls],
        levels=[seen.levels[index] for index, _ in made],
        adding_levels=[seen.adding_levels[index] for index, _ in made],
    )
