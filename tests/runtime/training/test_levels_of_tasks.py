"""No task holds more than its schedule accounts for, whether or not the iteration's peak is there.

A peak hides what the tasks below it hold too much: a model whose forward ends in large logits, or one whose blocks are
wide, has it elsewhere.  So every task is held to its own level, with lanes that have done all they can before it
begins: what may come, has come.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from itertools import product
from random import Random

import torch

from protwin.runtime import CpuDevice, carry_out
from protwin.runtime.recording.metering import METERED_ITERATIONS
from protwin.shared.compile.compile import compile_schedule
from protwin.shared.layout.layout import layout_of
from protwin.shared.schema.plan import ActivationMode, Plan, mode_counts
from protwin.shared.schema.schedule import Lane, Task
from tests.proof_size import some_quick
from tests.runtime.eager_lanes import eager_stretches, settle
from tests.runtime.hooks.test_offloaded_inputs import ROWS, WIDTH, Wired
from tests.runtime.models import SEED, Case, llama, token_batches

STEPS = METERED_ITERATIONS + 1
"""In the last one claims stand for operations."""
SLACK_BYTES = 256
"""Scalars, and places that a device rounds up."""


@lru_cache
def case_of(name: str) -> Case:
    """A Llama, or six blocks wired as ``name`` says."""
    if name == "llama":
        return Case(lambda: llama(num_layers=3), token_batches(1, length=24))
    torch.manual_seed(SEED)
    return Case(lambda: Wired(name), [{"rows": torch.randn(ROWS, WIDTH)}])


def moving_plan(case: Case, random: Random) -> Plan:
    """One in which copies come back in most sections: the tasks in which they land are what is looked at."""
    workload = case.workload
    travelling = (ActivationMode.SWAP, ActivationMode.OFFLOAD_INPUT)
    modes = tuple(random.choice((*travelling * 4, *ActivationMode)) for _ in range(workload.num_blocks))
    chunk_bytes = random.choice((1_000, 9_000, 40_000))
    layout = layout_of(workload, chunk_bytes)
    n_persist = random.choice((0, 0, 1, len(layout.chunks) // 2))
    return Plan(
        workload_id=workload.identity,
        chunk_bytes=chunk_bytes,
        n_persist=n_persist,
        n_buffer=layout.min_buffers(n_persist) + random.choice((0, 1, 3)),
        prefetch_depth=random.choice((1, 2, 3)),
        activation_modes=modes,
        micro_batches=random.choice((1, 2)),
        **mode_counts(modes),
    )


def measured_stretches(case: Case, plan: Plan) -> list[int]:
    """The ledger's peak from the begin of every compute task to that of the next one."""
    device, model, found = CpuDevice(), case.build(), list[int]()
    torch.manual_seed(SEED)
    with carry_out(model, plan, case.workload, optimizer=case.make_optimizer, device=device) as training:
        metering, ledger = training._metering, device.ledger
        begin_task: Callable[[Task], None] = metering.begin_task

        def begin_settled(task: Task) -> None:
            settle(training)
            found.append(ledger.peak_bytes)
            ledger.reset_peak()
            begin_task(task)

        metering.begin_task = begin_settled  # type: ignore[method-assign]
        for _ in range(STEPS):
            for _ in range(plan.micro_batches):
                case.loss(model, case.batches[0]).backward()
            training.step()
        found.append(ledger.peak_bytes)
    return found[1:]


def excesses(case: Case, plan: Plan) -> dict[str, int]:
    """By task, the bytes that it held beyond its account."""
    schedule = compile_schedule(plan, case.workload)
    names = [schedule.tasks[task].name for task in schedule.lanes[Lane.COMPUTE]] * STEPS
    accounted = [high for _, high in eager_stretches(schedule, STEPS)]
    found = dict[str, int]()
    for name, measured, high in zip(names, measured_stretches(case, plan), accounted, strict=True):
        if measured > high + SLACK_BYTES:
            found[name] = max(found.get(name, 0), measured - high)
    return found


NAMES = ("none", "held", "stages", "skips", "activations at the end", "llama")


@some_quick(("name", "number"), product(NAMES, range(3)), quick=[("held", 0)])
def test_no_task_holds_more_than_its_schedule_accounts_for(name: str, number: int) -> None:
    case = case_of(name)
    plan = moving_plan(case, Random(f"{name} {number}"))
    assert excesses(case, plan) == {}, plan
