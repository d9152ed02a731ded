"""Training runs that others measured and published (``runs.toml``), and what a prediction of one of their figures is.

They are predicted from data sheets and configurations alone (``make published``).  Nothing is fitted to them.
"""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from enum import StrEnum
from importlib.resources import files
from typing import Any, Final, Self

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt

from ...shared.basics.documents import FrozenModel

ON_DEVICE: Final = "everything on the device"
DATA_PARALLEL: Final = "on the device, data parallel on 4"
REPLICATED: Final = "offloaded, replicated on 4"
SHARDED: Final = "offloaded, sharded over 4"
PLAN_OF_130_CHUNKS: Final = "113 of 130 chunks persistent"
LARGEST_ON_24_GB: Final = "one RTX 3090 (24 GB)"
LARGEST_ON_80_GB: Final = "one A100 (80 GB)"
LONGEST_ON_ONE_H100: Final = "Llama-3.1-8B, one H100 (80 GB)"
ADAM_128_THREADS: Final = "Llama-2-7B, 128 threads"
ADAM_32_THREADS: Final = "Llama-2-7B, 32 threads"
ADAM_4210R: Final = "1.35 B parameters, Xeon 4210R"


class Quantity(StrEnum):
    """What was measured; the unit follows from it."""

    ITERATION = "iteration_s"
    DEVICE_PEAK = "peak_device_bytes"
    PINNED = "pinned_host_bytes"
    LARGEST = "num_parameters"
    LONGEST = "sequence_length"
    ADAM = "update_s"


class Measurement(FrozenModel):
    """One published figure."""

    row: str
    """The run that it belongs to, R1 to R7."""
    case: str
    """Which of the run's configurations, in words; with ``quantity`` it names the figure."""
    quantity: Quantity
    readings: tuple[PositiveFloat, ...]
    """The figure in units of ``quantity``; several where the page can be read in several ways, the likely one first."""


class ShardedRun(FrozenModel):
    """What one run of R6 trained, on every rank."""

    case: str
    model: str
    """Its name in the catalogue."""
    batch_size: PositiveInt
    sequence_length: PositiveInt
    num_ranks: PositiveInt
    checkpointed_frac: NonNegativeFloat | None = Field(default=None, le=1)
    """Share of the blocks that are checkpointed; None where operations are chosen instead."""
    tokens_per_s: PositiveFloat
    """Measured, of one rank."""

    @property
    def iteration_s(self) -> float:
        """Seconds of one iteration."""
        return self.batch_size * self.sequence_length / self.tokens_per_s


class PublishedRun(FrozenModel):
    """One run: what it was, what is unknown, and what was measured."""

    row: str
    title: str
    source: str
    unknown: tuple[str, ...]
    measurements: tuple[Measurement, ...] = ()
    sharded: tuple[ShardedRun, ...] = ()
    """The configurations whose figures were published in tokens/s; ``measurements`` has their seconds."""
    remark: str | None = None
    """What the figures themselves say of one another, and where predictions miss and why."""
    not_predicted: str | None = None
    """Why nothing is predicted; None where something is."""

    @classmethod
    def from_row(cls, content: dict[str, Any]) -> Self:
        """One table of ``runs.toml``: its measurements do not repeat the row, and tokens/s become seconds."""
        row = content["row"]
        sharded = tuple(ShardedRun.model_validate(run) for run in content.get("sharded", ()))
        stated = [Measurement(row=row, **figure) for figure in content.get("measurements", ())]
        derived = [
            Measurement(row=row, case=run.case, quantity=Quantity.ITERATION, readings=(run.iteration_s,))
            for run in sharded
        ]
        return cls.model_validate({**content, "sharded": sharded, "measurements": (*stated, *derived)})


class Prediction(FrozenModel):
    """A published figure as the simulator sees it, as a range over what is unknown; units of ``quantity``."""

    row: str
    case: str
    quantity: Quantity
    variant: str = ""
    """Which of several readings of the case; empty for the one that counts."""
    low: PositiveFloat
    likely: PositiveFloat
    high: PositiveFloat
    how: str
    """What is modelled, and how."""
    is_given: bool = False
    """Whether the measurement itself was put in, so that agreement says nothing."""

    @classmethod
    def of(
        cls,
        row: str,
        case: str,
        quantity: Quantity,
        readings: Sequence[float],
        *,
        how: str,
        variant: str = "",
        is_given: bool = False,
    ) -> Self:
        """From the favourable, the likely and the unfavourable reading."""
        _, likely, _ = readings
        return cls(
            row=row,
            case=case,
            quantity=quantity,
            variant=variant,
            low=min(readings),
            likely=likely,
            high=max(readings),
            how=how,
            is_given=is_given,
        )

    def error_frac(self, measured: float) -> float:
        """Signed: positive where more was predicted than measured."""
        return self.likely / measured - 1

    def reaches(self, readings: Sequence[float], within_frac: float = 0.0) -> bool:
        """Whether some reading of what is unknown comes as near as ``within_frac`` to a reading of the measurement."""
        return any(
            self.low <= reading * (1 + within_frac) and self.high >= reading * (1 - within_frac) for reading in readings
        )


def _shipped_runs() -> tuple[PublishedRun, ...]:
    content = tomllib.loads(files(__package__).joinpath("runs.toml").read_text(encoding="utf-8"))
    return tuple(PublishedRun.from_row(run) for run in content["runs"])


PUBLISHED_RUNS: Final = _shipped_runs()
