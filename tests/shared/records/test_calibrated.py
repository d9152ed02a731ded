"""Factors go with the figures that they were fitted beside: a machine that is described otherwise is refused."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from protwin.shared.basics.errors import CalibrationError
from protwin.shared.catalogue.machines import load_hardware
from protwin.shared.catalogue.overrides import override_hardware
from protwin.shared.records.calibrated import check_figures
from protwin.shared.schema.calibration import Calibration
from protwin.shared.schema.hardware import Disk, Hardware
from protwin.shared.schema.plan import Plan
from protwin.sim import SearchRequest, simulate
from tests.calibration.fitting.test_fit import MACHINE, a_workload
from tests.calibration.fitting.test_kinds_of_seconds import of_operations
from tests.shared.full_machine import full_hardware

BOX = Hardware.model_validate(
    MACHINE.model_dump()
    | {
        "price_usd_per_hour": 1.0,
        "host": MACHINE.host.model_dump() | {"adam_bytes_per_s": 5e9, "num_memory_channels": 2},
        "host_to_device": MACHINE.host_to_device.model_dump() | {"table": ({"size_bytes": 1000, "seconds": 1e-4},)},
    }
)
KNOWN = Calibration(hardware_name=BOX.name, machine=BOX.name, hardware=BOX)
WORKLOADS = (a_workload(2), of_operations(1.0, is_timed=False))


def doubled(content: Any) -> Iterator[tuple[str, Any]]:
    """The description with one number twice what it was, for every number."""
    for name, value in content.items() if isinstance(content, dict) else enumerate(content):
        if isinstance(value, dict | list | tuple):
            changes = doubled(value)
        elif isinstance(value, int | float) and not isinstance(value, bool):
            changes = iter([("", 2 * value)])
        else:
            continue
        for place, changed in changes:
            copied = dict(content) if isinstance(content, dict) else list(content)
            copied[name] = changed
            yield f"{name}.{place}".rstrip("."), copied


def seconds(hardware: Hardware) -> list[float]:
    """Of plans that use all lanes, by what the description says alone."""
    found = []
    for workload in WORKLOADS:
        for n_persist, n_buffer in ((1, 3), (len(workload.parameters), 0)):
            plan = Plan(
                workload_id=workload.identity,
                chunk_bytes=1_000_000,
                n_persist=n_persist,
                n_buffer=n_buffer,
                n_checkpoint=1,
            )
            record = simulate(plan, workload, hardware)
            found += [record.iteration_s, *(timing.duration_s for timing in record.tasks)]
    return found


CHANGED = {place: Hardware.model_validate(content) for place, content in doubled(BOX.model_dump())}


def test_what_passes_has_the_same_seconds() -> None:
    """Another value of a figure that seconds follow from is refused; the simulator says which these are."""
    usual = seconds(BOX)
    passed, refused = set(), set()
    for place, hardware in CHANGED.items():
        try:
            check_figures(KNOWN, hardware)
        except CalibrationError:
            refused.add(place)
        else:
            passed.add(place)
            assert seconds(hardware) == usual, place
    assert {"device.memory_bytes", "host.memory_bytes", "price_usd_per_hour"} <= passed
    assert {"host_to_device.table.0.seconds", "device.memory_bandwidth_bytes_per_s", "host.adam_bytes_per_s"} <= refused


def test_predictions_and_searches_refuse_them() -> None:
    workload = a_workload(2)
    plan = Plan(workload_id=workload.identity, chunk_bytes=1_000_000, n_persist=1, n_buffer=3)
    again = CHANGED["device_to_host.bandwidth_bytes_per_s"]
    with pytest.raises(CalibrationError, match=r"device_to_host\.bandwidth_bytes_per_s was 1\S+, and is 2"):
        simulate(plan, workload, again, KNOWN)
    with pytest.raises(CalibrationError, match="or calibrate anew"):
        SearchRequest(workload=workload, hardware=again, calibration=KNOWN)
    older = KNOWN.model_copy(update={"hardware": None})
    assert simulate(plan, workload, again, older).iteration_s > 0


def test_questions_about_a_changed_machine_are_answered() -> None:
    for change in ({"link": "pcie3-x16"}, {"host.memory_bandwidth_bytes_per_s": "1GB/s"}, {"full_duplex": "false"}):
        asked = override_hardware(BOX, change)
        check_figures(KNOWN, asked)
        # Of what was not asked about, the figures have to be the same.
        probed_again = asked.device.model_copy(update={"vector_flop_per_s": 1e9})
        with pytest.raises(CalibrationError, match="vector_flop_per_s"):
            check_figures(KNOWN, asked.model_copy(update={"device": probed_again}))
    disk = Disk(name="disk", capacity_bytes=10**12, read_bytes_per_s=1e9, write_bytes_per_s=1e9)
    check_figures(KNOWN, BOX.model_copy(update={"disk": disk}))
    with_disk = KNOWN.model_copy(update={"hardware": BOX.model_copy(update={"disk": disk})})
    with pytest.raises(CalibrationError, match=r"disk.*, and is not stated"):
        check_figures(with_disk, BOX)


def test_figures_that_are_new_or_gone_are_others() -> None:
    """Of parts that were there before: seconds follow from them now, and did not, or the other way."""
    link, host = BOX.host_to_device, BOX.host
    longer = (*link.table, link.table[0].model_copy(update={"size_bytes": 2000}))
    others = (
        BOX.model_copy(update={"host_to_device": link.model_copy(update={"table": longer})}),
        BOX.model_copy(update={"host": host.model_copy(update={"adam_bytes_per_s": None})}),
    )
    for before, now in [pair for other in others for pair in ((BOX, other), (other, BOX))]:
        with pytest.raises(CalibrationError, match="not stated"):
            check_figures(KNOWN.model_copy(update={"hardware": before}), now)


def test_figures_may_be_written_shorter_and_no_further_off() -> None:
    for times, is_other in ((1 + 1e-12, False), (1 - 1e-12, False), (1 + 1e-6, True), (1 - 1e-6, True)):
        rate = BOX.device.memory_bandwidth_bytes_per_s * times
        again = BOX.model_copy(update={"device": BOX.device.model_copy(update={"memory_bandwidth_bytes_per_s": rate})})
        if is_other:
            with pytest.raises(CalibrationError, match="memory_bandwidth"):
                check_figures(KNOWN, again)
        else:
            check_figures(KNOWN, again)


def test_what_was_asked_when_it_was_made_is_no_change_now() -> None:
    """Of a machine with an override, asked about with the same one: figures of that part have to be the same."""
    asked = override_hardware(BOX, {"host.memory_bandwidth_bytes_per_s": "1GB/s"})
    known = KNOWN.model_copy(update={"hardware": asked})
    check_figures(known, asked)
    host = asked.host.model_copy(update={"memory_bandwidth_bytes_per_s": 3e9})
    with pytest.raises(CalibrationError, match="memory_bandwidth"):
        check_figures(known, asked.model_copy(update={"host": host}))
    check_figures(known, BOX)


def test_collectives_that_a_question_drops_are_no_other_figures() -> None:
    """A change of links or of the device has measured collectives dropped, which are of a part of their own."""
    box = load_hardware("a100-80gb-x8").model_copy(update={"collectives": full_hardware().collectives})
    known = KNOWN.model_copy(update={"hardware": box})
    for change in ({"link": "pcie3-x16"}, {"device": "h100-80gb"}):
        asked = override_hardware(box, change)
        assert box.collectives
        assert not asked.collectives
        check_figures(known, asked)


@pytest.mark.parametrize("asked", [{}, {"link": "pcie3-x16"}], ids=["as it is", "asked about"])
@pytest.mark.parametrize("part", ["disk", "node", "network", "collectives"])
def test_of_a_part_that_was_not_there_nothing_was_measured(part: str, asked: dict[str, str]) -> None:
    """So that it may come, whatever else is asked about; one that was there may neither go nor change."""
    disk = Disk(name="disk", capacity_bytes=10**12, read_bytes_per_s=1e9, write_bytes_per_s=1e9)
    box = load_hardware("a100-80gb-x8").model_copy(update={"disk": disk, "collectives": full_hardware().collectives})
    assert getattr(box, part)
    without = box.model_copy(update={part: () if part == "collectives" else None})

    def now(hardware: Hardware) -> Hardware:
        # A question drops measured collectives; here they are measured once more.
        changed = override_hardware(hardware, asked) if asked else hardware
        return changed.model_copy(update={"collectives": hardware.collectives})

    check_figures(KNOWN.model_copy(update={"hardware": without}), now(box))
    if part == "collectives" and asked:
        check_figures(KNOWN.model_copy(update={"hardware": box}), now(without))
    else:
        with pytest.raises(CalibrationError, match=rf": {part}\."):
            check_figures(KNOWN.model_copy(update={"hardware": box}), now(without))
