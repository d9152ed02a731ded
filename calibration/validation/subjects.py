"""What ``protwin validate`` judges: a model of a configuration, or one that a function of the user's makes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn

from ...runtime.devices.device import TrainingDevice
from ...runtime.devices.process_settings import leave_a_core_for_lanes
from ...runtime.model.batches import Batch, Loss, on_device
from ...runtime.optimizers.chunk_optimizer import default_optimizer
from ...runtime.optimizers.named import check_runs_on, named_optimizer
from ...runtime.ranks.agreement import agreed
from ...runtime.ranks.own_device import device_of_rank
from ...runtime.ranks.world import World, join_world
from ...runtime.timing.within_budget import autocast_on
from ...runtime.tracing.configurations import apply_options
from ...runtime.tracing.tracing import trace
from ...shared.basics.errors import WorkloadError
from ...shared.schema.hardware import DeviceKind, Hardware
from ...shared.schema.optimizer import Optimizer
from ...shared.schema.record import Record
from ..fitting.budgeted import BudgetedSubject
from ..fitting.calibrate import check_probed_here
from ..fitting.configured import configured_subject
from ..fitting.subject import Subject, check_disk_described
from ..fitting.trained_as import TrainedAs
from .factories import function_at, told
from .fidelity import Fidelity
from .validate import Trial, validate

_RANK_TIMEOUT_S: Final = 600.0


@dataclass(frozen=True, kw_only=True)
class Configured:
    """A model of a configuration with random weights, on a batch of text."""

    configuration: Mapping[str, Any]
    name: str
    batch_size: int
    sequence_length: int
    dtype: str | None = None


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What is to be judged, and where."""

    model: Configured | str
    """A configuration, or the place of a function that gives (model, batch) or (model, batch, loss)."""
    hardware: Hardware
    trained_as: TrainedAs
    num_ranks: int = 1
    disk_folder: Path | None = None
    seed: int = 0
    """Of the weights and the batch."""


def validate_asked(
    asked: Asked, trial: Trial, *, on_progress: Callable[[int, int], None] | None = None
) -> tuple[Fidelity, dict[str, Record]]:
    """Make the model, trace and time it here, and judge predictions of it (``validate``).

    As many processes as ``asked`` has ranks call this and get the same.  Raises what ``validate`` raises,
    CalibrationError if the machine was not probed here with as many ranks, WorkloadError if the model cannot be made.
    """
    num_ranks, trained_as = asked.num_ranks, asked.trained_as
    trained_as.check(num_ranks)
    kind = "cuda" if asked.hardware.device.kind is DeviceKind.CUDA and torch.cuda.is_available() else "cpu"
    world = join_world(num_ranks, timeout_s=_RANK_TIMEOUT_S)
    local_rank = 0 if world is None else world.local_rank
    make_device = partial(device_of_rank, kind, local_rank, budget_bytes=trained_as.device_budget_bytes)
    try:
        subject = agreed(world, lambda: _subject(asked, make_device))
        if world is not None:
            world.open_lane(subject.make_device().torch_device)
        subject = _on_ranks(subject, asked, world)
        return validate(subject, trial, on_progress=on_progress)
    finally:
        if world is not None:
            world.leave()


def _on_ranks(subject: Subject, asked: Asked, world: World | None) -> Subject:
    return replace(subject, disk_folder=asked.disk_folder, world=world).on_workload_of_first()


def _subject(asked: Asked, make_device: Callable[[], TrainingDevice]) -> Subject:
    device = make_device()
    check_probed_here(asked.hardware, device, asked.num_ranks)
    if asked.disk_folder is not None:
        check_disk_described(asked.hardware, asked.disk_folder)
    if not device.runs_behind:
        leave_a_core_for_lanes(asked.num_ranks)
    if isinstance(asked.model, str):
        return factory_subject(asked.model, asked.hardware, make_device, asked.trained_as, asked.seed)
    return configured_subject(
        asked.model.configuration,
        asked.model.name,
        asked.hardware,
        make_device,
        (asked.model.batch_size, asked.model.sequence_length),
        asked.model.dtype,
        asked.seed,
        asked.trained_as,
    )


def factory_subject(
    place: str, hardware: Hardware, make_device: Callable[[], TrainingDevice], trained_as: TrainedAs, seed: int
) -> Subject:
    """What the function at ``place`` makes, traced and timed here; it is called once, after ``torch.manual_seed``.

    Raises WorkloadError if there is no such function, if it fails, or if it gives something else.
    """
    if trained_as.student is not None:
        raise WorkloadError(
            f"a student is made of a model's configuration, which {place} does not have. Name a config.json as --model."
        )
    make = function_at(place)
    torch.manual_seed(seed)
    model, batch, loss, blocks = _made(place, make)
    name = f"{type(model).__name__} of {place.rpartition(':')[2]}"
    apply_options(model, trained_as.options)
    device, optimizer, autocast = make_device(), trained_as.optimizer, trained_as.options.autocast
    check_runs_on(optimizer, device.torch_device)
    if trained_as.device_budget_bytes is not None:
        return BudgetedSubject.of(
            model,
            batch,
            hardware,
            trained_as.device_budget_bytes,
            optimizer=optimizer,
            loss=loss,
            autocast=autocast,
            blocks=blocks,
            loss_head=trained_as.loss_head,
            name=name,
            make_device=make_device,
            is_kept=False,
        )
    model, batch = model.to(device.torch_device), on_device(batch, device.torch_device)
    with autocast_on(device.torch_device.type, autocast):
        workload = trace(model, batch, loss=loss, blocks=blocks, name=name, loss_head=trained_as.loss_head)
    return Subject(
        model,
        batch,
        workload,
        hardware,
        make_device,
        default_optimizer if optimizer is Optimizer.ADAMW else named_optimizer(optimizer),
        loss,
        optimizer=optimizer,
        autocast=autocast,
    )


def _made(place: str, make: Callable[[], Any]) -> tuple[nn.Module, Batch, Loss | None, Any]:
    """Model, batch, loss and blocks; None for what is left out."""
    try:
        given = make()
    except Exception as error:
        raise WorkloadError(f"{place} fails: {told(error)}") from error
    if not (isinstance(given, tuple) and len(given) in (2, 3, 4) and isinstance(given[0], nn.Module)):
        raise WorkloadError(
            f"{place} gives a {type(given).__name__}. Let it give (model, batch), (model, batch, loss), or "
            f"(model, batch, loss, blocks), with an nn.Module first."
        )
    model, batch, loss, blocks = (*given, None, None)[:4]
    return model, batch, loss, blocks
