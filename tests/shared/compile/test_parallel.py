"""Schedules of several ranks: what the compiler makes is safe for every timing, and no single fault passes."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from protwin.shared.basics.errors import PlanError
from protwin.shared.compile.compile import compile_schedule
from protwin.shared.layout.layout import build_layout
from protwin.shared.layout.shards import rank_part
from protwin.shared.schema.optimizer import Optimizer
from protwin.shared.schema.plan import ParallelMode, Plan
from protwin.shared.schema.schedule import Content, Lane, Memory, Schedule, TaskKind
from protwin.shared.schema.workload import DType
from protwin.shared.tables.explain import explain
from protwin.shared.verify.full_training import FULL_TRAINING
from protwin.shared.verify.guaranteed_peak import guaranteed_device_peak
from protwin.shared.verify.rules import Stage
from protwin.shared.verify.steps import held
from protwin.shared.verify.verify import verify_schedule
from tests.proof_size import examples, share, some_quick
from tests.shared import faults
from tests.shared.abstract_machine import AbstractMachine
from tests.shared.adversaries import at_random, holding
from tests.shared.faults import Fault
from tests.shared.small_models import chain, parameter, plan, workload
from tests.shared.verdicts import compiled, guarantees, is_accepted, only_rejections, violation
from tests.strategies.plans import PlannedWorkload, parallel_workloads

SEEDS = st.integers(0, 2**32 - 1)
MODES = (ParallelMode.DDP, ParallelMode.REPLICATED, ParallelMode.SHARDED)
CASES = [*((mode, 0) for mode in MODES), (ParallelMode.SHARDED, 4), (ParallelMode.SHARDED, 5)]
LINE_BYTES = 64
"""Modes, and chunks that are sharded over the devices: none, all but one, all."""


def example(mode: ParallelMode = ParallelMode.SHARDED, n_shard: int = 0) -> PlannedWorkload:
    """Three blocks of two chunks, one persistent, one frozen, an unowned parameter, two micro-batches, a norm."""
    parameters = [parameter("embedding", 700, None)]
    for block in range(3):
        parameters += [
            parameter(f"layers.{block}.first", 1_000, block, trainable=block != 2),
            parameter(f"layers.{block}.second", 500 + block, block),
        ]
    model = workload(parameters, 3)
    knobs = plan(model, n_persist=2, n_buffer=3, n_checkpoint=1, micro_batches=2, max_gradient_norm=1.0)
    layout = build_layout(model.parameters, num_blocks=3, chunk_bytes=knobs.chunk_bytes)
    update: dict[str, object] = {"parallel": mode, "num_ranks": 3, "n_shard": n_shard}
    if mode is ParallelMode.DDP:
        update["n_persist"] = len(layout.chunks)
    return PlannedWorkload(model, knobs.model_copy(update=update), layout)


# -- every timing ----------------------------------------------------------------------------------------------------


@settings(max_examples=examples(40, 10))
@given(parallel_workloads(max_blocks=4), SEEDS)
def test_compiled_schedules_are_safe_for_every_timing(case: PlannedWorkload, seed: int) -> None:
    schedule = compiled(case)
    verify_schedule(schedule, case.plan, case.workload, case.layout)
    bound_bytes = guaranteed_device_peak(schedule).size_bytes
    generator = random.Random(seed)
    held = [holding(task.id, iteration=1) for task in generator.sample(schedule.tasks, 3)]
    for adversary in (*held, at_random(seed)):
        machine = AbstractMachine(schedule, case.plan, case.workload, case.layout).run(adversary)
        assert machine.peak_bytes <= bound_bytes


@settings(max_examples=examples(20, 5))
@given(parallel_workloads(max_blocks=2), SEEDS)
def test_order_faults_are_rejected_exactly_when_some_timing_harms(case: PlannedWorkload, seed: int) -> None:
    schedule = compiled(case)
    generator = random.Random(seed)
    for family in (faults.dropped_dependencies, faults.retargeted_dependencies):
        found = [fault for fault in family(schedule) if "all_" in fault.name or "reduce" in fault.name]
        for fault in generator.sample(found, min(2, len(found))):
            changed = fault.make()
            harm = violation(changed, case)
            assert is_accepted(changed, case) == (harm is None), (fault, harm)


@some_quick(("mode", "n_shard"), CASES, quick=1)
def test_every_dropped_wait_of_a_collective_is_rejected_if_it_matters(mode: ParallelMode, n_shard: int) -> None:
    case = example(mode, n_shard)
    schedule = compiled(case)
    intact = guarantees(schedule)
    num_caught = 0
    for fault in faults.dropped_dependencies(schedule):
        changed = fault.make()
        matters = guarantees(changed) != intact
        assert is_accepted(changed, case) != matters, fault
        if matters and ("all_" in fault.name or "reduce_" in fault.name):
            num_caught += 1
            # The machine takes longer than the verifier: it judges every third.
            assert num_caught % 3 or violation(changed, case) is not None, fault
    assert num_caught >= (8 if mode is ParallelMode.SHARDED else 4)


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "n_shard"), CASES)
@pytest.mark.parametrize("family", faults.DATA_FAULTS, ids=lambda family: family.__name__)
def test_every_data_fault_of_the_example_is_rejected(
    family: Callable[[Schedule], list[Fault]], mode: ParallelMode, n_shard: int
) -> None:
    case = example(mode, n_shard)
    schedule = compiled(case)
    verify_schedule(schedule, case.plan, case.workload, case.layout)
    assert [fault for fault in share(family(schedule), one_in=7) if is_accepted(fault.make(), case)] == []


def test_every_rule_of_ranks_earns_its_place() -> None:
    """Some fault of the example is rejected by this rule and no other."""
    case = example()
    schedule = compiled(case)
    data_faults = [*faults.changed_buffer_lists(schedule), *faults.changed_task_fields(schedule)]
    random.Random(0).shuffle(data_faults)
    found = [*faults.postponed_tasks(schedule), *faults.dropped_dependencies(schedule), *data_faults]
    about_ranks = (Stage.RANKS, Stage.RANK_ORDER)
    waiting = {rule.check.__name__ for rule in FULL_TRAINING.in_order() if rule.stage in about_ranks}
    # Exchanges of sequences are not in this example (test_sequence_exchanges.py).
    waiting -= {"check_exchanges", "check_exchange_order"}
    only_rejections(found, case, waiting)
    assert waiting == set(), "these reject nothing that other rules let pass"


# -- policies --------------------------------------------------------------------------------------------------------


def tasks_on(schedule: Schedule, lane: Lane) -> list[tuple[TaskKind, int | None]]:
    return [(task.kind, task.chunk) for task in schedule.tasks if task.lane is lane]


def chained(mode: ParallelMode, **knobs: object) -> PlannedWorkload:
    model = chain(4)
    layout = build_layout(model.parameters, num_blocks=4, chunk_bytes=plan(model).chunk_bytes)
    whole = {"n_persist": len(layout.chunks)} if mode is ParallelMode.DDP else {}
    chosen = plan(model).model_copy(update={"parallel": mode, "num_ranks": 4, "n_buffer": 3, **whole, **knobs})
    return PlannedWorkload(model, chosen, layout)


def test_all_gathers_are_entered_ahead_of_the_reductions_that_wait_for_backwards() -> None:
    """One lane has one order: a reduction before the next step's gather would keep that from coming early."""
    lane = tasks_on(compiled(chained(ParallelMode.SHARDED, n_buffer=2)), Lane.COLLECTIVE)
    gather, scatter = TaskKind.ALL_GATHER, TaskKind.REDUCE_SCATTER
    backward = lane[lane.index((scatter, 3)) :]
    assert backward == [(scatter, 3), (gather, 1), (scatter, 2), (gather, 0), (scatter, 1), (scatter, 0)]


def test_gradients_that_stay_are_added_up_once_and_those_that_leave_every_time() -> None:
    stays = compiled(chained(ParallelMode.DDP, micro_batches=3))
    assert [chunk for kind, chunk in tasks_on(stays, Lane.COLLECTIVE)] == [3, 2, 1, 0]
    assert {task.micro_batch for task in stays.tasks if task.lane is Lane.COLLECTIVE} == {2}
    leaves = compiled(chained(ParallelMode.REPLICATED, micro_batches=3))
    assert [chunk for kind, chunk in tasks_on(leaves, Lane.COLLECTIVE)] == [3, 2, 1, 0] * 3


def test_frozen_chunks_are_gathered_and_nothing_else() -> None:
    model = chain(3, frozen=(0, 1, 2))
    knobs = plan(model).model_copy(update={"parallel": ParallelMode.SHARDED, "num_ranks": 2})
    kinds = {task.kind for task in compile_schedule(knobs, model).tasks if task.lane is Lane.COLLECTIVE}
    assert kinds == {TaskKind.ALL_GATHER}


def test_only_a_norm_of_shards_is_added_up() -> None:
    for mode in MODES:
        schedule = compiled(example(mode))
        shared = [t for t in schedule.tasks if t.kind is TaskKind.ALL_REDUCE and t.chunk is None and t.section is None]
        assert [task.moved_bytes for task in shared] == ([8] if mode is ParallelMode.SHARDED else [])


@given(parallel_workloads(), st.sampled_from((2, 3, 7, 64, 5000)))
@settings(max_examples=examples(60, 12))
def test_shards_hold_every_element_once_and_little_more(case: PlannedWorkload, num_ranks: int) -> None:
    """Oracle: every cache line of a chunk, dealt out one by one."""
    for chunk in case.layout.chunks:
        part = rank_part(chunk, case.workload.parameters, ParallelMode.SHARDED, num_ranks, Optimizer.ADAMW)
        members = [case.workload.parameters[placed.index] for placed in chunk.parameters]
        assert part.gathered_bytes == num_ranks * part.parameter_bytes >= chunk.size_bytes
        assert part.gathered_bytes - chunk.size_bytes < num_ranks * LINE_BYTES * len(members)
        assert num_ranks * part.num_stepped >= chunk.num_trainable
        assert (part.num_stepped > 0) == chunk.is_trainable
        if all(p.dtype is DType.FLOAT32 and p.trainable for p in members):
            lines = [0] * num_ranks
            for place in range(chunk.size_bytes // LINE_BYTES):
                lines[place % num_ranks] += 1
            assert part.parameter_bytes == LINE_BYTES * max(lines)
            # A count of steps for each parameter that the rank with most of them has a stretch of.
            stretches = Counter[int]()
            for placed, member in zip(chunk.parameters, members, strict=True):
                if member.size_bytes:
                    ends = placed.offset_bytes, placed.offset_bytes + member.size_bytes - 1
                    first, last = (end // part.parameter_bytes for end in ends)
                    stretches.update(range(first, last + 1))
            assert part.state_bytes == 2 * LINE_BYTES * max(lines) + 4 * max(stretches.values(), default=1)


@given(parallel_workloads(), st.sampled_from((2, 3, 7)), st.sets(st.integers(0, 40)))
@settings(max_examples=examples(60, 12))
def test_parts_gathered_in_another_type_have_as_many_elements(
    case: PlannedWorkload, num_ranks: int, narrow: set[int]
) -> None:
    """Oracle: elements of lines that are dealt out; the verifier counts by itself."""
    parameters = tuple(
        p.model_copy(update={"gathered_dtype": DType.FLOAT8_E4M3FN}) if number in narrow else p
        for number, p in enumerate(case.workload.parameters)
    )
    asked = case.plan.model_copy(update={"parallel": ParallelMode.SHARDED, "num_ranks": num_ranks, "shard_ranks": None})
    for chunk in case.layout.chunks:
        whole, part = (
            rank_part(chunk, of, ParallelMode.SHARDED, num_ranks, Optimizer.ADAMW)
            for of in (case.workload.parameters, parameters)
        )
        assert replace(part, gathered_bytes=whole.gathered_bytes) == whole
        assert part.gathered_bytes == held(chunk, parameters, asked).gathered_bytes
        own = sum(
            parameters[placed.index].num_elements * parameters[placed.index].gathered_item_bytes
            for placed in chunk.parameters
        )
        padding = (num_ranks + 4) * LINE_BYTES * len(chunk.parameters)
        assert own <= part.gathered_bytes < own + padding


def test_the_host_holds_a_share_and_the_device_the_whole() -> None:
    alone, sharded, replicated = (
        compiled(chained(mode, num_ranks=4 if mode is not ParallelMode.SINGLE else 1))
        for mode in (ParallelMode.SINGLE, ParallelMode.SHARDED, ParallelMode.REPLICATED)
    )
    for memory in (Memory.PINNED_HOST, Memory.HOST):
        assert replicated.static_bytes(memory) == alone.static_bytes(memory)
        # A shard holds, and its optimizer steps, the alignment between parameters too: 96 bytes of 4 096 here.
        assert sharded.static_bytes(memory) == pytest.approx(alone.static_bytes(memory) / 4, rel=0.03)
    gathered = {
        name: [b.size_bytes for b in schedule.buffers if b.content is Content.PARAMETERS and not b.is_static]
        for name, schedule in (("alone", alone), ("sharded", sharded))
    }
    assert gathered["alone"] == gathered["sharded"]


# -- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("mode", "num_ranks"), [("single", 2), ("ddp", 1), ("sharded", 1), ("replicated", 1)])
def test_modes_and_ranks_agree(mode: str, num_ranks: int) -> None:
    knobs = {"workload_id": "w", "chunk_bytes": 1, "n_persist": 0, "n_buffer": 1}
    with pytest.raises(ValidationError, match="parallel"):
        Plan.model_validate({**knobs, "parallel": mode, "num_ranks": num_ranks})


def test_ddp_keeps_every_chunk() -> None:
    case = chained(ParallelMode.DDP, n_persist=3)
    with pytest.raises(PlanError, match=r"n_persist = 3 keeps 3 of 4.*Set n_persist to 4"):
        compiled(case)


@pytest.mark.parametrize(
    ("mode", "words"),
    [
        (ParallelMode.DDP, "every device has all chunks"),
        (ParallelMode.REPLICATED, "every host has all of the offloaded chunks"),
        (ParallelMode.SHARDED, "every host has 1/4 of the offloaded chunks"),
    ],
)
def test_a_plan_explains_what_its_ranks_do(mode: ParallelMode, words: str) -> None:
    case = chained(mode)
    told = explain(compiled(case), case.plan, case.workload, case.layout)
    assert f"Ranks: 4 train together; {words};" in " ".join(told.split())
