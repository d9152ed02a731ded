"""How a training of several ranks ends or pauses: by an error of one, by its death, for an evaluation, for weights."""

from __future__ import annotations

import os
import threading
import time
from itertools import count
from typing import Any

import pytest
import torch

from protwin.runtime import CpuDevice, Training, carry_out
from protwin.shared import PlanError, ProtwinError
from protwin.shared.schema.plan import ParallelMode, Plan
from tests.proof_size import some_quick
from tests.runtime.models import SEED, differences, snapshot, uncached
from tests.runtime.ranks.beside_ddp import all_cases, batches_of, in_default_group, prepare, run
from tests.runtime.ranks.processes import Ranks, without_a_word
from tests.runtime.ranks.test_beside_ddp import plan_for

NAME = "gated"
NUM_BATCHES = 12
MODES = (ParallelMode.DDP, ParallelMode.REPLICATED, ParallelMode.SHARDED)
BOUND_S = 30.0


def plan_of(parallel: ParallelMode) -> Plan:
    return plan_for(all_cases(NUM_BATCHES)[NAME].workload, parallel, 3)


# -- errors ----------------------------------------------------------------------------------------------------------


class _Trouble(ValueError):
    """Of the user's own loop."""


@in_default_group
def fail(rank: int, plan: Plan, place: str) -> tuple[str, float, list[str]]:
    """Rank 1 fails at ``place`` of the second step: what this rank is told, how soon, and lanes that are left."""
    case = all_cases(NUM_BATCHES)[NAME]
    model = prepare(case.build(), rank)
    told, began = "nothing", 0.0
    try:
        with carry_out(model, plan, case.workload, optimizer=case.make_optimizer) as training:
            for step, batches in zip(count(), batches_of(case, rank, plan.num_ranks, plan.micro_batches), strict=False):
                for batch in batches:
                    is_due = rank == 1 and step == 1
                    if step == 1 and not began:
                        began = time.monotonic()
                    if is_due and place == "before forward":
                        raise _Trouble("trouble")
                    loss = case.loss(model, batch)
                    if is_due and place == "before backward":
                        raise _Trouble("trouble")
                    if is_due and place == "gradient":
                        loss = loss * torch.inf
                    loss.backward()
                training.step()
    except (ProtwinError, _Trouble) as error:
        told = f"{type(error).__name__}: {error}"
    seconds = time.monotonic() - began
    return told, seconds, [thread.name for thread in threading.enumerate() if thread.name.startswith("protwin-")]


@pytest.mark.parametrize("place", ["before forward", "before backward"])
@some_quick("parallel", MODES, quick=2)
def test_an_error_of_one_rank_ends_all(parallel: ParallelMode, place: str, two_ranks: Ranks) -> None:
    found = two_ranks.run(fail, plan_of(parallel), place)
    assert [told for told, _, _ in found] == [
        "RanksError: training was ended by rank 1: _Trouble: trouble",
        "_Trouble: trouble",
    ]
    assert all(seconds < BOUND_S for _, seconds, _ in found)
    assert [left for _, _, left in found] == [[], []]


@pytest.mark.parametrize("parallel", MODES)
def test_a_gradient_that_is_not_finite_is_named_on_all_ranks(parallel: ParallelMode, two_ranks: Ranks) -> None:
    (told, _, _), (other, _, _) = two_ranks.run(fail, plan_of(parallel), "gradient")
    assert told == other
    assert told.startswith("NonFiniteGradientError: the gradient of exit.")
    assert "on rank 1" in told


@in_default_group
def die(rank: int, plan: Plan) -> str:
    """Rank 1 ends in the middle of a step."""
    case = all_cases(NUM_BATCHES)[NAME]
    model = prepare(case.build(), rank)
    try:
        with without_a_word(), carry_out(model, plan, case.workload, optimizer=case.make_optimizer) as training:
            for batches in batches_of(case, rank, plan.num_ranks, plan.micro_batches):
                for batch in batches:
                    loss = case.loss(model, batch)
                    if rank == 1:
                        os._exit(1)
                    loss.backward()
                training.step()
    except ProtwinError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def test_the_death_of_one_rank_ends_all(two_ranks: Ranks) -> None:
    began = time.monotonic()
    found, _ = two_ranks.outcomes(die, plan_of(ParallelMode.SHARDED))
    assert str(found.get()).startswith("RanksError: another rank has ended without a word")
    assert time.monotonic() - began < BOUND_S
    two_ranks.kill()


# -- pauses ----------------------------------------------------------------------------------------------------------


@in_default_group
def pause(rank: int, plan: Plan) -> list[str]:
    """Evaluate, and read the weights, between two steps: what differs from a training without, and from close()."""
    case = all_cases(NUM_BATCHES)[NAME]
    expected = prepare(case.build(), rank)
    run(case, expected, plan, rank, CpuDevice())
    model, points = prepare(case.build(), rank), case.batches[0]["points"]

    def look(training: Training) -> tuple[dict[str, Any], torch.Tensor]:
        model.eval()
        with training.evaluation():
            output = model(points)
        model.train()
        return training.state_dict(), output

    with carry_out(
        model, plan, case.workload, optimizer=case.make_optimizer, parameter_groups=case.groups(model)
    ) as training:
        torch.manual_seed(SEED + rank)
        for batches in batches_of(case, rank, plan.num_ranks, plan.micro_batches):
            for batch in batches:
                case.loss(model, batch).backward()
            training.step()
            read, output = look(training)
    found = differences(model, snapshot(expected))
    # The first rank reads all weights, the others nothing.
    state = snapshot(model)
    found += [name for name in read if rank != 0 or not torch.equal(state[name], read[name])]
    found += [name for name in state if rank == 0 and name not in read]
    plain = prepare(uncached(case.build()), rank)
    plain.load_state_dict(state)
    plain.eval()
    with torch.no_grad():
        if not torch.equal(plain(points), output):
            found.append("the evaluation")
    return found


@some_quick("parallel", MODES, quick=1)
def test_pauses_change_nothing(parallel: ParallelMode, two_ranks: Ranks) -> None:
    assert two_ranks.run(pause, plan_of(parallel)) == [[], []]


@in_default_group
def refused(rank: int, plan: Plan) -> list[str]:
    """What is refused while ranks train together; training goes on."""
    case = all_cases(NUM_BATCHES)[NAME]
    model, found = prepare(case.build(), rank), []

    def ask(training: Training) -> None:
        case.loss(model, case.batches[0])
        with pytest.raises(PlanError) as told:
            training.skip_step()
        found.append(str(told.value))

    run(case, model, plan, rank, CpuDevice(), ask)
    return found


def test_what_one_rank_alone_can_do_is_refused_by_name(two_ranks: Ranks) -> None:
    for found in two_ranks.run(refused, plan_of(ParallelMode.REPLICATED)):
        assert [message.partition("()")[0] for message in found] == ["skip_step"]


@in_default_group
def whole_optimizer(rank: int, plan: Plan) -> tuple[str, bool]:
    """The refusal of an optimizer that looks at whole matrices, on ranks with parts, and whether weights are whole."""
    case = all_cases(NUM_BATCHES)["hand-written, unused parameters"]
    model = case.build()
    before = snapshot(model)
    with pytest.raises(PlanError) as told:
        carry_out(model, plan, case.workload, optimizer=_whole)
    return str(told.value), not differences(model, before)


def _whole(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    return torch.optim.Adafactor([{"params": group["params"]} for group in groups])


def test_optimizers_that_need_whole_parameters_are_refused_with_parts(two_ranks: Ranks) -> None:
    plan = plan_for(all_cases(NUM_BATCHES)["hand-written, unused parameters"].workload, ParallelMode.SHARDED, 3)
    for told, is_whole in two_ranks.run(whole_optimizer, plan):
        assert "Adafactor may need whole parameters" in told
        assert is_whole
