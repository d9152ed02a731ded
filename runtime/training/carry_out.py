"""Carrying out a plan: the one call that takes a model over."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from ...shared.basics.documents import Document
from ...shared.basics.errors import FileError, PlanError
from ...shared.schema.hardware import Disk
from ...shared.schema.plan import Plan
from ...shared.schema.workload import Workload
from ..devices.cpu_device import CpuDevice
from ..devices.cuda_device import CudaDevice
from ..devices.device import TrainingDevice
from ..model.ownership import owner_of
from ..optimizers.chunk_optimizer import MakeOptimizer
from ..optimizers.loss_scaling import LossScaling
from ..optimizers.named import named_optimizer
from ..ranks.agreement import agreed
from ..ranks.world import World, join_world
from .assembly import TrainingSettings
from .training import Training


def carry_out(
    model: nn.Module,
    plan: Plan,
    workload: Workload,
    *,
    optimizer: MakeOptimizer | None = None,
    parameter_groups: Sequence[Mapping[str, Any]] | None = None,
    device: TrainingDevice | None = None,
    meter_every: int | None = None,
    check_gradients: bool = True,
    loss_scaling: LossScaling | None = None,
    keep_last_step: bool = False,
    disk_folder: str | Path | None = None,
    stated_disk: Disk | None = None,
    rank_timeout_s: float = 600.0,
) -> Training:
    """Take over ``model`` and train it as ``plan`` says.

    ``optimizer`` makes a torch optimizer from parameter groups, such as
    ``functools.partial(torch.optim.AdamW, lr=1e-4, fused=True)``; it is called once per chunk, or per parameter.  By
    default it is the one that the plan names, with its usual options; ``named_optimizer`` gives it with others.
    ``parameter_groups`` are torch's, over the model's own parameters.  ``device`` is where the model's parameters are,
    by default.  On the CPU the ledger watches the first iterations of every input shape, and every ``meter_every``-th
    one; a Record times the others, so that it needs a ``meter_every`` of 3 at least.
    ``check_gradients`` ends training before gradients that are not finite reach a weight, and names whose they are.
    ``loss_scaling``, for float16, makes ``training.scale(loss).backward()`` the backward; the plan must limit the norm.
    ``keep_last_step``: what CPU Adam overwrites is kept until the iteration is complete, so that every iteration can be
    given up (``skip_step``), and ``close`` gives the weights of the last complete one; for as much more host memory as
    the weights and the optimizer's state of offloaded chunks take, and a step on the device that waits for CPU Adam.

    ``disk_folder`` is a folder on the disk that the plan has chunks on, if it has any there (``n_disk_state``): it has
    room for them, is this training's alone, and holds nothing that outlives it.  A disk that fails ends training with
    FileError, and the parameters that it had are NaN after ``close``: a training goes on from its checkpoint.
    ``stated_disk`` is what the plan was predicted with, of a ``Hardware``; a slower disk is told of.

    A plan for several ranks is carried out by as many processes, each with its own batches: call this on all of them.
    They are those of torch.distributed's default group, or those that torchrun has started.  All begin with the weights
    of rank 0, and have the same plan, workload, options and software.  A rank that keeps others waiting for longer than
    ``rank_timeout_s`` ends their training.

    Until the end, ``use_cache`` of a transformers model is off, as it has to be in a plain loop of the same bits: a
    key-value cache changes the strides of keys, and with them the order in which kernels may add.

    Schedulers of ``torch.optim.lr_scheduler`` take ``optimizer`` of the result.  Use the result as a context manager,
    or call ``close``: the model then has ordinary parameters again.  ``training_of(model)`` finds one that was lost.
    Raises PlanError, before anything moves, if plan, workload and model do not belong together, or if the plan may need
    more memory than the device has; the device's out-of-memory error if what else it holds leaves no room for the
    persistent chunks; FileError if ``disk_folder`` is missing, read-only, too full or in use; RanksError if ranks do
    not find each other.  What one rank raises, all do, with the same message.
    """
    plan = _checked(model, plan, workload)
    world = join_world(plan.num_ranks, timeout_s=rank_timeout_s)

    def chosen() -> TrainingSettings:
        return TrainingSettings(
            optimizer=optimizer or named_optimizer(plan.optimizer),
            parameter_groups=parameter_groups,
            device=device or _device_of(model),
            meter_every=meter_every,
            check_gradients=check_gradients,
            loss_scaling=loss_scaling,
            keep_last_step=keep_last_step,
            disk_folder=disk_folder,
            stated_disk=stated_disk,
            world=world,
        )

    return _begun(world, lambda: Training(model, plan, workload, agreed(world, chosen)))


def _checked(model: nn.Module, plan: Plan, workload: Workload) -> Plan:
    """The plan with the values that a file of it would have: ``model_copy`` checks none of those that it is given.

    Raises PlanError if one of them is impossible, or an argument is something else.
    """
    for name, given, kind in (("model", model, nn.Module), ("plan", plan, Plan), ("workload", workload, Workload)):
        if not isinstance(given, kind):
            how = f" {kind.__name__}.load(path) reads a file." if issubclass(kind, Document) else ""
            raise PlanError(f"{name} is a {type(given).__name__}; it must be a {kind.__name__}.{how}")
    knobs = plan.model_dump(mode="json", warnings=False)
    try:
        return Plan.from_mapping(
            {"kind": Plan.KIND, "schema_version": Plan.SCHEMA_VERSION, **knobs}, origin="the plan given to carry_out()"
        )
    except FileError as error:
        raise PlanError(str(error)) from error


def _begun(world: World | None, begin: Callable[[], Training]) -> Training:
    """A training that leaves ``world`` when it is closed; if it does not begin, the world is left at once."""
    try:
        return begin()
    except BaseException:
        if world is not None:
            world.leave()
        raise


def training_of(model: nn.Module) -> Training | None:
    """The training that carries out a plan on ``model``; None if there is none, or it is closed.

    For whoever has dropped what ``carry_out`` gave: ``training_of(model).close()`` gives ordinary parameters back.
    """
    found = owner_of(model)
    assert found is None or isinstance(found, Training)
    return found


def _device_of(model: nn.Module) -> TrainingDevice:
    devices = {parameter.device for parameter in model.parameters()}
    if len(devices) != 1:
        raise PlanError(f"the model's parameters are on {len(devices)} devices. Move it to one, or pass device=.")
    device = devices.pop()
    if device.type == "cpu":
        return CpuDevice()
    if device.type == "cuda":
        return CudaDevice(device.index or 0)
    raise PlanError(f"the model is on {device.type!r}. Pass device=CpuDevice() or device=CudaDevice().")
