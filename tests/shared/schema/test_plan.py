"""Plans and the rule that places activation modes."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from protwin.shared.basics.errors import PlanError
from protwin.shared.schema.optimizer import HostGradients, Optimizer
from protwin.shared.schema.plan import (
    ActivationMode,
    ParallelMode,
    Plan,
    ProjectionPlace,
    TrainingMethod,
    place_activation_modes,
)

KEEP, CHECKPOINT, SWAP = ActivationMode.KEEP, ActivationMode.CHECKPOINT, ActivationMode.SWAP
FIELDS: dict[str, Any] = {"workload_id": "w", "chunk_bytes": 4096, "n_persist": 0, "n_buffer": 1}


def checkpointed(num_blocks: int, n_checkpoint: int) -> list[int]:
    modes = place_activation_modes(num_blocks, n_checkpoint=n_checkpoint)
    assert len(modes) == num_blocks
    return [block for block, mode in enumerate(modes) if mode is CHECKPOINT]


@pytest.mark.parametrize(
    ("num_blocks", "n_checkpoint", "blocks"),
    [
        (8, 0, []),
        (8, 1, [4]),
        (8, 2, [2, 6]),
        (8, 3, [1, 4, 6]),
        (8, 4, [1, 3, 5, 7]),
        (8, 6, [0, 2, 3, 4, 6, 7]),
        (8, 8, [0, 1, 2, 3, 4, 5, 6, 7]),
        (5, 2, [1, 3]),
        (5, 3, [0, 2, 4]),
        (3, 1, [1]),
        (1, 1, [0]),
        (0, 0, []),
    ],
)
def test_modes_by_hand(num_blocks: int, n_checkpoint: int, blocks: list[int]) -> None:
    assert checkpointed(num_blocks, n_checkpoint) == blocks


@given(st.integers(0, 200).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n))))
def test_as_many_as_asked_evenly_and_centred(drawn: tuple[int, int]) -> None:
    num_blocks, n_checkpoint = drawn
    blocks = checkpointed(num_blocks, n_checkpoint)
    assert len(blocks) == n_checkpoint
    gaps = {second - first for first, second in pairwise(blocks)}
    assert not gaps or max(gaps) - min(gaps) <= 1
    if blocks:
        assert abs(blocks[0] - (num_blocks - 1 - blocks[-1])) <= 1


def test_more_than_there_are_is_an_error() -> None:
    with pytest.raises(PlanError, match="n_checkpoint is 4 but the workload has 3 blocks"):
        place_activation_modes(3, n_checkpoint=4)
    with pytest.raises(PlanError, match="n_checkpoint is 4"):
        Plan(**FIELDS, n_checkpoint=4).modes(3)


def test_explicit_modes() -> None:
    modes = (KEEP, CHECKPOINT, CHECKPOINT)
    plan = Plan(**FIELDS, n_checkpoint=2, activation_modes=modes)
    assert plan.modes(3) == modes
    with pytest.raises(PlanError, match="names 3 blocks but the workload has 4"):
        plan.modes(4)
    with pytest.raises(ValidationError, match="n_checkpoint differs"):
        Plan(**FIELDS, n_checkpoint=1, activation_modes=modes)
    with pytest.raises(ValidationError, match="n_swap differs"):
        Plan(**FIELDS, n_checkpoint=2, n_swap=1, activation_modes=modes)


def test_the_first_blocks_swap_and_checkpoints_are_spread_over_the_others() -> None:
    assert place_activation_modes(6, n_swap=2, n_checkpoint=2) == (SWAP, SWAP, KEEP, CHECKPOINT, KEEP, CHECKPOINT)
    assert place_activation_modes(3, n_swap=3, n_checkpoint=0) == (SWAP,) * 3
    with pytest.raises(PlanError, match="n_checkpoint is 2 and n_swap is 2 but the workload has 3"):
        place_activation_modes(3, n_swap=2, n_checkpoint=2)


@pytest.mark.parametrize(
    "change",
    [
        {"chunk_bytes": 0},
        {"chunk_bytes": -1},
        {"n_persist": -1},
        {"n_buffer": -1},
        {"prefetch_depth": 0},
        {"n_checkpoint": -1},
        {"n_swap": -1},
        {"micro_batches": 0},
        {"mlp_tiles": 0},
        {"max_gradient_norm": 0},
        {"max_gradient_norm": float("nan")},
        {"chunk_bytes": 1.5},
        {"chunk_bytes": float("nan")},
        {"chunk_bytes": None},
        {"speed": 1},
    ],
    ids=str,
)
def test_impossible_knobs_are_refused(change: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        Plan(**(FIELDS | change))


def test_the_identity_covers_every_knob() -> None:
    plan = Plan(**FIELDS)
    changes: list[dict[str, object]] = [
        {"workload_id": "v"},
        {"method": TrainingMethod.BYPASS},
        {"chunk_bytes": 4097},
        {"n_persist": 1},
        {"n_host_stepped": 1},
        {"looks_up_rows": True},
        {"n_shard": 1},
        {"n_disk_state": 2},
        {"n_disk": 1},
        {"n_staging": 1},
        {"n_buffer": 2},
        {"prefetch_depth": 2},
        {"n_checkpoint": 1},
        {"n_swap": 1},
        {"n_checkpoint": 1, "n_offload_input": 1},
        {"n_checkpoint": 1, "n_selective": 1},
        {"n_checkpoint": 1, "n_selective": 1, "product_stride": 2},
        {"activation_modes": (KEEP,)},
        {"mlp_tiles": 2},
        {"micro_batches": 2},
        {"loss_tiles": 2},
        {"max_gradient_norm": 1.0},
        {"optimizer": Optimizer.SGD},
        {"host_gradients": HostGradients.FLOAT32},
        {"projects_gradients_on": ProjectionPlace.DEVICE},
        {"parallel": ParallelMode.SHARDED},
        {"num_ranks": 2},
        {"shard_ranks": 2},
        {"sequence_ranks": 2},
    ]
    assert {name for change in changes for name in change} == set(Plan.model_fields) - {"note", "made_for"}
    identities = [plan.identity, *(plan.model_copy(update=change).identity for change in changes)]
    assert len(set(identities)) == len(identities)
    assert Plan(**FIELDS).identity == plan.identity
    assert Plan(**FIELDS, note="of ours").identity == plan.identity
    told = Plan(**FIELDS, made_for="model small")
    assert (told.identity, told, hash(told)) == (plan.identity, plan, hash(plan))
    assert Plan(**FIELDS, note="of ours") != plan
    assert told != Plan(**FIELDS, n_checkpoint=1)


def test_shard_groups_are_equal_parts_of_the_ranks_and_leave_other_plans_as_they_were() -> None:
    ranks = {**FIELDS, "parallel": "sharded", "num_ranks": 12}
    whole = Plan(**ranks)
    assert (whole.num_shards, whole.num_replicas, "shard_ranks" in json.loads(whole.to_json())) == (12, 1, False)
    for same in (Plan(**ranks, shard_ranks=12), Plan(**ranks, shard_ranks=None)):
        assert (same, same.identity) == (whole, whole.identity)
    grouped = Plan(**ranks, shard_ranks=4)
    assert (grouped.num_shards, grouped.num_replicas) == (4, 3)
    assert Plan.from_mapping(json.loads(grouped.to_json()), origin="a file") == grouped
    assert Plan(**{**ranks, "parallel": "ddp"}).num_shards == 1


@pytest.mark.parametrize(
    ("parallel", "shard_ranks", "reason"),
    [
        ("sharded", 5, "shard_ranks: 5 does not divide num_ranks 12 into equal groups. Choose from 2, 3, 4, 6, 12"),
        ("sharded", 24, "shard_ranks: 24 does not divide"),
        ("sharded", 1, "shard_ranks: 1 leaves nobody to share a chunk with; name ddp or replicated"),
        ("ddp", 4, "shard_ranks: 4 with parallel ddp; only ranks in mode sharded"),
        ("replicated", 12, "shard_ranks: 12 with parallel replicated; only ranks in mode sharded"),
    ],
)
def test_shard_groups_that_cannot_be_are_refused(parallel: str, shard_ranks: int, reason: str) -> None:
    with pytest.raises(ValidationError, match=reason):
        Plan(**FIELDS, parallel=ParallelMode(parallel), num_ranks=12, shard_ranks=shard_ranks)


def test_a_note_is_kept_and_an_empty_one_leaves_no_field() -> None:
    plan = Plan(**FIELDS)
    noted = plan.model_copy(update={"note": "of ours"})
    assert Plan.from_mapping(json.loads(noted.to_json()), origin="a file") == noted
    assert "note" not in json.loads(plan.to_json())
