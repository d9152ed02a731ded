"""Where the time of an iteration goes, and what would shorten it."""

from __future__ import annotations

from enum import StrEnum

from pydantic import NonNegativeFloat, PositiveFloat, PositiveInt

from ..basics.documents import FrozenModel
from .plan import Plan
from .schedule import TaskKind


class IterationPhase(StrEnum):
    """The parts of an iteration that people speak of."""

    FORWARD = "forward"
    BACKWARD = "backward"
    """Recomputation included."""
    OPTIMIZER = "optimizer"
    """From the end of backward to the start of the next iteration."""


class PhaseWait(FrozenModel):
    """Time in which compute waits, of one phase and for one cause."""

    phase: IterationPhase
    cause: TaskKind | None
    """What ran at that time and held the next compute task up, directly or through other tasks that wait for it.  None
    where all of that had ended: time to start a task, or in a prediction of unlike ranks, waiting for another rank."""
    seconds: NonNegativeFloat


class RemedyKind(StrEnum):
    """What a remedy changes."""

    HOST = "host"
    """Twice the cores and host memory bandwidth."""
    LINKS = "links"
    """Links between host and device twice as fast."""
    DEVICE = "device"
    """A device twice as fast."""
    DEVICE_LINKS = "device_links"
    """Links between the devices of a node twice as fast."""
    NETWORK = "network"
    """A network between nodes that is twice as fast."""
    BATCH = "batch"
    """A larger batch."""


class Remedy(FrozenModel):
    """What one change of machine or batch does to a plan, simulated with nothing else changed."""

    kind: RemedyKind
    num_samples: PositiveInt
    """Samples of one rank's micro-batch then."""
    plan: Plan
    """The plan that was simulated: the record's own, or if a larger batch needs the memory, one that keeps less."""
    iteration_s: PositiveFloat
    speedup: PositiveFloat
    """How many times as many tokens per second."""
