"""What machines are rented for, as the user states it; what public lists say is in ``list_prices.py``.

A price is US dollars per hour of a whole machine, with all of its devices.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from ..basics.documents import read_mapping
from ..basics.errors import CatalogueError, FileError, HardwareError
from ..basics.suggestions import did_you_mean
from ..schema.hardware import Hardware
from .machines import cluster_names, machine_names
from .names import machine_called
from .plausibility import price_range

_EXAMPLE: Final = "h100-80gb-x8=24"


@dataclass(frozen=True, slots=True)
class Prices:
    """US dollars per hour by the names of machines."""

    named: Mapping[str, float] = field(default_factory=dict)
    """Stated one by one: each is for a machine that is asked about."""
    listed: Mapping[str, float] = field(default_factory=dict)
    """Of files, which may list more machines than are asked about."""

    def of(self, machine_name: str) -> float | None:
        """The price of a machine: the one stated for it, else that of a file; None if there is none."""
        return self.named.get(machine_name, self.listed.get(machine_name))


def parse_prices(entries: Iterable[str]) -> Prices:
    """Prices from ``NAME=USD`` and from files of them (``prices.toml``, ``prices.json``); later files go first.

    A file is a table from names to prices: ``h100-80gb-x8 = 24.0``.  Raises HardwareError if an entry is neither, if a
    machine is named twice or a price is impossible, FileError if a file is damaged.
    """
    named: dict[str, float] = {}
    listed: dict[str, float] = {}
    for entry in entries:
        name, equals, price = (part.strip() for part in entry.rpartition("="))
        if equals and not entry.endswith((".toml", ".json")):
            if not name:
                raise HardwareError(f"the price {entry!r} names no machine. Write it as {_EXAMPLE}.")
            name = machine_called(name) or name
            if name in named:
                raise HardwareError(f"the price {entry!r} is the second one of {name}. Give it one.")
            named[name] = _checked(name, price, origin="the price")
        elif entry.endswith((".toml", ".json")):
            listed |= _read(Path(entry))
        else:
            raise HardwareError(
                f"{entry!r} is no price. Write it as {_EXAMPLE}, in US dollars per hour of the whole machine, or name "
                f"a .toml file of such lines."
            )
    return Prices(named, listed)


def with_prices(machines: Iterable[Hardware], prices: Prices) -> list[Hardware]:
    """The machines with the prices that are stated for their names; others keep their own.

    Raises CatalogueError if a price that was stated by itself is of no machine among them.
    """
    found = list(machines)
    names = [machine.name for machine in found]
    for name in prices.named:
        if name not in names:
            raise CatalogueError(_not_asked(name, names))
    return [machine if (price := prices.of(machine.name)) is None else _priced(machine, price) for machine in found]


def _priced(machine: Hardware, price: float) -> Hardware:
    return machine.model_copy(update={"price_usd_per_hour": price})


def _not_asked(name: str, names: list[str]) -> str:
    known = (*machine_names(), *cluster_names())
    if len(names) == 1:
        return f"a price is stated for {name!r}, but {names[0]} is asked about. Write {names[0]}=24."
    if name in known:
        return f"a price is stated for {name!r}, which is not among the machines that are asked about. Leave it out."
    return f"a price is stated for {name!r}, which is no machine. {did_you_mean(name, names)}"


def _read(path: Path) -> dict[str, float]:
    content = read_mapping(path)
    if not content:
        raise FileError(f"{path} lists no prices. Write lines such as h100-80gb-x8 = 24.0.")
    if "kind" in content and "schema_version" in content:
        raise FileError(
            f"{path} is a {content['kind']} file of protwin, and no list of prices. Write lines such as h100-80gb-x8 = "
            f"24.0."
        )
    try:
        return {name: _checked(name, price, origin=f"{path}: the price") for name, price in content.items()}
    except HardwareError as error:
        raise FileError(str(error)) from error


def _checked(name: str, price: object, *, origin: str) -> float:
    """The price as a number.  Raises HardwareError."""
    try:
        if isinstance(price, bool) or not isinstance(price, str | int | float):
            raise ValueError
        value = float(price)
    except ValueError:
        raise HardwareError(
            f"{origin} of {name} is {price!r:.60}, which is no number. Write US dollars per hour, as in {_EXAMPLE}."
        ) from None
    low, high = price_range()
    if not low <= value <= high:
        raise HardwareError(
            f"{origin} of {name} is {value:.6g} USD an hour, outside {low:g} to {high:g}. Write it as {name}=24."
        )
    return value
