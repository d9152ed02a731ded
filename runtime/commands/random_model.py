"""The model that a command trains or times: built from its configuration, with random weights."""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import nn

from ...shared.basics.errors import WorkloadError
from ...shared.basics.units import format_bytes
from ...shared.schema.training_options import TrainingOptions
from ..devices.machine import host_memory_bytes
from ..devices.process_settings import leave_a_core_for_lanes
from ..model.configurations import build_model, training_dtype
from ..tracing.configurations import apply_options, configured_model

_OPTIMIZER_BYTES: Final = 12
"""Of AdamW's state for one trained scalar: two float32 moments, and a float32 gradient on its way."""


def random_model(
    configuration: dict[str, Any], name: str, dtype: str | None, seed: int, options: TrainingOptions
) -> nn.Module:
    """The model with random weights.  Raises WorkloadError if this machine cannot hold it."""
    leave_a_core_for_lanes()
    chosen = training_dtype(configuration, dtype)
    twin = configured_model(configuration, name, dtype, options)
    check_host_memory(twin, name, "Use a smaller configuration, or trace without --real.")
    torch.manual_seed(seed)
    model: nn.Module = build_model(configuration, name, chosen, device="cpu")
    apply_options(model, options)
    return model


def check_host_memory(twin: nn.Module, name: str, remedy: str) -> None:
    """Raise WorkloadError if this machine cannot hold a model like ``twin`` with its optimizer state."""
    need_bytes = sum(
        p.numel() * (p.element_size() + (_OPTIMIZER_BYTES if p.requires_grad else 0)) for p in twin.parameters()
    )
    if need_bytes > host_memory_bytes():
        raise WorkloadError(
            f"{name} with its optimizer state needs about {format_bytes(need_bytes)} but this machine has "
            f"{format_bytes(host_memory_bytes())}. {remedy}"
        )
