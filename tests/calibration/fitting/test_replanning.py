"""A training that is measured, searched for again, and goes on by a better plan, bit for bit as if it had not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from protwin.calibration import Replanner
from protwin.runtime import CpuDevice, carry_out
from protwin.runtime.recording.replanning import LEAST_STEPS
from protwin.shared.basics.errors import PlanError, ProtwinError
from protwin.shared.schema.plan import Plan
from protwin.shared.schema.record import Record
from protwin.sim import GlobalBatch, SearchRequest, SearchSpace
from tests.calibration.fitting.test_budgeted import HERE
from tests.runtime.models import SEED, Case, adamw, differences, llama, token_batches
from tests.runtime.resuming import kept, offloaded, on_disk

_STEPS = LEAST_STEPS + 2
CASE = Case(partial(llama, num_layers=2), token_batches(_STEPS))
_SLOW_LINK = 2e6


def trained(plan: Plan, replan: Any, device: CpuDevice) -> tuple[list[Plan], Any, list[float]]:
    """The plans of all steps, the model and the losses."""
    model, found, losses = CASE.build(), [], []
    with carry_out(
        model, plan, CASE.workload, optimizer=adamw, device=device, replan_after=LEAST_STEPS, replan=replan
    ) as training:
        torch.manual_seed(SEED)
        for batch in CASE.batches:
            found.append(training.plan)
            loss = CASE.loss(model, batch)
            loss.backward()
            training.step()
            losses.append(loss.item())
    return found, model, losses


def as_if_quiet(replanner: Replanner) -> Callable[[Record], Plan | None]:
    """Asks of records of a busy machine too, which are refused otherwise."""
    return lambda record: replanner(record.model_copy(update={"iteration_noise_frac": 0.0}))


def request(**changes: Any) -> SearchRequest:
    return SearchRequest(**{"workload": CASE.workload, "hardware": HERE} | changes)


def test_training_changes_to_a_plan_that_does_without_a_slow_link() -> None:
    told: list[str] = []
    replanner = Replanner(request(), told.append)
    before = offloaded(CASE.workload)
    plans, model, losses = trained(before, as_if_quiet(replanner), CpuDevice(host_to_device_bytes_per_s=_SLOW_LINK))
    assert plans[:LEAST_STEPS] == [before] * LEAST_STEPS
    assert plans[LEAST_STEPS] == plans[-1]
    assert plans[-1].n_persist > before.n_persist
    assert losses == CASE.plain.losses
    assert differences(model, CASE.plain.weights[-1]) == []
    assert len(told) == 1
    assert "changes to a plan of" in told[0]
    assert replanner.calibration is not None
    assert replanner.calibration.fitted_to == (CASE.workload.model_name,)


def test_what_no_plan_beats_stays() -> None:
    told: list[str] = []
    here = kept(CASE.workload)
    space = SearchSpace(chunk_bytes=here.chunk_bytes, n_persist=here.n_persist, n_checkpoint=0, n_swap=0)
    plans, _, losses = trained(here, as_if_quiet(Replanner(request(space=space), told.append)), CpuDevice())
    assert plans == [kept(CASE.workload)] * _STEPS
    assert losses == CASE.plain.losses
    assert len(told) == 1
    assert "no plan is faster" in told[0]
    assert "it stays" in told[0]


def test_a_record_of_a_busy_machine_says_nothing() -> None:
    told: list[str] = []
    replanner = Replanner(request(), told.append)

    def busy(record: Record) -> Plan | None:
        return replanner(record.model_copy(update={"iteration_noise_frac": 0.7}))

    busy.tell = told.append  # type: ignore[attr-defined]
    plans, _, losses = trained(offloaded(CASE.workload), busy, CpuDevice(host_to_device_bytes_per_s=_SLOW_LINK))
    assert plans == [offloaded(CASE.workload)] * _STEPS
    assert losses == CASE.plain.losses
    assert len(told) == 1
    assert "the plan stays as it is: iterations of the record lie 70% apart" in told[0]


def test_what_stands_against_it_is_told_and_training_goes_on(capsys: pytest.CaptureFixture[str]) -> None:
    elsewhere = replace(request(), hardware=HERE.model_copy(update={"name": "another machine"}))
    plans, _, losses = trained(kept(CASE.workload), Replanner(elsewhere), CpuDevice())
    assert plans == [kept(CASE.workload)] * _STEPS
    assert losses == CASE.plain.losses
    assert "the plan stays as it is: the record was measured on" in capsys.readouterr().err


def test_a_plan_that_does_not_fit_is_no_better_one(capsys: pytest.CaptureFixture[str]) -> None:
    def impossible(record: Record) -> Plan:
        return record.plan.model_copy(update={"micro_batches": 2})

    plans, _, losses = trained(kept(CASE.workload), impossible, CpuDevice())
    assert plans == [kept(CASE.workload)] * _STEPS
    assert losses == CASE.plain.losses
    assert "micro_batches = 2" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("plan", "arguments", "said"),
    [
        (kept, {"replan_after": 20}, "who searches a plan"),
        (kept, {"replan": lambda record: None}, "how many steps are measured"),
        (kept, {"replan_after": LEAST_STEPS - 1, "replan": lambda record: None}, f"Give {LEAST_STEPS} or more"),
        (on_disk, {"replan_after": 20, "replan": lambda record: None}, "on a disk"),
    ],
)
def test_what_cannot_be_replanned_is_refused_at_once(plan: Any, arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(ProtwinError, match=said):
        carry_out(CASE.build(), plan(CASE.workload), CASE.workload, **arguments)


def test_a_global_batch_is_not_what_is_trained() -> None:
    several = GlobalBatch(num_samples=4, workload_at=lambda samples: CASE.workload)
    with pytest.raises(PlanError, match="own micro-batch"):
        Replanner(request(workload=several))(None)  # type: ignore[arg-type]
