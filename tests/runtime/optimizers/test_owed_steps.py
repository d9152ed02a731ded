"""What stops a training after step() does not take back the step: CPU Adam of a completed iteration still runs."""

from __future__ import annotations

import threading
from functools import partial
from typing import Any

import pytest
import torch

from protwin.runtime import Training
from tests.runtime.models import Case, cases, differences
from tests.runtime.resuming import offloaded, start
from tests.runtime.watchdog import FaultyDevice, ends_in_time


class Stop(Exception):
    """Told from every other error."""


class Gated(torch.optim.AdamW):
    """AdamW that waits, where CPU Adam runs, until it may go on."""

    gate = threading.Event()

    def step(self, closure: Any = None) -> Any:
        if threading.current_thread() is not threading.main_thread():
            Gated.gate.wait(30)
        return super().step(closure)


def stopped_after_a_step(case: Case, seconds: float = 0.2) -> list[str]:
    """Names of weights that are not at step 1, after an error behind step() and ``seconds`` before any CPU Adam."""
    model = case.build()
    Gated.gate.clear()
    with (  # noqa: PT012
        ends_in_time(),
        pytest.raises(Stop),
        start(
            case, model, offloaded(case.workload), optimizer=partial(Gated, lr=1e-2, weight_decay=0.1, fused=True)
        ) as training,
    ):
        case.loss(model, case.batches[0]).backward()
        training.step()
        assert training.num_cpu_adam_steps == 0
        threading.Timer(seconds, Gated.gate.set).start()
        raise Stop
    return differences(model, case.plain.weights[1])


def test_an_error_after_a_step_does_not_take_it_back() -> None:
    assert stopped_after_a_step(cases()["llama"]) == []


def test_without_waiting_for_it_the_step_is_lost_in_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """The wrong variant; on a busy machine it may not have let go of the step that soon."""
    monkeypatch.setattr(Training, "_finish_last_step", lambda _: None)
    assert any(stopped_after_a_step(cases()["llama"], seconds) for seconds in (0.2, 2.0, 20.0))


def fail_to_copy() -> None:
    raise OSError("a copy failed")


@pytest.mark.parametrize("to_device", [True, False])
@pytest.mark.parametrize("number", [8, 14, 20])
def test_a_lane_that_failed_holds_nothing_up(number: int, to_device: bool) -> None:
    """Whatever can still be stepped is; what cannot is not waited for."""
    case = cases()["llama"]
    model = case.build()
    device = FaultyDevice(fail_to_copy, to_device=to_device, copy_number=number)
    with (  # noqa: PT012
        ends_in_time(),
        pytest.raises(OSError, match="a copy failed"),
        start(case, model, offloaded(case.workload), device=device) as training,
    ):
        for batch in case.batches:
            case.loss(model, batch).backward()
            training.step()
