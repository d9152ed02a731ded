"""Calls in any order: what is allowed follows from what has been done, and what was refused changes nothing."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from protwin.runtime import carry_out
from protwin.runtime.lanes.progress import TRANSITIONS, Call, Progress, TrainingPhase
from protwin.shared.basics.errors import ScheduleError
from tests.proof_size import examples
from tests.runtime.life_cycle import plan_for
from tests.runtime.models import Case, cases, differences, snapshot, uncached
from tests.runtime.watchdog import ends_in_time

MICRO_BATCHES = 2
BETWEEN_STEPS = ("evaluation", "save", "state_dict", "set_learning_rate")
CALLS = ("forward", "backward", "step", "skip_step", *BETWEEN_STEPS, "fail", "lose", "close")
LIKELY = ("forward", "backward", "forward", "backward", "step")


@dataclass
class Done:
    """What was done since the last step, by counting: an oracle that knows no phases."""

    forwards: int = 0
    backwards: int = 0
    has_failed: bool = False
    is_lost: bool = False
    is_closed: bool = False

    def refusal(self, call: str) -> str | None:
        """What the refusal says; None if the call is allowed."""
        if self.is_closed:
            return None if call in ("close", "fail") else "this training is closed"
        if call in ("close", "fail"):
            return None
        if call in ("skip_step", "lose"):
            return "this training cannot go on: " if self.is_lost else None
        if self.has_failed or self.is_lost:
            return "this training has failed: "
        if call == "forward" and (self.forwards > self.backwards or self.backwards == MICRO_BATCHES):
            return "forward began before the last one was complete"
        if call == "step" and self.forwards == 0:
            return "without a forward"
        if call == "step" and self.forwards > self.backwards:
            return "before backward has ended"
        if call == "step" and self.backwards < MICRO_BATCHES:
            return f"after {self.backwards} of {MICRO_BATCHES} micro-batches"
        if call in BETWEEN_STEPS and self.forwards > 0:
            return "between step() and the next forward alone".replace("(", r"\(").replace(")", r"\)")
        return None

    @property
    def phase(self) -> TrainingPhase:
        if self.is_closed:
            return TrainingPhase.CLOSED
        if self.is_lost:
            return TrainingPhase.LOST
        if self.has_failed:
            return TrainingPhase.FAILED
        if self.forwards > self.backwards:
            return TrainingPhase.FORWARD
        if self.backwards == MICRO_BATCHES:
            return TrainingPhase.STEP
        return TrainingPhase.BETWEEN_MICRO_BATCHES if self.backwards else TrainingPhase.IDLE


class Driver:
    """A training and the plain loop, driven by the same calls."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.done = Done()
        self.model, self.plain = case.build(), uncached(case.build())
        plan = plan_for(case.workload).model_copy(update={"micro_batches": MICRO_BATCHES})
        self.training = carry_out(
            self.model, plan, case.workload, optimizer=case.make_optimizer, keep_last_step=True, meter_every=None
        )
        self.optimizer = case.make_optimizer(case.groups(self.plain))
        self._losses: list[torch.Tensor] = []

    def call(self, name: str) -> None:
        refusal = self.done.refusal(name)
        if name == "backward" and self.done.forwards == self.done.backwards:
            return  # no loss to run it from
        if name in ("backward", "forward") and self.done.is_closed:
            return  # the model is the user's again
        if name == "backward" and refusal is not None:
            return  # what becomes of a graph whose training has failed is told by other tests
        if refusal is None:
            getattr(self, name)()
        else:
            with pytest.raises(ScheduleError, match=refusal):
                getattr(self, name)()
        assert self.training._progress.phase is self.done.phase

    def _loss(self, model: nn.Module) -> torch.Tensor:
        torch.manual_seed(self.done.forwards)  # of dropout
        batch = self.case.batches[self.done.forwards % len(self.case.batches)]
        return self.case.loss(model, batch) / MICRO_BATCHES

    def forward(self) -> None:
        losses = [self._loss(self.model), self._loss(self.plain)]
        self._losses = losses
        self.done.forwards += 1

    def backward(self) -> None:
        phases: list[TrainingPhase] = []
        norm = next(p for p in self.model.parameters() if p.requires_grad)
        handle = norm.register_hook(lambda _: phases.append(self.training._progress.phase))
        for loss in self._losses:
            loss.backward()
        handle.remove()
        assert phases == [TrainingPhase.BACKWARD]
        self.done.backwards += 1

    def step(self) -> None:
        self.training.step()
        self.optimizer.step()
        self._give_up()

    def skip_step(self) -> None:
        self.training.skip_step()
        self._give_up()

    def _give_up(self) -> None:
        self.optimizer.zero_grad()
        self.done = Done()

    def evaluation(self) -> None:
        progress = self.training._progress
        with self.training.evaluation():
            assert progress.phase is TrainingPhase.EVALUATING
            self._loss(self.model)
            self.training.state_dict()
            self.training.skip_step()
            with pytest.raises(ScheduleError, match="within evaluation"), self.training.evaluation():
                pass
            with pytest.raises(ScheduleError, match="without a forward"):
                self.training.step()
            assert progress.phase is TrainingPhase.EVALUATING

    def save(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            self.training.save(Path(folder) / "saved")

    def state_dict(self) -> None:
        state = self.training.state_dict()
        assert [n for n, value in snapshot(self.plain).items() if not torch.equal(value, state[n])] == []

    def set_learning_rate(self) -> None:
        self.training.set_learning_rate(self.training.optimizer.param_groups[0]["lr"])

    def fail(self) -> None:
        self.training._compute.failed(RuntimeError("injected"))
        self.done.has_failed = not self.done.is_closed

    def lose(self) -> None:
        """A step that is given up, which is interrupted half-way."""
        placed, take_back = self.training._placed, self.training._placed.take_back_steps
        has_begun = self.done.forwards > 0 or self.done.has_failed

        def interrupted(**_: int) -> None:
            placed.take_back_steps = take_back  # type: ignore[method-assign]
            raise KeyboardInterrupt

        placed.take_back_steps = interrupted  # type: ignore[method-assign]
        try:
            self.training.skip_step()
        except KeyboardInterrupt:
            self.done.is_lost = True
        finally:
            placed.take_back_steps = take_back  # type: ignore[method-assign]
        assert self.done.is_lost == has_begun

    def close(self) -> None:
        self.training.close()
        self.done.is_closed = True


@pytest.fixture(scope="module")
def case() -> Case:
    """The one that is built fastest."""
    return cases()["hand-written, frozen tail"]


@settings(deadline=None, max_examples=examples(100, 10))
@given(
    calls=st.lists(
        st.one_of(st.sampled_from([LIKELY]), st.tuples(st.sampled_from(CALLS))), min_size=1, max_size=12
    ).map(lambda parts: [call for part in parts for call in part])
)
def test_calls_in_any_order(case: Case, calls: list[str]) -> None:
    with ends_in_time():
        driver = Driver(case)
        try:
            for name in calls:
                driver.call(name)
        finally:
            driver.training.close()
    assert differences(driver.model, snapshot(driver.plain)) == []


@pytest.mark.parametrize(
    ("phase", "call", "calls"),
    [
        (TrainingPhase.FORWARD, Call.STEP, ["forward", "step"]),
        (TrainingPhase.STEP, Call.FORWARD, ["forward", "backward"] * MICRO_BATCHES + ["forward"]),
        (TrainingPhase.FORWARD, Call.BETWEEN_STEPS, ["forward", "set_learning_rate"]),
    ],
    ids=["a step before its backward", "a forward after the last", "a rate within an iteration"],
)
def test_a_table_that_allows_too_much_shows(
    case: Case, phase: TrainingPhase, call: Call, calls: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wrong variants."""
    monkeypatch.setitem(TRANSITIONS, phase, {**TRANSITIONS[phase], call: TrainingPhase.IDLE})  # type: ignore[arg-type]
    driver = Driver(case)

    def run() -> None:
        for name in calls:
            driver.call(name)

    with ends_in_time(), driver.training:
        with pytest.raises((AssertionError, ScheduleError, pytest.fail.Exception)):
            run()
        driver.training.skip_step()


def test_the_table_is_whole() -> None:
    """Every phase has a row, is reached, and can end; nothing leads out of a training that is closed."""
    assert set(TRANSITIONS) == set(TrainingPhase)
    reached = {phase for row in TRANSITIONS.values() for phase in row.values()}
    assert reached == set(TrainingPhase)
    assert all(row[Call.CLOSE] is TrainingPhase.CLOSED for row in TRANSITIONS.values())
    assert set(TRANSITIONS[TrainingPhase.CLOSED].values()) == {TrainingPhase.CLOSED}


def test_an_interruption_of_a_change_finds_the_training_lost() -> None:
    progress = Progress(1)

    def change() -> None:
        with progress.changing(Call.EVALUATE):
            assert progress.phase is TrainingPhase.LOST
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        change()
    assert progress.phase is TrainingPhase.LOST
