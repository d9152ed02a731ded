"""A sweep beside searches of its points, one by one."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import product

import pytest

from protwin.shared.answers.plan_kind import PlanKind
from protwin.shared.basics.errors import ProtwinError
from protwin.shared.basics.progress import no_progress
from protwin.shared.catalogue.machines import machine, override_hardware
from protwin.shared.schema.hardware import Hardware
from protwin.shared.schema.plan import ParallelMode
from protwin.shared.sweeps.sweep import SweepPoint
from protwin.sim.commands.model_choice import ModelChoice, PredictedTraining
from protwin.sim.engine.simulator import simulate
from protwin.sim.questions.sweep import Shape, SweepRequest, _ToDo, search_point, sweep
from protwin.sim.searching.least_memory import some_plan_fits
from protwin.sim.searching.problem import search_problem
from protwin.sim.searching.request import SearchRequest, Step
from protwin.sim.searching.search import search_batches
from protwin.sim.space.space import SearchSpace

SMALL = override_hardware(machine("rtx-3090"), {"device.memory_bytes": "3700MiB", "host.memory_bytes": "9GiB"})
FEW: list[Shape] = [(1, 256), (8, 1024)]
MANY: list[Shape] = [(size, length) for length, size in product((256, 1024), (1, 8, 64, 1024))]


def request_of(hardware: Hardware = SMALL, step: Step | None = None) -> SweepRequest:
    choice = ModelChoice(
        name="gpt2",
        batch_size=1,
        sequence_length=256,
        dtype=None,
        training=PredictedTraining(),
        device=hardware.device,
        has_cache=False,
    )
    return SweepRequest(
        workload_at=choice.at,
        workload_in_tiles=choice.with_needed_tiles.at,
        tiles=choice.tiles,
        request=SearchRequest(workload=choice.workload(), hardware=hardware, step=step or Step()),
    )


def found_at(shapes: list[Shape], num_processes: int = 1) -> dict[Shape, SweepPoint]:
    found, is_complete = sweep(request_of(), shapes, num_processes=num_processes, on_progress=no_progress)
    assert is_complete
    assert [(one.batch_size, one.sequence_length) for one in found] == shapes
    return dict(zip(shapes, found, strict=True))


@pytest.fixture(scope="module")
def few() -> dict[Shape, SweepPoint]:
    return found_at(FEW)


@pytest.fixture(scope="module")
def many() -> dict[Shape, SweepPoint]:
    return found_at(MANY)


def request_at(shape: Shape, point: SweepPoint) -> SearchRequest:
    """The search that answers for a point: in tiles where nothing fits whole."""
    asked = request_of()
    plan = None if point.found is None else point.found.plan
    is_tiled = plan is not None and (plan.mlp_tiles, plan.loss_tiles) != (1, 1)
    workload = asked.workload_in_tiles(*shape) if is_tiled else asked.workload_at(*shape)
    return replace(asked.request, workload=workload)


def check_found(points: dict[Shape, SweepPoint]) -> None:
    for shape, point in points.items():
        request = request_at(shape, point)
        if point.found is None:
            assert point.reason
            assert not some_plan_fits(search_problem(replace(request, margin_frac=0.0))), "not even by the least memory"
            continue
        result = search_batches(request).result
        assert point.found.plan == result.plan
        assert point.found.iteration_s == result.prediction.iteration_s
        assert point.num_tokens == shape[0] * shape[1] == result.prediction.num_tokens
        assert point.found.tokens_per_s == pytest.approx(point.num_tokens / point.found.iteration_s)
        assert point.found.mfu_frac == result.prediction.mfu_frac


def check_unlimited(points: dict[Shape, SweepPoint]) -> None:
    """Beside a machine that has the memory, with every size of chunks, and the plan's recomputation by hand.

    Each search may be 0.5 % from the best.
    """
    large = override_hardware(SMALL, {"device.memory_bytes": "4TiB", "host.memory_bytes": "4TiB"})
    for shape, point in points.items():
        if point.found is None:
            assert point.unlimited_s is None
            continue
        workload, plan = request_at(shape, point).smallest_workload(), point.found.plan
        best = search_batches(SearchRequest(workload=workload, hardware=large)).result
        assert best.plan_kind is PlanKind.RESIDENT
        assert point.unlimited_s == pytest.approx(best.prediction.iteration_s, rel=0.01)
        knobs = ("n_checkpoint", "n_selective", "product_stride", "mlp_tiles", "loss_tiles")
        recomputing = {knob: getattr(plan, knob) for knob in knobs}
        own_s = simulate(best.plan.model_copy(update=recomputing), workload, large).iteration_s
        assert point.same_recomputation_s == pytest.approx(own_s, rel=0.01)


def test_points_have_the_plans_that_searches_recommend(few: dict[Shape, SweepPoint]) -> None:
    assert [one.found and one.found.plan_kind for one in few.values()] == [PlanKind.RESIDENT, PlanKind.OFFLOADED]
    check_found(few)
    check_unlimited(few)
    assert few[1, 256].on_device == few[1, 256].found


def test_what_selective_plans_recompute_is_less_than_checkpointed_ones() -> None:
    """The plan of a search that may keep every second product, and what its recomputation costs, by hand."""
    shape, hardware = (4, 1024), override_hardware(SMALL, {"device.memory_bytes": "6GiB"})
    asked = request_of(hardware)
    one_size = {"chunk_bytes": (64 * 2**20,), "prefetch_depth": (1,)}
    request = replace(asked.request, space=SearchSpace.model_validate({"product_stride": (2,), **one_size}))
    point = search_point(replace(asked, request=request, unlimited_chunk_bytes=64 * 2**20), shape)
    workload = asked.workload_at(*shape)
    result = search_batches(replace(request, workload=workload)).result
    assert point.found is not None
    assert point.found.plan == result.plan
    assert (point.found.plan.n_selective, point.found.plan.product_stride) == (point.found.plan.n_checkpoint, 2)
    large = override_hardware(hardware, {"device.memory_bytes": "4TiB", "host.memory_bytes": "4TiB"})
    of_size = SearchSpace.model_validate(one_size | {"n_checkpoint": (0,)})
    resident = search_batches(SearchRequest(workload=workload, hardware=large, space=of_size)).result.plan
    recomputing = {"n_checkpoint": result.plan.n_checkpoint}
    keeping = {"n_selective": result.plan.n_selective, "product_stride": 2}
    whole_s, selective_s = (
        simulate(resident.model_copy(update=knobs), workload, large).iteration_s
        for knobs in (recomputing, recomputing | keeping)
    )
    assert point.same_recomputation_s == pytest.approx(selective_s, rel=0.01)
    assert selective_s < 0.97 * whole_s


@pytest.mark.slow
def test_many_points_have_the_plans_that_searches_recommend(many: dict[Shape, SweepPoint]) -> None:
    check_found(many)
    check_unlimited(many)
    assert [shape for shape, one in many.items() if not one.is_searched] == [(1024, 1024)]
    assert sum(one.is_free for one in many.values()) >= 2
    assert sum(one.offloads and not one.is_free for one in many.values()) >= 2


@pytest.mark.slow
def test_plans_on_the_device_are_the_best_of_their_kinds(many: dict[Shape, SweepPoint]) -> None:
    """Beside a search over every size of chunks, all of which stay on the device: they have no buffers."""
    assert any(one.offloads and one.on_device is not None for one in many.values())
    for shape, point in many.items():
        if point.found is None:
            continue
        try:
            best = search_batches(replace(request_at(shape, point), space=SearchSpace(n_buffer=(0,)))).result
        except ProtwinError:
            assert point.on_device is None
            continue
        assert not best.plan_kind.uses_host
        assert point.on_device is not None
        assert point.on_device.iteration_s == pytest.approx(best.prediction.iteration_s, rel=0.01)


@pytest.mark.slow
def test_processes_find_the_same_points(many: dict[Shape, SweepPoint]) -> None:
    shapes = [shape for shape in MANY if many[shape].found is not None]
    found = found_at(shapes, num_processes=2)
    assert {shape: one.found for shape, one in found.items()} == {shape: many[shape].found for shape in shapes}


@pytest.mark.parametrize("seed", range(10))
def test_points_that_others_answer_are_those_that_are_no_smaller(seed: int) -> None:
    draw = random.Random(seed)
    shapes = [(size, length) for length in (1, 2, 4, 8) for size in (1, 2, 4, 8)]
    draw.shuffle(shapes)
    short = draw.sample(shapes, 4)
    todo, searched = _ToDo(request_of(), list(shapes)), list[Shape]()
    for size, length in todo:
        # What lies no lower than a point that was searched before, and lacks memory, is not searched.
        assert not any(one in short and one[0] <= size and one[1] <= length for one in searched)
        searched.append((size, length))
        is_short = (size, length) in short
        todo.taken(
            SweepPoint(
                batch_size=size, sequence_length=length, num_tokens=size * length, reason="why", lacks_memory=is_short
            )
        )
    answered = [shape for shape, _ in todo.skipped()]
    assert sorted(searched + answered) == sorted(shapes)
    for place, (size, length) in enumerate(shapes):
        before = set(shapes[:place]) & set(searched) & set(short)
        assert ((size, length) in answered) == any(one[0] <= size and one[1] <= length for one in before)
    assert list(todo.skipped()) == []


def test_ctrl_c_keeps_what_is_known() -> None:
    def stop(done: float, total: float) -> None:
        if done == 1:
            raise KeyboardInterrupt

    found, is_complete = sweep(request_of(), [(1, 256), (2, 256)], num_processes=1, on_progress=stop)
    assert not is_complete
    assert [one.found is not None for one in found] == [True, False]
    assert found[1].reason == ""
    assert not found[1].is_searched
    with pytest.raises(KeyboardInterrupt):
        sweep(request_of(), [(1, 256)], num_processes=1, on_progress=lambda done, total: stop(1, total))


def test_tokens_of_a_step_count_ranks_and_micro_batches() -> None:
    step = Step(micro_batches=3, num_ranks=2, modes=(ParallelMode.DDP,))
    asked = request_of(machine("rtx-3090-x4"), step)
    (point,), _ = sweep(asked, [(2, 256)], num_processes=1, on_progress=no_progress)
    assert point.num_tokens == 2 * 256 * 3 * 2
    assert point.found is not None
    assert point.found.tokens_per_s == pytest.approx(point.num_tokens / point.found.iteration_s)
    assert point.recomputation_cost_frac == pytest.approx(0.0, abs=0.01)
