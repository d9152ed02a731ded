"""Replays of plans of several ranks: what the simulator says, collectives and all."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings

from protwin.shared.catalogue.machines import machine as known_machine
from protwin.shared.compile.residency import Residency
from protwin.shared.compile.updates import Updates
from protwin.shared.drafts.lanes import DeviceBuffers
from protwin.shared.drafts.program import Draft, IntArray
from protwin.shared.layout.layout import build_layout
from protwin.shared.schema.plan import ParallelMode, Plan
from protwin.shared.schema.schedule import Content, Lane
from protwin.shared.verify.guaranteed_peak import guaranteed_device_peak
from protwin.sim.costs.contention import ContentionModel
from protwin.sim.costs.task_costs import CostModel
from protwin.sim.engine.simulator import MIN_ITERATIONS
from protwin.sim.space.plan_family import H2D
from tests.cli.saved import decoder
from tests.proof_size import examples
from tests.sim.bound_cases import Case, case
from tests.sim.ranked_cases import RANKS, ranked_cases


@settings(max_examples=examples(80, 9))
@given(ranked_cases())
def test_a_replay_is_what_the_simulator_says(found: Case) -> None:
    replayed_s, simulated = found.replayed_s(), found.simulated()
    # The simulator ran one iteration more than it took to become periodic.
    if simulated.is_steady and simulated.num_iterations == MIN_ITERATIONS + 1:
        assert replayed_s == pytest.approx(simulated.iteration_s, rel=1e-9)
    else:
        assert np.isnan(replayed_s)


def _offloading(*, machine: str = "rtx-3090-x4", n_buffer: int = 6, **knobs: object) -> Case:
    """All of a decoder offloaded, in chunks of half a block, over four devices without links of their own."""
    model, box = decoder(), known_machine(machine)
    chosen = Plan(
        workload_id=model.identity,
        chunk_bytes=2**24,
        n_persist=0,
        n_buffer=n_buffer,
        prefetch_depth=2,
        parallel=ParallelMode.SHARDED,
        num_ranks=RANKS,
    ).model_copy(update=knobs)
    layout = build_layout(model.parameters, num_blocks=model.num_blocks, chunk_bytes=chosen.chunk_bytes)
    costs = CostModel.of(model, box, num_ranks=RANKS)
    return case(model, chosen, layout, costs, ContentionModel.of(box, num_ranks=RANKS))


def test_collectives_and_other_lanes_slow_each_other() -> None:
    found = _offloading()
    simulated_s = found.simulated_s()
    assert found.replayed_s() == pytest.approx(simulated_s, rel=1e-9)
    # The wrong variant: collectives disturb nobody, and nobody disturbs them.
    alone = {
        lanes: {lane: 1.0 if lane is Lane.COLLECTIVE else found.contention.slowdowns[others][lane] for lane in lanes}
        for lanes in found.contention.slowdowns
        if (others := lanes - {Lane.COLLECTIVE}) or lanes
    }
    assert replace(found, contention=ContentionModel(alone)).replayed_s() < 0.95 * simulated_s


def test_all_gathers_follow_the_reductions_of_the_step_that_opens_their_way(monkeypatch: pytest.MonkeyPatch) -> None:
    found = _offloading(machine="l40s-x8", n_buffer=4)
    simulated_s = found.simulated_s()
    assert found.replayed_s() == pytest.approx(simulated_s, rel=1e-9)
    # The wrong variant: they overtake them, and hold up the gradients' way to the host.
    original = Residency._sent_behind

    def a_step_earlier(residency: Residency) -> IntArray:
        position, ends = original(residency), residency.sections.end_position
        earlier = ends[np.maximum(np.searchsorted(ends, position) - 1, 0)]
        earlier[:, 0] = position[:, 0]
        return earlier

    monkeypatch.setattr(Residency, "_sent_behind", a_step_earlier)
    assert found.replayed_s() > 1.01 * simulated_s


def _without(content: Content) -> Callable[[Draft], DeviceBuffers]:
    """The wrong variant that takes buffers of ``content`` for nothing."""
    original = DeviceBuffers.of

    def of(draft: Draft) -> DeviceBuffers:
        draft.buffer_groups = [
            (ids, replace(group, size_bytes=0 * group.size_bytes) if group.content is content else group)
            for ids, group in draft.buffer_groups
        ]
        return original(draft)

    return of


def test_gradients_are_twice_on_the_device_while_they_are_scattered(monkeypatch: pytest.MonkeyPatch) -> None:
    found = _offloading()
    peak_bytes = guaranteed_device_peak(found.schedule).size_bytes
    assert found.exact_peak_bytes() == peak_bytes
    # The wrong variant: they leave as those of one rank do.
    monkeypatch.setattr(DeviceBuffers, "of", _without(Content.FLAT_GRADIENTS))
    assert found.exact_peak_bytes() != peak_bytes


def _sharded(n_buffer: int = 3) -> Case:
    """The same over the devices: one chunk of embeddings, two for each of eight blocks."""
    return _offloading(n_shard=17, n_buffer=n_buffer, micro_batches=2)


def test_all_gathers_of_sharded_chunks_wait_for_their_buffer_and_for_device_adam(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = _sharded()
    simulated_s = found.simulated_s()
    assert found.replayed_s() == pytest.approx(simulated_s, rel=1e-9)
    assert not found.family().lanes.lengths[H2D]
    # The wrong variant: they wait for nothing but their turn.
    monkeypatch.setattr(Residency, "_wait_for_room", lambda residency: None)
    monkeypatch.setattr(Residency, "follow", lambda residency, stepped_by: None)
    assert found.replayed_s() < 0.999 * simulated_s


def test_steps_wait_for_gradients_to_be_reduced_to_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    found = _sharded(n_buffer=12)
    simulated_s = found.simulated_s()
    assert found.replayed_s() == pytest.approx(simulated_s, rel=1e-9)
    # The wrong variant: they lag behind as far as they like.  A layout keeps what was drafted of it: this is another.
    monkeypatch.setattr(Updates, "_leave_in_time", lambda updates, tasks, chunks: None)
    assert _sharded(n_buffer=12).replayed_s() < 0.999 * simulated_s


def test_reductions_to_parts_have_their_gradients_twice_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    found = _sharded()
    peak_bytes = guaranteed_device_peak(found.schedule).size_bytes
    assert found.exact_peak_bytes() == peak_bytes
    # The wrong variants: gradients stay where they were made; and what is gathered takes no room.
    for content in (Content.FLAT_GRADIENTS, Content.PARAMETERS):
        with monkeypatch.context() as changed:
            changed.setattr(DeviceBuffers, "of", _without(content))
            assert found.exact_peak_bytes() != peak_bytes
