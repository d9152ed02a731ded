"""Public prices of the catalogue's machines, each with its day and its source (``data/prices.toml``)."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable
from functools import cache
from typing import Final

from ..answers.list_price import ListPrice, PriceKind
from ..schema.hardware import Hardware
from .data_files import data_folder
from .machines import machine

_FIRST: Final = (PriceKind.CLOUD, PriceKind.RENTAL)


@cache
def list_prices() -> tuple[ListPrice, ...]:
    """Every price, machine by machine; of each machine the one that counts first, as ``list_price`` chooses."""
    tables = tomllib.loads((data_folder("prices.toml")).read_text(encoding="utf-8"))
    found = [ListPrice(hardware_name=name, **entry) for name, entries in tables.items() for entry in entries]
    places = {name: place for place, name in enumerate(tables)}
    return tuple(sorted(found, key=lambda one: (places[one.hardware_name], _FIRST.index(one.kind), one.usd_per_hour)))


def list_price(hardware: Hardware) -> ListPrice | None:
    """The price of a machine: the lowest that a cloud lists, else the lowest of a rental market; None without any.

    Only where its devices are the catalogue's, and as many: another host, link or disk, or more machines of the same
    kind, leave the price of one as it is, but what a changed device would cost is on no list.
    """
    found = next((one for one in list_prices() if one.hardware_name == hardware.name), None)
    if found is None:
        return None
    listed = machine(hardware.name)
    return found if (hardware.device, hardware.node) == (listed.device, listed.node) else None


def with_list_prices(machines: Iterable[Hardware]) -> tuple[list[Hardware], tuple[ListPrice, ...]]:
    """The machines, those without a price at their list price, and the list prices that were taken."""
    priced, taken = [], []
    for hardware in machines:
        found = list_price(hardware) if hardware.price_usd_per_hour is None else None
        if found is not None:
            hardware = hardware.model_copy(update={"price_usd_per_hour": found.usd_per_hour})
            taken.append(found)
        priced.append(hardware)
    return priced, tuple(taken)
