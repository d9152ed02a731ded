"""What stops a training after step() does not take back the step: CPU Adam of a completed iteration still runs."""

from __future__ import annotations

from functools import partial

import pytest

from protwin.runtime import Training
from tests.runtime.models import Case, cases, differences
from tests.runtime.resuming import offloaded, start
from tests.runtime.test_freshness import SlowOnHost
from tests.runtime.watchdog import FaultyDevice, ends_in_time


class Stop(Exception):
    """Told from every other error."""


def stopped_after_a_step(case: Case) -> list[str]:
    """Names of weights that are not at step 1, after an error in the next forward while CPU Adam is still slow."""
    model = case.build()
    slow = partial(SlowOnHost, lr=1e-2, weight_decay=0.1, fused=True)
    with (  # noqa: PT012
        ends_in_time(),
        pytest.raises(Stop),
        start(case, model, offloaded(case.workload), optimizer=slow) as training,
    ):
        case.loss(model, case.batches[0]).backward()
        training.step()
        assert not has_stepped_all(training), "CPU Adam is slower than this"
        raise Stop
    return differences(model, case.plain.weights[1])


def has_stepped_all(training: Training) -> bool:
    offloads = {task.chunk for task in training.schedule.tasks if task.kind == "cpu_adam"}
    return training.num_cpu_adam_steps >= len(offloads)


def test_an_error_after_a_step_does_not_take_it_back() -> None:
    assert stopped_after_a_step(cases()["llama"]) == []


def test_without_waiting_for_it_the_step_is_lost_in_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """The wrong variant."""
    monkeypatch.setattr(Training, "_finish_last_step", lambda _: None)
    assert stopped_after_a_step(cases()["llama"]) != []


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
