"""The account of the host's memory against what the kernel says of real trainings.

They run in one process of their own, where every tensor of 256 KiB is mapped by itself and given back when it goes
(``MALLOC_MMAP_THRESHOLD_``), so that the allocator of the C library adds nothing of its own.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from protwin.shared.schema.hardware import DeviceKind
from protwin.sim.memory.host import PROCESS_BYTES

MIB = 2**20
WIDTH = 640
CHUNK_BYTES = 8 * WIDTH * WIDTH * 4
"""A block."""
BESIDES_BYTES = 6 * MIB
"""What no account has: stacks and buffers of the lanes' threads, modules loaded on first use, and per matrix product a
copy of its operands in the order that the processor likes, of the size of its caches."""
PLANS: tuple[dict[str, int], ...] = (
    {"n_persist": 0, "n_buffer": 1, "n_checkpoint": 4},
    {"n_persist": 2, "n_buffer": 2, "n_checkpoint": 0},
    {"n_persist": 5, "n_buffer": 0, "n_checkpoint": 0},
)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the kernel keeps no account of processes"),
]


@cache
def measured() -> dict[str, Any]:
    """What ``tests.calibration.resident`` prints."""
    cases = [{"width": WIDTH, "chunk_bytes": CHUNK_BYTES, **plan} for plan in PLANS]
    environment = {"MALLOC_MMAP_THRESHOLD_": str(2**18), "MALLOC_TRIM_THRESHOLD_": "0", "OMP_NUM_THREADS": "1"}
    result = subprocess.run(
        [sys.executable, "-m", "tests.calibration.resident", json.dumps(cases)],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    found: dict[str, Any] = json.loads(result.stdout)
    return found


@pytest.mark.parametrize("number", range(len(PLANS)))
def test_what_is_resident_is_what_the_account_says(number: int) -> None:
    found = measured()["results"][number]
    assert found["rise_bytes"] <= found["account_bytes"] + BESIDES_BYTES
    # The device's part of the account is what no timing exceeds: a chunk and its gradients may never be there at once.
    least_bytes = found["account_bytes"] - (0 if PLANS[number]["n_persist"] == 5 else 2 * CHUNK_BYTES)
    assert found["rise_bytes"] >= least_bytes - BESIDES_BYTES


@pytest.mark.parametrize("forgotten", ["pinned_bytes", "state_bytes", "device_bytes"])
def test_the_measurement_tells_what_is_forgotten(forgotten: str) -> None:
    found = measured()["results"][1]
    assert found["rise_bytes"] > found["account_bytes"] - found[forgotten] + BESIDES_BYTES


@pytest.mark.skipif(torch.version.cuda is not None, reason="the constant is that of a torch without CUDA")
def test_a_process_takes_what_is_stated() -> None:
    stated = PROCESS_BYTES[DeviceKind.CPU]
    assert 0.5 * stated <= measured()["process_bytes"] <= 1.25 * stated
