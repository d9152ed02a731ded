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
result     -                                 backward: read w, write w        -
=========  ================================  ===============================  =====================

The first read of tensorwise finds the largest element, for which a whole tensor has to be there before it is cast.
Products of backward accumulate exactly (``use_fast_accum`` is off), for which the kernel of rows was so slow that
torchao multiplies without scales and scales the result (``addmm_float8_unwrapped`` in torchao's ``float8_ops.py``): at
least one kernel more for each product (github.com/pytorch/ao/issues/2184).

A weight that ranks gather in float8 (``Parameter.gathered_dtype``) comes cast: forward reads it as it is, and backward,
which wants it in the other layout, turns it, reading and writing 1 (``preprocess_addmm`` there).  The turned one goes
with the product.

Where nothing is saved, the second layout of an input is not made.  Maps that follow one another read one cast input
where the graph is compiled.  A compiled graph casts what it computes again in backward ([Note: What compiled blocks
save] in ``compiled.py``); what is saved of the rest stays in the wide type.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from ..basics.errors import WorkloadError
from ..phases.parameters import Parameter
from ..schema.workload import DType, Float8, OperationClass
from .observation import Observation, OperatorCall

LARGEST: Final = "float8_largest"
"""The search of the largest element."""
CAST: Final = "float8_cast"
RESCALE: Final = "float8_rescale"
"""Scales of rows and columns, of a product that was computed without them."""
MULTIPLE: Final = 16
"""Of which all sizes of a product have to be multiples (``torch._scaled_mm``; torchao's ``module_filter_fn``)."""
_PRODUCTS: Final = frozenset({"mm", "addmm"})
_WIDE: Final = frozenset({DType.BFLOAT16, DType.FLOAT16})


@dataclass(frozen=True, slots=True)
class _Pass:
    """A kernel over one tensor: how often it reads and writes an element of the wide type, and one of a byte."""

    reads: int = 0
    writes: int = 0
    casts: int = 0
    narrow_reads: int = 0
    name: str = CAST


_LARGEST = _Pass(reads=1, name=LARGEST)
_CAST = _Pass(reads=1, casts=1)
_CAST_TWICE = _Pass(reads=1, casts=2)
_TURN = _Pass(reads=1, writes=1)
_CAST_AND_TURN = _Pass(reads=1, writes=1, casts=1)
_TURN_NARROW = _Pass(narrow_reads=1, casts=1)
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
_RESULT: Final[dict[Float8, tuple[_Pass, ...]]] = {Float8.ROWWISE: (_Pass(reads=1, writes=1, name=RESCALE),)}
"""Of products of backward."""


def is_eligible(call: OperatorCall) -> bool:
    """Whether a call is a product of a linear map that may be computed in float8."""
    return (
        call.name in _PRODUCTS
        and call.dtype in _WIDE
        and len(call.shape) == 4
        and call.shape[0] == 1
        and all(size and size % MULTIPLE == 0 for size in call.shape[1:])
    )


def gathered_narrow(
    parameters: Sequence[Parameter], stands_for: Sequence[int], forwards: Mapping[int, Iterable[OperatorCall]]
) -> tuple[Parameter, ...]:
    """``parameters``, of which weights of products in float8 are gathered so.

    ``stands_for``: for every block, the observed one that does the same; ``forwards``: the calls of these.  Raises
    WorkloadError if it is not known which weights a block's products read.
    """
    used = {
        block: Counter(frozenset(call.shape[2:]) for call in calls if call.dtype is DType.FLOAT8_E4M3FN)
        for block, calls in forwards.items()
    }
    found = list(parameters)
    left = [Counter(used[seen]) for seen in stands_for]
    for index, parameter in enumerate(parameters):
        if parameter.block is None or parameter.dtype not in _WIDE or len(parameter.shape) != 2:
            continue
        sizes = frozenset(parameter.shape)
        if sizes in used[stands_for[parameter.block]]:
            left[parameter.block][sizes] -= 1
            found[index] = parameter.model_copy(update={"gathered_dtype": DType.FLOAT8_E4M3FN})
    for block, counts in enumerate(left):
        if any(counts.values()):
            raise WorkloadError(
                f"weights of block {block} are to be gathered in float8, but its products in float8 and its weights of "
                f"16 bits of the same sizes are not equally many, so that it is not known which are gathered so. "
                f"Leave --float8-gather out."
            )
    return tuple(found)


def forward_in_float8(
    seen: Observation, scaling: Float8, *, is_saved: bool, is_compiled: bool, is_gathered: bool = False
) -> Observation:
    """A forward, or a recomputation, with eligible products in float8.

    ``is_saved``: for a backward; ``is_gathered``: weights are gathered so.
    """
    weights = () if is_gathered else _WEIGHT[scaling]
    inputs = (_INPUT if is_saved else _INPUT_ALONE)[scaling]
    made: list[tuple[int, OperatorCall]] = []
    before: OperatorCall | None = None
    for index, call in enumerate(seen.calls):
        if is_eligible(call):
            _, rows, columns, width = call.shape
            is_same = is_compiled and before is not None and (before.shape[1], before.shape[3]) == (rows, width)
            if not is_same:
                made += _passes(index, inputs, rows * width, call.dtype)
            made += _passes(index, weights, width * columns, call.dtype)
        made.append((index, _narrow(call)))
        before = call if is_eligible(call) else None
    return _with(seen, made)


def backward_in_float8(
    seen: Observation,
    forward: Sequence[OperatorCall],
    scaling: Float8,
    num_tokens: int,
    *,
    is_gathered: bool = False,
) -> Observation:
    """A backward with eligible products in float8.

    ``forward``: the calls of the whole forward; ``is_gathered``: weights are gathered so.
    """
    weights = (_TURN_NARROW,) if is_gathered else _WEIGHT_AGAIN[scaling]
    # A map with as many outputs as tokens has two products of one shape: its input's gradient first, if it has both.
    twice = Counter(call.shape[2:] for call in forward if is_eligible(call) and call.shape[2] == num_tokens)
    made: list[tuple[int, OperatorCall]] = []
    for index, call in enumerate(seen.calls):
        is_of_input = is_eligible(call) and call.shape[1] == num_tokens
        if is_of_input and call.shape[3] == num_tokens:
            sizes = (num_tokens, call.shape[2])
            is_of_input = twice[sizes] > 0
            twice[sizes] -= 1
        if is_of_input:  # its weight's has the same gradient
            _, rows, columns, width = call.shape
            made += _passes(index, _INPUT[scaling], rows * width, call.dtype)
            made += _passes(index, weights, width * columns, call.dtype)
        made.append((index, _narrow(call)))
        if is_eligible(call):
            made += _passes(index, _RESULT.get(scaling, ()), call.shape[1] * call.shape[2], call.dtype)
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
                name=one.name,
                operation_class=OperationClass.ELEMENTWISE if one.casts or one.writes else OperationClass.REDUCTION,
                dtype=dtype,
                flops=num_elements,
                reads=((0, one.reads * wide + one.narrow_reads * num_elements),),
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
