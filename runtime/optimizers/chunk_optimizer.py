"""The optimizer of one chunk: a plain torch optimizer over float32 weights, on the host or on the device.

torch's fused AdamW gives the same bits for a parameter alone and among others, so chunking does not change a result.
Parameters keep their groups, and one without a gradient is left alone, exactly as the optimizer treats it elsewhere.

[Note: One step of bitsandbytes at a time]
Kernels of bitsandbytes 0.50.2 for the CPU give wrong values now and then while another thread runs them, although the
two share no tensor (four threads, each with an ``AdamW8bit`` of its own: one run in three differs).  CPU Adam of one
chunk and the step on a CPU as the device run side by side, so the steps of a process take turns.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from threading import Lock
from typing import Any, Final

import torch
from torch import nn

from ...shared.basics.errors import PlanError
from ...shared.schema.workload import Workload
from .quantization_maps import restore_maps
from .state_place import MASTER, StatePlace
from .step_options import GroupOptions, ParameterGroup, StepOptions
from .widened_gradients import WidenedGradients

_STEP_OF_BITSANDBYTES: Final = Lock()
MakeOptimizer = Callable[[list[dict[str, Any]]], torch.optim.Optimizer]
"""From parameter groups to an optimizer, such as ``partial(torch.optim.AdamW, lr=1e-4, fused=True)``."""


def default_optimizer(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    """Fused AdamW with torch's default options."""
    return torch.optim.AdamW(groups, fused=True)


class ChunkOptimizer:
    """Steps some weights with the options of the groups that their parameters belong to."""

    def __init__(
        self,
        weights: Sequence[torch.Tensor],
        parameters: Sequence[nn.Parameter],
        options: StepOptions,
        make_optimizer: MakeOptimizer,
        *,
        targets: Sequence[torch.Tensor | None] | None = None,
        place: StatePlace | None = None,
        widened: WidenedGradients | None = None,
    ) -> None:
        """Make the optimizer of ``weights``, the float32 masters of ``parameters``.

        ``options`` knows the parameters' groups and what each step is done with; ``targets`` are narrower tensors that
        stepped weights are written to; ``place`` is where state lies that is kept on a disk; ``widened`` has a place
        for gradients narrower than their weights, which those whose steps take turns share.  Raises PlanError if the
        optimizer refuses its options.
        """
        self.place = place
        self._widened = widened
        self._weights = list(weights)
        self._targets = list(targets) if targets is not None else [None] * len(self._weights)
        self._options = options
        self.labels = tuple(options.label_of(parameter) for parameter in parameters)
        """Whose weights they are, for messages."""
        members: dict[int, list[torch.Tensor]] = {}
        for weight, parameter in zip(self._weights, parameters, strict=True):
            members.setdefault(options.group_of(parameter), []).append(weight)
        self._groups = tuple(members)
        groups = [{**options.groups[index].options, "params": weights} for index, weights in members.items()]
        self.optimizer = _made(make_optimizer, groups)
        self._alone = self._one_at_a_time()
        options.note(self._groups, self.optimizer)
        self.num_steps = 0
        """Steps that have begun."""
        self._latest: GroupOptions | None = None

    def _one_at_a_time(self) -> AbstractContextManager[object]:
        """What a step holds while it runs ([Note: One step of bitsandbytes at a time]).

        Raises PlanError if the optimizer would step a copy of a weight that does not lie in one row.
        """
        if type(self.optimizer).__module__.partition(".")[0] != "bitsandbytes":
            return nullcontext()
        for weight, label in zip(self._weights, self.labels, strict=True):
            if not weight.is_contiguous():
                raise PlanError(
                    f"{label} has strides {weight.stride()} for shape {tuple(weight.shape)}, and bitsandbytes steps "
                    f"contiguous tensors alone. Make it contiguous before tracing, or choose an optimizer of torch."
                )
        return _STEP_OF_BITSANDBYTES if any(weight.device.type == "cpu" for weight in self._weights) else nullcontext()

    def step(self, gradients: Sequence[torch.Tensor | None], *, factor: torch.Tensor | None = None) -> None:
        """One step; a weight whose gradient is None is left alone.

        ``factor`` is what gradients are multiplied by, in the type of the weights; if it is NaN, no weight is stepped.
        """
        self._take_options()
        if factor is not None and factor.isnan():
            return
        with torch.no_grad():
            for weight, gradient in zip(self._weights, self._in_type_of_weights(gradients), strict=True):
                weight.grad = gradient
                if factor is not None and weight.grad is not None:
                    weight.grad.mul_(factor)
            made = nullcontext() if self.place is None else self.place.making(self.optimizer, self._weights)
            with made, self._alone:
                self.optimizer.step()
            for weight, target, gradient in zip(self._weights, self._targets, gradients, strict=True):
                weight.grad = None
                if target is not None and gradient is not None:
                    target.copy_(weight)

    def _in_type_of_weights(self, gradients: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        if self._widened is not None:
            return self._widened.of(gradients, self._weights)
        pairs = zip(gradients, self._weights, strict=True)
        return [None if gradient is None else gradient.to(weight.dtype) for gradient, weight in pairs]

    def _take_options(self) -> None:
        """Give the groups the options that this step is to be done with (Note: Options of a step)."""
        planned = self._options.of_step(self.num_steps)
        self.num_steps += 1
        if planned is not None and planned is not self._latest:
            for group, index in zip(self.optimizer.param_groups, self._groups, strict=True):
                group.update(planned[index])
            self._latest = planned

    def take_step_back(self) -> None:
        """The latest step is undone by who kept what it has overwritten: the next one has its number."""
        self.num_steps -= 1
        self._latest = None

    @property
    def weights(self) -> tuple[torch.Tensor, ...]:
        """What is stepped, in the order of the parameters."""
        return tuple(self._weights)

    @property
    def stepped_tensors(self) -> list[torch.Tensor]:
        """Everything that a step writes beside the optimizer's state: the weights, and what they are written to."""
        return [*self._weights, *(target for target in self._targets if target is not None)]

    def state_of(self, place: int) -> dict[str, Any]:
        """The optimizer's state of one weight; empty if it was never stepped.

        What is kept on a disk is read from there: it is to be used before the next step.  Raises FileError.
        """
        state = dict(self.optimizer.state.get(self._weights[place], {}))
        if self.place is None:
            return state
        on_disk = self.place.on_disk()
        kept = {name for name, value in state.items() if self.place.has((place, name), value)}
        return {name: on_disk((place, name)) if name in kept else value for name, value in state.items()}

    def give_up_state(self, place: int) -> None:
        """The optimizer's state of one weight goes."""
        self.optimizer.state.pop(self._weights[place], None)

    def weight_of(self, place: int) -> torch.Tensor:
        """One weight as it is now; what is kept on a disk is read from there, as ``state_of`` does."""
        weight = self._weights[place]
        if self.place is None or not self.place.has((place, MASTER), weight):
            return weight
        return self.place.on_disk()((place, MASTER))

    @contextmanager
    def at_hand(self) -> Iterator[None]:
        """Within the block weights and state are in memory and may be written; no lane runs.  Raises FileError."""
        if self.place is not None:
            self.place.record.read_to_step()
        yield
        if self.place is not None:
            self.place.record.write_stepped()

    def set_states(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Replace the optimizer's state of all weights; their tensors become the optimizer's own."""
        place_of = {id(weight): place for place, weight in enumerate(self._weights)}
        order = [place_of[id(weight)] for group in self.optimizer.param_groups for weight in group["params"]]
        found = {index: states[place] for index, place in enumerate(order) if states[place]}
        groups = self.optimizer.state_dict()["param_groups"]
        # Given up first, so that the device never holds both.
        self.optimizer.state.clear()
        self.optimizer.load_state_dict({"state": found, "param_groups": groups})
        restore_maps(self.optimizer)
        if self.place is not None:
            self.place.adopt(self.optimizer, self._weights)

    def state_tensors(self) -> list[torch.Tensor]:
        """The optimizer's own tensors."""
        return [t for state in self.optimizer.state.values() for t in state.values() if isinstance(t, torch.Tensor)]


def _made(make_optimizer: MakeOptimizer, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    """One chunk's optimizer.  Raises PlanError if there is none, or one that cannot step a chunk by itself."""
    try:
        made = make_optimizer(groups)
    except ValueError as error:
        raise PlanError(
            f"the optimizer refuses its options or parameters: {error}. Every chunk has one optimizer for all of its "
            f"parameters: change the options, or choose an optimizer that steps parameters of every shape."
        ) from error
    except TypeError as error:
        raise PlanError(
            f"optimizer= could not make an optimizer from a list of parameter groups: {error}. Pass what does, such as "
            f"functools.partial(torch.optim.AdamW, lr=1e-4, fused=True)."
        ) from error
    if not isinstance(made, torch.optim.Optimizer):
        raise PlanError(
            f"optimizer= made {type(made).__name__} in the place of a torch.optim.Optimizer. Pass what makes one from "
            f"a list of parameter groups, such as functools.partial(torch.optim.AdamW, lr=1e-4, fused=True)."
        )
    name = type(made).__name__
    closure = inspect.signature(made.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise PlanError(
            f"{name} calls the model again within its step, where the schedule expects nothing. Choose an optimizer "
            f"that steps with the gradients that are there, such as AdamW or SGD."
        )
    if isinstance(made, torch.optim.SparseAdam):
        raise PlanError(f"{name} takes sparse gradients alone, and here all are dense. Choose AdamW or Adam.")
    return made


def group_options(
    model: nn.Module, parameter_groups: Sequence[Mapping[str, Any]] | None, workload: Workload | None = None
) -> StepOptions:
    """The groups of the model's parameters, from torch's form of parameter groups.

    None puts all trainable ones into one group without options.  ``workload`` names their blocks in messages.  Raises
    PlanError if a trainable parameter is in no group, or any in two, or one that is not the model's.
    """
    every = {id(parameter): name for name, parameter in model.named_parameters()}
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    labels = _labels(every, workload)
    if parameter_groups is None:
        return StepOptions([ParameterGroup(tuple(trainable), {})], labels)
    groups: list[ParameterGroup] = []
    grouped: set[int] = set()
    for group in parameter_groups:
        if not isinstance(group, Mapping) or "params" not in group:
            raise PlanError(
                "a parameter group is no table with 'params'. Give a list of them: [{'params': [...], 'lr': ...}, ...]."
            )
        chosen = {key: value for key, value in group.items() if key != "params"}
        given = group["params"]
        members = (given,) if isinstance(given, torch.Tensor) else tuple(given)
        for parameter in members:
            if id(parameter) not in every:
                raise PlanError(
                    "a parameter group holds something that is no parameter of the model. Take the groups from "
                    "model.named_parameters() of the model itself."
                )
            if id(parameter) in grouped:
                raise PlanError(f"parameter {every[id(parameter)]} is in two parameter groups. Leave it in one.")
            grouped.add(id(parameter))
        groups.append(ParameterGroup(members, chosen))
    missing = [every[id(parameter)] for parameter in trainable if id(parameter) not in grouped]
    if missing:
        raise PlanError(
            f"{len(missing)} trainable parameters are in no parameter group, {missing[0]} among them. Add them, or "
            f"set requires_grad to False before tracing."
        )
    return StepOptions(groups, labels)


def _labels(names: Mapping[int, str], workload: Workload | None) -> dict[int, str]:
    """Every parameter's name with the part of the model that owns it, by ``id``."""
    if workload is None:
        return dict(names)
    owners = {p.name: p.block for p in workload.parameters}

    def label(name: str) -> str:
        block = owners.get(name)
        return f"{name} (outside every block)" if block is None else f"{name} (block {workload.blocks[block].name})"

    return {key: label(name) for key, name in names.items()}
