"""The variables of a launch: whole, or refused by name."""

from __future__ import annotations

import pytest

from protwin.runtime.ranks.launch import check_num_ranks, launch_of
from protwin.shared import PlanError, RanksError

GOOD = {"RANK": "2", "WORLD_SIZE": "4", "LOCAL_RANK": "0", "MASTER_ADDR": "host", "MASTER_PORT": "29500"}


def test_a_launch_is_read() -> None:
    launch = launch_of(GOOD)
    assert launch is not None
    assert (launch.rank, launch.num_ranks, launch.local_rank, launch.address, launch.port) == (2, 4, 0, "host", 29500)


def test_no_launch_is_none() -> None:
    assert launch_of({"HOME": "/", "MASTER_ADDR": "host", "MASTER_PORT": "29500"}) is None


@pytest.mark.parametrize("name", GOOD)
@pytest.mark.parametrize("left", [None, ""])
def test_what_is_missing_is_named(name: str, left: str | None) -> None:
    wrong = {other: value for other, value in GOOD.items() if other != name} | ({} if left is None else {name: left})
    with pytest.raises(RanksError, match=f"^{name} is not set") as caught:
        launch_of(wrong)
    assert all(f"{other}={GOOD[other]}" in str(caught.value) for other in GOOD if other != name)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("RANK", "4"),
        ("RANK", "-1"),
        ("RANK", "first"),
        ("RANK", "٢"),
        ("RANK", "1_0"),
        ("WORLD_SIZE", "0"),
        ("WORLD_SIZE", "2.0"),
        ("WORLD_SIZE", "2"),
        ("LOCAL_RANK", "4"),
        ("MASTER_PORT", "0"),
        ("MASTER_PORT", "65536"),
        ("MASTER_PORT", "http"),
    ],
)
def test_what_contradicts_is_named(name: str, value: str) -> None:
    with pytest.raises(RanksError, match=name):
        launch_of({**GOOD, name: value})


@pytest.mark.parametrize(("planned", "started"), [(8, 4), (4, 8), (2, 1), (1, 2)])
def test_another_number_of_processes_is_refused_with_both_numbers(planned: int, started: int) -> None:
    with pytest.raises(PlanError, match=r"\(here\)") as caught:
        check_num_ranks(planned, started, "here")
    assert f" {started} process" in str(caught.value)
    assert ("for one rank" if planned == 1 else f"for {planned} ranks") in str(caught.value)
    check_num_ranks(planned, planned, "here")
