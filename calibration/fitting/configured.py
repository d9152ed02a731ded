"""A model of a configuration, with random weights, ready to be measured on this machine."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from ...runtime.commands.random_batches import random_batches
from ...runtime.commands.random_model import check_host_memory, drawn_model
from ...runtime.data.byte_text import python_reference
from ...runtime.devices.device import TrainingDevice
from ...runtime.optimizers.chunk_optimizer import default_optimizer
from ...runtime.optimizers.named import check_runs_on, named_optimizer
from ...runtime.timing.within_budget import autocast_on
from ...runtime.tracing.configurations import configured_model
from ...runtime.tracing.tracing import trace
from ...shared.catalogue.models import published_dtype
from ...shared.schema.hardware import Hardware
from ...shared.schema.optimizer import Optimizer
from ...shared.workloads.dtypes import choose_dtype
from .budgeted import BudgetedSubject
from .pair_subject import PairSubject
from .subject import Subject
from .trained_as import TrainedAs


def configured_subject(
    configuration: Mapping[str, Any],
    name: str,
    hardware: Hardware,
    make_device: Callable[[], TrainingDevice],
    shape: tuple[int, int | None],
    dtype: str | None,
    seed: int,
    trained_as: TrainedAs,
) -> Subject:
    """The model with random weights, its student if it has one, one batch, and its timed workload.

    ``shape``: samples, and tokens of each; None for models of images.  ``make_device`` gives devices with the budget,
    if there is one: the model is on the host then, else on the device.  Raises ProtwinError.
    """
    device = make_device()
    check_runs_on(trained_as.optimizer, device.torch_device)
    chosen = choose_dtype(published_dtype(configuration), dtype, hardware.device)
    is_within = trained_as.device_budget_bytes is not None
    if is_within:
        twin = configured_model(configuration, name, chosen.dtype, trained_as.options)
        check_host_memory(twin, name, "Use a machine with more memory.", trained_as.optimizer)
    model = drawn_model(configuration, name, chosen.dtype, seed, trained_as.options)
    batch = _batch(model, name, shape, seed, trained_as, device)
    autocast, optimizer = trained_as.options.autocast, trained_as.optimizer
    if trained_as.device_budget_bytes is not None:
        # Nobody wants random weights back.
        within = BudgetedSubject.of(
            model,
            batch,
            hardware,
            trained_as.device_budget_bytes,
            optimizer=optimizer,
            autocast=autocast,
            loss_head=trained_as.loss_head,
            name=name,
            make_device=make_device,
            is_kept=False,
        )
        return replace(within, workload=chosen.note_in(within.workload, configuration))
    model = model.to(device.torch_device)
    if trained_as.student is not None:
        pair = PairSubject.of(model, trained_as.student, batch, name=name, hardware=hardware, make_device=make_device)
        return replace(pair, workload=chosen.note_in(pair.workload, configuration))
    with autocast_on(device.torch_device.type, autocast):
        workload = chosen.note_in(trace(model, batch, name=name, loss_head=trained_as.loss_head), configuration)
    make_optimizer = default_optimizer if optimizer is Optimizer.ADAMW else named_optimizer(optimizer)
    return Subject(
        model, batch, workload, hardware, make_device, make_optimizer, optimizer=optimizer, autocast=autocast
    )


def _batch(
    model: nn.Module, name: str, shape: tuple[int, int | None], seed: int, trained_as: TrainedAs, device: TrainingDevice
) -> dict[str, Any]:
    """The first batch of text, or of what the model reads, on ``device``."""
    batches = random_batches(
        model,
        python_reference(),
        name=name,
        batch_size=shape[0],
        sequence_length=shape[1],
        num_batches=1,
        seed=seed,
        images=trained_as.options.images,
    )
    return {
        key: value.to(device.torch_device) if isinstance(value, torch.Tensor) else value
        for key, value in next(batches).items()
    }
