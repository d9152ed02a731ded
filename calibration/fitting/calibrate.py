"""Calibrating a machine for a model: a few short runs of plans that differ, measured and fitted."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn

from ...runtime.devices.device import TrainingDevice
from ...runtime.devices.machine import name_of_ranks
from ...runtime.devices.process_settings import leave_a_core_for_lanes
from ...runtime.model.batches import Batch, loss_of
from ...runtime.model.identity import software_versions
from ...runtime.optimizers.chunk_optimizer import MakeOptimizer
from ...runtime.ranks.agreement import agreed
from ...runtime.ranks.own_device import device_of_rank
from ...runtime.ranks.world import join_world
from ...runtime.training.carry_out import carry_out
from ...shared.basics.errors import CalibrationError
from ...shared.schema.calibration import Calibration
from ...shared.schema.hardware import DeviceKind, Hardware
from ...shared.schema.plan import Plan
from ...shared.schema.record import Record
from ...shared.schema.workload import Workload
from .configured import configured_subject
from .fit import Pair, fit_calibration, pairs_of
from .optimizer_costs import optimizer_costs
from .slowdowns import measure_slowdowns
from .subject import Subject, check_disk_described
from .trained_as import TRAINED_WHOLE, TrainedAs
from .updating import evidence_by_kind

_WARM_UP: Final = 3
_RANK_TIMEOUT_S: Final = 600.0
_OPTIMIZER_SECONDS: Final = 4.0
"""For the steps of all optimizers together."""


def calibrate(
    subject: Subject,
    *,
    steps: int = 7,
    slowdown_seconds: float = 10.0,
    on_progress: Callable[[int, int], None] | None = None,
) -> Calibration:
    """Run a few plans for ``steps`` timed iterations each, measure how lanes slow each other, fit the factors.

    Steps of optimizers other than AdamW, which the plans have, are measured by themselves.  Where ``subject`` has a
    folder on a disk, the lane of the disk and one more plan are measured too.  Where it has a world of several ranks,
    all of them are to call this: they run plans of all modes together, and factors are fitted to what all measured.
    ``slowdown_seconds`` are for the lanes; the optimizers' steps have four seconds, or as many if these are fewer.

    The model, its gradients and the random state stay as they are, also if a measurement fails.  A ``BudgetedSubject``
    is trained itself, by plans within its budget, which its devices enforce; it is then put back.  Devices of any other
    subject must have no budget: what is measured are times.  Raises CalibrationError if the hardware has no disk for
    the folder, and FileError if the folder cannot be used.
    """
    chosen = subject.plans()
    total = 100 + len(chosen) * (steps + _WARM_UP + 1)

    def report(done: int) -> None:
        if on_progress is not None:
            on_progress(done, total)

    # What lanes run while they are measured draws random numbers too.
    with subject.left_as_found():
        contention = measure_slowdowns(
            subject.make_device(),
            seconds=slowdown_seconds,
            disk_folder=subject.disk_folder,
            world=subject.world,
            on_progress=lambda done, of: report(100 * done // of),
        )
        pairs: list[Pair] = []
        for number, plan in enumerate(chosen, start=1):
            pairs += pairs_of(subject.workload, _measured(subject, plan, steps + _WARM_UP + 1))
            report(100 + number * (steps + _WARM_UP + 1))
        on_host, on_device = optimizer_costs(
            subject.make_device(), subject.hardware_of_rank, seconds=min(_OPTIMIZER_SECONDS, slowdown_seconds)
        )
    on_host, on_device = subject.of_first(lambda: (on_host, on_device))
    optimizers = {
        "host_optimizer_factors": on_host.factors,
        "device_optimizer_factors": on_device.factors,
        "host_optimizer_tensor_s": on_host.tensor_s,
        "device_optimizer_tensor_s": on_device.tensor_s,
    }

    def fitted() -> Calibration:
        machine, software = subject.make_device().description, software_versions()
        found = fit_calibration(
            pairs, subject.hardware, contention=contention, machine=machine, software=software, optimizers=optimizers
        )
        # For records to come, which add to it.
        evidence = evidence_by_kind(pairs, subject.hardware, found)
        return found.model_copy(update={"num_runs": len(chosen), "evidence": evidence})

    return subject.of_first(fitted)


def run_plan(
    model: nn.Module,
    plan: Plan,
    workload: Workload,
    batches: Iterator[Batch],
    *,
    optimizer: MakeOptimizer,
    device: TrainingDevice,
    hardware_name: str,
) -> Record:
    """Train ``model`` under ``plan`` on all ``batches``, one per micro-batch, and give the measured Record.

    Batches at the end that make no whole step are left.
    """
    with carry_out(model, plan, workload, optimizer=optimizer, device=device) as training:
        while len(step := list(islice(batches, plan.micro_batches))) == plan.micro_batches:
            for batch in step:
                loss_of(training.model, batch, None).backward()  # type: ignore[no-untyped-call]
            training.step()
        return training.record(hardware_name=hardware_name)


def _measured(subject: Subject, plan: Plan, steps: int) -> Record:
    """A copy of the model, trained for ``steps`` iterations."""
    with subject.begin(plan, disk_folder=subject.disk_folder if plan.n_disk_state else None) as training:
        for _ in range(steps):
            subject.run_step(training)
        return training.record(hardware_name=subject.hardware.name)


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
    num_ranks: int = 1,
    trained_as: TrainedAs = TRAINED_WHOLE,
    on_progress: Callable[[int, int], None] | None = None,
) -> tuple[Workload, Calibration]:
    """Build the model of a ``config.json`` with random weights, trace and time it here, and calibrate.

    ``trained_as``: with which options and optimizer, within which budget of device memory, and by which method: with a
    student, plans of bypass distillation are measured, on one rank.
    ``disk_folder`` is on the disk of ``hardware``, which is measured with it.  ``num_ranks``: as many processes, of
    which this is one, all call this and get the same; they trace side by side, and the workload is that of rank 0.
    Raises CalibrationError if ``hardware`` was not probed on this machine with as many ranks or has no disk for a
    folder, FileError if the folder cannot be used, WorkloadError if the model is too large for the machine or no such
    student can be made of it, PlanError if ``trained_as`` contradicts itself or is not for several ranks,
    InfeasibleError if a budget is too small, which says what the least is, RanksError if ranks do not find each other.
    """
    trained_as.check(num_ranks)
    kind = "cuda" if hardware.device.kind is DeviceKind.CUDA and torch.cuda.is_available() else "cpu"
    world = join_world(num_ranks, timeout_s=_RANK_TIMEOUT_S)
    local_rank = 0 if world is None else world.local_rank
    make_device = partial(device_of_rank, kind, local_rank, budget_bytes=trained_as.device_budget_bytes)
    try:
        agreed(world, lambda: _prepare(hardware, make_device(), num_ranks, disk_folder))
        subject = agreed(
            world,
            lambda: configured_subject(
                configuration, name, hardware, make_device, (batch_size, sequence_length), dtype, seed, trained_as
            ),
        )
        if world is not None:
            world.open_lane(subject.make_device().torch_device)
        subject = replace(subject, disk_folder=disk_folder, world=world).on_workload_of_first()
        return subject.workload, calibrate(subject, steps=steps, on_progress=on_progress)
    finally:
        if world is not None:
            world.leave()


def check_probed_here(hardware: Hardware, device: TrainingDevice, num_ranks: int) -> None:
    """Raise CalibrationError unless ``hardware`` is this machine, probed with as many ranks."""
    here = device.description if num_ranks == 1 or device.runs_behind else name_of_ranks(num_ranks)
    if hardware.name == here:
        return
    ranks = "" if num_ranks == 1 else f" --ranks {num_ranks}"
    raise CalibrationError(
        f"{hardware.name} is not this machine ({here}), so factors measured here would say nothing "
        f"about it. Describe this one: protwin hardware probe{ranks} --output machine.toml"
    )


def _prepare(hardware: Hardware, device: TrainingDevice, num_ranks: int, disk_folder: Path | None) -> None:
    """Leave lanes a core.  Raises as ``calibrate_configuration`` does where ``hardware`` is not what is measured."""
    check_probed_here(hardware, device, num_ranks)
    if disk_folder is not None:
        check_disk_described(hardware, disk_folder)
    if not device.runs_behind:
        leave_a_core_for_lanes(num_ranks)
