"""A training that goes on and on grows nothing; the long version is ``make prove``."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from protwin.runtime import CpuDevice
from protwin.runtime.recording import recorder as recording
from tests.proof_size import some_quick
from tests.runtime.eager_lanes import settle
from tests.runtime.growth import FLOOR_BYTES, Growth, Held, growth_over, tenths
from tests.runtime.models import cases
from tests.runtime.resuming import kept, mixed, start


@pytest.fixture(autouse=True)
def _few_logs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A training keeps the times of few iterations, so that they are all there soon."""
    monkeypatch.setattr(recording, "_KEPT_LOGS", 20)


def growth(plan_of: Any, also: Callable[[Any], object] = lambda _: None, **knobs: Any) -> Growth:
    case = cases()["llama"]
    device, model = CpuDevice(), case.build()
    batches = itertools.cycle(case.batches)
    plan = plan_of(case.workload).model_copy(update=knobs)
    with start(case, model, plan, device=device) as training:

        def do_step() -> None:
            for _ in range(plan.micro_batches):
                case.loss(model, next(batches)).backward()
            training.step()
            training.synchronize()
            settle(training)
            also(training)

        return growth_over(30, do_step, device, warm_up=25)


@some_quick(("plan_of", "knobs"), [(mixed, {"micro_batches": 2, "max_gradient_norm": 1.0}), (kept, {})], quick=1)
def test_steps_grow_nothing_that_can_be_counted(plan_of: Any, knobs: dict[str, Any]) -> None:
    found = growth(plan_of, **knobs)
    assert found.grown == []
    assert found.before.num_tensors > 50


def test_what_grows_is_noticed() -> None:
    """The wrong variants: a tensor, an open file, bytes that the ledger is never told are gone."""
    device, kept_for_ever = CpuDevice(), []
    leaks: dict[str, Callable[[], object]] = {
        "num_tensors": lambda: kept_for_ever.append(torch.ones(3)),
        "num_descriptors": lambda: kept_for_ever.append(open("/dev/null")),  # noqa: SIM115
        "ledger_bytes": lambda: device.ledger.allocate(1, "leak"),
    }
    for name, leak in leaks.items():
        assert growth_over(20, leak, device, warm_up=2).grown[0].startswith(name)
        for found in kept_for_ever:
            if not isinstance(found, torch.Tensor):
                found.close()
        kept_for_ever.clear()
    gc.collect()
    assert growth_over(20, lambda: torch.ones(3), device, warm_up=2).grown == []


def of_rss(values: list[int]) -> Growth:
    nothing = Held(0, 0, 0, 0, 0)
    return Growth(len(values), nothing, nothing, tenths(values))


def test_a_process_that_leaks_is_told_from_one_whose_memory_jumps() -> None:
    steady_leak = of_rss([10**9 + 4096 * step for step in range(1000)])
    assert steady_leak.rss_growth_bytes > steady_leak.rss_bound_bytes
    jump = of_rss([10**9 + 2**24 * (step > 300) for step in range(1000)])
    assert 0 < jump.rss_growth_bytes <= jump.rss_bound_bytes
    restless = of_rss([10**9 + 10_000 * (step % 7) for step in range(1000)])
    assert restless.rss_growth_bytes <= restless.rss_bound_bytes == FLOOR_BYTES
