"""A model's parameters as the schema describes them: in execution order, each with the sections that use it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Self

from torch import nn

from ...shared.schema.workload import BlockId, DType, OuterSection, Parameter, Section, Uses, in_forward_order
from .blocks import NamedBlock

_VALUES: Final = frozenset({"data", "T", "mT", "H", "mH", "real", "imag"})
"""Attributes that give values."""
_FACTS: Final = frozenset(
    {
        "_is_zerotensor",
        "data_ptr",
        "dim",
        "element_size",
        "get_device",
        "is_complex",
        "is_conj",
        "is_contiguous",
        "is_floating_point",
        "is_neg",
        "is_signed",
        "ndimension",
        "nelement",
        "numel",
        "register_hook",
        "register_post_accumulate_grad_hook",
        "requires_grad_",
        "retain_grad",
        "size",
        "storage_offset",
        "stride",
        "untyped_storage",
    }
)
"""Methods that read no value."""


@dataclass(slots=True)
class SeenUses:
    """The sections that were seen to use one parameter."""

    forward: set[Section] = field(default_factory=set)
    backward: set[Section] = field(default_factory=set)
    """Recomputation included."""
    gradient: set[Section] = field(default_factory=set)
    """Those in whose backward its gradient became final, in one iteration or another."""

    def join(self, other: SeenUses) -> Self:
        """Add what ``other`` has seen."""
        self.forward |= other.forward
        self.backward |= other.backward
        self.gradient |= other.gradient
        return self


@dataclass(frozen=True, slots=True)
class TracedUses:
    """The uses that a trace has seen, in a model whose rows of blocks may have been shorter."""

    by_name: Mapping[str, SeenUses]
    """By the names of parameters in the traced model."""
    block_names: Sequence[str]
    """Of the traced model."""
    stands_for: Sequence[int]
    """For every block of the model itself, the traced one that does the same."""

    def of(self, names: Iterable[str], blocks: Sequence[NamedBlock]) -> SeenUses:
        """What was seen of the parameter that the model itself calls ``names``."""
        found = SeenUses()
        for name in names:
            block = next((i for i, block in enumerate(blocks) if name.startswith(f"{block.name}.")), None)
            if block is not None:
                name = self.block_names[self.stands_for[block]] + name.removeprefix(blocks[block].name)
            if name in self.by_name:
                seen = self.by_name[name]
                found.forward |= self._sections(seen.forward, block)
                found.backward |= self._sections(seen.backward, block)
                found.gradient |= self._sections(seen.gradient, block)
        return found

    def _sections(self, seen: Iterable[Section], owner: int | None) -> set[Section]:
        """The sections of the model itself that those which were seen may stand for; its own block for the owner's."""
        found: set[Section] = set()
        for section in seen:
            if isinstance(section, OuterSection):
                found.add(section)
            elif owner is not None and self.stands_for[owner] == section:
                found.add(BlockId(owner))
            else:
                found.update(BlockId(block) for block, traced in enumerate(self.stands_for) if traced == section)
        return found


def describe_parameters(
    model: nn.Module, blocks: Sequence[NamedBlock], seen: TracedUses | None = None
) -> tuple[Parameter, ...]:
    """All parameters in execution order: those registered before the blocks, the blocks', the others.

    ``seen``: what a trace has seen of their uses.  A block is taken to use all its parameters, whether it was seen to
    or not.
    """
    names: dict[int, list[str]] = {}
    tensors: dict[int, nn.Parameter] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
        tensors[id(parameter)] = parameter
    owners: dict[int, set[int]] = {}
    for index, block in enumerate(blocks):
        for parameter in block.module.parameters():
            owners.setdefault(id(parameter), set()).add(index)
    order = list(tensors)
    first_block = min((i for i, key in enumerate(order) if key in owners), default=0)
    found: list[tuple[tuple[float, int], Parameter]] = []
    for place, key in enumerate(order):
        beside = OuterSection.PROLOGUE if place < first_block else OuterSection.EPILOGUE
        block_index, uses = _uses(
            SeenUses() if seen is None else seen.of(names[key], blocks), owners.get(key, set()), beside
        )
        rank = in_forward_order(block_index if uses is None and block_index is not None else beside)
        tensor = tensors[key]
        parameter_of_schema = Parameter(
            name=names[key][0],
            shape=tuple(tensor.shape),
            dtype=DType(str(tensor.dtype).removeprefix("torch.")),
            trainable=tensor.requires_grad,
            block=block_index,
            uses=uses,
            aliases=tuple(names[key][1:]),
        )
        found.append(((rank, place), parameter_of_schema))
    return tuple(parameter for _, parameter in sorted(found, key=lambda item: item[0]))


def _uses(seen: SeenUses, owners: Iterable[int], beside: OuterSection) -> tuple[int | None, Uses | None]:
    """The block that alone uses a parameter, or else its uses.

    ``owners``: the blocks that hold it.  ``beside``: the part outside the blocks where it stands; it uses what nobody
    was seen to use.
    """
    own = {BlockId(block) for block in owners}
    forward, backward = seen.forward | own, seen.backward | own
    if not forward:
        forward, backward = {beside}, backward | {beside}
    if OuterSection.EPILOGUE in backward | forward:
        # Its two passes follow each other: whatever one needs is there for both.
        forward, backward = (sections | {OuterSection.EPILOGUE} for sections in (forward, backward))
    everywhere = forward | backward | seen.gradient
    if len(everywhere) == 1 and own:
        return next(iter(own)), None
    # A gradient that nobody saw would come with the last backward that could add to it.
    last = min((seen.gradient or forward) | backward, key=in_forward_order)
    return None, Uses(
        forward=tuple(sorted(forward, key=in_forward_order)),
        backward=tuple(sorted(backward, key=in_forward_order)),
        gradient=last,
    )


def compute_dtype(parameters: Sequence[Parameter]) -> DType:
    """The dtype of most scalars, packed weights and what unpacks them left out."""
    sizes: dict[DType, int] = {}
    own = [parameter for parameter in parameters if parameter.num_scalars is None]
    for parameter in own or parameters:
        sizes[parameter.dtype] = sizes.get(parameter.dtype, 0) + parameter.num_elements
    return max(sizes, key=lambda dtype: sizes[dtype])


def asks_for_facts(function: Any) -> bool:
    """Whether an operation of torch reads no value of its tensor: its shape, dtype, gradient and the like."""
    name = getattr(function, "__name__", str(function))
    attribute = getattr(getattr(function, "__self__", None), "__name__", "")
    return name in _FACTS or (name == "__get__" and attribute not in _VALUES)
