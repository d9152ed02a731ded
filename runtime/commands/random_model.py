"""The model that a command trains or times: built from its configuration, with random weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn

from ...shared.schema.optimizer import Optimizer
from ...shared.schema.training_options import TrainingOptions
from ...shared.schema.workload import DType
from ..chunks.meta_parameters import parameters_on_meta
from ..chunks.saved_weights import fill_packed
from ..devices.machine import host_memory_bytes
from ..devices.process_settings import leave_a_core_for_lanes
from ..model.configurations import build_model, training_dtype
from ..tracing.configurations import apply_options, configured_model
from .run_budget import RANDOM_WEIGHTS_REMEDY, Weight, check_weights_held


def random_model(
    configuration: dict[str, Any],
    name: str,
    dtype: str | None,
    seed: int,
    options: TrainingOptions,
    optimizer: Optimizer = Optimizer.ADAMW,
    *,
    num_processes: int = 1,
    adapt: Callable[[nn.Module, TrainingOptions], None] = apply_options,
) -> nn.Module:
    """The model with random weights.

    ``num_processes``, each with such a model, share this machine; ``adapt`` adds what ``options`` add.  Raises
    WorkloadError if the machine cannot hold them with their optimizers.
    """
    leave_a_core_for_lanes(num_processes)
    twin = configured_model(configuration, name, dtype, options)
    check_host_memory(twin, name, RANDOM_WEIGHTS_REMEDY, optimizer, num_processes=num_processes)
    return drawn_model(configuration, name, dtype, seed, options, adapt=adapt)


def drawn_model(
    configuration: Mapping[str, Any],
    name: str,
    dtype: str | None,
    seed: int,
    options: TrainingOptions,
    *,
    adapt: Callable[[nn.Module, TrainingOptions], None] = apply_options,
) -> nn.Module:
    """The same, whether this machine can hold it or not.

    A map that is to be packed is packed before the next one is drawn, so that no more than one lies there unpacked.
    """
    packed = options.quantized
    torch.manual_seed(seed)
    with nullcontext() if packed is None else parameters_on_meta():
        model: nn.Module = build_model(configuration, name, training_dtype(configuration, dtype), device="cpu")
    if packed is not None:
        torch.manual_seed(seed)
        fill_packed(model, None, packed.how, skip=packed.skipped, head=packed.head)
    adapt(model, options.model_copy(update={"quantized": None}))
    return model


def check_host_memory(
    twin: nn.Module, name: str, remedy: str, optimizer: Optimizer = Optimizer.ADAMW, *, num_processes: int = 1
) -> None:
    """Raise WorkloadError if this machine cannot hold a model like ``twin`` with its optimizer state, in each process.

    Ranks may hold less than that of a model in shards, but each begins with all of its weights.
    """
    weights = [Weight(DType(str(p.dtype)), tuple(p.shape), is_trained=p.requires_grad) for p in twin.parameters()]
    check_weights_held(weights, name, remedy, optimizer, memory_bytes=host_memory_bytes(), num_processes=num_processes)
