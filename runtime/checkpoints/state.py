"""What a checkpoint holds of a training: collected from it, checked against it, placed in it.

Nothing of it depends on the plan, so a training goes on under another one as if nothing had happened.  Two knobs say
what a step computes and not only how, and are noted: micro-batches add up to one step, and gradients may be limited.
Under others a training would go on as another one, which has to be asked for.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Final, Protocol

import torch
from torch import nn

from ...shared.basics.errors import FileError
from ...shared.schema.optimizer import HostGradients
from ...shared.schema.plan import Plan
from ...shared.schema.workload import Workload
from ..chunks.chunk import DeviceChunk
from ..chunks.placed_model import PlacedModel
from ..chunks.sharded_chunk import ShardedChunk
from ..devices.device import TrainingDevice
from ..model.strides import in_memory_order
from ..optimizers.loss_scaling import BlockScalers, LossScaler
from .checkpoints import CheckpointContent
from .optimizer_state import OptimizerState, on_host
from .pieces import Stretch, stretch_of
from .random_states import check_random_states, random_states, set_random_states
from .rank_checkpoint import RankContent
from .saved import WEIGHT, Described, Saved, WantedWeight, inconsistent
from .saved_part import SavedPart

STEP_KNOBS: Final = ("micro_batches", "max_gradient_norm", "host_gradients")
"""The knobs of a plan that change what a step computes."""
_OLDER: Final = {"host_gradients": HostGradients.PARAMETERS.value}
"""Checkpoints without this knob are of plans that did not have it."""


class Scheduler(Protocol):
    """A learning-rate scheduler, as torch's are."""

    def state_dict(self) -> dict[str, Any]:
        """What it needs to go on."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> Any:
        """Go on from there."""


@dataclass(frozen=True, slots=True)
class Resumed:
    """Where a resumed training goes on."""

    step: int
    """Steps that were complete."""
    data_position: Any
    """As it was given to ``save`` on this rank; that of rank 0 if the number of ranks has changed since."""
    data_positions: tuple[Any, ...] = ()
    """Those of all ranks that have saved."""
    step_knobs: Mapping[str, Any] = field(default_factory=dict)
    """The knobs of the plan that it was saved under which change what a step computes."""


class CheckpointState:
    """The state of one training.  Its lanes must be idle but for gathers ahead of the next forward."""

    def __init__(
        self,
        model: nn.Module,
        workload: Workload,
        placed: PlacedModel,
        optimizer: torch.optim.Optimizer,
        device: TrainingDevice,
        *,
        plan: Plan,
        part: SavedPart,
        scaler: LossScaler | BlockScalers | None = None,
    ) -> None:
        """``optimizer`` has the user's parameter groups; ``part`` says what of the model is saved.

        ``scaler`` scales losses, if they are scaled.
        """
        self._model = model
        self._workload = workload
        self._placed = placed
        self._device = device
        self._step_knobs = plan.model_dump(mode="json", include=set(STEP_KNOBS))
        self._part = part
        self._scaler = scaler
        names = {parameter: name for name, parameter in model.named_parameters()}
        self.optimizer = OptimizerState(placed, optimizer.param_groups, names)
        """The state of the optimizers of all chunks."""

    def _saved_by(self, part: SavedPart) -> dict[nn.Parameter, str]:
        """What is saved, with its name in the checkpoint."""
        placed = (named for chunk in self._placed.chunks for named in chunk.named_parameters())
        return {parameter: name for name, parameter in part.parameters(self._model, placed)}

    def _outside(self, names: dict[nn.Parameter, str]) -> list[WantedWeight]:
        """What is saved of parameters that no chunk has."""
        placed = {parameter for chunk in self._placed.chunks for parameter in chunk.parameters}
        found = [(name, p) for p, name in names.items() if p not in placed]
        return [WantedWeight(name, p, 0, in_memory_order(p.detach())) for name, p in found]

    # -- collecting --------------------------------------------------------------------------------------------------

    def collect(self, step: int, scheduler: Scheduler | None, data_position: Any) -> CheckpointContent:
        """Everything, on the host.  What is there already is not copied, so it must be written before training goes on.

        Offloaded chunks are read from their homes: no device memory is needed.
        """
        # Files of safetensors hold contiguous tensors alone: those with other strides are copied.
        held = {
            parameter: value
            for chunk in self._placed.chunks
            for parameter, value in zip(chunk.parameters, chunk.values().values(), strict=True)
        }
        weights = {
            name: (held[p] if p in held else p.detach()).cpu().contiguous()
            for p, name in self._saved_by(self._part).items()
        }
        buffers: dict[str, torch.Tensor] = {}
        for name, buffer, is_kept in self._part.buffers(self._model):
            (weights if is_kept else buffers)[name] = on_host(buffer)
        return CheckpointContent(
            model_hash=self._workload.model_hash,
            model_name=self._workload.model_name,
            step=step,
            weights=weights,
            optimizer=self.optimizer.collect(),
            training={
                "step": step,
                "step_knobs": self._step_knobs,
                "scheduler": _scheduler_state(scheduler),
                "loss_scaler": None if self._scaler is None else self._scaler.state_dict(),
                "random": random_states(self._device.torch_device),
                "data_position": data_position,
                "buffers": buffers,
                "extra": {name: module.get_extra_state() for name, module in _modules_with_extra_state(self._model)},
            },
            configuration=self._part.configuration,
            left_out=self._part.left_out,
        )

    def collect_own(self, step: int, scheduler: Scheduler | None, data_position: Any) -> RankContent:
        """What one of several ranks writes; nothing is copied but what is small, so it is to be written at once."""
        stretches: list[Stretch] = []
        shapes = {}
        names = self._saved_by(self._part)
        for parameter, name in names.items():
            shapes[name] = tuple(parameter.shape), parameter.stride()
        for wanted in (*(_weights_of(chunk) for chunk in self._placed.chunks), self._outside(names)):
            for one in _named(wanted, names):
                stretches.append(stretch_of(WEIGHT + one.name, one.begin, one.into, one.parameter.numel()))
        of_optimizer, values = self.optimizer.pieces()
        buffers: tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]] = {}, {}
        for name, buffer, is_kept in self._part.buffers(self._model):
            buffers[is_kept][name] = on_host(buffer)
        return RankContent(
            model_hash=self._workload.model_hash,
            model_name=self._workload.model_name,
            step=step,
            stretches=stretches + of_optimizer,
            values=values,
            common={
                "step": step,
                "step_knobs": self._step_knobs,
                "scheduler": _scheduler_state(scheduler),
                "loss_scaler": None if self._scaler is None else self._scaler.state_dict(),
                "optimizer": self.optimizer.described(),
                "shapes": shapes,
            },
            num_stages=self._part.num_stages,
            own={
                "random": random_states(self._device.torch_device),
                "data_position": data_position,
                "extra": {name: module.get_extra_state() for name, module in _modules_with_extra_state(self._model)},
            },
            buffers=buffers[False],
            persistent=buffers[True],
            configuration=self._part.configuration,
            left_out=self._part.left_out,
        )

    # -- placing -----------------------------------------------------------------------------------------------------

    def check(self, saved: Saved, scheduler: Scheduler | None, *, allow_changed_step: bool = False) -> None:
        """Raise FileError unless ``saved`` can be placed; changes nothing."""
        training = saved.training
        try:
            knobs = _OLDER | training["step_knobs"]
            changed = [knob for knob in STEP_KNOBS if knobs[knob] != self._step_knobs[knob]]
            if changed and not allow_changed_step:
                raise _changed_step(changed, knobs, self._step_knobs)
            _check_scheduler(training["scheduler"], scheduler)
            _check_scaler(training["loss_scaler"], self._scaler)
            self.optimizer.check(saved, is_elsewhere=self._part.is_elsewhere)
            self._check_tensors(saved, self._part.in_form_of(saved.manifest.left_out))
            extra = {name for name in training["extra"] if not self._part.is_elsewhere(name)}
            if extra != {name for name, _ in _modules_with_extra_state(self._model)}:
                raise FileError("the checkpoint has extra state of other modules than this model has.")
            check_random_states(training["random"])
            int(training["step"])
            _ = training["data_position"]
        except (KeyError, TypeError, ValueError, AttributeError, RuntimeError) as error:
            raise inconsistent(error) from error

    def _check_tensors(self, saved: Saved, part: SavedPart) -> None:
        expected: dict[str, Described] = {
            name: (tuple(parameter.shape), parameter.dtype) for parameter, name in self._saved_by(part).items()
        }
        others = set()
        for name, buffer, is_kept in part.buffers(self._model):
            if is_kept:
                expected[name] = (tuple(buffer.shape), buffer.dtype)
            else:
                others.add(name)
        # What other stages have, they check.
        found = {n: one for n, one in saved.weights.items() if n in expected or not part.is_elsewhere(n)}
        wrong = sorted(name for name in expected.keys() | found.keys() if expected.get(name) != found.get(name))
        wrong += sorted(n for n in others ^ saved.training["buffers"].keys() if n in others or not part.is_elsewhere(n))
        if wrong:
            raise FileError(
                f"the checkpoint and the model differ in {wrong[0]}: it is missing in one, or has another shape or "
                f"dtype. Build the model as it was when it was saved."
            )

    def place(self, saved: Saved, scheduler: Scheduler | None) -> Resumed:
        """Go on from ``saved``, which was checked."""
        training = saved.training
        if scheduler is not None:
            scheduler.load_state_dict(training["scheduler"]["state"])
        if self._scaler is not None:
            self._scaler.load_state_dict(training["loss_scaler"])
        with torch.no_grad():
            part = self._part.in_form_of(saved.manifest.left_out)
            names = self._saved_by(part)
            for chunk in self._placed.chunks:
                if names.keys().isdisjoint(chunk.parameters):
                    continue
                with _rewriting(chunk) as wanted:
                    saved.read_weights(_named(wanted, names))
            saved.read_weights(self._outside(names))
            self.optimizer.place(saved)
            persistent = {name: saved.weight(name) for name, _, is_kept in part.buffers(self._model) if is_kept}
            self._place_buffers({**persistent, **training["buffers"]})
        for name, module in _modules_with_extra_state(self._model):
            module.set_extra_state(training["extra"][name])
        set_random_states(training["random"], self._device.torch_device)
        knobs = _OLDER | training["step_knobs"]
        return Resumed(int(training["step"]), training["data_position"], training["data_positions"], knobs)

    def _place_buffers(self, saved: dict[str, torch.Tensor]) -> None:
        own_names = {of_whole: name for name, of_whole in self._part.renamed.items()}
        for name, buffer, _ in self._part.buffers(self._model):
            value = saved[name]
            if (buffer.shape, buffer.dtype) == (value.shape, value.dtype):
                buffer.copy_(value)
            else:
                path, _, own_name = own_names.get(name, name).rpartition(".")
                self._model.get_submodule(path)._buffers[own_name] = value.to(buffer.device, copy=True)


def _named(wanted: Iterable[WantedWeight], names: dict[nn.Parameter, str]) -> Iterator[WantedWeight]:
    """Those of ``wanted`` that are saved, by their names in the checkpoint."""
    return (replace(one, name=names[one.parameter]) for one in wanted if one.parameter in names)


def _weights_of(chunk: DeviceChunk) -> list[WantedWeight]:
    """What this rank has of a chunk's weights, where they are."""
    if isinstance(chunk, ShardedChunk):
        return [WantedWeight(*own) for own in chunk.own_scalars()]
    return _whole(chunk, chunk.values())


def _whole(chunk: DeviceChunk, values: dict[str, torch.Tensor]) -> list[WantedWeight]:
    return [WantedWeight(name, p, 0, in_memory_order(values[name])) for name, p in chunk.named_parameters()]


@contextmanager
def _rewriting(chunk: DeviceChunk) -> Iterator[list[WantedWeight]]:
    """``_weights_of``, which may be written within the block; lanes are at rest if ranks have parts of chunks."""
    if isinstance(chunk, ShardedChunk):
        yield _weights_of(chunk)
        return
    with chunk.rewriting() as values:
        yield _whole(chunk, values)


def configuration_text(model: nn.Module) -> str | None:
    """The ``config.json`` from which transformers builds a model like this one; None for other models."""
    library = sys.modules.get("transformers.modeling_utils")
    if library is None or not isinstance(model, library.PreTrainedModel):
        return None
    configuration = copy.deepcopy(model.config)
    configuration.architectures = [type(model).__name__]
    setattr(configuration, "dtype" if hasattr(configuration, "dtype") else "torch_dtype", model.dtype)
    return str(configuration.to_json_string())


def _modules_with_extra_state(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for path, module in model.named_modules():
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            yield path, module


def _changed_step(changed: list[str], saved: dict[str, Any], own: dict[str, Any]) -> FileError:
    was, is_now = (", ".join(f"{knob} {knobs[knob]}" for knob in changed) for knobs in (saved, own))
    return FileError(
        f"the checkpoint was saved under a plan with {was}; this plan has {is_now}, so steps would compute something "
        f"else from here on. Carry out a plan that has {was}, or, if the change is meant, call resume(folder, "
        f"allow_changed_step=True)."
    )


def _scheduler_state(scheduler: Scheduler | None) -> dict[str, Any] | None:
    return None if scheduler is None else {"class": type(scheduler).__qualname__, "state": scheduler.state_dict()}


def _check_scheduler(saved: dict[str, Any] | None, scheduler: Scheduler | None) -> None:
    saved_name = None if saved is None else saved["class"]
    name = None if scheduler is None else type(scheduler).__qualname__
    if saved_name == name:
        return
    if saved_name is None:
        raise FileError(f"the checkpoint was saved without a scheduler. Resume without {name}.")
    raise FileError(
        f"the checkpoint was saved with the scheduler {saved_name}; resume() got {name or 'none'}. Pass one made as "
        f"the saved one was: resume(folder, scheduler=...)."
    )


def _check_scaler(saved: dict[str, Any] | None, scaler: LossScaler | BlockScalers | None) -> None:
    if (saved is None) != (scaler is None):
        was, remedy = ("without", "Resume without it") if saved is None else ("with", "Pass it to carry_out()")
        raise FileError(f"the checkpoint was saved {was} loss_scaling. {remedy}.")
    if saved is not None and scaler is not None:
        scaler.check(saved)
