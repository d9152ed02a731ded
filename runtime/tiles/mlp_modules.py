"""Where the MLPs of a model's blocks are, and running them in tiles."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from typing import Any, Final

from torch import nn

from ...shared.basics.errors import PlanError, WorkloadError
from ...shared.schema.plan import Plan
from ...shared.schema.workload import Workload
from ..model.blocks import NamedBlock
from .mlp_followers import follower_of, forwards_of
from .mlp_token_wise import why_not_token_wise

_NAMES: Final = frozenset(
    (
        *("mlp", "moe", "ff", "ffn", "ffn1", "ffn2", "feedforward", "feed_forward", "feed_forward1", "feed_forward2"),
        *("block_sparse_moe", "sparse_moe", "moe_mlp", "denserelu", "densereludense", "ff_layer", "feed_forward_layer"),
    )
)
"""What models call an MLP, in lower case."""
Mlps = tuple[tuple[str, ...], ...]
"""By block: the paths of its MLPs within it."""


def find_mlps(blocks: Sequence[NamedBlock], named: str | Sequence[str] | None = None) -> Mlps:
    """The MLPs of each block, which run in tiles.

    ``named``: patterns of dotted paths (``"*.mlp"``); then blocks in which nothing matches have none.  None: every
    block has at least one, under a usual name.  Whatever is found is tried: it has to be token-wise.  Raises
    WorkloadError if a pattern matches nothing, or a block has no MLP, or it is not token-wise, with the reason.
    """
    found = _matching(blocks, [named] if isinstance(named, str) else list(named)) if named else _usual(blocks)
    tried: dict[str, str | None] = {}
    for block, paths in zip(blocks, found, strict=True):
        for path in paths:
            module, name = block.module.get_submodule(path), f"{block.name}.{path}"
            shapes = [(key, tuple(parameter.shape)) for key, parameter in module.named_parameters()]
            kind = f"{type(module)!r} {module!r} {shapes}"
            if kind not in tried:
                tried[kind] = why_not_token_wise(module, name)
            if (reason := tried[kind]) is not None:
                raise WorkloadError(
                    f"{name} ({type(module).__name__}) cannot run in tiles of tokens: {reason}. Name other modules "
                    f"(mlp_modules, --mlp-module), or leave mlp_tiles out."
                )
    return found


def _usual(blocks: Sequence[NamedBlock]) -> Mlps:
    found = []
    for block in blocks:
        paths = _outermost([path for path, _ in _parts(block) if path.rpartition(".")[2].lower() in _NAMES])
        if not paths:
            children = ", ".join(f"{name} ({type(part).__name__})" for name, part in block.module.named_children())
            raise WorkloadError(
                f"block {block.name} ({type(block.module).__name__}) has no MLP in a module of its own that tiles "
                f"could run in; its parts are {children or 'none'}. Layers that the block calls one by one are none. "
                f"Name one module (mlp_modules, --mlp-module), or leave mlp_tiles out."
            )
        found.append(paths)
    return tuple(found)


def _matching(blocks: Sequence[NamedBlock], patterns: Sequence[str]) -> Mlps:
    matched: set[str] = set()
    found = []
    for block in blocks:
        paths = []
        for path, _ in _parts(block):
            hits = [pattern for pattern in patterns if fnmatchcase(f"{block.name}.{path}", pattern)]
            matched.update(hits)
            paths += [path] if hits else []
        found.append(_outermost(paths))
    for pattern in patterns:
        if pattern not in matched:
            names = ", ".join(f"{blocks[0].name}.{path}" for path, _ in blocks[0].module.named_children())
            raise WorkloadError(
                f"mlp_modules: no module of any block matches {pattern!r}. The first block has {names or 'no parts'}."
            )
    return tuple(found)


def _parts(block: NamedBlock) -> list[tuple[str, nn.Module]]:
    """The modules within a block that have weights, by their path there."""
    return [(p, m) for p, m in block.module.named_modules() if p and next(m.parameters(), None) is not None]


def _outermost(paths: Sequence[str]) -> tuple[str, ...]:
    return tuple(path for path in paths if not any(path.startswith(f"{other}.") for other in paths))


def names_of(blocks: Sequence[NamedBlock], mlps: Mlps) -> tuple[str, ...]:
    """The dotted paths of MLPs within the model."""
    return tuple(modules_of(blocks, mlps))


class MlpModules(dict[str, nn.Module]):
    """MLPs by their dotted paths, and by the same paths the normalizations of their output, where there is one."""

    def __init__(self) -> None:
        super().__init__()
        self.followers: dict[str, nn.Module] = {}

    def add(self, name: str, parent: nn.Module, mlp: nn.Module) -> None:
        """One that is a part of ``parent``."""
        self[name] = mlp
        if (follower := follower_of(parent, mlp)) is not None:
            self.followers[name] = follower


def modules_of(blocks: Sequence[NamedBlock], mlps: Mlps) -> MlpModules:
    """The MLPs by their dotted paths within the model; none for no ``mlps``."""
    found = MlpModules()
    for block, paths in zip(blocks, mlps, strict=True) if mlps else ():
        for path in paths:
            parent = block.module.get_submodule(path.rpartition(".")[0])
            found.add(f"{block.name}.{path}", parent, block.module.get_submodule(path))
    return found


@contextmanager
def in_tiles(modules: MlpModules, num_tiles: int) -> Iterator[None]:
    """Within the block, the modules run in so many tiles; afterwards they are as they were.  1: as they are."""
    wrapped: list[tuple[nn.Module, Callable[..., Any]]] = []
    try:
        for name, module in modules.items() if num_tiles > 1 else ():
            if any(module is other for other, _ in wrapped):
                continue
            for part, forward in forwards_of(name, module, modules.followers.get(name), num_tiles):
                wrapped.append((part, part.forward))
                part.forward = forward
        yield
    finally:
        for module, original in wrapped:
            # The wrapper is an instance attribute that shadows the class's method, unless one stood there before.
            if getattr(original, "__func__", None) is type(module).forward:
                del module.forward
            else:
                module.forward = original


@contextmanager
def as_planned(model: nn.Module, plan: Plan, workload: Workload) -> Iterator[None]:
    """Within the block, the MLPs of ``model`` run in as many tiles as ``plan`` says.

    Raises PlanError if the workload names modules that the model lacks.
    """
    names = workload.tiling(plan.mlp_tiles).modules if plan.mlp_tiles > 1 else ()
    modules = MlpModules()
    for name in names:
        try:
            modules.add(name, model.get_submodule(name.rpartition(".")[0]), model.get_submodule(name))
        except AttributeError:
            raise PlanError(
                f"mlp_tiles: {plan.mlp_tiles}, but the model has no module {name}. Trace it again."
            ) from None
    with in_tiles(modules, plan.mlp_tiles):
        yield
