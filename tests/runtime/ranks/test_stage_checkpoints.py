"""Checkpoints of pipelines: a distillation goes on under any split, by one rank or by replicas, bit for bit."""

from __future__ import annotations

import random
import re
import shutil
import threading
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from protwin.runtime.offline.consolidating import consolidate
from protwin.runtime.offline.inspecting import inspect
from protwin.runtime.offline.resharding import reshard
from protwin.shared.basics.progress import no_progress
from protwin.shared.pipelines.pipeline import Pipeline, Stage
from protwin.shared.schema.plan import ParallelMode, Plan
from tests.proof_size import examples, share, some_quick
from tests.runtime.distillation.cases import quiet
from tests.runtime.ranks.processes import Pool, Ranks
from tests.runtime.ranks.stage_saving import (
    WRONG,
    Leg,
    Went,
    carry,
    carry_together,
    killed_while_saving,
    refused,
    until_killed,
)
from tests.runtime.ranks.staging import COUNTING, expected, pipeline_of, random_plan, workload_of

LIMIT = 1.0
"""Between the norms of the gradients: some steps are clipped."""


def limited(pipeline: Pipeline) -> Pipeline:
    stages = [
        Stage(num_pairs=stage.num_pairs, plan=stage.plan.model_copy(update={"max_gradient_norm": LIMIT}))
        for stage in pipeline.stages
    ]
    return Pipeline(workload_id=pipeline.workload_id, num_replicas=pipeline.num_replicas, stages=tuple(stages))


def carried_by(name: str, num_pairs: tuple[int, ...], seed: int, **knobs: Any) -> Plan | Pipeline:
    """A plan of one rank, or a pipeline; with limited norms."""
    workload = workload_of(name)
    if len(num_pairs) == 1:
        plan = random_plan(workload, random.Random(seed))
        return plan.model_copy(update={"max_gradient_norm": LIMIT})
    return limited(pipeline_of(workload, num_pairs, seed, **knobs))


def leg_of(name: str, carried: Plan | Pipeline, steps: range, total: int, **chosen: Any) -> Leg:
    reference = expected(name, 1, total, LIMIT)
    return Leg(
        name=name,
        carried=carried,
        workload=workload_of(name),
        reference=reference,
        first=steps.start,
        last=steps.stop,
        **chosen,
    )


def run(pool: Pool, leg: Leg, variant: str | None = None) -> list[Went]:
    if isinstance(leg.carried, Plan):
        return [carry(0, leg)]
    found: list[Went] = pool.of(leg.carried.num_ranks).run(carry_together, leg, variant)
    return found


CHAINS = (
    ("llama", ((1, 2), (1, 1, 1), (3,), (2, 1))),
    (COUNTING, ((2, 1), (3,), (1, 2))),
    ("qwen2", ((1, 1, 1), (2, 1))),
)
"""Stages by their pairs, one step each.  A block of qwen2's student learns nothing."""


@some_quick(("name", "chain"), CHAINS, quick=1, ids=[name for name, _ in CHAINS])
def test_a_run_goes_through_any_splits(
    name: str, chain: tuple[tuple[int, ...], ...], pool: Pool, tmp_path: Path
) -> None:
    """Also through one rank, whose checkpoint goes on as a pipeline; norms are limited, losses scaled by the block."""
    for step, num_pairs in enumerate(chain):
        leg = leg_of(
            name,
            carried_by(name, num_pairs, step),
            range(step, step + 1),
            len(chain),
            resumed=tmp_path / str(step - 1) if step else None,
            into=tmp_path / str(step),
            is_scaled=True,
        )
        found = run(pool, leg)
        assert [went.wrong for went in found] == [[]] * len(num_pairs), (step, leg.carried)
        scales = [one["scale"] for went in found for one in went.scales.values()]
        assert set(scales) == {2.0 ** (6 + (step + 1) // 2)}
        for went in found if step else ():
            assert went.resumed.data_position == {"step": step, "replica": 0}
            assert len(went.resumed.data_positions) == len(chain[step - 1])


@pytest.mark.slow
def test_the_same_pipeline_draws_the_same_numbers(pool: Pool, tmp_path: Path) -> None:
    """Every rank goes on with its own random states."""
    carried = carried_by("gpt2", (1, 2), 0)
    whole = run(pool, leg_of("gpt2", carried, range(2), 2, into=tmp_path / "whole"))
    run(pool, leg_of("gpt2", carried, range(1), 2, into=tmp_path / "first"))
    for variant in (None, "random states"):
        leg = leg_of("gpt2", carried, range(1, 2), 2, resumed=tmp_path / "first")
        then = run(pool, leg, variant)
        assert [went.wrong for went in then] == [[], []]
        assert ([went.drawn for went in then] == [went.drawn for went in whole]) == (variant is None)
    assert whole[0].drawn != whole[1].drawn


@pytest.fixture(scope="module")
def counted(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint after one step, of a student that counts."""
    folder = tmp_path_factory.mktemp("counted") / "saved"
    run(pool, leg_of(COUNTING, carried_by(COUNTING, (2, 1), 0), range(1), 2, into=folder, is_scaled=True))
    return folder


@some_quick("variant", [name for name in WRONG if name not in (None, "random states")], quick=2)
def test_wrong_variants_go_on_otherwise(variant: str, counted: Path, pool: Pool, tmp_path: Path) -> None:
    name, saved = COUNTING, counted
    if variant == "scales begin anew":
        saved = tmp_path / "saved"
        run(pool, leg_of(name, carried_by(name, (2, 1), 0), range(1), 2, into=saved, is_scaled=True), variant)
    leg = leg_of(name, carried_by(name, (1, 2), 1), range(1, 2), 2, resumed=saved, is_scaled=True)
    found = run(pool, leg, variant)
    scales = {one["scale"] for went in found for one in went.scales.values()}
    assert any(went.wrong for went in found) or scales != {2.0**7}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("before", "after"),
    share([(ParallelMode.REPLICATED, ParallelMode.SHARDED), (ParallelMode.SHARDED, ParallelMode.DDP)], 2),
)
def test_pipelines_side_by_side_go_on(
    before: ParallelMode, after: ParallelMode, four_ranks: Ranks, tmp_path: Path
) -> None:
    workload = workload_of("dicts")
    reference = expected("dicts", 2, 2)
    leg = Leg(
        name="dicts",
        carried=pipeline_of(workload, (2, 1), 2, parallel=before, num_replicas=2),
        workload=workload,
        reference=reference,
        first=0,
        last=1,
        into=tmp_path / "saved",
    )
    found = four_ranks.run(carry_together, leg)
    other = pipeline_of(workload, (1, 2), 3, parallel=after, num_replicas=2)
    then = four_ranks.run(
        carry_together, replace(leg, carried=other, first=1, last=2, resumed=tmp_path / "saved", into=None)
    )
    assert [went.wrong for went in (*found, *then)] == [[]] * 8
    assert [went.resumed.data_position["replica"] for went in then] == [0, 0, 1, 1]


# -- files -----------------------------------------------------------------------------------------------------------


def test_what_the_files_hold(pool: Pool, tmp_path: Path) -> None:
    """One student, whole, whoever has saved it."""
    name, steps = "mistral", range(1)
    run(pool, leg_of(name, carried_by(name, (1, 2), 0), steps, 2, into=tmp_path / "stages"))
    (alone,) = run(pool, leg_of(name, carried_by(name, (3,), 0), steps, 2, into=tmp_path / "one"))
    reshard(tmp_path / "stages", tmp_path / "two", 2, on_progress=no_progress)
    reshard(tmp_path / "stages", tmp_path / "single", 1, on_progress=no_progress)
    consolidate(tmp_path / "stages", tmp_path / "model", max_shard_bytes=9_000, on_progress=no_progress)
    for folder in ("model", "single"):
        with quiet():
            loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / folder)
        assert all(torch.equal(value, alone.student[n]) for n, value in loaded.state_dict().items())
    reports = [inspect(tmp_path / folder, on_progress=no_progress) for folder in ("stages", "two", "one")]
    assert [report.num_ranks for report in reports] == [2, 2, 1]
    same = [(one.damage, one.left_out, one.num_parameters, one.weight_bytes, one.state_bytes) for one in reports]
    assert same[0] == same[1] == same[2]
    for number, folder in enumerate(share(("two", "single"), 2)):
        carried = carried_by(name, (2, 1), number)
        found = run(pool, leg_of(name, carried, range(1, 2), 2, resumed=tmp_path / folder))
        assert [went.wrong for went in found] == [[], []]


@pytest.fixture(scope="module")
def saved(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("stages") / "saved"
    run(pool, leg_of("llama", carried_by("llama", (1, 2), 0), range(1), 2, into=folder))
    return folder


@pytest.mark.parametrize("spoil", ["model.layers.0.mlp.up_proj.weight", "model.layers.2.mlp.down_proj.weight"])
def test_another_teacher_is_refused_alike(spoil: str, saved: Path, two_ranks: Ranks) -> None:
    """A difference in a block that one rank alone has."""
    leg = leg_of("llama", carried_by("llama", (2, 1), 1), range(1), 2)
    (first, _), (second, _) = found = two_ranks.run(refused, leg, saved, spoil)
    assert first == second
    assert first.startswith("FileError: the checkpoint was saved beside another teacher: its weights differ (identity")
    assert [wrong for _, wrong in found] == [[], []]


@some_quick(
    ("damage", "told"),
    [
        ("another pair", "was saved of another model"),
        ("a file is changed", "is damaged: its content has changed"),
        ("a file is missing", "is damaged: __1_0.distcp is missing"),
        ("another optimizer", "was saved with the optimizer torch.optim.adamw.AdamW"),
        ("another step", "this plan has max_gradient_norm None"),
    ],
    quick=2,
)
def test_other_checkpoints_are_refused_alike(
    damage: str, told: str, saved: Path, two_ranks: Ranks, tmp_path: Path
) -> None:
    """On all ranks, with nothing changed: the run goes on."""
    folder, name = tmp_path / "saved", "mistral" if damage == "another pair" else "llama"
    shutil.copytree(saved, folder)
    leg = leg_of(name, carried_by(name, (2, 1), 1), range(1), 2)
    if damage == "a file is changed":
        content = bytearray((folder / "__1_0.distcp").read_bytes())
        content[len(content) // 2] ^= 1
        (folder / "__1_0.distcp").write_bytes(content)
    elif damage == "a file is missing":
        (folder / "__1_0.distcp").unlink()
    elif damage == "another optimizer":
        leg = replace(leg, given={"optimizer": partial(torch.optim.SGD, lr=0.0)})
    elif damage == "another step":
        leg = replace(leg, carried=pipeline_of(workload_of(name), (2, 1), 1), reference=expected(name, 1, 2))
    (first, _), (second, _) = found = two_ranks.run(refused, leg, folder, None)
    assert first == second
    assert re.match("FileError: .*" + re.escape(told), first), first
    assert [wrong for _, wrong in found] == [[], []]


# -- kills -----------------------------------------------------------------------------------------------------------


@some_quick(
    ("victim", "where"),
    [(v, w) for v in (0, 1) for w in ("before its part", "in its part", "behind its part")],
    quick=1,
)
def test_a_rank_killed_while_it_saves_leaves_a_whole_checkpoint(
    victim: int, where: str, pool: Pool, tmp_path: Path
) -> None:
    carried, folder = carried_by("dicts", (1, 2), 0), tmp_path / "saved"
    leg = leg_of("dicts", carried, range(3), 3, into=folder)
    outcomes = pool.of(2).outcomes(killed_while_saving, leg, victim, 1, where)
    assert type(outcomes[victim].error) is EOFError
    pool.of(2).kill()
    report = inspect(folder, on_progress=no_progress)
    assert report.damage is None
    assert report.step in ((1, 2) if where == "behind its part" else (1,))
    then = leg_of("dicts", carried_by("dicts", (3,), 1), range(report.step, 3), 3, resumed=folder)
    (found,) = run(pool, then)
    assert found.wrong == []


def kill_one(ranks: Ranks, note: Path, victim: int, chance: random.Random) -> None:
    """At a random moment of its training; without a ``victim`` of that number nobody is killed."""
    if victim >= ranks.num_ranks:
        return
    end = time.monotonic() + 60.0
    while not (note / f"from-{victim}").exists() and time.monotonic() < end:
        time.sleep(0.002)
    time.sleep(chance.uniform(0, 0.6))
    ranks.processes[victim].kill()


@pytest.mark.slow
def test_ranks_killed_at_random_moments(tmp_path: Path) -> None:
    """One of two, again and again, until the run is through: what was saved for sure is never lost."""
    chance, steps, folder, sure = random.Random(5), 6, tmp_path / "saved", 0
    with Pool() as pool:
        for number in range(examples(30, 2) + 1):
            leg = leg_of("dicts", carried_by("dicts", ((1, 2), (2, 1))[number % 2], number), range(steps), steps)
            ranks, note = pool.of(2), tmp_path / str(number)
            note.mkdir()
            is_last = number == examples(30, 2)
            killer = threading.Thread(
                target=kill_one, args=(ranks, note, 2 if is_last else chance.randrange(2), chance)
            )
            killer.start()
            outcomes = ranks.outcomes(until_killed, leg, folder, note)
            killer.join()
            begun = {int(path.read_text()) for path in note.glob("from-*")}
            assert all(step >= sure for step in begun)
            sure = max([sure, *(int(path.read_text() or 0) for path in note.glob("saved-*"))])
            assert not sure or inspect(folder, on_progress=no_progress).damage is None
            if not any(outcome.error for outcome in outcomes):
                assert [outcome.get().wrong for outcome in outcomes] == [[], []]
            ranks.kill()
    assert [outcome.error for outcome in outcomes] == [None, None]
