"""The state of all chunks' optimizers by parameter, so that it means the same under every plan.

A parameter's state may lie in one optimizer on the host, in one on the device, or in several that step a stretch each
(Note: Widened gradients); here it is always whole, with the shape of the parameter.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import torch
from torch import nn

from ...shared.basics.errors import FileError, PlanError
from ...shared.optimizers.state import BLOCK_SCALARS
from ..chunks.placed_model import PlacedModel
from ..model.strides import copy_strided, in_memory_order, strided
from ..optimizers.chunk_optimizer import ChunkOptimizer
from .pieces import Stretch, stretch_of
from .saved import MASTER, STATE, VALUES, Saved, is_of_scalars, part_of

_MASTER: Final = "master_param"
"""The key of a narrow parameter's float32 weight beside its state."""
_SCALES: Final = ("absmax1", "absmax2")
_MAPS: Final = ("qmap1", "qmap2")
_OF_THE_MACHINE: Final = frozenset({"capturable", "differentiable", "foreach", "fused"})
"""Options that say how an optimizer computes, not what: a resumed training keeps its own."""


_PartOf = Callable[[nn.Parameter, slice | None], tuple[Mapping[str, Any], torch.Tensor | None]]
"""Gives a parameter's state and master, or those of a stretch of its scalars, in new tensors."""

WholeState = tuple[Mapping[str, Any], torch.Tensor | None]
"""The state of a parameter, and its master if it is narrower than that."""
WholeStates = Mapping[nn.Parameter, WholeState]


@dataclass(frozen=True, slots=True)
class _Share:
    """A parameter, or a stretch of its scalars, in one optimizer."""

    stepper: ChunkOptimizer
    place: int
    stretch: slice | None

    @property
    def weight(self) -> torch.Tensor:
        return self.stepper.weights[self.place]

    def tensors(self) -> list[torch.Tensor]:
        """The optimizer's own tensors for it."""
        return [value for value in self.stepper.state_of(self.place).values() if isinstance(value, torch.Tensor)]


class OptimizerState:
    """Reads and writes the state of the optimizers of a placed model."""

    def __init__(
        self, placed: PlacedModel, param_groups: Sequence[dict[str, Any]], names: Mapping[nn.Parameter, str]
    ) -> None:
        """``param_groups`` are those that the user sees, over the model's parameters; ``names`` names these."""
        self._placed = placed
        self._param_groups = param_groups
        self._names = names
        self.options = frozenset(key for group in param_groups for key in group) - {"params"}
        """What groups had when training began: the options of the optimizer, without those of schedulers."""
        self._shares: dict[nn.Parameter, list[_Share]] = {}
        for stepper, parameters, stretches in placed.optimizers.steppers():
            for place, (parameter, stretch) in enumerate(zip(parameters, stretches, strict=True)):
                self._shares.setdefault(parameter, []).append(_Share(stepper, place, stretch))
        self._stepped = frozenset(names[parameter] for chunk in placed.chunks for parameter in chunk.trainable)
        """All that are stepped, by whichever rank."""

    @property
    def _class_name(self) -> str:
        classes = {type(share.stepper.optimizer) for shares in self._shares.values() for share in shares}
        return ", ".join(sorted(f"{found.__module__}.{found.__qualname__}" for found in classes))

    def _members(self) -> list[list[str]]:
        return [[self._names[parameter] for parameter in group["params"]] for group in self._param_groups]

    # -- reading -----------------------------------------------------------------------------------------------------

    def collect(self) -> dict[str, Any]:
        """Everything, on the host; tensors that are there already are not copied."""
        return self.described() | {
            "parameters": {
                self._names[parameter]: {"state": _whole_state(parameter, shares), "master": _master(parameter, shares)}
                for parameter, shares in self._shares.items()
            },
        }

    def described(self) -> dict[str, Any]:
        """The class and the groups, with the names of all parameters that are stepped."""
        options = [{key: value for key, value in group.items() if key != "params"} for group in self._param_groups]
        return {
            "class": self._class_name,
            "groups": [{"names": n, "options": o} for n, o in zip(self._members(), options, strict=True)],
            "parameters": sorted(self._stepped),
        }

    def pieces(self) -> tuple[list[Stretch], dict[str, Callable[[], Any]]]:
        """What this rank has of masters and state, and of what else there is by parameter; nothing is copied yet."""
        stretches: list[Stretch] = []
        values: dict[str, Callable[[], Any]] = {}
        for parameter, shares in self._shares.items():
            name, whole = self._names[parameter], parameter.numel()
            for share in shares:
                begin = 0 if share.stretch is None else share.stretch.start
                weight = share.weight
                if _is_narrow(parameter, shares):
                    stretches.append(stretch_of(MASTER + name, begin, in_memory_order(weight), whole))
                rest = {}
                for key, value in share.stepper.state_of(share.place).items():
                    if is_of_scalars(key, value, weight.shape):
                        like = value if value.stride() == weight.stride() else copy_strided(value, weight)
                        stretches.append(stretch_of(f"{STATE}{key}/{name}", begin, in_memory_order(like), whole))
                    else:
                        rest[key] = value
                if rest:
                    values.setdefault(VALUES + name, partial(_values_on_host, rest))
        return stretches, values

    # -- writing -----------------------------------------------------------------------------------------------------

    def check(self, saved: Saved, *, is_elsewhere: Callable[[str], bool] = lambda name: False) -> None:
        """Raise FileError unless the state in ``saved`` can be placed.

        ``is_elsewhere`` names what other stages of a pipeline step and check.
        """
        described = saved.optimizer
        if described["class"] != self._class_name and (self._shares or not any(map(is_elsewhere, saved.masters))):
            raise FileError(
                f"the checkpoint was saved with the optimizer {described['class']}; this training has "
                f"{self._class_name or 'none'}. Pass the same optimizer to carry_out()."
            )
        groups = [sorted(n for n in group["names"] if not is_elsewhere(n)) for group in described["groups"]]
        if groups != [sorted(names) for names in self._members()]:
            raise FileError(
                f"the checkpoint was saved with other parameter groups ({len(described['groups'])}; this training has "
                f"{len(self._param_groups)}, or others in them). Pass the same parameter_groups to carry_out()."
            )
        masters = saved.masters
        if {name for name in masters if not is_elsewhere(name)} != self._stepped:
            raise FileError("the checkpoint's optimizer stepped other parameters than this training's does.")
        for parameter, shares in self._shares.items():
            if not parameter.numel():
                continue
            name = self._names[parameter]
            expected = (tuple(parameter.shape), shares[0].weight.dtype) if _is_narrow(parameter, shares) else None
            if expected != masters[name]:
                raise FileError(f"the checkpoint's master of parameter {name} has not the shape or dtype expected.")

    def place(self, saved: Saved) -> None:
        """Give every optimizer its part of ``saved``, which was checked."""
        self._place_options([group["options"] for group in saved.optimizer["groups"]])
        self._place_states(lambda parameter, stretch: saved.state(self._names[parameter], parameter, stretch))

    def _place_options(self, options: Sequence[Mapping[str, Any]]) -> None:
        for group, found in zip(self._param_groups, options, strict=True):
            own = {key: value for key, value in group.items() if key == "params" or key in _OF_THE_MACHINE}
            group.clear()
            group.update({**found, **own})

    def _place_states(self, part_of_state: _PartOf) -> None:
        by_stepper: dict[ChunkOptimizer, list[tuple[nn.Parameter, _Share]]] = {}
        for parameter, shares in self._shares.items():
            for share in shares:
                by_stepper.setdefault(share.stepper, []).append((parameter, share))
        # One after the other: of what lies on a disk, the host has room for few.
        for stepper, members in by_stepper.items():
            states: list[dict[str, Any]] = [{} for _ in stepper.weights]
            with stepper.at_hand():
                for parameter, share in members:
                    state, master = part_of_state(parameter, share.stretch)
                    if master is not None:
                        share.weight.copy_(master)
                    states[share.place] = dict(state)
                stepper.set_states(states)
        self._placed.optimizers.count_state()

    # -- torch's form of it ------------------------------------------------------------------------------------------

    def by_parameter(self) -> dict[nn.Parameter, dict[str, Any]]:
        """The state of every parameter that was stepped, in copies on the host; narrow ones with their master."""
        found: dict[nn.Parameter, dict[str, Any]] = {}
        for group in self._param_groups:
            for parameter in group["params"]:
                shares = self._shares.get(parameter)
                state = None if shares is None else _whole_state(parameter, shares)
                if shares and state:
                    master = _master(parameter, shares)
                    state |= {} if master is None else {_MASTER: master}
                    found[parameter] = {key: _copied(value, shares) for key, value in state.items()}
        return found

    def taken(self) -> dict[nn.Parameter, WholeState]:
        """The state of every parameter and the master of narrow ones, on the host; where they were, they are no more.

        The training that has it is to be closed, or given it back (``set_taken``).
        """
        found: dict[nn.Parameter, WholeState] = {}
        for parameter, shares in self._shares.items():
            state = {key: _copied(value, shares) for key, value in _whole_state(parameter, shares).items()}
            master = _master(parameter, shares)
            found[parameter] = state, None if master is None else _copied(master, shares)
            for share in shares:
                share.stepper.give_up_state(share.place)
        return found

    def set_taken(self, states: dict[nn.Parameter, WholeState]) -> None:
        """Give every optimizer its part of what ``taken`` gave, which is emptied on the way."""
        waiting = Counter({parameter: len(shares) for parameter, shares in self._shares.items()})

        def part(parameter: nn.Parameter, stretch: slice | None) -> tuple[dict[str, Any], torch.Tensor | None]:
            found = _part_of_whole(states, parameter, stretch)
            waiting[parameter] -= 1
            if not waiting[parameter]:
                del states[parameter]
            return found

        with torch.no_grad():
            self._place_states(part)

    def checked(self, states: Mapping[nn.Parameter, Mapping[str, Any]]) -> WholeStates:
        """The state of all parameters with their masters, from torch's form; without ``states`` there is none.

        Raises PlanError if a state has not the shape of its parameter, or a master is rounded to another weight than
        the parameter has.
        """
        values = {name: value for chunk in self._placed.chunks for name, value in chunk.values().items()}
        found: dict[nn.Parameter, tuple[Mapping[str, Any], torch.Tensor | None]] = {}
        for parameter, shares in self._shares.items():
            state, name = dict(states.get(parameter, {})), self._names[parameter]
            given = state.pop(_MASTER, None)
            for key, part in state.items():
                if not _fits(key, part, parameter):
                    raise PlanError(
                        f"the optimizer's state_dict has a {key} of shape {tuple(part.shape)} for parameter {name} of "
                        f"shape {tuple(parameter.shape)}. Load the state_dict of an optimizer of this model."
                    )
            is_narrow = _is_narrow(parameter, shares)
            found[parameter] = (state, _checked_master(given, values[name], name) if is_narrow else None)
        return found

    def set_by_parameter(self, groups: Sequence[Mapping[str, Any]], states: WholeStates) -> None:
        """Replace the options of all groups and the state of all parameters, which were checked."""
        own = ({k: v for k, v in group.items() if k in self.options} for group in self._param_groups)
        kept = ({k: v for k, v in group.items() if k not in ("params", "param_names")} for group in groups)
        self._place_options([{**mine, **theirs} for mine, theirs in zip(own, kept, strict=True)])
        with torch.no_grad():
            self._place_states(partial(_part_of_whole, states))


def _part_of_whole(
    states: WholeStates, parameter: nn.Parameter, stretch: slice | None
) -> tuple[dict[str, Any], torch.Tensor | None]:
    state, master = states[parameter]
    found = {key: part_of(value, parameter, stretch) for key, value in state.items()}
    return found, None if master is None else part_of(master, parameter, stretch)


def _values_on_host(values: Mapping[str, Any]) -> dict[str, Any]:
    return {key: on_host(value) if isinstance(value, torch.Tensor) else value for key, value in values.items()}


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
    return _joined([share.stepper.weight_of(share.place) for share in shares], parameter)


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


def _checked_master(given: torch.Tensor | None, value: torch.Tensor, name: str) -> torch.Tensor:
    """The master that was given for a weight of ``value``, or else the weight."""
    if given is None:
        return value.detach().float()
    if given.shape != value.shape or not torch.equal(given.to(value.device, value.dtype), value):
        raise PlanError(
            f"the {_MASTER} of parameter {name} in the optimizer's state_dict is not rounded to the weight that the "
            f"model has. Load the model's weights of the same moment before the plan is carried out."
        )
    return given


def _copied(value: Any, shares: Sequence[_Share]) -> Any:
    """``value``, or a copy if an optimizer on the host goes on writing to it."""
    if not isinstance(value, torch.Tensor):
        return value
    if any(share.stepper.place is not None for share in shares):
        # The file that it is read from is written again.
        return value.clone()
    live = {share.weight.untyped_storage()._cdata for share in shares}
    live |= {tensor.untyped_storage()._cdata for share in shares for tensor in share.tensors()}
    return value.clone() if value.untyped_storage()._cdata in live else value


def _fits(key: str, value: Any, parameter: nn.Parameter) -> bool:
    """Whether a state may be one of ``parameter``: of its shape, a number, or factors of its shape as Adafactor has.

    8-bit state has a scale for every block of scalars, and maps of its own length ([Note: 8-bit state]).
    """
    if key in _SCALES and isinstance(value, torch.Tensor):
        return value.shape == (-(-parameter.numel() // BLOCK_SCALARS),)
    if key in _MAPS:
        return True
    if not isinstance(value, torch.Tensor) or value.numel() == 1:
        return True
    if value.dim() != parameter.dim():
        return False
    return all(size in (1, whole) for size, whole in zip(value.shape, parameter.shape, strict=True))
