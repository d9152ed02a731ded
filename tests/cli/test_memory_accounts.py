"""What simulate and search say of memory beyond what the schedule allocates, through the real console script."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from protwin.shared.catalogue.machines import machine
from protwin.shared.schema.plan import Plan
from protwin.shared.schema.record import Record
from tests.cli.conftest import Protwin
from tests.cli.saved import decoder


@pytest.fixture
def arguments(tmp_path: Path) -> list[str | Path]:
    """A saved workload and a plan for it, on a card of the catalogue."""
    model = decoder()
    model.save(tmp_path / "workload.json")
    plan = Plan(workload_id=model.identity, chunk_bytes=2**30, n_persist=0, n_buffer=4)
    plan.save(tmp_path / "plan.json")
    return [
        *("--plan", tmp_path / "plan.json"),
        *("--model", tmp_path / "workload.json"),
        *("--hardware", "rtx-3090"),
    ]


def test_json_has_both_accounts(protwin_here: Protwin, arguments: list[str | Path]) -> None:
    result = protwin_here("simulate", *arguments, "--json")
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    record = Record.from_mapping(json.loads(result.stdout), origin="standard output")
    reserved, host = record.device_reserved, record.host_memory
    assert reserved is not None
    assert host is not None
    assert reserved.expected_bytes >= record.guaranteed_peak_device_bytes
    assert host.pinned_requested_bytes >= record.peak_pinned_bytes


def test_tables_name_them(protwin_here: Protwin, arguments: list[str | Path]) -> None:
    result = protwin_here("simulate", *arguments)
    assert result.returncode == 0, result.stderr
    for words in ("reserved by the allocator", "device in all", "host in all", "of driver and context"):
        assert words in result.stdout


def test_segments_that_do_not_fit_are_told(protwin_here: Protwin, arguments: list[str | Path], tmp_path: Path) -> None:
    # Nothing is reserved, so that a context of 256 MiB comes off: 20 MiB are left, which workspaces alone exceed.
    card = machine("rtx-3090")
    device = card.device.model_copy(update={"reserved_bytes": 0, "memory_bytes": 276 * 2**20})
    card.model_copy(update={"device": device}).save(tmp_path / "small.json")
    result = protwin_here("simulate", *arguments[:-1], tmp_path / "small.json")
    assert result.returncode == 0, result.stderr
    assert "this plan may run out of memory, with expandable segments too. Lower --device-budget." in result.stderr
    assert "but can have 20 MiB" in result.stderr


@pytest.mark.parametrize(
    ("memory", "words"),
    [
        ("1GiB", "of host memory with any plan, but the host has 1 GiB"),
        ("2049MiB", "of host memory in all, but the host"),
    ],
)
def test_a_host_that_is_too_small_is_told(
    protwin_here: Protwin, arguments: list[str | Path], memory: str, words: str
) -> None:
    result = protwin_here("simulate", *arguments, "--set", f"host.memory_bytes={memory}")
    assert result.returncode == 0, result.stderr
    assert words in result.stderr
