"""Fair sharing: nothing overdrawn, nothing left lying, equals treated equally, and the fairest there is."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linprog

from protwin.sim.costs.fair_share import fair_shares

RESOURCES = ("a", "b", "c")
Demand = dict[str, float]

demands = st.lists(
    st.dictionaries(st.sampled_from(RESOURCES), st.just(0.0) | st.floats(0.01, 4), max_size=3), min_size=1, max_size=5
)
capacities = st.fixed_dictionaries({resource: st.floats(0.05, 4) for resource in RESOURCES})


def used(users: Sequence[Demand], shares: Sequence[float], resource: str) -> float:
    return sum(share * user.get(resource, 0.0) for user, share in zip(users, shares, strict=True))


def is_full(users: Sequence[Demand], shares: Sequence[float], capacity: Demand, resource: str) -> bool:
    return used(users, shares, resource) >= capacity[resource] * (1 - 1e-9)


def holds_back_without_reason(users: Sequence[Demand], shares: Sequence[float], capacity: Demand) -> bool:
    """Whether some user is slowed although none of its resources is full."""
    return any(
        share < 1 - 1e-12
        and not any(
            user.get(resource, 0.0) > 0 and is_full(users, shares, capacity, resource) for resource in RESOURCES
        )
        for user, share in zip(users, shares, strict=True)
    )


def by_the_worst_overdraft(users: Sequence[Demand], capacity: Demand) -> list[float]:
    """A wrong variant: everybody is slowed by the most overdrawn of its resources, as if nobody else were slowed."""
    overdrafts = {resource: used(users, [1.0] * len(users), resource) / capacity[resource] for resource in RESOURCES}
    return [1 / max([1.0, *(overdrafts[resource] for resource, rate in user.items() if rate > 0)]) for user in users]


def by_linear_programming(users: Sequence[Demand], capacity: Demand) -> list[float]:
    """The fairest shares by another road: raise the least one as far as it goes, fix those that cannot go further.

    Variables: one share per user, and the level that all which are not fixed reach.
    """
    count = len(users)
    fixed: dict[int, float] = {}
    usage = [[user.get(resource, 0.0) for user in users] for resource in RESOURCES]
    limits = [capacity[resource] for resource in RESOURCES]

    def highest(variable: int, least: float) -> float:
        """The most that a variable can be while no free share falls below ``least``; the last one is the level."""
        objective = np.zeros(count + 1)
        objective[variable] = -1.0
        above = [[float(i == count) - float(i == user) for i in range(count + 1)] for user in range(count)]
        rows = [[*row, 0.0] for row in usage] + [row for user, row in enumerate(above) if user not in fixed]
        right = limits + [0.0] * (count - len(fixed))
        bounds = [(fixed.get(user, least), fixed.get(user, 1.0)) for user in range(count)] + [(0.0, 1.0)]
        result = linprog(objective, A_ub=np.array(rows), b_ub=np.array(right), bounds=bounds, method="highs")
        return -float(result.fun)

    while len(fixed) < count:
        level = highest(count, 0.0)
        tops = {user: highest(user, level * (1 - 1e-9)) for user in range(count) if user not in fixed}
        fixed |= {user: level * (1 - 1e-9) for user, top in tops.items() if top <= level + 1e-7}
    return [fixed[user] for user in range(count)]


@given(demands, capacities)
def test_no_resource_gives_more_than_it_has(users: list[Demand], capacity: Demand) -> None:
    shares = fair_shares(users, capacity)
    assert all(0 < share <= 1 for share in shares)
    for resource in RESOURCES:
        assert used(users, shares, resource) <= capacity[resource] * (1 + 1e-9)


@given(demands, capacities)
def test_a_user_is_slowed_only_by_a_resource_that_is_full(users: list[Demand], capacity: Demand) -> None:
    assert not holds_back_without_reason(users, fair_shares(users, capacity), capacity)


def test_the_worst_overdraft_would_leave_capacity_lying() -> None:
    # Two users of a slow link share memory with a third.  At half speed they take half of what they would alone.
    users = [{"a": 1.0, "b": 1.0}, {"a": 1.0, "b": 1.0}, {"b": 1.0}]
    capacity = {"a": 1.0, "b": 2.0, "c": 1.0}
    assert holds_back_without_reason(users, by_the_worst_overdraft(users, capacity), capacity)
    assert fair_shares(users, capacity) == (0.5, 0.5, 1.0)


@given(demands, capacities, st.data())
def test_equal_users_get_equal_shares(users: list[Demand], capacity: Demand, data: st.DataObject) -> None:
    twin = data.draw(st.integers(0, len(users) - 1))
    shares = fair_shares([*users, dict(users[twin])], capacity)
    assert shares[twin] == shares[-1]


@settings(max_examples=40)
@given(demands, capacities)
def test_no_other_shares_are_fairer(users: list[Demand], capacity: Demand) -> None:
    assert fair_shares(users, capacity) == pytest.approx(by_linear_programming(users, capacity), abs=1e-5)


@given(demands, capacities, st.sampled_from(RESOURCES), st.floats(1, 4))
def test_more_capacity_never_slows_the_slowest(
    users: list[Demand], capacity: Demand, resource: str, factor: float
) -> None:
    before = fair_shares(users, capacity)
    after = fair_shares(users, capacity | {resource: capacity[resource] * factor})
    assert min(after) >= min(before) * (1 - 1e-9)
    for old, new in zip(sorted(before), sorted(after), strict=True):
        if not math.isclose(old, new, rel_tol=1e-6):
            assert new > old  # the first difference, from the slowest up, is a gain
            break


def test_more_capacity_can_slow_one_who_is_not_the_slowest() -> None:
    # The second user was held up by b, which left a to the first one.
    users = [{"a": 1.0}, {"a": 1.0, "b": 1.0}]
    assert fair_shares(users, {"a": 1.0, "b": 0.25}) == (0.75, 0.25)
    assert fair_shares(users, {"a": 1.0, "b": 1.0}) == (0.5, 0.5)


def test_users_that_ask_for_little_run_at_full_speed() -> None:
    assert fair_shares([{"a": 0.5}, {"a": 0.5}, {}], {"a": 1.0}) == (1.0, 1.0, 1.0)
    assert fair_shares([], {"a": 1.0}) == ()
