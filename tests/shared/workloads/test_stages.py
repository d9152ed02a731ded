"""Stages of a distillation: together they are the whole, and each knows its place."""

from __future__ import annotations

from itertools import accumulate, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from protwin.shared.basics.errors import PlanError, WorkloadError
from protwin.shared.phases.distillation import StagePlace
from protwin.shared.schema.plan_check import check_plan
from protwin.shared.schema.workload import OuterSection, Parameter, Uses, Workload
from protwin.shared.workloads.stages import stage_workload, stage_workloads
from tests.proof_size import examples
from tests.shared.bypass_models import bypass_plan, pairs
from tests.shared.small_models import OUTPUT_BYTES, chain, parameter
from tests.strategies.pairs import bypass_workloads


def flops(workload: Workload) -> int:
    """Of all blocks and losses; the prologue aside, which every stage runs."""
    assert workload.distillation is not None
    found = 0
    for place, block in enumerate(workload.blocks):
        profile = workload.profiles[block.profile]
        phases = (profile.forward, profile.backward, workload.distillation.losses[block.profile])
        found += sum(phase.flops for phase in phases if place % 2 or phase is profile.forward)
    return found


def facts(parameter: Parameter) -> tuple[object, ...]:
    return (parameter.name, parameter.shape, parameter.dtype, parameter.trainable)


def of_prologue(workload: Workload) -> list[Parameter]:
    return [p for p in workload.parameters if p.uses is not None and OuterSection.PROLOGUE in p.uses.forward]


@given(bypass_workloads(max_pairs=5, min_pairs=2, is_even=True), st.data())
@settings(max_examples=examples(200, 16), deadline=None)
def test_stages_are_the_whole_together(workload: Workload, data: st.DataObject) -> None:
    of_pairs = workload.num_blocks // 2
    cuts = data.draw(st.sets(st.integers(1, of_pairs - 1), min_size=1, max_size=of_pairs - 1))
    ends = (*sorted(cuts), of_pairs)
    split = [end - begin for begin, end in zip((0, *ends), ends, strict=False)]
    stages = stage_workloads(workload, split)
    assert sum(flops(stage) for stage in stages) == flops(workload)
    assert [block.name for stage in stages for block in stage.blocks] == [block.name for block in workload.blocks]
    outside = of_prologue(workload)
    own = [p for stage in stages for p in stage.parameters if p.block is not None]
    assert list(map(facts, own)) == [facts(p) for p in workload.parameters if p.block is not None]
    sizes = sum(p.size_bytes for stage in stages for p in stage.parameters)
    assert sizes == sum(p.size_bytes for p in workload.parameters) + (len(split) - 1) * sum(
        p.size_bytes for p in outside
    )
    for stage, first, number in zip(stages, accumulate(split, initial=0), split, strict=False):
        assert (stage.num_blocks, stage.num_stages) == (2 * number, len(split))
        assert list(map(facts, of_prologue(stage))) == list(map(facts, outside))
        assert stage.prologue_forward == workload.prologue_forward
        for block, (mine, its) in enumerate(zip(stage.blocks, workload.blocks[2 * first :], strict=False)):
            assert stage.profile_of(block) == workload.profile_of(2 * first + block), (mine, its)
        place = stage.stage
        assert place is not None
        assert (place.receives_bytes > 0, place.sends_bytes > 0) == (first > 0, first + number < of_pairs)
    for one, other in pairwise(stages):
        assert one.stage is not None
        assert other.stage is not None
        assert one.stage.sends_bytes == other.stage.receives_bytes
    assert len({stage.identity for stage in (*stages, workload)}) == len(split) + 1
    assert Workload.model_validate_json(stages[-1].model_dump_json()) == stages[-1]


def test_the_one_stage_of_all_pairs_is_the_whole_and_its_file_knows_no_stage() -> None:
    workload = pairs(3)
    assert stage_workload(workload, 0, 3, 1) is workload
    assert workload.num_stages == 1
    assert '"stage"' not in workload.to_json()
    # As it was before there were stages.
    assert workload.identity == "96f384490fe00cb9"


def test_what_blocks_share_goes_with_the_stages_that_use_it() -> None:
    """A frozen table that the teacher's second and third blocks use alone, and one that the prologue uses too."""
    whole = pairs(3)
    shared = parameter("teacher.table", 8, None, trainable=False).model_copy(
        update={"uses": Uses(forward=(2, 4), backward=(), gradient=2)}
    )
    workload = whole.model_copy(update={"parameters": (whole.parameters[0], shared, *whole.parameters[1:])})
    first, second, third = stage_workloads(workload, (1, 1, 1))
    assert "teacher.table" not in [p.name for p in first.parameters]
    for stage in (second, third):
        (found,) = (p for p in stage.parameters if p.name == "teacher.table")
        assert found.uses == Uses(forward=(0,), backward=(), gradient=0)


@pytest.mark.parametrize(
    ("cut", "message"),
    [
        ((0, 2, 4), "4 stages of 3 pairs: each needs one at least. Use 3 stages at most"),
        ((2, 2, 2), "2 pairs from pair 2 on are no stage of 3 pairs"),
        ((0, 0, 2), "0 pairs from pair 0 on"),
        ((0, 2, 3), "a stage of 2 of 3 pairs leaves no 2 others one each"),
        ((0, 2, 1), "a stage of 2 of 3 pairs leaves no 0 others"),
        ((-1, 1, 2), "1 pairs from pair -1 on"),
    ],
)
def test_what_is_no_stage_is_refused(cut: tuple[int, int, int], message: str) -> None:
    with pytest.raises(WorkloadError, match=message):
        stage_workload(pairs(3), *cut)


def test_who_has_no_stages_is_refused_by_name() -> None:
    with pytest.raises(WorkloadError, match="a workload of full training; stages of a pipeline are known of dist"):
        stage_workload(chain(4), 0, 1, 2)
    with pytest.raises(WorkloadError, match="is one stage of a pipeline already"):
        stage_workload(stage_workload(pairs(4), 0, 2, 2), 0, 1, 2)
    with pytest.raises(WorkloadError, match="stages of 1, 1 pairs have 2 in all, small has 3"):
        stage_workloads(pairs(3), (1, 1))
    whole = pairs(2)
    narrow = whole.model_copy(
        update={"prologue_forward": whole.prologue_forward.model_copy(update={"net_bytes": OUTPUT_BYTES - 1})}
    )
    with pytest.raises(WorkloadError, match=r"activation before pair 1 of small has 1,000 B, .* leaves 999 B"):
        stage_workload(narrow, 1, 1, 2)


def test_a_place_that_contradicts_itself_is_refused() -> None:
    with pytest.raises(ValidationError, match="3 stages of 2 pairs"):
        StagePlace(num_stages=3, first_pair=0, of_pairs=2, sends_bytes=1)
    with pytest.raises(ValidationError, match="every stage but the first receives an activation"):
        StagePlace(num_stages=2, first_pair=1, of_pairs=2)
    stage = stage_workload(pairs(3), 0, 2, 2)
    assert stage.distillation is not None
    assert stage.stage is not None

    def placed(**changes: object) -> dict[str, object]:
        place = stage.stage.model_copy(update=changes)  # type: ignore[union-attr]
        fields = {name: getattr(stage, name) for name in Workload.model_fields}
        return fields | {"distillation": stage.distillation.model_copy(update={"stage": place})}  # type: ignore[union-attr]

    with pytest.raises(ValidationError, match="1 pairs follow the stage, which sends 0 B"):
        Workload(**placed(sends_bytes=0))  # type: ignore[arg-type]
    with pytest.raises(ValidationError, match="2 pairs from pair 0 on, of 2 in all, are too many"):
        Workload(**placed(of_pairs=2))  # type: ignore[arg-type]


def test_a_plan_of_a_stage_has_no_chunks_on_a_disk() -> None:
    stage = stage_workload(pairs(3), 0, 2, 2)
    plan = bypass_plan(stage, n_disk_state=1, n_staging=1)
    with pytest.raises(PlanError, match="n_disk_state: 1 in a stage of a pipeline"):
        check_plan(plan, stage)
