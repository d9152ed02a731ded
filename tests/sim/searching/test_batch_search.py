"""The search over micro-batch sizes against a search of each size, and what-if answers against searches."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protwin.shared.answers.search_result import BatchSearchResult, SearchResult
from protwin.shared.basics.errors import InfeasibleError, PlanError
from protwin.shared.schema.workload import BlockProfile, Phase, Tiling, Workload
from protwin.sim.questions.what_if import largest_batch, what_if
from protwin.sim.searching.request import Effort, GlobalBatch, Step, divisors
from protwin.sim.searching.search import search, search_batches
from protwin.sim.space.space import SearchSpace
from tests.proof_size import examples
from tests.sim.fastest import fastest_request
from tests.sim.hand_made import machine, workload

SPACE = SearchSpace(chunk_bytes=(256, 512), prefetch_depth=(1, 2))


def at_size(model: Workload, size: int, fixed_s: float) -> Workload:
    """``model`` at ``size`` samples: bytes grow with them, seconds too, from ``fixed_s`` on."""

    def grown(phase: Phase, gradient_bytes: int = 0) -> Phase:
        return Phase(
            net_bytes=(phase.net_bytes - gradient_bytes) * size + gradient_bytes,
            gradient_bytes=gradient_bytes,
            curve=tuple((end, level * size) for end, level in phase.curve),
            measured_s=fixed_s + (phase.measured_s or 0.0) * size,
        )

    profile = model.profiles[0]
    names = {"forward": 0, "backward": 256, "checkpoint_forward": 0, "recompute": 0, "checkpoint_backward": 256}
    phases: dict[str, Any] = {
        name: grown(getattr(profile, name), gradient_bytes) for name, gradient_bytes in names.items()
    }
    sections = ("prologue_forward", "epilogue_forward", "epilogue_backward", "prologue_backward")
    return model.model_copy(
        update={
            "profiles": (BlockProfile(output_bytes=profile.output_bytes * size, swappable_bytes=900 * size, **phases),),
            **{name: grown(getattr(model, name)) for name in sections},
            "num_samples": size,
            "num_tokens": 2 * size,
            "batch_shapes": {"input_ids": (size, 2)},
        }
    )


def run(global_batch: int, fixed_s: float, budget_bytes: int, tolerance_frac: float = 0.0) -> BatchSearchResult:
    return search_batches(
        fastest_request(
            workload=GlobalBatch(
                num_samples=global_batch, workload_at=lambda size: at_size(workload(3), size, fixed_s)
            ),
            hardware=machine(cpu_adam_s=0.5),
            device_budget_bytes=budget_bytes,
            space=SPACE,
            effort=Effort(tolerance_frac=tolerance_frac),
        )
    )


@given(st.sampled_from((1, 2, 3, 4)), st.floats(0, 1), st.integers(4000, 20_000))
@settings(max_examples=examples(48, 6))
def test_it_finds_what_a_search_of_every_size_finds(global_batch: int, fixed_s: float, budget_bytes: int) -> None:
    times_s = {}
    for size in divisors(global_batch):
        try:
            times_s[size] = search(
                fastest_request(
                    workload=at_size(workload(3), size, fixed_s),
                    hardware=machine(cpu_adam_s=0.5),
                    device_budget_bytes=budget_bytes,
                    space=SPACE,
                    step=Step(micro_batches=global_batch // size),
                    effort=Effort(tolerance_frac=0.0),
                )
            ).prediction.iteration_s
        except InfeasibleError:
            continue
    if not times_s:
        with pytest.raises(InfeasibleError, match="global batch"):
            run(global_batch, fixed_s, budget_bytes)
        return
    found = run(global_batch, fixed_s, budget_bytes)
    assert found.result.prediction.iteration_s == min(times_s.values())
    assert found.micro_batch_size == max(size for size in times_s if times_s[size] == min(times_s.values()))
    assert found.result.plan.micro_batches * found.micro_batch_size == global_batch
    certificate = found.result.certificate
    assert certificate.is_certified
    assert certificate.shortest_possible_s <= min(times_s.values())
    assert [choice.micro_batch_size for choice in found.choices] == list(divisors(global_batch))
    for choice in found.choices:
        if choice.micro_batch_size in times_s:
            assert choice.shortest_possible_s is not None
            assert choice.shortest_possible_s <= times_s[choice.micro_batch_size]


def test_a_size_that_cannot_win_is_bounded_away_as_a_whole() -> None:
    found = run(8, fixed_s=5.0, budget_bytes=10**6)
    assert found.micro_batch_size == 8
    assert {choice.micro_batch_size: choice.num_simulated for choice in found.choices}[1] == 0


def test_the_document_reads_back_equal() -> None:
    found = run(4, fixed_s=0.1, budget_bytes=20_000)
    assert found.result.batch is not None
    assert found.result.batch.choices == found.choices
    assert SearchResult.model_validate_json(found.result.model_dump_json()) == found.result


@pytest.mark.parametrize("global_batch", [0, -1, 10**10])
def test_impossible_global_batches_are_refused(global_batch: int) -> None:
    with pytest.raises(PlanError, match="global batch"):
        run(global_batch, 0.0, 10**6)


def test_divisors() -> None:
    for number in range(1, 100):
        assert divisors(number) == tuple(one for one in range(1, number + 1) if number % one == 0)


# -- what if ---------------------------------------------------------------------------------------------------------


def test_the_largest_batch_fits_and_the_next_larger_one_does_not() -> None:
    model, box = at_size(workload(3), 4, 0.0), machine()

    def fits(model: Workload, device_bytes: int, host_bytes: int) -> bool:
        budgets = {"device_budget_bytes": device_bytes, "host_budget_bytes": host_bytes}
        try:
            search(fastest_request(workload=model, hardware=box, space=SPACE, **budgets, effort=Effort(max_replays=1)))
        except InfeasibleError:
            return False
        return True

    device_bytes, host_bytes = 6000, 3000
    assert not fits(model, device_bytes, host_bytes)
    request = fastest_request(
        workload=model, hardware=box, device_budget_bytes=device_bytes, host_budget_bytes=host_bytes, space=SPACE
    )
    batch_size = largest_batch(request, lambda size: at_size(workload(3), size, 0.0))
    assert batch_size is not None
    assert fits(at_size(workload(3), batch_size, 0.0), device_bytes, host_bytes)
    assert not fits(at_size(workload(3), batch_size + 1, 0.0), device_bytes, host_bytes)

    # A workload that is known without a trace may fit less often; it answers alone where it fits.
    for num_more in (0, 1):
        traced: list[int] = []

        def known_at(size: int, num_more: int = num_more) -> Workload:
            return at_size(workload(3), size + num_more, 0.0)

        def workload_at(size: int, traced: list[int] = traced) -> Workload:
            traced.append(size)
            return at_size(workload(3), size, 0.0)

        assert largest_batch(request, workload_at, known_at) == batch_size
        assert traced, "the next larger batch is traced"
        assert not any(fits(known_at(size), device_bytes, host_bytes) for size in traced)

    # Where one sample does not fit, nothing else is asked about: a trace of each takes its time.
    def asked_at(size: int) -> Workload:
        asked.append(size)
        return at_size(workload(3), size, 0.0)

    for least_bytes in (2500, 6000):
        for num_samples in range(1, 6):
            asked: list[int] = []
            of_size = replace(request, workload=at_size(workload(3), num_samples, 0.0), device_budget_bytes=least_bytes)
            fitting = [
                size for size in range(1, num_samples) if fits(at_size(workload(3), size, 0.0), least_bytes, host_bytes)
            ]
            assert largest_batch(of_size, asked_at) == max(fitting, default=None)
            assert fitting or asked == [1] * (num_samples > 1)


def in_two_tiles(model: Workload, size: int, less_bytes: int) -> Workload:
    """At ``size`` samples, with MLPs that may run in two tiles: then a block makes so much less of each, and saves it
    neither.
    """
    of_size = at_size(model, size, 0.0)
    (whole,) = of_size.profiles

    def leaner(phase: Phase, saves: int) -> Phase:
        """Levels are lower by ``less_bytes``; ``saves``: 1 where they are saved, -1 where they are released."""
        levels = tuple((end, max(level - less_bytes * size, 0)) for end, level in phase.curve)
        return phase.model_copy(update={"net_bytes": phase.net_bytes - saves * less_bytes * size, "curve": levels})

    tiled = whole.model_copy(
        update={
            "forward": leaner(whole.forward, 1),
            "backward": leaner(whole.backward, -1),
            "recompute": leaner(whole.recompute, 1),
            "checkpoint_forward": leaner(whole.checkpoint_forward, 0),
            "checkpoint_backward": leaner(whole.checkpoint_backward, -1),
            "swappable_bytes": whole.swappable_bytes - less_bytes * size,
        }
    )
    tiling = Tiling(mlp_tiles=2, modules=("mlp",), profiles=(tiled,), profile_of=(0,) * of_size.num_blocks)
    fields = {name: getattr(of_size, name) for name in Workload.model_fields}
    return Workload(**fields | {"tilings": (tiling,)})


@pytest.mark.parametrize(("less_bytes", "offload"), [(400, (0,)), (400, None), (0, None)])
def test_the_largest_batch_is_that_of_any_tiles_and_of_inputs_that_go_to_the_host(
    less_bytes: int, offload: tuple[int, ...] | None
) -> None:
    """A search of every batch is the oracle; whole, with inputs on the device, fewer samples fit."""
    space = SPACE.model_copy(update={"n_offload_input": (0,)}) if offload else SPACE
    whole = SearchSpace(**space.model_dump(exclude_unset=True) | {"mlp_tiles": (1,), "n_offload_input": (0,)})

    def workload_at(size: int) -> Workload:
        return in_two_tiles(workload(6), size, less_bytes)

    request = fastest_request(
        workload=workload_at(9),
        hardware=machine(),
        device_budget_bytes=9_000,
        host_budget_bytes=12_000,
        space=space,
        effort=Effort(max_replays=1),
    )

    def largest(space: SearchSpace) -> int:
        fitting = 0
        for size in range(1, 9):
            try:
                search(replace(request, workload=workload_at(size), space=space))
            except InfeasibleError:
                break
            fitting = size
        return fitting

    assert largest(whole) < largest(space) < 8, "the question is no question"
    assert largest_batch(request, workload_at) == largest(space)


def test_what_if_answers_are_those_of_searches() -> None:
    model, box = workload(4).model_copy(update={"measured_on": "slow machine"}), machine(gather_s=2.0)
    request = fastest_request(workload=model, hardware=box, space=SPACE, effort=Effort(tolerance_frac=0.0))
    now_s = search(request).prediction.iteration_s
    answers = {answer.change: answer for answer in what_if(request, now_s)}
    assert "a device twice as fast" not in answers, "measured seconds say nothing of it"
    for answer in answers.values():
        assert answer.iteration_s is not None
        assert answer.speedup == pytest.approx(now_s / answer.iteration_s)
    more = answers["2 GiB more device memory"].iteration_s
    assert more is not None
    assert np.less_equal(more, now_s)


def test_what_if_answers_at_a_global_batch_are_over_all_sizes() -> None:
    """More memory lets micro-batches be larger: an answer at the size that is best now would miss the best plan."""
    box, budget_bytes = machine(cpu_adam_s=0.5), 5000
    batch = GlobalBatch(num_samples=4, workload_at=lambda size: at_size(workload(3), size, 1.0))
    effort = Effort(tolerance_frac=0.0)
    request = fastest_request(
        workload=batch, hardware=box, device_budget_bytes=budget_bytes, space=SPACE, effort=effort
    )
    now = search_batches(request)
    answers = what_if(request, now.result.prediction.iteration_s)
    more = next(answer for answer in answers if answer.change == "2 GiB more device memory")
    then = search_batches(replace(request, device_budget_bytes=budget_bytes + 2 * 2**30))
    assert now.micro_batch_size < then.micro_batch_size
    assert more.iteration_s == then.result.prediction.iteration_s
    assert more.speedup == now.result.prediction.iteration_s / more.iteration_s
