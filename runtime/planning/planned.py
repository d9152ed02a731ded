"""The plan of a training that is about to begin: traced, measured and searched, on one rank or on all of them.

The runtime knows no search: whoever searches is named in the entry-point group ``protwin.planners``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Final, TypeVar

import torch
from torch import nn

from ...shared.answers.search_result import SearchResult
from ...shared.basics.plugins import plugin
from ...shared.schema.hardware import Hardware
from ...shared.schema.plan import Plan
from ...shared.schema.plan_check import check_plan
from ...shared.schema.record import Record
from ...shared.schema.workload import Workload
from ..devices.device import TrainingDevice
from ..devices.probe import probe_hardware
from ..model.batches import Batch, on_device
from ..ranks.agreement import agreed
from ..ranks.own_device import device_of_rank
from ..ranks.rank_probe import probe_ranks
from ..ranks.world import World, exchanged, join_world
from ..recording.replanning import Replan
from ..timing.within_budget import autocast_on, trace_within
from ..tracing.tracing import trace
from ..training.carry_out import device_for
from .request import PlanRequest, Tell

PLANNERS: Final = "protwin.planners"
"""Who searches and simulates: ``search``, ``simulate`` and ``replan``."""
_T = TypeVar("_T")


@dataclass(frozen=True, kw_only=True)
class Planned:
    """What a training begins with; the same on all ranks, but for the device."""

    request: PlanRequest
    workload: Workload
    hardware: Hardware
    plan: Plan
    prediction: Record
    """Of one iteration of ``plan``."""
    result: SearchResult | None
    """The search; None where the plan was given."""
    device: TrainingDevice
    """Where this rank trains, within the budget."""

    def replan(self, tell: Tell | None = None) -> Replan:
        """Who searches again, within the same limits, with what the first steps have measured.

        ``tell`` hears what was decided; None: standard error.
        """
        found: Replan = plugin(PLANNERS, "replan")(self.workload, self.hardware, self.request, tell)
        return found


def planned(
    model: nn.Module,
    batch: Batch,
    request: PlanRequest,
    *,
    device: TrainingDevice | torch.device | str | None = None,
    tell: Tell | None = None,
) -> Planned:
    """What ``model`` is to be trained by, on batches such as ``batch``.

    The model is traced and timed as it is (training mode, frozen parts, adapters), on ``device``, by default where its
    parameters are; parameters that are elsewhere visit the device within the budget (``trace_within``).  Weights,
    gradients, buffers, settings and random states are bit for bit what they were afterwards.  Of several ranks, which
    torchrun has started or which have torch.distributed's default group, all call this: each traces its own model and
    batch, all measure the machine together, and rank 0's answer is everybody's.  ``tell`` hears, on rank 0, what is
    being done.

    Raises InfeasibleError if no plan fits, PlanError if a given plan is for another model, batch or step, WorkloadError
    if the model cannot be traced, and RanksError; what one rank raises, all do.
    """
    world = join_world(None, timeout_s=request.rank_timeout_s)
    try:
        return _planned(model, batch, request, device, world, tell or _nobody)
    finally:
        if world is not None:
            world.leave()


def _planned(
    model: nn.Module,
    batch: Batch,
    request: PlanRequest,
    device: TrainingDevice | torch.device | str | None,
    world: World | None,
    tell: Tell,
) -> Planned:
    tell = tell if world is None or world.rank == 0 else _nobody
    chosen = agreed(world, lambda: _device(model, request, device, world))
    if chosen.budget_bytes is not None:
        request = request.within(chosen.budget_bytes)
    num_ranks = 1 if world is None else world.num_ranks
    if request.given_plan is not None:
        agreed(world, partial(request.check_plan, request.given_plan, num_ranks))
    tell("tracing the model")
    workload = _of_first(world, partial(_traced, model, batch, request, chosen))
    hardware = request.hardware
    if hardware is None:
        tell("measuring this machine")
        hardware = _measured(request, chosen, world)
    assert isinstance(hardware, Hardware)
    if world is not None and workload.measured_on is not None:
        # What a rank takes while all of them run is filed under the machine of all.
        workload = workload.model_copy(update={"measured_on": hardware.name})
    plan, prediction, result = _of_first(world, partial(_answer, workload, hardware, request, num_ranks, tell))
    return Planned(
        request=request,
        workload=workload,
        hardware=hardware,
        plan=plan,
        prediction=prediction,
        result=result,
        device=chosen,
    )


def _nobody(_: str) -> None:
    """What other ranks do is told by rank 0."""


def _of_first(world: World | None, work: Callable[[], _T]) -> _T:
    """What rank 0's ``work`` gives; all do it, since they share the machine and may fail each by itself."""
    own = agreed(world, work)
    return own if world is None else exchanged(world, own)[0]


def _device(
    model: nn.Module, request: PlanRequest, device: TrainingDevice | torch.device | str | None, world: World | None
) -> TrainingDevice:
    budget_bytes = request.budget_bytes
    if isinstance(device, TrainingDevice):
        return device
    found = device_for(model, device, world)
    if budget_bytes is None:
        return found
    return device_of_rank(found.torch_device.type, found.torch_device.index or 0, budget_bytes=budget_bytes)


def _traced(model: nn.Module, batch: Batch, request: PlanRequest, device: TrainingDevice) -> Workload:
    if request.workload is not None:
        assert isinstance(request.workload, Workload)
        return request.workload
    given = on_device(batch, device.torch_device)
    loss, blocks, name, autocast = request.loss, request.blocks, request.name, request.autocast
    if any(parameter.device.type != device.torch_device.type for parameter in model.parameters()):
        return trace_within(
            model, given, device, loss=loss, blocks=blocks, name=name, autocast=autocast, weights=request.weights
        )
    with autocast_on(device.torch_device.type, autocast):
        return trace(model, given, loss=loss, blocks=blocks, name=name)


def _measured(request: PlanRequest, device: TrainingDevice, world: World | None) -> Hardware:
    # Measuring takes memory of its own, so that a budget for training does not hold for it.
    unlimited = device if device.budget_bytes is None else device.without_budget()
    if world is None:
        return probe_hardware(seconds=request.probe_s, device=unlimited)
    return probe_ranks(
        world.num_ranks, seconds=2 * request.probe_s, device=unlimited, rank_timeout_s=request.rank_timeout_s
    )


def _answer(
    workload: Workload, hardware: Hardware, request: PlanRequest, num_ranks: int, tell: Tell
) -> tuple[Plan, Record, SearchResult | None]:
    plan = request.given_plan
    if plan is not None:
        check_plan(plan, workload)
        return plan, plugin(PLANNERS, "simulate")(plan, workload, hardware, request.calibration), None
    tell("searching a plan")
    result: SearchResult = plugin(PLANNERS, "search")(workload, hardware, request, num_ranks)
    return result.plan, result.prediction, result
