"""A distillation by ranks that have contiguous pairs each is, bit for bit, that of every block alone."""

from __future__ import annotations

import re
import time
from random import Random

import pytest

from protwin.shared.pipelines.pipeline import Pipeline, Stage
from protwin.shared.schema.plan import ParallelMode
from tests.proof_size import examples, some_quick
from tests.runtime.ranks.processes import Pool, Ranks
from tests.runtime.ranks.staging import (
    DEEP,
    WRONG,
    distil_stage,
    distil_until_one_fails,
    expected,
    not_of_stages,
    pipeline_of,
    refused,
    workload_of,
)

SPLITS = (
    ("llama", (1, 2)),
    ("gpt2", (2, 1)),
    ("jamba", (1, 2)),
    (DEEP, (1, 3, 1)),
)
BOUND_S = 60.0


@some_quick(("name", "num_pairs"), SPLITS, quick=2)
def test_stages_distil_what_each_block_learns_alone(name: str, num_pairs: tuple[int, ...], pool: Pool) -> None:
    random, moved = Random(f"{name} {num_pairs}"), 0
    for number in range(examples(8, 1)):
        micro_batches = 1 + number % 2 if number else random.choice((1, 2))
        pipeline = pipeline_of(workload_of(name), num_pairs, random.randrange(10**6), micro_batches=micro_batches)
        found = pool.of(len(num_pairs)).run(
            distil_stage, name, pipeline, workload_of(name), expected(name, micro_batches)
        )
        assert [one.wrong for one in found] == [[]] * len(num_pairs), pipeline
        assert [one.num_pairs for one in found] == list(num_pairs)
        moved += sum(one.moved_bytes for one in found)
    assert moved


@pytest.mark.parametrize("wrong", [name for name in WRONG if name is not None])
def test_wrong_activations_are_noticed(wrong: str, two_ranks: Ranks) -> None:
    workload = workload_of("dicts")
    pipeline = pipeline_of(workload, (1, 2), 0, micro_batches=2)
    found = two_ranks.run(distil_stage, "dicts", pipeline, workload, expected("dicts", 2), wrong)
    # Losses of all stages are seen by all; the weights of the first stage are right.
    assert [any("student" in one for one in of_rank.wrong) for of_rank in found] == [False, True]


@pytest.mark.parametrize("parallel", [ParallelMode.DDP, ParallelMode.REPLICATED, ParallelMode.SHARDED])
def test_replicas_step_with_the_mean_of_their_gradients(parallel: ParallelMode, two_ranks: Ranks) -> None:
    workload = workload_of("dicts")
    pipeline = pipeline_of(workload, (3,), 1, parallel=parallel, num_replicas=2)
    found = two_ranks.run(distil_stage, "dicts", pipeline, workload, expected("dicts", 2))
    assert [one.wrong for one in found] == [[], []], pipeline


@some_quick("parallel", [ParallelMode.REPLICATED, ParallelMode.SHARDED], quick=1)
def test_pipelines_side_by_side(parallel: ParallelMode, four_ranks: Ranks) -> None:
    workload = workload_of("dicts")
    pipeline = pipeline_of(workload, (2, 1), 2, parallel=parallel, num_replicas=2)
    found = four_ranks.run(distil_stage, "dicts", pipeline, workload, expected("dicts", 2))
    assert [one.wrong for one in found] == [[]] * 4, pipeline
    assert [one.first_pair for one in found] == [0, 2, 0, 2]


def test_all_ranks_refuse_alike(two_ranks: Ranks) -> None:
    """Stages of more pairs than there are, and other ranks than stages."""
    workload = workload_of("dicts")
    good = pipeline_of(workload, (1, 2), 0)
    more = Pipeline(workload_id=workload.identity, stages=tuple(Stage(num_pairs=2, plan=s.plan) for s in good.stages))
    three = pipeline_of(workload, (1, 1, 1), 0)
    for pipeline, message in ((more, "have 4 pairs but .* has 3"), (three, "for 3 ranks, but 2 processes")):
        first, second = two_ranks.errors(refused, "dicts", pipeline, workload)
        assert first == second
        assert re.search(message, first), first


def test_what_is_not_known_of_stages_is_refused(two_ranks: Ranks) -> None:
    workload = workload_of("dicts")
    for said in two_ranks.run(not_of_stages, "dicts", pipeline_of(workload, (1, 2), 0), workload):
        assert [message.partition("(")[0] for message in said] == ["skip_step"]


@pytest.mark.parametrize(
    ("how", "own", "told"),
    [
        ("error", "ValueError", "training was ended by rank 1: ValueError: trouble"),
        pytest.param("sleep", "RanksError", "", marks=pytest.mark.slow),
        ("kill", "EOFError", "another rank has ended without a word"),
    ],
)
def test_a_rank_that_fails_ends_its_neighbours(how: str, own: str, told: str, three_ranks: Ranks) -> None:
    workload, begun = workload_of("dicts"), time.monotonic()
    pipeline = pipeline_of(workload, (1, 1, 1), 0)
    outcomes = three_ranks.outcomes(distil_until_one_fails, "dicts", pipeline, workload, 1, how)
    assert [type(outcome.error).__name__ for outcome in outcomes] == ["RanksError", own, "RanksError"]
    assert all(told in str(outcomes[rank].error) for rank in (0, 2)), outcomes
    assert time.monotonic() - begun < BOUND_S
