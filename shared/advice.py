"""Which machines were asked about, and what each would do: the outcome of ``protwin advise``."""

from __future__ import annotations

from math import inf
from typing import ClassVar

from pydantic import NonNegativeFloat, PositiveFloat, PositiveInt

from .files import Document, FrozenModel
from .plan import Plan


class MachineAdvice(FrozenModel):
    """The best plan on one machine; without ``plan``, why there is none."""

    hardware_name: str
    price_usd_per_hour: PositiveFloat | None
    """Of one device with its share of the machine."""
    plan: Plan | None = None
    micro_batch_size: PositiveInt | None = None
    iteration_s: PositiveFloat | None = None
    num_tokens: PositiveInt | None = None
    """Per iteration."""
    tokens_per_s: PositiveFloat | None = None
    usd_per_million_tokens: PositiveFloat | None = None
    """None without a price."""
    guaranteed_peak_device_bytes: PositiveInt | None = None
    is_certified: bool = False
    """Whether the search proved its plan the best; false where there is no plan."""
    gap_frac: NonNegativeFloat | None = None
    """How much faster any plan of the space could at most be."""
    reason: str = ""
    """Why no plan fits; empty where one does."""

    def rank(self) -> tuple[float, str]:
        """Fastest first, machines that nothing fits last."""
        return (inf if self.iteration_s is None else self.iteration_s), self.hardware_name


class Advice(Document):
    """Machines ranked by time."""

    KIND: ClassVar[str] = "advice"

    model: str
    """As it was asked for: a name of the catalogue or a file."""
    sequence_length: int | None
    """Tokens per sample; None where the model's file fixes it, or has none."""
    global_batch_size: PositiveInt
    """Samples per step."""
    machines: tuple[MachineAdvice, ...]
    """Fastest first."""
    unanswered: tuple[str, ...] = ()
    """Machines that were asked about too, but that Ctrl-C left no time for."""

    @property
    def is_complete(self) -> bool:
        """Whether every machine that was asked about is ranked."""
        return not self.unanswered

    @property
    def by_cost(self) -> tuple[MachineAdvice, ...]:
        """Those with a plan and a price, cheapest token first."""
        priced = [(cost, one) for one in self.machines if (cost := one.usd_per_million_tokens) is not None]
        return tuple(one for _, one in sorted(priced, key=lambda pair: (pair[0], pair[1].hardware_name)))


class AdviceState(Document):
    """Answers so far, so that a sweep that was interrupted goes on where it ended."""

    KIND: ClassVar[str] = "advice_state"

    request: str
    """What they are answers to (``sim/advise.py``)."""
    answers: dict[str, MachineAdvice]
    """By the hash of the machine's description."""
