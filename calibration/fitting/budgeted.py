"""What is measured of a model that does not fit on its device: the model itself, within the device's budget."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn

from ...runtime.chunks.saved_weights import SavedWeights
from ...runtime.devices.device import TrainingDevice
from ...runtime.model.batches import Batch, Loss, on_device
from ...runtime.optimizers.chunk_optimizer import MakeOptimizer
from ...runtime.optimizers.named import named_optimizer
from ...runtime.ranks.own_device import device_of_rank
from ...runtime.timing.as_found import trained_as_found
from ...runtime.timing.within_budget import check_enough, trace_within
from ...runtime.training.carry_out import carry_out
from ...runtime.training.training import Training
from ...shared.basics.errors import CalibrationError
from ...shared.basics.units import format_bytes
from ...shared.schema.hardware import DeviceKind, Hardware
from ...shared.schema.optimizer import Optimizer
from ...shared.schema.plan import Plan
from ...shared.schema.workload import DType
from .budget_plans import plans_within
from .subject import Subject

_RATE: Final = 1e-6
"""Learning rate of the short trainings: the weights are those of the user, who wants to see no loss diverge."""


@dataclass(frozen=True)
class BudgetedSubject(Subject):
    """A model on the host, ready to be measured on a device that never holds it whole.

    Runs train the model itself, one plan after the other; ``calibrate`` puts everything back afterwards.
    """

    device_budget_bytes: int = 0
    weights: SavedWeights | None = None
    """What fills its parameters on the meta device; None: it has values."""
    scratch_folder: Path | None = None
    """Where the model's weights lie while it is trained; None: where temporary files do."""
    is_kept: bool = True
    """Whether anybody wants the model back as it was."""

    @classmethod
    def of(
        cls,
        model: nn.Module,
        batch: Batch,
        hardware: Hardware,
        device_budget_bytes: int,
        *,
        optimizer: Optimizer = Optimizer.ADAMW,
        make_optimizer: MakeOptimizer | None = None,
        loss: Loss | None = None,
        autocast: DType | None = None,
        name: str | None = None,
        weights: str | Path | None = None,
        make_device: Callable[[], TrainingDevice] | None = None,
        **fields: Any,
    ) -> BudgetedSubject:
        """``model``, which is on the host, traced and timed within ``device_budget_bytes``.

        The device is the machine's own, CUDA's first or the CPU, unless ``make_device`` gives another one with that
        budget, which is enforced.  ``weights``: the folder whose files have the values of parameters on the meta
        device.  ``fields``: ``blocks``, ``repeats``, ``on_progress`` and ``loss_head`` as of ``trace_within``,
        ``disk_folder``, ``scratch_folder`` and ``is_kept``.  Raises InfeasibleError, with the least that would do, if
        the budget is too small, and what ``trace_within`` raises.
        """
        traced = {key: fields.pop(key) for key in ("blocks", "repeats", "on_progress", "loss_head") if key in fields}
        kind = "cuda" if hardware.device.kind is DeviceKind.CUDA and torch.cuda.is_available() else "cpu"
        made = make_device or partial(device_of_rank, kind, 0, budget_bytes=device_budget_bytes)
        device = made()
        if device.limit_bytes is None or device.limit_bytes > device_budget_bytes:
            raise CalibrationError(
                f"make_device gives a device that does not keep to the budget of {format_bytes(device_budget_bytes)}. "
                f"Let it give CpuDevice(budget_bytes), or CudaDevice(budget_bytes=...), or leave it out."
            )
        saved = None if weights is None else SavedWeights(Path(weights))
        given = on_device(batch, device.torch_device)
        workload = trace_within(model, given, device, loss=loss, name=name, autocast=autocast, weights=saved, **traced)
        return cls(
            model,
            given,
            workload,
            hardware,
            made,
            make_optimizer or named_optimizer(optimizer, lr=_RATE),
            loss,
            optimizer=optimizer,
            autocast=autocast,
            device_budget_bytes=device_budget_bytes,
            weights=saved,
            **fields,
        )

    def plans(self) -> tuple[Plan, ...]:
        """Those that fit the budget, and between them do whatever plans within it do.  Raises InfeasibleError."""
        check_enough(self.workload, self.device_budget_bytes)
        if self.num_ranks > 1:
            raise CalibrationError(
                f"{self.num_ranks} ranks are not measured within a device budget so far. Leave the budget out, or "
                f"measure one rank."
            )
        return plans_within(
            self.workload, self.device_budget_bytes, optimizer=self.optimizer, has_disk=self.measures_disk
        )

    def begin(self, plan: Plan, *, disk_folder: Path | None = None) -> Training:
        """A training of the model itself by ``plan``, on a device of its own; a context manager."""
        is_away = any(parameter.is_meta for parameter in self.model.parameters())
        return carry_out(
            self.model,
            plan,
            self.workload,
            optimizer=self.make_optimizer,
            device=self.make_device(),
            disk_folder=disk_folder,
            weights=self.weights if is_away else None,
        )

    def left_as_found(self) -> AbstractContextManager[Any]:
        """Within the block the model is trained; afterwards it is what it was."""
        return trained_as_found(self.model, folder=self.scratch_folder) if self.is_kept else nullcontext()
