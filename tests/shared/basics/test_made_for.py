"""Where a plan and a workload do not belong together, the message names in what they differ."""

from __future__ import annotations

import pytest

from protwin.shared.basics.errors import PlanError
from protwin.shared.schema.plan import Plan
from protwin.shared.schema.plan_check import check_plan
from protwin.shared.schema.training_options import LoraOptions, TrainingOptions
from protwin.shared.schema.workload import DType, Workload
from protwin.shared.workloads.source import load_workload


def workload_of(sequence_length: int = 64, dtype: str = "bfloat16", **training: object) -> Workload:
    options = TrainingOptions.model_validate({"lora": {"rank": 8}} | training)
    return load_workload("gpt2", batch_size=1, sequence_length=sequence_length, dtype=dtype, options=options)


MADE = workload_of()
PLAN = Plan(workload_id=MADE.identity, made_for=MADE.words, chunk_bytes=2**26, n_persist=1, n_buffer=4)


@pytest.mark.parametrize(
    ("asked", "there", "here", "option"),
    [
        ({"lora": LoraOptions(rank=4)}, "trains 1,179,648 in", "trains 589,824 in", "--lora-rank"),
        (
            {"lora": LoraOptions(rank=8, dtype=DType.FLOAT32)},
            "trains 1,179,648 in bfloat16",
            "trains 1,179,648 in float32",
            "--lora-dtype",
        ),
        ({"lora": None}, "keeps 124,439,808 in bfloat16 frozen", "keeps none frozen", "--lora-rank"),
        ({"sequence_length": 32}, "input_ids [1, 64]", "input_ids [1, 32]", "--sequence-length"),
        ({"dtype": "float32"}, "computes in bfloat16", "computes in float32", "--dtype"),
        ({"loss_head": "fused"}, "loss eager", "loss fused", "--loss"),
    ],
)
def test_what_differs_is_named_with_its_option(asked: dict[str, object], there: str, here: str, option: str) -> None:
    with pytest.raises(PlanError) as caught:
        check_plan(PLAN, workload_of(**asked))  # type: ignore[arg-type]
    told = str(caught.value)
    differing = told[told.index("They differ:") :]
    assert any(there in one for one in differing.split(" there, ")[:-1])
    assert any(here in one for one in differing.split(" there, ")[1:])
    assert option in differing


def test_a_plan_of_a_file_that_says_nothing_names_all_that_may_differ() -> None:
    with pytest.raises(PlanError, match=r"--lora-dtype, .* and loss \(--loss\)"):
        check_plan(PLAN.model_copy(update={"made_for": None}), workload_of(sequence_length=32))


def test_words_are_those_of_the_workload() -> None:
    check_plan(PLAN, MADE)
    assert MADE.words == workload_of().words
    others = [workload_of(dtype="float32"), workload_of(sequence_length=32), workload_of(loss_head="fused")]
    assert len({MADE.words, *(one.words for one in others)}) == 4
