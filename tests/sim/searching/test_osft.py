"""Searches for plans of orthogonal subspace fine-tuning: bounded, replayed and found like those of full training."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn

from protwin.shared.basics.errors import PlanError
from protwin.shared.compile.compile import OSFT as POLICIES
from protwin.shared.layout.layout import layout_of, why_not_on_device
from protwin.shared.methods.osft import OSFT
from protwin.shared.schema.optimizer import HostGradients
from protwin.shared.schema.plan import ParallelMode, ProjectionPlace, TrainingMethod, why_not_held
from protwin.shared.schema.workload import DType
from protwin.shared.verify.guaranteed_peak import guaranteed_device_peak
from protwin.sim.bounds.replay import REPLAY_FRAC
from protwin.sim.costs.contention import ContentionModel
from protwin.sim.costs.task_costs import CostModel
from protwin.sim.searching.request import Step
from protwin.sim.searching.search import search
from protwin.sim.space.enumerate import enumerate_space
from protwin.sim.space.space import SearchSpace
from protwin.sim.space.step_spec import StepSpec
from tests.proof_size import examples
from tests.shared.verify.test_osft import factorised
from tests.sim import brute_force
from tests.sim.bound_cases import Case, case, on_a_machine
from tests.sim.fastest import fastest_request
from tests.sim.hand_made import machine
from tests.sim.ranked_cases import nodes
from tests.sim.searching.test_rank_batches import pair
from tests.strategies.plans import PlannedWorkload
from tests.strategies.subspaces import projected_plans, projected_workloads

PARAMETERS, FLOAT32 = HostGradients.PARAMETERS, HostGradients.FLOAT32


@st.composite
def cases(draw: DrawFn) -> Case:
    """Plans of one rank on any machine."""
    found: PlannedWorkload = draw(projected_plans(max_blocks=3, modes=(None, ParallelMode.DDP)))
    knobs = {
        "activation_modes": None,
        "n_selective": 0,
        "parallel": ParallelMode.SINGLE,
        "num_ranks": 1,
        "n_checkpoint": 0,
        "n_offload_input": 0,
        "n_swap": 0,
    }
    chosen = found.plan.model_copy(update=knobs)
    return draw(on_a_machine(found.workload, chosen, found.layout, POLICIES, has_disk=chosen.n_disk_state > 0))


@st.composite
def cases_in_parts(draw: DrawFn) -> Case:
    """Plans of ranks that have chunks in parts on their devices, on any machine of several."""
    found: PlannedWorkload = draw(projected_plans(max_blocks=2, modes=(ParallelMode.SHARDED,)))
    plan = found.plan.model_copy(
        update={"activation_modes": None, "n_selective": 0, "n_checkpoint": 0, "n_offload_input": 0, "n_swap": 0}
    )
    box, num_ranks = draw(nodes()), plan.num_ranks
    own = CostModel.of(found.workload.model_copy(update={"measured_on": box.name}), box, num_ranks=num_ranks)
    costs = CostModel(own.hardware, use_measured=True, together=box).among(num_ranks, plan.shard_ranks)
    return case(found.workload, plan, found.layout, costs, ContentionModel.of(box, num_ranks=num_ranks), OSFT.policies)


@settings(max_examples=examples(600, 11))
@given(cases() | cases_in_parts())
def test_bounds_hold_and_peaks_and_replays_are_exact(found: Case) -> None:
    assert found.exact_peak_bytes() == guaranteed_device_peak(found.schedule).size_bytes
    assert found.memory_bound_bytes() <= found.exact_peak_bytes()
    timing = found.simulated()
    assume(timing.is_steady)
    assert found.work_bound_s() <= timing.iteration_s
    assert found.time_bound_s() <= timing.iteration_s
    replayed_s = found.replayed_s()
    if replayed_s == replayed_s:
        assert timing.iteration_s * REPLAY_FRAC <= replayed_s * (1 + 1e-9)
        assert replayed_s == pytest.approx(timing.iteration_s, rel=1e-4)


@settings(max_examples=examples(150, 5))
@given(
    brute_force.cases(OSFT, projected_workloads(max_blocks=1))
    | brute_force.cases_with_disk(OSFT, projected_workloads(max_blocks=1)),
    st.floats(0, 1),
)
def test_the_search_tries_both_places_and_finds_what_brute_force_finds(found: brute_force.Case, share: float) -> None:
    outcomes = list(found.outcomes)
    layouts = [layout_of(found.workload, size) for size in found.space.chunk_bytes or ()]
    is_held = why_not_held(found.step.host_gradients, found.step.micro_batches) is None
    if is_held and all(why_not_on_device(layout) is None for layout in layouts):
        step = replace(found.step, projects_gradients_on=ProjectionPlace.DEVICE)
        knobs = found.workload, found.hardware, found.calibration, found.space, step
        outcomes += brute_force.brute_force(*knobs, OSFT)
    every = replace(found, outcomes=tuple(outcomes))
    peaks = sorted({outcome.device_bytes for outcome in outcomes})
    budget_bytes = peaks[round(share * (len(peaks) - 1))]
    best_s = min(outcome.iteration_s for outcome in every.feasible(budget_bytes))
    assume(best_s > 0)
    result = every.search(budget_bytes)
    assert result.prediction.iteration_s == best_s
    chosen = next(outcome for outcome in outcomes if outcome.plan == result.plan)
    assert chosen.device_bytes <= budget_bytes


# -- one model -------------------------------------------------------------------------------------------------------


def test_gradients_are_projected_where_it_is_faster() -> None:
    """A host that multiplies slowly leaves it to the device, and one that does so at once spares the device's time."""
    model = factorised()
    space = SearchSpace(chunk_bytes=600, n_persist=0, n_host_stepped=0, n_buffer=4, prefetch_depth=1, n_checkpoint=0)
    for rate, place in ((1.0, ProjectionPlace.DEVICE), (1e15, ProjectionPlace.HOST)):
        box = machine(gather_s=0.05, offload_s=0.07, cpu_adam_s=0.03)
        slow = {"peak_flop_per_s": {"float32": 1e3}, "vector_flop_per_s": 1e3}
        box = box.model_copy(
            update={
                "host": box.host.model_copy(update={"matrix_flop_per_s": rate}),
                "device": box.device.model_copy(update=slow),
            }
        )
        result = search(fastest_request(workload=model, hardware=box, space=space))
        assert result.plan.projects_gradients_on is place
        assert result.plan.method is TrainingMethod.OSFT


@pytest.mark.parametrize(("sort", "place"), [(PARAMETERS, ProjectionPlace.DEVICE), (FLOAT32, ProjectionPlace.HOST)])
def test_gradients_of_several_micro_batches_leave_once_where_that_is_faster(
    sort: HostGradients, place: ProjectionPlace
) -> None:
    """The way to the host is what takes time: it is gone once instead of thrice, unless sums are to be in float32."""
    box = machine(gather_s=0.05, offload_s=700.0, cpu_adam_s=0.03)
    fast = {"peak_flop_per_s": dict.fromkeys(("float32", "bfloat16"), 1e15), "vector_flop_per_s": 1e15}
    box = box.model_copy(
        update={
            "host": box.host.model_copy(update={"matrix_flop_per_s": 1e15}),
            "device": box.device.model_copy(update=fast),
        }
    )
    space = SearchSpace(chunk_bytes=600, n_persist=0, n_host_stepped=0, n_buffer=4, prefetch_depth=1, n_checkpoint=0)
    step = Step(micro_batches=3, host_gradients=sort)
    result = search(fastest_request(workload=factorised(dtype=DType.BFLOAT16), hardware=box, space=space, step=step))
    assert result.plan.projects_gradients_on is place
    assert result.plan.host_gradients is sort
    with pytest.raises(PlanError, match="added up there, in the parameters' own type"):
        StepSpec(3, host_gradients=FLOAT32, projects_gradients_on=ProjectionPlace.DEVICE)


def test_ranks_that_share_chunks_have_none_with_subspaces_on_hosts() -> None:
    """Every plan of the space compiles; what is left out is refused by name."""
    model = factorised()
    step = StepSpec(parallel=ParallelMode.SHARDED, num_ranks=2)
    grids = enumerate_space(model, SearchSpace(chunk_bytes=600), step)
    layout = layout_of(model, 600)
    counts = {tuple(places) for grid in grids for places in grid.places.counts.tolist()}
    assert counts
    assert all(sum(places) >= layout.num_owned for places in counts)
    with pytest.raises(PlanError, match=r"cannot lie on hosts in parts, .* count fewer than the first 7 chunks"):
        enumerate_space(model, SearchSpace(chunk_bytes=600, n_persist=0, n_shard=2), step)
    result = search(fastest_request(workload=model, hardware=pair(), step=Step(num_ranks=2, modes=(step.parallel,))))
    assert result.plan.parallel is ParallelMode.SHARDED
    assert result.plan.n_persist + result.plan.n_shard >= layout_of(model, result.plan.chunk_bytes).num_owned
