"""What other machines would change: a search for each changed part, and the largest batch with which a plan fits.

Every answer is a search of its own, certified like any other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from ..shared.calibration import Calibration
from ..shared.errors import InfeasibleError
from ..shared.hardware import Hardware, Link
from ..shared.search_result import WhatIf
from ..shared.units import format_bytes
from ..shared.workload import Workload
from .hunt import OnProgress
from .least_memory import least_device
from .search import search
from .search_problem import SearchProblem, default_host_budget_bytes, search_problem
from .space import SearchSpace
from .step_rule import StepRule

_MEMORY_STEP_BYTES = 2 * 2**30


@dataclass(frozen=True)
class Question:
    """A machine as it might be."""

    change: str
    hardware: Hardware
    device_budget_bytes: int
    host_budget_bytes: int


@dataclass(frozen=True)
class Setting:
    """What is searched, whatever the machine."""

    workload: Workload
    hardware: Hardware
    calibration: Calibration | None = None
    device_budget_bytes: int | None = None
    host_budget_bytes: int | None = None
    space: SearchSpace | None = None
    rule: StepRule = field(default_factory=StepRule)
    tolerance_frac: float = 0.005

    def problem(self, workload: Workload | None = None) -> SearchProblem:
        """The search's tables; ``workload``: instead of the setting's."""
        return search_problem(
            workload or self.workload,
            self.hardware,
            self.calibration,
            device_budget_bytes=self.device_budget_bytes,
            host_budget_bytes=self.host_budget_bytes,
            space=self.space,
            rule=self.rule,
        )

    def iteration_s(self, question: Question) -> float:
        """Seconds of the best plan's iteration.  Raises InfeasibleError if none fits."""
        found = search(
            self.workload,
            question.hardware,
            self.calibration,
            device_budget_bytes=question.device_budget_bytes,
            host_budget_bytes=question.host_budget_bytes,
            space=self.space,
            micro_batches=self.rule.micro_batches,
            max_gradient_norm=self.rule.max_gradient_norm,
            tolerance_frac=self.tolerance_frac,
        )
        return found.prediction.iteration_s


def what_if(
    setting: Setting,
    iteration_s: float,
    asked: Sequence[Question] | None = None,
    *,
    on_progress: OnProgress = lambda done, total: None,
) -> tuple[WhatIf, ...]:
    """Answers to what is asked, or to the usual questions; ``iteration_s`` is that of the best plan as things are."""
    asked = list(questions(setting)) if asked is None else asked
    answers = []
    for number, question in enumerate(asked):
        on_progress(number, len(asked))
        try:
            found_s = setting.iteration_s(question)
            answers.append(WhatIf(change=question.change, iteration_s=found_s, speedup=iteration_s / found_s))
        except InfeasibleError as error:
            answers.append(WhatIf(change=question.change, iteration_s=None, speedup=None, reason=str(error)))
    on_progress(len(asked), len(asked))
    return tuple(answers)


def questions(setting: Setting) -> Iterator[Question]:
    """Two GiB of device memory more and less, twice and half the host memory, and each part twice as fast.

    A part whose speed cannot show is left out: that of the device where the workload's seconds were measured.
    """
    box = setting.hardware
    device_bytes = setting.device_budget_bytes or box.device.usable_bytes
    host_bytes = setting.host_budget_bytes
    if host_bytes is None:
        host_bytes = default_host_budget_bytes(box, device_bytes)
    step = format_bytes(_MEMORY_STEP_BYTES)
    yield Question(f"{step} more device memory", box, device_bytes + _MEMORY_STEP_BYTES, host_bytes)
    if device_bytes > _MEMORY_STEP_BYTES:
        yield Question(f"{step} less device memory", box, device_bytes - _MEMORY_STEP_BYTES, host_bytes)
    yield Question("twice the host memory", box, device_bytes, 2 * host_bytes)
    yield Question("half the host memory", box, device_bytes, host_bytes // 2)
    links = {name: _twice_as_fast(getattr(box, name)) for name in ("host_to_device", "device_to_host")}
    yield Question("links twice as fast", box.model_copy(update=links), device_bytes, host_bytes)
    faster_host = box.host.model_copy(
        update={
            "num_cores": 2 * box.host.num_cores,
            "memory_bandwidth_bytes_per_s": 2 * box.host.memory_bandwidth_bytes_per_s,
            "adam_bytes_per_s": None if box.host.adam_bytes_per_s is None else 2 * box.host.adam_bytes_per_s,
        }
    )
    faster = box.model_copy(update={"host": faster_host})
    yield Question("twice the cores and host memory bandwidth", faster, device_bytes, host_bytes)
    if setting.workload.measured_on != box.name:
        device = box.device
        faster_device = device.model_copy(
            update={
                "peak_flop_per_s": {dtype: 2 * peak for dtype, peak in device.peak_flop_per_s.items()},
                "vector_flop_per_s": 2 * device.vector_flop_per_s,
                "memory_bandwidth_bytes_per_s": 2 * device.memory_bandwidth_bytes_per_s,
            }
        )
        yield Question(
            "a device twice as fast", box.model_copy(update={"device": faster_device}), device_bytes, host_bytes
        )


def _twice_as_fast(link: Link) -> Link:
    table = tuple(point.model_copy(update={"seconds": point.seconds / 2}) for point in link.table)
    return link.model_copy(update={"bandwidth_bytes_per_s": 2 * link.bandwidth_bytes_per_s, "table": table})


def largest_batch(setting: Setting, workload_at: Callable[[int], Workload]) -> int | None:
    """The largest batch below the setting's with which some plan fits, in samples; None if none does.

    ``workload_at``: the workload at a batch of so many samples.  By halving the range, one is found that fits while
    the next larger one does not.
    """
    fits, fails = 0, setting.workload.num_samples
    while fails - fits > 1:
        middle = (fits + fails) // 2
        fits, fails = (middle, fails) if _fits(setting.problem(workload_at(middle))) else (fits, middle)
    return fits or None


def _fits(problem: SearchProblem) -> bool:
    least = least_device(problem, problem.host_budget_bytes)
    return least is not None and least.device_bytes <= problem.device_budget_bytes
