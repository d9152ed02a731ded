"""Carrying out a plan on PyTorch, on one device: tracing a model, training it as its schedule says.

Names are imported when they are first used, so that asking for one does not load the rest.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .devices.device import CpuDevice, CudaDevice, TrainingDevice
    from .devices.ledger import CpuOutOfMemoryError, MemoryLedger
    from .devices.probe import probe_hardware
    from .model.adapters import add_lora
    from .model.freezing import freeze
    from .model.ownership import training_of
    from .optimizers.loss_scaling import LossScaling
    from .optimizers.non_finite import NonFiniteGradientError
    from .recording.summaries import StepSummary
    from .tracing.configurations import workload_of_configuration
    from .tracing.families import family_of_configuration
    from .tracing.tracing import trace
    from .training.carry_out import carry_out
    from .training.training import Training

_HOMES = {
    "CpuDevice": "devices.device",
    "CpuOutOfMemoryError": "devices.ledger",
    "CudaDevice": "devices.device",
    "LossScaling": "optimizers.loss_scaling",
    "MemoryLedger": "devices.ledger",
    "NonFiniteGradientError": "optimizers.non_finite",
    "StepSummary": "recording.summaries",
    "Training": "training.training",
    "TrainingDevice": "devices.device",
    "add_lora": "model.adapters",
    "carry_out": "training.carry_out",
    "family_of_configuration": "tracing.families",
    "freeze": "model.freezing",
    "probe_hardware": "devices.probe",
    "trace": "tracing.tracing",
    "training_of": "model.ownership",
    "workload_of_configuration": "tracing.configurations",
}

__all__ = [
    "CpuDevice",
    "CpuOutOfMemoryError",
    "CudaDevice",
    "LossScaling",
    "MemoryLedger",
    "NonFiniteGradientError",
    "StepSummary",
    "Training",
    "TrainingDevice",
    "add_lora",
    "carry_out",
    "family_of_configuration",
    "freeze",
    "probe_hardware",
    "trace",
    "training_of",
    "workload_of_configuration",
]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{home}", __name__), name)
