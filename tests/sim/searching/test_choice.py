"""Which plan is recommended: held against brute force over kinds, and against whole records of what it survives."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from protwin.shared.answers.plan_kind import PlanKind, Uncertainty
from protwin.shared.answers.search_result import Goal, SearchResult
from protwin.shared.basics.errors import InfeasibleError, PlanError, WorkloadError
from protwin.shared.catalogue.machines import load_hardware
from protwin.shared.families.shipped import shipped_family
from protwin.shared.layout.kinds import kind_of
from protwin.shared.layout.layout import build_layout
from protwin.shared.methods.runtime_profile import Runtime, RuntimeProfile
from protwin.shared.schema.hardware import DeviceKind, Hardware
from protwin.shared.schema.workload import DType, Workload
from protwin.sim.engine.simulator import simulate
from protwin.sim.questions.goals import search_goal
from protwin.sim.searching.request import Effort, SearchRequest, Step
from protwin.sim.searching.search import search
from protwin.sim.space.space import SearchSpace
from tests.proof_size import examples
from tests.sim.brute_force import Case, cases
from tests.sim.fastest import fastest_request
from tests.sim.hand_made import machine, workload
from tests.strategies.machines import hardware
from tests.strategies.workloads import workloads

FRACS = st.sampled_from((0.0, 0.02, 0.1, 0.3, 0.6))


def recommended(found: Case, budget_bytes: int, uncertainty: Uncertainty) -> SearchResult:
    request = fastest_request(
        workload=found.workload,
        hardware=found.hardware,
        calibration=found.calibration,
        device_budget_bytes=max(1, budget_bytes),
        host_budget_bytes=max(outcome.host_bytes for outcome in found.outcomes),
        space=found.space,
        step=found.asked_step,
    )
    return search(replace(request, effort=Effort(tolerance_frac=0.0, uncertainty=uncertainty)))


def simplest_worth_it(found: Case, budget_bytes: int, uncertainty: Uncertainty) -> dict[PlanKind, float]:
    """The best times of the kinds that may be recommended: one, but for times within rounding of a limit."""
    best_s: dict[PlanKind, float] = defaultdict(lambda: float("inf"))
    for outcome in found.feasible(budget_bytes):
        model = found.workload
        layout = build_layout(model.parameters, num_blocks=model.num_blocks, chunk_bytes=outcome.plan.chunk_bytes)
        kind = kind_of(outcome.plan, layout, model)
        best_s[kind] = min(best_s[kind], outcome.iteration_s)
    allowed: dict[PlanKind, float] = {}
    for kind in sorted(best_s, key=lambda kind: kind.complexity):
        limits_s = {
            other: best_s[kind] * (1 - uncertainty.between(kind, other))
            for other in best_s
            if other.complexity > kind.complexity
        }
        if not any(best_s[other] < limit_s * (1 - 1e-9) for other, limit_s in limits_s.items()):
            allowed[kind] = best_s[kind]
            if all(best_s[other] > limit_s * (1 + 1e-9) for other, limit_s in limits_s.items()):
                break
    return allowed


@given(cases(), st.floats(0, 1), FRACS, FRACS)
@settings(max_examples=examples(300, 5))
def test_the_simplest_kind_within_the_uncertainty_is_recommended(
    found: Case, share: float, device_frac: float, host_frac: float
) -> None:
    peaks = sorted({outcome.device_bytes for outcome in found.outcomes})
    budget_bytes = peaks[round(share * (len(peaks) - 1))]
    uncertainty = Uncertainty(device_frac=device_frac, host_frac=host_frac, source="made up")
    allowed = simplest_worth_it(found, budget_bytes, uncertainty)
    assume(min(allowed.values()) > 0)
    result = recommended(found, budget_bytes, uncertainty)
    assert result.plan_kind in allowed
    assert result.prediction.iteration_s == pytest.approx(allowed[result.plan_kind], rel=1e-9)
    assert (result.passed_over is None) == (result.prediction.iteration_s <= result.certificate.best_iteration_s)


def test_the_oracle_sees_a_search_that_takes_the_fastest() -> None:
    """The wrong variant: no uncertainty at all, where offloading saves the time of the device's Adam."""
    model, box = workload(num_blocks=4), machine(gather_s=1e-6, offload_s=1e-6, cpu_adam_s=1e-6)
    kinds = set()
    for frac in (0.0, 0.9):
        uncertainty = Uncertainty(device_frac=frac, host_frac=frac, source="made up")
        request = fastest_request(workload=model, hardware=box, space=SearchSpace(chunk_bytes=256))
        kinds.add(search(replace(request, effort=Effort(uncertainty=uncertainty))).plan_kind)
    assert kinds == {PlanKind.OFFLOADED, PlanKind.RESIDENT}


@given(workloads(max_blocks=4), hardware(), st.integers(0, 400), st.floats(0, 0.5))
@settings(max_examples=examples(60, 6))
def test_what_survives_leaves_the_margin_in_its_record(
    model: Workload, box: Hardware, more_mib: int, margin_frac: float
) -> None:
    """On a device so small that segments matter: they come in steps of 2 and 20 MiB."""
    device = box.device.model_copy(
        update={"kind": DeviceKind.CUDA, "memory_bytes": (400 + more_mib) * 2**20, "reserved_bytes": 300 * 2**20}
    )
    box = box.model_copy(update={"device": device})
    request = SearchRequest(workload=model, hardware=box, margin_frac=margin_frac)
    try:
        result = search(request)
    except (InfeasibleError, WorkloadError):
        return
    reserved = result.prediction.device_reserved
    assert reserved is not None
    left_bytes = reserved.limit_bytes - reserved.expected_bytes
    assert result.survives == (left_bytes >= round(margin_frac * device.memory_bytes))


def test_the_plan_that_needs_expandable_segments_is_named_with_its_gain() -> None:
    """llama-3-8b on an RTX 3090: the fastest plan by what it allocates has segments that do not leave the margin."""
    family = shipped_family("llama-3-8b", DType.BFLOAT16)
    assert family is not None
    model, box = family.at(batch_size=1, sequence_length=2048), load_hardware("rtx-3090")
    result = search(SearchRequest(workload=model, hardware=box, baselines=()))
    assert result.survives
    assert result.certificate.is_certified, "plans that were replayed and not simulated count too"
    other = result.expandable
    if other is not None:
        record = simulate(other.plan, model, box)
        assert record.device_reserved is not None
        left_bytes = record.device_reserved.limit_bytes - record.device_reserved.expected_bytes
        assert left_bytes < box.device.memory_bytes * 0.05
        assert other.iteration_s < result.prediction.iteration_s
    for baseline in result.baselines:
        is_zero_3 = baseline.name.startswith("DeepSpeed ZeRO-3")
        record = simulate(
            baseline.plan, model, box, runtime=RuntimeProfile(Runtime.DEEPSPEED_ZERO3 if is_zero_3 else Runtime.OURS)
        )
        assert baseline.iteration_s == pytest.approx(record.iteration_s, rel=1e-9)
        assert baseline.guaranteed_peak_device_bytes == record.guaranteed_peak_device_bytes
        is_small = record.guaranteed_peak_device_bytes <= result.device_budget_bytes
        assert baseline.fits <= is_small


def test_a_plan_of_ones_own_is_laid_beside() -> None:
    model, box = workload(num_blocks=4), machine(kind=DeviceKind.CPU)
    request = fastest_request(workload=model, hardware=box, space=SearchSpace(chunk_bytes=256))
    own = search(replace(request, space=SearchSpace(chunk_bytes=256, n_persist=0, n_checkpoint=4))).plan
    result = search(replace(request, baselines=(("mine.json", own),)))
    last = result.baselines[-1]
    assert (last.name, last.plan) == ("mine.json", own)
    assert last.iteration_s == pytest.approx(simulate(own, model, box).iteration_s, rel=1e-9)
    of_two = own.model_copy(update={"num_ranks": 2, "parallel": "sharded"})
    with pytest.raises(PlanError, match="for 2 ranks"):
        search(replace(request, baselines=(("two.json", of_two),)))


def test_where_no_plan_leaves_the_margin_one_that_fits_without_it_is_recommended() -> None:
    """gpt2 at 31 sequences on 24 GB: 22.8 GiB of segments, of 23.06 GiB less 1.2 GiB."""
    family = shipped_family("gpt2", DType.BFLOAT16)
    assert family is not None
    model, box = family.at(batch_size=31, sequence_length=1024), load_hardware("rtx-3090")
    result = search(SearchRequest(workload=model, hardware=box))
    reserved = result.prediction.device_reserved
    assert reserved is not None
    assert not result.survives
    assert reserved.num_retries == 0, "it fits with the allocator's default settings"
    assert result.plan_kind is PlanKind.OFFLOADED, "the simplest kind that does"


def test_a_margin_that_nothing_fits_into_is_no_budget() -> None:
    family = shipped_family("gpt2", DType.BFLOAT16)
    assert family is not None
    model = family.at(batch_size=2, sequence_length=1024)
    request = SearchRequest(workload=model, hardware=load_hardware("rtx-3090"), margin_frac=0.0)
    found, tight = search(request), search(replace(request, margin_frac=0.99))
    assert found.survives
    assert (tight.survives, tight.margin_frac) == (False, 0.99)
    assert tight.plan == found.plan
    small = replace(request, margin_frac=0.99, device_budget_bytes=2**20)
    with pytest.raises(InfeasibleError, match="device memory but the budget of rtx-3090 is 1 MiB"):
        search(small)


def test_the_least_memory_is_no_limit_of_the_baselines() -> None:
    family = shipped_family("gpt2", DType.BFLOAT16)
    assert family is not None
    model, box = family.at(batch_size=8, sequence_length=1024), load_hardware("rtx-3090")
    request = SearchRequest(workload=model, hardware=box, baselines=())
    least = search_goal(Goal.LEAST_MEMORY, request).result
    plain = search(request)
    assert [baseline.lacking for baseline in least.baselines] == [baseline.lacking for baseline in plain.baselines]
    assert least.device_budget_bytes == plain.device_budget_bytes
    own = least.prediction.guaranteed_peak_device_bytes
    assert all(own <= one.guaranteed_peak_device_bytes for one in (*plain.pareto, *plain.alternatives))


def test_a_kind_that_another_beats_is_left_though_the_fastest_uses_the_host() -> None:
    """llama-3.2-3b on eight H100: the fastest plan offloads, within 25 %; sharded ones beat DDP by more than 10 %."""
    family = shipped_family("llama-3.2-3b", DType.BFLOAT16)
    assert family is not None
    model, box = family.at(batch_size=4, sequence_length=2048), load_hardware("h100-80gb-x8")
    result = search(SearchRequest(workload=model, hardware=box, step=Step(num_ranks=8), baselines=()))
    own_s, uncertainty = result.prediction.iteration_s, result.uncertainty
    for other in (one for one in result.baselines if one.fits):
        assert other.iteration_s >= own_s * (1 - uncertainty.between(result.plan_kind, other.plan_kind)), other.name
    assert result.plan_kind is PlanKind.SHARDED
