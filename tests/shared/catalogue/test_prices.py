"""Prices as users state them."""

from __future__ import annotations

from pathlib import Path

import pytest

from protwin.shared.basics.errors import CatalogueError, FileError, HardwareError, ProtwinError
from protwin.shared.catalogue.data_files import machine_sections
from protwin.shared.catalogue.machines import cluster_names, load_hardware, machine_names
from protwin.shared.catalogue.prices import parse_prices, with_prices
from protwin.shared.catalogue.rank_share import rent_of_ranks

ONE, EIGHT = load_hardware("rtx-3090"), load_hardware("h100-80gb-x8")


def prices_file(folder: Path, text: str) -> str:
    path = folder / "prices.toml"
    path.write_text(text)
    return str(path)


def test_machines_have_no_price_of_their_own() -> None:
    """A price has a day and a source: it is on a list, and no figure of the machine."""
    names = (*machine_names(), *cluster_names())
    assert all(load_hardware(name).price_usd_per_hour is None for name in names)
    for file in ("machines", "devices", "hosts", "nodes"):
        assert not any("price" in text for text in machine_sections(file).values())


def test_a_price_of_its_own_goes_before_a_file(tmp_path: Path) -> None:
    listed = prices_file(tmp_path, "rtx-3090 = 0.25\nh100-80gb-x8 = 24\nnobody-asks = 3\n")
    priced = with_prices([ONE, EIGHT], parse_prices([listed, "rtx-3090 = 0.5"]))
    assert [machine.price_usd_per_hour for machine in priced] == [0.5, 24.0]
    assert priced[1].model_copy(update={"price_usd_per_hour": None}) == EIGHT
    own = ONE.model_copy(update={"price_usd_per_hour": 7.0})
    assert with_prices([own, EIGHT], parse_prices(["h100-80gb-x8=1"]))[0] == own


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("rtx-3090 = 'cheap'", r"price of rtx-3090 is 'cheap', which is no number"),
        (
            "rtx-3090 = -1",
            r"price of rtx-3090 is -1 USD an hour, outside 0\.0001 to 1e\+07\. Write it as rtx-3090=24\.",
        ),
        ("rtx-3090 = nan", r"outside 0\.0001"),
        ("rtx-3090 = true", r"is True, which is no number"),
        ("[rtx-3090]\nprice = 1", r"is {'price': 1}, which is no number"),
        ("rtx-3090 = ", r"prices\.toml"),
        ("", r"lists no prices"),
    ],
)
def test_a_bad_line_is_named(text: str, complaint: str, tmp_path: Path) -> None:
    with pytest.raises(FileError, match=complaint):
        parse_prices([prices_file(tmp_path, text)])


@pytest.mark.parametrize(
    ("entries", "complaint"),
    [
        (["24"], r"'24' is no price"),
        (["=24"], r"names no machine"),
        (["rtx-3090="], r"is '', which is no number"),
        (["rtx-3090=0"], r"is 0 USD an hour"),
        (["rtx-3090=1", "rtx-3090=2"], r"is the second one of rtx-3090"),
        (["rtx-3090=inf"], r"outside"),
    ],
)
def test_a_bad_price_is_refused(entries: list[str], complaint: str) -> None:
    with pytest.raises(HardwareError, match=complaint):
        parse_prices(entries)


def test_a_price_for_nobody_is_refused() -> None:
    with pytest.raises(CatalogueError, match=r"for 't4', but rtx-3090 is asked about"):
        with_prices([ONE], parse_prices(["t4=1"]))
    with pytest.raises(CatalogueError, match=r"'t4', which is not among the machines"):
        with_prices([ONE, EIGHT], parse_prices(["t4=1"]))
    with pytest.raises(CatalogueError, match=r"which is no machine. Did you mean .*h100-80gb-x8"):
        with_prices([ONE, EIGHT], parse_prices(["h100-80gb-8=1"]))
    with pytest.raises(ProtwinError, match=r"missing\.toml"):
        parse_prices(["missing.toml"])


@pytest.mark.parametrize(("num_ranks", "machines"), [(1, 1), (7, 1), (8, 1), (9, 2), (16, 2)])
def test_machines_are_rented_whole(num_ranks: int, machines: int) -> None:
    (priced,) = with_prices([EIGHT], parse_prices(["h100-80gb-x8=24"]))
    assert rent_of_ranks(priced, num_ranks) == 24 * machines
    assert rent_of_ranks(EIGHT, num_ranks) is None
