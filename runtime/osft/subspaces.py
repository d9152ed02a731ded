"""The subspaces of a model, as a workload has them."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from ...shared.schema.workload import Parameter, Subspace
from .orthogonal_model import orthogonal_maps
from .projection import subspaces_of


def described_subspaces(
    model: nn.Module, parameters: Sequence[Parameter]
) -> tuple[tuple[Parameter, ...], tuple[Subspace, ...]]:
    """``parameters`` of ``model``, and the subspaces among them.

    A frozen factor is taken to be used wherever the trained one is: they travel together, and backward, which may need
    the trained one alone, is where both are needed at one place.
    """
    number = {name: index for index, one in enumerate(parameters) for name in (one.name, *one.aliases)}
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    found, described = [], list(parameters)
    for module in orthogonal_maps(model).values():
        for frozen, trained, axis in subspaces_of(module):
            pair = Subspace(frozen=number[names[id(frozen)]], trained=number[names[id(trained)]], axis=axis)
            found.append(pair)
            described[pair.frozen] = described[pair.frozen].model_copy(update={"uses": described[pair.trained].uses})
    return tuple(described), tuple(found)
