"""A line about the training every few steps: how fast it goes, what it holds, and what it waits for."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from ...shared.basics.errors import ProtwinError
from ...shared.basics.units import format_bytes, format_number, format_seconds
from ...shared.schema.schedule import Lane, Schedule
from ..devices.device import TrainingDevice
from .recorder import IterationLog


@dataclass(frozen=True)
class StepSummary:
    """Some steps in a row; its text is one line."""

    step: int
    """Completed steps, with those before a resumption."""
    num_steps: int
    """Steps that it is about."""
    step_s: float
    """Mean seconds of a step, with whatever the loop does between steps."""
    samples_per_s: float
    tokens_per_s: float
    peak_device_bytes: int
    """Highest level of the device since training began."""
    busy_frac: Mapping[Lane, float]
    """Share of the time in which each lane had a task; lanes without tasks are left out."""
    predicted_step_s: float | None = None
    """What was predicted, if that is known."""
    held_blocks: Mapping[str, int] = field(default_factory=dict)
    """The blocks of a distillation that were held since their norm was not finite, and in how many of the steps."""

    def __str__(self) -> str:
        busy = ", ".join(f"{lane} {share:.0%}" for lane, share in self.busy_frac.items())
        lanes = f"; busy: {busy}" if busy else ""
        predicted = f" ({format_seconds(self.predicted_step_s)} predicted)" if self.predicted_step_s else ""
        of_blocks = ", ".join(
            name if self.num_steps == 1 else f"{name} ({number} of {self.num_steps} steps)"
            for name, number in self.held_blocks.items()
        )
        held = f"; {len(self.held_blocks)} blocks held, gradients not finite: {of_blocks}" if of_blocks else ""
        return (
            f"step {self.step}: {format_seconds(self.step_s)}{predicted}, "
            f"{format_number(self.tokens_per_s)} tokens/s, peak {format_bytes(self.peak_device_bytes)}{lanes}{held}"
        )


class Summaries:
    """Tells a summary every ``every`` steps.  Between them it costs a comparison per step."""

    def __init__(
        self,
        every: int,
        tell: Callable[[StepSummary], None],
        schedule: Schedule,
        device: TrainingDevice,
        *,
        num_samples: int,
        num_tokens: int,
        predicted_step_s: float | None,
    ) -> None:
        """``num_samples`` and ``num_tokens`` of one step.  Raises ProtwinError unless ``every`` is positive."""
        if every < 1:
            raise ProtwinError(f"a summary every {every} steps makes no sense; it must be at least 1.")
        self._every = every
        self._tell = tell
        self._schedule = schedule
        self._device = device
        self._num_samples = num_samples
        self._num_tokens = num_tokens
        self._predicted_step_s = predicted_step_s
        self._started_s = time.perf_counter()
        self._num_steps = 0
        self._held_blocks = Counter[str]()

    def go_on_by(self, schedule: Schedule) -> None:
        """The plan has changed: what was predicted holds no longer, and the pause is no step's."""
        self._schedule, self._predicted_step_s = schedule, None
        self._started_s, self._num_steps = time.perf_counter(), 0

    def end_step(
        self, step: int, peak_device_bytes: int, logs: Sequence[IterationLog], held_blocks: Sequence[str] = ()
    ) -> None:
        """A step has ended, in which some blocks were held; ``logs`` are of the latest iterations, oldest first."""
        self._num_steps += 1
        self._held_blocks.update(held_blocks)
        if self._num_steps < self._every:
            return
        now = time.perf_counter()
        step_s = (now - self._started_s) / self._num_steps
        self._started_s = now
        self._num_steps = 0
        held, self._held_blocks = self._held_blocks, Counter[str]()
        self._tell(
            StepSummary(
                step=step,
                num_steps=self._every,
                step_s=step_s,
                samples_per_s=self._num_samples / step_s,
                tokens_per_s=self._num_tokens / step_s,
                peak_device_bytes=peak_device_bytes,
                busy_frac=self._busy_frac(logs[-self._every - 1 :]),
                predicted_step_s=self._predicted_step_s,
                held_blocks=dict(held),
            )
        )

    def _busy_frac(self, logs: Sequence[IterationLog]) -> dict[Lane, float]:
        """Of the iterations but the latest, whose copies and CPU Adam may still run."""
        seconds = self._device.seconds
        ended = logs[:-1]
        if not ended:
            return {}
        whole_s = seconds(logs[-1].started) - seconds(ended[0].started)
        busy_s: dict[Lane, float] = {}
        for task in self._schedule.tasks:
            spans = [log.spans[task.id] for log in ended]
            took_s = sum(seconds(span.end) - seconds(span.start) for span in spans if span.end is not None)
            busy_s[task.lane] = busy_s.get(task.lane, 0.0) + took_s
        return {lane: busy_s[lane] / whole_s for lane in Lane if lane in busy_s}
