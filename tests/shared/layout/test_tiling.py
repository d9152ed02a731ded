"""A plan with tiles is compiled from the phases of its tiles, and from nothing else that differs."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from pydantic import ValidationError

from protwin.shared.basics.errors import PlanError
from protwin.shared.compile.compile import compile_schedule
from protwin.shared.layout.tiling import tiled
from protwin.shared.phases.phase import Phase
from protwin.shared.phases.tiling import LossTiling
from protwin.shared.schema.plan import Plan, TrainingMethod
from protwin.shared.schema.workload import Workload
from protwin.shared.verify.verify import verify_schedule
from protwin.shared.workloads.source import load_workload
from tests.proof_size import examples
from tests.shared.small_models import chain
from tests.strategies.plans import PlannedWorkload, planned_workloads
from tests.strategies.workloads import phases


def changed(workload: Workload, **fields: Any) -> Workload:
    return Workload(**{name: getattr(workload, name) for name in Workload.model_fields} | fields)


def read(kind: Any, text: str) -> Any:
    return kind.from_mapping(json.loads(text), origin="a test")


def tiling(loss_tiles: int, forward: Phase, backward: Phase) -> LossTiling:
    return LossTiling(loss_tiles=loss_tiles, epilogue_forward=forward, epilogue_backward=backward)


@settings(max_examples=examples(200, 10), deadline=None)
@given(planned_workloads(), phases(net_bytes=4096), phases(net_bytes=512))
def test_a_tiled_plan_is_compiled_as_a_workload_that_has_these_phases(
    case: PlannedWorkload, one: Phase, other: Phase
) -> None:
    plan, whole = case.plan, case.workload
    freeing = whole.epilogue_backward
    known = changed(whole, loss_tilings=(tiling(2, one, freeing), tiling(8, other, freeing)))
    assert known.identity == whole.identity
    assert compile_schedule(plan, known) == compile_schedule(plan, whole), "1 tile: the phases that a trace has"
    for tiles, forward in ((2, one), (8, other)):
        chosen = plan.model_copy(update={"loss_tiles": tiles})
        found = compile_schedule(chosen, known)
        verify_schedule(found, chosen, known)
        substituted = compile_schedule(plan, changed(whole, epilogue_forward=forward))
        assert replace(found, plan_id=plan.identity) == substituted
        again = tiled(known, chosen)
        assert tiled(again, chosen) is again
    with pytest.raises(PlanError, match=r"loss_tiles: 3, .* knows 1, 2, 8"):
        compile_schedule(plan.model_copy(update={"loss_tiles": 3}), known)


def test_tilings_stand_once_and_ascend_and_read_back() -> None:
    case = Phase(net_bytes=5, curve=((1.0, 9),))
    workload = chain(2)
    assert "loss_tilings" not in workload.to_json()
    known = changed(workload, loss_tilings=(tiling(2, case, case), tiling(3, case, case)))
    assert read(Workload, known.to_json()) == known
    for counts in ((3, 2), (2, 2)):
        with pytest.raises(ValidationError, match="each number stands once, and they ascend"):
            changed(workload, loss_tilings=tuple(tiling(count, case, case) for count in counts))
    for count in (0, 1, 2**40):
        with pytest.raises(ValidationError):
            tiling(count, case, case)


@pytest.mark.parametrize("tiles", [0, -1, 2**40, 1.5])
def test_a_plan_has_a_number_of_tiles(tiles: float) -> None:
    with pytest.raises(ValidationError, match="loss_tiles"):
        Plan(workload_id="1", chunk_bytes=1, n_persist=0, n_buffer=1, loss_tiles=tiles)  # type: ignore[arg-type]


def test_plans_of_one_tile_are_what_they_were() -> None:
    plan = Plan(workload_id="1", chunk_bytes=1, n_persist=0, n_buffer=1)
    assert "loss_tiles" not in plan.to_json()
    assert Plan(**plan.model_dump() | {"loss_tiles": 1}).identity == plan.identity
    more = plan.model_copy(update={"loss_tiles": 2})
    assert read(Plan, more.to_json()) == more
    assert more.identity != plan.identity
    with pytest.raises(ValidationError, match="whose losses are of blocks"):
        Plan(**more.model_dump() | {"method": TrainingMethod.BYPASS})


def test_a_workload_that_keeps_results_is_itself_once_it_does() -> None:
    """Whoever compiles, verifies and simulates a plan asks for its workload, each by itself."""
    whole = load_workload("gpt2", batch_size=1, sequence_length=32)
    plan = Plan(workload_id=whole.identity, chunk_bytes=2**26, n_persist=9, n_buffer=0, n_checkpoint=12, n_selective=5)
    keeping = tiled(whole, plan)
    assert keeping is not whole
    assert tiled(whole, plan) is keeping
    assert tiled(keeping, plan) is keeping
    assert keeping.identity == whole.identity
    assert [block.profile for block in keeping.blocks] == [0] * 7 + [1] * 5
    assert [profile.kept_bytes > 0 for profile in keeping.profiles] == [False, True]
