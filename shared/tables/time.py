"""Where the time of an iteration goes, and what would shorten it, in words."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from ..schema.plan import Plan
from ..schema.record import Origin, Record
from ..schema.schedule import TaskKind
from ..schema.time_accounts import IterationPhase, Remedy, RemedyKind
from .labels import KIND_NAMES, knobs

_SMALLEST_FRAC: Final = 0.01
"""Of the iteration: shorter waits are not told one by one."""
_REMEDY_NAMES: Final[dict[RemedyKind, str]] = {
    RemedyKind.HOST: "twice the cores and host memory bandwidth",
    RemedyKind.LINKS: "links to the host twice as fast",
    RemedyKind.DEVICE: "a device twice as fast",
    RemedyKind.DEVICE_LINKS: "links between devices twice as fast",
    RemedyKind.NETWORK: "a network twice as fast",
}


@dataclass(frozen=True, slots=True)
class PhasePart:
    """Part of a phase: compute at work, or waiting for one cause."""

    name: str
    seconds: float
    is_waiting: bool
    cause: TaskKind | None = None


def phase_parts(record: Record, phase: IterationPhase, *, smallest_frac: float = _SMALLEST_FRAC) -> list[PhasePart]:
    """Compute's own time and its waits; together they are the phase.

    ``smallest_frac``: waits below this share of the iteration are added up, as waits for other tasks.  Nothing where
    they come to no more than that together: the phase is then compute's own time.
    """
    waits = record.waits_in(phase)
    least_s = smallest_frac * record.iteration_s
    told = [wait for wait in waits if wait.seconds > least_s]
    waiting_s = sum(wait.seconds for wait in waits)
    if waiting_s <= least_s:
        return []
    parts = [PhasePart("computing", max(0.0, record.phase_s(phase) - waiting_s), is_waiting=False)]
    parts += [
        PhasePart(f"waiting for {cause_name(wait.cause, record.origin)}", wait.seconds, True, wait.cause)
        for wait in told
    ]
    rest_s = sum(wait.seconds for wait in waits if wait.seconds <= least_s)
    if rest_s > 0:
        parts.append(PhasePart("waiting for other tasks" if told else "waiting", rest_s, is_waiting=True))
    return parts


def cause_name(cause: TaskKind | None, origin: Origin) -> str:
    """``"CPU Adam"``; where no task is the cause, what is then to blame."""
    if cause is not None:
        return KIND_NAMES[cause]
    return "slower ranks" if origin is Origin.SIMULATED else "tasks to be started"


def remedy_sentence(record: Record) -> str:
    """``"Twice the cores and host memory bandwidth: 1.9 times the tokens; batch 4: 3.6 times."``; empty without any."""
    told: list[str] = []
    for remedy in record.remedies:
        tokens = " the tokens per second" if not told else ""
        told.append(f"{_remedy_name(remedy, record.plan)}: {remedy.speedup:.2f} times{tokens}")
    sentence = "; ".join(told)
    return f"{sentence[0].upper()}{sentence[1:]}." if sentence else ""


def _remedy_name(remedy: Remedy, plan: Plan) -> str:
    if remedy.kind is not RemedyKind.BATCH:
        return _REMEDY_NAMES[remedy.kind]
    now = {knob.name: knob.value for knob in knobs(plan)}
    changed = [f"{knob.name} {knob.value}" for knob in knobs(remedy.plan) if knob.value != now.get(knob.name)]
    return f"batch {remedy.num_samples}" + (f" with {', '.join(changed)}" if changed else "")
