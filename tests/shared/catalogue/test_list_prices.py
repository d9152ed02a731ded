"""Prices that come with the catalogue: each of a machine that there is, on a day that was, from an address."""

from __future__ import annotations

import re
import tomllib
from datetime import date
from pathlib import Path

import pytest

from protwin.shared.answers.list_price import PriceKind
from protwin.shared.catalogue.data_files import data_folder
from protwin.shared.catalogue.list_prices import list_price, list_prices, with_list_prices
from protwin.shared.catalogue.machines import cluster_names, load_hardware, machine, machine_names, override_hardware
from protwin.shared.catalogue.plausibility import price_range
from protwin.shared.catalogue.prices import parse_prices, with_prices

NAMES = (*machine_names(), *cluster_names())
DEVICE_HOURS = (0.05, 15.0)
"""US dollars for an hour of one device, of any that is let: an order of magnitude apart from a slip of the unit."""


def test_every_price_is_of_a_known_machine_and_says_where_it_is_from() -> None:
    low, high = price_range()
    assert list_prices()
    for one in list_prices():
        assert one.hardware_name in NAMES
        assert low <= one.usd_per_hour <= high
        assert DEVICE_HOURS[0] <= one.usd_per_hour / machine(one.hardware_name).devices_per_node <= DEVICE_HOURS[1], one
        assert date(2024, 1, 1) <= one.stated < date(2040, 1, 1), "a day on which somebody can have read it"
        for address in (one.source, *([one.listed] if one.listed else [])):
            assert re.fullmatch(r"https://[\w.-]+\.[a-z]+/\S+", address), address
        assert one.provider
        assert one.offer


def test_no_offer_is_listed_twice() -> None:
    offers = [(one.hardware_name, one.provider, one.offer) for one in list_prices()]
    assert len(set(offers)) == len(offers)


def test_a_cloud_goes_before_a_market_and_the_lowest_before_others() -> None:
    tables = tomllib.loads(data_folder("prices.toml").read_text(encoding="utf-8"))
    for name, entries in tables.items():
        cloud = [one["usd_per_hour"] for one in entries if one["kind"] == "cloud"]
        lowest = min(cloud or [one["usd_per_hour"] for one in entries])
        found = list_price(machine(name))
        assert found is not None
        assert (found.usd_per_hour, found.kind) == (lowest, PriceKind.CLOUD if cloud else PriceKind.RENTAL)


def test_stated_prices_go_before_lists() -> None:
    board, box = machine("rtx-4090"), machine("h100-80gb-x8")
    own = machine("a10").model_copy(update={"price_usd_per_hour": 7.0})
    unlisted = machine("mi210-64gb")
    stated = with_prices([board, box, own, unlisted], parse_prices(["h100-80gb-x8=24"]))
    priced, taken = with_list_prices(stated)
    assert [one.hardware_name for one in taken] == ["rtx-4090"]
    assert [one.price_usd_per_hour for one in priced] == [taken[0].usd_per_hour, 24.0, 7.0, None]
    changed = override_hardware(board, {"price_usd_per_hour": "0.9"})
    assert with_list_prices([changed]) == ([changed], ())


@pytest.mark.parametrize(
    ("change", "is_listed"),
    [
        ({"host.memory_bytes": "256GiB"}, True),
        ({"link": "pcie5-x16"}, True),
        ({"device.memory_bytes": "48GiB"}, False),
        ({"device.peak_flop_per_s.bfloat16": "1e15"}, False),
    ],
)
def test_a_changed_device_is_on_no_list(change: dict[str, str], is_listed: bool) -> None:
    changed = override_hardware(load_hardware("rtx-4090"), change)
    assert changed.name == "rtx-4090"
    assert (list_price(changed) is not None) == is_listed


def test_more_machines_of_a_kind_cost_as_much_each() -> None:
    four = override_hardware(machine("h100-80gb-x8"), {"network.num_nodes": "4"})
    assert list_price(four) == list_price(machine("h100-80gb-x8"))
    fewer = override_hardware(
        machine("h100-80gb-x8"), {"node.num_devices": "4", "node.sockets": "4", "node.pcie_roots": "4"}
    )
    assert list_price(fewer) is None


def test_the_page_of_machines_shows_every_price() -> None:
    rows = [
        f"| {one.hardware_name} | {one.usd_per_hour:.2f} | {one.kind.words} | {one.provider}, {one.offer} | "
        f"{one.stated} |"
        for one in list_prices()
    ]
    head = ["| machine | USD per hour | kind | offer | read on |", "| --- | ---: | --- | --- | --- |"]
    page = (Path(__file__).parents[3] / "docs" / "machines.md").read_text(encoding="utf-8")
    shown = page.partition("<!-- prices -->\n")[2].partition("<!-- end -->")[0].strip().splitlines()
    assert shown == [*head, *rows]
