"""The ends of teacher and student: parameters that no task of a distillation reads, such as final norms and heads.

They are on the host while a distillation trains.  In an evaluation each module that holds some has them on the device
while it runs, and no longer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ...shared.basics.errors import DeviceOutOfMemoryError
from ...shared.basics.units import format_bytes
from ...shared.schema.schedule import Content
from ...shared.schema.workload import Workload
from ..chunks.chunk import view_of
from ..chunks.meta_parameters import set_values
from ..chunks.saved_weights import SavedWeights, names_of
from ..devices.device import TrainingDevice
from ..devices.ledger import MemoryLedger
from ..model.nested_tensors import tensors_in
from ..model.strides import in_memory_order
from .pairs import STUDENT, Pairs


class Ends:
    """Of one distillation."""

    def __init__(self, pairs: Pairs, workload: Workload) -> None:
        """``workload`` names the parameters that are no ends."""
        named = dict(pairs.named_parameters(remove_duplicate=False))
        placed = {id(named[parameter.name]) for parameter in workload.parameters if parameter.name in named}
        self._parameters = [p for p in pairs.parameters() if id(p) not in placed]
        self._named = names_of((n, p) for n, p in named.items() if id(p) not in placed)
        self._modules: list[_EndModule] = []
        inside = {id(part) for block in pairs.blocks for part in block.module.modules()}
        for path, module in pairs.named_modules():
            own = [p for p in module.parameters(recurse=False) if id(p) not in placed]
            if own or (isinstance(module, nn.Linear) and id(module) not in inside):
                self._modules.append(_EndModule(path, module, own))

    @contextmanager
    def on_host(self) -> Iterator[None]:
        """Within the block they are on the host, unless they are on the meta device; afterwards where they were."""
        moved = [(p, p.device) for p in self._parameters if p.device.type not in ("cpu", "meta")]
        for parameter, _ in moved:
            set_values(parameter, parameter.detach().to("cpu"))
        try:
            yield
        finally:
            for parameter, origin in moved:
                set_values(parameter, parameter.detach().to(origin))

    @contextmanager
    def filled(self, weights: SavedWeights | None) -> Iterator[None]:
        """Within the block those on the meta device have the values of ``weights``, on the host.

        Afterwards the student's keep them, and the teacher's are on the meta device again.  Raises FileError, with all
        on the meta device, if a file cannot be read.
        """
        found = [(p, names) for p, names in self._named if p.is_meta]
        filled: list[nn.Parameter] = []
        try:
            for parameter, names in found:
                set_values(parameter, _read(parameter, names, weights))
                filled.append(parameter)
        except BaseException:
            for parameter in filled:
                set_values(parameter, parameter.detach().to("meta"))
            raise
        try:
            yield
        finally:
            for parameter, names in found:
                if not any(name.startswith(f"{STUDENT}.") for name in names):
                    set_values(parameter, parameter.detach().to("meta"))

    @property
    def most_bytes(self) -> int:
        """What the largest module needs on the device."""
        return max((module.size_bytes for module in self._modules), default=0)

    def check_room(self, static_bytes: int, limit_bytes: int | None) -> None:
        """Raise DeviceOutOfMemoryError unless each module fits beside ``static_bytes``, which stay on the device."""
        if limit_bytes is None or static_bytes + self.most_bytes <= limit_bytes:
            return
        largest = max(self._modules, key=lambda module: module.size_bytes)
        raise DeviceOutOfMemoryError(
            f"an evaluation needs {format_bytes(largest.size_bytes)} of device memory for {largest.path}, which no "
            f"task of the schedule reads, beside {format_bytes(static_bytes)} that stay there, but the device has "
            f"{format_bytes(limit_bytes)}. Carry out a plan with fewer persistent chunks (n_persist), or evaluate both "
            f"models after close()."
        )

    @contextmanager
    def coming(self, device: TrainingDevice) -> Iterator[None]:
        """Within the block every module has its parameters on ``device`` while it runs."""
        places = {parameter: _Place(parameter, device) for parameter in self._parameters}
        with ExitStack() as undo:
            # Copies may still be queued when all have gone.
            undo.callback(device.synchronize)
            for place in places.values():
                undo.callback(place.leave)
            for module in self._modules:
                undo.enter_context(module.coming([places[p] for p in module.parameters], device))
            yield


class _Place:
    """A parameter on its way to the device and back."""

    def __init__(self, parameter: nn.Parameter, device: TrainingDevice) -> None:
        self.parameter = parameter
        self.size_bytes = parameter.nbytes
        self._device = device
        # Made before anybody watches operations, with no bytes: these are allocated by name.
        self._flat = torch.empty(0, dtype=torch.uint8, device=device.torch_device)
        if device.ledger is not None:
            device.ledger.ignore([self._flat])
        self._home: torch.Tensor | None = None
        """Its values on the host, while it is on the device."""
        self._num_users = 0
        """Modules that run with it."""

    @property
    def is_here(self) -> bool:
        """Whether it is on the device."""
        return self._num_users > 0

    def bring(self, path: str) -> None:
        """Copy it to the device, unless it is there."""
        if not self._num_users:
            self._copy(path)
        self._num_users += 1

    def release(self) -> None:
        """The end of a ``bring``; what nobody uses any more goes."""
        if self._num_users:
            self._num_users -= 1
            if not self._num_users:
                self._let_go()

    def leave(self) -> None:
        """It goes, whoever used it."""
        if self._num_users:
            self._num_users = 0
            self._let_go()

    def _copy(self, path: str) -> None:
        ledger = self._device.ledger
        if ledger is not None:
            ledger.allocate(self.size_bytes, path, Content.PARAMETERS)
        try:
            self._device.resize(self._flat, self.size_bytes, path)
        except BaseException:
            if ledger is not None:
                ledger.free(self.size_bytes, Content.PARAMETERS)
            raise
        with _of_the_host(ledger):
            self._home = home = self.parameter.data
            value = view_of(self._flat.as_strided((self.size_bytes,), (1,)), 0, home)
            self._device.copy(value, home, to_device=True)
            set_values(self.parameter, value)

    def _let_go(self) -> None:
        assert self._home is not None
        set_values(self.parameter, self._home)
        self._home = None
        self._device.resize(self._flat, 0, "an end")
        if self._device.ledger is not None:
            self._device.ledger.free(self.size_bytes, Content.PARAMETERS)


@contextmanager
def _of_the_host(ledger: MemoryLedger | None) -> Iterator[None]:
    """Within the block, what operations are given and nobody knew is not on the device."""
    if ledger is None:
        yield
        return
    before = ledger.is_finding
    ledger.is_finding = False
    try:
        yield
    finally:
        ledger.is_finding = before


@dataclass(frozen=True, eq=False, slots=True)
class _EndModule:
    """A module outside the blocks that holds ends itself, or makes logits."""

    path: str
    module: nn.Module
    parameters: list[nn.Parameter]

    @property
    def size_bytes(self) -> int:
        """What its parameters take on the device."""
        return sum(parameter.nbytes for parameter in self.parameters)

    @contextmanager
    def coming(self, places: Sequence[_Place], device: TrainingDevice) -> Iterator[None]:
        """Within the block its parameters come to their places when it runs, and go after it."""

        def enter(module: nn.Module, args: Any, kwargs: Any) -> None:
            missing_bytes = sum(place.size_bytes for place in places if not place.is_here)
            self._check_room(device, missing_bytes, _output_bytes(module, (args, kwargs)))
            for place in places:
                place.bring(self.path)

        def leave(*_: Any) -> None:
            for place in places:
                place.release()

        handles = [
            self.module.register_forward_pre_hook(enter, prepend=True, with_kwargs=True),
            self.module.register_forward_hook(leave, always_call=True),
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _check_room(self, device: TrainingDevice, weight_bytes: int, output_bytes: int) -> None:
        """Before anything of it is taken: what fails in the middle of an operation says less."""
        free_bytes = device.free_bytes()
        if free_bytes is None or weight_bytes + output_bytes <= free_bytes:
            return
        raise DeviceOutOfMemoryError(
            f"{self.path} needs {format_bytes(weight_bytes)} of device memory for its weights and "
            f"{format_bytes(output_bytes)} for what it makes of this batch, but {format_bytes(free_bytes)} are free in "
            f"this evaluation. Evaluate fewer samples at once, or carry out a plan with fewer persistent chunks "
            f"(n_persist)."
        )


def _read(parameter: nn.Parameter, names: list[str], weights: SavedWeights | None) -> torch.Tensor:
    """Its values in new memory on the host."""
    value = torch.empty_like(parameter, device="cpu", requires_grad=False)
    held = [] if weights is None else weights.find(names)
    # Files that lack it have been refused.
    assert weights is not None
    assert held
    weights.read(held[0], value, slice(0, value.numel()), in_memory_order(value))
    return value


def _output_bytes(module: nn.Module, given: Any) -> int:
    """Of what a linear map makes; 0 for other modules, whose output is as large as what they are given."""
    hidden = next(tensors_in(given), None)
    if not isinstance(module, nn.Linear) or hidden is None:
        return 0
    kind = hidden.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden.dtype
    return hidden.numel() // module.in_features * module.out_features * dtype.itemsize
