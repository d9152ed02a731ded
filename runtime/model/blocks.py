"""Where a model's blocks are: the repeated layers that chunks and activation modes are chosen for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

from torch import nn

from ...shared.basics.arguments import shown
from ...shared.basics.errors import WorkloadError

_CHANCES: Final = ("layerdrop", "layer_drop")
"""How settings end that say by which chance a block is skipped."""
_Rows: TypeAlias = nn.ModuleList | nn.ModuleDict | nn.Sequential
_Stack = Callable[[nn.Module], list[tuple[str, nn.Module]]]


@dataclass(frozen=True, slots=True)
class NamedBlock:
    """A block and its dotted path within the model."""

    name: str
    module: nn.Module


def places_of(blocks: Sequence[NamedBlock]) -> list[tuple[nn.Module, list[int]]]:
    """Every module among ``blocks`` with the places where it stands.

    [Note: Runs of blocks] in ``hooks/block_runs.py``
    """
    found: dict[int, tuple[nn.Module, list[int]]] = {}
    for index, block in enumerate(blocks):
        found.setdefault(id(block.module), (block.module, []))[1].append(index)
    return list(found.values())


def run_again(blocks: Sequence[NamedBlock]) -> set[int]:
    """The places whose module stands at others too."""
    return {place for _, places in places_of(blocks) if len(places) > 1 for place in places}


def find_blocks(model: nn.Module, names: str | Sequence[str] | None = None) -> tuple[NamedBlock, ...]:
    """The model's blocks in the order of its module tree.

    ``names``: the path of a container (``"model.layers"``), or the paths of the blocks themselves, among which a list
    of modules stands for its members unless it is a ``Sequential`` in a list itself; None finds every outermost
    ``ModuleList`` or ``Sequential`` whose members are of one class and hold parameters; the classes of a
    ``ModuleList`` may take turns (attention and state-space layers), and some of its members have no parameters.
    Encoder and decoder of one model are found together.  Where there are none of these, the next best are
    (``_likely_stack``): members of a ``ModuleDict``, modules of own classes without parts, the members of a
    ``Sequential`` that are alike.  Raises WorkloadError if there are none, naming what the model has.
    """
    if names is not None and not isinstance(names, Sequence):
        raise WorkloadError(f"blocks is {shown(names)}; it must be the path of a list of modules, or a list of paths.")
    if names is not None:
        return _members(model, names) if isinstance(names, str) else _named(model, list(names))
    found = _largest(model, _stack) or _largest(model, _likely_stack)
    if not found:
        raise _nothing_found(model)
    return tuple(found)


def _largest(model: nn.Module, stack_of: _Stack) -> list[NamedBlock]:
    """The blocks of all outermost stacks that are not small beside the largest."""
    stacks: list[list[NamedBlock]] = []
    taken: list[str] = []
    for path, module in model.named_modules():
        inside = any(not t or path.startswith(f"{t}.") for t in taken)
        if not inside and (members := stack_of(module)):
            taken.append(path)
            stacks.append([NamedBlock(f"{path}.{key}" if path else key, child) for key, child in members])
    largest_of = [max(_size(block.module) for block in stack) for stack in stacks]
    # A list of small parts (heads, adapters beside the trunk) is no stack of blocks; a small block among large ones is
    # one of them, which runs between the others.
    return [
        block
        for stack, largest in zip(stacks, largest_of, strict=True)
        if largest * 50 >= max(largest_of)
        for block in stack
    ]


def _stack(module: nn.Module) -> list[tuple[str, nn.Module]]:
    """The members of a list that are blocks; none of a module that is no stack of blocks."""
    if not isinstance(module, nn.ModuleList | nn.Sequential):
        return []
    children = list(module.children())
    num_classes = len({type(child) for child in children})
    is_list = isinstance(module, nn.ModuleList)
    same = num_classes == 1 or (is_list and 1 < num_classes < len(children))
    # A block of a list that has lost all of its parts runs in its place as the others do.
    sized = [child for child in children if _size(child) > 0]
    composite = all(_has_parts(child) for child in sized)
    is_stack = same and composite and bool(sized) and (is_list or len(sized) == len(children))
    return list(module.named_children()) if is_stack else []


def _likely_stack(module: nn.Module) -> list[tuple[str, nn.Module]]:
    """The same where a model has no plain stack: at least two members of one class, with parameters.

    They are made of parts, or of a class that is not torch's.  A ``Sequential`` may have others between and beside
    them; of several classes, the one with the most parameters counts.
    """
    if not isinstance(module, _Rows):
        return []
    members = list(module.named_children())
    by_class: dict[type[nn.Module], list[tuple[str, nn.Module]]] = {}
    for key, child in members:
        is_own = not str(type(child).__module__).startswith("torch.nn.")
        if _size(child) > 0 and (_has_parts(child) or is_own) and not isinstance(child, nn.ModuleList | nn.ModuleDict):
            by_class.setdefault(type(child), []).append((key, child))
    alike = [row for row in by_class.values() if len(row) > 1]
    if not isinstance(module, nn.Sequential):
        alike = [row for row in alike if len(row) == len(members)]
    return max(alike, key=lambda row: sum(_size(child) for _, child in row), default=[])


def _has_parts(module: nn.Module) -> bool:
    return any(True for _ in module.children())


def _nothing_found(model: nn.Module) -> WorkloadError:
    lists = [
        (path, module)
        for path, module in model.named_modules()
        if isinstance(module, _Rows) and path and _size(module) > 0
    ]
    if lists and not isinstance(model, nn.Sequential):
        largest, module = max(lists, key=lambda found: _size(found[1]))
        classes = sorted({type(child).__name__ for child in module.children()})
        why = (
            f"of its lists of modules, none has members that are alike and made of parts; {largest}, the largest, has "
            f"members of {', '.join(classes)}. If these run one after the other, name them: blocks='{largest}'"
        )
    elif isinstance(model, nn.Sequential):
        children = ", ".join(f"{name} ({type(child).__name__})" for name, child in model.named_children()) or "none"
        is_of_layers = len({type(child) for child in model.children()}) == 1
        lack = "made of parts. Name those that run as blocks" if is_of_layers else "alike. Name those that are"
        why = f"its members are not {lack}: blocks=['1', '2', ...]; the members are: {children}"
    else:
        children = ", ".join(f"{name} ({type(child).__name__})" for name, child in model.named_children()) or "none"
        why = (
            f"it has no ModuleList, ModuleDict or Sequential. Name what runs one after the other: "
            f"blocks=['path', 'path', ...]; the model's children are: {children}"
        )
    return WorkloadError(f"no blocks found in {type(model).__name__}: {why}.")


def _size(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _members(model: nn.Module, path: str) -> tuple[NamedBlock, ...]:
    """The members of the container at ``path``; the module itself where it has no members to run."""
    module = _module(model, path)
    if not isinstance(module, _Rows):
        return (NamedBlock(path, module),)
    found = tuple(NamedBlock(f"{path}.{key}" if path else key, child) for key, child in module.named_children())
    if not found:
        raise WorkloadError(f"{path} holds no modules. Name a list of blocks.")
    return found


def _named(model: nn.Module, names: list[str]) -> tuple[NamedBlock, ...]:
    found: list[NamedBlock] = []
    for name in names:
        module = _module(model, name)
        parent = _module(model, name.rpartition(".")[0]) if name else None
        # A Sequential that is a member of a list runs as one block; elsewhere it is a stack of them.
        is_block = isinstance(module, nn.Sequential) and isinstance(parent, _Rows)
        found += [NamedBlock(name, module)] if is_block else _members(model, name)
    for first in found:
        for second in found:
            if first is not second and second.name.startswith(f"{first.name}."):
                raise WorkloadError(f"block {second.name} lies inside block {first.name}. Name one of the two.")
    if not found:
        raise WorkloadError("the list of blocks is empty and holds no modules. Name a list of blocks.")
    return tuple(found)


def _module(model: nn.Module, path: str) -> nn.Module:
    try:
        return model.get_submodule(path)
    except AttributeError:
        lists = [name for name, at in model.named_modules() if isinstance(at, _Rows) and name]
        raise WorkloadError(
            f"the model has no module {path!r}. Its lists of modules are: {', '.join(lists) or 'none'}."
        ) from None


def dropped_layers(model: nn.Module) -> str | None:
    """What is wrong with a model that skips blocks by chance in training (LayerDrop), as its configuration says."""
    settings = getattr(getattr(model, "config", None), "__dict__", {}) if model.training else {}
    chances = {name: value for name, value in settings.items() if name.endswith(_CHANCES) and _is_chance(value)}
    if not chances:
        return None
    stated = ", ".join(f"{name} {value:g}" for name, value in chances.items())
    return (
        f"{type(model).__name__} skips blocks by chance, which a plan cannot foresee. In its configuration, set to 0: "
        f"{stated}."
    )


def _is_chance(value: object) -> bool:
    return isinstance(value, int | float) and value > 0
