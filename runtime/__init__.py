"""Carrying out a plan on PyTorch, by one process or several: tracing a model, training it as its schedule says.

Importing it costs nothing: each name is loaded when it is first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..shared.basics.lazy_face import lazy_face

if TYPE_CHECKING:
    from .chunks.meta_parameters import parameters_on_meta as parameters_on_meta
    from .chunks.saved_weights import load_quantized as load_quantized
    from .devices.cpu_device import CpuDevice as CpuDevice
    from .devices.cuda_device import CudaDevice as CudaDevice
    from .devices.device import TrainingDevice as TrainingDevice
    from .devices.ledger import CpuOutOfMemoryError as CpuOutOfMemoryError
    from .devices.ledger import MemoryLedger as MemoryLedger
    from .devices.probe import probe_hardware as probe_hardware
    from .distillation.block_losses import block_loss as block_loss
    from .distillation.distil import Distilling as Distilling
    from .distillation.distil import distil as distil
    from .distillation.tracing import trace_distillation as trace_distillation
    from .distillation.validation import ValidationLosses as ValidationLosses
    from .distillation.validation import validation_losses as validation_losses
    from .integrations.accelerator_class import planned_accelerator as planned_accelerator
    from .integrations.trainer_class import planned_trainer as planned_trainer
    from .lightning.trainer_class import planned_lightning as planned_lightning
    from .model.adapters import add_lora as add_lora
    from .model.adapters import freeze as freeze
    from .optimizers.loss_scaling import LossScaling as LossScaling
    from .optimizers.named import named_optimizer as named_optimizer
    from .optimizers.non_finite import NonFiniteGradientError as NonFiniteGradientError
    from .osft.cache import FactorCache as FactorCache
    from .osft.orthogonal_model import dense_state_dict as dense_state_dict
    from .osft.orthogonal_model import make_dense as make_dense
    from .osft.orthogonal_model import make_orthogonal as make_orthogonal
    from .osft.projection import project_gradients as project_gradients
    from .osft.projection import project_parameters as project_parameters
    from .polynomials.families import family_of_configuration as family_of_configuration
    from .quantized.quantizing import quantize as quantize
    from .ranks.rank_probe import probe_ranks as probe_ranks
    from .recording.summaries import StepSummary as StepSummary
    from .students.activation_statistics import activation_statistics as activation_statistics
    from .students.saving import load_student as load_student
    from .students.saving import save_student as save_student
    from .students.student_model import make_student as make_student
    from .timing.within_budget import trace_within as trace_within
    from .tracing.configurations import workload_of_configuration as workload_of_configuration
    from .tracing.tracing import trace as trace
    from .training.carry_out import carry_out as carry_out
    from .training.carry_out import fill_step as fill_step
    from .training.carry_out import training_of as training_of
    from .training.training import Training as Training

_HOMES = {
    "CpuDevice": "devices.cpu_device",
    "CpuOutOfMemoryError": "devices.ledger",
    "CudaDevice": "devices.cuda_device",
    "Distilling": "distillation.distil",
    "FactorCache": "osft.cache",
    "LossScaling": "optimizers.loss_scaling",
    "MemoryLedger": "devices.ledger",
    "NonFiniteGradientError": "optimizers.non_finite",
    "StepSummary": "recording.summaries",
    "Training": "training.training",
    "TrainingDevice": "devices.device",
    "ValidationLosses": "distillation.validation",
    "activation_statistics": "students.activation_statistics",
    "add_lora": "model.adapters",
    "block_loss": "distillation.block_losses",
    "carry_out": "training.carry_out",
    "dense_state_dict": "osft.orthogonal_model",
    "distil": "distillation.distil",
    "family_of_configuration": "polynomials.families",
    "fill_step": "training.carry_out",
    "freeze": "model.adapters",
    "load_quantized": "chunks.saved_weights",
    "load_student": "students.saving",
    "make_dense": "osft.orthogonal_model",
    "make_orthogonal": "osft.orthogonal_model",
    "make_student": "students.student_model",
    "named_optimizer": "optimizers.named",
    "parameters_on_meta": "chunks.meta_parameters",
    "planned_accelerator": "integrations.accelerator_class",
    "planned_lightning": "lightning.trainer_class",
    "planned_trainer": "integrations.trainer_class",
    "probe_hardware": "devices.probe",
    "probe_ranks": "ranks.rank_probe",
    "project_gradients": "osft.projection",
    "project_parameters": "osft.projection",
    "quantize": "quantized.quantizing",
    "save_student": "students.saving",
    "trace": "tracing.tracing",
    "trace_distillation": "distillation.tracing",
    "trace_within": "timing.within_budget",
    "training_of": "training.carry_out",
    "validation_losses": "distillation.validation",
    "workload_of_configuration": "tracing.configurations",
}

__all__ = sorted(_HOMES)
__getattr__, __dir__ = lazy_face(__name__, _HOMES)
