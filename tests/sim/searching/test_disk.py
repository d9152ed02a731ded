"""Searches on machines with a disk: what the host cannot hold lies there, as little of it as is enough, or nothing."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protwin.shared.basics.errors import HardwareError, InfeasibleError
from protwin.shared.basics.units import format_enough_bytes
from protwin.shared.compile.compile import compile_schedule
from protwin.shared.layout.layout import build_layout
from protwin.shared.schema.hardware import Disk, Hardware
from protwin.shared.schema.plan import Plan
from protwin.shared.schema.schedule import Memory
from protwin.shared.schema.workload import Workload
from protwin.shared.tables.answer import recommendation
from protwin.shared.tables.search import certificate_sentence
from protwin.shared.verify.guaranteed_peak import guaranteed_device_peak
from protwin.sim.costs.task_costs import CostModel
from protwin.sim.questions.host_bound import with_host_bound
from protwin.sim.searching.request import SearchRequest
from protwin.sim.searching.search import search, search_batches
from protwin.sim.space.least_on_disk import HostAndDisk, least_on_disk
from protwin.sim.space.space import SearchSpace
from protwin.sim.space.step_spec import StepSpec
from tests.sim import host_account
from tests.sim.fastest import fastest_request
from tests.sim.hand_made import machine, workload
from tests.strategies.machines import hardware
from tests.strategies.workloads import workloads

DISK = Disk(name="slow", capacity_bytes=10**7, read_bytes_per_s=1000.0, write_bytes_per_s=1000.0)
CHUNK_HOST_BYTES = 2 * 256 + 64 * 8 + 4
"""Parameters, gradients and state of a block of the hand-made model."""


def _request(num_blocks: int = 6, *, host_bytes: int, disk: Disk | None = DISK, **options: Any) -> SearchRequest:
    space = SearchSpace(chunk_bytes=256, prefetch_depth=1, n_checkpoint=(0, num_blocks))
    box = machine().model_copy(update={"disk": disk})
    model = workload(num_blocks=num_blocks)
    return replace(fastest_request(workload=model, hardware=box, space=space, host_budget_bytes=host_bytes), **options)


def _host_bytes(plan: Plan, model: Workload) -> int:
    return host_account.host_bytes(plan, model)


@given(workloads(max_blocks=4), hardware(), st.data())
@settings(max_examples=12)
def test_the_choices_of_a_placement_are_enough_and_one_chunk_less_is_not(
    model: Workload, box: Hardware, data: st.DataObject
) -> None:
    chunk_bytes = data.draw(st.sampled_from((512, 2048, 100_000)))
    layout = build_layout(model.parameters, num_blocks=model.num_blocks, chunk_bytes=chunk_bytes)
    n_persist = data.draw(st.integers(0, len(layout.chunks)))
    step = StepSpec(data.draw(st.sampled_from((1, 2))))

    def host_bytes(*on_disk: int) -> int:
        knobs: dict[str, Any] = dict(zip(("n_disk_state", "n_disk", "n_staging"), on_disk, strict=True))
        plan = Plan(
            workload_id=model.identity,
            chunk_bytes=chunk_bytes,
            n_persist=n_persist,
            n_buffer=len(layout.chunks),
            micro_batches=step.micro_batches,
            **knobs,
        )
        return _host_bytes(plan, model)

    whole_bytes = host_bytes(0, 0, 0)
    budget_bytes = data.draw(st.integers(0, whole_bytes + 10))
    choose = least_on_disk(model, CostModel(box), step, HostAndDisk(budget_bytes, 2**50), (2, 3))
    ((*choices,),) = choose(layout, [(n_persist, 0, 0)])
    num_offloaded = len(layout.chunks) - n_persist
    if whole_bytes <= budget_bytes or num_offloaded == 0:
        assert choices == [(0, 0, 0)]
        return
    every = [
        (of_state, of_parameters, places)
        for of_state in range(1, num_offloaded + 1)
        for of_parameters in {0, of_state, *(range(of_state + 1) if of_state == num_offloaded else ())}
        for places in (2, 3)
    ]
    enough = [one for one in every if host_bytes(*one) <= budget_bytes]
    assert all(host_bytes(*one) <= budget_bytes for one in choices) == bool(enough)
    for places in (2, 3):
        state_alone = [one for one in enough if one[1:] == (0, places)]
        both_alike = [one for one in enough if one[0] == one[1] and one[2] == places]
        for of_way in (state_alone, both_alike):
            assert not of_way or min(of_way) in choices


def test_where_nothing_fits_the_host_its_disk_has_the_rest() -> None:
    # The device has room for two chunks of six, the host for three of those that it steps.
    device_bytes, host_bytes = 3000, 3 * CHUNK_HOST_BYTES
    asked = _request(host_bytes=host_bytes, device_budget_bytes=device_bytes)
    with pytest.raises(InfeasibleError, match="host memory"):
        search(replace(asked, hardware=machine()))
    found = search(asked)
    assert found.plan.n_disk_state > 0
    assert _host_bytes(found.plan, workload(num_blocks=6)) <= host_bytes
    assert found.certificate.is_certified
    assert found.certificate.has_fewest_on_disk
    assert "and its disk (optimizer state of" in recommendation(found)
    assert "the fewest chunks on the disk" in certificate_sentence(found)
    # A disk without room is none.
    small = asked.hardware.model_copy(update={"disk": DISK.model_copy(update={"capacity_bytes": 100})})
    with pytest.raises(InfeasibleError, match="host memory"):
        search(replace(asked, hardware=small))
    # Who says that nothing lies there is believed.
    named = asked.space.model_dump() | {"n_disk_state": (0,)}
    with pytest.raises(InfeasibleError, match="host memory"):
        search(replace(asked, space=SearchSpace(**named)))


def test_a_disk_changes_nothing_where_the_host_is_large_enough() -> None:
    asked = _request(host_bytes=10**6, device_budget_bytes=3000)
    with_disk, without = search_batches(asked), search_batches(replace(asked, hardware=machine()))
    assert with_disk.result.plan == without.result.plan
    assert with_disk.result.certificate == without.result.certificate
    assert with_host_bound(with_disk, asked)[0].result.plan == without.result.plan


def test_where_the_host_rules_a_faster_plan_out_the_disk_may_have_it() -> None:
    # On the device alone fits what computes again for 31 seconds; a disk of a megabyte per second slows nothing down.
    fast = DISK.model_copy(update={"read_bytes_per_s": 1e6, "write_bytes_per_s": 1e6})
    asked = _request(host_bytes=4000, device_budget_bytes=6000, disk=fast)
    alone, unlimited = search_batches(asked), search(replace(asked, host_budget_bytes=10**6))
    assert alone.result.plan.n_disk_state == 0
    found = with_host_bound(alone, asked)[0].result
    assert found.plan.n_disk_state > 0
    assert found.host_bound is None
    assert unlimited.prediction.iteration_s == found.prediction.iteration_s < alone.result.prediction.iteration_s
    assert _host_bytes(found.plan, workload(num_blocks=6)) <= 4000
    # A disk that takes a minute for each chunk is slower than what fits: the answer stays, and says the host binds.
    slow_disk = DISK.model_copy(update={"read_bytes_per_s": 20.0, "write_bytes_per_s": 20.0})
    slow = replace(asked, hardware=asked.hardware.model_copy(update={"disk": slow_disk}))
    stays = with_host_bound(search_batches(slow), slow)[0].result
    assert stays.plan == alone.result.plan
    assert stays.host_bound is not None


def test_a_disk_without_room_is_no_help_and_no_disk_is_said() -> None:
    small = DISK.model_copy(update={"capacity_bytes": 100})
    space = SearchSpace(chunk_bytes=256, n_persist=0, n_disk_state=2)
    with pytest.raises(HardwareError, match=r"chunks take at least 1.008 KiB of the disk"):
        search(_request(host_bytes=10**6, disk=small, space=space))
    with pytest.raises(HardwareError, match="has no disk"):
        search(_request(host_bytes=10**6, disk=None, space=space))


@pytest.mark.slow
def test_a_disk_that_would_help_is_named_with_what_it_has_to_hold() -> None:
    device_bytes, host_bytes = 3000, 3 * CHUNK_HOST_BYTES
    asked = _request(host_bytes=host_bytes, device_budget_bytes=device_bytes, disk=None)

    def refused(request: SearchRequest) -> str:
        with pytest.raises(InfeasibleError, match="host memory") as found:
            search(request)
        return str(found.value)

    def of_size(size_bytes: int) -> SearchRequest:
        disk = DISK.model_copy(update={"capacity_bytes": size_bytes})
        return replace(asked, hardware=asked.hardware.model_copy(update={"disk": disk}))

    told = refused(asked)
    need_bytes = least_disk_bytes(asked)
    assert f"Or keep {format_enough_bytes(need_bytes)} on a disk, which the machine lacks" in told
    assert "--set disk=nvme" in told
    assert search(of_size(need_bytes)).plan.n_disk_state > 0
    assert f"--set disk.capacity_bytes={need_bytes})" in refused(of_size(need_bytes - 1))
    # No disk helps where the device is too small, where the host has no room for places, or where none may be used.
    assert " on a disk" not in refused(replace(asked, device_budget_bytes=300, host_budget_bytes=0))
    assert " on a disk" not in refused(replace(asked, host_budget_bytes=100))
    named = asked.space.model_dump() | {"n_disk_state": (0,)}
    assert " on a disk" not in refused(replace(asked, space=SearchSpace(**named)))


def least_disk_bytes(asked: SearchRequest) -> int:
    """By trying every number of persistent chunks, and of chunks on the disk in each of the three ways."""
    assert isinstance(asked.workload, Workload)
    assert asked.device_budget_bytes is not None
    assert asked.host_budget_bytes is not None
    found = []
    for n_persist in range(7):
        left = range(1, 7 - n_persist)
        ways = [(n, 0) for n in left] + [(n, n) for n in left] + [(6 - n_persist, n) for n in left]
        for (n_disk_state, n_disk), n_staging, n_buffer in product(ways, (2, 3), (1, 2)):
            plan = Plan(
                workload_id=asked.workload.identity,
                chunk_bytes=256,
                n_persist=n_persist,
                n_disk_state=n_disk_state,
                n_disk=n_disk,
                n_staging=n_staging,
                n_buffer=n_buffer,
                n_checkpoint=6,
            )
            schedule = compile_schedule(plan, asked.workload)
            is_within = guaranteed_device_peak(schedule).size_bytes <= asked.device_budget_bytes
            if is_within and host_account.host_bytes(plan, asked.workload) <= asked.host_budget_bytes:
                found.append(schedule.static_bytes(Memory.DISK))
    return min(found)
