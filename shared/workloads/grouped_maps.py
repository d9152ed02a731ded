"""What weights in the layout of GPTQ change of a model with adapters: its parameters, and its sections.

[Note: From 16 bit to groups]
A product with such a weight is the product with the weight itself, behind a chain of torch's own operations that
unpacks it (``runtime/quantized/gptq.py``).  Autograd knows nothing of packing: what comes out of the chain is saved for
the gradient of the product's input, from forward, or recomputation, until that gradient is there.  A bias is added by
an operation of its own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from ..families.family import FamilyPiece
from ..observed.assembly import TracedShape
from ..observed.observation import Observation, OperatorCall
from ..phases.quantization import WORD_BITS, Quantization
from ..schema.schedule import TaskKind
from ..schema.workload import DType, OperationClass, Parameter

GROUPED_CLASS: Final = "GptqLinear"
"""What the class of maps in this layout is called."""
_PRODUCTS: Final = ("mm", "addmm")
_WORD: Final = DType.INT32.item_bytes
Sizes = tuple[int, int]
"""(inputs, outputs) of a map."""
Steps = Sequence[tuple[OperatorCall, int]]
"""Calls, each with the bytes that are there behind it."""


def grouped_parameters(weight: Parameter, path: str, sizes: Sizes, how: Quantization) -> Iterator[Parameter]:
    """The parameters of the map at ``path`` in the place of its ``weight``."""
    num_in, num_out = sizes
    assert how.blocksize is not None
    per_word, num_groups = WORD_BITS // how.type.bits, num_in // how.blocksize
    shapes: dict[str, tuple[tuple[int, ...], DType]] = {
        "qweight": ((num_in // per_word, num_out), DType.INT32),
        "qzeros": ((num_groups, num_out // per_word), DType.INT32),
        "scales": ((num_groups, num_out), weight.dtype),
        "g_idx": ((num_in,), DType.INT32),
        "shifts": ((per_word,), DType.INT32),
    }
    for name, (shape, dtype) in shapes.items():
        packed: dict[str, Any] = {"quantized": how, "num_scalars": num_in * num_out} if name == "qweight" else {}
        changed = {"name": f"{path}.{name}", "shape": shape, "dtype": dtype, "trainable": False, "num_scalars": 0}
        yield weight.model_copy(update=changed | packed)


def unpacking_groups(
    maps: Sequence[Sizes], dtype: DType, how: Quantization
) -> Callable[[TracedShape, FamilyPiece, tuple[int, ...]], TracedShape]:
    """What unpacking the weights of all linear maps of the blocks changes of what a trace sees.

    ``maps``: their sizes; no rank of adapters is among these.  ``dtype``: what products compute in.
    """
    sizes = frozenset(maps)

    def change(shape: TracedShape, *_: object) -> TracedShape:
        observed = {}
        for mode, sections in shape.observed.items():
            changed = dict(sections)
            for key, seen in sections.items():
                kind, section = key
                if not isinstance(section, int):
                    continue
                backward = sections[TaskKind.BACKWARD, section]
                saved = Counter(found for call in backward.calls if (found := _behind(call, sizes, dtype)) is not None)
                is_saving = (TaskKind.RECOMPUTE, section) not in sections or kind is not TaskKind.FORWARD
                if kind is TaskKind.BACKWARD:
                    changed[key] = _freed(seen, sizes, dtype)
                else:
                    changed[key] = _unpacked(seen, sizes, dtype, how, saved if is_saving else Counter())
            observed[mode] = changed
        return replace(shape, observed=observed)

    return change


@dataclass
class Written:
    """A section as it is written anew."""

    calls: list[OperatorCall] = field(default_factory=list)
    levels: list[int] = field(default_factory=list)
    adding_levels: list[int] = field(default_factory=list)
    saved_bytes: list[int] = field(default_factory=list)
    held_bytes: int = 0
    """Of unpacked weights that stay."""

    def add(self, call: OperatorCall, level: int, final_bytes: int) -> None:
        """A call behind which the dense section, and what unpacks, have ``level``.  ``final_bytes``: of gradients."""
        self.calls.append(call)
        self.levels.append(level + self.held_bytes)
        self.adding_levels.append(level + self.held_bytes - final_bytes)

    def of(self, seen: Observation) -> Observation:
        """``seen``, written anew."""
        return replace(
            seen,
            calls=self.calls,
            operations=[call.operation() for call in self.calls],
            levels=self.levels,
            adding_levels=self.adding_levels,
            end_bytes=seen.end_bytes + self.held_bytes,
            saved_bytes=[*seen.saved_bytes, *self.saved_bytes] if seen.saved_bytes else seen.saved_bytes,
        )


def _unpacked(
    seen: Observation, maps: frozenset[Sizes], dtype: DType, how: Quantization, saved: Counter[Sizes]
) -> Observation:
    """Forward or recomputation of a block.  ``saved``: of how many products the weight is saved, by sizes.

    What comes before the first trained parameter needs no gradient, so that these are the last ones.
    """
    of_sizes = [_ahead(call, maps, dtype) for call in seen.calls]
    unsaved = Counter(found for found in of_sizes if found is not None)
    unsaved.subtract(saved)
    written = Written()
    for call, sizes, level, adding in zip(seen.calls, of_sizes, seen.levels, seen.adding_levels, strict=True):
        final_bytes = level - adding
        if sizes is None:
            written.add(call, level, final_bytes)
            continue
        (made_bytes,) = call.writes_bytes
        start = level - made_bytes
        for step, held_bytes in _steps(sizes, dtype, how):
            written.add(step, start + held_bytes, final_bytes)
        weight_bytes = sizes[0] * sizes[1] * dtype.item_bytes
        is_saved = unsaved[sizes] <= 0
        unsaved[sizes] -= 1
        if is_saved:
            written.held_bytes += weight_bytes
            written.saved_bytes.append(weight_bytes)
        product, bias = _without_bias(call)
        written.add(product, level if is_saved else level + weight_bytes, final_bytes)
        if bias is not None:
            written.add(bias, level + made_bytes, final_bytes)
    return written.of(seen)


def _freed(seen: Observation, maps: frozenset[Sizes], dtype: DType) -> Observation:
    """Backward of a block: each saved weight goes behind the product that gives its input's gradient."""
    written = Written()
    for call, level, adding in zip(seen.calls, seen.levels, seen.adding_levels, strict=True):
        written.add(call, level, level - adding)
        sizes = _behind(call, maps, dtype)
        if sizes is not None:
            written.held_bytes -= sizes[0] * sizes[1] * dtype.item_bytes
    return written.of(seen)


def _ahead(call: OperatorCall, maps: frozenset[Sizes], dtype: DType) -> Sizes | None:
    """Of the linear map whose product a call is; None if it is none."""
    return _sizes(call, tuple(call.shape[2:]), maps, dtype)


def _behind(call: OperatorCall, maps: frozenset[Sizes], dtype: DType) -> Sizes | None:
    """Of the linear map of whose input's gradient a call is the product; None if it is none."""
    return _sizes(call, tuple(reversed(call.shape[2:])), maps, dtype)


def _sizes(call: OperatorCall, out_and_in: tuple[int, ...], maps: frozenset[Sizes], dtype: DType) -> Sizes | None:
    if call.name not in _PRODUCTS or len(call.shape) != 4:
        return None
    num_out, num_in = out_and_in
    is_weight = call.reads[-1][1] == num_out * num_in * dtype.item_bytes
    return (num_in, num_out) if is_weight and (num_in, num_out) in maps else None


def _without_bias(call: OperatorCall) -> tuple[OperatorCall, OperatorCall | None]:
    """A product, and the addition of its bias behind it."""
    if call.name != "addmm":
        return call, None
    (_, bias_bytes), *rest = call.reads
    (made_bytes,) = call.writes_bytes
    product = replace(call, name="mm", reads=tuple((number, size) for number, (_, size) in enumerate(rest)))
    count = made_bytes // call.dtype.item_bytes
    return product, elementwise("add", call.dtype, count, (made_bytes, bias_bytes), made_bytes)


def _steps(sizes: Sizes, dtype: DType, how: Quantization) -> Steps:
    """The calls that unpack a weight, each with the bytes that are there behind it."""
    num_in, num_out = sizes
    assert how.blocksize is not None
    bits = how.type.bits
    narrow = DType.INT8 if bits < DType.INT8.item_bytes * 8 else DType.INT16
    count, zeros = num_in * num_out, num_in // how.blocksize * num_out
    shifts_bytes = WORD_BITS // bits * _WORD
    few, few_zeros = count * narrow.item_bytes, zeros * narrow.item_bytes
    weight_bytes = count * dtype.item_bytes
    found: list[tuple[OperatorCall, int]] = []

    def add(name: str, kind: DType, number: int, reads: tuple[int, ...], writes_bytes: int, there_bytes: int) -> None:
        found.append((elementwise(name, kind, number, reads, writes_bytes), there_bytes))

    for number, narrow_bytes, before in ((zeros, few_zeros, 0), (count, few, few_zeros)):
        wide = number * _WORD
        add("bitwise_right_shift", DType.INT32, number, (number * bits // 8, shifts_bytes), wide, before + wide)
        add("_to_copy", narrow, number, (wide,), narrow_bytes, before + wide + narrow_bytes)
        add("bitwise_and_", narrow, number, (narrow_bytes,), narrow_bytes, before + narrow_bytes)
        if not before:
            add("add", narrow, number, (narrow_bytes,), narrow_bytes, 2 * narrow_bytes)
    add("sub", narrow, count, (few, few_zeros), few, few_zeros + 2 * few)
    scales_bytes = zeros * dtype.item_bytes
    add("mul", dtype, count, (scales_bytes, few), weight_bytes, few_zeros + 2 * few + weight_bytes)
    return found


def elementwise(name: str, dtype: DType, flops: int, reads: Sequence[int], writes_bytes: int) -> OperatorCall:
    """An operation that reads tensors of ``reads`` bytes and writes one."""
    return OperatorCall(
        name=name,
        operation_class=OperationClass.ELEMENTWISE,
        dtype=dtype,
        flops=flops,
        reads=tuple(enumerate(reads)),
        writes_bytes=(writes_bytes,),
    )
