"""The search over modes and sizes of the micro-batch against a simulation of every plan of all of them."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protwin.shared.answers.search_result import BatchSearchResult, SearchResult
from protwin.shared.basics.errors import HardwareError, InfeasibleError, PlanError
from protwin.shared.compile.compile import compile_schedule
from protwin.shared.layout.layout import build_layout
from protwin.shared.schema.hardware import Hardware, Link, Node, Topology
from protwin.shared.schema.plan import ParallelMode, Plan
from protwin.shared.verify.guaranteed_peak import guaranteed_device_peak
from protwin.sim.costs.contention import ContentionModel
from protwin.sim.costs.task_costs import CostModel
from protwin.sim.engine.simulator import simulate_timing
from protwin.sim.searching.request import Effort, GlobalBatch, Step, divisors
from protwin.sim.searching.search import search_batches
from protwin.sim.space.space import SearchSpace
from protwin.sim.space.step_spec import SEVERAL
from tests.proof_size import examples
from tests.sim.fastest import fastest_request
from tests.sim.hand_made import machine, workload
from tests.sim.searching.test_batch_search import at_size

RANKS = 2
SPACE = SearchSpace(
    chunk_bytes=(256,), n_persist=(0, 1, 3), n_shard=(0, 1), n_buffer=(2,), prefetch_depth=(1, 2), n_checkpoint=(0, 3)
)


def pair(*, between_bytes_per_s: float = 500.0) -> Hardware:
    """Two slow devices with a link between them."""
    node = Node(
        name="pair",
        num_devices=RANKS,
        sockets=(RANKS,),
        pcie_roots=(1, 1),
        topology=Topology.SWITCH,
        device_link=Link(name="between", latency_s=0.01, bandwidth_bytes_per_s=between_bytes_per_s),
    )
    return machine(cpu_adam_s=0.5).model_copy(update={"node": node})


def every_plan(
    global_batch: int, fixed_s: float, budget_bytes: int, box: Hardware
) -> dict[tuple[int, ParallelMode], float]:
    """The shortest iteration of each size and mode that has a plan which fits, all of them simulated."""
    found: dict[tuple[int, ParallelMode], float] = {}
    costs, contention = None, ContentionModel.of(box, num_ranks=RANKS)
    knobs = (SPACE.n_persist or (), SPACE.n_shard or (), SPACE.prefetch_depth or (), SPACE.n_checkpoint or ())
    for size in range(1, global_batch // RANKS + 1):
        if global_batch % (size * RANKS):
            continue
        model = at_size(workload(3), size, fixed_s)
        layout = build_layout(model.parameters, num_blocks=model.num_blocks, chunk_bytes=256)
        costs = CostModel.of(model, box, num_ranks=RANKS)
        for mode, n_persist, n_shard, depth, n_checkpoint in product(SEVERAL, *knobs):
            if (n_persist == len(layout.chunks)) != (mode is ParallelMode.DDP):
                continue
            if n_shard and mode is not ParallelMode.SHARDED:
                continue
            plan = Plan(
                workload_id=model.identity,
                chunk_bytes=256,
                n_persist=n_persist,
                n_shard=n_shard,
                n_buffer=2,
                prefetch_depth=depth,
                n_checkpoint=n_checkpoint,
                micro_batches=global_batch // RANKS // size,
                parallel=mode,
                num_ranks=RANKS,
            )
            schedule = compile_schedule(plan, model, layout)
            if guaranteed_device_peak(schedule).size_bytes > budget_bytes:
                continue
            time_s = simulate_timing(schedule, costs.durations_s(schedule), contention).iteration_s
            found[size, mode] = min(time_s, found.get((size, mode), time_s))
    return found


EXACT = Effort(tolerance_frac=0.0)


def run(
    global_batch: int,
    fixed_s: float,
    budget_bytes: int,
    box: Hardware,
    *,
    num_ranks: int = RANKS,
    effort: Effort = EXACT,
) -> BatchSearchResult:
    return search_batches(
        fastest_request(
            workload=GlobalBatch(
                num_samples=global_batch, workload_at=lambda size: at_size(workload(3), size, fixed_s)
            ),
            hardware=box,
            device_budget_bytes=budget_bytes,
            space=SPACE,
            step=Step(num_ranks=num_ranks),
            effort=effort,
        )
    )


@given(
    st.sampled_from((2, 4, 6)),
    st.floats(0, 1),
    st.integers(3000, 16_000),
    st.sampled_from((50.0, 500.0, 1e6)),
)
@settings(max_examples=examples(60, 6))
def test_it_finds_what_a_simulation_of_every_plan_finds(
    global_batch: int, fixed_s: float, budget_bytes: int, between: float
) -> None:
    box = pair(between_bytes_per_s=between)
    times_s = every_plan(global_batch, fixed_s, budget_bytes, box)
    if not times_s:
        with pytest.raises(InfeasibleError, match="of the global batch"):
            run(global_batch, fixed_s, budget_bytes, box)
        return
    found = run(global_batch, fixed_s, budget_bytes, box)
    plan, best_s = found.result.plan, min(times_s.values())
    assert found.result.prediction.iteration_s == best_s
    assert times_s[found.micro_batch_size, plan.parallel] == best_s
    assert plan.micro_batches * found.micro_batch_size * RANKS == global_batch
    assert found.result.prediction.num_tokens == 2 * global_batch
    certificate = found.result.certificate
    assert certificate.is_certified
    assert certificate.shortest_possible_s <= best_s
    assert [choice.micro_batch_size for choice in found.choices] == list(divisors(global_batch // RANKS))
    for choice in found.choices:
        of_size = [time_s for (size, _), time_s in times_s.items() if size == choice.micro_batch_size]
        assert choice.shortest_possible_s is not None or not of_size
        if choice.shortest_possible_s is not None and of_size:
            assert choice.shortest_possible_s <= min(of_size)
    assert tuple(mode.parallel for mode in found.result.modes) == SEVERAL
    for one in found.result.modes:
        of_mode = [time_s for (_, mode), time_s in times_s.items() if mode is one.parallel]
        assert (one.shortest_possible_s is None) == bool(one.reason)
        assert one.shortest_possible_s is not None or not of_mode
        if one.shortest_possible_s is not None and of_mode:
            assert one.shortest_possible_s <= min(of_mode)
    assert sum(one.num_candidates for one in found.result.modes) == certificate.num_candidates
    assert found.result.batch is not None
    assert found.result.batch.choices == found.choices
    assert SearchResult.model_validate_json(found.result.model_dump_json()) == found.result


def test_one_size_alone_would_miss_the_best() -> None:
    """The wrong variant: a search at the largest size that fits somewhere, or of one mode."""
    box = pair()
    times_s = every_plan(4, 0.5, 9000, box)
    found = run(4, 0.5, 9000, box)
    assert found.result.prediction.iteration_s == min(times_s.values())
    assert len({size for size, _ in times_s}) > 1
    assert any(time_s > 1.05 * min(times_s.values()) for time_s in times_s.values())


def test_a_cap_ends_the_search_with_something_that_fits() -> None:
    found = run(6, 0.5, 9000, pair(), effort=Effort(max_replays=1))
    assert found.result.prediction.guaranteed_peak_device_bytes <= 9000
    whole = run(6, 0.5, 9000, pair(), effort=Effort())
    assert found.result.prediction.iteration_s >= whole.result.certificate.shortest_possible_s


@pytest.mark.parametrize(
    ("global_batch", "words"),
    [
        (1, "2 ranks cannot share a global batch of 1 evenly. Choose a global batch of 2, or 1 rank\\."),
        (7, "Choose a global batch of 6 or 8, or 1 or 7 ranks"),
        (0, "must be at least 1"),
    ],
)
def test_batches_that_cannot_be_shared_name_the_nearest_that_can(global_batch: int, words: str) -> None:
    with pytest.raises(PlanError, match=words):
        run(global_batch, 0.0, 10**6, pair())


def test_more_ranks_than_devices_are_refused() -> None:
    with pytest.raises(HardwareError, match="4 ranks do not fit"):
        run(8, 0.0, 10**6, pair(), num_ranks=4)
