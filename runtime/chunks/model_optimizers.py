"""Who steps the weights of a model: one optimizer per chunk on the host, and those of what stays on the device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from ...shared.schema.optimizer import Optimizer
from ...shared.schema.schedule import Content
from ..devices.device import TrainingDevice
from ..optimizers.chunk_optimizer import ChunkOptimizer, MakeOptimizer
from ..optimizers.device_steps import DeviceStep, narrow_steps, whole_step
from ..optimizers.loss_scaling import BlockScalers, LossScaler
from ..optimizers.quantization_maps import share_maps
from ..optimizers.step_options import StepOptions
from ..optimizers.widened_gradients import WidenedGradients
from .chunk import DeviceChunk
from .sharded_chunk import ShardedChunk, part_optimizer


@dataclass(frozen=True, slots=True)
class StepPolicy:
    """How weights are stepped, wherever they are."""

    options: StepOptions
    make_optimizer: MakeOptimizer
    """What makes the optimizers of what is stepped on the device."""
    make_on_host: MakeOptimizer
    """What makes those of chunks that are stepped on the host."""
    check_gradients: bool = True
    """Whether to refuse to step with gradients that are not finite."""
    scaler: LossScaler | BlockScalers | None = None
    """Losses are scaled by it, and gradients are unscaled when they are stepped."""
    keep_last_step: bool = False
    """Whether what host steps overwrite is kept until the iteration is complete."""


class ModelOptimizers:
    """The optimizers of one model's chunks, made chunk by chunk."""

    def __init__(self, policy: StepPolicy, optimizer: Optimizer, device: TrainingDevice) -> None:
        self.host: dict[int, ChunkOptimizer] = {}
        """Of chunks that the host steps, by their number."""
        self.device: list[DeviceStep] = []
        """The steps of what stays whole on the device, in order."""
        self.parts: list[tuple[ShardedChunk, ChunkOptimizer]] = []
        """The steps of parts that stay on the device."""
        self.masters: dict[nn.Parameter, torch.Tensor] = {}
        """Float32 masters of narrower parameters that stay on the device."""
        self._policy = policy
        self._optimizer = optimizer
        self._ledger = device.ledger
        self._stepped: dict[int, DeviceChunk] = {}
        """The chunks that ``host`` steps."""
        self._widened = WidenedGradients()
        """Of the chunk that the host steps at the moment."""
        self._num_counted = 0
        """Parameters whose optimizer state the ledger knows."""

    def add(self, chunk: DeviceChunk) -> None:
        """Make what steps ``chunk``; what one step takes with others of its kind is made by ``add_whole``."""
        if not chunk.trainable:
            return
        policy = self._policy
        if isinstance(chunk, ShardedChunk) and chunk.is_on_device:
            self.parts.append((chunk, part_optimizer(chunk, policy.options, policy.make_optimizer)))
        elif chunk.is_persistent:
            self._add_staying(chunk)
        else:
            self._stepped[chunk.chunk.id] = chunk
            self.host[chunk.chunk.id] = (
                part_optimizer(chunk, policy.options, policy.make_on_host, self._widened)
                if isinstance(chunk, ShardedChunk)
                else ChunkOptimizer(
                    chunk.masters,
                    chunk.trainable,
                    policy.options,
                    policy.make_on_host,
                    targets=chunk.targets,
                    place=chunk.state_place,
                    widened=self._widened,
                )
            )

    def _add_staying(self, chunk: DeviceChunk) -> None:
        policy, steps = self._policy, []
        narrow = {id(parameter) for parameter in chunk.narrow}
        for parameter in chunk.narrow:
            master = self.masters[parameter] = parameter.detach().float()
            if self._ledger is not None:
                self._ledger.adopt([master], Content.OPTIMIZER_STATE)
        if self._optimizer.is_elementwise:
            masters = [self.masters[parameter] for parameter in chunk.narrow]
            made = policy.options, policy.make_optimizer
            steps += narrow_steps(chunk.narrow, masters, *made, is_elementwise=True)
        else:
            for parameter in chunk.trainable:
                if id(parameter) in narrow:
                    of_one = [parameter], [self.masters[parameter]]
                    steps += narrow_steps(*of_one, policy.options, policy.make_optimizer, is_elementwise=False)
                else:
                    steps.append(whole_step([parameter], policy.options, policy.make_optimizer))
        share_maps(step.optimizer.optimizer for step in steps)
        self.device += steps

    def add_whole(self, chunks: Sequence[DeviceChunk]) -> None:
        """One step for all of ``chunks`` that are stepped themselves, as the plain loop has it."""
        if self._optimizer.is_elementwise:
            wide = [p for chunk in chunks if chunk.is_persistent for p in chunk.wide]
            step = [whole_step(wide, self._policy.options, self._policy.make_optimizer)] if wide else []
            self.device[:0] = step

    @property
    def on_device(self) -> list[ChunkOptimizer]:
        """Those that step on the device."""
        return [*(step.optimizer for step in self.device), *(made for _, made in self.parts)]

    def count_state(self) -> None:
        """Let the ledger know the device's optimizer state."""
        num_stepped = sum(len(stepper.optimizer.state) for stepper in self.on_device)
        if self._ledger is not None and (num_stepped != self._num_counted or self._ledger.is_metering):
            self._num_counted = num_stepped
            for stepper in self.on_device:
                self._ledger.adopt(stepper.state_tensors(), Content.OPTIMIZER_STATE)

    def steppers(self) -> list[tuple[ChunkOptimizer, Sequence[nn.Parameter], Sequence[slice | None]]]:
        """Every optimizer with the parameters that it steps, and the stretch of the scalars of each; None: all of them.

        Scalars are numbered as they lie in memory; a parameter's stretches are in order.
        """
        by_chunk = [(stepper, self._stepped[chunk]) for chunk, stepper in self.host.items()]
        by_chunk += [(stepper, chunk) for chunk, stepper in self.parts]
        found: list[tuple[ChunkOptimizer, Sequence[nn.Parameter], Sequence[slice | None]]] = [
            (stepper, chunk.stepped, chunk.stepped_stretches) for stepper, chunk in by_chunk
        ]
        for step in self.device:
            found.append((step.optimizer, step.parameters, [step.stretch] * len(step.parameters)))
        return found

    @property
    def name(self) -> str:
        """The class of the optimizers; several if what makes them chooses by parameter."""
        return " or ".join(sorted({type(stepper.optimizer).__name__ for stepper, _, _ in self.steppers()}))

    def clear(self) -> None:
        """Let all of them go."""
        self.host.clear()
        self.device.clear()
        self.parts.clear()
        self.masters.clear()
        self._stepped.clear()
        self._widened = WidenedGradients()
