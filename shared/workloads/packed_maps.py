"""What packed weights change of a model with adapters: its parameters, and what is done before each product with them.

[Note: From 16 bit to few]
A product with a packed weight is the product with the weight itself, but that the weight is unpacked right before it
and goes right behind it, in forward and in backward.  All else is as with weights that are not packed
(``runtime/quantized/spelled_out.py``, and bitsandbytes' own backward).  What is unpacked, and in which steps, was read
off traces; tests compare whole models with theirs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from ..families.family import FamilyPiece
from ..observed.assembly import TracedShape
from ..observed.observation import Observation, OperatorCall
from ..phases.quantization import BLOCKSIZE, NESTED_BLOCKSIZE, NUM_CODES, NUM_NESTED_CODES, Quantization, QuantizedType
from ..schema.schedule import TaskKind
from ..schema.workload import DType, Parameter
from .grouped_maps import GROUPED_CLASS, Written, elementwise, grouped_parameters, unpacking_groups

PACKED_CLASSES: Final = {
    QuantizedType.NF4: "Linear4bit",
    QuantizedType.FP4: "Linear4bit",
    QuantizedType.INT8: "Linear8bitLt",
    QuantizedType.GPTQ: GROUPED_CLASS,
    QuantizedType.GPTQ_8BIT: GROUPED_CLASS,
}
"""What the classes of maps with packed weights are called."""
_PRODUCTS: Final = ("mm", "addmm")
_FLOAT: Final = DType.FLOAT32.item_bytes
Sizes = tuple[int, int]
"""(inputs, outputs) of a map."""


def packed_parameters(
    parameters: Sequence[Parameter], packed: Mapping[str, Sizes], how: Quantization
) -> Iterator[Parameter]:
    """``parameters`` with the weights of ``packed`` (by the maps' paths) packed, and what unpacks them behind each map.

    A map's state comes behind its bias.
    """
    state: list[Parameter] = []
    owner = ""
    for parameter in parameters:
        path, _, leaf = parameter.name.rpartition(".")
        if path != owner:
            yield from state
            state, owner = [], path
        if path not in packed or leaf != "weight":
            yield parameter
            continue
        if how.type.is_grouped:
            yield from grouped_parameters(parameter, path, packed[path], how)
            continue
        num_in, num_out = packed[path]
        shapes = _state_shapes(num_in * num_out, num_out, how)
        (shape, dtype), rest = shapes.pop("weight"), shapes
        state = [
            parameter.model_copy(
                update={"name": f"{path}.{name}", "shape": each, "dtype": kind, "num_scalars": 0, "trainable": False}
            )
            for name, (each, kind) in rest.items()
        ]
        packed_weight: dict[str, Any] = {"dtype": dtype, "quantized": how, "num_scalars": num_in * num_out}
        yield parameter.model_copy(update={**packed_weight, "shape": shape or (num_out, num_in), "trainable": False})
    yield from state


def _state_shapes(num_scalars: int, num_out: int, how: Quantization) -> dict[str, tuple[tuple[int, ...], DType]]:
    """Shape and element type of a packed weight and of its state, by name; an empty shape stands for the weight's."""
    if how.type is QuantizedType.INT8:
        return {"weight": ((), DType.INT8), "weight_scale": ((num_out,), DType.FLOAT32)}
    num_scales = -(-num_scalars // (how.blocksize or BLOCKSIZE))
    found = {
        "weight": ((-(-num_scalars // 2), 1), DType.UINT8),
        "weight_absmax": ((num_scales,), DType.UINT8 if how.double else DType.FLOAT32),
        "weight_code": ((NUM_CODES,), DType.FLOAT32),
    }
    if how.double:
        found |= {
            "weight_offset": ((), DType.FLOAT32),
            "weight_nested_absmax": ((-(-num_scales // NESTED_BLOCKSIZE),), DType.FLOAT32),
            "weight_nested_code": ((NUM_NESTED_CODES,), DType.FLOAT32),
        }
    return found


def unpacking(
    maps: Sequence[Sizes], dtype: DType, how: Quantization
) -> Callable[[TracedShape, FamilyPiece, tuple[int, ...]], TracedShape]:
    """What unpacking the weights of all linear maps of the blocks changes of what a trace sees.

    ``maps``: their sizes; no rank of adapters is among these.  ``dtype``: what products compute in.
    """
    if how.type.is_grouped:
        return unpacking_groups(maps, dtype, how)
    sizes = frozenset(maps)

    def change(shape: TracedShape, *_: object) -> TracedShape:
        observed = {
            mode: {
                key: _unpacked(seen, key[0], sizes, dtype, how) if isinstance(key[1], int) else seen
                for key, seen in sections.items()
            }
            for mode, sections in shape.observed.items()
        }
        return replace(shape, observed=observed)

    return change


def _unpacked(
    observation: Observation, kind: TaskKind, maps: frozenset[Sizes], dtype: DType, how: Quantization
) -> Observation:
    """A section of a block with each product's weight unpacked before it."""
    is_backward = kind is TaskKind.BACKWARD
    written = Written()
    for call, level, adding in zip(observation.calls, observation.levels, observation.adding_levels, strict=True):
        found = _map_of(call, maps, dtype, is_backward=is_backward)
        if found is None:
            written.held_bytes = 0
            written.add(call, level, level - adding)
            continue
        # What the dense product frees before it begins goes before its weight is unpacked.
        start = level - sum(call.writes_bytes)
        steps, left_bytes = _steps(found, dtype, how, is_backward=is_backward)
        for step, held_bytes in steps:
            written.held_bytes = held_bytes
            written.add(step, start, level - adding)
        written.held_bytes -= left_bytes
        written.add(call, level, level - adding)
    return replace(
        observation,
        calls=written.calls,
        operations=[call.operation() for call in written.calls],
        levels=written.levels,
        adding_levels=written.adding_levels,
    )


def _map_of(call: OperatorCall, maps: frozenset[Sizes], dtype: DType, *, is_backward: bool) -> Sizes | None:
    """Of the linear map whose product a call is, forward's or that of its input's gradient; None if it is none."""
    if call.name not in _PRODUCTS or len(call.shape) != 4:
        return None
    num_out, num_in = reversed(call.shape[2:]) if is_backward else call.shape[2:]
    is_weight = call.reads[-1][1] == num_out * num_in * dtype.item_bytes
    return (num_in, num_out) if is_weight and (num_in, num_out) in maps else None


def _steps(
    sizes: Sizes, dtype: DType, how: Quantization, *, is_backward: bool
) -> tuple[list[tuple[OperatorCall, int]], int]:
    """The calls that unpack a weight, each with the bytes that are there behind it, and what goes before the product.

    The rest goes behind the product.
    """
    num_in, num_out = sizes
    count = num_in * num_out
    weight_bytes = count * dtype.item_bytes
    if how.type is QuantizedType.INT8:
        scales_bytes = num_out * _FLOAT
        both_bytes = weight_bytes + scales_bytes
        return [
            (elementwise("_to_copy", dtype, count, (count,), weight_bytes), weight_bytes),
            (elementwise("mul", DType.FLOAT32, num_out, (scales_bytes,), scales_bytes), both_bytes),
            (elementwise("mul_", dtype, count, (weight_bytes, scales_bytes), weight_bytes), both_bytes),
        ], scales_bytes
    num_scales = -(-count // (how.blocksize or BLOCKSIZE))
    scales_bytes = num_scales * _FLOAT
    whole = elementwise("bitsandbytes::dequantize_4bit", dtype, count, (-(-count // 2), scales_bytes), weight_bytes)
    if not how.double:
        return [(whole, weight_bytes)], 0
    nested_bytes = -(-num_scales // NESTED_BLOCKSIZE) * _FLOAT
    read = (num_scales, nested_bytes, NUM_NESTED_CODES * _FLOAT)
    scales = elementwise("bitsandbytes::dequantize_blockwise", DType.FLOAT32, num_scales, read, scales_bytes)
    name = "add_" if is_backward else "add"
    added = elementwise(name, DType.FLOAT32, num_scales, (scales_bytes, _FLOAT), scales_bytes)
    # Forward adds into a tensor of its own, and lets its scales go behind the product; backward before it.
    at_once = scales_bytes if is_backward else 2 * scales_bytes
    steps = [(scales, scales_bytes), (added, at_once), (whole, weight_bytes + scales_bytes)]
    return steps, scales_bytes if is_backward else 0
