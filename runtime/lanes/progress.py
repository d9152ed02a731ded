"""Where a training is: its phase, what each phase allows, the iterations that are complete, and what ended it."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from enum import Enum, auto
from typing import Any, Final, Never
from weakref import WeakSet

from ...shared.basics.errors import ScheduleError
from ...shared.schema.schedule import Task


class TrainingPhase(Enum):
    """What a training is doing, and what is on the device meanwhile."""

    IDLE = auto()
    """Between two iterations.  On the device: persistent chunks, and what lanes gather ahead of the next forward; CPU
    Adam may still step chunks of the last iteration."""
    FORWARD = auto()
    """A micro-batch's forward has begun, its backward has not: chunks come and go, activations pile up."""
    BACKWARD = auto()
    """A micro-batch's backward has begun and not ended: activations go, gradients leave for the host."""
    BETWEEN_MICRO_BATCHES = auto()
    """A micro-batch is through, and the iteration has more.  Gradients of persistent chunks wait on the device."""
    STEP = auto()
    """Backward of the last micro-batch has ended: the step on the device is due, or runs."""
    EVALUATING = auto()
    """Forward alone.  No lane runs, and every offloaded chunk is away but those of the block that runs."""
    FAILED = auto()
    """An error has stopped the iteration.  Weights are of whole steps, or can be again: ``skip_step`` goes on."""
    LOST = auto()
    """A change of the whole training (a resume, a step that is given up) is under way, or has ended by an error and
    left it half done: then no iteration can begin any more."""
    CLOSED = auto()
    """The model has ordinary parameters again."""


class Call(Enum):
    """What users, autograd and errors do to a training."""

    FORWARD = auto()
    BACKWARD = auto()
    END_MICRO_BATCH = auto()
    """Backward ends, and the iteration has more micro-batches."""
    END_BACKWARD = auto()
    """Backward of the last micro-batch ends."""
    STEP = auto()
    """The step on the device ends."""
    BETWEEN_STEPS = auto()
    """Weights or options are read or replaced: save, resume, state_dict, set_learning_rate."""
    EVALUATE = auto()
    END_EVALUATION = auto()
    SKIP_STEP = auto()
    FAIL = auto()
    CLOSE = auto()


_P, _C = TrainingPhase, Call
_ENDS: Final = {_C.FAIL: _P.FAILED, _C.CLOSE: _P.CLOSED}
_GIVEN_UP: Final = {_C.SKIP_STEP: _P.IDLE, **_ENDS}
TRANSITIONS: Final[Mapping[TrainingPhase, Mapping[Call, TrainingPhase]]] = {
    _P.IDLE: {_C.FORWARD: _P.FORWARD, _C.BETWEEN_STEPS: _P.IDLE, _C.EVALUATE: _P.EVALUATING, **_GIVEN_UP},
    _P.FORWARD: {_C.BACKWARD: _P.BACKWARD, **_GIVEN_UP},
    _P.BACKWARD: {_C.END_MICRO_BATCH: _P.BETWEEN_MICRO_BATCHES, _C.END_BACKWARD: _P.STEP, **_GIVEN_UP},
    _P.BETWEEN_MICRO_BATCHES: {_C.FORWARD: _P.FORWARD, **_GIVEN_UP},
    _P.STEP: {_C.STEP: _P.IDLE, **_GIVEN_UP},
    _P.EVALUATING: {_C.BETWEEN_STEPS: _P.EVALUATING, _C.END_EVALUATION: _P.IDLE, **_ENDS},
    _P.FAILED: _GIVEN_UP,
    # A scheduler may set the learning rate while it is being resumed.
    _P.LOST: {_C.BETWEEN_STEPS: _P.LOST, _C.FAIL: _P.LOST, _C.CLOSE: _P.CLOSED},
    # ``with`` closes once more, and has an error told that came after the first time.
    _P.CLOSED: {_C.FAIL: _P.CLOSED, _C.CLOSE: _P.CLOSED},
}
"""The phase that follows each call in each phase; a call that a row does not name is refused."""


class Progress:
    """Of one training.  Changed by the compute thread alone, or by autograd's in its place."""

    def __init__(self, micro_batches: int) -> None:
        """``micro_batches``: of an iteration, for messages."""
        self.phase = TrainingPhase.IDLE
        self.iteration = 0
        """Iterations that are complete."""
        self.failure: BaseException | None = None
        """What ended training, or the iteration."""
        self._is_forked = False
        self._micro_batches = micro_batches
        _OF_PROCESS.add(self)

    def end_in_fork(self) -> None:
        """Nothing can go on: the process was forked from the one that trains, and has none of its threads."""
        self._is_forked = True
        self.phase = TrainingPhase.CLOSED

    @property
    def is_idle(self) -> bool:
        """Whether there is no iteration that could be given up."""
        return self.phase in (TrainingPhase.IDLE, TrainingPhase.EVALUATING)

    def allows(self, call: Call) -> bool:
        """Whether the table has it."""
        return call in TRANSITIONS[self.phase]

    def advance(self, call: Call) -> None:
        """``call`` has happened."""
        assert self.allows(call), f"{call} in {self.phase}"
        self.phase = TRANSITIONS[self.phase][call]

    def fail(self, error: BaseException) -> None:
        """Remember what ended training, if nothing has yet."""
        self.failure = self.failure or error
        self.advance(Call.FAIL)

    @contextmanager
    def changing(self, call: Call) -> Iterator[None]:
        """Within the block ``call`` is half done; if it ends by an error, no iteration can begin any more."""
        self.check_whole()
        assert self.allows(call), f"{call} in {self.phase}"
        after = TRANSITIONS[self.phase][call]
        # First of all: an interruption at any later place finds the training lost.
        self.phase = TrainingPhase.LOST
        yield
        self.phase = after

    # -- refusals ----------------------------------------------------------------------------------------------------

    def check(self, call: Call, task: Task, what: str = "") -> None:
        """Raise ScheduleError unless ``call`` is allowed now.

        ``task`` is the one that the iteration is at; ``what`` says what it is that needs a place between two steps.
        """
        self.check_usable()
        if self.allows(call):
            return
        if call is Call.FORWARD:
            raise ScheduleError(
                f"forward began before the last one was complete: the iteration is at {task.name}. Call "
                f"loss.backward() after every forward, and step() after as many of both as the plan has micro-batches "
                f"({self._micro_batches}); a search for more has step=Step(micro_batches=...). If something failed on "
                f"the way, call skip_step() to begin a new iteration."
            )
        if call is Call.STEP:
            raise self._no_step(task)
        if call is Call.EVALUATE and self.phase is TrainingPhase.EVALUATING:
            raise ScheduleError("evaluation() within evaluation(). Leave the outer block first.")
        raise ScheduleError(
            f"{what} between step() and the next forward alone; the iteration is at {task.name}. Call it after step(), "
            f"or after skip_step()."
        )

    def _no_step(self, task: Task) -> ScheduleError:
        if self.phase is TrainingPhase.BETWEEN_MICRO_BATCHES:
            return ScheduleError(
                f"step() after {task.micro_batch} of {self._micro_batches} micro-batches. Call the model and "
                f"loss.backward() for each of them first, or change micro_batches of the plan. Where an epoch ends and "
                f"there are no more, call protwin.runtime.fill_step(training, lambda: loss_of(batch)) before step()."
            )
        if self.phase in (TrainingPhase.FORWARD, TrainingPhase.BACKWARD):
            return ScheduleError(
                f"step() before backward has ended: the iteration is at {task.name}. Call loss.backward() first, on a "
                f"loss that depends on the model's output."
            )
        return ScheduleError("step() without a forward. Call the model and loss.backward() first.")

    def check_open(self) -> None:
        """Raise ScheduleError if the training is closed."""
        if self._is_forked:
            raise ScheduleError(
                "this process was forked while a plan was being carried out: the lanes that bring the model's weights "
                "run in the process that it was forked from. Fork before carry_out() or after close(), or start "
                "processes by multiprocessing.get_context('spawn') with weights of training.state_dict()."
            )
        if self.phase is TrainingPhase.CLOSED:
            raise ScheduleError("this training is closed. Carry the plan out again.")

    def check_records(self) -> None:
        """Raise ScheduleError if ranks cannot make a record together any more."""
        if self.phase is TrainingPhase.CLOSED:
            raise ScheduleError(
                "ranks make a record together, but this training is closed. Call record() before close()."
            )

    def check_usable(self) -> None:
        """Raise ScheduleError if the training is closed, or has failed."""
        self.check_open()
        if self.failure is not None:
            is_lost = self.phase is TrainingPhase.LOST
            go_on = "" if is_lost else ", or call skip_step() to go on without the iteration that failed"
            raise ScheduleError(f"this training has failed: {self.failure}. Close it{go_on}.") from self.failure

    def check_whole(self) -> None:
        """Raise ScheduleError if something was left half done."""
        if self.phase is TrainingPhase.LOST:
            raise ScheduleError(f"this training cannot go on: {self.failure}. Close it.") from self.failure


def refuse_copy(training: object, *_: Any) -> Never:
    """In the place of ``__reduce_ex__``: raises ScheduleError."""
    raise ScheduleError(
        f"a {type(training).__name__} was to be copied or pickled, but it has threads, and memory of the device. Save "
        f"it by save(folder), or take the weights by state_dict()."
    )


_OF_PROCESS: Final[WeakSet[Progress]] = WeakSet()
"""Of every training of this process."""


def _end_in_fork() -> None:
    for progress in _OF_PROCESS:
        progress.end_in_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_end_in_fork)
