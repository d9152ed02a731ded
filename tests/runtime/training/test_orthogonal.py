"""Orthogonal subspace fine-tuning by a plan: bit for bit the plain loop with the same maps and projections."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial
from random import Random

import pytest
import torch
from torch import nn

from protwin.runtime import make_orthogonal
from protwin.shared.layout.layout import layout_of
from protwin.shared.schema.plan import ActivationMode, Plan, ProjectionPlace, TrainingMethod
from protwin.shared.schema.schedule import TaskKind
from protwin.shared.schema.workload import Workload
from tests.runtime.equality import trained
from tests.runtime.families import families
from tests.runtime.models import SEED, Case, gpt2, hand_written, llama, point_batches, three_groups, token_batches

RATIO = 0.4
STEPS = 4
PROJECTING = (TaskKind.GRADIENT_PROJECTION, TaskKind.HOST_GRADIENT_PROJECTION)


def factorised(build: Callable[[], nn.Module], *targets: str, ratio: float = RATIO) -> nn.Module:
    torch.manual_seed(SEED)
    model = build()
    make_orthogonal(model, unfreeze_rank_ratio=ratio, targets=targets)
    return model


@lru_cache
def orthogonal_cases() -> dict[str, Case]:
    tokens = token_batches(STEPS)
    found = {
        "llama": Case(partial(factorised, llama), tokens, groups=three_groups),
        "gpt2, biases, transposed, dropout": Case(partial(factorised, gpt2), tokens),
        "llama in bfloat16": Case(partial(factorised, lambda: llama().to(torch.bfloat16)), tokens),
        "llama, some maps and the head": Case(partial(factorised, llama, "up_proj", "q_proj", "lm_head"), tokens),
        "hand-written": Case(
            partial(factorised, hand_written, "stack.*.up", "stack.*.down"), point_batches(STEPS), has_loss=False
        ),
    }
    for name in ("t5", "mixtral"):
        family = families()[name]
        found[name] = Case(partial(factorised, family.build), [family.batch] * STEPS, groups=three_groups)
    return found


def random_plan(workload: Workload, random: Random) -> Plan:
    """Any knobs that the method has."""
    layout = layout_of(workload, random.choice((2**30, 2**15, 2**14, 2**13, 2**12, 1)))
    n_persist = random.choice((0, 0, random.randint(0, len(layout.chunks))))
    n_host_stepped = random.choice((0, random.randint(0, len(layout.chunks) - n_persist)))
    micro_batches = random.choice((1, 1, 2))
    modes = tuple(random.choice(list(ActivationMode)) for _ in range(workload.num_blocks))
    is_on_device = micro_batches == 1 and random.random() < 0.5
    return Plan(
        workload_id=workload.identity,
        method=TrainingMethod.OSFT,
        chunk_bytes=layout.chunk_bytes,
        n_persist=n_persist,
        n_host_stepped=n_host_stepped,
        n_buffer=layout.min_buffers(n_persist + n_host_stepped) + random.randint(0, 3),
        prefetch_depth=random.randint(1, 3),
        activation_modes=modes,
        n_checkpoint=modes.count(ActivationMode.CHECKPOINT),
        n_swap=modes.count(ActivationMode.SWAP),
        micro_batches=micro_batches,
        max_gradient_norm=random.choice((None, 0.5)),
        projects_gradients_on=ProjectionPlace.DEVICE if is_on_device else ProjectionPlace.HOST,
    )


def check(case: Case, plan: Plan) -> None:
    outcome = trained(case, plan)
    plain = case.plain_with(plan.micro_batches, plan.max_gradient_norm)
    assert outcome.losses == plain.losses
    assert outcome.different == []


def plans_of(name: str, number: int) -> list[Plan]:
    workload, random = orthogonal_cases()[name].workload, Random(name)
    return [random_plan(workload, random) for _ in range(number)]


@pytest.mark.parametrize("name", ["llama", "gpt2, biases, transposed, dropout", "hand-written"])
def test_random_plans_equal_the_plain_loop(name: str) -> None:
    for plan in plans_of(name, 3):
        check(orthogonal_cases()[name], plan)


@pytest.mark.slow
@pytest.mark.parametrize("name", orthogonal_cases())
def test_many_random_plans_equal_the_plain_loop(name: str) -> None:
    for plan in plans_of(name, 40):
        check(orthogonal_cases()[name], plan)
