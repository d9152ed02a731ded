"""Carrying out a plan on PyTorch, on one device: tracing a model, training it as its schedule says.

Names are imported when they are first used, so that asking for one does not load the rest.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .carrying_out import carry_out
    from .devices import CpuDevice, CudaDevice, TrainingDevice
    from .freezing import freeze
    from .ledger import CpuOutOfMemoryError, MemoryLedger
    from .lora import add_lora
    from .loss_scaling import LossScaling
    from .non_finite import NonFiniteGradientError
    from .probe import probe_hardware
    from .summaries import StepSummary
    from .taken_over import training_of
    from .tracing import trace
    from .tracing_configurations import workload_of_configuration
    from .tracing_families import family_of_configuration
    from .training import Training

_HOMES = {
    "CpuDevice": "devices",
    "CpuOutOfMemoryError": "ledger",
    "CudaDevice": "devices",
    "LossScaling": "loss_scaling",
    "MemoryLedger": "ledger",
    "NonFiniteGradientError": "non_finite",
    "StepSummary": "summaries",
    "Training": "training",
    "TrainingDevice": "devices",
    "add_lora": "lora",
    "carry_out": "carrying_out",
    "family_of_configuration": "tracing_families",
    "freeze": "freezing",
    "probe_hardware": "probe",
    "trace": "tracing",
    "training_of": "taken_over",
    "workload_of_configuration": "tracing_configurations",
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
