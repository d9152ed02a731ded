"""What the runtime asks of search and calibration before and while it trains: the entry points ``protwin.planners``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from ...runtime.planning.request import PlanRequest, Tell
from ...shared.answers.search_result import SearchResult
from ...shared.basics.errors import PlanError
from ...shared.basics.suggestions import did_you_mean
from ...shared.schema.calibration import Calibration
from ...shared.schema.hardware import Hardware
from ...shared.schema.workload import Workload
from ...sim.questions.by_name import search
from ...sim.searching.request import SearchRequest, Step
from ...sim.space.space import SearchSpace
from ...sim.space.step_spec import SEVERAL
from ..fitting.replanning import Replanner


def search_request(workload: Workload, hardware: Hardware, request: PlanRequest, num_ranks: int = 1) -> SearchRequest:
    """The search for the plan that ``request`` wants.  Raises PlanError if one of its knobs is none, or no number.

    Ranks share sequences where that is asked for alone, whatever the workload knows: they need the same batches then.
    """
    assert request.calibration is None or isinstance(request.calibration, Calibration)
    assert not isinstance(request.budget_bytes, str)
    assert not isinstance(request.host_budget_bytes, str)
    shared = {"sequence_ranks": request.sequence_ranks}
    return SearchRequest(
        workload=workload,
        hardware=hardware,
        calibration=request.calibration,
        device_budget_bytes=request.budget_bytes,
        host_budget_bytes=request.host_budget_bytes,
        space=space_of({**request.knobs, **shared} if workload.sequence_sharings else request.knobs),
        step=Step(
            micro_batches=request.micro_batches,
            max_gradient_norm=request.max_gradient_norm,
            num_ranks=num_ranks,
            modes=SEVERAL if request.modes is None else tuple(request.modes),
            optimizer=request.optimizer,
            host_gradients=request.host_gradients,
        ),
        baselines=(),
    )


def search_plan(workload: Workload, hardware: Hardware, request: PlanRequest, num_ranks: int) -> SearchResult:
    """The plan for ``request``.  Raises InfeasibleError if none fits, and what ``search_request`` raises."""
    return search(search_request(workload, hardware, request, num_ranks))


def replanner(workload: Workload, hardware: Hardware, request: PlanRequest, tell: Tell | None) -> Replanner:
    """Who searches again within the limits of ``request``, for one rank."""
    return Replanner(search_request(workload, hardware, request), tell)


def space_of(knobs: Mapping[str, Any]) -> SearchSpace:
    """The space in which ``knobs`` are what they are set to.  Raises PlanError, which names those that there are."""
    unknown = sorted(knobs.keys() - SearchSpace.model_fields.keys())
    if unknown:
        choice = did_you_mean(unknown[0], SearchSpace.model_fields)
        raise PlanError(f"{unknown[0]} is no knob that a search leaves fixed. {choice}")
    try:
        return SearchSpace.model_validate(dict(knobs))
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(str(part) for part in first["loc"]) or "knobs"
        raise PlanError(f"{name} cannot be {first['input']!r}: {first['msg']}.") from error
