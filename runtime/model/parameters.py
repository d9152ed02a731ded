"""A model's parameters as the schema describes them: in execution order, each with the block that owns it."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from ...shared.schema.workload import DType, Parameter
from .blocks import NamedBlock


def describe_parameters(model: nn.Module, blocks: Sequence[NamedBlock]) -> tuple[Parameter, ...]:
    """All parameters in execution order: those registered before the blocks, the blocks', the others."""
    names: dict[int, list[str]] = {}
    tensors: dict[int, nn.Parameter] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
        tensors[id(parameter)] = parameter
    owners: dict[int, set[int]] = {}
    for index, block in enumerate(blocks):
        for parameter in block.module.parameters():
            owners.setdefault(id(parameter), set()).add(index)
    prefixes = tuple(f"{block.name}." for block in blocks)
    outside = {key for key in tensors if any(not name.startswith(prefixes) for name in names[key])}
    found: list[tuple[tuple[int, int], Parameter]] = []
    order = list(tensors)
    first_block = min((i for i, key in enumerate(order) if key not in outside), default=0)
    for place, key in enumerate(order):
        # A parameter that two blocks share, or a block and the rest, belongs to neither: it must stay resident.
        is_owned = key not in outside and len(owners.get(key, ())) == 1
        block_index = next(iter(owners[key])) if is_owned else None
        rank = block_index + 1 if block_index is not None else (0 if place < first_block else len(blocks) + 1)
        tensor = tensors[key]
        parameter_of_schema = Parameter(
            name=names[key][0],
            shape=tuple(tensor.shape),
            dtype=DType(str(tensor.dtype).removeprefix("torch.")),
            trainable=tensor.requires_grad,
            block=block_index,
            aliases=tuple(names[key][1:]),
        )
        found.append(((rank, place), parameter_of_schema))
    return tuple(parameter for _, parameter in sorted(found, key=lambda item: item[0]))


def compute_dtype(parameters: Sequence[Parameter]) -> DType:
    """The dtype of most scalars."""
    sizes: dict[DType, int] = {}
    for parameter in parameters:
        sizes[parameter.dtype] = sizes.get(parameter.dtype, 0) + parameter.num_elements
    return max(sizes, key=lambda dtype: sizes[dtype])
