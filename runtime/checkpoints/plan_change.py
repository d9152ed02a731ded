"""Changing from one plan to another between two steps: what training has made leaves one layout and enters the other.

[Note: State on its way]
Weights, masters and the optimizer's state pass through the host's memory, without files.  State is taken parameter by
parameter, and given up where it was; weights become ordinary tensors on the host chunk by chunk, as after ``close``,
and chunk by chunk they enter the new layout.  So nothing is there twice but one parameter's state, one chunk's weights,
and masters, which wait for their chunks to go.  What it takes of the host is what a plan takes that keeps nothing on
the device: ``change_bytes``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import torch
from torch import nn

from ...shared.basics.errors import PlanError
from ...shared.basics.units import format_bytes
from ...shared.layout.layout import Layout
from ...shared.optimizers.state import master_bytes, state_bytes, stepped_of
from ...shared.schema.plan import Plan, TrainingMethod
from ...shared.schema.workload import DType, Workload
from ..chunks.placed_model import PlacedModel
from ..devices.machine import host_memory_bytes
from .optimizer_state import OptimizerState, WholeState
from .state import STEP_KNOBS

_UNKNOWN: Final = "Save a checkpoint, close the training and carry the other plan out from it."


def check_change(before: Plan, after: Plan) -> None:
    """Raise PlanError unless a training by ``before`` can go on by ``after`` as if nothing had happened."""
    for plan in (before, after):
        what = _not_known(plan)
        if what is not None:
            raise PlanError(f"the plan cannot be changed while it is carried out: {what}. {_UNKNOWN}")
    if after.workload_id != before.workload_id:
        raise PlanError("the other plan is for another workload. Search one for the workload that is being trained.")
    for knob in (*STEP_KNOBS, "optimizer", "method"):
        if getattr(after, knob) != getattr(before, knob):
            raise PlanError(
                f"the other plan has {knob} = {getattr(after, knob)} and this one {getattr(before, knob)}, so its "
                f"steps would compute something else. Search a plan with the same {knob}."
            )


def _not_known(plan: Plan) -> str | None:
    """What a change does not know of ``plan`` so far, in words."""
    if plan.method is TrainingMethod.BYPASS:
        return "teacher and student are distilled by it"
    if plan.num_ranks > 1:
        return f"it has {plan.num_ranks} ranks, which would have to change together"
    if plan.n_disk_state > 0:
        return f"it has state of {plan.n_disk_state} chunks on a disk, which does not fit in the host's memory"
    return None


def change_bytes(workload: Workload, layout: Layout, plan: Plan) -> int:
    """Bytes of host memory that a change to ``plan`` takes at most, everything that is on its way included.

    Weights and the optimizer's state of the whole model, masters twice, what gradients arrive in, and the largest chunk
    once more.
    """
    stepped = [parameter for parameter in workload.parameters if parameter.trainable]
    weights = sum(parameter.size_bytes for parameter in workload.parameters)
    masters = sum(
        parameter.num_elements * master_bytes(DType(parameter.dtype), plan.optimizer) for parameter in stepped
    )
    state = state_bytes(stepped_of(stepped), plan.optimizer)
    staging = 2 * sum(chunk.staging_bytes for chunk in layout.chunks)
    largest = max((chunk.size_bytes for chunk in layout.chunks), default=0)
    return weights + masters + state + staging + largest


def check_host(workload: Workload, layout: Layout, plan: Plan) -> None:
    """Raise PlanError if this machine has not the memory that a change to ``plan`` takes."""
    need_bytes, has_bytes = change_bytes(workload, layout, plan), host_memory_bytes()
    if need_bytes > has_bytes:
        raise PlanError(
            f"a change of plan takes {format_bytes(need_bytes)} of the host's memory for weights and optimizer state "
            f"on their way, and this machine has {format_bytes(has_bytes)}. {_UNKNOWN}"
        )


@dataclass(slots=True)
class CarriedState:
    """What is on its way from one placed model to the next."""

    states: dict[nn.Parameter, WholeState]
    """Of every parameter that is stepped, its state and its master, on the host; emptied as they arrive."""
    origins: Mapping[nn.Parameter, torch.device]
    """Where parameters are to be in the end."""

    @classmethod
    def taken(cls, placed: PlacedModel, optimizer: OptimizerState) -> CarriedState:
        """Take it off ``placed``, whose lanes are idle; its parameters then go to the host when they are moved out."""
        origins = placed.origins()
        placed.return_to(dict.fromkeys(origins, torch.device("cpu")))
        return cls(optimizer.taken(), origins)

    def place(self, placed: PlacedModel, optimizer: OptimizerState) -> None:
        """Give it to ``placed``, which has the weights."""
        optimizer.set_taken(self.states)
        placed.return_to(self.origins)
