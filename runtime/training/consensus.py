"""What ranks have to have in common, as facts to compare: their steps, and the order of these, follow from it."""

from __future__ import annotations

import hashlib
from dataclasses import fields
from typing import Any

import torch
import torch.distributed as dist

from ...shared.basics.errors import PlanError
from ...shared.pipelines.pipeline import Pipeline
from ...shared.schema.plan import Plan
from ...shared.schema.schedule import Schedule
from ...shared.schema.workload import Workload
from ..devices.device import TrainingDevice
from ..model.identity import software_versions
from ..optimizers.loss_scaling import LossScaling
from ..optimizers.step_options import StepOptions


def check_ranks_on(plan: Plan, device: torch.device) -> None:
    """Raise PlanError if this build of torch has no collectives for devices of this kind."""
    if plan.num_ranks > 1 and device.type == "cuda" and not dist.is_nccl_available():
        raise PlanError(
            f"the plan is for {plan.num_ranks} ranks on CUDA devices, but this build of PyTorch has no NCCL. Install "
            f'one that has (on Linux), pass device="cpu", or carry out a plan of one rank.'
        )


def facts_of_plan(
    plan: Plan, workload: Workload, schedule: Schedule, device: TrainingDevice, *, settings: dict[str, Any]
) -> dict[str, str]:
    """Software, kind of device, workload, every knob of the plan, schedule, and ``settings`` by name.

    A plan's note is no part of it.
    """
    knobs = plan.model_dump(mode="json", exclude={"note"})
    facts = {
        **_software(),
        "the device": device.kind,
        "the workload": f"{workload.model_name} ({workload.identity})",
        **{f"the plan's {name}": str(value) for name, value in knobs.items()},
        "the schedule": _hash(repr((schedule.tasks, schedule.buffers))),
        **{name: _shown(value) for name, value in settings.items()},
    }
    if plan.max_gradient_norm is not None:
        # Every rank takes the norm by itself: its parts are added up in an order that follows from the threads.
        facts["the threads of an operation (torch.get_num_threads())"] = str(torch.get_num_threads())
    return facts


def facts_of_pipeline(pipeline: Pipeline, device: TrainingDevice, *, settings: dict[str, Any]) -> dict[str, str]:
    """What all stages have in common: software, kind of device, pipeline, and ``settings`` by name."""
    return {
        **_software(),
        "the device": device.kind,
        "the pipeline": pipeline.identity,
        **{name: _shown(value) for name, value in settings.items()},
    }


def _software() -> dict[str, str]:
    return {f"the version of {name}": version for name, version in software_versions().items()}


def facts_of_optimizer(name: str, options: StepOptions) -> dict[str, str]:
    """The optimizer's class, and for every parameter group its options, defaults too, and whose it is."""
    facts = {"the optimizer": name}
    for index, group in enumerate(options.groups):
        of = f"of parameter group {index}"
        names = [options.label_of(parameter) for parameter in group.parameters]
        facts[f"the parameters {of}"] = f"{len(names)} ({_hash(repr(names))})"
        facts |= {f"{key} {of}": _shown(value) for key, value in options.filled(index).items()}
    return facts


def _shown(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return str(value.tolist())
    if isinstance(value, LossScaling):
        return ", ".join(f"{field.name} {getattr(value, field.name)}" for field in fields(value))
    return str(value)


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
