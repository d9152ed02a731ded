"""Which linear maps of a model are factorised."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import nn

from ...shared.basics.errors import WorkloadError
from ...shared.factors.targets import is_default, is_named, no_such_map
from ..model.adapters import LowRankLinear
from ..model.blocks import find_blocks
from .linear import OrthogonalLinear

_STORED: Final = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True)
class Target:
    """A linear map that can be factorised."""

    path: str
    module: nn.Module
    weight: nn.Parameter
    is_transposed: bool
    """Whether the weight is (m, n), as in transformers' ``Conv1D``, for y = x W + b."""

    @property
    def size(self) -> tuple[int, int]:
        """Outputs n and inputs m."""
        first, second = self.weight.shape
        return (second, first) if self.is_transposed else (first, second)


def find_targets(model: nn.Module, targets: Sequence[str] = ()) -> list[Target]:
    """The maps that ``targets`` name, in the order of the module tree.

    A target is a path, the end of one (``"q_proj"``, ``"mlp.up_proj"``), or has wildcards
    (``"model.layers.[0-3].*"``); none: all linear maps within the blocks, those of attention and MLP, but no routers of
    experts, no maps of a single direction, and none that have low-rank matrices beside them.  Raises WorkloadError if
    a target matches nothing, or something that cannot be factorised.
    """
    if isinstance(targets, str):
        raise WorkloadError(f"targets is {targets!r}; it must be a sequence of names. Write [{targets!r}].")
    adapted = tuple(f"{path}." for path, module in model.named_modules() if isinstance(module, LowRankLinear))
    modules = {path: module for path, module in model.named_modules() if path and not path.startswith(adapted)}
    if not targets:
        inside = tuple(f"{block.name}." for block in find_blocks(model))
        chosen = [path for path, module in modules.items() if path.startswith(inside) and _is_default(path, module)]
        beside = next((path for path in adapted if path.startswith(inside)), None)
        if not chosen and beside is not None:
            raise WorkloadError(
                f"all linear maps in the blocks of {type(model).__name__} that could be factorised have low-rank "
                f"matrices beside them (LoRA), such as {beside.removesuffix('.')}; a map is trained by one of the two. "
                f"Name fewer maps for LoRA, or leave out LoRA or the factors."
            )
        if not chosen:
            raise WorkloadError(
                f"the blocks of {type(model).__name__} have no linear maps that could be factorised. Name targets."
            )
    else:
        matched = {
            target: [p for p, m in modules.items() if is_named(p, target) and _is_matrix(m)] for target in targets
        }
        for target, paths in matched.items():
            beside = next((path[:-1] for path in adapted if is_named(path[:-1], target)), None)
            if not paths and beside is not None:
                raise WorkloadError(
                    f"{beside}, which {target!r} names, has low-rank matrices beside it (LoRA); a map is trained by "
                    f"one of the two. Name other maps for LoRA, or for the factors."
                )
            if not paths:
                raise _no_match(model, modules, target)
        chosen = [path for path in modules if any(path in paths for paths in matched.values())]
    shared = _tied(model)
    return [_checked(path, modules[path], shared) for path in chosen]


def _is_matrix(module: nn.Module) -> bool:
    """Whether it looks like a linear map: it has a weight, and no other module computes with it."""
    weight = module._parameters.get("weight")
    return weight is not None and (_is_linear(module) or weight.dim() == 2)


def _is_linear(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear) or _is_conv1d(module)


def _is_conv1d(module: nn.Module) -> bool:
    """Whether it is the linear map that GPT-2 has in transformers, whose matrix is transposed."""
    return type(module).__name__ == "Conv1D" and hasattr(module, "nf")


def _is_default(path: str, module: nn.Module) -> bool:
    if not _is_linear(module):
        return False
    # The maps of torch's own attention are read by it, and never called.
    if type(module).__name__ == "NonDynamicallyQuantizableLinear":
        return False
    weight = module._parameters.get("weight")
    return is_default(path, () if weight is None else tuple(weight.shape))


def _no_match(model: nn.Module, modules: dict[str, nn.Module], target: str) -> WorkloadError:
    named = [path for path in modules if is_named(path, target)]
    if named and isinstance(modules[named[0]], OrthogonalLinear):
        return WorkloadError(f"{named[0]} is factorised already. Call make_dense() before factorising it anew.")
    if named:
        return WorkloadError(
            f"{named[0]}, which {target!r} names, is a {type(modules[named[0]]).__name__} and no linear map with a "
            f"matrix: it cannot be factorised. Name linear maps."
        )
    parameters = [name for name, _ in model.named_parameters() if is_named(name, target)]
    if parameters:
        return WorkloadError(
            f"{target!r} names the parameter {parameters[0]}; targets are linear maps. Name its module."
        )
    return no_such_map(target, (path for path, module in modules.items() if _is_linear(module)))


def _tied(model: nn.Module) -> dict[int, list[str]]:
    """The names of parameters that several modules share."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return {key: found for key, found in names.items() if len(found) > 1}


def _checked(path: str, module: nn.Module, shared: dict[int, list[str]]) -> Target:
    """The module as a target.  Raises WorkloadError if its map is more than a matrix of numbers."""
    weight = module._parameters.get("weight")
    if weight is None or weight.dim() != 2:
        what = "is computed by other modules" if weight is None else f"has the shape {list(weight.shape)}"
        raise WorkloadError(
            f"the weight of {path} {what}; only a matrix can be factorised. Leave it out of the targets."
        )
    if weight.dtype not in _STORED:
        raise WorkloadError(
            f"the weight of {path} is {str(weight.dtype).removeprefix('torch.')}, which cannot be trained in factors. "
            f"Load it as bfloat16 or float32, or leave it out of the targets."
        )
    if type(module) is not nn.Linear and not _is_conv1d(module):
        raise WorkloadError(
            f"{path} is a {type(module).__name__}, which computes with its weight in a way of its own; only nn.Linear "
            f"and Conv1D can be factorised. Leave it out of the targets."
        )
    if id(weight) in shared:
        raise WorkloadError(
            f"the weight of {path} is tied ({' and '.join(shared[id(weight)])}): factors would untie it. Leave it out "
            f"of the targets, or untie it."
        )
    if 0 in weight.shape:
        raise WorkloadError(f"the weight of {path} is empty: {list(weight.shape)}. Leave it out of the targets.")
    if module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or weight._backward_hooks:
        raise WorkloadError(f"{path} has hooks, which its factors would lose. Register them after it is factorised.")
    return Target(path, module, weight, _is_conv1d(module))
