"""Module buffers: on the device all the time, unlike parameters, which are placed chunk by chunk."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from ...shared.basics.errors import ScheduleError
from ..devices.device import TrainingDevice
from ..model.strides import without_repeats
from ..ranks.collectives import Collectives


class SharedBuffers:
    """Module buffers that forward changes, such as running statistics: rank 0's are those of all ranks after a step.

    So every forward begins with the same buffers on all ranks, as DistributedDataParallel has it by default.  As there,
    buffers that are None when training begins are every rank's own.
    """

    def __init__(self, model: nn.Module, device: TrainingDevice, ranks: Collectives) -> None:
        """``ranks``: those of between two steps, which are let go of when training has failed."""
        self._model = model
        self._ranks = ranks
        self._device = device
        self._own = {
            f"{path}.{name}" if path else name
            for path, module in model.named_modules()
            for name, buffer in module._buffers.items()
            if buffer is None
        }
        self._shapes = {name: (buffer.shape, buffer.dtype) for name, buffer in model.named_buffers()}

    @torch.no_grad()
    def settle(self) -> None:
        """Let all ranks have those of rank 0; to be called on all of them, between a step and the next forward.

        Raises ScheduleError if a buffer has become another one in shape or element type, and RanksError if a rank has
        failed.
        """
        found = {name: buffer for name, buffer in self._model.named_buffers() if name not in self._own}
        shapes = {name: (buffer.shape, buffer.dtype) for name, buffer in found.items()}
        if shapes != self._shapes:
            changed = next(n for n in {**shapes, **self._shapes} if shapes.get(n) != self._shapes.get(n))
            raise ScheduleError(
                f"buffer {changed} was added, removed, or is of another shape or element type than when the plan was "
                f"carried out: ranks could not have the same any more. Close the training first."
            )
        buffers = [without_repeats(buffer) for buffer in found.values()]
        # All at once, and while nothing of an iteration is on the device.
        sent = torch.empty(sum(b.nbytes for b in buffers), dtype=torch.uint8, device=self._device.torch_device)
        if self._device.ledger is not None:
            self._device.ledger.ignore([sent])
        places = torch.split(sent, [buffer.nbytes for buffer in buffers])
        if self._ranks.rank == 0:
            for buffer, place in zip(buffers, places, strict=True):
                place.copy_(buffer.contiguous().view(-1).view(torch.uint8))
        self._ranks.give(sent)
        if self._ranks.rank != 0:
            for buffer, place in zip(buffers, places, strict=True):
                # A place may begin anywhere, which other element types cannot.
                buffer.copy_(place.clone().view(buffer.dtype).view(buffer.shape))


@contextmanager
def buffers_on(device: torch.device, model: nn.Module) -> Iterator[None]:
    """Within the block the model's buffers are on ``device``; afterwards back where they were, with what they hold.

    Those that were None and are filled meanwhile go to where the model's parameters are when the block begins.
    """
    moved = _move_buffers(device, model)
    try:
        yield
    finally:
        for module, name, origin in moved:
            buffer = module._buffers[name]
            if buffer is not None:
                module._buffers[name] = buffer.to(origin)


def _move_buffers(device: torch.device, model: nn.Module) -> list[tuple[nn.Module, str, torch.device]]:
    """Move buffers to ``device``; gives those that were elsewhere, and where.

    Nobody holds a buffer afterwards: forward may put another one in its place.
    """
    moved = []
    origin = next((parameter.device for parameter in model.parameters() if not parameter.is_meta), torch.device("cpu"))
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is None:
                moved.append((module, name, origin))
            elif buffer.device != device:
                moved.append((module, name, buffer.device))
                module._buffers[name] = buffer.to(device)
    return moved
