"""What repeated work takes, beside others that take the cores away: on a clock that the test moves."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from itertools import chain, cycle, repeat
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from protwin.runtime import CpuDevice
from protwin.runtime.devices import probe
from protwin.runtime.devices.repeated_timing import repeated_s, undisturbed_s
from protwin.shared.basics.errors import ProtwinError


class Work:
    """Calls of given lengths, and a clock that only they move."""

    def __init__(self, times: Iterator[float]) -> None:
        self.times = times
        self.now_s = 0.0
        self.calls = 0

    def once(self) -> float:
        took_s = next(self.times)
        self.now_s += took_s
        self.calls += 1
        return took_s

    def clock(self) -> float:
        return self.now_s


def beside_another(alone_s: float, share: float, random: Random) -> Iterator[float]:
    """So much of the calls waits for a quantum or several; the others differ by a few hundredths."""
    while True:
        waited_s = random.uniform(0.004, 0.04) if random.random() < share else 0.0
        yield alone_s * random.uniform(1.0, 1.03) + waited_s


def few(once: Callable[[], float], of: Callable[[list[float]], float]) -> float:
    """The wrong variants: of a handful of calls."""
    return of([once() for _ in range(5)])


@given(
    alone_s=st.floats(2e-6, 2e-3),
    share=st.floats(0, 0.5),
    budget_s=st.floats(0.3, 1.0),
    seed=st.integers(0, 2**32),
)
def test_others_do_not_move_what_short_work_takes(alone_s: float, share: float, budget_s: float, seed: int) -> None:
    work = Work(beside_another(alone_s, share, Random(seed)))
    found_s = repeated_s(work.once, budget_s, clock=work.clock)
    assert alone_s <= found_s <= 1.03 * alone_s
    assert work.now_s <= 4 * budget_s + 0.3


def test_means_and_medians_of_few_are_moved() -> None:
    alone_s, wrong = 20e-6, {statistics.mean: 0, statistics.median: 0, min: 0}
    for seed in range(100):
        for of in wrong:
            work = Work(beside_another(alone_s, 0.7, Random(seed)))
            wrong[of] += few(work.once, of) > 10 * alone_s
        work = Work(beside_another(alone_s, 0.7, Random(seed)))
        assert repeated_s(work.once, 0.5, clock=work.clock) <= 1.03 * alone_s
    assert wrong[statistics.mean] > 90
    assert wrong[statistics.median] > 70
    assert wrong[min] > 5, "the least of few is not enough either"


def test_a_disturbance_that_lasts_does_not_fill_the_measurement() -> None:
    """The first 2 000 calls meet another process; the wrong variant ends after 1 000."""
    times = chain(repeat(5e-4, 2000), repeat(2e-5))
    work = Work(times)
    assert repeated_s(work.once, 1.2, clock=work.clock) == 2e-5
    assert undisturbed_s([5e-4] * 1000) == 5e-4


@given(alone_s=st.floats(0.01, 0.5), seed=st.integers(0, 2**32))
def test_long_work_takes_what_it_takes_with_its_share_of_others(alone_s: float, seed: int) -> None:
    random = Random(seed)
    times = [alone_s * random.uniform(1.0, 1.5) for _ in range(200)]
    work = Work(iter(times))
    found_s = repeated_s(work.once, 10 * alone_s, clock=work.clock)
    assert found_s == statistics.median(times[1 : work.calls])
    assert work.calls <= 13


@pytest.mark.parametrize("alone_s", [1e-3, 0.1])
def test_there_are_a_few_calls_however_short_the_time(alone_s: float) -> None:
    work = Work(repeat(alone_s))
    assert repeated_s(work.once, 1e-9, clock=work.clock) == alone_s
    assert work.calls >= 4


def test_first_calls_do_not_count() -> None:
    work = Work(chain([9.0], repeat(0.1)))
    assert repeated_s(work.once, 1.0, clock=work.clock) == 0.1


@pytest.mark.parametrize(
    ("flop_per_s", "budget_s", "side"),
    [(6e10, 0.33, 1024), (1e9, 0.33, 512), (1e9, 3.0, 1024), (1e9, 0.005, 128), (1e6, 0.33, 128)],
)
def test_a_product_that_would_take_too_long_is_made_smaller(
    flop_per_s: float, budget_s: float, side: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By hand: 2 x 1024^3 operations are 2.1 s at 1 GFLOP/s, with half of the side 0.27 s; most calls are disturbed."""
    calls = cycle((9.0, 0.5, 0.0, 7.0, 8.0))
    monkeypatch.setattr(probe, "_host_timer", lambda _: lambda: 2 * 128**3 / flop_per_s + next(calls))
    assert probe._affordable_matrix(torch.bfloat16, budget_s) == side


def test_products_are_measured_in_every_type_that_a_cpu_trains_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine that is made up, with rates of its own, and 1 ms for all that is no product."""
    rates = {torch.float64: 1e10, torch.float32: 2e10, torch.bfloat16: 5e9}
    monkeypatch.setattr(probe, "_product", lambda size, _, dtype: 2 * size**3 / rates[dtype])
    monkeypatch.setattr(probe, "_host_timer", lambda work: lambda: work if isinstance(work, float) else 1e-3)
    peaks = probe._device(CpuDevice(), 0.01, lambda: None).peak_flop_per_s
    assert peaks == pytest.approx({str(dtype).removeprefix("torch."): rate for dtype, rate in rates.items()})


@pytest.mark.parametrize("seconds", [0, -1.0, float("nan"), float("inf"), "1", None])
def test_a_probe_takes_some_seconds_and_not_for_ever(seconds: Any) -> None:
    with pytest.raises(ProtwinError, match="seconds is"):
        probe.probe_hardware(seconds=seconds)


@pytest.mark.slow
def test_a_probe_leaves_a_core_only_where_it_is_told_to(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its figures are those of the threads that training gets; a library leaves the caller's threads alone."""
    threads, before = [], torch.get_num_threads()
    monkeypatch.setattr(probe, "num_cores", lambda: 3)
    monkeypatch.setattr("protwin.runtime.devices.process_settings.num_cores", lambda: 3)
    original = probe._vector_flop_per_s

    def vector_flop_per_s(target: torch.device, budget_s: float) -> float:
        threads.append(torch.get_num_threads())
        return original(target, budget_s)

    monkeypatch.setattr(probe, "_vector_flop_per_s", vector_flop_per_s)
    try:
        probe.probe_hardware(seconds=0.1, device=CpuDevice())
        assert torch.get_num_threads() == before
        probe.probe_hardware(seconds=0.1, device=CpuDevice(), leaves_a_core=True)
    finally:
        torch.set_num_threads(before)
    assert threads == [before, 2]
