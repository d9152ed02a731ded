"""A search for a CPU that stands in for a device, with no budget given: device and host share one memory."""

from __future__ import annotations

import pytest

from protwin.shared.basics.errors import InfeasibleError
from protwin.shared.schema.hardware import DeviceKind, Hardware
from protwin.sim.searching.search import search
from protwin.sim.space.space import SearchSpace
from tests.sim.fastest import fastest_request
from tests.sim.hand_made import machine, workload

OFFLOADED = SearchSpace(chunk_bytes=256, n_persist=0)


def cpu(memory_bytes: int) -> Hardware:
    """Device and host are the same memory, as a measured CPU says."""
    found = machine(kind=DeviceKind.CPU)
    device = found.device.model_copy(update={"memory_bytes": memory_bytes})
    host = found.host.model_copy(update={"memory_bytes": memory_bytes})
    return found.model_copy(update={"device": device, "host": host})


def test_plans_that_offload_are_found() -> None:
    result = search(fastest_request(workload=workload(4), hardware=cpu(10**6), space=OFFLOADED))
    assert result.plan.n_persist == 0
    assert result.device_budget_bytes + result.host_budget_bytes <= 9 * 10**5
    # The wrong variant: all of the memory is the device's, and nothing is left for the host.
    with pytest.raises(InfeasibleError, match="host"):
        search(fastest_request(workload=workload(4), hardware=cpu(10**6), device_budget_bytes=10**6, space=OFFLOADED))


def test_the_device_comes_first_where_memory_is_short() -> None:
    # Just enough for everything on the device, all blocks checkpointed: an even share would be too little.
    model, space = workload(2), SearchSpace(chunk_bytes=256)
    everything = search(
        fastest_request(
            workload=model, hardware=cpu(10**6), space=SearchSpace(chunk_bytes=256, n_persist=2, n_checkpoint=2)
        )
    )
    needed = everything.prediction.guaranteed_peak_device_bytes
    found = search(fastest_request(workload=model, hardware=cpu(int(needed / 0.9) + 2), space=space))
    assert found.prediction.guaranteed_peak_device_bytes <= found.device_budget_bytes
    assert found.device_budget_bytes > found.host_budget_bytes


@pytest.mark.parametrize("share", [0.3, 0.6, 0.9, 1.0])
def test_what_a_plan_takes_of_both_is_there(share: float) -> None:
    model = workload(4)
    ample = search(
        fastest_request(workload=model, hardware=cpu(10**6), space=SearchSpace(chunk_bytes=256, n_persist=(0, 4)))
    )
    most = ample.prediction.guaranteed_peak_device_bytes * 2
    box = cpu(max(1, int(most * share / 0.9)))
    try:
        found = search(
            fastest_request(workload=model, hardware=box, space=SearchSpace(chunk_bytes=256, n_persist=(0, 4)))
        )
    except InfeasibleError:
        return
    outcome = found.prediction
    host = outcome.host_memory
    assert host is not None
    offloaded = outcome.peak_pinned_bytes + host.state_bytes
    assert outcome.guaranteed_peak_device_bytes + offloaded <= 0.9 * box.host.memory_bytes + 1


def test_budgets_that_are_given_are_taken() -> None:
    result = search(
        fastest_request(workload=workload(4), hardware=cpu(10**6), device_budget_bytes=10**5, space=OFFLOADED)
    )
    assert (result.device_budget_bytes, result.host_budget_bytes) == (10**5, 10**6 - 10**5 - 10**5)
