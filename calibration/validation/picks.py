"""What the search recommends for the model that is validated: a plan whose measured time is held against the others."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from typing import Final

from ...shared.basics.errors import InfeasibleError
from ...shared.schema.calibration import Calibration
from ...shared.schema.plan import Plan
from ...sim.searching.confidence import NO_UNCERTAINTY
from ...sim.searching.request import Effort, SearchRequest, Step
from ...sim.searching.search import search
from ..fitting.subject import Subject

PICK: Final = "search's pick"
ROOMY: Final = "search's pick without a budget"
"""Beside a plain loop, which has none either."""
_MOST_REPLAYS: Final = 20_000
"""A search that has not proven its plan by then gives the best one so far: minutes are for measuring."""


def search_picks(subject: Subject, calibration: Calibration, budget_bytes: int) -> dict[str, Plan]:
    """What the search recommends within ``budget_bytes`` of device memory, by name.

    Of a distillation also without a budget, and of several ranks the fastest plan of every mode in which one fits.
    Raises InfeasibleError if none fits.
    """
    step = Step(num_ranks=subject.num_ranks, optimizer=subject.optimizer)
    request = SearchRequest(
        workload=subject.workload,
        hardware=subject.hardware,
        calibration=calibration,
        device_budget_bytes=budget_bytes,
        step=step,
        effort=Effort(max_replays=_MOST_REPLAYS),
    )
    found = {PICK: search(request).plan}
    if subject.workload.distillation is not None:
        found[ROOMY] = search(replace(request, device_budget_bytes=None)).plan
    for mode in step.allowed_modes if subject.num_ranks > 1 else ():
        of_mode = replace(
            request, step=replace(step, modes=(mode,)), effort=replace(request.effort, uncertainty=NO_UNCERTAINTY)
        )
        with suppress(InfeasibleError):
            found[f"{mode}: {PICK}"] = search(of_mode).plan
    return found


def is_alike(plan: Plan) -> bool:
    """Whether a step of ``plan`` does what the pick's does: one micro-batch, and no limit of the norm."""
    return plan.micro_batches == 1 and plan.max_gradient_norm is None
