"""The report names what is held beyond what the schedule allocates, where the record predicts it."""

from __future__ import annotations

from protwin.sim.engine.simulator import simulate
from tests.shared.report_pages import html_report
from tests.sim.hand_made import machine, plan, workload


def test_both_accounts_are_in_the_report() -> None:
    model = workload()
    record = simulate(plan(model), model, machine())
    assert record.device_reserved is not None
    page = html_report(title="A run", predicted=record)
    assert "Beyond what the schedule allocates" in page
    for words in ("reserved by the allocator", "device in all", "host in all"):
        assert words in page
    bare = html_report(
        title="A run", predicted=record.model_copy(update={"device_reserved": None, "host_memory": None})
    )
    assert "Beyond what the schedule allocates" not in bare
    assert "reserved by the allocator" not in bare
