"""What iterations that nobody watches may hold goes by the shapes of their inputs."""

from __future__ import annotations

from types import MappingProxyType

import torch

from protwin.runtime.devices.ledger import MemoryLedger
from protwin.runtime.recording.ledger_metering import LedgerMetering
from protwin.runtime.recording.metering import METERED_ITERATIONS
from protwin.shared.schema.schedule import Task, TaskId, TaskKind

TASK = Task(TaskId(0), TaskKind.FORWARD)


def iterate(metering: LedgerMetering, ledger: MemoryLedger, number: int, size: int) -> int:
    """One iteration of one task on an input of ``size``, which allocates four times that; gives the task's claim."""
    metering.begin_iteration(number, [torch.ones(size)])
    metering.begin_task(TASK)
    held = torch.ones(4 * size)
    claim_bytes = ledger.claim_bytes
    del held
    metering.end_task(TASK, MappingProxyType({}), list)
    metering.end_iteration()
    return claim_bytes


def test_claims_go_by_shapes() -> None:
    ledger = MemoryLedger()
    metering = LedgerMetering(ledger, None)
    sizes = [100] * METERED_ITERATIONS + [10] * METERED_ITERATIONS
    for number, size in enumerate(sizes):
        assert iterate(metering, ledger, number, size) == 0, "watched"
    assert [iterate(metering, ledger, 9, size) for size in (100, 10, 100)] == [1_600, 160, 1_600]


def test_an_iteration_that_was_given_up_is_watched_again() -> None:
    ledger = MemoryLedger()
    metering = LedgerMetering(ledger, None)
    for number in range(METERED_ITERATIONS - 1):
        iterate(metering, ledger, number, 100)
    for _ in range(5):
        assert metering.begin_iteration(7, [torch.ones(100)])
        assert ledger.is_metering
        metering.begin_task(TASK)
        metering.give_up_iteration()
        assert not ledger.is_metering
    assert metering.begin_iteration(7, [torch.ones(100)])
    metering.end_iteration()
    before_bytes = ledger.claim_bytes
    assert not metering.begin_iteration(8, [torch.ones(100)])
    metering.begin_task(TASK)
    assert ledger.claim_bytes == 1_600
    metering.give_up_iteration()
    metering.give_up_iteration()
    assert ledger.claim_bytes == before_bytes
