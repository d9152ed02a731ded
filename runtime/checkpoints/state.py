"""What a checkpoint holds of a training: collected from it, checked against it, placed in it.

Nothing of it depends on the plan, so a training goes on under another one as if nothing had happened.  Two knobs say
what a step computes and not only how, and are noted: micro-batches add up to one step, and gradients may be limited.
Under others a training would go on as another one, which has to be asked for.
"""

from __future__ import annotations

import copy
import random
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final, Protocol

import numpy as np
import torch
from torch import nn

from ...shared.basics.errors import FileError
from ...shared.schema.optimizer import HostGradients
from ...shared.schema.plan import Plan
from ...shared.schema.workload import Workload
from ..chunks.placed_model import PlacedModel
from ..devices.device import TrainingDevice
from ..optimizers.loss_scaling import LossScaler
from .checkpoints import CheckpointContent
from .optimizer_state import OptimizerState, on_host

STEP_KNOBS: Final = ("micro_batches", "max_gradient_norm", "host_gradients")
"""The knobs of a plan that change what a step computes."""


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
    """As it was given to ``save``."""


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
        configuration: str | None,
        scaler: LossScaler | None = None,
    ) -> None:
        """``optimizer`` has the user's parameter groups; ``configuration`` is the model's as the user made it.

        ``scaler`` scales losses, if they are scaled.
        """
        self._model = model
        self._workload = workload
        self._placed = placed
        self._device = device
        self._step_knobs = plan.model_dump(mode="json", include=set(STEP_KNOBS))
        self._configuration = configuration
        self._scaler = scaler
        names = {parameter: name for name, parameter in model.named_parameters()}
        self.optimizer = OptimizerState(placed, optimizer.param_groups, names)
        """The state of the optimizers of all chunks."""

    # -- collecting --------------------------------------------------------------------------------------------------

    def collect(self, step: int, scheduler: Scheduler | None, data_position: Any) -> CheckpointContent:
        """Everything, on the host.  What is there already is not copied, so it must be written before training goes on.

        Offloaded chunks are read from their homes: no device memory is needed.
        """
        # Files of safetensors hold contiguous tensors alone: those with other strides are copied.
        weights = {
            name: value.cpu().contiguous() for chunk in self._placed.chunks for name, value in chunk.values().items()
        }
        buffers: dict[str, torch.Tensor] = {}
        for name, buffer, is_persistent in _buffers(self._model):
            (weights if is_persistent else buffers)[name] = on_host(buffer)
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
            configuration=self._configuration,
        )

    # -- placing -----------------------------------------------------------------------------------------------------

    def check(
        self, content: CheckpointContent, scheduler: Scheduler | None, *, allow_changed_step: bool = False
    ) -> None:
        """Raise FileError unless ``content`` can be placed; changes nothing."""
        training = content.training
        try:
            # Checkpoints without the last knob are of plans that did not have it.
            saved = {"host_gradients": HostGradients.PARAMETERS.value} | training["step_knobs"]
            changed = [knob for knob in STEP_KNOBS if saved[knob] != self._step_knobs[knob]]
            if changed and not allow_changed_step:
                raise _changed_step(changed, saved, self._step_knobs)
            _check_scheduler(training["scheduler"], scheduler)
            _check_scaler(training["loss_scaler"], self._scaler)
            self.optimizer.check(content.optimizer)
            self._check_tensors(content)
            if training["extra"].keys() != {name for name, _ in _modules_with_extra_state(self._model)}:
                raise FileError("the checkpoint has extra state of other modules than this model has.")
            check_random_states(training["random"])
            int(training["step"])
            _ = training["data_position"]
        except (KeyError, TypeError, ValueError, AttributeError, RuntimeError) as error:
            raise FileError(
                f"the checkpoint is inconsistent ({type(error).__name__}: {error}). Resume from another one."
            ) from error

    def _check_tensors(self, content: CheckpointContent) -> None:
        expected = {p.name: (tuple(p.shape), p.dtype.value) for p in self._workload.parameters}
        others = set()
        for name, buffer, is_persistent in _buffers(self._model):
            if is_persistent:
                expected[name] = (tuple(buffer.shape), _dtype_name(buffer))
            else:
                others.add(name)
        found = {name: (tuple(tensor.shape), _dtype_name(tensor)) for name, tensor in content.weights.items()}
        wrong = sorted(name for name in expected.keys() | found.keys() if expected.get(name) != found.get(name))
        wrong += sorted(others ^ content.training["buffers"].keys())
        if wrong:
            raise FileError(
                f"the checkpoint and the model differ in {wrong[0]}: it is missing in one, or has another shape or "
                f"dtype. Build the model as it was when it was saved."
            )

    def place(self, content: CheckpointContent, scheduler: Scheduler | None) -> Resumed:
        """Go on from ``content``, which was checked."""
        training = content.training
        if scheduler is not None:
            scheduler.load_state_dict(training["scheduler"]["state"])
        if self._scaler is not None:
            self._scaler.load_state_dict(training["loss_scaler"])
        with torch.no_grad():
            for chunk in self._placed.chunks:
                with chunk.rewriting() as values:
                    for name, value in values.items():
                        value.copy_(content.weights[name])
            self.optimizer.place(content.optimizer)
            self._place_buffers({**content.weights, **training["buffers"]})
        for name, module in _modules_with_extra_state(self._model):
            module.set_extra_state(training["extra"][name])
        set_random_states(training["random"], self._device.torch_device)
        return Resumed(int(training["step"]), training["data_position"])

    def _place_buffers(self, saved: dict[str, torch.Tensor]) -> None:
        for name, buffer, _ in _buffers(self._model):
            value = saved[name]
            if (buffer.shape, buffer.dtype) == (value.shape, value.dtype):
                buffer.copy_(value)
            else:
                path, _, own_name = name.rpartition(".")
                self._model.get_submodule(path)._buffers[own_name] = value.to(buffer.device, copy=True)


def configuration_text(model: nn.Module) -> str | None:
    """The ``config.json`` from which transformers builds a model like this one; None for other models."""
    library = sys.modules.get("transformers.modeling_utils")
    if library is None or not isinstance(model, library.PreTrainedModel):
        return None
    configuration = copy.deepcopy(model.config)
    configuration.architectures = [type(model).__name__]
    setattr(configuration, "dtype" if hasattr(configuration, "dtype") else "torch_dtype", model.dtype)
    return str(configuration.to_json_string())


def _buffers(model: nn.Module) -> Iterator[tuple[str, torch.Tensor, bool]]:
    """Every buffer once: its name, itself, and whether ``state_dict`` holds it."""
    transient = {
        f"{path}.{name}" if path else name
        for path, module in model.named_modules(remove_duplicate=False)
        for name in module._non_persistent_buffers_set
    }
    for name, buffer in model.named_buffers():
        yield name, buffer, name not in transient


def _modules_with_extra_state(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for path, module in model.named_modules():
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            yield path, module


def _dtype_name(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


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


def _check_scaler(saved: dict[str, Any] | None, scaler: LossScaler | None) -> None:
    if (saved is None) != (scaler is None):
        was, remedy = ("without", "Resume without it") if saved is None else ("with", "Pass it to carry_out()")
        raise FileError(f"the checkpoint was saved {was} loss_scaling. {remedy}.")
    if saved is not None and scaler is not None:
        LossScaler(scaler.scaling, micro_batches=1).load_state_dict(saved)


# -- random generators: Python's, numpy's, torch's ---------------------------------------------------------------------


def random_states(device: torch.device) -> dict[str, Any]:
    """The states of all generators, in types that torch reads back without unpickling code.

    Of CUDA devices ``device`` alone is asked.
    """
    name, keys, position, has_gauss, cached_gaussian = np.random.get_state()
    states: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": (name, torch.from_numpy(np.asarray(keys).astype(np.int64)), position, has_gauss, cached_gaussian),
        "torch": torch.get_rng_state(),
    }
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return states


def set_random_states(states: dict[str, Any], device: torch.device) -> None:
    """Let all generators go on from ``states``; a CUDA device's is set if they were taken with one."""
    name, keys, position, has_gauss, cached_gaussian = states["numpy"]
    random.setstate(states["python"])
    np.random.set_state((name, keys.numpy().astype(np.uint32), position, has_gauss, cached_gaussian))
    torch.set_rng_state(states["torch"])
    if device.type == "cuda" and "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"], device)


def check_random_states(states: dict[str, Any]) -> None:
    """Try ``states`` on generators of its own.  Raises ValueError, TypeError, KeyError or RuntimeError."""
    name, keys, position, has_gauss, cached_gaussian = states["numpy"]
    random.Random().setstate(states["python"])
    np.random.RandomState().set_state((name, keys.numpy().astype(np.uint32), position, has_gauss, cached_gaussian))
    torch.Generator().set_state(states["torch"])
