"""Searches for plans of bypass distillation: verified, replayed, bounded and found like those of full training."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn

from protwin.shared.basics.errors import InfeasibleError, PlanError
from protwin.shared.catalogue.machines import load_hardware
from protwin.shared.compile.compile import compile_schedule
from protwin.shared.methods.bypass import BYPASS
from protwin.shared.phases.distillation import Distillation
from protwin.shared.schema.plan import TrainingMethod
from protwin.shared.schema.schedule import TaskKind
from protwin.shared.schema.workload import (
    Block,
    BlockProfile,
    DType,
    Operation,
    OperationClass,
    Parameter,
    Phase,
    Workload,
)
from protwin.shared.tables.answer import short_plan
from protwin.shared.verify.guaranteed_peak import guaranteed_device_peak
from protwin.sim.bounds.replay import REPLAY_FRAC, Replayer, ReplayPlan
from protwin.sim.bounds.stretches import least_periods_s
from protwin.sim.bounds.throughput import Throughput
from protwin.sim.engine.kept_schedule import memory_schedule
from protwin.sim.engine.simulator import simulate_plan, simulate_timing
from protwin.sim.questions.remedies import with_remedies
from protwin.sim.questions.what_if import questions, what_if
from protwin.sim.searching.request import SearchRequest, Step
from protwin.sim.searching.search import search, search_batches
from protwin.sim.space.space import SearchSpace
from tests.proof_size import examples
from tests.shared.small_models import chain
from tests.sim import brute_force
from tests.sim.bound_cases import Case, on_a_machine
from tests.sim.fastest import fastest_request
from tests.strategies.pairs import bypass_cases, bypass_workloads

MIB: Final = 2**20


def phase(net_bytes: int, highest_bytes: int, gflops: int) -> Phase:
    work = Operation(
        name="mm", operation_class=OperationClass.MATMUL, dtype=DType.FLOAT32, flops=gflops * 10**9, bytes_moved=8 * MIB
    )
    return Phase(operations=(work,), net_bytes=net_bytes, gradient_bytes=0, curve=((1.0, highest_bytes),))


def block(forward: Phase, backward: Phase, output_bytes: int) -> BlockProfile:
    nothing = Phase()
    return BlockProfile(
        output_bytes=output_bytes,
        forward=forward,
        backward=backward,
        checkpoint_forward=forward if backward == nothing else nothing,
        recompute=nothing,
        checkpoint_backward=nothing,
    )


def pairs(num_pairs: int, batch_size: int = 1) -> Workload:
    """Teachers of 512 MiB a block, students of 256 MiB."""
    teacher = block(phase(batch_size * MIB, batch_size * 4 * MIB, 40 * batch_size), Phase(), batch_size * MIB)
    backward = phase(256 * MIB - batch_size * 9 * MIB, 256 * MIB, 60 * batch_size)
    student = block(
        phase(batch_size * 6 * MIB, batch_size * 8 * MIB, 30 * batch_size),
        backward.model_copy(update={"gradient_bytes": 256 * MIB}),
        batch_size * MIB,
    )
    names = [f"{model}.layers.{pair}" for pair in range(num_pairs) for model in ("teacher", "student")]
    return Workload(
        model_name="pairs",
        model_hash="0123456789abcdef",
        batch_shapes={"input_ids": (batch_size, 256)},
        num_samples=batch_size,
        num_tokens=256 * batch_size,
        compute_dtype=DType.FLOAT32,
        parameters=tuple(
            Parameter(
                name=f"{name}.weight",
                shape=((64 if number % 2 else 128) * MIB,),
                dtype=DType.FLOAT32,
                trainable=number % 2 == 1,
                block=number,
            )
            for number, name in enumerate(names)
        ),
        blocks=tuple(Block(name=name, profile=number % 2) for number, name in enumerate(names)),
        profiles=(teacher, student),
        prologue_forward=phase(batch_size * MIB, batch_size * MIB, 1),
        epilogue_forward=Phase(),
        epilogue_backward=Phase(),
        prologue_backward=Phase(),
        distillation=Distillation(losses=(Phase(), phase(2 * batch_size * MIB, 3 * batch_size * MIB, 1)), loss="mse"),
        traced_with="fake",
    )


PAIRS: Final = pairs(4)


@st.composite
def cases(draw: DrawFn) -> Case:
    """Any plan of a bypass workload on any machine."""
    found = draw(bypass_cases(measured=None))
    has_disk = found.plan.n_disk_state > 0 or draw(st.booleans())
    return draw(on_a_machine(found.workload, found.plan, found.layout, BYPASS.policies, has_disk=has_disk))


@given(cases())
@settings(max_examples=examples(150, 9), deadline=None)
def test_bounds_never_exceed_what_they_bound_and_some_are_exact(found: Case) -> None:
    peak_bytes = guaranteed_device_peak(found.schedule).size_bytes
    assert found.activation_bound_bytes() <= found.memory_bound_bytes() <= peak_bytes
    assert found.exact_peak_bytes() == peak_bytes
    _, timing = simulate_plan(found.plan, found.workload, found.costs, found.contention, layout=found.layout)
    replayed_s = Replayer(found.contention).periods_s([ReplayPlan(found.family(), 0, int(found.mode[0]))])[0]
    assert np.isnan(replayed_s) or replayed_s == pytest.approx(timing.iteration_s, rel=(1 - REPLAY_FRAC) / 2)
    bound_s = least_periods_s(found.family().programs(found.mode), Throughput.of(found.contention))[0, 0]
    assert found.work_bound_s() <= timing.iteration_s
    norms = [task for task in found.schedule.tasks if task.kind is TaskKind.GRADIENT_NORM]
    assert found.chunks.norm_s[found.prefix] == pytest.approx(sum(map(found.costs.task_s, norms)))
    assert bound_s <= timing.iteration_s


@given(brute_force.cases(BYPASS, bypass_workloads(max_pairs=2)), st.data())
@settings(max_examples=examples(100, 7), deadline=None)
def test_a_search_finds_what_brute_force_finds(case: brute_force.Case, data: st.DataObject) -> None:
    budget_bytes = data.draw(st.sampled_from(sorted(outcome.device_bytes for outcome in case.outcomes)))
    best_s = min(outcome.iteration_s for outcome in case.feasible(budget_bytes))
    found = case.search(budget_bytes)
    assert found.prediction.iteration_s == best_s
    assert found.plan.method is TrainingMethod.BYPASS


@given(cases(), st.integers(7, 12))
@settings(max_examples=examples(60, 5), deadline=None)
def test_few_micro_batches_tell_of_many(found: Case, micro_batches: int) -> None:
    plan = found.plan.model_copy(update={"micro_batches": micro_batches})
    whole = compile_schedule(plan, found.workload, found.layout)
    kept = memory_schedule(plan, found.workload, found.layout)
    assert guaranteed_device_peak(kept).size_bytes == guaranteed_device_peak(whole).size_bytes
    simulated, timing = simulate_plan(plan, found.workload, found.costs, found.contention, layout=found.layout)
    assume(simulated.micro_batches < micro_batches and timing.is_steady)
    expected = simulate_timing(whole, found.costs.durations_s(whole), found.contention)
    assume(expected.is_steady)
    assert timing.iteration_s == pytest.approx(expected.iteration_s, rel=1e-6)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"space": SearchSpace(n_checkpoint=2)}, "n_checkpoint is at least 2, .* Allow n_checkpoint = 0"),  # type: ignore[arg-type]
        ({"space": SearchSpace(n_swap=1)}, "n_swap is at least 1, .* Allow n_swap = 0"),  # type: ignore[arg-type]
        ({"space": SearchSpace(looks_up_rows=True)}, "looks_up_rows with method bypass"),
    ],
)
def test_what_no_plan_can_do_is_refused_by_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        search(fastest_request(**({"workload": PAIRS, "hardware": load_hardware("rtx-3090")} | changes)))


def test_all_that_a_search_answers_is_answered() -> None:
    """Fronts, baselines, and what other machines and batches would bring, with plans that are all of the method."""
    request = SearchRequest(
        workload=PAIRS, hardware=load_hardware("rtx-3090"), device_budget_bytes=6 * 2**30, baselines=()
    )
    batches = search_batches(request)
    found = batches.result
    assert found.certificate.is_certified
    plans = [found.plan, *(outcome.plan for outcome in (*found.pareto, *found.alternatives))]
    assert {plan.method for plan in plans} == {TrainingMethod.BYPASS}
    assert found.plan.n_persist < 8
    assert [baseline.name for baseline in found.baselines] == ["plain training"]
    answers = {
        answer.change: answer for answer in what_if(request, found.prediction.iteration_s, list(questions(request)))
    }
    assert answers["2 GiB more device memory"].speedup >= 1  # type: ignore[operator]
    assert answers["links twice as fast"].speedup > 1  # type: ignore[operator]
    assert answers["half the host memory"].speedup <= 1  # type: ignore[operator]
    told = with_remedies(batches, request, lambda size, _: pairs(4, size)).result.prediction.remedies
    assert told


def test_a_limit_of_blocks_leaves_cpu_adam_beside_compute() -> None:
    """What a limit of all gradients would forbid: the first block is stepped before the last one has run."""
    request = SearchRequest(
        workload=PAIRS,
        hardware=load_hardware("rtx-3090"),
        device_budget_bytes=6 * 2**30,
        baselines=(),
        space=SearchSpace(n_persist=0, n_host_stepped=0),  # type: ignore[arg-type]
        step=Step(max_gradient_norm=1.0),
    )
    found = search(request)
    assert found.certificate.is_certified
    assert found.plan.max_gradient_norm == 1.0
    assert search(replace(request, step=Step())).prediction.iteration_s <= found.prediction.iteration_s
    schedule = compile_schedule(found.plan, PAIRS)
    adams = [task.id for task in schedule.tasks if task.kind is TaskKind.CPU_ADAM]
    backwards = [task.id for task in schedule.tasks if task.kind is TaskKind.BACKWARD]
    assert len(adams) == len(backwards)
    assert all(adam < backward for adam, backward in zip(adams, backwards[1:], strict=False))


def test_knobs_that_a_method_does_not_have_are_not_named() -> None:
    """Recomputation is no knob of a distillation; of full training it is one."""
    request = fastest_request(workload=PAIRS, hardware=load_hardware("rtx-3090"), device_budget_bytes=2**20)
    with pytest.raises(InfeasibleError, match="prefetch_depth = ") as refused:
        search(request)
    assert "n_checkpoint" not in str(refused.value)
    with pytest.raises(InfeasibleError, match="n_checkpoint = "):
        search(fastest_request(workload=chain(3), hardware=load_hardware("rtx-3090"), device_budget_bytes=2**10))
    plans = search(fastest_request(workload=PAIRS, hardware=load_hardware("rtx-3090"))).pareto
    for outcome in plans:
        assert "n_checkpoint" not in short_plan(outcome)
        full = outcome.plan.model_copy(update={"method": TrainingMethod.FULL})
        assert "n_checkpoint 0" in short_plan(outcome.model_copy(update={"plan": full}))
