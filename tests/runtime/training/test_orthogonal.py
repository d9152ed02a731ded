"""Orthogonal subspace fine-tuning by a plan: bit for bit the plain loop with the same maps and projections."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from functools import lru_cache
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from protwin.runtime import CpuDevice, carry_out, project_gradients
from protwin.runtime.chunks.chunk_store import ChunkOnDisk
from protwin.runtime.chunks.projections import Projections
from protwin.shared.basics.errors import ScheduleError
from protwin.shared.compile.compile import compile_schedule
from protwin.shared.layout.layout import layout_of
from protwin.shared.schema.plan import Plan, ProjectionPlace, TrainingMethod
from protwin.shared.schema.schedule import TaskKind
from protwin.shared.schema.workload import Workload
from tests.proof_size import some_quick
from tests.runtime import models
from tests.runtime.equality import trained
from tests.runtime.models import Case
from tests.runtime.orthogonal import STEPS, device_for, orthogonal_cases, orthogonal_plans
from tests.runtime.osft.overlaps import overlaps

QUICK = ("hand-written", "llama, some maps and the head")
PROJECTING = (TaskKind.GRADIENT_PROJECTION, TaskKind.HOST_GRADIENT_PROJECTION)
RENEWING = (TaskKind.PARAMETER_PROJECTION, TaskKind.HOST_PARAMETER_PROJECTION)


def check(case: Case, plan: Plan) -> None:
    outcome = trained(case, plan, device_for(case))
    plain = case.plain_with(plan.micro_batches, plan.max_gradient_norm)
    assert outcome.losses == plain.losses
    assert outcome.different == []


@lru_cache
def plans_of(name: str, number: int) -> list[Plan]:
    return orthogonal_plans(orthogonal_cases()[name].workload, number, seed=1)


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
    num_sent = num_on_disk = 0
    for name in QUICK:
        for plan in plans_of(name, 4):
            schedule = compile_schedule(plan, orthogonal_cases()[name].workload)
            found.update({task.kind for task in schedule.tasks})
            leaving = [t for t in schedule.tasks if t.kind is TaskKind.GRADIENT_PROJECTION and t.chunk is not None]
            num_sent += len(leaving)
            num_on_disk += plan.n_disk
            assert not leaving or plan.projects_gradients_on is ProjectionPlace.DEVICE
    assert min(found[kind] for kind in (*PROJECTING, *RENEWING)) >= 2
    assert min(num_sent, num_on_disk) >= 1


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


@pytest.mark.parametrize("limit", [None, 0.05])
def test_what_lies_on_the_disk_is_projected_in_its_places(limit: float | None) -> None:
    """All state on the disk, and half of the parameters; under a limit of the norm these are read for it alone.

    The wrong variant leaves such a read out, so that gradients are projected against another chunk.
    """
    case = orthogonal_cases()["llama, some maps and the head" if limit else "hand-written"]
    layout = layout_of(case.workload, 2**13)
    knobs: dict[str, Any] = {"n_disk_state": len(layout.chunks), "n_disk": len(layout.chunks) // 2 + 1, "n_staging": 2}
    plan = Plan(
        workload_id=case.workload.identity,
        method=TrainingMethod.OSFT,
        chunk_bytes=layout.chunk_bytes,
        n_persist=0,
        n_buffer=layout.min_buffers(0) + 1,
        max_gradient_norm=limit,
        micro_batches=2 if limit else 1,
        **knobs,
    )
    check(case, plan)
    if limit:
        with mock.patch.object(ChunkOnDisk, "read_to_project"):
            assert trained(case, plan).different


@pytest.mark.parametrize(
    ("name", "limit"), [(QUICK[0], 0.05), pytest.param("llama in bfloat16", None, marks=pytest.mark.slow)]
)
def test_sums_of_micro_batches_are_projected_on_the_device_and_leave_once(name: str, limit: float | None) -> None:
    """Gradients pass the link once per step, not thrice, to the same bits; left out, the projection is missed."""
    case = orthogonal_cases()[name]
    plan = halves(case.workload, ProjectionPlace.DEVICE, micro_batches=3, max_gradient_norm=limit)
    check(case, plan)
    on_host = trained(case, plan.model_copy(update={"projects_gradients_on": ProjectionPlace.HOST}), CpuDevice())
    once = trained(case, plan, CpuDevice())
    assert 0 < once.to_host_bytes < on_host.to_host_bytes
    assert once.num_cpu_adam_steps == on_host.num_cpu_adam_steps
    with mock.patch.object(Projections, "project_leaving_gradients"):
        assert trained(case, plan, CpuDevice()).different


def test_sums_between_micro_batches_are_watched() -> None:
    """They stay on their parameters until the last backward: clearing them is noticed."""
    case = orthogonal_cases()[QUICK[0]]
    plan = halves(case.workload, ProjectionPlace.DEVICE, micro_batches=2, n_persist=0, n_buffer=99)
    model = case.build()
    with carry_out(model, plan, case.workload, optimizer=case.make_optimizer, device=CpuDevice()):
        case.loss(model, case.batches[0]).backward()
        held = [parameter for parameter in model.parameters() if parameter.grad is not None]
        assert held
        held[-1].grad = None
        with pytest.raises(ScheduleError, match="gradient"):
            case.loss(model, case.batches[1])


STEPS_OF = {
    "project_staying_gradients": ProjectionPlace.HOST,
    "project_staying_parameters": ProjectionPlace.HOST,
    "project_staged_gradients": ProjectionPlace.HOST,
    "project_leaving_gradients": ProjectionPlace.DEVICE,
    "project_masters": ProjectionPlace.HOST,
}


@some_quick("left_out", STEPS_OF, quick=2)
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
