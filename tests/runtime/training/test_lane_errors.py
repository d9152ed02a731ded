"""Errors of lanes surface on the main thread, and leave an ordinary model."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import pytest
import torch

from protwin.runtime import CpuDevice, CpuOutOfMemoryError
from protwin.shared.layout.layout import build_layout
from tests.runtime.life_cycle import CHUNK_BYTES, check_ordinary, ordinary_facts, start, train
from tests.runtime.models import Case, cases, differences
from tests.runtime.watchdog import FaultyDevice, ends_in_time


@pytest.fixture
def case() -> Case:
    return cases()["llama"]


class FailingAdam(torch.optim.AdamW):
    """Fails at its n-th step on the host, or on the device."""

    remaining = 0
    fails_on_host = True

    def step(self, closure: Any = None) -> Any:
        if (threading.current_thread() is not threading.main_thread()) == FailingAdam.fails_on_host:
            FailingAdam.remaining -= 1
            if FailingAdam.remaining == 0:
                raise ZeroDivisionError("in the optimizer")
        return super().step(closure)


@pytest.mark.parametrize("number", [1, 5, 40])
def test_an_error_in_cpu_adam_surfaces_on_the_main_thread(case: Case, number: int) -> None:
    model = case.build()
    facts = ordinary_facts(model)
    FailingAdam.remaining, FailingAdam.fails_on_host = number, True
    failing = partial(FailingAdam, lr=1e-2, weight_decay=0.1, fused=True)
    with (
        ends_in_time(),
        pytest.raises(ZeroDivisionError, match="in the optimizer") as raised,
        start(case, model, optimizer=failing) as training,
    ):
        train(case, model, training)
    assert any(frame.name == "step_on_host" for frame in raised.traceback)
    check_ordinary(model, facts)


def test_an_error_in_the_last_cpu_adam_surfaces_when_training_closes(case: Case) -> None:
    """Nothing waits for it but close."""
    model = case.build()
    facts = ordinary_facts(model)
    layout = build_layout(case.workload.parameters, num_blocks=4, chunk_bytes=CHUNK_BYTES)
    FailingAdam.remaining, FailingAdam.fails_on_host = len(layout.chunks[2:]), True
    failing = partial(FailingAdam, lr=1e-2, weight_decay=0.1, fused=True)
    with ends_in_time():
        training = start(case, model, optimizer=failing)
        try:
            train(case, model, training, 1)
        except ZeroDivisionError:
            with suppress(ZeroDivisionError):
                training.close()
            pytest.skip("the last CPU Adam was faster than the step on the device")
        with pytest.raises(ZeroDivisionError, match="in the optimizer"):
            training.close()
        training.close()
    check_ordinary(model, facts)


def test_an_error_in_device_adam(case: Case) -> None:
    model = case.build()
    facts = ordinary_facts(model)
    FailingAdam.remaining, FailingAdam.fails_on_host = 2, False
    failing = partial(FailingAdam, lr=1e-2, weight_decay=0.1, fused=True)
    with (
        ends_in_time(),
        pytest.raises(ZeroDivisionError, match="in the optimizer"),
        start(case, model, optimizer=failing) as training,
    ):
        train(case, model, training)
    check_ordinary(model, facts)


def fail_to_copy() -> None:
    raise OSError("a copy failed")


@pytest.mark.parametrize("to_device", [True, False])
@pytest.mark.parametrize("number", [1, 9, 30])
def test_an_error_in_a_copy_surfaces_on_the_main_thread(case: Case, number: int, to_device: bool) -> None:
    model = case.build()
    facts = ordinary_facts(model)
    device = FaultyDevice(fail_to_copy, to_device=to_device, copy_number=number)
    with (
        ends_in_time(),
        pytest.raises(OSError, match="a copy failed"),
        start(case, model, device=device) as training,
    ):
        train(case, model, training)
    check_ordinary(model, facts)
    assert device.ledger.named_bytes == 0


def test_a_failed_training_says_so_until_it_is_closed(case: Case) -> None:
    model = case.build()
    device = FaultyDevice(fail_to_copy, to_device=True, copy_number=9)
    with ends_in_time():
        training = start(case, model, device=device)
        with pytest.raises(OSError, match="a copy failed"):
            train(case, model, training)
        for attempt in (training.step, lambda: model(**case.batches[0]), lambda: training.set_learning_rate(0.1)):
            with pytest.raises(training_error(), match="a copy failed") as raised:
                attempt()
            assert isinstance(raised.value.__cause__, OSError)
        training.close()


def training_error() -> type[Exception]:
    from protwin.shared.basics.errors import ScheduleError

    return ScheduleError


@pytest.mark.parametrize("number", [3, 25, 60])
def test_out_of_memory_in_a_gather(case: Case, number: int) -> None:
    """For the n-th gather alone the budget is what is there: the compute thread raises what the gather raised."""
    model = case.build()
    facts = ordinary_facts(model)
    device = CpuDevice()
    with (  # noqa: PT012
        ends_in_time(),
        pytest.raises(CpuOutOfMemoryError, match=r"chunk \d+ needs"),
        start(case, model, device=device) as training,
    ):
        allocate, remaining = device.ledger.allocate, number

        def allocate_or_shrink(size_bytes: int, name: str, *content: Any) -> None:
            nonlocal remaining
            remaining -= 1
            if remaining == 0:
                device.ledger.budget_bytes = device.ledger.level_bytes
            try:
                allocate(size_bytes, name, *content)
            finally:
                device.ledger.budget_bytes = None

        device.ledger.allocate = allocate_or_shrink  # type: ignore[method-assign]
        train(case, model, training)
    check_ordinary(model, facts)
    assert device.ledger.named_bytes == 0


def test_setting_up_that_fails_leaves_the_model(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """At every stage: in an optimizer, in a lane's thread, in the hooks."""
    from protwin.runtime.lanes import transfer_lanes
    from protwin.runtime.training import assembly

    def fail(*_: Any, **__: Any) -> Any:
        raise ZeroDivisionError("in the middle")

    stages: list[tuple[dict[str, Any], Callable[[pytest.MonkeyPatch], None]]] = [
        ({"optimizer": fail}, lambda patch: None),
        ({}, lambda patch: patch.setattr(transfer_lanes, "WorkerLane", fail)),
        ({}, lambda patch: patch.setattr(assembly, "SectionWalker", fail)),
    ]
    for settings, break_it in stages:
        model = case.build()
        facts = ordinary_facts(model)
        with monkeypatch.context() as patch, ends_in_time():
            break_it(patch)
            with pytest.raises(ZeroDivisionError, match="in the middle"):
                start(case, model, **settings)
        check_ordinary(model, facts)
        assert differences(model, case.plain.weights[0]) == []
        with ends_in_time(), start(case, model) as training_again:
            assert train(case, model, training_again, 2) == case.plain.losses[:2]
