"""Ranks that share sequences train as one rank with whole sequences does."""

from __future__ import annotations

import json
import re
from itertools import pairwise, product
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from protwin.runtime import trace
from protwin.shared.compile.compile import compile_schedule
from protwin.shared.layout.layout import layout_of
from protwin.shared.schema.plan import ActivationMode, ParallelMode, Plan, mode_counts
from protwin.shared.schema.schedule import Lane, TaskKind
from protwin.shared.schema.workload import Workload
from tests.proof_size import some_quick
from tests.runtime.accounts import BAR, MIXTURES
from tests.runtime.ranks.processes import PATIENCE_S, Pool, Ranks, environment
from tests.runtime.ranks.sharing import (
    Trained,
    differ,
    evaluated,
    excesses_of,
    peak_error,
    peaks_beside_late_sums,
    plainly,
    recorded,
    short,
    train,
    trouble,
    with_others,
    workload,
)
from tests.runtime.ranks.test_run import protwin_on

CHUNK_BYTES = 20_000
TOLERANCE = 4e-6
"""Of a weight, as a part of the largest one.  Sums over 96 tokens are rounded in another order, each by some eps
(1.2e-7) of a gradient; AdamW with an epsilon of 1e-3 moves a weight by at most 2 x 3e-3 / 1e-3 times that, and largest
gradients are of the size of largest weights here.  In three steps this makes a few times 1e-6."""
WRONG = {
    "labels cut before the shift": "llama",
    "means of means": "llama",
    "positions from 0": "llama",
    "one gradient of replicas": "llama",
    "no mask of padding": "padded",
}
RESIDENCIES = {"persistent": (1.0, 0), "host-stepped": (0.3, 0.3), "offloaded": (0.3, 0)}


def plan_of(
    name: str,
    num_ranks: int,
    sequence_ranks: int,
    mixture: str = "mixed",
    residency: str = "persistent",
    **knobs: Any,
) -> Plan:
    found = workload(name)
    layout = layout_of(found, CHUNK_BYTES)
    parallel = knobs.pop("parallel", ParallelMode.REPLICATED)
    if parallel is ParallelMode.DDP:
        residency = "persistent"
    kept, stepped = (int(part * len(layout.chunks)) for part in RESIDENCIES[residency])
    modes = tuple(MIXTURES[mixture][block % len(MIXTURES[mixture])] for block in range(found.num_blocks))
    return Plan(
        workload_id=found.identity,
        chunk_bytes=CHUNK_BYTES,
        n_persist=kept,
        n_host_stepped=stepped,
        n_buffer=layout.min_buffers(kept + stepped) + (residency != "persistent"),
        prefetch_depth=1,
        **mode_counts(modes),
        activation_modes=modes,
        parallel=parallel,
        num_ranks=num_ranks,
        sequence_ranks=sequence_ranks,
        **knobs,
    )


def check(found: list[Trained], plan: Plan, name: str) -> None:
    """Against one rank that has the whole batches of all groups."""
    num_groups = plan.num_ranks // plan.sequence_ranks
    expected = plainly(name, num_groups, plan.micro_batches, plan.max_gradient_norm, torch.float32)
    by_step = torch.tensor(expected.losses).view(-1, num_groups)
    for rank, trained in enumerate(found):
        own = by_step[:, rank // plan.sequence_ranks]
        torch.testing.assert_close(torch.tensor(trained.losses), own, rtol=TOLERANCE, atol=0)
        if trained.weights:
            assert differ(trained, expected) <= TOLERANCE


CASES = [
    *product(["llama", "padded"], [(2, 2), (4, 4), (4, 2)]),
    *product(["eager", "packed", "tiled"], [(2, 2), (4, 2)]),
    ("sliding windows", (4, 4)),
]


@some_quick(
    ("name", "ranks"),
    CASES,
    quick=[("llama", (4, 2)), ("padded", (2, 2)), ("sliding windows", (4, 4))],
)
def test_training_is_that_of_one_rank(name: str, ranks: tuple[int, int], pool: Pool) -> None:
    """Two key-value heads of four ranks are replicated; masks, windows and samples are those of whole sequences."""
    plan = plan_of(name, *ranks)
    check(pool.of(ranks[0]).run(train, name, plan, workload(name)), plan, name)


def test_tiles_micro_batches_and_a_norm_that_is_limited(two_ranks: Ranks) -> None:
    knobs = {"mlp_tiles": 2, "loss_tiles": 3, "micro_batches": 2, "max_gradient_norm": 0.5}
    plan = plan_of("tiled", 2, 2, "checkpointed", "offloaded", parallel=ParallelMode.SHARDED, **knobs)
    check(two_ranks.run(train, "tiled", plan, workload("tiled")), plan, "tiled")


PLANS = [
    *product(MIXTURES, ["persistent"], [ParallelMode.DDP]),
    *product(MIXTURES, RESIDENCIES, [ParallelMode.REPLICATED]),
    *product(MIXTURES, ["persistent", "offloaded"], [ParallelMode.SHARDED]),
]


@some_quick(
    ("mixture", "residency", "parallel"),
    PLANS,
    quick=[("swapped", "host-stepped", ParallelMode.REPLICATED)],
)
def test_plans_agree_bit_for_bit(mixture: str, residency: str, parallel: ParallelMode, two_ranks: Ranks) -> None:
    expected = kept_and_persistent(two_ranks)
    plan = plan_of("llama", 2, 2, mixture, residency, parallel=parallel)
    found = two_ranks.run(train, "llama", plan, workload("llama"))
    assert [trained.losses for trained in found] == [trained.losses for trained in expected]
    assert found[0].weights.keys() == expected[0].weights.keys()
    for name, value in found[0].weights.items():
        assert torch.equal(value, expected[0].weights[name]), name


_expected: list[list[Trained]] = []


def kept_and_persistent(ranks: Ranks) -> list[Trained]:
    if not _expected:
        plan = plan_of("llama", 2, 2, "kept", "persistent")
        _expected.append(ranks.run(train, "llama", plan, workload("llama")))
    return _expected[0]


@some_quick("wrong", WRONG, quick=["labels cut before the shift", "means of means", "one gradient of replicas"])
def test_a_wrong_variant_is_noticed(wrong: str, pool: Pool) -> None:
    name = WRONG[wrong]
    plan = plan_of(name, 4, 4)
    found = pool.of(4).run(train, name, plan, workload(name), wrong)
    assert differ(found[0], plainly(name, 1, 1, None, torch.float32)) > 1000 * TOLERANCE


@some_quick(
    ("mixture", "tiles"),
    product(MIXTURES, [(1, 1), (2, 3)]),
    quick=[("checkpointed", (2, 3))],
)
def test_the_peak_is_the_schedules(mixture: str, tiles: tuple[int, int], pool: Pool) -> None:
    knobs = {"mlp_tiles": tiles[0], "loss_tiles": tiles[1]}
    plan = plan_of("tiled", 2, 2, mixture, "offloaded", **knobs)
    for error in pool.of(2).run(peak_error, "tiled", plan, workload("tiled")):
        assert error == pytest.approx(0, abs=BAR)


def drawn(name: str, random: Random) -> Plan:
    """A plan in which chunks and activations come at most tasks."""
    found, parallel = workload(name), random.choice((ParallelMode.REPLICATED, *[ParallelMode.SHARDED] * 3))
    chunk_bytes = random.choice((1_000, 9_000, 20_000, 40_000))
    layout = layout_of(found, chunk_bytes)
    num_chunks = len(layout.chunks)
    kept = random.choice((0, 0, 1, num_chunks // 3))
    rest = num_chunks - kept
    is_sharded = parallel is ParallelMode.SHARDED
    stepped = 0 if is_sharded else random.choice((0, rest // 2))
    modes = tuple(random.choice(tuple(ActivationMode)) for _ in range(found.num_blocks))
    fewest = layout.min_buffers(kept + stepped)
    return Plan(
        workload_id=found.identity,
        chunk_bytes=chunk_bytes,
        n_persist=kept,
        n_host_stepped=stepped,
        n_shard=random.choice((0, rest // 2, rest)) if is_sharded else 0,
        n_buffer=max(fewest, min(fewest + random.choice((0, 1, 3)), rest - stepped)),
        prefetch_depth=random.choice((1, 2, 3)),
        activation_modes=modes,
        **mode_counts(modes),
        micro_batches=random.choice((1, 2)),
        max_gradient_norm=random.choice((None, 0.5)),
        parallel=parallel,
        num_ranks=2,
        sequence_ranks=2,
    )


@some_quick(
    ("name", "number"),
    [*product(["llama", "packed"], range(6)), *product(["padded", "eager", "tiled"], range(2))],
    quick=[("packed", 3)],
)
def test_no_task_holds_more_than_its_schedule_accounts_for(name: str, number: int, two_ranks: Ranks) -> None:
    """Wherever the peak is: chunks do not come ahead of the exchange that they stand behind."""
    plan = drawn(name, Random(f"{name} {number}"))
    assert two_ranks.run(excesses_of, name, plan, workload(name)) == [{}, {}], plan


@pytest.mark.slow
@pytest.mark.parametrize("number", range(4))
def test_no_task_of_four_ranks_holds_more(number: int, pool: Pool) -> None:
    """Two groups, or one; gathers over all ranks, or over shard groups beside them."""
    plan = drawn("llama", Random(f"four {number}"))
    shards = {"shard_ranks": 2} if plan.parallel is ParallelMode.SHARDED and number % 2 and not plan.n_shard else {}
    plan = Plan(**plan.model_dump() | {"num_ranks": 4, "sequence_ranks": (4, 2)[number // 2], **shards})
    assert pool.of(4).run(excesses_of, "llama", plan, workload("llama")) == [{}] * 4, plan


def test_a_block_does_not_run_ahead_of_sums_that_its_exchange_stands_behind(two_ranks: Ranks) -> None:
    """Gradients that are added up late are gone before the next micro-batch's activations are there."""
    model, batch = short()
    found = trace(model, batch, repeats=0, sequence_ranks=2)
    plan = Plan(
        workload_id=found.identity,
        chunk_bytes=200_000,
        n_persist=0,
        n_buffer=2,
        prefetch_depth=3,
        micro_batches=2,
        parallel=ParallelMode.SHARDED,
        num_ranks=2,
        sequence_ranks=2,
    )
    for peak_bytes, guaranteed_bytes in two_ranks.run(peaks_beside_late_sums, plan, found):
        assert peak_bytes <= guaranteed_bytes


def test_a_record_has_the_schedules_exchanges(two_ranks: Ranks) -> None:
    """As many seconds as another clock has measured; the lanes' busy times end where their tasks do."""
    plan = plan_of("llama", 2, 2, "mixed")
    schedule = compile_schedule(plan, workload("llama"))
    for record, seconds in two_ranks.run(recorded, "llama", plan, workload("llama")):
        exchanges = [task for task in record.tasks if task.kind is TaskKind.SEQUENCE_EXCHANGE]
        planned = [task.id for task in schedule.tasks if task.kind is TaskKind.SEQUENCE_EXCHANGE]
        assert [task.task for task in exchanges] == planned
        assert planned
        measured = sum(task.duration_s for task in exchanges)
        assert measured > 0
        # Iterations are chosen and ranks wait for each other: the same order, and not the same numbers.
        assert seconds / 5 < measured < seconds * 5
        compute = [task for task in record.tasks if task.lane is Lane.COMPUTE]
        assert all(task.duration_s > 0 for task in compute)
        assert all(a.end_s <= b.start_s + 1e-9 for a, b in pairwise(compute))
        assert record.num_samples == workload("llama").num_samples


CONFIGURATION = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 256,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def command(*arguments: str) -> tuple[int, str, str]:
    """``protwin`` on this process, alone."""
    return protwin_on(0, Path(), *arguments)


def test_the_command_trains_as_on_one_rank(tmp_path: Path, two_ranks: Ranks) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIGURATION))
    given = ("--model", str(tmp_path / "config.json"), "--batch-size", "2", "--sequence-length", "32")
    path = str(tmp_path / "workload.json")
    with environment(RANK=None, WORLD_SIZE=None, LOCAL_RANK=None):
        for number, said in (("3", "Choose from 1, 2, 4"), ("2", "")):
            code, _, errors = command("trace", *given, "--sequence-ranks", number, "--output", path)
            assert (code, errors.count("\n")) == ((2, 1) if said else (0, 0))
            assert said in errors
        found = Workload.load(path)
        alone = Plan(workload_id=found.identity, chunk_bytes=CHUNK_BYTES, n_persist=1, n_buffer=6, micro_batches=2)
        alone.save(tmp_path / "alone.json")
        shared = {"parallel": ParallelMode.SHARDED, "num_ranks": 2, "sequence_ranks": 2}
        alone.model_copy(update=shared).save(tmp_path / "shared.json")
        run = ("run", "--workload", path, "--model", given[1], "--steps", "3")
        code, expected, errors = command(*run, "--plan", str(tmp_path / "alone.json"))
        assert code == 0, errors
    outcomes = two_ranks.run(protwin_on, tmp_path, *run, "--plan", str(tmp_path / "shared.json"))
    assert [code for code, _, _ in outcomes] == [0, 0], outcomes
    losses = re.compile(r"loss \d+\.\d+ -> \d+\.\d+ over 3 steps")
    assert losses.search(outcomes[0][1] + outcomes[0][2]).group() == losses.search(expected + errors).group()


@pytest.mark.parametrize("moment", [1, 6])
def test_a_rank_that_fails_within_forward_or_backward_is_not_waited_for(moment: int, two_ranks: Ranks) -> None:
    plan = plan_of("llama", 2, 2, "checkpointed", "offloaded", parallel=ParallelMode.SHARDED)
    (told, seconds), (own, _) = two_ranks.run(trouble, "llama", plan, workload("llama"), moment)
    assert own == "ValueError: trouble on the way"
    assert told.startswith("RanksError: ")
    assert "trouble on the way" in told
    assert seconds < PATIENCE_S / 4


@pytest.mark.parametrize("changed", ["input_ids", "labels", "length"])
def test_other_batches_on_a_rank_of_a_group_are_refused(changed: str, two_ranks: Ranks) -> None:
    plan = plan_of("llama", 2, 2)
    told = two_ranks.errors(with_others, "llama", plan, workload("llama"), changed)
    assert told[0] == told[1]
    assert told[0].startswith("ScheduleError: ranks 0 to 1 share sequences (sequence_ranks = 2), but were given")
    assert re.search(r"checksum \w{8} on rank 0; checksum \w{8} on rank 1\. Give each", told[0])


def test_a_group_with_other_batches_is_named_on_all_ranks(pool: Pool) -> None:
    first, second, third, fourth = pool.of(4).errors(
        with_others, "llama", plan_of("llama", 4, 2), workload("llama"), "input_ids"
    )
    assert third == fourth
    assert third.startswith("ScheduleError: ranks 2 to 3 share sequences")
    for other in (first, second):
        assert other.startswith("RanksError: ")
        assert "ranks 2 to 3 share sequences" in other


def test_ranks_evaluate_whole_sequences_together(two_ranks: Ranks) -> None:
    plan = plan_of("llama", 2, 2, "mixed", "offloaded")
    for found, expected in two_ranks.run(evaluated, "llama", plan, workload("llama")):
        assert found == pytest.approx(expected, rel=TOLERANCE)
