"""Plans and workloads of bypass distillation: files, identities, and what they refuse."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pydantic import ValidationError

from protwin.shared.phases.distillation import Distillation, KeyToLearn
from protwin.shared.schema.plan import ActivationMode, ParallelMode, Plan, TrainingMethod
from protwin.shared.schema.workload import Block, OuterSection, Phase, Uses, Workload
from tests.shared.bypass_models import bypass_plan, pairs
from tests.shared.small_models import chain, phase


def test_files_have_what_is_set_and_read_back_equal() -> None:
    workload, other = pairs(2), chain(2)
    plan = bypass_plan(workload)
    assert json.loads(plan.to_json())["method"] == "bypass"
    assert Plan.from_mapping(json.loads(plan.to_json()), origin="here") == plan
    assert Workload.from_mapping(json.loads(workload.to_json()), origin="here") == workload
    assert "distillation" not in json.loads(other.to_json())
    full = Plan(workload_id=other.identity, chunk_bytes=4_096, n_persist=0, n_buffer=1)
    assert "method" not in json.loads(full.to_json())
    assert plan.identity != plan.model_copy(update={"method": TrainingMethod.FULL}).identity


def test_the_identity_of_a_workload_covers_what_is_learnt_and_by_which_loss() -> None:
    workload = pairs(2)
    distillation = workload.distillation
    assert distillation is not None
    changes: dict[str, Any] = [
        {"loss": "cosine"},
        {"keys_to_learn": (KeyToLearn.SUBBLOCK_FFN,)},
        {"keys_to_learn": (KeyToLearn.SUBBLOCK_ATTENTION, KeyToLearn.SUBBLOCK_FFN)},
    ]
    others = [workload.model_copy(update={"distillation": distillation.model_copy(update=one)}) for one in changes]
    assert len({workload.identity, *(other.identity for other in others)}) == 1 + len(changes)
    faster = tuple(loss.model_copy(update={"measured_s": 2.0}) for loss in distillation.losses)
    same = workload.model_copy(update={"distillation": distillation.model_copy(update={"losses": faster})})
    assert same.identity == workload.identity


@pytest.mark.parametrize(
    ("knobs", "message"),
    [
        ({"n_checkpoint": 1}, "n_checkpoint: 1 with method bypass"),
        ({"n_swap": 1}, "n_swap: 1 with method bypass"),
        ({"activation_modes": (ActivationMode.CHECKPOINT,), "n_checkpoint": 1}, "n_checkpoint: 1 with method bypass"),
        ({"looks_up_rows": True}, "looks_up_rows with method bypass"),
        ({"mlp_tiles": 2}, "mlp_tiles: 2 with method bypass"),
        (
            {"max_gradient_norm": 1.0, "parallel": ParallelMode.SHARDED, "num_ranks": 2},
            "max_gradient_norm: 1 with method bypass and parallel sharded",
        ),
    ],
    ids=str,
)
def test_knobs_that_bypass_does_not_know_are_refused_by_name(knobs: dict[str, object], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        bypass_plan(pairs(1), **knobs)


@pytest.mark.parametrize("keys", [("subblock_ffn", "subblock_attention"), ("subblock_ffn",) * 2, (), ("head",)])
def test_keys_are_named_once_in_order(keys: tuple[str, ...]) -> None:
    with pytest.raises(ValidationError):
        Distillation(losses=(), keys_to_learn=keys, loss="mse")
    with pytest.raises(ValidationError, match="stands alone"):
        Distillation(losses=(), keys_to_learn=("entire_block", "subblock_ffn"), loss="mse")


def broken(**changes: object) -> dict[str, object]:
    workload = pairs(2)
    return {name: getattr(workload, name) for name in Workload.model_fields} | changes


def test_what_is_no_pairs_is_refused() -> None:
    workload = pairs(2)
    first, *others = workload.parameters
    learning = first.model_copy(update={"trainable": True})
    used_behind = first.model_copy(
        update={"uses": Uses(forward=(OuterSection.EPILOGUE,), backward=(), gradient=OuterSection.EPILOGUE)}
    )
    unknown = first.model_copy(update={"uses": None})
    busy = workload.profiles[0].model_copy(update={"backward": phase(-4)})
    blocks = workload.blocks
    for changes, message in (
        ({"blocks": blocks[:3], "parameters": workload.parameters[:4]}, "3 blocks are no pairs"),
        ({"blocks": (blocks[1], *blocks[1:])}, "which does not begin with teacher"),
        ({"blocks": tuple(Block(name=b.name, profile=0) for b in blocks)}, "of a teacher's and of a student's block"),
        ({"profiles": (*workload.profiles, busy)}, "2 losses for 3 profiles"),
        ({"profiles": (busy, workload.profiles[1])}, "does more than one forward"),
        ({"parameters": (learning, *others)}, "belongs to no block of the student"),
        ({"parameters": (used_behind, *others)}, "nobody says which of the sections"),
        ({"parameters": (unknown, *others)}, "nobody says which of the sections"),
        ({"epilogue_forward": Phase(net_bytes=4)}, "epilogue do nothing"),
    ):
        with pytest.raises(ValidationError, match=message):
            Workload(**broken(**changes))
