"""Warnings of memory that does not fit: what is said, and what is advised."""

from __future__ import annotations

import pytest

from protwin.shared.schema.memory_accounts import DeviceReserved, HostMemory, PinnedRule
from protwin.shared.schema.record import Record
from protwin.shared.tables.memory import allocator_warning, beyond_the_schedule, host_warning
from protwin.sim.engine.simulator import simulate
from tests.sim.hand_made import machine, plan, workload

GIB = 2**30


def record_with(reserved: DeviceReserved | None = None, host: HostMemory | None = None) -> Record:
    model = workload()
    record = simulate(plan(model), model, machine())
    return record.model_copy(update={"device_reserved": reserved, "host_memory": host})


def reserved(
    num_retries: int | None, expandable_bytes: int | None, expandable_retries: int | None = None
) -> DeviceReserved:
    return DeviceReserved(
        at_least_bytes=22 * GIB,
        expected_bytes=24 * GIB,
        at_most_bytes=25 * GIB,
        workspace_bytes=0,
        outside_bytes=GIB,
        limit_bytes=23 * GIB,
        num_retries=num_retries,
        expandable_bytes=expandable_bytes,
        expandable_retries=expandable_retries,
        num_iterations=3,
        is_settled=True,
    )


@pytest.mark.parametrize(
    ("num_retries", "expandable_bytes", "expandable_retries", "words"),
    [
        (
            None,
            22 * GIB,
            0,
            (
                "runs out of memory with the allocator's own",
                "True, as protwin run does, with which 22 GiB are expected",
            ),
        ),
        (
            None,
            24 * GIB,
            3,
            ("runs out of memory with the allocator's own", "True, as protwin run does, with which free pages go back"),
        ),
        (4, 22 * GIB, 0, ("give cached segments back", "expandable_segments:True")),
        (None, 24 * GIB, None, ("may run out of memory, with expandable segments too", "Lower --device-budget")),
        (4, 24 * GIB, None, ("give cached segments back", "Lower --device-budget")),
    ],
)
def test_segments_that_do_not_fit(
    num_retries: int | None, expandable_bytes: int, expandable_retries: int | None, words: tuple[str, ...]
) -> None:
    found = reserved(num_retries, expandable_bytes, expandable_retries)
    message = allocator_warning(record_with(found))
    assert message is not None
    assert "24 GiB in segments but can have 23 GiB" in message
    for part in words:
        assert part in message
    assert ("expandable_segments:True" in message) == (expandable_retries is not None)
    assert found.needs_expandable == (num_retries is None and expandable_retries is not None)


def test_without_need_nothing_is_said() -> None:
    assert allocator_warning(record_with(reserved(0, None))) is None
    assert allocator_warning(record_with()) is None
    assert host_warning(record_with(), 1) is None
    assert beyond_the_schedule(record_with()) == ()


def test_a_host_that_is_too_small() -> None:
    host = HostMemory(
        pinned_requested_bytes=5 * GIB,
        pinned_rounded_bytes=8 * GIB,
        pinned_rule=PinnedRule.POWER_OF_TWO,
        state_bytes=GIB,
        device_bytes=0,
        loading_bytes=2 * GIB,
        process_bytes=GIB,
    )
    record = record_with(host=host)
    assert host_warning(record, 10 * GIB) is None
    message = host_warning(record, 10 * GIB - 1)
    assert message is not None
    assert "needs 10 GiB of host memory in all" in message
    (row,) = beyond_the_schedule(record)
    assert row.words == "8 GiB pinned in powers of two, 1 GiB optimizer state, 1 GiB Python and libraries"
    loading = record_with(host=host.model_copy(update={"loading_bytes": 20 * GIB}))
    assert beyond_the_schedule(loading)[0].size_bytes == 21 * GIB
    assert beyond_the_schedule(loading)[0].words.startswith("while chunks are filled; then")
    message = host_warning(loading, 10 * GIB)
    assert message is not None
    assert "needs 21 GiB of host memory while its chunks are filled" in message
    assert "10 GiB from then on, but the host has 10 GiB" in message
    # Without room for Python itself, no knob of a plan helps.
    message = host_warning(record, GIB - 1)
    assert message is not None
    assert "Python and libraries take 1 GiB of host memory with any plan" in message
    assert "n_persist" not in message
