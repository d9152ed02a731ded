"""What stages of a pipeline have in common in a checkpoint, which is one of the whole: joined from what each has."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from ...shared.basics.errors import PlanError
from ..ranks.launch import by_rank
from ..ranks.world import World, exchanged

_JOINED: Final = ("step_knobs", "optimizer", "loss_scaler", "shapes")


def common_of_stages(world: World, common: Mapping[str, Any], num_stages: int) -> dict[str, Any]:
    """What is written once for all ranks, from what this one has of it; to be called on all ranks.

    The shapes of all parameters, the names in all parameter groups, and the scales of all blocks' losses.  Raises
    PlanError, on all ranks alike, if stages step in different ways.
    """
    of_ranks: list[Mapping[str, Any]] = exchanged(world, {name: common[name] for name in _JOINED})
    _check_same("the knobs that change what a step computes", [one["step_knobs"] for one in of_ranks])
    return {
        **common,
        "optimizer": _optimizer([one["optimizer"] for one in of_ranks]),
        "loss_scaler": _scales([one["loss_scaler"] for one in of_ranks]),
        "shapes": {name: shape for one in of_ranks for name, shape in one["shapes"].items()},
        "num_stages": num_stages,
    }


def _optimizer(of_ranks: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Stages that step nothing know neither the optimizer's class nor its options."""
    first = next((one for one in of_ranks if one["parameters"]), of_ranks[0])
    of_ranks = [one if one["parameters"] else first for one in of_ranks]
    _check_same("the optimizer", [one["class"] for one in of_ranks])
    _check_same("the options of parameter groups", [[g["options"] for g in one["groups"]] for one in of_ranks])
    members = [[name for one in of_ranks for name in one["groups"][at]["names"]] for at in range(len(first["groups"]))]
    return {
        "class": first["class"],
        "groups": [
            {"names": list(dict.fromkeys(names)), "options": group["options"]}
            for names, group in zip(members, first["groups"], strict=True)
        ],
        "parameters": sorted({name for one in of_ranks for name in one["parameters"]}),
    }


def _scales(of_ranks: Sequence[Mapping[str, Any] | None]) -> dict[str, Any] | None:
    """Of all blocks; None if losses are not scaled."""
    scaled = [one for one in of_ranks if one is not None]
    return {block: state for one in scaled for block, state in one.items()} if scaled else None


def _check_same(what: str, of_ranks: Sequence[Any]) -> None:
    shown = [str(one) for one in of_ranks]
    if len(set(shown)) > 1:
        raise PlanError(f"ranks differ in {what}: {by_rank(shown)}. Let all ranks have the same.")
