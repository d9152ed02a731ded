"""What ranks that share sequences do is another set of phases of the same workload."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from protwin.shared.basics.errors import PlanError
from protwin.shared.layout.tiling import tiled
from protwin.shared.phases.block_profile import BlockProfile, Tiling
from protwin.shared.phases.phase import Phase
from protwin.shared.phases.sequence_sharing import SequenceSharing
from protwin.shared.phases.tiling import LossTiling
from protwin.shared.schema.plan import ParallelMode, Plan, TrainingMethod
from protwin.shared.schema.plan_check import check_plan
from protwin.shared.schema.workload import Workload
from tests.proof_size import examples
from tests.shared.small_models import chain
from tests.strategies.sharings import changed, shared_workloads, sharings
from tests.strategies.workloads import workloads

ROW: dict[str, Any] = {"workload_id": "1", "chunk_bytes": 1, "n_persist": 0, "n_buffer": 1}


def read(kind: Any, text: str) -> Any:
    return kind.from_mapping(json.loads(text), origin="a test")


@settings(max_examples=examples(100, 10), deadline=None)
@given(st.data())
def test_a_share_is_another_set_of_phases_of_the_same_workload(data: st.DataObject) -> None:
    whole = data.draw(workloads(4))
    known = data.draw(shared_workloads(whole, (2, 8)))
    assert read(Workload, known.to_json()) == known
    assert known.identity == whole.identity, "plans of the whole stay valid"
    assert known.shared_among(1) is known
    for sharing in known.sequence_sharings:
        one = known.shared_among(sharing.sequence_ranks)
        assert one.identity == whole.identity
        assert (one.num_tokens, one.num_samples) == (whole.num_tokens, whole.num_samples)
        assert one.resident_bytes == sharing.resident_bytes
        assert one.epilogue_forward == sharing.epilogue_forward
        for block, profile in enumerate(sharing.profile_of):
            assert one.profile_of(block) == sharing.profiles[profile]
        assert one.shared_among(sharing.sequence_ranks) == one
    with pytest.raises(PlanError, match="sequence_ranks: 4, but the workload of random knows 1, 2, 8"):
        known.shared_among(4)


def _phase(seconds: float, exchanges: tuple[int, ...] = ()) -> Phase:
    return Phase(net_bytes=5, curve=((1.0, 9),), measured_s=seconds, exchanges=exchanges)


def _exchanging(profile: BlockProfile, seconds: float) -> BlockProfile:
    forwards = {name: _phase(seconds, (300, 100)) for name in ("forward", "checkpoint_forward")}
    return profile.model_copy(update=forwards)


def _sharing(workload: Workload, sequence_ranks: int, **fields: Any) -> SequenceSharing:
    profile = _exchanging(workload.profiles[0], 0.5)
    outer = {name: _phase(0.25) for name in ("prologue_forward", "epilogue_forward")}
    outer |= {name: _phase(0.125) for name in ("prologue_backward", "epilogue_backward")}
    given = {"sequence_ranks": sequence_ranks, "profiles": (profile,), "profile_of": (0,) * workload.num_blocks}
    return SequenceSharing(**given | outer | fields)


def test_tiles_of_a_share_are_those_of_its_own_tokens() -> None:
    workload = chain(2)
    tile = _exchanging(workload.profiles[0], 0.75)
    mlps = Tiling(mlp_tiles=4, modules=("mlp",), profiles=(tile,), profile_of=(0, 0))
    of_loss = LossTiling(loss_tiles=3, epilogue_forward=_phase(9), epilogue_backward=_phase(8))
    sharing = _sharing(workload, 2, tilings=(mlps,), loss_tilings=(of_loss,))
    known = changed(workload, sequence_sharings=(sharing,))
    mode = {"parallel": ParallelMode.SHARDED, "num_ranks": 4}
    plan = Plan(**ROW | mode | {"workload_id": known.identity}, sequence_ranks=2, mlp_tiles=4, loss_tiles=3)
    check_plan(plan, known)
    found = tiled(known, plan)
    assert found.profile_of(1) == tile
    assert found.epilogue_backward == of_loss.epilogue_backward
    assert found.prologue_forward == sharing.prologue_forward
    assert tiled(found, plan) == found
    with pytest.raises(PlanError, match="mlp_tiles: 4, but the workload of small knows none"):
        check_plan(plan.model_copy(update={"sequence_ranks": 1}), known)


def test_what_contradicts_is_refused() -> None:
    workload = chain(2)
    assert "sequence_sharings" not in workload.to_json()
    assert "exchanges" not in workload.to_json()
    for counts in ((3, 2), (2, 2)):
        with pytest.raises(ValidationError, match="each number stands once, and they ascend"):
            changed(workload, sequence_sharings=tuple(_sharing(workload, count) for count in counts))
    with pytest.raises(ValidationError, match="2 ranks have profiles of 1 blocks of 2"):
        changed(workload, sequence_sharings=(_sharing(workload, 2, profile_of=(0,)),))
    with pytest.raises(ValidationError, match="names profile 1 of 1"):
        _sharing(workload, 2, profile_of=(0, 1))
    with pytest.raises(ValidationError, match="phases of whole sequences exchange nothing"):
        changed(workload, profiles=_sharing(workload, 2).profiles * 2)
    for number in (0, 1, 2**40):
        with pytest.raises(ValidationError):
            _sharing(workload, number)


@pytest.mark.parametrize(
    ("knobs", "reason"),
    [
        ({"sequence_ranks": 2}, "sequence_ranks: 2 with parallel single"),
        (
            {"sequence_ranks": 4, "num_ranks": 6, "parallel": ParallelMode.DDP},
            "sequence_ranks: 4 does not divide num_ranks 6 into equal groups. Choose from 1, 2, 3, 6",
        ),
        (
            {"sequence_ranks": 2, "num_ranks": 2, "parallel": ParallelMode.DDP, "method": TrainingMethod.BYPASS},
            "sequence_ranks: 2 with method bypass, whose blocks run whole",
        ),
    ],
)
def test_plans_share_sequences_among_equal_groups(knobs: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValidationError, match=reason):
        Plan(**ROW | knobs)


def test_plans_of_whole_sequences_are_what_they_were() -> None:
    plan = Plan(**ROW, parallel=ParallelMode.DDP, num_ranks=8, micro_batches=3)
    assert "sequence_ranks" not in plan.to_json()
    assert Plan(**plan.model_dump() | {"sequence_ranks": 1}).identity == plan.identity
    assert plan.num_batches == 24
    more = Plan(**plan.model_dump() | {"sequence_ranks": 4})
    assert read(Plan, more.to_json()) == more
    assert more.identity != plan.identity
    assert more.num_batches == 6


@given(st.data())
@settings(max_examples=examples(50, 5), deadline=None)
def test_phases_keep_what_they_exchange(data: st.DataObject) -> None:
    workload = data.draw(workloads(2))
    for phase in data.draw(sharings(workload, 2)).phases:
        for other in (phase.adding, phase.with_shared(held_bytes=8), phase.with_more_gradients(8)):
            assert other.exchanges == phase.exchanges
