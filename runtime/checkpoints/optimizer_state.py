"""The state of all chunks' optimizers by parameter, so that it means the same under every plan.

A parameter's state may lie in one optimizer on the host, in one on the device, or in several that step a stretch each
(Note: Widened gradients); here it is always whole, with the shape of the parameter.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import nn

from ...shared.basics.errors import FileError
from ..chunks.placed_model import PlacedModel
from ..model.strides import copy_strided, in_memory_order, strided
from ..optimizers.chunk_optimizer import ChunkOptimizer

_OF_THE_MACHINE: Final = frozenset({"capturable", "differentiable", "foreach", "fused"})
"""Options that say how an optimizer computes, not what: a resumed training keeps its own."""


@dataclass(frozen=True, slots=True)
class _Share:
    """A parameter, or a stretch of its scalars, in one optimizer."""

    stepper: ChunkOptimizer
    place: int
    stretch: slice | None

    @property
    def weight(self) -> torch.Tensor:
        return self.stepper.weights[self.place]


class OptimizerState:
    """Reads and writes the state of the optimizers of a placed model."""

    def __init__(
        self, placed: PlacedModel, param_groups: Sequence[dict[str, Any]], names: Mapping[nn.Parameter, str]
    ) -> None:
        """``param_groups`` are those that the user sees, over the model's parameters; ``names`` names these."""
        self._placed = placed
        self._param_groups = param_groups
        self._names = names
        self._shares: dict[nn.Parameter, list[_Share]] = {}
        for stepper, parameters, stretch in placed.steppers():
            for place, parameter in enumerate(parameters):
                self._shares.setdefault(parameter, []).append(_Share(stepper, place, stretch))

    @property
    def _class_name(self) -> str:
        classes = {type(share.stepper.optimizer) for shares in self._shares.values() for share in shares}
        return ", ".join(sorted(f"{found.__module__}.{found.__qualname__}" for found in classes))

    def _members(self) -> list[list[str]]:
        return [[self._names[parameter] for parameter in group["params"]] for group in self._param_groups]

    # -- reading -----------------------------------------------------------------------------------------------------

    def collect(self) -> dict[str, Any]:
        """Everything, on the host; tensors that are there already are not copied."""
        options = [{key: value for key, value in group.items() if key != "params"} for group in self._param_groups]
        return {
            "class": self._class_name,
            "groups": [{"names": n, "options": o} for n, o in zip(self._members(), options, strict=True)],
            "parameters": {
                self._names[parameter]: {"state": _whole_state(parameter, shares), "master": _master(parameter, shares)}
                for parameter, shares in self._shares.items()
            },
        }

    # -- writing -----------------------------------------------------------------------------------------------------

    def check(self, saved: Mapping[str, Any]) -> None:
        """Raise FileError unless ``saved`` can be placed."""
        if saved["class"] != self._class_name:
            raise FileError(
                f"the checkpoint was saved with the optimizer {saved['class']}; this training has "
                f"{self._class_name or 'none'}. Pass the same optimizer to carry_out()."
            )
        if [sorted(group["names"]) for group in saved["groups"]] != [sorted(names) for names in self._members()]:
            raise FileError(
                f"the checkpoint was saved with other parameter groups ({len(saved['groups'])}; this training has "
                f"{len(self._param_groups)}, or others in them). Pass the same parameter_groups to carry_out()."
            )
        if saved["parameters"].keys() != {self._names[parameter] for parameter in self._shares}:
            raise FileError("the checkpoint's optimizer stepped other parameters than this training's does.")
        for parameter, shares in self._shares.items():
            name = self._names[parameter]
            master = saved["parameters"][name]["master"]
            expected = (parameter.shape, shares[0].weight.dtype) if _is_narrow(parameter, shares) else None
            if expected != (None if master is None else (master.shape, master.dtype)):
                raise FileError(f"the checkpoint's master of parameter {name} has not the shape or dtype expected.")

    def place(self, saved: Mapping[str, Any]) -> None:
        """Give every optimizer its part of ``saved``, which was checked."""
        for group, found in zip(self._param_groups, saved["groups"], strict=True):
            own = {key: value for key, value in group.items() if key == "params" or key in _OF_THE_MACHINE}
            group.clear()
            group.update({**found["options"], **own})
        states: dict[ChunkOptimizer, dict[int, dict[str, Any]]] = {}
        for parameter, shares in self._shares.items():
            entry = saved["parameters"][self._names[parameter]]
            for share in shares:
                if entry["master"] is not None:
                    share.weight.copy_(_part(entry["master"], parameter, share.stretch))
                states.setdefault(share.stepper, {})[share.place] = {
                    key: _part(value, parameter, share.stretch) for key, value in entry["state"].items()
                }
        for stepper, of_places in states.items():
            stepper.set_states([of_places[place] for place in range(len(stepper.weights))])
        self._placed.count_optimizer_state()


def on_host(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor`` itself if it is dense, on the host and alone in its storage, else such a copy."""
    found = tensor.detach().cpu().contiguous()
    is_alone = found.untyped_storage().nbytes() == found.numel() * found.element_size()
    return found if is_alone else found.clone()


def _is_narrow(parameter: nn.Parameter, shares: Sequence[_Share]) -> bool:
    return shares[0].weight.dtype != parameter.dtype


def _master(parameter: nn.Parameter, shares: Sequence[_Share]) -> torch.Tensor | None:
    if not _is_narrow(parameter, shares):
        return None
    return _joined([share.weight for share in shares], parameter)


def _whole_state(parameter: nn.Parameter, shares: Sequence[_Share]) -> dict[str, Any]:
    parts = [share.stepper.state_of(share.place) for share in shares]
    whole: dict[str, Any] = {}
    for key, first in parts[0].items():
        if not isinstance(first, torch.Tensor):
            whole[key] = first
        elif first.shape == shares[0].weight.shape:
            whole[key] = _joined([part[key] for part in parts], parameter)
        else:
            # A count of steps and the like, equal in all parts.
            whole[key] = on_host(first)
    return whole


def _joined(pieces: Sequence[torch.Tensor], parameter: nn.Parameter) -> torch.Tensor:
    if len(pieces) == 1:
        return on_host(pieces[0])
    # On the host before they are joined: the device may have no room for the whole.
    return on_host(strided(torch.cat([piece.detach().cpu() for piece in pieces]), parameter))


def _part(value: Any, parameter: nn.Parameter, stretch: slice | None) -> Any:
    """A copy of what one share gets of a whole state."""
    if not isinstance(value, torch.Tensor):
        return value
    if value.shape != parameter.shape:
        return value.clone()
    # On disk everything is contiguous; beside a parameter its state has the parameter's strides.
    whole = copy_strided(value, parameter)
    return whole if stretch is None else in_memory_order(whole)[stretch].clone()
