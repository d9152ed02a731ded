"""Limits of memory by segments, held against every plan of a small space with its segments replayed."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from functools import lru_cache

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from protwin.shared.answers.plan_kind import PlanKind, Uncertainty
from protwin.shared.catalogue.machines import load_hardware
from protwin.shared.compile.compile import compile_schedule
from protwin.shared.families.shipped import shipped_family
from protwin.shared.layout.kinds import kind_of
from protwin.shared.layout.layout import layout_of
from protwin.shared.schema.hardware import Hardware
from protwin.shared.schema.plan import Plan
from protwin.shared.schema.workload import DType, Workload
from protwin.sim.memory.reserved import device_reserved
from protwin.sim.searching.branch_and_bound import Simulated
from protwin.sim.searching.confidence import NO_UNCERTAINTY
from protwin.sim.searching.problem import SearchProblem
from protwin.sim.searching.request import Effort, SearchRequest
from protwin.sim.searching.search import search
from protwin.sim.searching.survival import SegmentRoom
from protwin.sim.space.space import SearchSpace
from protwin.sim.space.step_spec import StepSpec
from tests.proof_size import examples
from tests.sim.brute_force import brute_force

MIB = 2**20
SPACE = SearchSpace(
    chunk_bytes=(8 * MIB, 32 * MIB, 80 * MIB),
    n_persist=(0, 2, 4),
    n_buffer=(3, 1000),
    prefetch_depth=1,
    n_checkpoint=(0, 8, 12),
)


@dataclass(frozen=True)
class Known:
    """One plan, simulated, with the allocator replayed."""

    plan: Plan
    kind: PlanKind
    iteration_s: float
    peak_bytes: int
    segments_bytes: int

    def limit_bytes(self, room_bytes: int) -> int:
        """The guaranteed peak that fits with the overhead of this plan."""
        return self.peak_bytes * room_bytes // self.segments_bytes


def of_catalogue(name: str, batch_size: int, sequence_length: int) -> Workload:
    family = shipped_family(name, DType.BFLOAT16)
    assert family is not None
    return family.at(batch_size=batch_size, sequence_length=sequence_length)


@lru_cache
def every_plan() -> tuple[Workload, Hardware, tuple[Known, ...]]:
    """None of which depends on how much memory the device has."""
    model, box = of_catalogue("gpt2", 2, 512), load_hardware("rtx-3090")
    found = []
    for outcome in brute_force(model, box, None, SPACE, StepSpec()):
        layout = layout_of(model, outcome.plan.chunk_bytes)
        reserved = device_reserved(compile_schedule(outcome.plan, model, layout), model, layout, box.device)
        assert reserved is not None
        kind = kind_of(outcome.plan, layout, model)
        found.append(Known(outcome.plan, kind, outcome.iteration_s, outcome.device_bytes, reserved.expected_bytes))
    return model, box, tuple(found)


def asked(room_bytes: int, uncertainty: Uncertainty = NO_UNCERTAINTY) -> SearchRequest:
    """The search of every plan on a device whose segments have so much room."""
    model, box, _ = every_plan()
    effort = Effort(tolerance_frac=0.0, uncertainty=uncertainty)
    request = SearchRequest(workload=model, hardware=box, margin_frac=0.0, space=SPACE, effort=effort)
    assert request.segment_limit_bytes is not None
    memory_bytes = box.device.memory_bytes - request.segment_limit_bytes + room_bytes
    device = box.device.model_copy(update={"memory_bytes": memory_bytes})
    request = replace(request, hardware=box.model_copy(update={"device": device}), device_budget_bytes=room_bytes)
    assert request.segment_limit_bytes == room_bytes
    return request


@example(place=6, less_bytes=0)
@example(place=48, less_bytes=1)
@given(place=st.integers(0, 53), less_bytes=st.sampled_from((0, 1, MIB)))
@settings(max_examples=examples(60, 2))
def test_only_what_segments_of_the_same_layout_say_is_left_out(place: int, less_bytes: int) -> None:
    """The room is that of some plan's segments, or less."""
    *_, plans = every_plan()
    room_bytes = sorted(known.segments_bytes for known in plans)[place] - less_bytes
    fitting = [known for known in plans if known.peak_bytes <= room_bytes]
    surviving = [known for known in fitting if known.segments_bytes <= room_bytes]
    if not surviving:
        return
    result = search(asked(room_bytes))
    time_s, certificate = result.prediction.iteration_s, result.certificate
    reserved = result.prediction.device_reserved
    assert reserved is not None
    assert result.survives
    assert certificate.is_certified
    assert reserved.expected_bytes <= room_bytes
    faster = [known for known in surviving if known.iteration_s < time_s * (1 - result.gap_frac) * (1 - 1e-9)]
    # Knobs that make no difference name the same plan twice.
    assert len({(known.iteration_s, known.peak_bytes) for known in faster}) <= certificate.num_bounded_by_segments
    for known in faster:
        alike = [o for o in fitting if (o.plan.chunk_bytes, o.kind) == (known.plan.chunk_bytes, known.kind)]
        fragile = [other for other in alike if other.segments_bytes > room_bytes]
        assert any(other.limit_bytes(room_bytes) < known.peak_bytes for other in fragile)


@pytest.mark.parametrize("seed", range(5))
def test_a_search_ends_whatever_segments_are_expected_of_each_plan(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Drawn of each plan alone: a lower peak says nothing, so that limits rise and fall again."""
    *_, plans = every_plan()
    room_bytes = sorted(known.segments_bytes for known in plans)[30]
    told: dict[str, int] = {}

    def drawn_bytes(_room: SegmentRoom, found: Simulated, _problem: SearchProblem) -> int:
        chance = random.Random(f"{seed} {found.plan.identity}")
        told[found.plan.identity] = round(room_bytes * chance.uniform(0.97, 1.6))
        return told[found.plan.identity]

    lower, num_lowered = SegmentRoom.lowered_peak_bytes, iter(range(4 * len(plans)))

    def lowered(room: SegmentRoom, found: Simulated, wanted_bytes: int) -> int:
        next(num_lowered)  # raises StopIteration where the same plans come again and again
        return lower(room, found, wanted_bytes)

    monkeypatch.setattr(SegmentRoom, "wanted_bytes", drawn_bytes)
    monkeypatch.setattr(SegmentRoom, "lowered_peak_bytes", lowered)
    result = search(asked(room_bytes))
    assert result.survives == (told[result.prediction.plan.identity] <= room_bytes)
    assert result.survives or all(wanted > room_bytes for wanted in told.values())
    if result.certificate.is_certified:
        fragile = [wanted for wanted in told.values() if wanted > room_bytes]
        assert result.certificate.num_bounded_by_segments >= len(fragile) - (not result.survives)
