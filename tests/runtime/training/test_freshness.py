"""After a step every chunk is read with its stepped weights, however slow CPU Adam is."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import protwin.runtime.training.assembly as assembly_module
from protwin.runtime import CpuDevice, Training, carry_out
from protwin.shared.basics.errors import ScheduleError
from protwin.shared.compile.compile import compile_schedule
from protwin.shared.layout.layout import Layout, build_layout
from protwin.shared.schema.plan import Plan
from protwin.shared.schema.schedule import Schedule, TaskKind
from protwin.shared.schema.workload import Workload
from tests.runtime.models import Case, cases
from tests.runtime.weights_seen import weights_seen

CHUNK_BYTES = 8_000


class SlowOnHost(torch.optim.AdamW):
    """AdamW that dawdles where CPU Adam runs."""

    def step(self, closure: Any = None) -> Any:
        if threading.current_thread() is not threading.main_thread():
            time.sleep(0.02)
        return super().step(closure)


def offloading_plan(workload: Workload, *, n_checkpoint: int = 1) -> tuple[Plan, Layout]:
    """Nothing persistent, few buffers, gathers as early as they may come."""
    layout = build_layout(workload.parameters, num_blocks=workload.num_blocks, chunk_bytes=CHUNK_BYTES)
    plan = Plan(
        workload_id=workload.identity,
        chunk_bytes=CHUNK_BYTES,
        n_persist=0,
        n_buffer=layout.min_buffers(0) + 2,
        prefetch_depth=3,
        n_checkpoint=n_checkpoint,
    )
    return plan, layout


def train(case: Case, model: nn.Module, training: Training) -> None:
    for batch in case.batches:
        case.loss(model, batch).backward()
        training.step()


def stale_weights(case: Case, seen: dict[str, list[torch.Tensor]]) -> list[str]:
    """Parameters that a forward did not find as plain training had them at that step."""
    stale = []
    for name, values in seen.items():
        assert len(values) == len(case.batches)
        expected = [weights[name] for weights in case.plain.weights]
        stale += [name for value, want in zip(values, expected, strict=False) if not torch.equal(value, want)]
    return stale


def test_every_forward_reads_the_weights_of_the_last_step() -> None:
    case = cases()["llama"]
    plan, _ = offloading_plan(case.workload)
    model = case.build()
    slow = partial(SlowOnHost, lr=1e-2, weight_decay=0.1, fused=True)
    with weights_seen(model) as seen, carry_out(model, plan, case.workload, optimizer=slow) as training:
        train(case, model, training)
        assert training.num_cpu_adam_steps >= len(case.batches) - 1
    assert len(seen) == sum(p.block is not None for p in case.workload.parameters)
    assert stale_weights(case, seen) == []


def without_waiting_for_adam(schedule: Schedule) -> Schedule:
    """A schedule whose gathers do not wait for the CPU Adam of their chunk."""
    adams = {task.id for task in schedule.tasks if task.kind is TaskKind.CPU_ADAM}
    tasks = [
        replace(task, after_previous=tuple(t for t in task.after_previous if t not in adams))
        if task.kind is TaskKind.GATHER
        else task
        for task in schedule.tasks
    ]
    assert tasks != list(schedule.tasks)
    return replace(schedule, tasks=tuple(tasks))


def test_a_gather_that_does_not_wait_for_cpu_adam_reads_stale_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """The wrong variant of the schedule, which the verifier would refuse."""

    def compile_wrongly(plan: Plan, workload: Workload, layout: Layout | None = None) -> Schedule:
        return without_waiting_for_adam(compile_schedule(plan, workload, layout))

    monkeypatch.setattr(assembly_module, "compile_schedule", compile_wrongly)
    case = cases()["llama"]
    plan, _ = offloading_plan(case.workload)
    model = case.build()
    slow = partial(SlowOnHost, lr=1e-2, weight_decay=0.1, fused=True)
    with pytest.raises(ScheduleError):
        carry_out(model, plan, case.workload, optimizer=slow)
    monkeypatch.setattr(assembly_module, "verify_schedule", lambda *_: None)
    with weights_seen(model) as seen, carry_out(model, plan, case.workload, optimizer=slow) as training:
        train(case, model, training)
    assert stale_weights(case, seen) != []


def test_throttled_links_change_no_bit() -> None:
    """Copies that take long show whether anybody reads before they have ended."""
    case = cases()["gpt2 with dropout, tied"]
    plan, _ = offloading_plan(case.workload, n_checkpoint=2)
    device = CpuDevice(host_to_device_bytes_per_s=2e6, device_to_host_bytes_per_s=2e6)
    model = case.build()
    losses = []
    with carry_out(model, plan, case.workload, optimizer=case.make_optimizer, device=device) as training:
        torch.manual_seed(0)
        for batch in case.batches:
            loss = case.loss(model, batch)
            loss.backward()
            training.step()
            losses.append(loss.item())
    assert losses == case.plain.losses
