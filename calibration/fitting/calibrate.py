"""Calibrating a machine for a model: a few short runs of plans that differ, measured and fitted."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from itertools import islice, repeat
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn

from ...runtime.data.byte_text import head_batches, python_reference
from ...runtime.devices.cpu_device import CpuDevice
from ...runtime.devices.cuda_device import CudaDevice
from ...runtime.devices.device import TrainingDevice
from ...runtime.devices.process_settings import leave_a_core_for_lanes
from ...runtime.model.batches import Batch, Loss, loss_of
from ...runtime.model.configurations import build_model, training_dtype
from ...runtime.model.identity import software_versions
from ...runtime.model.snapshot import left_as_found
from ...runtime.optimizers.chunk_optimizer import MakeOptimizer, default_optimizer
from ...runtime.tracing.tracing import trace
from ...runtime.training.carry_out import carry_out
from ...runtime.training.training import Training
from ...shared.basics.errors import CalibrationError
from ...shared.catalogue.models import published_dtype
from ...shared.schema.calibration import Calibration
from ...shared.schema.hardware import DeviceKind, Hardware
from ...shared.schema.plan import Plan
from ...shared.schema.record import Record
from ...shared.schema.workload import Workload
from ...shared.workloads.dtypes import choose_dtype
from .fit import Pair, fit_calibration
from .measurement_plans import bootstrap_plans
from .optimizer_costs import optimizer_costs
from .slowdowns import measure_slowdowns
from .subject import Subject, check_disk_described

_WARM_UP: Final = 3


def calibrate(
    subject: Subject,
    *,
    steps: int = 7,
    slowdown_seconds: float = 10.0,
    on_progress: Callable[[int, int], None] | None = None,
) -> Calibration:
    """Run a few plans for ``steps`` timed iterations each, measure how lanes slow each other, fit the factors.

    Steps of optimizers other than AdamW, which the plans have, are measured by themselves.  Where ``subject`` has a
    folder on a disk, the lane of the disk and one more plan are measured too.

    The model, its gradients and the random state stay as they are.  Devices of ``subject`` must have no budget: what is
    measured are times.  Raises CalibrationError if the hardware has no disk for the folder, and FileError if the folder
    cannot be used.
    """
    chosen = bootstrap_plans(subject.workload, has_disk=subject.measures_disk)
    total = 100 + len(chosen) * (steps + _WARM_UP + 1)

    def report(done: int, of: int) -> None:
        if on_progress is not None:
            on_progress(100 * done // of, total)

    contention = measure_slowdowns(
        subject.make_device(), seconds=slowdown_seconds, disk_folder=subject.disk_folder, on_progress=report
    )
    pairs: list[Pair] = []
    done = 100
    with left_as_found(subject.model):
        for plan in chosen:
            pairs.append(Pair(subject.workload, _measured(subject, plan, steps + _WARM_UP + 1)))
            done += steps + _WARM_UP + 1
            if on_progress is not None:
                on_progress(done, total)
    on_host, on_device = optimizer_costs(subject.make_device(), subject.hardware)
    found = fit_calibration(
        pairs,
        subject.hardware,
        contention=contention,
        machine=subject.make_device().description,
        software=software_versions(),
    )
    return found.model_copy(
        update={
            "host_optimizer_factors": on_host.factors,
            "device_optimizer_factors": on_device.factors,
            "host_optimizer_tensor_s": on_host.tensor_s,
            "device_optimizer_tensor_s": on_device.tensor_s,
        }
    )


def run_plan(
    model: nn.Module,
    plan: Plan,
    workload: Workload,
    batches: Iterator[Batch],
    *,
    loss: Loss | None = None,
    optimizer: MakeOptimizer = default_optimizer,
    device: TrainingDevice,
    hardware_name: str,
) -> Record:
    """Train ``model`` under ``plan`` on all ``batches``, one per micro-batch, and give the measured Record.

    Batches at the end that make no whole step are left.
    """
    with carry_out(model, plan, workload, optimizer=optimizer, device=device) as training:
        return _record(training, batches, loss, hardware_name)


def _measured(subject: Subject, plan: Plan, steps: int) -> Record:
    """A copy of the model, trained for ``steps`` iterations."""
    with carry_out(
        copy.deepcopy(subject.model),
        plan,
        subject.workload,
        optimizer=subject.make_optimizer,
        device=subject.make_device(),
        disk_folder=subject.disk_folder if plan.n_disk_state else None,
    ) as training:
        return _record(training, repeat(subject.batch, steps * plan.micro_batches), subject.loss, subject.hardware.name)


def _record(training: Training, batches: Iterator[Batch], loss: Loss | None, hardware_name: str) -> Record:
    while len(step := list(islice(batches, training.plan.micro_batches))) == training.plan.micro_batches:
        for batch in step:
            loss_of(training.model, batch, loss).backward()  # type: ignore[no-untyped-call]
        training.step()
    return training.record(hardware_name=hardware_name)


def calibrate_configuration(
    configuration: Mapping[str, Any],
    name: str,
    hardware: Hardware,
    *,
    batch_size: int,
    sequence_length: int,
    dtype: str | None = None,
    steps: int = 7,
    seed: int = 0,
    disk_folder: Path | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> tuple[Workload, Calibration]:
    """Build the model of a ``config.json`` with random weights, trace and time it here, and calibrate.

    ``disk_folder`` is on the disk of ``hardware``, which is measured with it.  Raises CalibrationError if ``hardware``
    was not probed on this machine or has no disk for a folder, FileError if the folder cannot be used, WorkloadError if
    the model is too large for the machine.
    """
    make_device: Callable[[], TrainingDevice] = CpuDevice
    if hardware.device.kind is DeviceKind.CUDA and torch.cuda.is_available():
        make_device = CudaDevice
    device = make_device()
    if hardware.name != device.description:
        raise CalibrationError(
            f"{hardware.name} is not this machine ({device.description}), so factors measured here would say nothing "
            f"about it. Describe this one: protwin hardware probe --output machine.toml"
        )
    if disk_folder is not None:
        check_disk_described(hardware, disk_folder)
    if not device.runs_behind:
        leave_a_core_for_lanes()
    torch.manual_seed(seed)
    chosen = choose_dtype(published_dtype(configuration), dtype, hardware.device)
    model = build_model(configuration, name, training_dtype(configuration, chosen.dtype), device="cpu")
    model = model.to(device.torch_device)
    batches = head_batches(
        model, python_reference(), batch_size=batch_size, sequence_length=sequence_length, num_batches=1, seed=seed
    )
    batch = {key: tensor.to(device.torch_device) for key, tensor in next(batches).items()}
    workload = chosen.note_in(trace(model, batch, name=name))
    subject = Subject(model, batch, workload, hardware, make_device, disk_folder=disk_folder)
    return workload, calibrate(subject, steps=steps, on_progress=on_progress)
