"""Carrying out a plan: the one call that takes a model over."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from ...shared.basics.documents import Document
from ...shared.basics.errors import FileError, PlanError, ProtwinError
from ...shared.pipelines.pipeline import Pipeline
from ...shared.schema.hardware import Disk
from ...shared.schema.plan import Plan
from ...shared.schema.workload import Workload
from ..checkpoints.plan_change import check_change
from ..chunks.saved_weights import SavedWeights
from ..devices.cpu_device import CpuDevice
from ..devices.cuda_device import CudaDevice
from ..devices.device import TrainingDevice
from ..lanes.progress import Call, TrainingPhase
from ..model.ownership import owner_of
from ..model.snapshot import buffers_kept, random_states_kept
from ..optimizers.chunk_optimizer import MakeOptimizer
from ..optimizers.loss_scaling import LossScaler, LossScaling
from ..optimizers.named import named_optimizer
from ..ranks.agreement import agreed
from ..ranks.failures import tell_failure
from ..ranks.own_device import device_of_rank
from ..ranks.world import World, exchanged, join_world
from ..recording.replanning import Replan, Replanning
from .settings import TrainingSettings
from .training import Training

_T = TypeVar("_T", bound=Training)
_P = TypeVar("_P", Plan, Pipeline)


def carry_out(
    model: nn.Module,
    plan: Plan | None,
    workload: Workload,
    *,
    optimizer: MakeOptimizer | None = None,
    parameter_groups: Sequence[Mapping[str, Any]] | None = None,
    device: TrainingDevice | torch.device | str | None = None,
    meter_every: int | None = None,
    check_gradients: bool = True,
    loss_scaling: LossScaling | None = None,
    keep_last_step: bool = False,
    disk_folder: str | Path | None = None,
    stated_disk: Disk | None = None,
    weights: str | Path | SavedWeights | None = None,
    rank_timeout_s: float = 600.0,
    replan_after: int | None = None,
    replan: Replan | None = None,
) -> Training:
    """Take over ``model`` and train it as ``plan`` says.

    ``optimizer`` makes a torch optimizer from parameter groups, such as
    ``functools.partial(torch.optim.AdamW, lr=1e-4, fused=True)``; it is called once per chunk, or per parameter.  By
    default it is the one that the plan names, with its usual options; ``named_optimizer`` gives it with others.
    ``parameter_groups`` are torch's, over the model's own parameters.  ``device`` is where the model's parameters are,
    by default; ``"cuda"`` is the device of this process's LOCAL_RANK, the first one without ranks.  On the CPU the
    ledger watches the first iterations of every input shape, and every ``meter_every``-th one; a Record times the
    others, so that it needs a ``meter_every`` of 3 at least.
    ``check_gradients`` ends training before gradients that are not finite reach a weight, and names whose they are.
    ``loss_scaling``, for float16, makes ``training.scale(loss).backward()`` the backward; the plan must limit the norm.
    ``keep_last_step``: what CPU Adam overwrites is kept until the iteration is complete, so that every iteration can be
    given up (``skip_step``), and ``close`` gives the weights of the last complete one; for as much more host memory as
    the weights and the optimizer's state of offloaded chunks take, and a step on the device that waits for CPU Adam.

    ``disk_folder`` is a folder on the disk that the plan has chunks on, if it has any there (``n_disk_state``): it has
    room for them, is this training's alone, and holds nothing that outlives it.  A disk that fails ends training with
    FileError, and the parameters that it had are NaN after ``close``: a training goes on from its checkpoint.
    ``stated_disk`` is what the plan was predicted with, of a ``Hardware``; a slower disk is told of.

    ``weights`` is a folder of safetensors files with the tensors of the model's ``state_dict``, for a model whose
    parameters are on the meta device (``parameters_on_meta``): each chunk is read when it is made, and by each rank
    only as far as it keeps it, so that the model never lies whole in memory.  Other element types are converted.
    Buffers that the files have are read too; parameters that have values, such as those of an adapter, keep them.
    After ``close`` the parameters are on the host; where ranks had parts of them (parallel = sharded), on that of
    rank 0, and on the meta device of the others.  Without ``weights``, ranks other than 0 may have parameters on the
    meta device all the same: rank 0 sends each of them its part.

    A plan for several ranks is carried out by as many processes, each with its own batches: call this on all of them.
    They are those of torch.distributed's default group, or those that torchrun has started.  All begin with the weights
    of rank 0, and have the same plan, workload, options and software; None for ``plan`` takes rank 0's.  The smallest
    device has to be large enough.  A rank that keeps others waiting for longer than
    ``rank_timeout_s`` ends their training.

    ``replan_after`` steps are measured, then ``replan`` is asked for a better plan, which training goes on by
    (``Training.change_plan``): ``protwin.calibration.Replanner`` searches one.  What stands against it is told on
    standard error, and the plan stays.  Of one rank, without a disk.

    Until the end, ``use_cache`` of a transformers model is off, as it has to be in a plain loop of the same bits: a
    key-value cache changes the strides of keys, and with them the order in which kernels may add.

    Schedulers of ``torch.optim.lr_scheduler`` take ``optimizer`` of the result.  Use the result as a context manager,
    or call ``close``: the model then has ordinary parameters again.  ``training_of(model)`` finds one that was lost.
    Raises PlanError, before anything moves, if plan, workload and model do not belong together, or if the plan may need
    more memory than the device has; the device's out-of-memory error if what else it holds leaves no room for the
    persistent chunks; FileError if ``disk_folder`` is missing, read-only, too full or in use, or if ``weights`` lacks
    tensors, has others besides or has them in other shapes; RanksError if ranks do not find each other.  What one rank
    raises, all do, with the same message; the model is then as it was, with rank 0's weights on other ranks perhaps.
    """
    found = checked_plan(model, plan, workload)
    world = joined(found, rank_timeout_s)

    def chosen(plan: Plan) -> TrainingSettings:
        return TrainingSettings(
            optimizer=optimizer or named_optimizer(plan.optimizer),
            parameter_groups=parameter_groups,
            device=device if isinstance(device, TrainingDevice) else device_for(model, device, world),
            meter_every=meter_every,
            check_gradients=check_gradients,
            loss_scaling=loss_scaling,
            keep_last_step=keep_last_step,
            disk_folder=disk_folder,
            stated_disk=stated_disk,
            world=world,
            weights=_saved(weights, model),
            replanning=replanning_of(plan, replan_after, replan),
        )

    def begin() -> Training:
        shared = _of_rank_0(found, world)
        return Training(model, shared, workload, agreed(world, lambda: chosen(shared)))

    return begun(world, begin)


def replanning_of(plan: Plan, after: int | None, replan: Replan | None) -> Replanning | None:
    """Who looks for a better plan.  Raises PlanError if one argument lacks the other, or the plan cannot change."""
    if after is None and replan is None:
        return None
    if after is None or replan is None:
        missing = "replan, who searches a plan from what was measured" if replan is None else "replan_after, how many"
        raise PlanError(
            f"{missing} {'' if replan is None else 'steps are measured '}is missing. Pass both: replan_after=20, "
            f"replan=protwin.calibration.Replanner(request)."
        )
    check_change(plan, plan)
    return Replanning(after, replan, getattr(replan, "tell", None))


def checked_plan(model: nn.Module, plan: Plan | None, workload: Workload) -> Plan | ProtwinError | None:
    """The plan with the values that a file of it would have: ``model_copy`` checks none of those that it is given.

    What is wrong with it or another argument is given, not raised: other ranks are to hear of it.
    """
    try:
        for name, given, kind in (("model", model, nn.Module), ("plan", plan, Plan), ("workload", workload, Workload)):
            if not isinstance(given, kind) and not (name == "plan" and given is None):
                how = f" {kind.__name__}.load(path) reads a file." if issubclass(kind, Document) else ""
                if isinstance(getattr(given, name, None), kind):
                    how = f" It has one: pass its .{name}."
                raise PlanError(f"{name} is a {type(given).__name__}; it must be a {kind.__name__}.{how}")
        return None if plan is None else with_values_of_a_file(plan)
    except ProtwinError as error:
        return error


def joined(found: Plan | Pipeline | ProtwinError | None, timeout_s: float) -> World | None:
    """The ranks that train together, as many as the plan says, or as were started where it says nothing."""
    if isinstance(found, Plan | Pipeline):
        return join_world(found.num_ranks, timeout_s=timeout_s)
    try:
        return join_world(None, timeout_s=timeout_s)
    except ProtwinError as error:
        raise (error if found is None else found) from None


def _of_rank_0(found: Plan | ProtwinError | None, world: World | None) -> Plan:
    """The plan of rank 0, where this one has none; on all ranks, raises PlanError if rank 0 has none, or ``found``."""

    def given() -> Plan | None:
        if isinstance(found, ProtwinError):
            raise found
        if found is None and (world is None or world.rank == 0):
            raise PlanError("plan is None, which takes the plan of rank 0, but this is rank 0. Pass a plan here.")
        return found

    own = agreed(world, given)
    if world is None:
        assert own is not None
        return own
    first = exchanged(world, None if own is None else own.to_json())[0]
    return agreed(world, lambda: own or Plan.from_mapping(json.loads(first), origin="the plan of rank 0"))


def with_values_of_a_file(plan: _P, function: str = "carry_out") -> _P:
    """The plan as a file of it would be read.  Raises PlanError; ``function`` is what it was given to."""
    knobs = plan.model_dump(mode="json", warnings=False)
    kind = type(plan)
    try:
        return kind.from_mapping(
            {"kind": kind.KIND, "schema_version": kind.SCHEMA_VERSION, **knobs},
            origin=f"the plan given to {function}()",
        )
    except FileError as error:
        raise PlanError(str(error)) from error


def _saved(weights: str | Path | SavedWeights | None, model: nn.Module) -> SavedWeights | None:
    """Raises PlanError if it is something else."""
    if weights is None or isinstance(weights, SavedWeights):
        return weights
    if not isinstance(weights, str | Path):
        raise PlanError(f"weights is a {type(weights).__name__}; it must be the path of a folder.")
    return SavedWeights(Path(weights)).for_model(model)


def begun(world: World | None, begin: Callable[[], _T]) -> _T:
    """A training that leaves ``world`` when it is closed; if it does not begin, the world is left at once."""
    try:
        return begin()
    except BaseException as error:
        if world is not None:
            tell_failure(world.store, world.rank, error)
            world.leave()
        raise


def training_of(model: nn.Module) -> Training | None:
    """The training that carries out a plan on ``model``; None if there is none, or it is closed.

    For whoever has dropped what ``carry_out`` gave: ``training_of(model).close()`` gives ordinary parameters back.
    """
    found = owner_of(model)
    assert found is None or isinstance(found, Training)
    return found


def gradient_norm(training: Training) -> torch.Tensor | None:
    """The norm of all gradients of the running step, before they are clipped: between backward and ``step()``.

    Of all ranks' together, where these have parts.  None where the plan limits no norm, so that none is taken.  Raises
    ScheduleError elsewhere in a step, and whatever a lane raised.
    """
    progress, task = training._progress, training._compute.task_at_hand
    progress.check(Call.STEP, task)
    return training._lanes.norm(progress.iteration)


def fill_step(training: Training, loss: Callable[[], torch.Tensor]) -> int:
    """Fill a step up that has fewer micro-batches than its plan, as an epoch's last one may: before ``step()``.

    For each that is missing ``loss`` runs the model once more, on a batch of training of any kind, and gives its loss,
    whose gradients are made zeros; random states and buffers are put back.  So the step is, bit for bit in float32,
    that of a plain loop which steps early.  With ``loss_scaling`` it is scaled here.  Of several ranks all call it.
    Gives how many micro-batches were missing.

    Raises ScheduleError if the step has none yet, or a backward is missing.
    """
    progress, task = training._progress, training._compute.task_at_hand
    progress.check_usable()
    if progress.phase is not TrainingPhase.BETWEEN_MICRO_BATCHES:
        progress.check(Call.STEP, task)
        return 0
    missing = training.plan.micro_batches - task.micro_batch
    for _ in range(missing):
        with random_states_kept(), buffers_kept(training.model):
            nothing = loss() * 0.0
            if isinstance(training.loss_scaler, LossScaler):
                nothing = training.scale(nothing)
            nothing.backward()  # type: ignore[no-untyped-call]
            del nothing
    return missing


def device_for(model: nn.Module, named: torch.device | str | None, world: World | None = None) -> TrainingDevice:
    """The device of this rank where it is ``named`` as torch has it, else the model's own."""
    if named is None:
        return _device_of(model)
    return device_of_rank(named, 0 if world is None else world.local_rank)


def _device_of(model: nn.Module) -> TrainingDevice:
    devices = {parameter.device for parameter in model.parameters() if not parameter.is_meta}
    if not devices:
        raise PlanError("every parameter is on the meta device. Pass device=CpuDevice() or device=CudaDevice().")
    if len(devices) != 1:
        raise PlanError(f"the model's parameters are on {len(devices)} devices. Move it to one, or pass device=.")
    device = devices.pop()
    if device.type == "cpu":
        return CpuDevice()
    if device.type == "cuda":
        return CudaDevice(device.index or 0)
    raise PlanError(f'the model is on {device.type!r}. Pass device="cpu" or device="cuda".')
