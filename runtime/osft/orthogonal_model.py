"""A model with factorised linear maps: made from a dense one, in place, and made dense again.

The maps keep their paths; ``path.weight`` becomes ``path.u_high`` and so on.  All else is trained as before.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import distributed, nn

from ...shared.basics.errors import WorkloadError
from ...shared.factors.sizes import FACTOR_NAMES, check_ratio, num_frozen
from ..quantized.checks import refuse_quantized
from .cache import FactorCache
from .factorisation import Factors, factorise, reconstruct
from .linear import OrthogonalLinear
from .spread import SpreadFactors, empty_factors
from .targets import Target, find_targets


def make_orthogonal(
    model: nn.Module,
    *,
    unfreeze_rank_ratio: float,
    targets: Sequence[str] = (),
    device: torch.device | str | None = None,
    cache: FactorCache | None = None,
    on_progress: Callable[[int, int], None] | None = None,
    group: distributed.ProcessGroup | None = None,
) -> list[str]:
    """Replace linear maps of ``model`` by factorised ones, in place; gives their paths.

    ``unfreeze_rank_ratio``: the part of the directions that are trained, those of the smallest singular values;
    ``targets`` as of ``find_targets``.  One weight after the other is decomposed on ``device``, or where it lies; the
    factors lie where it did, and it goes.  Of a weight on the meta device the factors are there too, to be filled when
    a plan is carried out (``carry_out(weights=FOLDER)``).  With ``cache``, decompositions that were made before are
    read.  ``on_progress`` is told how many of all maps are done.

    ``group``: ranks that all have the model, and call this together.  Each decomposes some of the weights and sends the
    factors to the others, so that all have the same bits; until then it keeps those that it has made.
    ``on_progress`` is then told how many of the rank's own are done.

    Raises WorkloadError, with nothing changed, if the ratio makes no sense or a target cannot be factorised; and, with
    the maps before it replaced, if a weight has entries that are not finite.  With ``group`` nothing is changed then
    either, and all ranks raise the same.
    """
    check_ratio(unfreeze_rank_ratio)
    refuse_quantized(model, "orthogonal subspace fine-tuning trains factors of weights", "Load the model unpacked.")
    found = find_targets(model, targets)
    if group is not None and group.size() > 1:
        _replace_together(model, found, unfreeze_rank_ratio, device, cache, on_progress, group)
        return [target.path for target in found]
    for done, target in enumerate(found):
        if on_progress is not None:
            on_progress(done, len(found))
        _replace(model, target, _factors_of(target, unfreeze_rank_ratio, device, cache))
    if on_progress is not None:
        on_progress(len(found), len(found))
    return [target.path for target in found]


def _replace_together(
    model: nn.Module,
    found: Sequence[Target],
    ratio: float,
    device: torch.device | str | None,
    cache: FactorCache | None,
    on_progress: Callable[[int, int], None] | None,
    group: distributed.ProcessGroup,
) -> None:
    """Each rank of ``group`` decomposes some of the weights for all."""
    real = [target for target in found if not target.weight.is_meta]

    def empty(place: int) -> Factors:
        target = real[place]
        return empty_factors(*target.size, num_frozen(*target.size, ratio), target.weight)

    spread = SpreadFactors(
        [f"the weight of {target.path}" for target in real],
        [target.size for target in real],
        [num_frozen(*target.size, ratio) for target in real],
        group,
        lambda place: _factors_of(real[place], ratio, device, cache),
        empty,
        on_progress,
    )
    places = {target.path: place for place, target in enumerate(real)}
    for target in found:
        place = places.get(target.path)
        factors = _factors_of(target, ratio, device, cache) if place is None else spread.of(place)
        _replace(model, target, factors)
    if on_progress is not None:
        on_progress(len(found), len(found))


def _factors_of(target: Target, ratio: float, device: torch.device | str | None, cache: FactorCache | None) -> Factors:
    num_out, num_in = target.size
    frozen = num_frozen(num_out, num_in, ratio)
    weight = target.weight.detach()
    if weight.is_meta:
        return meta_factors(num_out, num_in, frozen, weight.dtype)
    dense = weight.t() if target.is_transposed else weight

    def decompose() -> Factors:
        found = factorise(dense if device is None else dense.to(device), frozen, name=f"the weight of {target.path}")
        return Factors(**{name: factor.to(weight.device) for name, factor in found.named().items()})

    return decompose() if cache is None else cache.factors(dense, frozen, decompose)


def meta_factors(num_out: int, num_in: int, frozen: int, dtype: torch.dtype) -> Factors:
    """Factors without values."""
    return empty_factors(num_out, num_in, frozen, torch.empty(0, dtype=dtype, device="meta"))


def _replace(model: nn.Module, target: Target, factors: Factors) -> None:
    bias = target.module._parameters.get("bias")
    made = OrthogonalLinear(factors, bias, dense_class=type(target.module), is_transposed=target.is_transposed)
    made.train(target.module.training)
    parent, _, name = target.path.rpartition(".")
    setattr(model.get_submodule(parent), name, made)


def orthogonal_maps(model: nn.Module) -> dict[str, OrthogonalLinear]:
    """The factorised maps by their paths."""
    return {path: module for path, module in model.named_modules() if isinstance(module, OrthogonalLinear)}


def dense_weight(module: OrthogonalLinear, factors: Factors | None = None) -> torch.Tensor:
    """The weight that a map, or other ``factors`` of it, stands for, in the dense map's shape and the factors' type."""
    weight = reconstruct(factors or module.factors)
    return weight.t().contiguous() if module.is_transposed else weight


def dense_state_dict(model: nn.Module, state: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """``model.state_dict()`` with dense weights in the place of factors, under the names of the dense model.

    Computed in float32 at least, in the model's element type.  ``state``: another state dict of this model, such as
    ``training.state_dict()`` gives while a plan is carried out.  ``save_pretrained(folder, state_dict=...)`` of
    transformers takes it, and ``load_state_dict`` of a dense model.  Raises WorkloadError if ``state`` lacks factors.
    """
    maps = orthogonal_maps(model)
    given = dict(model.state_dict() if state is None else state)
    paths = {f"{path}.{name}": path for path in maps for name in FACTOR_NAMES}
    found: dict[str, Any] = {}
    for name, value in given.items():
        path = paths.get(name)
        if path is None:
            found[name] = value
        elif (dense := f"{path}.weight") not in found:
            found[dense] = dense_weight(maps[path], _given_factors(maps[path], path, given))
    return found


def _given_factors(module: OrthogonalLinear, path: str, given: Mapping[str, Any]) -> Factors:
    values: dict[str, Any] = {}
    for name, own in module.factors.named().items():
        value = given.get(f"{path}.{name}", own if own.numel() == 0 else None)
        if value is None or tuple(value.shape) != tuple(own.shape):
            has = "nothing" if value is None else f"a tensor of {list(value.shape)}"
            raise WorkloadError(
                f"the state dict has {has} for {path}.{name}, which is {list(own.shape)}. Pass the state of this model."
            )
        values[name] = value.detach()
    return Factors(**values)


def make_dense(model: nn.Module) -> list[str]:
    """Replace factorised maps by dense ones of the class that they were, in place; gives their paths.

    What follows may be saved, used, or factorised anew for another task.  No plan may be carried out meanwhile.
    """
    maps = orthogonal_maps(model)
    for path, module in maps.items():
        sizes = (module.out_features, module.in_features)
        with torch.device("meta"):
            # Conv1D counts outputs first, nn.Linear inputs.
            dense = module.dense_class(*(sizes if module.is_transposed else sizes[::-1]))
        dense.register_parameter("weight", nn.Parameter(dense_weight(module)))
        dense.register_parameter("bias", module.bias)
        dense.train(module.training)
        parent, _, name = path.rpartition(".")
        setattr(model.get_submodule(parent), name, dense)
    return list(maps)
