"""How users that run side by side share resources that cannot serve all of them at full speed."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Final, TypeVar

_Resource = TypeVar("_Resource", bound=Hashable)
_ROUNDING: Final = 1e-12
"""Relative, of float64, by definition: a resource that is this close to its capacity is full."""


def fair_shares(
    demands: Sequence[Mapping[_Resource, float]], capacities: Mapping[_Resource, float]
) -> tuple[float, ...]:
    """The progress per second of each user, as a share in (0, 1] of what it makes alone.

    ``demands``: what each user draws of every resource per second while it runs at full speed; ``capacities``: what a
    resource gives per second.  The progress is max-min fair (Bertsekas, Gallager, "Data Networks", 1992, section
    6.5.2): all users speed up together until a resource is full, its users stay there, and the others go on, up to full
    speed.  No user can then progress more without another one that progresses no more than it losing by it.

    Equal users get equal shares, no resource gives more than it has, and a user is slowed only by a resource that is
    full.  That all users of a full resource slow by the same factor, not to the same rate, is how memory controllers
    behave: their latency rises for everybody, and each user has as many requests under way as before.

    Raises KeyError if a demand is for a resource that ``capacities`` does not name; these must be positive.
    """
    shares = [1.0] * len(demands)
    rising = [user for user, demand in enumerate(demands) if any(rate > 0 for rate in demand.values())]
    left = dict(capacities)
    while rising:
        asked: dict[_Resource, float] = {}
        for user in rising:
            for resource, rate in demands[user].items():
                asked[resource] = asked.get(resource, 0.0) + rate
        # The level at which each resource is full; capacity that rounding has overdrawn is none.
        levels = {resource: max(0.0, left[resource]) / rate for resource, rate in asked.items() if rate > 0}
        level = min(levels.values())
        if level >= 1:
            break
        full = {resource for resource, reached in levels.items() if reached <= level * (1 + _ROUNDING)}
        stopped = [user for user in rising if any(demands[user].get(resource, 0.0) > 0 for resource in full)]
        for user in stopped:
            shares[user] = level
            for resource, rate in demands[user].items():
                left[resource] -= level * rate
        rising = [user for user in rising if user not in stopped]
    return tuple(shares)
