"""Orthogonal subspace fine-tuning by a plan: bit for bit the plain loop with the same maps and projections."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from functools import lru_cache, partial
from random import Random
from unittest import mock

import pytest
import torch
from torch import nn

from protwin.runtime import CpuDevice, carry_out, make_orthogonal, project_gradients
from protwin.runtime.chunks.projections import Projections
from protwin.shared.compile.compile import compile_schedule
from protwin.shared.layout.layout import layout_of
from protwin.shared.schema.plan import ActivationMode, Plan, ProjectionPlace, TrainingMethod
from protwin.shared.schema.schedule import TaskKind
from protwin.shared.schema.workload import Workload
from tests.runtime import models
from tests.runtime.equality import trained
from tests.runtime.families import families
from tests.runtime.models import SEED, Case, gpt2, hand_written, llama, point_batches, three_groups, token_batches
from tests.runtime.osft.overlaps import overlaps

RATIO = 0.4
QUICK = ("hand-written", "llama, some maps and the head")
STEPS = 4
PROJECTING = (TaskKind.GRADIENT_PROJECTION, TaskKind.HOST_GRADIENT_PROJECTION)
RENEWING = (TaskKind.PARAMETER_PROJECTION, TaskKind.HOST_PARAMETER_PROJECTION)


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
        "llama, some maps and the head": Case(
            partial(factorised, partial(llama, num_layers=2), "up_proj", "q_proj", "lm_head"), tokens
        ),
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


@pytest.mark.parametrize("name", QUICK)
def test_random_plans_equal_the_plain_loop(name: str) -> None:
    for plan in plans_of(name, 4):
        check(orthogonal_cases()[name], plan)


@pytest.mark.slow
@pytest.mark.parametrize("name", orthogonal_cases())
def test_many_random_plans_equal_the_plain_loop(name: str) -> None:
    for plan in plans_of(name, 40):
        check(orthogonal_cases()[name], plan)


def test_all_kinds_of_tasks_are_among_the_plans() -> None:
    """Both places, chunks that stay and chunks that leave: no kind is equal for want of being there."""
    found: Counter[TaskKind] = Counter()
    num_sent = 0
    for name in QUICK:
        for plan in plans_of(name, 4):
            schedule = compile_schedule(plan, orthogonal_cases()[name].workload)
            found.update({task.kind for task in schedule.tasks})
            leaving = [t for t in schedule.tasks if t.kind is TaskKind.GRADIENT_PROJECTION and t.chunk is not None]
            num_sent += len(leaving)
            assert not leaving or plan.projects_gradients_on is ProjectionPlace.DEVICE
    assert min(found[kind] for kind in (*PROJECTING, *RENEWING)) >= 2
    assert num_sent >= 1


def halves(workload: Workload, place: ProjectionPlace, **changes: object) -> Plan:
    """A plan with chunks that stay and others that the host steps, about as many."""
    layout = layout_of(workload, 2**14)
    n_persist = len(layout.chunks) // 2
    plan = Plan(
        workload_id=workload.identity,
        method=TrainingMethod.OSFT,
        chunk_bytes=layout.chunk_bytes,
        n_persist=n_persist,
        n_buffer=layout.min_buffers(n_persist) + 1,
        projects_gradients_on=place,
    )
    return plan.model_copy(update=changes)


STEPS_OF = {
    "project_staying_gradients": ProjectionPlace.HOST,
    "project_staying_parameters": ProjectionPlace.HOST,
    "project_staged_gradients": ProjectionPlace.HOST,
    "project_leaving_gradients": ProjectionPlace.DEVICE,
    "project_masters": ProjectionPlace.HOST,
}


@pytest.mark.parametrize("left_out", STEPS_OF)
def test_a_projection_that_is_left_out_shows(left_out: str) -> None:
    case = orthogonal_cases()["hand-written"]
    plan = halves(case.workload, STEPS_OF[left_out])
    check(case, plan)
    with mock.patch.object(Projections, left_out):
        assert trained(case, plan).different


def test_a_norm_is_of_projected_gradients() -> None:
    """What is taken away does not count towards the limit; the other order gives other weights."""
    case = orthogonal_cases()["hand-written"]
    plan = halves(case.workload, ProjectionPlace.HOST, max_gradient_norm=0.05)
    check(case, plan)

    def limit_then_project(parameters: Iterable[nn.Parameter], max_norm: float) -> torch.Tensor:
        norm = clip(parameters, max_norm)
        project_gradients(at_hand[-1])
        return norm

    clip, at_hand = nn.utils.clip_grad_norm_, list[nn.Module]()
    with (
        mock.patch.object(models, "project_gradients", at_hand.append),
        mock.patch.object(nn.utils, "clip_grad_norm_", limit_then_project),
    ):
        other = Case(case.build, case.batches, has_loss=False).plain_with(1, 0.05)
    assert len(at_hand) == STEPS
    assert other.losses != case.plain_with(1, 0.05).losses


def test_trained_factors_stay_orthogonal_and_frozen_ones_as_they_were() -> None:
    case = orthogonal_cases()[QUICK[1]]
    model, before = case.build(), case.build()
    plan = halves(case.workload, ProjectionPlace.DEVICE, max_gradient_norm=0.5)
    with carry_out(model, plan, case.workload, optimizer=case.make_optimizer, device=CpuDevice()) as training:
        for batch in case.batches:
            case.loss(model, batch).backward()
            training.step()
    assert overlaps(model) <= 1e-5
    state = model.state_dict()
    for name, parameter in before.named_parameters():
        assert torch.equal(state[name], parameter) or parameter.requires_grad, name
