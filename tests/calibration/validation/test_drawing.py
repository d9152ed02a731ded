"""Plans by chance: all kinds of them, all can be carried out, and within a budget they fill it."""

from __future__ import annotations

from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from protwin.calibration.fitting.measurement_plans import bootstrap_plans
from protwin.calibration.validation.drawing import Draw, draw_plans, guaranteed_bytes, plan_words
from protwin.runtime.timing.within_budget import least_plan
from protwin.shared.compile.compile import compile_schedule
from protwin.shared.phases.block_profile import SelectiveRecomputation
from protwin.shared.schema.plan import ActivationMode, ParallelMode, ProjectionPlace
from protwin.shared.schema.schedule import OF_OWNERS, TaskKind
from protwin.shared.schema.workload import Workload
from protwin.shared.verify.verify import verify_schedule
from tests.calibration.fitting.test_budgeted import swappable
from tests.calibration.fitting.test_fit import a_workload
from tests.proof_size import examples
from tests.shared.verify.test_osft import factorised
from tests.strategies.pairs import bypass_workloads
from tests.strategies.subspaces import projected_workloads
from tests.strategies.tilings import with_tilings
from tests.strategies.workloads import workloads


@given(
    workloads(max_blocks=4) | bypass_workloads(max_pairs=3),
    st.integers(0, 2**20),
    st.sampled_from((1, 1, 2, 3)),
    st.booleans(),
)
@settings(max_examples=examples(300, 20), deadline=None, phases=[Phase.generate])
def test_every_plan_can_be_carried_out(workload: Workload, seed: int, num_ranks: int, has_disk: bool) -> None:
    draw = Draw(seed=seed, num_ranks=num_ranks, has_disk=has_disk and num_ranks == 1)
    fitted = bootstrap_plans(workload, num_ranks=num_ranks)
    drawn = draw_plans(workload, draw, number=4, without=fitted)
    assert drawn == draw_plans(workload, draw, number=4, without=fitted)
    assert len(set(drawn)) == len(drawn)
    assert not set(drawn) & set(fitted)
    for plan in drawn:
        assert plan.num_ranks == num_ranks
        verify_schedule(compile_schedule(plan, workload), plan, workload)
        assert plan_words(plan, workload)


@given(projected_workloads(max_blocks=3), st.integers(0, 2**20), st.booleans())
@settings(max_examples=examples(200, 10), deadline=None, phases=[Phase.generate])
def test_every_plan_of_projections_can_be_carried_out(workload: Workload, seed: int, has_disk: bool) -> None:
    fitted = bootstrap_plans(workload, has_disk=has_disk)
    for plan in (*fitted, *draw_plans(workload, Draw(seed=seed, has_disk=has_disk), number=4, without=fitted)):
        verify_schedule(compile_schedule(plan, workload), plan, workload)
        is_on_device = plan.projects_gradients_on is ProjectionPlace.DEVICE
        assert ("projected on the device" in plan_words(plan, workload)) is is_on_device


@given(st.data(), st.integers(0, 2**20))
@settings(max_examples=examples(100, 10), deadline=None, phases=[Phase.generate])
def test_every_plan_in_tiles_can_be_carried_out(data: st.DataObject, seed: int) -> None:
    """Tiles that the workload knows come, and no others."""
    workload = data.draw(with_tilings(data.draw(workloads(max_blocks=3))))
    mlp = {1, *(tiling.mlp_tiles for tiling in workload.tilings)}
    loss = {1, *(tiling.loss_tiles for tiling in workload.loss_tilings)}
    drawn = draw_plans(workload, Draw(seed=seed), number=40)
    assert {plan.mlp_tiles for plan in drawn} == mlp
    assert {plan.loss_tiles for plan in drawn} == loss
    for plan in drawn[:4]:
        verify_schedule(compile_schedule(plan, workload), plan, workload)
        assert (f"loss in {plan.loss_tiles}" in plan_words(plan, workload)) is (plan.loss_tiles > 1)
        assert (f"MLPs in {plan.mlp_tiles}" in plan_words(plan, workload)) is (plan.mlp_tiles > 1)


def test_every_kind_of_projection_comes() -> None:
    workload = factorised()
    kinds = {kind for kind in TaskKind if "projection" in kind}
    drawn = draw_plans(workload, Draw(has_disk=True), number=60)
    for plans in (drawn, bootstrap_plans(workload)):
        assert kinds <= {task.kind for plan in plans for task in compile_schedule(plan, workload).tasks}
        assert {plan.projects_gradients_on for plan in plans} == set(ProjectionPlace)
    assert any(plan.n_disk and plan.projects_gradients_on is ProjectionPlace.HOST for plan in drawn)
    assert any(plan.micro_batches > 1 and plan.projects_gradients_on is ProjectionPlace.DEVICE for plan in drawn)


def keeping_results(workload: Workload) -> Workload:
    """A tenth of what each forward saves are results that may be kept, and that all take as long as the rest."""
    profiles = []
    for profile in workload.profiles:
        again, kept_bytes = profile.recompute, profile.forward.net_bytes // 10
        curve = ((1.0, profile.checkpoint_forward.peak_bytes + kept_bytes),)
        less = again.model_copy(update={"net_bytes": again.net_bytes - kept_bytes})
        kept = {"product_stride": 1, "kept_bytes": kept_bytes, "forward_curve": curve, "recompute": less}
        profiles.append(profile.model_copy(update={"selective": (SelectiveRecomputation.model_validate(kept),)}))
    return workload.model_copy(update={"profiles": tuple(profiles)})


def test_every_kind_of_plan_comes() -> None:
    workload = keeping_results(swappable(a_workload(6)))
    drawn = draw_plans(workload, Draw(has_disk=True), number=60)
    assert len(drawn) == 60
    kinds = {task.kind for plan in drawn for task in compile_schedule(plan, workload).tasks}
    of_ranks = {TaskKind.ALL_GATHER, TaskKind.REDUCE_SCATTER, TaskKind.ALL_REDUCE, TaskKind.RECEIVE, TaskKind.SEND}
    of_methods = {TaskKind.TEACHER_FORWARD, TaskKind.LOSS, *OF_OWNERS}
    of_ranks |= {TaskKind.SEQUENCE_EXCHANGE}
    of_methods |= {kind for kind in TaskKind if "projection" in kind}
    assert kinds == set(TaskKind) - of_ranks - of_methods
    mixtures = {frozenset(plan.activation_modes or ()) for plan in drawn}
    others = frozenset(ActivationMode) - {ActivationMode.SELECTIVE}
    pairs = {frozenset({ActivationMode.KEEP, mode}) for mode in (ActivationMode.SWAP, ActivationMode.SELECTIVE)}
    assert {others, *pairs} <= mixtures
    assert {plan.micro_batches for plan in drawn} == {1, 2, 3}
    assert any(plan.num_kept == 0 for plan in drawn)
    together = draw_plans(workload, Draw(num_ranks=2), number=40)
    assert {plan.parallel for plan in together} == set(ParallelMode) - {ParallelMode.SINGLE}


@given(st.integers(3, 6), st.integers(0, 2**20), st.floats(0, 1))
@settings(max_examples=examples(100, 6), deadline=None, phases=[Phase.generate])
def test_plans_within_a_budget_fill_it(num_blocks: int, seed: int, share: float) -> None:
    """However small it is, as long as one plan fits; plans that are drawn and thrown away would hardly ever."""
    workload = swappable(a_workload(num_blocks))
    _, least_bytes = least_plan(workload)
    most_bytes = max(guaranteed_bytes(plan, workload) for plan in bootstrap_plans(workload))
    budget_bytes = round(least_bytes + share * (most_bytes - least_bytes))
    drawn = draw_plans(workload, Draw(seed=seed, device_budget_bytes=budget_bytes), number=5)
    needs = [guaranteed_bytes(plan, workload) for plan in drawn]
    assert all(need <= budget_bytes for need in needs)
    if share > 0.1:
        assert len(drawn) == 5
        assert max(needs) > 0.5 * budget_bytes
    anything = draw_plans(workload, Draw(seed=seed), number=20)
    if share < 0.1:
        assert sum(guaranteed_bytes(plan, workload) <= budget_bytes for plan in anything) < 10, "the wrong variant"


def test_below_every_need_there_are_no_plans() -> None:
    workload = a_workload(3)
    _, least_bytes = least_plan(workload)
    assert draw_plans(workload, Draw(device_budget_bytes=least_bytes - 1), number=3) == ()
