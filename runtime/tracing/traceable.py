"""What can be traced at all, of a model, a batch and a loss: looked at before anything runs."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from ...shared.basics.arguments import shown
from ...shared.basics.errors import WorkloadError
from ...shared.schema.workload import DType
from ..adapters.refusals import refused_adapter
from ..model.blocks import dropped_layers
from ..model.compiled import compiled_part
from ..model.memory_overlaps import overlap_of
from ..model.strides import unkept_strides
from ..ranks.wrappers import wrapped_part


def check_traceable(model: nn.Module, batch: object, loss: object) -> None:
    """Raise WorkloadError if the model cannot be traced, or batch or loss are of a kind that they cannot be."""
    if isinstance(batch, str) or not isinstance(batch, Iterable):
        raise WorkloadError(f"batch is {shown(batch)}; it must be a tensor, or tensors by name or in order.")
    if loss is not None and not callable(loss):
        raise WorkloadError(f"loss is {shown(loss)}; it must be a function of output and batch that gives a scalar.")
    if not torch.is_grad_enabled():
        raise WorkloadError(
            "gradients are off (torch.no_grad() or inference_mode()), but a trace runs backward. Trace outside of it."
        )
    trainable = [p for p in model.parameters() if p.requires_grad]
    if not trainable:
        raise WorkloadError(f"{type(model).__name__} has no trainable parameter. Set requires_grad on some.")
    if any(getattr(module, "gradient_checkpointing", False) is True for module in model.modules()):
        raise WorkloadError(
            "the model checkpoints activations itself. Call model.gradient_checkpointing_disable(): the plan decides "
            "which blocks are checkpointed (n_checkpoint)."
        )
    known = {f"torch.{dtype}" for dtype in DType}
    unknown = next(((name, p) for name, p in model.named_parameters() if str(p.dtype) not in known), None)
    if unknown is not None:
        name, parameter = unknown
        remedy = ""
        if parameter.is_complex():
            remedy = (
                " Make it a real one with a last dim of 2 (torch.view_as_real), and read it by torch.view_as_complex "
                "in forward: the optimizer steps both parts alike."
            )
        raise WorkloadError(f"parameter {name} is of {parameter.dtype}; parameters of it are not supported.{remedy}")
    wrong = wrapped_part(model) or compiled_part(model) or refused_adapter(model) or overlap_of(model)
    wrong = wrong or unkept_strides(model) or dropped_layers(model)
    if wrong is not None:
        raise WorkloadError(wrong)
