"""Thirty questions as people ask them: what is recommended survives, is worth its means, and stands beside baselines.

The oracle simulates plans that need no search, whole records at a time: everything on the device, with no block
checkpointed, a quarter, half, three quarters, and all of them, and everything in shards.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from benchmarks.recommendations import QUESTIONS, Asked
from protwin.shared.answers.plan_kind import PlanKind
from protwin.shared.answers.search_result import SearchResult
from protwin.shared.basics.errors import InfeasibleError
from protwin.shared.layout.kinds import kind_of
from protwin.shared.layout.layout import build_layout
from protwin.shared.schema.hardware import Hardware
from protwin.shared.schema.plan import ParallelMode, Plan
from protwin.shared.schema.record import Record
from protwin.shared.schema.workload import Workload
from protwin.sim.engine.simulator import simulate
from protwin.sim.searching.confidence import DATA_SHEETS, DEFAULT_MARGIN_FRAC, NO_UNCERTAINTY
from protwin.sim.searching.request import Effort
from protwin.sim.searching.search import search
from tests.proof_size import some_quick

_CHECKPOINTED = (0.0, 0.25, 0.5, 0.75, 1.0)
FEW = [
    *[asked for asked in QUESTIONS if not asked.is_lora][::6],
    next(asked for asked in QUESTIONS if asked.is_lora),
]
"""A part of the questions, and one of those with LoRA, which are traced."""


def simple_plans(workload: Workload, num_ranks: int) -> Iterator[Plan]:
    """Plans that keep everything on devices."""
    chunk_bytes = max(
        sum(parameter.size_bytes for parameter in workload.parameters if parameter.block == block) * 2
        for block in range(workload.num_blocks)
    )
    layout = build_layout(workload.parameters, num_blocks=workload.num_blocks, chunk_bytes=chunk_bytes)
    modes = (
        [(ParallelMode.SINGLE, False)] if num_ranks == 1 else [(ParallelMode.DDP, False), (ParallelMode.SHARDED, True)]
    )
    for parallel, is_sharded in modes:
        for frac in _CHECKPOINTED:
            yield Plan(
                workload_id=workload.identity,
                chunk_bytes=chunk_bytes,
                n_persist=0 if is_sharded else len(layout.chunks),
                n_shard=len(layout.chunks) if is_sharded else 0,
                n_buffer=2 * layout.min_buffers(0) if is_sharded else 0,
                n_checkpoint=round(workload.num_blocks * frac),
                parallel=parallel,
                num_ranks=num_ranks,
            )


def survives(record: Record, box: Hardware) -> bool:
    """Whether what the allocator is expected to hold with default settings leaves the margin, by hand."""
    reserved = record.device_reserved
    assert reserved is not None
    free_bytes = reserved.limit_bytes - reserved.expected_bytes
    return reserved.num_retries == 0 and free_bytes >= DEFAULT_MARGIN_FRAC * box.device.memory_bytes - 1


def check(asked: Asked, answer: SearchResult, workload: Workload, box: Hardware) -> None:
    record = answer.prediction
    assert survives(record, box) or not answer.survives
    names = " ".join(baseline.name for baseline in answer.baselines)
    wanted = ("plain training", "checkpointed") if asked.num_ranks == 1 else ("DDP", "checkpointed", "FSDP2")
    assert all(word in names for word in (*wanted, "FSDP2, offloaded", "DeepSpeed ZeRO-3"))
    for plan in simple_plans(workload, asked.num_ranks):
        layout = build_layout(workload.parameters, num_blocks=workload.num_blocks, chunk_bytes=plan.chunk_bytes)
        kind = kind_of(plan, layout, workload)
        if kind.complexity >= answer.plan_kind.complexity:
            continue
        other = simulate(plan, workload, box)
        gain_frac = 1 - record.iteration_s / other.iteration_s
        is_worth_it = gain_frac > DATA_SHEETS.between(kind, answer.plan_kind) * (1 - 1e-6)
        assert is_worth_it or not survives(other, box), f"{kind} is as good: {plan}"
    for outcome in answer.pareto:
        is_better = outcome.iteration_s <= record.iteration_s and (
            outcome.guaranteed_peak_device_bytes < record.guaranteed_peak_device_bytes
        )
        assert not is_better, "a plan of the front outdoes the recommended one"


@some_quick("asked", QUESTIONS, quick=FEW, ids=str)
def test_what_is_recommended_survives_and_is_worth_its_means(asked: Asked) -> None:
    request = asked.request()
    workload = request.workload
    assert isinstance(workload, Workload)
    try:
        answer = search(request)
    except InfeasibleError:
        for plan in simple_plans(workload, asked.num_ranks):
            assert simulate(plan, workload, request.hardware).guaranteed_peak_device_bytes > request.budgets_bytes()[0]
        return
    check(asked, answer, workload, request.hardware)
    assert answer.survives


def test_the_check_sees_a_plan_that_is_not_worth_it() -> None:
    """The wrong variant: the fastest plan, whatever it takes, as it was recommended before."""
    asked = next(one for one in QUESTIONS if one.model == "qwen2.5-0.5b" and one.machine == "a100-80gb")
    request = replace(asked.request(), effort=Effort(uncertainty=NO_UNCERTAINTY))
    assert isinstance(request.workload, Workload)
    answer = search(request)
    assert answer.plan_kind is PlanKind.OFFLOADED
    with pytest.raises(AssertionError, match="is as good"):
        check(asked, answer, request.workload, request.hardware)
