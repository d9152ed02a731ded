"""Checkpoints of several ranks: training goes on under any plan, mode and number of ranks, bit for bit."""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from protwin.runtime.checkpoints.checkpoints import has_checkpoint
from protwin.shared.layout.layout import build_layout
from protwin.shared.schema.plan import ParallelMode, Plan
from tests.proof_size import IS_PROOF, examples, share, some_quick
from tests.runtime import killed_ranks
from tests.runtime.models import SEED
from tests.runtime.ranks.beside_ddp import STEADY, all_cases, prepare
from tests.runtime.ranks.plain_ranks import PlainRanks
from tests.runtime.ranks.processes import Pool, Ranks, in_a_process, printed_by
from tests.runtime.ranks.saving import (
    NUM_BATCHES,
    STEPS,
    began,
    began_in_public,
    from_that_state,
    from_the_checkpoint,
    interrupted,
    interrupted_wrong,
    refused,
    same_state,
    start,
    steps_of,
    through,
    through_wrong,
    unsaved,
    weights_differ,
)
from tests.runtime.ranks.test_beside_ddp import plan_for

DDP, REPLICATED, SHARDED = ParallelMode.DDP, ParallelMode.REPLICATED, ParallelMode.SHARDED


def plan_of(name: str, parallel: ParallelMode, seed: int, num_ranks: int = 2, **knobs: object) -> Plan:
    """A random plan of one micro-batch without a limit, but for ``knobs``."""
    plan = plan_for(all_cases(NUM_BATCHES)[name].workload, parallel, seed, num_ranks)
    return plan.model_copy(update={"micro_batches": 1, "max_gradient_norm": None} | knobs)


@some_quick(
    ("name", "before", "after"),
    [
        ("gpt2 with dropout, tied", SHARDED, SHARDED),
        ("gpt2 with dropout, tied", DDP, REPLICATED),
        ("llama in bfloat16", SHARDED, DDP),
        ("llama in bfloat16", REPLICATED, SHARDED),
        ("gpt2, groups", SHARDED, REPLICATED),
        ("hand-written, partly narrow", DDP, SHARDED),
        ("hand-written, batch statistics", SHARDED, REPLICATED),
        ("gated", REPLICATED, SHARDED),
        ("llama, frozen prologue and blocks", SHARDED, SHARDED),
    ],
    quick=3,
)
def test_ranks_go_on_as_ddp_that_nothing_interrupted(
    name: str, before: ParallelMode, after: ParallelMode, two_ranks: Ranks, tmp_path: Path
) -> None:
    plans = plan_of(name, before, 3), plan_of(name, after, 8)
    found = two_ranks.run(interrupted, name, *plans, tmp_path / "saved")
    assert [wrong for wrong, _ in found] == [[], []]
    positions = ({"rank": 0, "step": 2}, {"rank": 1, "step": 2})
    for rank, (_, resumed) in enumerate(found):
        assert (resumed.step, resumed.data_position, resumed.data_positions) == (2, positions[rank], positions)


@some_quick(
    ("variant", "name"),
    [
        ("random states of rank 0", "gpt2 with dropout, tied"),
        ("buffers lost", "hand-written, batch statistics"),
        ("shards one scalar off", "gpt2, groups"),
        ("masters lost", "llama in bfloat16"),
        ("moments of the first scalars", "gpt2, groups"),
    ],
    quick=2,
)
def test_a_wrong_variant_goes_on_otherwise(variant: str, name: str, two_ranks: Ranks, tmp_path: Path) -> None:
    plan = plan_of(name, SHARDED, 3)
    found = two_ranks.run(interrupted_wrong, variant, name, plan, plan, tmp_path / "saved")
    assert any(found), variant


CHAIN = ((4, SHARDED), (3, REPLICATED), (1, ParallelMode.SINGLE), (5, SHARDED))
"""Numbers of ranks, and their modes; back to the first one, in a proof through all of them."""


def chain_of(name: str) -> list[Plan]:
    """Each with other chunks; of five ranks shards are uneven, and some are empty."""
    workload, plans = all_cases(NUM_BATCHES)[name].workload, []
    for seed, (num_ranks, parallel) in enumerate((*CHAIN, *(CHAIN[-2::-1] if IS_PROOF else CHAIN[:1])), 4):
        plan = plan_of(name, SHARDED if num_ranks == 1 else parallel, seed, max(num_ranks, 2))
        if num_ranks == 1:
            plan = Plan.model_validate(plan.model_dump() | {"num_ranks": 1, "parallel": parallel, "n_shard": 0})
        if num_ranks == 5:
            layout = build_layout(workload.parameters, num_blocks=workload.num_blocks, chunk_bytes=3_000)
            few = {"chunk_bytes": 3_000, "n_persist": 1, "n_shard": 3, "n_buffer": layout.min_buffers(1)}
            plan = plan.model_copy(update=few)
        plans.append(plan)
    return plans


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", share(("llama in bfloat16", STEADY, "llama, frozen prologue and blocks", "llama, 64 wide"), 4)
)
def test_a_checkpoint_goes_through_any_number_of_ranks_and_back(name: str, pool: Pool, tmp_path: Path) -> None:
    """Bit for bit as if the ranks of every stretch had gone on with weights and moments that were never saved.

    The mean of each stretch is that of its own ranks' data: the run beside it knows no files, no parts and no plans.
    """
    plain, length = PlainRanks(all_cases(NUM_BATCHES)[name]), examples(10, 1)
    for number, plan in enumerate(chain_of(name)):
        last = (number + 1) * length
        into = tmp_path / str(number + 1)
        if number == 0:
            found = pool.of(plan.num_ranks).run(began, name, plan, into, last)
        elif plan.num_ranks == 1:
            found = [through(0, name, plan, tmp_path / str(number), into, last)]
        else:
            found = pool.of(plan.num_ranks).run(through, name, plan, tmp_path / str(number), into, last)
        assert [went.losses for went in found] == plain.train(plan.num_ranks, last), plan
        assert same_state(plain.state, [went.state for went in found]), plan
        assert number == 0 or {went.resumed.step for went in found} == {last - length}


@pytest.mark.slow
def test_a_wrong_variant_goes_on_otherwise_with_other_ranks(pool: Pool, tmp_path: Path) -> None:
    name = "llama in bfloat16"
    plain = PlainRanks(all_cases(NUM_BATCHES)[name])
    pool.of(2).run(began, name, plan_of(name, SHARDED, 3), tmp_path / "saved", 1)
    plain.train(2, 1)
    plain.train(3, 2)
    plan = plan_of(name, SHARDED, 5, 3)
    for variant in ("shards one scalar off", "masters lost", "moments of the first scalars"):
        found = pool.of(3).run(through_wrong, variant, name, plan, tmp_path / "saved", None, 2)
        assert not same_state(plain.state, [found[0].state]), variant
    found = pool.of(3).run(through, name, plan, tmp_path / "saved", None, 2)
    assert same_state(plain.state, [went.state for went in found])


def test_another_number_of_ranks_goes_on_as_if_it_had_been_there_all_along(pool: Pool, tmp_path: Path) -> None:
    """Steps of three ranks, in two modes, from what two ranks have saved, beside three with the same state."""
    steps = examples(10, 2)
    name = "llama, frozen prologue and blocks"
    states = pool.of(2).run(began_in_public, name, plan_of(name, DDP, 3), tmp_path / "saved", 2)
    three = pool.of(3)
    expected = three.run(from_that_state, name, plan_of(name, REPLICATED, 4, 3), states[0], 2, steps)
    for parallel in share((SHARDED, REPLICATED), 2):
        found = three.run(from_the_checkpoint, name, plan_of(name, parallel, 5, 3), tmp_path / "saved", 2 + steps)
        for one, other in zip(expected, found, strict=True):
            assert len(other.losses) == steps
            assert one.losses == other.losses, parallel
            assert same_state(one.state, [other.state]), parallel


# -- refusals --------------------------------------------------------------------------------------------------------


def remove(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


def change(name: str) -> Callable[[Path], None]:
    """One byte in the middle."""

    def damage(folder: Path) -> None:
        content = bytearray((folder / name).read_bytes())
        content[len(content) // 2] ^= 1
        (folder / name).write_bytes(content)

    return damage


def truncate(name: str) -> Callable[[Path], None]:
    return lambda folder: os.truncate(folder / name, (folder / name).stat().st_size - 1)


def newer(folder: Path) -> None:
    content = json.loads((folder / "checkpoint.json").read_text()) | {"schema_version": 99}
    (folder / "checkpoint.json").write_text(json.dumps(content))


def of_other_save(folder: Path) -> None:
    """A file of one rank comes from another step: of the right size, with its own right hash."""
    os.replace(folder.with_name("later") / "__1_0.distcp", folder / "__1_0.distcp")


NAME = "hand-written, partly narrow"


@pytest.fixture(scope="module")
def saved(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints of two ranks after two and after three steps."""
    folder = tmp_path_factory.mktemp("checkpoints")
    for name, steps in (("saved", 2), ("later", 3)):
        pool.of(2).run(began, NAME, plan_of(NAME, SHARDED, 3), folder / name, steps)
    return folder


@some_quick(
    ("spoil", "told"),
    [
        (remove("__1_0.distcp"), "{} is damaged: __1_0.distcp is missing. "),
        (remove("rank-1.pt"), "{} is damaged: rank-1.pt is missing. "),
        (remove(".metadata"), "{} is damaged: .metadata is missing. "),
        (remove("checkpoint.json"), "{} is no complete checkpoint: checkpoint.json is missing"),
        (change("__0_0.distcp"), "{}/__0_0.distcp is damaged: its content has changed since it was saved."),
        (change("__1_0.distcp"), "{}/__1_0.distcp is damaged: its content has changed since it was saved."),
        (change("training.pt"), "{}/training.pt is damaged: its content has changed since it was saved. "),
        (truncate("rank-1.pt"), "{}/rank-1.pt is damaged: it has "),
        (of_other_save, "{}/__1_0.distcp is damaged: its content has changed since it was saved. "),
        (newer, "{}/checkpoint.json has schema_version 99; this release reads 1. Update protwin to read it"),
    ],
    quick=2,
)
def test_a_damaged_checkpoint_is_refused_on_all_ranks_with_nothing_changed(
    spoil: Callable[[Path], None], told: str, two_ranks: Ranks, saved: Path, tmp_path: Path
) -> None:
    shutil.copytree(saved, tmp_path, dirs_exist_ok=True)
    spoil(tmp_path / "saved")
    found = two_ranks.run(refused, NAME, plan_of(NAME, SHARDED, 3), tmp_path / "saved")
    (message,) = {message for message, _ in found}
    # The rank that has verified the file may be named.
    assert re.sub("^FileError: (rank .: )?", "", message).startswith(told.format(tmp_path / "saved"))
    assert [goes_on for _, goes_on in found] == [True, True]


@some_quick("fails_on", [0, 1], quick=1)
def test_a_full_disk_of_one_rank_leaves_the_checkpoint_as_it_was(
    fails_on: int, two_ranks: Ranks, tmp_path: Path
) -> None:
    found = two_ranks.run(unsaved, NAME, plan_of(NAME, SHARDED, 3), tmp_path / "saved", fails_on)
    (message,) = {message for message, _, _ in found}
    assert message.startswith(f"FileError: rank {fails_on}: {tmp_path / 'saved'} cannot be written: No space left on ")
    assert [(goes_on, step) for _, goes_on, step in found] == [(True, 2), (True, 2)]
    assert sorted(os.listdir(tmp_path)) == ["saved"]


# -- kills -----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_rank_killed_at_a_random_moment_costs_the_steps_since_the_last_save(tmp_path: Path) -> None:
    ends = json.loads(printed_by(killed_ranks.main, str(tmp_path), "2", "3"))
    assert sum(-9 in end["codes"] for end in ends) >= 2
    assert ends[-1]["codes"] == [0, 0]


def train_to_the_end(folder: Path) -> None:
    """Resume if there is a checkpoint, train and save; rank 1 is killed twice, each time before it saves a step."""
    torch.set_num_threads(1)
    rank, restarts = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    case = all_cases(NUM_BATCHES)[NAME]
    model = prepare(case.build(), rank)
    with start(case, model, plan_of(NAME, SHARDED, 3)) as training:
        done = training.resume(folder / "saved").step if has_checkpoint(folder / "saved") else 0
        (folder / f"began-{rank}-{restarts}").write_text(str(done))
        if not done:
            torch.manual_seed(SEED + rank)
        while training.num_steps < STEPS:
            steps_of(case, model, training, rank, training.num_steps + 1)
            if restarts < 2 and rank == 1 and training.num_steps == 2 + restarts:
                os.kill(os.getpid(), signal.SIGKILL)
            training.save(folder / "saved")
    torch.save(dict(model.state_dict()), folder / f"weights-{rank}.pt")


def run_twice_killed(folder: Path) -> None:
    """By torchrun's agent, whose processes begin with what they import: so they need not start."""
    logging.disable(logging.ERROR)
    elastic_launch(
        LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=2,
            run_id="killed",
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",
            max_restarts=2,
            monitor_interval=0.1,
            start_method="forkserver",
        ),
        train_to_the_end,
    )(folder)


@pytest.mark.slow
def test_torchrun_starts_ranks_again_from_their_checkpoint(tmp_path: Path, two_ranks: Ranks) -> None:
    """One rank is killed after its second step, before it is saved, and again after the third."""
    in_a_process(run_twice_killed, tmp_path)
    for rank in (0, 1):
        began = [(tmp_path / f"began-{rank}-{attempt}").read_text() for attempt in range(3)]
        assert began == ["0", "1", "2"]
    weights = [torch.load(tmp_path / f"weights-{rank}.pt") for rank in (0, 1)]
    assert two_ranks.run(weights_differ, NAME, plan_of(NAME, SHARDED, 3), weights) == [[], []]
