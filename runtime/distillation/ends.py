"""The ends of teacher and student: parameters that no task of a distillation reads, such as final norms and heads.

They are on the host while a distillation trains.  In an evaluation each module that holds some has them on the device
while it runs, and no longer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ...shared.basics.errors import DeviceOutOfMemoryError
from ...shared.basics.units import format_bytes
from ...shared.schema.schedule import Content
from ...shared.schema.workload import Workload
from ..chunks.chunk import view_of
from ..chunks.meta_parameters import set_values
from ..devices.device import TrainingDevice
from ..model.nested_tensors import tensors_in
from .pairs import Pairs


class Ends:
    """Of one distillation."""

    def __init__(self, pairs: Pairs, workload: Workload) -> None:
        """``workload`` names the parameters that are no ends."""
        named = dict(pairs.named_parameters(remove_duplicate=False))
        placed = {id(named[parameter.name]) for parameter in workload.parameters if parameter.name in named}
        self._parameters = [p for p in pairs.parameters() if id(p) not in placed]
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
        with ExitStack() as undo, _Places(device) as places:
            for module in self._modules:
                undo.enter_context(module.coming(places))
            yield


@dataclass(eq=False, slots=True)
class _Place:
    """A parameter on the device."""

    flat: torch.Tensor
    home: torch.Tensor
    num_users: int = 0
    """Modules that run with it."""


@dataclass(eq=False)
class _Places:
    """What of the ends is on the device."""

    device: TrainingDevice
    held: dict[nn.Parameter, _Place] = field(default_factory=dict)

    def __enter__(self) -> _Places:
        return self

    def __exit__(self, *_: object) -> None:
        for parameter in list(self.held):
            self._let_go(parameter)
        # Copies may still be queued.
        self.device.synchronize()

    def bring(self, path: str, parameters: Iterable[nn.Parameter]) -> None:
        """Copy parameters to the device, unless they are there."""
        for parameter in parameters:
            if parameter not in self.held:
                self._copy(path, parameter)
            self.held[parameter].num_users += 1

    def release(self, parameters: Iterable[nn.Parameter]) -> None:
        """The end of a ``bring``; whatever nobody uses goes."""
        for parameter in parameters:
            place = self.held.get(parameter)
            if place is not None:
                place.num_users -= 1
                if not place.num_users:
                    self._let_go(parameter)

    def is_here(self, parameter: nn.Parameter) -> bool:
        """Whether it is on the device."""
        return parameter in self.held

    def _copy(self, path: str, parameter: nn.Parameter) -> None:
        device, ledger, home = self.device, self.device.ledger, parameter.data
        flat = torch.empty(0, dtype=torch.uint8, device=device.torch_device)
        if ledger is not None:
            ledger.ignore([flat])
            ledger.allocate(home.nbytes, path, Content.PARAMETERS)
        try:
            device.resize(flat, home.nbytes, path)
        except BaseException:
            if ledger is not None:
                ledger.free(home.nbytes, Content.PARAMETERS)
            raise
        self.held[parameter] = _Place(flat, home)
        is_finding = ledger is not None and ledger.is_finding
        if ledger is not None:
            # What is read is the host's.
            ledger.is_finding = False
        value = view_of(flat.as_strided((home.nbytes,), (1,)), 0, home)
        device.copy(value, home, to_device=True)
        if ledger is not None:
            ledger.is_finding = is_finding
        set_values(parameter, value)

    def _let_go(self, parameter: nn.Parameter) -> None:
        place = self.held.pop(parameter)
        set_values(parameter, place.home)
        self.device.resize(place.flat, 0, "an end")
        if self.device.ledger is not None:
            self.device.ledger.free(place.home.nbytes, Content.PARAMETERS)


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
    def coming(self, places: _Places) -> Iterator[None]:
        """Within the block its parameters come when it runs, and go after it."""
        handles = [
            self.module.register_forward_pre_hook(self._entering(places), prepend=True, with_kwargs=True),
            self.module.register_forward_hook(lambda *_: places.release(self.parameters), always_call=True),
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _entering(self, places: _Places) -> Callable[..., None]:
        def enter(module: nn.Module, args: Any, kwargs: Any) -> None:
            missing = sum(p.nbytes for p in self.parameters if not places.is_here(p))
            self._check_room(places.device, missing, _output_bytes(module, (args, kwargs)))
            places.bring(self.path, self.parameters)

        return enter

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


def _output_bytes(module: nn.Module, given: Any) -> int:
    """Of what a linear map makes; 0 for other modules, whose output is as large as what they are given."""
    hidden = next(tensors_in(given), None)
    if not isinstance(module, nn.Linear) or hidden is None:
        return 0
    kind = hidden.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden.dtype
    return hidden.numel() // module.in_features * module.out_features * dtype.itemsize
