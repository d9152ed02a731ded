"""What training on a number of tokens takes: the question of the bill."""

from __future__ import annotations

from pydantic import NonNegativeFloat, PositiveFloat, PositiveInt

from ..basics.documents import FrozenModel


class TrainingRun(FrozenModel):
    """Time, energy and cost of training on so many tokens, at the pace of one steady iteration."""

    num_tokens: PositiveInt
    """As asked for."""
    num_steps: PositiveInt
    """Optimizer steps that go through them, the last one whole."""
    time_s: PositiveFloat
    """Of all steps, without starting up, evaluating and saving."""
    energy_kwh: NonNegativeFloat | None = None
    """Kilowatt-hours of all devices at their limit of power, hosts and cooling not among them: an upper estimate.  None
    where no power is known."""
    cost_usd: NonNegativeFloat | None = None
    """Rent of the machines for this time, in US dollars; None where no price is known."""
