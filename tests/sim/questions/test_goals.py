"""Goals: by whose price the cheapest plan is, and that nothing fits below the least memory."""

from __future__ import annotations

from dataclasses import replace

import pytest

from protwin.shared.answers.search_result import Goal
from protwin.shared.basics.errors import HardwareError, InfeasibleError
from protwin.shared.catalogue.list_prices import list_price
from protwin.shared.catalogue.machines import machine, override_hardware
from protwin.shared.families.shipped import shipped_family
from protwin.shared.schema.workload import DType
from protwin.shared.tables.answer import recommendation
from protwin.sim.questions.goals import search_goal
from protwin.sim.searching.request import SearchRequest
from protwin.sim.searching.search import search
from protwin.sim.space.space import SearchSpace
from tests.cli.saved import decoder

BOX = machine("a10")
FEW = SearchSpace(chunk_bytes=(2**27,), prefetch_depth=(1,), n_checkpoint=(0, 8))


def request(**changes: str) -> SearchRequest:
    hardware = override_hardware(BOX, changes) if changes else BOX
    return SearchRequest(workload=decoder(), hardware=hardware, space=FEW, baselines=())


def test_a_machine_without_a_price_costs_what_a_list_said_on_a_day() -> None:
    listed = list_price(BOX)
    assert listed is not None
    assert BOX.price_usd_per_hour is None
    found = search_goal(Goal.CHEAPEST, request()).result
    assert found.list_price == listed
    prediction = found.prediction
    cost_usd = listed.usd_per_hour / 3600 / prediction.tokens_per_s * 10**6
    assert prediction.usd_per_million_tokens == pytest.approx(cost_usd)
    said = recommendation(found)
    assert f"at {listed.usd_per_hour:.2f} USD an hour" in said
    assert str(listed.stated) in said
    assert "--price states yours" in said


def test_a_price_that_is_stated_goes_before_the_list() -> None:
    found = search_goal(Goal.CHEAPEST, request(price_usd_per_hour="7.5")).result
    assert found.list_price is None
    assert found.prediction.usd_per_million_tokens == pytest.approx(7.5 / 3600 / found.prediction.tokens_per_s * 10**6)
    assert "USD an hour" not in recommendation(found)


def test_without_any_price_the_option_is_named() -> None:
    """A device that was changed is on no list."""
    with pytest.raises(HardwareError, match=r"a10 has no price, and no list .* --price a10=2\.50"):
        search_goal(Goal.CHEAPEST, request(**{"device.memory_bytes": "20GiB"}))


def test_no_search_finds_a_plan_below_the_least_memory() -> None:
    """One byte less: not even with inputs of blocks on the host, which a search tries where nothing else fits."""
    family = shipped_family("qwen2.5-0.5b", DType.BFLOAT16)
    assert family is not None
    workload = family.at(batch_size=1, sequence_length=777)
    asked = SearchRequest(workload=workload, hardware=machine("rtx-3090"), baselines=())
    found = search_goal(Goal.LEAST_MEMORY, asked).result
    least = found.prediction.guaranteed_peak_device_bytes
    assert found.plan.n_offload_input > 0
    with pytest.raises(InfeasibleError):
        search(replace(asked, device_budget_bytes=least - 1))
