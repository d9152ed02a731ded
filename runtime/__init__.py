"""Carrying out a plan on PyTorch, by one process or several: tracing a model, training it as its schedule says.

Importing it costs nothing: each name is loaded when it is first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..shared.basics.lazy_face import lazy_face

if TYPE_CHECKING:
    from .devices.cpu_device import CpuDevice as CpuDevice
    from .devices.cuda_device import CudaDevice as CudaDevice
    from .devices.device import TrainingDevice as TrainingDevice
    from .devices.ledger import CpuOutOfMemoryError as CpuOutOfMemoryError
    from .devices.ledger import MemoryLedger as MemoryLedger
    from .devices.probe import probe_hardware as probe_hardware
    from .model.adapters import add_lora as add_lora
    from .model.adapters import freeze as freeze
    from .optimizers.loss_scaling import LossScaling as LossScaling
    from .optimizers.named import named_optimizer as named_optimizer
    from .optimizers.non_finite import NonFiniteGradientError as NonFiniteGradientError
    from .recording.summaries import StepSummary as StepSummary
    from .tracing.configurations import workload_of_configuration as workload_of_configuration
    from .tracing.families import family_of_configuration as family_of_configuration
    from .tracing.tracing import trace as trace
    from .training.carry_out import carry_out as carry_out
    from .training.carry_out import training_of as training_of
    from .training.training import Training as Training

_HOMES = {
    "CpuDevice": "devices.cpu_device",
    "CpuOutOfMemoryError": "devices.ledger",
    "CudaDevice": "devices.cuda_device",
    "LossScaling": "optimizers.loss_scaling",
    "MemoryLedger": "devices.ledger",
    "NonFiniteGradientError": "optimizers.non_finite",
    "StepSummary": "recording.summaries",
    "Training": "training.training",
    "TrainingDevice": "devices.device",
    "add_lora": "model.adapters",
    "carry_out": "training.carry_out",
    "family_of_configuration": "tracing.families",
    "freeze": "model.adapters",
    "named_optimizer": "optimizers.named",
    "probe_hardware": "devices.probe",
    "trace": "tracing.tracing",
    "training_of": "training.carry_out",
    "workload_of_configuration": "tracing.configurations",
}

__all__ = sorted(_HOMES)
__getattr__, __dir__ = lazy_face(__name__, _HOMES)
