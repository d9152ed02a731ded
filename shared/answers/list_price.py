"""What a machine was publicly listed for on a day that is told."""

from __future__ import annotations

from datetime import date
from enum import StrEnum
from typing import Final

from pydantic import PositiveFloat

from ..basics.documents import FrozenModel, Name


class PriceKind(StrEnum):
    """Who lets the machine."""

    CLOUD = "cloud"
    """A provider, on demand, at a price that it lists."""
    RENTAL = "rental"
    """The owners of machines, on a market: prices move by the day."""

    @property
    def words(self) -> str:
        """As tables say it."""
        return _WORDS[self]


_WORDS: Final = {PriceKind.CLOUD: "cloud, on demand", PriceKind.RENTAL: "rental market"}


class ListPrice(FrozenModel):
    """One public price of one machine of the catalogue."""

    hardware_name: Name
    usd_per_hour: PositiveFloat
    """Of one whole machine, with all of its devices; without tax."""
    kind: PriceKind
    provider: str
    """Who lists it."""
    offer: str
    """What the provider calls it."""
    stated: date
    """The day on which the price was read."""
    source: str
    """The address where it was found."""
    listed: str = ""
    """The address of the provider's own page, where ``source`` names it."""

    @property
    def words(self) -> str:
        """Provider, offer and day."""
        return f"{self.provider}, {self.offer}, read on {self.stated}"
