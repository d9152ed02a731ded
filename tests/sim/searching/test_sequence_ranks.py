"""Ranks that share sequences: simulated, replayed, priced and searched."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protwin.shared.basics.errors import PlanError
from protwin.shared.catalogue.machines import machine as known_machine
from protwin.shared.catalogue.overrides import override_hardware
from protwin.shared.compile.compile import compile_schedule
from protwin.shared.layout.layout import layout_of
from protwin.shared.phases.sequence_sharing import SequenceSharing
from protwin.shared.schema.hardware import Collective, LinkPoint, MeasuredCollective, Topology
from protwin.shared.schema.plan import ParallelMode, Plan
from protwin.shared.schema.schedule import Schedule, TaskKind
from protwin.shared.schema.workload import Phase, Workload
from protwin.sim.costs.contention import ContentionModel
from protwin.sim.costs.fabrics import CALL_OVERHEAD_S
from protwin.sim.costs.task_costs import CostModel
from protwin.sim.engine.simulator import MIN_ITERATIONS, simulate, simulate_timing
from protwin.sim.searching.request import SearchRequest, Step
from protwin.sim.searching.search import Spaces, search, search_batches
from protwin.sim.space.plan_family import PlanFamily
from protwin.sim.space.space import SearchSpace
from protwin.sim.space.step_spec import StepSpec
from tests.cli.saved import decoder
from tests.proof_size import examples
from tests.sim.bound_cases import Case, case
from tests.sim.fastest import fastest_request
from tests.sim.longest_path import longest_path_s
from tests.sim.ranked_cases import RANKS, nodes, sharing_cases
from tests.strategies.plans import parallel_workloads
from tests.strategies.sharings import changed, shared_workloads

EXCHANGE = TaskKind.SEQUENCE_EXCHANGE
_BLOCK = ("forward", "backward", "checkpoint_forward", "recompute", "checkpoint_backward")
_OUTER = ("prologue_forward", "epilogue_forward", "epilogue_backward", "prologue_backward")


def _part(phase: Phase, num_ranks: int, exchanges: tuple[int, ...]) -> Phase:
    """A rank's part of it: that much of its operations, and all of its memory."""
    operations = tuple(
        operation.model_copy(update={"flops": operation.flops // num_ranks}) for operation in phase.operations
    )
    fields = {name: getattr(phase, name) for name in Phase.model_fields}
    return Phase(**fields | {"operations": operations, "exchanges": exchanges})


def shared_decoder(*counts: int, exchanged_bytes: int = 2**20, num_blocks: int = 4) -> Workload:
    """A decoder whose sequences so many ranks may share."""
    model = decoder(num_blocks)
    (profile,) = model.profiles
    return changed(
        model,
        sequence_sharings=tuple(
            SequenceSharing(
                sequence_ranks=number,
                profiles=(
                    profile.model_copy(
                        update={
                            name: _part(getattr(profile, name), number, (3 * exchanged_bytes, exchanged_bytes))
                            for name in _BLOCK
                        }
                    ),
                ),
                profile_of=(0,) * num_blocks,
                resident_bytes=model.resident_bytes,
                **{name: _part(getattr(model, name), number, ()) for name in _OUTER},
            )
            for number in counts
        ),
    )


def shared_plan(model: Workload, **knobs: object) -> Plan:
    fields = {"chunk_bytes": 2**24, "n_persist": 0, "n_buffer": 4, "n_checkpoint": 2, "parallel": ParallelMode.SHARDED}
    return Plan(workload_id=model.identity, **fields | {"num_ranks": 8, "sequence_ranks": 8} | knobs)  # type: ignore[arg-type]


# -- seconds ---------------------------------------------------------------------------------------------------------


@given(st.integers(1, 2**30), st.integers(1, 4), st.sampled_from([2, 4, 8]))
@settings(max_examples=examples(200, 12), deadline=None)
def test_an_all_to_all_on_a_switch_takes_its_latency_and_what_is_sent(
    exchanged_bytes: int, number: int, sequence_ranks: int
) -> None:
    """Each rank sends (p - 1) / p of its bytes at the rate of its links; each exchange pays the latency and a call."""
    box = known_machine("h100-80gb-x8")
    assert box.node is not None
    assert box.node.topology is Topology.SWITCH
    assert box.node.device_link is not None
    link = box.node.device_link
    model = shared_decoder(sequence_ranks, exchanged_bytes=exchanged_bytes)
    schedule = compile_schedule(shared_plan(model, sequence_ranks=sequence_ranks), model)
    costs = CostModel.of(model, box, num_ranks=8).among(8, None)
    task = next(task for task in schedule.tasks if task.kind is EXCHANGE)
    total_bytes = number * exchanged_bytes
    asked = replace(task, moved_bytes=total_bytes, num_tensors=number)
    sent_bytes = exchanged_bytes * (sequence_ranks - 1) / sequence_ranks
    expected_s = number * (CALL_OVERHEAD_S + link.latency_s + sent_bytes / link.bandwidth_bytes_per_s)
    assert costs.task_s(asked) == pytest.approx(expected_s, rel=1e-9)


def test_across_nodes_the_network_is_shared() -> None:
    """16 ranks of two nodes send half of their bytes to the other node, over their own part of its adapters."""
    eight = known_machine("h100-80gb-x8")
    sixteen = override_hardware(eight, {"network": "roce-400g", "network.num_nodes": "2"})
    model = shared_decoder(16, exchanged_bytes=2**28)
    schedule = compile_schedule(shared_plan(model, num_ranks=16, sequence_ranks=16), model)
    task = next(task for task in schedule.tasks if task.kind is EXCHANGE and task.num_tensors == 2)
    seconds = CostModel.of(model, sixteen, num_ranks=16).among(16, None).task_s(task)
    assert sixteen.network is not None
    own_bytes_per_s = sixteen.network.adapters_per_node * sixteen.network.link.bandwidth_bytes_per_s / 8
    assert seconds > task.moved_bytes / 2 / own_bytes_per_s
    assert seconds < 3 * task.moved_bytes / 2 / own_bytes_per_s


def test_a_measured_table_counts_before_the_model() -> None:
    box = known_machine("h100-80gb-x8")
    table = (LinkPoint(size_bytes=2**10, seconds=1.0), LinkPoint(size_bytes=2**20, seconds=2.0))
    measured = MeasuredCollective(collective=Collective.ALL_TO_ALL, num_ranks=8, table=table)
    slow = box.model_copy(update={"collectives": (*box.collectives, measured)})
    model = shared_decoder(8, exchanged_bytes=2**19)
    schedule = compile_schedule(shared_plan(model), model)
    task = next(task for task in schedule.tasks if task.kind is EXCHANGE and task.num_tensors == 2)
    # Two exchanges of 3 * 2**19 and 2**19 bytes are two of 2**20.
    assert CostModel.of(model, slow, num_ranks=8).among(8, None).task_s(task) == pytest.approx(4.0)


# -- simulated and replayed ------------------------------------------------------------------------------------------


@given(sharing_cases())
@settings(max_examples=examples(80, 7), deadline=None)
def test_without_contention_it_takes_as_long_as_the_longest_path(found: Case) -> None:
    schedule = found.schedule
    durations_s = found.costs.durations_s(schedule)
    timing = simulate_timing(schedule, durations_s, ContentionModel.none(num_ranks=found.plan.num_ranks))
    number = timing.num_iterations
    expected = longest_path_s(schedule, durations_s, number)
    np.testing.assert_allclose(timing.ends_s, expected.ends_s[:number], rtol=1e-9, atol=1e-12)


@given(sharing_cases())
@settings(max_examples=examples(80, 7), deadline=None)
def test_a_replay_is_what_the_simulator_says_and_no_bound_is_above_it(found: Case) -> None:
    simulated, simulated_s = found.simulated(), found.simulated_s()
    if simulated.is_steady and simulated.num_iterations == MIN_ITERATIONS + 1:
        assert found.replayed_s() == pytest.approx(simulated.iteration_s, rel=1e-9)
    for bound_s in (found.work_bound_s(), found.round_trip_bound_s(), found.time_bound_s()):
        assert bound_s <= simulated_s * (1 + 1e-9)


def test_a_replay_of_another_mode_is_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """Recomputed blocks exchange once more; a family that knows no modes beside compute would not say so."""
    model = shared_decoder(4, exchanged_bytes=2**28).shared_among(4)
    chosen = shared_plan(model, num_ranks=4, sequence_ranks=4)
    box = known_machine("rtx-3090-x4")
    layout, costs = layout_of(model, chosen.chunk_bytes), CostModel.of(model, box, num_ranks=4)
    found = case(model, chosen, layout, costs, ContentionModel.of(box, num_ranks=4))
    assert found.replayed_s() == pytest.approx(found.simulated_s(), rel=1e-9)
    monkeypatch.setattr(PlanFamily, "in_mode", lambda family, mode: family)
    assert found.replayed_s() < 0.999 * found.simulated_s()


def _period_s(schedule: Schedule, durations_s: list[float]) -> float:
    return simulate_timing(schedule, durations_s, ContentionModel.none(num_ranks=8)).iteration_s


@pytest.mark.parametrize("n_checkpoint", [0, 4])
def test_time_grows_by_exactly_what_is_exchanged(n_checkpoint: int) -> None:
    """Whole chunks on every device, each with a gradient of its own: nothing else is in the collectives' way."""
    model = shared_decoder(8)
    box = known_machine("h100-80gb-x8")
    num_chunks = len(layout_of(model, 2**30).chunks)
    knobs = {"parallel": ParallelMode.DDP, "n_persist": num_chunks, "n_buffer": 0, "chunk_bytes": 2**30}
    schedule = compile_schedule(shared_plan(model, n_checkpoint=n_checkpoint, **knobs), model)
    durations_s = list(CostModel.of(model, box, num_ranks=8).durations_s(schedule))
    exchanges_s = [s if task.kind is EXCHANGE else 0.0 for task, s in zip(schedule.tasks, durations_s, strict=True)]
    without_s = [a - b for a, b in zip(durations_s, exchanges_s, strict=True)]
    grown_s = _period_s(schedule, durations_s) - _period_s(schedule, without_s)
    assert grown_s == pytest.approx(sum(exchanges_s), rel=1e-6)
    assert sum(s > 0 for s in exchanges_s) == 2 * model.num_blocks


def test_a_record_counts_samples_of_groups_and_operations_of_all_ranks() -> None:
    model, box = shared_decoder(8), known_machine("h100-80gb-x8")
    whole = simulate(shared_plan(model, sequence_ranks=1), model, box)
    shared = simulate(shared_plan(model), model, box)
    assert whole.num_samples == 8 * model.num_samples == 8 * shared.num_samples
    assert whole.num_tokens == 8 * shared.num_tokens
    assert shared.question is not None
    assert shared.question.num_samples == shared.num_samples
    assert whole.model_flops is not None
    # A rank's part of one batch is an eighth of its operations, rounded down.
    assert shared.model_flops == pytest.approx(whole.model_flops / 8, rel=1e-3)
    assert {timing.kind for timing in shared.tasks} - {timing.kind for timing in whole.tasks} == {EXCHANGE}


# -- searched --------------------------------------------------------------------------------------------------------


@given(st.data())
@settings(max_examples=examples(60, 5), deadline=None)
def test_the_search_finds_what_brute_force_finds(data: st.DataObject) -> None:
    """Over all modes, numbers of ranks that share, and recomputed blocks: steps of equally many samples."""
    planned = data.draw(parallel_workloads(max_blocks=2, measured=None))
    box = data.draw(nodes())
    model = data.draw(shared_workloads(planned.workload, (2, 4)))
    model = changed(model, measured_on=box.name)
    space = SearchSpace(
        chunk_bytes=(2048,), n_buffer=(6,), prefetch_depth=(1,), n_persist=(0, 1, 2), n_shard=(0,), n_host_stepped=(0,)
    )
    micro_batches = data.draw(st.sampled_from((1, 2)))
    modes = (ParallelMode.REPLICATED, ParallelMode.SHARDED)
    costs = CostModel.of(model, box, num_ranks=RANKS)
    contention = ContentionModel.of(box, num_ranks=RANKS)
    layout = layout_of(model, 2048)
    found: dict[str, float] = {}
    for mode, number, n_persist, n_checkpoint in product(
        modes, (1, 2, 4), range(min(3, len(layout.chunks))), range(model.num_blocks + 1)
    ):
        chosen = Plan(
            workload_id=model.identity,
            chunk_bytes=2048,
            n_persist=n_persist,
            n_buffer=6,
            n_checkpoint=n_checkpoint,
            micro_batches=micro_batches * number,
            parallel=mode,
            num_ranks=RANKS,
            sequence_ranks=number,
        )
        if layout.min_buffers(n_persist) > 6:
            continue
        schedule = compile_schedule(chosen, model, layout)
        found[chosen.identity] = simulate_timing(schedule, costs.durations_s(schedule), contention).iteration_s
    if not found or min(found.values()) == 0:
        return
    request = fastest_request(
        workload=model,
        hardware=box,
        space=space,
        step=Step(num_ranks=RANKS, modes=modes, micro_batches=micro_batches),
        device_budget_bytes=2**40,
        host_budget_bytes=2**40,
    )
    result = search(replace(request, effort=replace(request.effort, tolerance_frac=0.0)))
    assert result.prediction.iteration_s == pytest.approx(min(found.values()), rel=1e-6)


def _request(model: Workload, **wanted: Any) -> SearchRequest:
    step = Step(num_ranks=8, modes=(ParallelMode.SHARDED,))
    return fastest_request(workload=model, hardware=known_machine("h100-80gb-x8"), **{"step": step} | wanted)


def test_ranks_share_sequences_where_that_is_faster_or_where_nothing_else_fits() -> None:
    cheap, dear = shared_decoder(8, exchanged_bytes=1), shared_decoder(8, exchanged_bytes=2**34)
    for model, space, shared in (
        (dear, SearchSpace(), 1),
        (cheap, SearchSpace(sequence_ranks=8), 8),
        (dear, SearchSpace(sequence_ranks=8), 8),
        (cheap, SearchSpace(sequence_ranks=1), 1),
    ):
        assert search(_request(model, space=space)).plan.sequence_ranks == shared


def test_steps_that_are_compared_have_equally_many_samples() -> None:
    model = shared_decoder(2, 8)
    for space, expected in (
        (SearchSpace(), {1: 3, 2: 6, 8: 24}),
        (SearchSpace(sequence_ranks=(2, 8)), {2: 3, 8: 12}),
        (SearchSpace(sequence_ranks=8), {8: 3}),
    ):
        step = Step(num_ranks=8, modes=(ParallelMode.SHARDED,), micro_batches=3)
        request = _request(model, space=space, step=step)
        least = min(expected)
        for number, micro_batches in expected.items():
            only = replace(request, space=SearchSpace(sequence_ranks=tuple({least, number})))
            assert only.micro_batches_of(number, 3) == micro_batches
        found = search_batches(request)
        plan = found.result.plan
        assert plan.micro_batches == expected[plan.sequence_ranks]
        assert found.global_batch_size == 3 * 8 // least * model.num_samples
        assert found.result.prediction.num_samples == found.global_batch_size


def test_ranks_that_nobody_traced_or_that_make_no_groups_are_refused() -> None:
    model = shared_decoder(8)
    with pytest.raises(PlanError, match=r"sequence_ranks: 4, .* knows 1, 8. Trace the model with that number"):
        search(_request(model, space=SearchSpace(sequence_ranks=4)))
    with pytest.raises(PlanError, match=r"sequence_ranks: 3 does not divide num_ranks 8 .* Choose from 1, 2, 4, 8"):
        _request(model, space=SearchSpace(sequence_ranks=3))
    with pytest.raises(PlanError, match="sequence_ranks: 8 with parallel single"):
        fastest_request(
            workload=model, hardware=known_machine("h100-80gb-x8"), space=SearchSpace(sequence_ranks=8), step=Step()
        )
    # Numbers that the ranks do not allow are left out where none is named.
    of_two = _request(model, step=Step(num_ranks=2, modes=(ParallelMode.SHARDED,)))
    assert search(of_two).plan.sequence_ranks == 1


def test_a_mode_has_plans_where_one_of_its_spaces_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever number of ranks that share sequences has none."""
    laid_out = Spaces.problem
    refused: set[int] = set()

    def problem(spaces: Spaces, request: SearchRequest, workload: Workload, step: StepSpec, *rest: Any) -> Any:
        if step.sequence_ranks in refused:
            raise PlanError(f"none of {step.sequence_ranks}")
        return laid_out(spaces, request, workload, step, *rest)

    monkeypatch.setattr(Spaces, "problem", problem)
    request = _request(shared_decoder(8))
    for none, left in ((8, 1), (1, 8)):
        refused.add(none)
        assert search(request).plan.sequence_ranks == left
        refused.clear()
    refused.update((1, 8))
    with pytest.raises(PlanError, match="none of"):
        search(request)


def test_other_systems_share_sequences_too() -> None:
    model = shared_decoder(8)
    request = _request(model, space=SearchSpace(sequence_ranks=8), baselines=())
    result = search(request)
    assert result.baselines
    for other in result.baselines:
        assert other.plan.sequence_ranks == 8
        assert other.num_samples == result.prediction.num_samples == model.num_samples
