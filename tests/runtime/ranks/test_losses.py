"""Losses of ranks: weighed by tokens they are one process's over all tokens, scaled they follow torch's own scaler."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import product

import pytest
import torch
import torch.distributed as dist
from torch import nn

from protwin.runtime import CpuDevice, LossScaling, carry_out
from protwin.shared import PlanError
from protwin.shared.schema.plan import ParallelMode, Plan
from tests.proof_size import some_quick
from tests.runtime.models import Batch, Case, Masters, adamw, differences, llama, snapshot, token_batches, uncached
from tests.runtime.ranks.beside_ddp import batches_of, in_default_group
from tests.runtime.ranks.processes import Ranks
from tests.runtime.ranks.test_beside_ddp import MODES, plan_for

STEPS = 3
RATE = 0.5
NUM_RANKS = 2


def sgd(groups: list[dict[str, object]]) -> torch.optim.Optimizer:
    return torch.optim.SGD(groups, lr=RATE)


# -- tokens ----------------------------------------------------------------------------------------------------------


def uneven_batches() -> list[Batch]:
    """Each has another number of tokens to learn."""
    found = []
    for number, batch in enumerate(token_batches(12)):
        labels = batch["labels"].clone()
        labels[:, 2 + number % 5 :] = -100
        found.append({**batch, "labels": labels})
    return found


@lru_cache
def uneven_case() -> Case:
    """In float64, so that the order of sums hardly shows."""
    return Case(lambda: llama(num_layers=3).to(torch.float64), uneven_batches(), make_optimizer=sgd)


def num_learned(batch: Batch) -> int:
    return int((batch["labels"][:, 1:] != -100).sum())


def weighed(rank: int, plan: Plan, *, by_tokens: bool) -> float:
    """The largest gap of a weight from one process's that has the tokens of all ranks in every step."""
    case = uneven_case()
    model, plain = case.build(), uncached(case.build())
    own = batches_of(case, rank, NUM_RANKS, plan.micro_batches, STEPS)
    with carry_out(model, plan, case.workload, optimizer=sgd, device=CpuDevice()) as training:
        for batches in own:
            tokens = sum(map(num_learned, batches))
            for batch in batches:
                loss = case.loss(model, batch)
                share = num_learned(batch) / tokens if by_tokens else 1 / len(batches)
                (training.weigh(loss * share, tokens) if by_tokens else loss * share).backward()
            training.step()
    optimizer = sgd([{"params": list(plain.parameters())}])
    of_ranks = [batches_of(case, other, NUM_RANKS, plan.micro_batches, STEPS) for other in range(NUM_RANKS)]
    for together in zip(*of_ranks, strict=True):
        every = [batch for batches in together for batch in batches]
        for batch in every:
            (case.loss(plain, batch) * num_learned(batch) / sum(map(num_learned, every))).backward()
        optimizer.step()
        optimizer.zero_grad()
    pairs = zip(model.parameters(), plain.parameters(), strict=True)
    return max((a.detach() - b.detach()).abs().max().item() for a, b in pairs)


@in_default_group
def gaps(rank: int, plan: Plan) -> tuple[float, float]:
    return weighed(rank, plan, by_tokens=True), weighed(rank, plan, by_tokens=False)


@some_quick(("micro_batches", "parallel"), product([1, 2], MODES), quick=2)
def test_weighed_losses_are_those_of_all_tokens(parallel: ParallelMode, micro_batches: int, two_ranks: Ranks) -> None:
    plan = plan_for(uneven_case().workload, parallel, 4).model_copy(
        update={"micro_batches": micro_batches, "max_gradient_norm": None}
    )
    for gap, wrong in two_ranks.run(gaps, plan):
        # The model computes its norms and the loss in float32, whatever its weights are.
        assert gap < 1e-6
        assert wrong > 1e-3, "batches in the place of tokens make no difference"


@in_default_group
def weigh_badly(rank: int, plan: Plan, tokens: Sequence[int]) -> str:
    case = uneven_case()
    model = case.build()
    with carry_out(model, plan, case.workload, optimizer=sgd) as training:
        loss = case.loss(model, case.batches[rank])
        with pytest.raises(PlanError) as told:
            training.weigh(loss, tokens[rank])
        training.weigh(loss, 3 * rank).backward()
        training.step()
    return str(told.value)


@pytest.mark.parametrize(("tokens", "named"), [((0, 0), "0 on ranks 0, 1"), ((3, -1), "3 on rank 0; -1 on rank 1")])
def test_impossible_numbers_of_tokens_are_refused_on_all(tokens: tuple[int, int], named: str, two_ranks: Ranks) -> None:
    told = two_ranks.run(weigh_badly, plan_for(uneven_case().workload, ParallelMode.DDP, 3), tokens)
    assert told[0] == told[1]
    assert f"these are {named}." in told[0]


# -- scales ----------------------------------------------------------------------------------------------------------

SCALING = LossScaling(initial_scale=2.0**21, growth_interval=2)
"""So high that the first steps overflow, and that it grows into another overflow."""
UNLIMITED = 1e6


@lru_cache
def narrow_case() -> Case:
    return Case(lambda: llama(num_layers=3).to(torch.float16), token_batches(12))


def scaled_by_hand(rank: int, steps: int) -> tuple[list[float], nn.Module]:
    """Means over ranks, float32 masters and torch's own GradScaler."""
    case = narrow_case()
    model = uncached(case.build())
    masters = Masters(model)
    optimizer = adamw(masters.groups([{"params": list(model.parameters())}]))
    scaler = torch.amp.GradScaler("cpu", init_scale=SCALING.initial_scale, growth_interval=SCALING.growth_interval)
    scales = []
    for (batch,) in batches_of(case, rank, NUM_RANKS, 1, steps):
        scales.append(scaler.get_scale())
        scaler.scale(case.loss(model, batch)).backward()
        for parameter in model.parameters():
            assert parameter.grad is not None
            # Divided afterwards: float16 rounds small numbers when they are divided.
            dist.all_reduce(parameter.grad)
            parameter.grad.mul_(1 / NUM_RANKS)
        masters.take_gradients()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        masters.give_weights()
    return scales, model


@in_default_group
def scaled(rank: int, plan: Plan, steps: int) -> tuple[list[float], list[float], list[str]]:
    """The scales of all steps, ours and torch's, and which weights differ."""
    case = narrow_case()
    model, scales = case.build(), []
    expected, plain = scaled_by_hand(rank, steps)
    with carry_out(model, plan, case.workload, optimizer=adamw, loss_scaling=SCALING) as training:
        assert training.loss_scaler is not None
        for (batch,) in batches_of(case, rank, NUM_RANKS, 1, steps):
            scales.append(training.loss_scaler.scale)
            training.scale(case.loss(model, batch)).backward()
            training.step()
    return scales, expected, differences(model, snapshot(plain))


@some_quick("parallel", MODES, quick=1)
def test_scaled_losses_follow_torchs_scaler(parallel: ParallelMode, two_ranks: Ranks) -> None:
    """A norm that limits nothing: then ranks with parts give its bits too."""
    plan = plan_for(narrow_case().workload, parallel, 3)
    plan = plan.model_copy(update={"micro_batches": 1, "max_gradient_norm": UNLIMITED})
    for scales, expected, different in two_ranks.run(scaled, plan, 6):
        assert scales == expected
        assert len(set(scales)) > 1, "nothing overflows"
        assert not different
