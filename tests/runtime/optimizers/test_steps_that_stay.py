"""Where a step cannot be given up, and where there is none to give up."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Any

import pytest

from protwin.runtime import CpuOutOfMemoryError
from protwin.runtime.chunks.chunk import DeviceChunk
from protwin.runtime.chunks.model_optimizers import ModelOptimizers
from protwin.runtime.chunks.placed_model import PlacedModel
from protwin.shared.basics.errors import ScheduleError
from tests.runtime.eager_lanes import settle
from tests.runtime.life_cycle import check_ordinary, ordinary_facts
from tests.runtime.models import Case, cases, differences
from tests.runtime.skipping import Fault, run_step, start
from tests.runtime.watchdog import ends_in_time


@pytest.fixture
def case() -> Case:
    return cases()["llama"]


def test_a_step_that_has_begun_is_not_given_up_by_halves(case: Case) -> None:
    """At will nothing is lost: the step can be completed, and training goes on."""
    model = case.build()
    with ends_in_time(), start(case, model) as training:
        for batch in case.batches:
            case.loss(model, batch).backward()
            settle(training)
            with pytest.raises(
                ScheduleError,
                match=r"CPU Adam.*has begun \d+ of its \d+ steps.*step\(\).*max_gradient_norm.*keep_last_step",
            ):
                training.skip_step()
            training.step()
    assert differences(model, case.plain.weights[-1]) == []


def test_after_an_error_that_came_too_late_the_training_is_to_be_closed(case: Case) -> None:
    model = case.build()
    facts = ordinary_facts(model)
    with ends_in_time(), start(case, model) as training:
        case.loss(model, case.batches[0]).backward()
        settle(training)
        training._compute.failed(Fault())
        with pytest.raises(ScheduleError, match=r"Close the training.*checkpoint"):
            training.skip_step()
        with pytest.raises(ScheduleError, match="has failed"):
            training.step()
    check_ordinary(model, facts)


def test_a_device_step_that_was_interrupted_is_not_given_up(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    model = case.build()
    with ends_in_time(), start(case, model, keep_last_step=True) as training:
        case.loss(model, case.batches[0]).backward()
        with monkeypatch.context() as patched:
            patched.setattr(ModelOptimizers, "count_state", lambda _: (_ for _ in ()).throw(Fault()))
            with pytest.raises(Fault):
                training.step()
        with pytest.raises(ScheduleError, match="the step on the device has begun"):
            training.skip_step()


def test_an_earlier_step_that_failed_is_not_given_up(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was completed for the loop; the chunks that could not be stepped are behind the others."""
    model, may_fail = case.build(), threading.Event()
    step_on_host = PlacedModel.step_on_host

    def step(placed: PlacedModel, chunk: DeviceChunk, present: Sequence[bool], **scale: Any) -> None:
        if placed.optimizers.host[chunk.chunk.id].num_steps == 1:
            may_fail.wait(30)
            raise CpuOutOfMemoryError("out of memory, as was wished")
        step_on_host(placed, chunk, present, **scale)

    monkeypatch.setattr(PlacedModel, "step_on_host", step)
    with ends_in_time(), start(case, model) as training:
        for batch in case.batches[:2]:
            run_step(case, model, training, [batch])
        may_fail.set()
        with pytest.raises(CpuOutOfMemoryError):
            case.loss(model, case.batches[2])
        with pytest.raises(CpuOutOfMemoryError):
            training.skip_step()
        for attempt in (training.skip_step, training.step):
            with pytest.raises(ScheduleError, match=r"(cannot go on|has failed).*Close it\.$"):
                attempt()


def test_no_earlier_step_can_fail_where_the_last_one_is_kept(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """The step on the device waits for CPU Adam; what fails there fails in ``step()`` and can be given up."""
    model, failures = case.build(), iter((True,))
    step_on_host = PlacedModel.step_on_host

    def step(placed: PlacedModel, chunk: DeviceChunk, present: Sequence[bool], **scale: Any) -> None:
        if placed.optimizers.host[chunk.chunk.id].num_steps == 1 and next(failures, False):
            time.sleep(0.2)
            raise CpuOutOfMemoryError("out of memory, as was wished")
        step_on_host(placed, chunk, present, **scale)

    monkeypatch.setattr(PlacedModel, "step_on_host", step)
    with ends_in_time(), start(case, model, keep_last_step=True) as training:
        run_step(case, model, training, [case.batches[0]])
        with pytest.raises(CpuOutOfMemoryError):
            run_step(case, model, training, [case.batches[1]])
        training.skip_step()
        for batch in case.batches[1:]:
            run_step(case, model, training, [batch])
    assert differences(model, case.plain.weights[-1]) == []


def test_nothing_to_give_up(case: Case) -> None:
    model = case.build()
    with ends_in_time(), start(case, model) as training:
        training.skip_step()
        for batch in case.batches:
            run_step(case, model, training, [batch])
            training.skip_step()
    assert differences(model, case.plain.weights[-1]) == []
    with pytest.raises(ScheduleError, match="closed"):
        training.skip_step()


def test_the_loss_of_an_iteration_that_was_given_up_runs_no_backward(case: Case) -> None:
    model = case.build()
    with ends_in_time(), start(case, model) as training:
        for batch in case.batches:
            loss = case.loss(model, batch)
            training.skip_step()
            for _ in range(2):
                with pytest.raises(ScheduleError, match="graph of an earlier forward"):
                    loss.backward(retain_graph=True)
            del loss
            run_step(case, model, training, [batch])
    assert differences(model, case.plain.weights[-1]) == []
