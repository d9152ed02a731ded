"""Compiled functions and their numpy twins: the same results, and the same errors of what has no answer."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protwin.shared.answers.search_result import SearchResult
from protwin.sim.bounds.replay import Replayer, ReplayPlan
from protwin.sim.bounds.stretches import least_periods_s
from protwin.sim.bounds.throughput import SideBySide, Throughput
from protwin.sim.kernels import lanes as kernels
from protwin.sim.kernels import library
from protwin.sim.space.lane_order import NOTHING, known_before
from protwin.sim.space.lane_programs import LanePrograms, LeftOut
from protwin.sim.space.plan_family import PlanFamily
from tests.proof_size import examples
from tests.sim import brute_force
from tests.sim.bound_cases import Case, cases
from tests.sim.ranked_cases import ranked_cases

T = TypeVar("T")

compiled = pytest.mark.skipif(not kernels.is_available(), reason=f"replays run in {library.description()}")
_ROUNDING_FRAC = 1e-9
"""Results are rounded to 1.2e-10 of them."""


@contextmanager
def _in_numpy() -> Iterator[None]:
    with mock.patch.dict(os.environ, {library.SWITCH: "0"}):
        assert not kernels.is_available()
        yield


def _both(work: Callable[[], T]) -> tuple[T, T]:
    """The results of the compiled functions and of numpy."""
    assert kernels.is_available()
    found = work()
    with _in_numpy():
        return found, work()


def _family(found: Case) -> PlanFamily:
    """At two prefetch depths or more, and anew, since families keep what they have found."""
    return found.family(depths=sorted({1, 2, found.plan.prefetch_depth}))


# -- equal to numpy --------------------------------------------------------------------------------------------------


@compiled
@settings(max_examples=examples(200, 7))
@given(st.lists(cases(), min_size=2, max_size=2) | st.lists(ranked_cases(), min_size=2, max_size=2), st.integers(1, 16))
def test_orders_and_replays_and_bounds_are_those_of_numpy(found: list[Case], events: int) -> None:
    # Few plans take long to draw: one test reads each of them in three ways.
    for one in found:
        _check_order(one)
        _check_replays(one)
    _check_bounds(found, (events, 2, 2, 4, 3))


def _check_order(found: Case) -> None:
    for of_lane, in_numpy in zip(*_both(lambda: _family(found).known), strict=True):
        np.testing.assert_array_equal(of_lane, in_numpy)


def _check_replays(found: Case) -> None:
    family, modes = _family(found), range(found.compute.modes.n_swap.size)
    plans = [ReplayPlan(family, depth, mode) for depth in range(len(family.family.depths)) for mode in modes][::3]
    of_plan, in_numpy = _both(lambda: Replayer(found.contention).periods_s(plans))
    np.testing.assert_allclose(of_plan, in_numpy, rtol=_ROUNDING_FRAC, atol=0)


def _check_bounds(found: list[Case], spread: tuple[int, ...]) -> None:
    """Of plans alone and stacked; all rows of compute take their chains from the least and the most of them."""
    programs = [_family(one).programs(np.arange(one.compute.modes.n_swap.size)) for one in found]
    # Plans are stacked that have the same lanes, and the same sequences of those whose order is open.
    programs = [one for one in programs if one.lane_of == programs[0].lane_of]
    throughput = Throughput.of(found[0].contention)
    stacked, in_numpy = _both(lambda: least_periods_s(LanePrograms.stacked(programs), throughput, spread))
    np.testing.assert_allclose(stacked, in_numpy, rtol=_ROUNDING_FRAC, atol=0)
    begin = 0
    for one in programs:
        alone = least_periods_s(one, throughput, spread)
        of_plan = stacked[begin : begin + len(alone), : alone.shape[1]]
        np.testing.assert_allclose(of_plan, alone, rtol=_ROUNDING_FRAC, atol=0)
        begin += len(alone)


def _any_programs(random: np.random.Generator) -> LanePrograms:
    """Four lanes of up to twelve tasks, which wait for what some order of all tasks has before them."""
    lengths = np.array([random.integers(1, 13), *random.integers(0, 13, 3)])
    order = random.permutation(np.repeat(np.arange(4), lengths))
    before = np.cumsum(order[:, None] == np.arange(4), axis=0)
    waits: list[dict[int, np.ndarray]] = [{} for _ in lengths]
    for lane, other in [(lane, other) for lane in range(4) for other in range(4) if lane != other]:
        if lengths[lane] and lengths[other] and random.random() < 0.8:
            # Some waits are those of the iteration before, some tasks wait for nothing.
            most = before[order == lane, other] - lengths[other] * (random.random(lengths[lane]) < 0.3)
            waits[lane][other] = np.where(random.random(lengths[lane]) < 0.6, most, NOTHING)[None]
    with _in_numpy():
        known = known_before(waits, lengths.tolist(), 1)
    # Whole sevenths, so that many chains are as long as each other up to rounding.
    seconds = [random.integers(0, 4, (1, length)) / 7 for length in lengths]
    compute_s = random.integers(0, 4, (1, 5, lengths[0])) / 7
    pairs = {(lane, other): found for lane, of_lane in enumerate(waits) for other, found in of_lane.items()}
    left_out = None
    if random.random() < 0.5:
        num_tasks = random.integers(0, lengths // 2 + 1)
        begins = random.integers(0, lengths - 2 * num_tasks + 1)
        cuts = (tuple(random.integers(0, lengths + 1).tolist()) for _ in range(2))
        left_out = LeftOut(int(random.integers(1, 9)), tuple(begins.tolist()), tuple(num_tasks.tolist()), *cuts)
    return LanePrograms(lengths[None], pairs, known, compute_s, tuple(seconds[1:]), (left_out,), (0, 1, 2, 3))


@compiled
@settings(max_examples=examples(2000, 36))
@given(st.integers(0, 2**32))
def test_bounds_of_any_programs_are_those_of_numpy(seed: int) -> None:
    random = np.random.default_rng(seed)
    programs = LanePrograms.stacked([_any_programs(random) for _ in range(2)])
    # Any weights will do: they need not be those of a machine.
    pairs = [SideBySide(*pair, random.random(), random.random(3) / 2) for pair in ((1, 2), (1, 3), (2, 3))]
    spread = random.integers(1, 5, 4).tolist()
    throughput = Throughput(random.integers(0, 5, (3, 4)) / 3, tuple(pairs), np.zeros((3, 4)))
    found, in_numpy = _both(lambda: least_periods_s(programs, throughput, spread))
    np.testing.assert_allclose(found, in_numpy, rtol=_ROUNDING_FRAC, atol=0)


@compiled
@settings(max_examples=examples(60, 4))
@given(brute_force.cases(), st.floats(0, 1))
def test_searches_answer_the_same(found: brute_force.Case, share: float) -> None:
    peaks = sorted({outcome.device_bytes for outcome in found.outcomes})
    budget_bytes = peaks[round(share * (len(peaks) - 1))]
    if min(outcome.iteration_s for outcome in found.feasible(budget_bytes)) > 0:
        of_plan, in_numpy = _both(lambda: found.search(budget_bytes, 0.01))
        assert _without_intervals(of_plan) == _without_intervals(in_numpy)
        compiled_s, own_s = (result.prediction.iteration_interval_s for result in (of_plan, in_numpy))
        assert compiled_s is not None
        assert own_s is not None
        assert (compiled_s.low, compiled_s.high) == pytest.approx((own_s.low, own_s.high), rel=_ROUNDING_FRAC)


def _without_intervals(result: SearchResult) -> dict[str, Any]:
    """Without the compiled replay, draws run in the simulator, and plans that were replayed alone have no interval."""

    def without(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: without(inner) for name, inner in value.items() if name not in _INTERVALS}
        return [without(inner) for inner in value] if isinstance(value, list) else value

    found: dict[str, Any] = without(result.model_dump(mode="json"))
    return found


_INTERVALS = ("iteration_interval_s", "ratio_interval", "peak_interval_bytes", "chance_oom")


# -- what has no answer ----------------------------------------------------------------------------------------------

_FOR_EACH_OTHER = {(0, 1): np.array([[1]]), (1, 0): np.array([[1]])}
"""Each of two lanes waits for the other's only task."""


@compiled
def test_lanes_that_wait_for_each_other_end_in_an_error() -> None:
    waits = {pair: of_pair[0] for pair, of_pair in _FOR_EACH_OTHER.items()}
    stuck = kernels.Replayable((1, 1), waits, (np.ones(1),))
    with pytest.raises(AssertionError, match="wait for each other"):
        stuck.period_s(np.ones(1), np.ones((4, 2)), num_iterations=3, steady_frac=1e-6)
    with pytest.raises(AssertionError, match="wait for each other"):
        known_before([{1: np.array([[1]])}, {0: np.array([[1]])}], (1, 1), 1)


@compiled
@pytest.mark.parametrize("second", [np.inf, np.nan])
def test_a_task_that_never_ends_ends_in_an_error(second: float) -> None:
    endless = kernels.Replayable((1, 1), {}, (np.array([second]),))
    with pytest.raises(AssertionError, match="never ends"):
        endless.period_s(np.ones(1), np.ones((4, 2)), num_iterations=3, steady_frac=1e-6)


@compiled
def test_arrays_of_other_shapes_do_not_reach_the_library() -> None:
    short = kernels.Replayable((2, 1), {(0, 1): np.zeros(1, dtype=np.int64)}, (np.ones(1),))
    with pytest.raises(AssertionError, match="shape"):
        short.period_s(np.ones(2), np.ones((4, 2)), num_iterations=3, steady_frac=1e-6)
    with pytest.raises(AssertionError, match="shape"):
        kernels.known_before({(0, 1): np.zeros((1, 2), dtype=np.int64)}, (3, 1), 1)


@compiled
def test_integers_of_other_sizes_are_read_as_what_they_are() -> None:
    # The wrong variant hands over the address of 32-bit integers.
    waits = {(1, 0): np.array([[2, 4]], dtype=np.int32)}
    of_lane = kernels.known_before(waits, (4, 2), 1)[1]  # type: ignore[arg-type]
    assert of_lane[0, 0].tolist() == [2, 4]


# -- which of the two does the work ----------------------------------------------------------------------------------


def test_the_description_says_why_numpy_does_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    with _in_numpy():
        assert library.description() == "numpy (PROTWIN_KERNELS is 0)"
    monkeypatch.setattr(library, "EXTENSION_SUFFIXES", [".elsewhere"])
    library._loaded.cache_clear()
    try:
        assert library.library() is None
        assert "found no C compiler" in library.description()
    finally:
        library._loaded.cache_clear()


@compiled
def test_a_library_of_another_version_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "_VERSION", 0)
    library._loaded.cache_clear()
    try:
        assert library.library() is None
        assert ", not 0: install protwin again" in library.description()
    finally:
        library._loaded.cache_clear()
